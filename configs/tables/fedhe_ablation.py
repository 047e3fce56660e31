"""What decides whether FedHe helps: images, wrong labels, dropout, skew."""

import itertools

from fedjax_het.configs import fd, fedhe, private
from fedjax_het.reporting.results_table import Table

METHODS = {
    'Private': (private.get_config, ''),
    'FedHe': (fedhe.get_config, ''),
    'FedHe as coded': (fedhe.get_config, 'code'),
    'FD': (fd.get_config, ''),
}
# {words: value}, such as images per client; a column for each combination.
IMAGES = {f'{n} images': n for n in (100, 500, 5000)}
NOISE = {'right labels': 0.0, '30 % wrong': 0.3}
DROPOUT = {'dropout': None, 'no dropout': 0.0}  # None: as in the paper.
SPLITS = {'IID': '', 'Dirichlet 0.5': 'dirichlet'}
COLUMNS = {
    ' and '.join(words): [values[w] for values, w in zip(
        (IMAGES, NOISE, DROPOUT, SPLITS), words, strict=True
    )]
    for words in itertools.product(IMAGES, NOISE, DROPOUT, SPLITS)
}  # fmt: skip


def cell(
    method,
    images: int,
    noise: float = 0.0,
    dropout: float | None = None,
    split: str = '',
    models: str = 'homogeneous',
):
  """The config of a method of `METHODS` with values of `COLUMNS`."""
  get_config, variants = method
  config = get_config(f'fedhe,cifar10,cpu,{models},{variants},{split}')
  config.train_size = 10 * images
  config.label_noise = noise
  config.model.dropout = dropout
  # Rounds of 150 images: each client sees its images 150 times.
  config.num_rounds = images
  config.eval_every = config.checkpoint_every = images // 10
  return config


def get_table() -> Table:
  """Four rows, 24 columns, three seeds.

  Run: `python -m launch.sweep --table=fedhe_ablation --data_dir=DIR`, a part:
  `--cols=100_images_and_right_labels_and_dropout_and_iid --seeds=1`.

  Returns:
    The table; the setting is ours.
  """
  return Table(
      title='FedHe by images a client, wrong labels, dropout and skew',
      setting=(
          'CIFAR-10, ten clients, model 9 of FedHe with an eighth of its width '
          'everywhere, three minibatches of 50 a visit, Adam 1e-3, kept '
          'between visits. As many rounds as a client has images on average, '
          'so that it sees each 150 times, as in the paper. Wrong labels are '
          'another class at random. Four personal models are evaluated.'
      ),
      rows={
          name: {
              column: cell(method, *values)
              for column, values in COLUMNS.items()
          }
          for name, method in METHODS.items()
      },
      paper={},
      seeds=(0, 1, 2),
      mean='clients',
      columns=tuple(COLUMNS),
  )
