"""Names that were mistyped: one clear line with the nearest that is known."""

from collections.abc import Iterable
import difflib
from typing import Any


def shown(value: Any) -> str:
  """A value in one short line, for a message."""
  if isinstance(value, int) and abs(value) > 10**40:
    return f'an integer of {value.bit_length()} bits'
  text = ' '.join(repr(value).split())
  return text if len(text) <= 120 else f'{text[:100]} ... {text[-10:]}'


def did_you_mean(name: Any, known: Iterable[str]) -> str:
  """' (did you mean 'x'?)' for the nearest known name, or ''."""
  close = difflib.get_close_matches(str(name)[:100], [*known], n=1)
  return f' (did you mean {close[0]!r}?)' if close else ''


def check_name(what: str, name: Any, known: Iterable[str]) -> None:
  """Refuses a name that is not known.

  Args:
    what: What is named, such as 'algorithm'.
    name: The name.
    known: All names.

  Raises:
    ValueError: With the nearest and all known names.
  """
  known = [*known]
  if name not in known:
    raise ValueError(
        f'Unknown {what} {shown(name)}{did_you_mean(name, known)}; known are '
        f'{", ".join(known)}.'
    )
