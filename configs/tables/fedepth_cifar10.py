"""FeDepth's comparison on CIFAR-10, shortened for two CPU cores."""

from fedjax_het.configs.tables import fedepth_table2

from fedjax_het.reporting.results_table import Table

# The rows of one partition, the most important first.
ROWS = (
    'FedAvg x1', 'FeDepth', 'HeteroFL', 'SplitMix', 'm-FeDepth', 'FedAvg x1/6',
    'FeDepth Lack', 'FeDepth Surplus', 'm-FeDepth Lack', 'm-FeDepth Surplus',
    'HeteroFL masked', 'SplitMix masked',
)  # fmt: skip

# Rows that are also run at the learning rate of the authors' scripts.
SLOW = ('FedAvg x1', 'FedAvg x1/6', 'FeDepth', 'HeteroFL', 'SplitMix')


def methods(arg: str, rows=ROWS):
  """The rows of one partition."""
  return {
      name: get_config(f'{arg},{variants}')
      for name, (get_config, variants) in (
          (name, fedepth_table2.METHODS[name]) for name in rows
      )
  }


def _slow(config):
  """The learning rate of the authors' scripts; the paper prints 0.1."""
  config.local.learning_rate = 0.01
  return config


def get_table() -> Table:
  """Twelve rows for each of two partitions, some masked or at another rate.

  Run: `python -m launch.sweep --table=configs/tables/fedepth_cifar10.py
  --data_dir=DIR`. The row 'FeDepth, two labels' alone:
  `python -m launch.train --config=configs/fedepth.py:fedepth,cpu,beta
  --config.data_dir=DIR`.

  Returns:
    The table; the paper's numbers are those of its Table 2.
  """
  alpha = methods('fedepth,cpu')
  beta = methods('fedepth,cpu,beta', ROWS + fedepth_table2.FEW_LABELS)
  rows = dict(alpha)
  target = fedepth_table2.target
  paper = {name: target(name, 'cifar10 alpha 0.3') for name in alpha}
  for name, config in beta.items():
    rows[f'{name} beta(2)'] = config
    paper[f'{name} beta(2)'] = target(name, 'cifar10 beta 2')
  for name in SLOW:
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
          f'128. {fedepth_table2.MASKS}'
      ),
      rows=rows,
      paper=paper,
      seeds=(0,),
      mean='clients',
  )
