"""FedProx over clients of different architectures."""

from fedjax_het.configs import common

VARIANTS = dict(architecture=common.architecture)


def get_config(arg=''):
  """FedProx on the embedded digits, else as `fedin.py`.

  Run: `python -m launch.train --config=configs/fedprox.py[:variant,...]`.

  Measured without variants, seed 0, one thread: mean client accuracy
  94.7 % after 20 rounds.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return common.get_config('fedprox', arg, VARIANTS)
