"""Names that were mistyped: one clear line with the nearest that is known."""

from collections.abc import Iterable
import difflib
from typing import Any


def did_you_mean(name: Any, known: Iterable[str]) -> str:
  """' (did you mean 'x'?)' for the nearest known name, or ''."""
  close = difflib.get_close_matches(str(name), [*known], n=1)
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
        f'Unknown {what} {name!r}{did_you_mean(name, known)}; known are '
        f'{", ".join(known)}.'
    )
