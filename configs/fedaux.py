"""FedAUX: FedDF whose ensemble is weighted by the clients' certainty."""

from fedjax_het.configs import common, fedmd


def get_config(arg=''):
  config = common.get_config('fedaux', arg, {})
  config.public_size = fedmd.PUBLIC[config.dataset]
  if 'quick' in arg.split(','):
    config.algorithm.server_steps = 5
  return config
