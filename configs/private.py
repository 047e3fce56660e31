"""Local training only, the bound that federated methods must beat."""

from configs import common


def get_config(arg=''):
  """Private on the embedded digits, else as `fedin.py`.

  Run: `python -m launch.train --config=configs/private.py[:variant,...]`.

  Args:
    arg: Variants of `common`, separated by commas.

  Returns:
    The config.
  """
  return common.get_config('private', arg)
