"""FedHe and others under three clocks, with slow devices, on MNIST."""

from fedjax_het.configs import fd, fedasync, fedavg, fedhe, fedmd
from fedjax_het.reporting.results_table import Table

CLOCKS = ('synchronous', 'async', 'sequential')
METHODS = {
    'FedHe': fedhe.get_config,
    'FedMD': fedmd.get_config,
    'FD': fd.get_config,
    'FedAsync': fedasync.get_config,
    'FedAvg': fedavg.get_config,
}


def _cell(get_config, mode: str):
  config = get_config(f'fedhe,mnist,cpu,homogeneous,{mode}')
  config.eval_every = config.checkpoint_every = 10
  return config


def get_table() -> Table:
  """Five methods under three clocks, with one net that all of them can use.

  Run: `python -m launch.sweep --table=fedhe_clock --data_dir=DIR`. Accuracy by
  virtual time is in times.png, against bytes in bytes.png.

  Returns:
    The table; the paper prints no numbers.
  """
  return Table(
      title='FedHe and others by the clock, MNIST',
      setting=(
          'Ten clients with 6,000 images each, IID, model 9 of FedHe with an '
          'eighth of its width, on five fast, three medium and two slow '
          'devices (1,000, 400 and 100 images a second, which is assumed); '
          'three minibatches of 50 a visit, Adam 1e-3, kept between visits, by '
          'FedAsync and FedAvg too; 600 uploads. Synchronous: rounds of ten '
          'that wait for the slowest; async: every device at its own pace; '
          'sequential: one client after another. The paper has full width and '
          '50,000 visits in sequence. FedMD trains an epoch on 6,000 public '
          'images and one on each client\'s own 5,400 before the clock starts, '
          'and digests 10 a round.'
      ),
      rows={
          name: {mode: _cell(get_config, mode) for mode in CLOCKS}
          for name, get_config in METHODS.items()
      },
      paper={},
      seeds=(0,),
      mean='clients',
      columns=CLOCKS,
  )
