"""ScaleFL: clients of different widths and depths of one model."""

from fedjax_het.configs.widths import one_model, quarters, widths_config

# The authors' code has exits after 30, 38 and 46 of 54 blocks and at the end.
# The first level here, after 22 blocks, is added for FedIN v2's five groups.
FIVE = dict(
    a=dict(rate='0.7', exit='11/27'),
    b=dict(rate='0.7', exit='5/9'),
    c=dict(rate='0.7', exit='19/27'),
    d=dict(rate='0.75', exit='23/27'),
    e=dict(rate='1', exit='1'),
)
FOUR = {name: FIVE[name] for name in 'bcde'}
# For small nets, which have few blocks.
THREE = dict(
    a=dict(rate='0.7', exit='1/2'),
    b=dict(rate='0.75', exit='3/4'),
    c=dict(rate='1', exit='1'),
)


def _levels(levels):
  """Assigns one level to each of several equal blocks of clients."""
  return lambda config: one_model(config, quarters(levels), levels)


def _without_distillation(config):
  """Exits learn only from labels, the default of the authors' code."""
  config.algorithm.distill_weight = 0.0


def _code(config):
  """The distillation gradient also flows into the last exit."""
  config.algorithm.detach = False


VARIANTS = dict(
    four=_levels(FOUR),
    wo_distillation=_without_distillation,
    code=_code,
)


def _prepare(config, names):
  levels = THREE
  if 'quick' not in names and {'v2', 'fedepth'} & {*names}:
    levels = FIVE if 'v2' in names else FOUR
  _levels(levels)(config)


def get_config(arg=''):
  """ScaleFL on the embedded digits: three levels of one ResNet, 10 clients.

  Run: `python -m launch.train --config=configs/scalefl.py[:variant,...]`. With
  `v2` there are five levels, each for a fifth of the clients; FedIN v2's are of
  a ResNet152 (`resnet152` in the library), here they are of a ResNet26.

  Measured without variants, seed 0, one thread: mean accuracy of the levels
  87.2 %, of the clients 86.3 %, of the full net 85.9 %, after 20 rounds.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return widths_config('scalefl', arg, VARIANTS, _prepare)
