"""Checks of options, for constructors and configs, with one-line errors.

A constructor checks ranges with `at_least`, `integer_between`, `between`,
`positive`, `not_negative` and `one_of`, and other values with `counts` and
`function_of`. The types of its keyword-only parameters are checked with
`check_options` in a config and with `check_call` in a call.
"""

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
import inspect
import math
import numbers
import re
import types
import typing
from typing import Any

import ml_collections
import numpy as np

from fedjax_het.names import check_name, shown, suggest

# The smallest and largest magnitude of float32's normal numbers.
_SMALLEST = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)
# The largest number in arrays of sizes and counts.
INT32_MAX = 2**31 - 1


def is_finite(value) -> bool:
  """Whether a value is a finite number; integers may have any size."""
  return isinstance(value, numbers.Integral) or (
      isinstance(value, numbers.Real) and math.isfinite(value)
  )


def is_integer(value) -> bool:
  """Whether a value is an integer; a bool is not one."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


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
  check_name(name, value, known)


def check_range(
    name: str,
    value: Any,
    low: float | None = None,
    above: float | None = None,
    below: float | None = None,
    high: float | None = None,
) -> None:
  """Raises ValueError for a number out of its range.

  Args:
    name: The number's name, for the message.
    value: The number.
    low: The smallest value allowed; None, here and below, for no such bound.
    above: A value that it must exceed.
    below: A value that it must stay below.
    high: The largest value allowed.
  """
  bounds = {
      f'at least {low}': low is None or value >= low,
      f'above {above}': above is None or value > above,
      f'below {below}': below is None or value < below,
      f'at most {high}': high is None or value <= high,
  }
  if not all(bounds.values()):
    must = [bound for bound in bounds if not bound.endswith('None')]
    raise ValueError(
        f'{name} must be {" and ".join(must)}, got {shown(value)}.'
    )


def between(
    low: float = 0,
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
  top = high if high < math.inf else None
  for name, value in options.items():
    check_type(name, value, float)
    check_range(
        name,
        value,
        low=None if above else low,
        above=low if above else None,
        below=top if below else None,
        high=None if below else top,
    )


def not_negative(**options: float) -> None:
  """Raises ValueError for an option that is negative or not finite."""
  between(**options)


def positive(**options: float) -> None:
  """Raises ValueError for an option that is not above 0, or not finite."""
  between(above=True, **options)


def integer_between(low: int, high: int | None, **options: int) -> None:
  """Raises ValueError for a value that is not an integer, or out of range.

  Args:
    low: The smallest value allowed.
    high: The largest; None for the largest int32.
    **options: Values by name.
  """
  for name, value in options.items():
    check_type(name, value, int)
    check_range(name, value, low=low, high=high)


def at_least(low: int, **options: int) -> None:
  """Raises ValueError for an integer below `low` or beyond int32."""
  integer_between(low, None, **options)


def counts(**options: Any) -> None:
  """Raises ValueError unless each value is a 1-D array of integers >= 0.

  Args:
    **options: Arrays or sequences by name.
  """
  for name, values in options.items():
    found = np.asarray(values)
    if found.ndim != 1:
      raise ValueError(
          f'{name} must be a row of integers, got {shown(values)}.'
      )
    if not np.issubdtype(found.dtype, np.integer) or np.any(found < 0):
      raise ValueError(
          f'{name} must be integers of at least 0, got {shown(values)}.'
      )


def function_of(what: str, example: str, **options: Callable) -> None:
  """Raises ValueError for an option that cannot be called.

  Args:
    what: What it is a function of, such as 'the round'.
    example: Such a function, as a user would write it.
    **options: Values by name.
  """
  for name, value in options.items():
    if not callable(value):
      raise ValueError(
          f'{name} must be a function of {what}, such as {example}, got '
          f'{shown(value)}.'
      )


def booleans(**options: bool) -> None:
  """Raises ValueError for an option that is neither True nor False."""
  for name, value in options.items():
    check_type(name, value, bool)


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
    # A fraction with so many digits takes too long to compute.
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
    of the sorted names: the order of the groups never matters.

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


_WORDS = {
    bool: 'True or False',
    int: 'an integer',
    float: 'a finite number',
    str: 'a string',
    tuple: 'a tuple',
    list: 'a list',
    type(None): 'None',
    ml_collections.ConfigDict: 'a section',
}


def _accepts(kind: Any, value: Any) -> bool:
  """Whether `value` is of `kind`; an int counts as a float, a bool does not."""
  if kind is Any:
    return True
  if _is_union(kind):
    return any(_accepts(one, value) for one in typing.get_args(kind))
  if kind is float:
    return is_finite(value) and not isinstance(value, bool)
  if kind is int:
    return is_integer(value)
  kind = typing.get_origin(kind) or kind  # `tuple` for tuple[int, ...].
  if kind is list:  # Stored configs are read with tuples.
    return isinstance(value, list | tuple)
  return not isinstance(kind, type) or isinstance(value, kind)


def _is_union(kind: Any) -> bool:
  return isinstance(kind, types.UnionType) or typing.get_origin(kind) is (
      typing.Union
  )


def _describe(kind: Any) -> str:
  kinds = typing.get_args(kind) if _is_union(kind) else (kind,)
  return ' or '.join(_WORDS.get(k) or _name(k) for k in kinds)


def _name(kind: Any) -> str:
  return f'a {kind.__name__}' if isinstance(kind, type) else str(kind)


def check_type(
    where: str, value: Any, kind: Any, high: float | None = None
) -> None:
  """Raises ValueError for a wrong type, or a number too large for arrays.

  Args:
    where: The option's full name, for the message.
    value: Its value; a bool is not an integer.
    kind: A type, a union of types, or Any.
    high: Largest number allowed; None for the largest int32 or float32.

  Raises:
    ValueError: Naming the value and what is expected.
  """
  if not _accepts(kind, value):
    raise ValueError(f'{where} must be {_describe(kind)}, got {shown(value)}.')
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    return
  kinds = typing.get_args(kind) or (kind,)
  if high is None and int in kinds:
    high = INT32_MAX
  if high is not None and value > high:
    raise ValueError(f'{where} must be at most {high}, got {shown(value)}.')
  if float in kinds:
    check_float32(where, value)


def keyword_options(fn: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
  """The keyword-only parameters of a constructor.

  Args:
    fn: A function or a `functools.partial` of one; parameters that the partial
      sets are not options.

  Returns:
    {name: (type, default)}. Without an annotation the type is that of the
    default; a default of None then means Any.
  """
  hints = typing.get_type_hints(getattr(fn, 'func', fn))
  fixed = getattr(fn, 'keywords', {})
  options = {}
  for name, parameter in inspect.signature(fn).parameters.items():
    if parameter.kind != parameter.KEYWORD_ONLY or name in fixed:
      continue
    default = parameter.default
    plain = Any if default in (None, parameter.empty) else type(default)
    options[name] = (hints.get(name, plain), default)
  return options


def check_options(
    where: str,
    options: Mapping[str, Any],
    known: Mapping[str, tuple[Any, Any]],
    whose: str,
) -> None:
  """Raises ValueError for unknown options and for values of the wrong type.

  Args:
    where: Prefix of the options' names, such as 'algorithm'; '' for none.
    options: The options given.
    known: What `keyword_options` returns.
    whose: What takes the options, such as "algorithm 'fedin'".

  Raises:
    ValueError: Naming the option and what is known.
  """
  prefix = f'{where}.' if where else ''
  for name, value in options.items():
    if name not in known:
      place = f'{where}.{name}: ' if where else ''
      raise ValueError(
          f'{place}{whose} has no option {name!r}'
          f'{suggest(name, known, "it takes")}'
      )
    check_type(f'{prefix}{name}', value, known[name][0])


def check_call(
    whose: str, fn: Callable[..., Any], options: Mapping[str, Any]
) -> None:
  """Raises ValueError if options are unknown, missing or of the wrong type.

  Args:
    whose: What takes the options, such as "Model 'mlp'".
    fn: A constructor, see `keyword_options`.
    options: The options given.

  Raises:
    ValueError: Naming the option.
  """
  known = keyword_options(fn)
  check_options('', options, known, whose)
  for name, (_, default) in known.items():
    if default is inspect.Parameter.empty and name not in options:
      raise ValueError(f'{whose} needs the option {name!r}.')
