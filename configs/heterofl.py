"""HeteroFL: clients of different widths of one model."""

from fedjax_het.configs.widths import (
  EIGHTHS,
  FAIR,
  LACK,
  RATES,
  blocks,
  fixed,
  one_model,
  widths_config,
)

from fedjax_het.configs import common


def _fixed(config, **odds):
  """Fixed widths, see `widths.fixed`."""
  fixed(config, **odds)
  config.algorithm.levels = config.algorithm.odds = ()


def _dynamic(config):
  """Every client draws its width anew in every visit, all equally likely."""
  one_model(config, lambda total: dict(all=total))
  config.algorithm.levels = tuple(RATES.values())
  config.algorithm.odds = (1,) * len(RATES)


def _budgets(budgets):
  def apply(config):
    blocks(config, 'rate', budgets)
    config.algorithm.levels = config.algorithm.odds = ()

  return apply


def _clip(config):
  """The gradient clipping of the paper."""
  config.local.clip_norm = 1.0


VARIANTS = dict(
    dynamic=_dynamic,
    eighths=_budgets(EIGHTHS),
    fair=_budgets(FAIR),
    lack=_budgets(LACK),
    # Only the mean over holders, without Scaler and masked loss.
    plain=common.set_options(scaler=False, mask='none'),
    # FeDepth's baseline: loss masked by the minibatch's labels, averages
    # weighted by examples.
    batch_mask=common.set_options(mask='batch', weights='data'),
    clip=_clip,
)


def _prepare(config, names):
  if 'quick' in names:
    _fixed(config, a=1, b=1, c=1)
  elif 'fedepth' in names:
    _budgets(FAIR)(config)
  elif 'v2' in names:
    _dynamic(config)
  else:
    _fixed(config, a=4, b=2, c=2, d=1, e=1)


def get_config(arg=''):
  """HeteroFL on the embedded digits: five widths of one ResNet, 10 clients.

  Run: `python -m launch.train --config=configs/heterofl.py[:variant,...]`,
  such as `--config=configs/heterofl.py:v2,fair`. FedIN v2 compares with widths
  of a ResNet152 (`resnet152` in the library); with `v2` they are of a ResNet26.

  Measured without variants, seed 0, one thread: accuracy of the full width
  85.1 % after 20 rounds.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return widths_config('heterofl', arg, VARIANTS, _prepare)
