"""FeDepth beside training of the whole model, by settings of the training."""

from fedjax_het.configs.tables import (
  fedepth_middle,
  fedepth_nets,
  fedepth_table2,
)

from fedjax_het.reporting.results_table import Table

ROWS = (
    'FedAvg x1', 'FeDepth', 'HeteroFL masked', 'SplitMix masked', 'FedAvg x1/6',
)  # fmt: skip
# One column only.
UNSCALED = 'SplitMix masked without 1 / r'
SPLIT = 'cifar10 alpha 0.3'
# The nets of the authors' program.
NET_OF = {
    'FedAvg x1': 'FedAvg net',
    'FedAvg x1/6': 'FedAvg net',
    'HeteroFL masked': 'HeteroFL net',
    'SplitMix masked': 'FedAvg net',
    'FeDepth': 'FeDepth net',
}
OWN_NETS = (
    '100 rounds with the nets of the authors',
    '100 rounds with the nets of the authors at the rate 0.01',
    '200 rounds with the nets of the authors at the rate 0.01',
)
# What differs from a hundred rounds of two epochs. Plain images: in the
# authors' program clients see the same images in all visits. The rate 0.01: so
# have the authors' scripts. Running statistics: so has their program, unless a
# flag is set, as in its examples for FeDepth and HeteroFL; it has none for
# FedAvg.
COLUMNS = {
    '100 rounds': {},
    '200 rounds': {'num_rounds': 200},
    '200 rounds of plain images': {'num_rounds': 200, 'local.augment': 'none'},
    '30 rounds of ten epochs': {'num_rounds': 30, 'local.epochs': 10},
    OWN_NETS[0]: {},
    OWN_NETS[1]: {'local.learning_rate': 0.01},
    OWN_NETS[2]: {'num_rounds': 200, 'local.learning_rate': 0.01},
    '100 rounds at the rate 0.01': {'local.learning_rate': 0.01},
    '100 rounds with running statistics': {'model.norm': 'batch'},
}


def _cell(config, label, column):
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict(COLUMNS[column])
  if column not in OWN_NETS:
    return config
  return fedepth_nets.with_net(config, NET_OF[label])


def _unscaled(config):
  config = config.copy_and_resolve_references()
  config.algorithm.rescale = False
  return config


def get_table() -> Table:
  """Rows of Table 2, by rounds and settings of the local training.

  Run: `python -m launch.sweep --table=fedepth_rounds
  --reuse=results/fedepth_middle --data_dir=DIR`.

  Returns:
    The table; the paper's numbers are those of its 500 rounds of ten epochs.
  """
  middle = fedepth_middle.get_table().rows
  rows = {
      label: {
          name: _cell(middle[label][SPLIT], label, name) for name in COLUMNS
      }
      for label in ROWS
  }
  whole = rows['SplitMix masked']['100 rounds']
  rows[UNSCALED] = {'100 rounds': _unscaled(whole)}
  return Table(
      title='FeDepth, Table 2, by rounds and local training',
      setting=(
          f'{fedepth_table2.SETTING} {fedepth_table2.BUDGETS} CIFAR-10, '
          'Dirichlet 0.3. Here two epochs (a stage) where a column does '
          'not say ten, and the rate falls to the last round of each. "Plain '
          'images" are neither cropped nor flipped. With the nets of the '
          'authors each method has its own; SplitMix then multiplies outputs '
          'of convolutions by 6 in the test, too, where its authors do it in '
          'training only. Without 1 / r it never does, and draws kernels as '
          'the thin net does. With running statistics, norms are '
          'tested with statistics of the training, which the server averages; '
          "so does the authors' program unless a flag is set, as in its "
          'example commands, of which FedAvg has none.'
      ),
      rows=rows,
      paper={
          label: dict.fromkeys(COLUMNS, fedepth_table2.target(label, SPLIT))
          for label in ROWS
      },
      seeds=(0,),
      mean='clients',
      columns=tuple(COLUMNS),
  )
