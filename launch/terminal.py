"""What the programs share: flags that are refused, and errors, in one line."""

from collections.abc import Sequence
import sys
from typing import NoReturn

from absl import flags, logging


def line(error: BaseException | str) -> str:
  """An error's text on one line, without the number of an OSError."""
  if isinstance(error, OSError) and error.strerror and not error.filename:
    error = error.strerror
  return ' '.join(str(error).split())


def fail(error: BaseException | str, code: int = 2) -> NoReturn:
  """Prints an error on one line and ends the process."""
  print(f'Error: {line(error)}', file=sys.stderr)
  sys.exit(code)


def parse_flags(argv: Sequence[str]) -> list[str]:
  """absl's flags parser with one line per error; no other arguments.

  The information that JAX logs while it looks for accelerators is not shown.
  """
  logging.set_verbosity(logging.WARNING)
  try:
    rest = flags.FLAGS(list(argv))
  except flags.Error as e:
    fail(e)
  if len(rest) > 1:
    fail(f'Unexpected argument {rest[1]!r}; options look like --out=DIR.')
  return rest
