"""FCCL: cross-correlation of logits on a public set without labels."""

from fedjax_het.configs import common, fedmd

VARIANTS = dict(
    # The authors' first code: the client's part of the target is from its
    # model before the visit.
    previous=common.set_options(target='previous'),
)


def get_config(arg=''):
  """FCCL on the embedded digits, a tenth of them public, else as `fedin.py`.

  Run: `python -m launch.train --config=configs/fccl.py[:variant,...]`.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  config = common.get_config('fccl', arg, VARIANTS)
  config.public_size = fedmd.PUBLIC[config.dataset]
  names = arg.split(',')
  if 'cpu' in names or 'quick' in names:
    config.algorithm.pretrain_epochs = 2
  return config
