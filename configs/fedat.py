"""FedAT: tiers of clients train at their own pace."""

from fedjax_het.configs import common


def _small(config):
  """As many uploads as 20 rounds of all ten clients, three a round."""
  config.num_rounds = 66
  config.eval_every = 3
  config.checkpoint_every = 15


def get_config(arg=''):
  """FedAT on the embedded digits, else as `fedin.py`, with stragglers.

  Each of the three groups is a tier: the smallest nets are on fast devices, the
  largest on slow ones. A round is one of a tier, and three of its clients take
  part. The variants `synchronous`, `async` and `sequential` run other clocks.

  Run: `python -m launch.train --config=configs/fedat.py[:variant,...]`.

  Args:
    arg: Variants of `common`, separated by commas.

  Returns:
    The config.
  """
  names = [name for name in arg.split(',') if name]
  if not any(name in names for name in common.CLOCKS):
    names.append('tiers')
  return common.get_config('fedat', ','.join(names), default=_small)
