"""Groups of clients that hold widths of one model, for width methods."""

from fractions import Fraction
import re
from typing import NamedTuple

import ml_collections

from fedjax_het.configs import common
from fedjax_het.experiment.config import group_spec

# Widths of four equal blocks of clients: EIGHTHS as in SplitMix's study and
# FeDepth's case studies, FAIR and LACK as in FeDepth's tables.
EIGHTHS = dict(eighth='1/8', quarter='1/4', half='1/2', full='1')
FAIR = dict(sixth='1/6', third='1/3', half='1/2', full='1')
LACK = dict(eighth='1/8', sixth='1/6', half='1/2', full='1')
# Widths of the letters of HeteroFL's mode strings.
RATES = {letter: Fraction(1, 2**i) for i, letter in enumerate('abcde')}


class Mode(NamedTuple):
  """A parsed mode string.

  Attributes:
    width: The global model's width r_g, which is that of the first letter: a=1,
      b=1/2, c=1/4, d=1/8, e=1/16.
    rates: {letter: width of that level as a share of the global model's}.
    odds: {letter: p}, relative numbers of clients, or odds of drawing a level.
  """

  width: Fraction
  rates: dict[str, Fraction]
  odds: dict[str, int]

  def fix(self, num_clients: int) -> dict[str, int]:
    """Assigns each client a fixed level, in blocks of ids.

    Args:
      num_clients: N.

    Returns:
      {letter: clients}, floor(N / sum p) * p; the last level takes the rest.

    Raises:
      ValueError: If there are fewer clients than the sum of the odds.
    """
    total = sum(self.odds.values())
    if num_clients < total:
      text = '-'.join(f'{letter}{p}' for letter, p in self.odds.items())
      raise ValueError(
          f'The mode {text!r} needs at least {total} clients, got '
          f'{num_clients}.'
      )
    sizes = {k: num_clients // total * p for k, p in self.odds.items()}
    sizes[[*sizes][-1]] += num_clients - sum(sizes.values())
    return sizes


def parse_mode(text: str) -> Mode:
  """Reads a mode string such as 'a4-b2-c2-d1-e1'.

  Args:
    text: Levels from the widest on, each a letter from a to e and an integer p.

  Returns:
    The mode.

  Raises:
    ValueError: If the string is not of this form.

  References:
    Diao et al., `HeteroFL <https://arxiv.org/abs/2010.01264>`_, ICLR 2021, and
    its code, `split_mode` and `model_mode`.
  """
  levels = text.split('-')
  letters = [level[:1] for level in levels]
  if (
      not all(re.fullmatch('[a-e][1-9][0-9]*', level) for level in levels)
      or sorted(set(letters)) != letters
  ):
    raise ValueError(
        f'Unknown mode {text!r}; it must list levels from a (1) to e (1/16) '
        "with their weights in this order, such as 'a4-b2-c2-d1-e1'."
    )
  width = RATES[letters[0]]
  return Mode(
      width,
      {letter: RATES[letter] / width for letter in letters},
      {level[0]: int(level[1:]) for level in levels},
  )


def one_model(config, sizes, method=None, **options):
  """Gives all groups the deepest model of a setting.

  Args:
    config: The config, whose groups have the models and numbers of clients.
    sizes: {group name: clients}, or a function of the number of clients.
    method: {group name: options of the method}; None for none.
    **options: Options of the model in every group.
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
      name: dict(
          model=model, clients=clients, **own, **options, **method.get(name, {})
      )
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


def narrower(config, mode):
  """The model's option `width` if the mode's largest width is below 1."""
  if mode.width == 1:
    return {}
  return dict(width=float(mode.width) * config.model.get('width', 1.0))


def fixed(config, mode: str):
  """Fixed widths from a mode string: one group per width, option `rate`."""
  mode = parse_mode(mode)
  rates = {name: dict(rate=str(rate)) for name, rate in mode.rates.items()}
  one_model(config, mode.fix, rates, **narrower(config, mode))


def blocks(config, option: str, shares):
  """Equal blocks of clients, one group each, with a share as its option."""
  method = {name: {option: share} for name, share in shares.items()}
  one_model(config, quarters(shares), method)


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
