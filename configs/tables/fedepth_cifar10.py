"""FeDepth's comparison on CIFAR-10, shortened for two CPU cores."""

from configs import fedavg, fedepth, heterofl, splitmix
from fedjax_het.experiment.sweep import Table

# The paper's Table 2, balanced Dirichlet 0.3 and two labels a client.
PAPER = {
    'FedAvg x1': (61.00, 32.72),
    'FedAvg x1/6': (48.82, 24.94),
    'HeteroFL': (52.08, 26.68),
    'SplitMix': (54.80, 28.88),
    'FeDepth': (59.79, 29.14),
    'm-FeDepth': (58.89, 30.50),
    'FeDepth Lack': (56.79, 28.89),
    'm-FeDepth Lack': (57.72, 28.22),
    'FeDepth Surplus': (59.82, 30.79),
    'm-FeDepth Surplus': (60.76, 31.34),
}


def _without_masks(config):
  """The loss of all the others: FeDepth's scripts switch the masks off."""
  config.algorithm.mask = 'none'
  return config


def _narrow(config):
  """What the poorest of the Fair clients can hold, for everybody."""
  config.model.width = 1 / 6
  return config


def methods(arg: str):
  """The rows of one partition, in the order of the paper's table."""
  return {
      'FedAvg x1': fedavg.get_config(arg),
      'FeDepth': fedepth.get_config(arg),
      'HeteroFL': _without_masks(heterofl.get_config(f'{arg},fair')),
      'SplitMix': _without_masks(splitmix.get_config(f'{arg},fair')),
      'm-FeDepth': fedepth.get_config(f'{arg},own_heads'),
      'FedAvg x1/6': _narrow(fedavg.get_config(arg)),
      'FeDepth Lack': fedepth.get_config(f'{arg},lack'),
      'FeDepth Surplus': fedepth.get_config(f'{arg},surplus'),
      'm-FeDepth Lack': fedepth.get_config(f'{arg},own_heads,lack'),
      'm-FeDepth Surplus': fedepth.get_config(f'{arg},own_heads,surplus'),
  }


def _slow(config):
  """The learning rate of the authors' scripts; the paper prints 0.1."""
  config.local.learning_rate = 0.01
  return config


def get_table() -> Table:
  """Ten rows for each of two partitions, and some at the other rate.

  Run: `python -m launch.sweep --table=configs/tables/fedepth_cifar10.py
  --data_dir=DIR`. The row 'FeDepth, two labels' alone:
  `python -m launch.train --config=configs/fedepth.py:fedepth,cpu,beta
  --config.data_dir=DIR`.

  Returns:
    The table; the paper's numbers are those of its Table 2.
  """
  alpha, beta = methods('fedepth,cpu'), methods('fedepth,cpu,beta')
  rows = dict(alpha)
  paper = {name: f'{first:.2f}' for name, (first, _) in PAPER.items()}
  for name, config in beta.items():
    rows[f'{name} beta(2)'] = config
    paper[f'{name} beta(2)'] = f'{PAPER[name][1]:.2f}'
  for name in ('FedAvg x1', 'FeDepth', 'HeteroFL', 'SplitMix'):
    rows[f'{name} lr 0.01'] = _slow(methods('fedepth,cpu')[name])
  return Table(
      title='FeDepth and the width methods on CIFAR-10',
      setting=(
          'PreResNet-20, 100 clients of 500 images, ten a round, SGD with '
          'momentum 0.9 and a cosine schedule from 0.1 (rows "lr 0.01" from '
          'there), crops and flips, batch statistics in the test, too. A '
          'quarter of the clients each hold 1/6, 1/3, 1/2 and all of the '
          'model (Fair); 1/8, 1/6, 1/2 and all (Lack); 1/6, 1/3, 1/2 and '
          'twice (Surplus). Balanced Dirichlet 0.3, or two labels a client '
          'where a row says beta(2). 20 rounds of one epoch (a stage) at '
          'batch 32, where the paper has 500 rounds of ten epochs at batch '
          '128. HeteroFL and SplitMix with the plain cross-entropy of the '
          'others.'
      ),
      rows=rows,
      paper=paper,
      seeds=(0,),
  )
