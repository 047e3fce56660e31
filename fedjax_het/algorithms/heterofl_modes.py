"""HeteroFL's mode strings: levels of width, and how many clients have each."""

from fractions import Fraction
import re
from typing import NamedTuple

RATES = {letter: Fraction(1, 2**i) for i, letter in enumerate('abcde')}


class Mode(NamedTuple):
  """What a mode string says.

  Attributes:
    width: The global model's width r_g, the first letter's: a=1, b=1/2,
      c=1/4, d=1/8, e=1/16.
    rates: {letter: width of that level as a share of the global model's}.
    weights: {letter: p}, its weight among the levels.
  """

  width: Fraction
  rates: dict[str, Fraction]
  weights: dict[str, int]

  def fix(self, num_clients: int) -> dict[str, int]:
    """Assigns clients to the levels for good, in blocks of ids.

    Args:
      num_clients: N.

    Returns:
      {letter: clients}, floor(N / sum p) * p; the last level takes the rest.

    Raises:
      ValueError: If there are fewer clients than weights.
    """
    total = sum(self.weights.values())
    if num_clients < total:
      text = '-'.join(f'{letter}{p}' for letter, p in self.weights.items())
      raise ValueError(
          f'The mode {text!r} needs at least {total} clients, got '
          f'{num_clients}.'
      )
    sizes = {k: num_clients // total * p for k, p in self.weights.items()}
    sizes[[*sizes][-1]] += num_clients - sum(sizes.values())
    return sizes


def parse_mode(text: str) -> Mode:
  """Reads a mode string such as 'a4-b2-c2-d1-e1'.

  Args:
    text: Levels from the widest on, each a letter of a to e and a weight.

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
