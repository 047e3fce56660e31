"""Options by name: what a constructor accepts, and one clear line if not."""

from collections.abc import Callable, Mapping
import inspect
import types
import typing
from typing import Any

from fedjax_het.engine.options import (
  INT32_MAX,
  check_float32,
  is_finite,
)
from fedjax_het.names import did_you_mean, shown

_WORDS = {
    bool: 'True or False',
    int: 'an integer',
    float: 'a finite number',
    str: 'a string',
    tuple: 'a tuple',
    type(None): 'None',
}


def _accepts(kind: Any, value: Any) -> bool:
  """Whether `value` is of `kind`; a bool is no number, an int is a float."""
  if kind is Any:
    return True
  if isinstance(kind, types.UnionType) or typing.get_origin(kind) is (
      typing.Union
  ):
    return any(_accepts(one, value) for one in typing.get_args(kind))
  if kind is float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and is_finite(value)
  if kind is int:
    return isinstance(value, int) and not isinstance(value, bool)
  return isinstance(value, kind)


def _describe(kind: Any) -> str:
  kinds = typing.get_args(kind) or (kind,)
  return ' or '.join(_WORDS.get(k) or str(k) for k in kinds)


def check_type(
    where: str, value: Any, kind: Any, high: float | None = None
) -> None:
  """Refuses a value of the wrong type or too large for an array.

  Args:
    where: The option's full name, for the message.
    value: Its value; a bool is no integer.
    kind: A type, a union of types, or Any.
    high: Largest number allowed; None for what int32 or float32 hold.

  Raises:
    ValueError: Naming the value and what is expected.
  """
  if not _accepts(kind, value):
    raise ValueError(f'{where} must be {_describe(kind)}, got {shown(value)}.')
  if isinstance(value, bool) or not isinstance(value, int | float):
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
    fn: A function or a `functools.partial` of one; what the partial fixes is
      not an option.

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
  """Refuses options that a constructor does not have, or of a wrong type.

  Args:
    where: Prefix of the options' names, such as 'algorithm'.
    options: The options given.
    known: What `keyword_options` returns.
    whose: Who would take them, such as "algorithm 'fedin'".

  Raises:
    ValueError: Naming the option and what is known.
  """
  for name, value in options.items():
    if name not in known:
      takes = f'it takes {", ".join(known)}' if known else 'it takes none'
      raise ValueError(
          f'{where}.{name}: {whose} has no option {name!r}'
          f'{did_you_mean(name, known)}; {takes}.'
      )
    check_type(f'{where}.{name}', value, known[name][0])
