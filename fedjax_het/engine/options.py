"""Checks of an algorithm's options, in one clear line each."""

from collections.abc import Collection
from fractions import Fraction
import math


def one_of(name: str, value, known) -> None:
  """Raises ValueError unless `value` is one of `known`."""
  if value not in known:
    raise ValueError(
        f'{name} must be one of {", ".join(known)}, got {value!r}.'
    )


def not_negative(**options: float) -> None:
  """Raises ValueError for an option that is negative or not finite."""
  for name, value in options.items():
    if not (value >= 0 and math.isfinite(value)):
      raise ValueError(f'{name} must be finite and at least 0, got {value}.')


def shares(option: str, text: str, names: Collection[str]) -> dict:
  """Parses exact shares by name, such as 'a:1 b:1/2 c:0.25'.

  Args:
    option: The option's name, for the message.
    text: The names with their shares; '' for 1, 1/2, 1/4, ... in the order of
      the sorted names.
    names: The names that there must be.

  Returns:
    {name: Fraction}.

  Raises:
    ValueError: If the text cannot be read, names other than these, or a share
      is not in (0, 1].
  """
  if not text:
    return {name: Fraction(1, 2**i) for i, name in enumerate(sorted(names))}
  try:
    pairs = [item.split(':') for item in text.split()]
    found = {name: Fraction(share) for name, share in pairs}
  except (ValueError, ZeroDivisionError):
    raise ValueError(
        f"{option} must look like 'a:1 b:1/2', got {text!r}."
    ) from None
  if sorted(name for name, _ in pairs) != sorted(names):
    raise ValueError(
        f'{option} must name each of {", ".join(sorted(names))} once, got '
        f'{text!r}.'
    )
  for name, share in found.items():
    if not 0 < share <= 1:
      raise ValueError(
          f'{option}: the share of {name!r} must be above 0, to leave some '
          f'channels, and at most 1, got {share}.'
      )
  return found
