"""FedDF: averages inside architectures, and distillation between them."""

from fedjax_het.configs import common, fedmd

VARIANTS = dict(
    # The steps of the paper and its code, and the paper's averaging
    # coefficients. Its code has uniform ones.
    paper=common.set_options(server_steps=10_000, weights='data'),
)


def get_config(arg=''):
  """FedDF on the embedded digits, a tenth of them public, else as `fedin.py`.

  Run: `python -m launch.train --config=configs/feddf.py[:variant,...]`.

  Measured without variants, seed 0, one thread: mean client accuracy
  88.0 % after 20 rounds (`fedavg.py` with `aggregation='architecture'`, without
  the public examples: 87.7 %).

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  config = common.get_config('feddf', arg, VARIANTS)
  config.public_size = fedmd.PUBLIC[config.dataset]
  if 'quick' in arg.split(','):
    config.algorithm.server_steps = 5
  return config
