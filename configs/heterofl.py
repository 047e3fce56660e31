"""HeteroFL: clients of different widths of one model."""

import re

import ml_collections

from configs import common
from fedjax_het.algorithms.heterofl_modes import parse_mode
from fedjax_het.experiment.config import group_spec

# Widths of four equal blocks of clients: SplitMix's and FeDepth's case
# studies', and those of FeDepth's tables.
EIGHTHS = dict(eighth='1/8', quarter='1/4', half='1/2', full='1')
FAIR = dict(sixth='1/6', third='1/3', half='1/2', full='1')
LACK = dict(eighth='1/8', sixth='1/6', half='1/2', full='1')


def one_model(config, sizes, method=None, **options):
  """Gives all groups the deepest model of a setting.

  Args:
    config: The config; its groups say which models, and how many clients.
    sizes: {group name: clients}, or a function of the number of clients.
    method: {group name: options of the method}; None for none.
    **options: Of the model, in every group.
  """
  specs = [group_spec(config, name) for name in config.groups]

  def depth(spec):
    digits = re.search(r'\d+$', spec.model)
    return int(digits[0]) if digits else spec.options.get('depth', 0)

  # Of FedIN's A to E, which have no number, the first, which is the largest.
  model, _, own, *_ = max(specs, key=depth)
  own = {k: v for k, v in own.items() if k not in config.model}
  total = sum(spec.clients for spec in specs)
  method = method or {}
  config.groups = ml_collections.ConfigDict({
      name: dict(
          model=model, clients=clients, **own, **options, **method.get(name, {})
      )
      for name, clients in (
          sizes(total) if callable(sizes) else sizes
      ).items()
  })


def quarters(names):
  """Equal blocks of clients; the first blocks take the remainder."""

  def sizes(total):
    share, rest = divmod(total, len(names))
    return {name: share + (i < rest) for i, name in enumerate(names)}

  return sizes


def fix(config, mode: str):
  """Widths by a mode string, for good."""
  mode = parse_mode(mode)
  rates = {name: dict(rate=str(rate)) for name, rate in mode.rates.items()}
  one_model(config, mode.fix, rates, **_narrower(config, mode))
  config.algorithm.levels = config.algorithm.odds = ()


def dynamic(config, mode: str):
  """Widths by a mode string, drawn by every client in every visit."""
  mode = parse_mode(mode)
  one_model(config, lambda total: dict(all=total), **_narrower(config, mode))
  config.algorithm.levels = tuple(map(str, mode.rates.values()))
  config.algorithm.odds = tuple(mode.weights.values())


def _narrower(config, mode):
  if mode.width == 1:
    return {}
  return dict(width=float(mode.width) * config.model.get('width', 1.0))


def _budgets(budgets):
  def apply(config):
    rates = {name: dict(rate=rate) for name, rate in budgets.items()}
    one_model(config, quarters(budgets), rates)
    config.algorithm.levels = config.algorithm.odds = ()

  return apply


def _dynamic(config):
  """Every client draws its width anew in every visit."""
  dynamic(config, 'a1-b1-c1-d1-e1')


def _set(**options):
  def apply(config):
    for name, value in options.items():
      config.algorithm[name] = value

  return apply


def _clip(config):
  """The gradient clipping of the paper."""
  config.local.clip_norm = 1.0


VARIANTS = dict(
    # Every client draws its width anew in every visit.
    dynamic=lambda config: dynamic(config, 'a1-b1-c1-d1-e1'),
    eighths=_budgets(EIGHTHS),
    fair=_budgets(FAIR),
    lack=_budgets(LACK),
    # The mean over holders alone, without Scaler and masked loss.
    plain=_set(scaler=False, mask='none'),
    # FeDepth's baseline: masked by the minibatch, weighted by examples.
    batch_mask=_set(mask='batch', weights='data'),
    clip=_clip,
)


def widths_config(method, arg, variants, prepare):
  """A method whose widths take the place of a setting's models.

  Args:
    method: A key of `ALGORITHMS`.
    arg: Names of variants, separated by commas.
    variants: The method's own, which here follow all of `common`'s.
    prepare: `(config, names of the variants)`, called before the variants.

  Returns:
    The config.
  """
  names = [name for name in arg.split(',') if name]
  config = common.get_config(
      method, arg, dict.fromkeys(variants, lambda config: None)
  )
  prepare(config, names)
  for name, variant in variants.items():
    if name in names:
      variant(config)
  return config


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
  of a ResNet152 (`resnet152` in the library), here they are of a ResNet26.

  Measured without variants, seed 0, two CPU cores: accuracy of the full width
  85.1 % after 20 rounds.

  Args:
    arg: Variants of `common` and of this file, separated by commas.

  Returns:
    The config.
  """
  return widths_config('heterofl', arg, VARIANTS, _prepare)
