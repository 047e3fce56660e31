"""FeDepth's comparison on the nets of its authors' program."""

from fedjax_het.configs.tables import _papers, fedepth_table2

from fedjax_het.reporting.results_table import Table

SCALES = _papers.SCALES
ROWS = ('FedAvg x1', 'FedAvg x1/6', 'FeDepth', 'SplitMix')
UNSCALED = 'SplitMix without 1 / r'
COLUMN = 'cifar10 alpha 0.3'
# The nets of the authors' program (`fedepth_table2.SETTING` says how they
# differ); SplitMix's bases are FedAvg's net.
NETS = {
    'FeDepth net': {},
    'HeteroFL net': dict(preact_shortcut=False),
    'FeDepth net without final norm': dict(final_norm=False),
    'FedAvg net': dict(
        preact_shortcut=False, stem_bias=True, final_norm=False
    ),
}
# {column: (net, rate)}: the paper's rate, and that of the authors' scripts.
COLUMNS = {net: (net, 0.1) for net in NETS} | {
    f'{net} at 0.01': (net, 0.01) for net in ('FeDepth net', 'FedAvg net')
}


def with_net(config, net: str):
  """A copy with one of `NETS`."""
  config = config.copy_and_resolve_references()
  if 'preact_shortcut' in config.model:  # The dense nets of `quick` have none.
    config.model.update(NETS[net])
  if config.algorithm.name == 'splitmix':
    # Without the last norm the factor 1 / r reaches the classifier.
    config.algorithm.rescale_test = NETS[net].get('final_norm') is False
  return config


def _cell(config, label: str, net: str, rate: float):
  config = _papers.with_rate(with_net(config, net), rate)
  if label == UNSCALED:
    config.algorithm.rescale = False
  return config


def get_table(scale: str = SCALES[0]) -> Table:
  """Methods of Table 2 by net and learning rate.

  Run: `python -m launch.sweep --table=fedepth_nets --scale=cpu
  --data_dir=DIR`; with `--reuse=results/fedepth_rates/cpu` most cells of
  FeDepth's net are copied. SplitMix on FedAvg's net at 0.1 fails in round 1,
  which the command reports after all other cells have run.

  Args:
    scale: One of `SCALES`.

  Returns:
    The table, of CIFAR-10 with Dirichlet 0.3.
  """
  configs = fedepth_table2.of_column(ROWS, COLUMN, scale)
  configs[UNSCALED] = configs['SplitMix']
  return Table(
      title="FeDepth: the nets of the authors' program",
      setting=_papers.in_words(
          scale,
          f'CIFAR-10, balanced Dirichlet 0.3. {fedepth_table2.UNMASKED} '
          f'{fedepth_table2.BUDGETS} Here all methods of a column have '
          "one of these nets, and the rate 0.01 of the authors' scripts where "
          'it is named. SplitMix multiplies outputs of convolutions by '
          '1 / r = 6 in training; on nets without the last norm, which this '
          'makes another function, here in the test, too, in the '
          "authors' program not. Without 1 / r it never does, and draws "
          "kernels as the thin net does. On FedAvg's net at the rate 0.1 "
          "SplitMix's first round has updates that are not finite.",
          fedepth_table2.CPU,
      ),
      rows={
          label: {
              name: _cell(config, label, net, rate)
              for name, (net, rate) in COLUMNS.items()
          }
          for label, config in configs.items()
      },
      paper={},
      seeds=(0,),
      columns=tuple(COLUMNS),
      mean='clients',
  )
