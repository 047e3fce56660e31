"""FedHe and local training if clients memorise their few examples."""

import ml_collections

from fedjax_het.configs import fd, fedavg, fedhe, private
from fedjax_het.reporting.results_table import Table

METHODS = {
    'Private': (private.get_config, ''),
    'FedHe': (fedhe.get_config, ''),
    'FedHe as coded': (fedhe.get_config, 'code'),
    'FD': (fd.get_config, ''),
    'FedAvg': (fedavg.get_config, ''),
}
# Norm policy, and share of wrong labels.
COLUMNS = {
    'batch norm': ('batch', 0.0),
    'batch norm and 30 % wrong labels': ('batch', 0.3),
    'no norm': ('none', 0.0),
    'no norm and 30 % wrong labels': ('none', 0.3),
}


def _config(get_config, variants: str, norm: str, label_noise: float):
  config = get_config(f'fedhe,mnist,{variants}')
  config.groups = ml_collections.ConfigDict(dict(mlp=10))
  config.model = ml_collections.ConfigDict(dict(hidden=64, norm=norm))
  config.train_size = 1000
  config.label_noise = label_noise
  config.num_rounds = 200
  config.eval_every = 20
  return config


def get_table() -> Table:
  """Five rows, four columns, three seeds; less than a minute per cell.

  Run: `python -m launch.sweep --table=configs/tables/fedhe_memorising.py
  --data_dir=DIR`.

  Returns:
    The table; the setting is ours.
  """
  return Table(
      title='FedHe where clients memorise: few examples, wrong labels',
      setting=(
          'MNIST, ten clients of 100 images each, IID, a dense net of two '
          'layers of 64 units everywhere, with batch norm, as the nets of '
          'FedHe have it, or without; 200 rounds of three minibatches of 50, '
          'so that a client sees its images 300 times; Adam 1e-3, kept between '
          'visits by all methods. Wrong labels are another class at random.'
      ),
      rows={
          name: {
              column: _config(*method, *net)
              for column, net in COLUMNS.items()
          }
          for name, method in METHODS.items()
      },
      paper={},
      seeds=(0, 1, 2),
      columns=tuple(COLUMNS),
  )
