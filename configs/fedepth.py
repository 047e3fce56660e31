"""FeDepth: the full model for everybody, trained part by part."""

import ml_collections

from configs import common

# What clients of a group can hold, as a share of the whole model; those of
# `quick` have a budget, too.
BUDGETS = dict(
    x1_8='1/8', x1_6='1/6', x1_3='1/3', x1_2='1/2', x1='1', x2='2', mlp4='1/2'
)


def _small(config):
  """Six blocks of 8, 16 and 32 channels; ten clients of three budgets."""
  config.groups = ml_collections.ConfigDict({
      name: dict(model='preresnet20', clients=clients, num_blocks=2)
      for name, clients in (('x1_3', 4), ('x1_2', 3), ('x1', 3))
  })
  config.model = ml_collections.ConfigDict(dict(width=0.5, norm='batch_only'))


def _scenario(**renamed):
  """Other budgets than Fair, for the same clients."""

  def apply(config):
    config.groups = ml_collections.ConfigDict(
        {renamed.get(n, n): g for n, g in config.groups.to_dict().items()}
    )

  return apply


def _set(**options):
  """A variant that sets options of the method."""

  def apply(config):
    for name, value in options.items():
      config.algorithm[name] = value

  return apply


VARIANTS = dict(
    # Budgets of the quarters; without one of these 1/6, 1/3, 1/2, 1 (Fair).
    lack=_scenario(x1_6='x1_8', x1_3='x1_6'),
    surplus=_scenario(x1='x2'),
    # m-FeDepth.
    own_heads=_set(heads='own'),
    # Blocks that fit nowhere are left out of the forward pass, and who did not
    # train a block counts in its mean, as in the authors' code.
    bypass=_set(partial='bypass', dilute=True),
    # All epochs together instead of each stage's.
    split=_set(epochs_mode='split'),
    # What frozen blocks make of an example is computed once a stage.
    cached=_set(cache_prefix=True),
)


def get_config(arg=''):
  """FeDepth on the embedded digits: ten clients of three budgets.

  Run: `python -m launch.train --config=configs/fedepth.py[:variant,...]`, the
  paper's case study with `fedepth`:
  `--config=configs/fedepth.py:fedepth,lack --config.data_dir=DIR`. What fits
  into which memory: `python -m launch.plan_memory --config=configs/fedepth.py`.

  Clients whose budget holds two models train two by mutual distillation. The
  authors hold a fifth of each client's examples out: `--config.validation=0.2`.

  Measured without variants, seed 0: accuracy 86.5 % after 20 rounds, 42 s of
  processor time, most of it compilation.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  config = common.get_config('fedepth', arg, VARIANTS, _small)
  named = [name for name in config.groups if name in BUDGETS]
  config.algorithm.budgets = ','.join(f'{n}:{BUDGETS[n]}' for n in named)
  if 'x2' in named:
    config.algorithm.mkd_models = 2
  return config
