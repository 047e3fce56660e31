"""Groups of clients that hold widths of one model, for methods over widths."""

import re

import ml_collections

from fedjax_het.algorithms.heterofl_modes import parse_mode
from fedjax_het.configs import common
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


def narrower(config, mode):
  """The model's option `width` of a mode whose largest rate is below 1."""
  if mode.width == 1:
    return {}
  return dict(width=float(mode.width) * config.model.get('width', 1.0))


def fixed(config, mode: str):
  """Fixed widths by a mode string: a group for each, option `rate`."""
  mode = parse_mode(mode)
  rates = {name: dict(rate=str(rate)) for name, rate in mode.rates.items()}
  one_model(config, mode.fix, rates, **narrower(config, mode))


def blocks(config, option: str, shares):
  """Equal blocks of clients, each with its share as a group's option."""
  method = {name: {option: share} for name, share in shares.items()}
  one_model(config, quarters(shares), method)


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
