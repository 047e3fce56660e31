"""FedAT: tiers of clients train at their own pace."""

from fedjax_het.configs import common


def _of_tiers(config):
  """As many uploads as 20 rounds of all ten clients, three a round."""
  config.num_rounds = 66


def get_config(arg=''):
  """FedAT on the embedded digits, else as `fedin.py`, with stragglers.

  Each of the three groups is a tier. The devices are dealt out in the order of
  the groups' names: `mini_resnet10` has fast ones, `mini_resnet6` fast and
  medium ones, `mini_resnet8` medium and slow ones. A round is one of a tier,
  and three of its clients take part. The variants `synchronous`, `async` and
  `sequential` run other clocks.

  Run: `python -m launch.train --config=configs/fedat.py[:variant,...]`.

  Measured without variants, seed 0, one thread: mean client accuracy 71.9 %
  after 198 uploads, 29.4 s of virtual time; with `--config.num_rounds=450`
  95.0 % after 200 s.

  Args:
    arg: Variants of `common`, separated by commas.

  Returns:
    The config.
  """
  names = [name for name in arg.split(',') if name]
  if not any(name in names for name in common.CLOCKS):
    names.append('tiers')
  default = _of_tiers if 'tiers' in names else lambda config: None
  return common.get_config('fedat', ','.join(names), default=default)
