"""Groups of clients that hold widths of one model, for width methods."""

import re

import ml_collections

from fedjax_het.configs import common
from fedjax_het.experiment.config import group_spec

# Widths of four equal blocks of clients: EIGHTHS as in SplitMix's study and
# FeDepth's case studies, FAIR and LACK as in FeDepth's tables.
EIGHTHS = dict(eighth='1/8', quarter='1/4', half='1/2', full='1')
FAIR = dict(sixth='1/6', third='1/3', half='1/2', full='1')
LACK = dict(eighth='1/8', sixth='1/6', half='1/2', full='1')
# HeteroFL's levels, as shares of the global model's width.
RATES = dict(a='1', b='1/2', c='1/4', d='1/8', e='1/16')


def one_model(config, sizes, method=None):
  """Gives all groups the deepest model of a setting.

  Args:
    config: The config, whose groups have the models and numbers of clients.
    sizes: {group name: clients}, or a function of the number of clients.
    method: {group name: options of the method}; None for none.
  """
  specs = [group_spec(config, name) for name in config.groups]

  def depth(spec):
    digits = re.search(r'\d+$', spec.model)
    return int(digits[0]) if digits else spec.options.get('depth', 0)

  # FedIN's A to E have no number; the first is the largest and is chosen.
  model, _, own, *_ = max(specs, key=depth)
  own = {k: v for k, v in own.items() if k not in config.model}
  total = sum(spec.clients for spec in specs)
  method = method or {}
  config.groups = ml_collections.ConfigDict({
      name: dict(model=model, clients=clients, **own, **method.get(name, {}))
      for name, clients in (
          sizes(total) if callable(sizes) else sizes
      ).items()
  })


def quarters(names):
  """A function to equal blocks of clients; the first take the remainder."""

  def sizes(total):
    share, rest = divmod(total, len(names))
    return {name: share + (i < rest) for i, name in enumerate(names)}

  return sizes


def proportional(odds):
  """Blocks of clients in proportion to `odds`; the last takes the remainder.

  Args:
    odds: {name: p}.

  Returns:
    `(number of clients N) -> {name: clients}`, floor(N / sum p) p each. It
    raises a ValueError if N is below the sum of the odds.
  """

  def sizes(total):
    parts = sum(odds.values())
    if total < parts:
      text = ', '.join(f'{name}={p}' for name, p in odds.items())
      raise ValueError(
          f'The levels {text} need at least {parts} clients, got {total}.'
      )
    clients = {name: total // parts * p for name, p in odds.items()}
    clients[[*odds][-1]] += total % parts
    return clients

  return sizes


def fixed(config, **odds):
  """Fixed widths: a group for each level, with the option `rate`.

  Args:
    config: The config.
    **odds: Weight of each level of `RATES`, in order: a=4, b=2, c=2, d=1, e=1
      are fix_a4-b2-c2-d1-e1 of HeteroFL's paper.
  """
  rates = {name: dict(rate=RATES[name]) for name in odds}
  one_model(config, proportional(odds), rates)


def blocks(config, option: str, shares):
  """Equal blocks of clients, one group each, with a share as its option."""
  method = {name: {option: share} for name, share in shares.items()}
  one_model(config, quarters(shares), method)


def rates(shares):
  """A variant: equal blocks of clients, each with a share as its `rate`."""
  return lambda config: blocks(config, 'rate', shares)


# Variants of methods with fixed widths.
RATES_OF_BLOCKS = dict(
    eighths=rates(EIGHTHS), fair=rates(FAIR), lack=rates(LACK)
)


def fixed_rates(config, names):
  """Fixed widths that fit to a setting, for `widths_config`.

  Args:
    config: The config.
    names: Names of its variants.
  """
  if 'quick' in names:
    fixed(config, a=1, b=1, c=1)
  elif 'fedepth' in names:
    rates(FAIR)(config)
  elif 'v2' in names:
    fixed(config, a=1, b=1, c=1, d=1, e=1)
  else:
    fixed(config, a=4, b=2, c=2, d=1, e=1)


def widths_config(method, arg, variants, prepare):
  """The config of a method whose widths replace a setting's models.

  Args:
    method: A key of `ALGORITHMS`.
    arg: Names of variants, separated by commas.
    variants: The method's own variants, applied after all of `common`'s.
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
