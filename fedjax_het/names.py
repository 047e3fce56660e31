"""The order of names, and one-line errors for unknown ones."""

from collections.abc import Iterable
import difflib
import re
from typing import Any


def shown(value: Any) -> str:
  """A value as one short line, for error messages."""
  if isinstance(value, int) and abs(value) > 10**40:
    return f'an integer of {value.bit_length()} bits'
  text = ' '.join(repr(value).split())
  return text if len(text) <= 120 else f'{text[:100]} ... {text[-10:]}'


def nearest(name: Any, known: Iterable[str]) -> str | None:
  """The known name that is most similar to `name`; None if none is similar.

  The initials of a name, such as lr, are similar to it.
  """
  name, known = str(name)[:100], [*map(str, known)]
  close = difflib.get_close_matches(name, known, n=1) or [
      whole for whole in known
      if name == ''.join(word[:1] for word in whole.split('_'))
  ]
  return close[0] if close else None


def suggest(
    name: Any, known: Iterable[Any], listed: str = 'known are'
) -> str:
  """The end of a message on an unknown name: the nearest and all known names.

  Args:
    name: The unknown name.
    known: All names.
    listed: The words in front of the list of all names.

  Returns:
    Text such as '; did you mean 'fedin'? Known are private, fedavg, fedin.'.
  """
  known = [*map(str, known)]
  close = nearest(name, known)
  names = f'{listed} {", ".join(known)}.' if known else 'there are none.'
  if close is None:
    return f'; {names}'
  return f'; did you mean {close!r}? {names[0].upper()}{names[1:]}'


def check_name(what: str, name: Any, known: Iterable[Any]) -> None:
  """Raises ValueError for an unknown name.

  Args:
    what: What is named, such as 'algorithm'.
    name: The name.
    known: All names.

  Raises:
    ValueError: With the nearest and all known names.
  """
  known = [*known]
  if name not in known:
    raise ValueError(f'Unknown {what} {shown(name)}{suggest(name, known)}')


def natural_key(name: Any) -> list[tuple[int, str]]:
  """Key that sorts 'cnn2' before 'cnn10'."""
  pieces = re.split(r'(\d+)', str(name))
  return [(int(p), '') if p.isdigit() else (-1, p) for p in pieces]
