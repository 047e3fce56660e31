"""HeteroFL: clients of different widths of one model."""

from fedjax_het.configs.widths import (
  EIGHTHS,
  FAIR,
  LACK,
  blocks,
  fixed,
  narrower,
  one_model,
  parse_mode,
  widths_config,
)

from fedjax_het.configs import common


def fix(config, mode: str):
  """Fixed widths from a mode string."""
  fixed(config, mode)
  config.algorithm.levels = config.algorithm.odds = ()


def dynamic(config, mode: str):
  """Widths from a mode string; every client draws one in every visit."""
  mode = parse_mode(mode)
  one_model(config, lambda total: dict(all=total), **narrower(config, mode))
  config.algorithm.levels = tuple(map(str, mode.rates.values()))
  config.algorithm.odds = tuple(mode.odds.values())


def _budgets(budgets):
  def apply(config):
    blocks(config, 'rate', budgets)
    config.algorithm.levels = config.algorithm.odds = ()

  return apply


def _dynamic(config):
  """Every client draws a new width in every visit."""
  dynamic(config, 'a1-b1-c1-d1-e1')


def _clip(config):
  """The gradient clipping of the paper."""
  config.local.clip_norm = 1.0


VARIANTS = dict(
    # Every client draws a new width in every visit.
    dynamic=lambda config: dynamic(config, 'a1-b1-c1-d1-e1'),
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
    fix(config, 'a1-b1-c1')
  elif 'fedepth' in names:
    _budgets(FAIR)(config)
  elif 'v2' in names:
    dynamic(config, 'a1-b1-c1-d1-e1')
  else:
    fix(config, 'a4-b2-c2-d1-e1')


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
