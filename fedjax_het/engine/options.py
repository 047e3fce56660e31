"""Checks of an algorithm's options, in one clear line each."""

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
