"""Local training only, the baseline of federated methods."""

import ml_collections

from fedjax_het.configs import common


def _similarity(config):
  """Twenty clients of a 14-layer ResNet, two classes each (FeDepth's Fig. 6).

  For `python -m launch.similarity`; the paper does not describe the training.
  """
  config.groups = ml_collections.ConfigDict(dict(resnet14_mnist=20))
  common.SPLITS['beta'](config)
  config.num_rounds = 2
  config.eval_every = 2
  config.eval_clients_per_group = 4
  config.local.epochs = 1


VARIANTS = dict(similarity=_similarity)


def get_config(arg=''):
  """Private on the embedded digits, else as `fedin.py`.

  Run: `python -m launch.train --config=configs/private.py[:variant,...]`.

  Measured without variants, seed 0, one thread: mean client accuracy
  63.4 % after 20 rounds.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return common.get_config('private', arg, VARIANTS)
