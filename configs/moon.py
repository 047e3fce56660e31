"""MOON over clients of different architectures."""

import ml_collections

from fedjax_het.configs import common


def _paper(config):
  """The paper on CIFAR-10: ten clients of simple-CNN with projection head."""
  if config.dataset == 'digits':
    common.DATA['cifar10'](config)
  config.groups = ml_collections.ConfigDict(dict(simple_cnn=10))
  config.model = ml_collections.ConfigDict(dict(projection=True))
  if 'min_size' in config.partition:
    config.partition.min_size = 64  # A batch.
  config.cohort_size = None
  config.num_rounds = 100
  config.local.epochs = 10
  config.local.batch_size = 64
  config.local.optimizer = 'sgd'
  config.local.learning_rate = 0.01
  config.local.momentum = 0.9
  config.local.weight_decay = 1e-5
  config.local.drop_last = True
  config.local.augment = 'crop_flip'  # The paper's crop pads by reflection.
  config.algorithm.contrast_weight = 5.0
  config.algorithm.weights = 'data'


VARIANTS = dict(architecture=common.architecture, paper=_paper)


def get_config(arg=''):
  """MOON on the embedded digits, else as `fedin.py`.

  Run: `python -m launch.train --config=configs/moon.py[:variant,...]`.

  Measured without variants, seed 0, one thread: mean client accuracy
  92.2 % after 20 rounds.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return common.get_config('moon', arg, VARIANTS)
