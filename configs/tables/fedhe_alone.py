"""Does FedHe need other clients? One that receives its own class means."""

from typing import NamedTuple

from fedjax_het.configs.tables import fedhe_ablation, fedhe_width

from fedjax_het.reporting.results_table import Table


class _Column(NamedTuple):
  """A column of another table, with another number of clients."""

  table: Table
  name: str
  clients: int = 1


_ABLATION, _WIDTH = fedhe_ablation.get_table(), fedhe_width.get_table()
_FITTED = '500 images and right labels and no dropout and IID'
COLUMNS = {
    'ten clients and 500 images and no dropout': _Column(
        _ABLATION, _FITTED, 10
    ),
    'one client and 500 images and no dropout': _Column(_ABLATION, _FITTED),
    'one client and 500 images and 30 % wrong': _Column(
        _ABLATION, '500 images and 30 % wrong and dropout and IID'
    ),
    'one client and 5000 images': _Column(
        _ABLATION, '5000 images and right labels and dropout and IID'
    ),
    'one client and 5000 images and 30 % wrong': _Column(
        _ABLATION, '5000 images and 30 % wrong and dropout and IID'
    ),
    'one client and 5000 images and no dropout': _Column(
        _ABLATION, '5000 images and right labels and no dropout and IID'
    ),
    'one client and 5000 images and no dropout and 30 % wrong': _Column(
        _ABLATION, '5000 images and 30 % wrong and no dropout and IID'
    ),
    'one client and 5000 images and width 1': _Column(
        _WIDTH, 'width 1 and 5000 images'
    ),
}
# (Row of these tables, options that differ); in all columns the first two.
ROWS = {
    'Private': ('Private', {}),
    'FedHe': ('FedHe', {}),
    'FedHe as coded': ('FedHe as coded', {}),
    'FedHe of the last uploads': (
        'FedHe', dict(store='latest', plus_one=False)
    ),
    'FedHe with a tenth of the logit loss': (
        'FedHe', dict(distill_weight=0.1)
    ),
    'FD': ('FD', {}),
}  # fmt: skip


def _cell(row: str, column: _Column):
  method, options = ROWS[row]
  config = column.table.rows[method][column.name].copy_and_resolve_references()
  config.algorithm.update(options)
  ((model, before),) = config.groups.items()
  config.groups[model] = column.clients
  config.train_size = config.train_size // before * column.clients
  return config


def _belongs(row: str, column: _Column) -> bool:
  if row in ('Private', 'FedHe'):
    return True
  # FD leaves a client's own probabilities out: alone it is local training.
  trains_alone = row == 'FD' and column.clients == 1
  return column.name == _FITTED and not trains_alone


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
