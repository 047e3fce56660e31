"""FedDyn over clients of different architectures."""

from fedjax_het.configs import common

VARIANTS = dict(architecture=common.architecture)


def get_config(arg=''):
  """FedDyn on the embedded digits, else as `fedin.py`."""
  return common.get_config('feddyn', arg, VARIANTS)
