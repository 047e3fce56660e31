"""Does FedHe need other clients? One that receives its own class means."""

from typing import NamedTuple

from fedjax_het.configs.tables import fedhe_ablation

from fedjax_het.configs import fedhe
from fedjax_het.reporting.results_table import Table


class _Column(NamedTuple):
  """A setting; rounds None is as many as a client has images.

  Dropout None is the paper's.
  """

  images: int
  clients: int = 1
  noise: float = 0.0
  dropout: float | None = None
  width: float = 0.125
  rounds: int | None = None


COLUMNS = {
    'ten clients and 500 images and no dropout': _Column(500, 10, dropout=0.0),
    'one client and 500 images and no dropout': _Column(500, dropout=0.0),
    'one client and 500 images and 30 % wrong': _Column(500, noise=0.3),
    'one client and 5000 images': _Column(5000),
    'one client and 5000 images and 30 % wrong': _Column(5000, noise=0.3),
    'one client and 5000 images and no dropout': _Column(5000, dropout=0.0),
    'one client and 5000 images and no dropout and 30 % wrong': _Column(
        5000, noise=0.3, dropout=0.0
    ),
    'one client and 5000 images and width 1': _Column(
        5000, width=1.0, rounds=2000
    ),
}
# (Method, options that differ from its own); the first two for all columns, the
# others for those with 500 images and no dropout.
ROWS = {
    'Private': (fedhe_ablation.METHODS['Private'], {}),
    'FedHe': (fedhe_ablation.METHODS['FedHe'], {}),
    'FedHe as coded': (fedhe_ablation.METHODS['FedHe as coded'], {}),
    'FedHe of the last uploads': (
        (fedhe.get_config, 'latest'), {'plus_one': False}
    ),
    'FedHe with a tenth of the logit loss': (
        fedhe_ablation.METHODS['FedHe'], {'distill_weight': 0.1}
    ),
    'FD': (fedhe_ablation.METHODS['FD'], {}),
}  # fmt: skip


def _cell(row: str, column: _Column):
  method, options = ROWS[row]
  config = fedhe_ablation.cell(
      method, column.images, column.noise, column.dropout
  )
  config.algorithm.update(options)
  config.groups = {name: column.clients for name in config.groups}
  config.train_size = column.clients * column.images
  config.model.width = column.width
  if column.rounds is not None:
    config.num_rounds = column.rounds
    config.eval_every = config.checkpoint_every = 200  # As in `fedhe_width`.
  return config


def _belongs(row: str, column: _Column) -> bool:
  if row in ('Private', 'FedHe'):
    return True
  # FD leaves a client's own probabilities out: alone it is local training.
  alone = column.clients == 1
  return (
      (column.images, column.dropout) == (500, 0.0)
      and not (row == 'FD' and alone)
  )  # fmt: skip


def get_table() -> Table:
  """Two rows, eight columns; four more rows for two of them; three seeds.

  Run: `python -m launch.sweep --table=fedhe_alone --data_dir=DIR`. The same
  with ten clients are columns of `fedhe_ablation` and `fedhe_width`.

  Returns:
    The table; the setting is ours.
  """
  return Table(
      title='FedHe with one client: whose targets, how old, how strong',
      setting=(
          'CIFAR-10, IID, model 9 of FedHe with an eighth of its width, three '
          'minibatches of 50 a visit, Adam 1e-3, kept between visits, as many '
          'rounds as a client has images, so that it sees each 150 times; at '
          'width 1 2,000 rounds, 60 times. Dropout as in the paper, and right '
          'labels, unless a column says otherwise. A client that is the only '
          'one receives the class means of its own earlier logits. "Of the '
          'last uploads": the server averages only the last upload of each '
          'client, and clients divide by V, not V + 1. Of ten clients four '
          'are evaluated.'
      ),
      rows={
          row: {
              name: _cell(row, column)
              for name, column in COLUMNS.items()
              if _belongs(row, column)
          }
          for row in ROWS
      },
      paper={},
      seeds=(0, 1, 2),
      mean='clients',
      columns=tuple(COLUMNS),
  )
