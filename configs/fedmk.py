"""FedMK: clients upload learned examples, on which the server trains."""

from fedjax_het.configs import common

VARIANTS = dict()


def get_config(arg=''):
  """FedMK."""
  return common.get_config('fedmk', arg, VARIANTS)
