"""FedAT: tiers of clients train at their own pace."""

from fedjax_het.configs import common


def _paper(config):
  """Ten clients of a tier a round, three epochs of Adam at batches of ten."""
  config.cohort_size = 10
  config.local.epochs = 3
  config.local.batch_size = 10
  config.local.optimizer = 'adam'
  config.local.learning_rate = 1e-3
  config.local.momentum = 0.0


VARIANTS = dict()


def get_config(arg=''):
  """FedAT on the embedded digits, else as `fedin.py`, with stragglers.

  Each of the three groups is a tier: the smallest nets are on fast devices, the
  largest on slow ones. A round is one of a tier, and three of its clients take
  part. The variants `synchronous`, `async` and `sequential` run other clocks.

  Run: `python -m launch.train --config=configs/fedat.py[:variant,...]`.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  names = [name for name in arg.split(',') if name]
  if not any(name in names for name in common.CLOCKS):
    names.append('tiers')
  return common.get_config('fedat', ','.join(names), VARIANTS)
