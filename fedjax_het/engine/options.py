"""Checks of an algorithm's options, in one clear line each."""

from collections.abc import Iterable, Mapping
from fractions import Fraction
import math
import numbers
import re
from typing import Any

import numpy as np

from fedjax_het.names import shown

# Sizes of the numbers that float32 holds with all of its bits.
_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)
# What arrays of sizes and counts hold.
INT32_MAX = 2**31 - 1


def is_finite(value) -> bool:
  """Whether a value is a finite number, maybe an integer of any size."""
  return isinstance(value, numbers.Integral) or (
      isinstance(value, numbers.Real) and math.isfinite(value)
  )


def check_float32(name: str, value: float) -> None:
  """Raises ValueError for a finite number that float32 cannot hold.

  Args:
    name: The option's name, for the message.
    value: Any number; NaN and infinity have checks of their own.
  """
  if value and is_finite(value) and not _SMALLEST <= abs(value) <= _LARGEST:
    raise ValueError(
        f'{name} must be 0 or of a size between {_SMALLEST:.1e} and '
        f'{_LARGEST:.1e}, which float32 holds, got {shown(value)}.'
    )


def one_of(name: str, value, known) -> None:
  """Raises ValueError unless `value` is one of `known`."""
  if value not in known:
    raise ValueError(
        f'{name} must be one of {", ".join(known)}, got {shown(value)}.'
    )


def between(
    low: float = 0.0,
    high: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
    **options: float,
) -> None:
  """Raises ValueError for an option out of its range, NaN and infinity too.

  Args:
    low: The smallest value allowed.
    high: The largest.
    above: Whether a value must exceed `low`.
    below: Whether it must stay below `high`.
    **options: Values by name.
  """
  for name, value in options.items():
    right = (
        is_finite(value)
        and (low < value if above else low <= value)
        and (value < high if below else value <= high)
    )
    if not right:
      must = [f'{"above" if above else "at least"} {low:g}']
      if high < math.inf:
        must.append(f'{"below" if below else "at most"} {high:g}')
      else:
        must.insert(0, 'finite')
      raise ValueError(
          f'{name} must be {" and ".join(must)}, got {shown(value)}.'
      )
    check_float32(name, value)


def not_negative(**options: float) -> None:
  """Raises ValueError for an option that is negative or not finite."""
  between(**options)


def positive(**options: float) -> None:
  """Raises ValueError for an option that is not above 0, or not finite."""
  between(above=True, **options)


def at_least(low: int, **options: int) -> None:
  """Raises ValueError for an integer below `low` or beyond int32."""
  for name, value in options.items():
    if value < low:
      raise ValueError(f'{name} must be at least {low}, got {shown(value)}.')
    if value > INT32_MAX:
      raise ValueError(
          f'{name} must be at most {INT32_MAX}, got {shown(value)}.'
      )


def share(name: str, value) -> Fraction:
  """Reads an exact share, such as '1/2', '0.25', 0.5 or 1.

  Args:
    name: The option's full name, for the message.
    value: A string or a number. A float stands for the nearest fraction whose
      denominator is at most a million: 0.1 is 1/10.

  Returns:
    The share.

  Raises:
    ValueError: If the value cannot be read, or is not in (0, 1].
  """
  try:
    # A fraction of so many digits takes for ever.
    if isinstance(value, str) and re.search(r'[eE][+-]?\d{4}', value):
      raise ValueError
    if isinstance(value, bool):
      raise ValueError
    if isinstance(value, (str, numbers.Rational)):
      found = Fraction(value)
    else:
      found = Fraction(float(value)).limit_denominator(10**6)
  except (ValueError, TypeError, ArithmeticError):
    raise ValueError(
        f"{name} must be a share such as '1/2' or 0.5, got {shown(value)}."
    ) from None
  if not 0 < found <= 1:
    raise ValueError(
        f'{name} must be a share above 0 and at most 1, got {shown(value)}.'
    )
  return found


def group_shares(option: str, given: Mapping[str, Any]) -> dict[str, Fraction]:
  """The share that each group gives in one of its options.

  Args:
    option: The option's name.
    given: {group name: the group's options}, see `Group.options`. An option
      that is missing, None or '' is not given.

  Returns:
    {group name: share}; where no group gives one, 1, 1/2, 1/4, ... in the order
    of the sorted names.

  Raises:
    ValueError: If a share cannot be read, is not in (0, 1], or only some groups
      give one.
  """
  values = {name: options.get(option, '') for name, options in given.items()}
  missing = [name for name, value in values.items() if value in ('', None)]
  if len(missing) == len(values):
    default = halvings(sorted(values))
    return {name: default[name] for name in values}
  if missing:
    raise ValueError(
        f'groups.{missing[0]}.{option} is missing; give it in every group or '
        'in none.'
    )
  return {
      name: share(f'groups.{name}.{option}', value)
      for name, value in values.items()
  }


def halvings(names: Iterable[str]) -> dict[str, Fraction]:
  """{name: 1, 1/2, 1/4, ...} in the order of the names."""
  return {name: Fraction(1, 2**i) for i, name in enumerate(names)}
