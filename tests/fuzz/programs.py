"""Calls programs as from the command line, and returns their outcome."""

from collections.abc import Iterator, Sequence
import contextlib
import io
import os
import pathlib
import signal
import stat
import sys
from typing import NamedTuple

from absl import flags

from launch import report, train


class Outcome(NamedTuple):
  """A program's exit status, standard output and standard error."""

  code: int
  out: str
  err: str


class Hang(BaseException):
  """A program that did not end in time."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
  """Raises `Hang` after `seconds`."""

  def ring(number, frame):
    raise Hang

  old = signal.signal(signal.SIGALRM, ring)
  signal.setitimer(signal.ITIMER_REAL, seconds)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


def call(name: str, args: Sequence[str], seconds: float = 600.0) -> Outcome:
  """Calls `train` or `report` in this process.

  Args:
    name: 'train' or 'report'.
    args: Its arguments.
    seconds: Its time limit.

  Returns:
    The outcome.

  Raises:
    Exception: Any that the command line would print as a traceback.
    Hang: If the program exceeds the time limit.
  """
  module = dict(train=train, report=report)[name]
  if name == 'report' and 'table' not in flags.FLAGS:
    report.define_flags()
  old = sys.argv
  out, err, code = io.StringIO(), io.StringIO(), 0
  try:
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        time_limit(seconds),
    ):
      try:
        module.main(module.parse_flags([name, *map(str, args)]))
      except SystemExit as e:
        code = e.code
  finally:
    sys.argv = old
    flags.FLAGS.unparse_flags()
    for flag in ('out', 'table', 'scale', 'workdir'):
      if flag in flags.FLAGS:
        flags.FLAGS[flag].unparse()
  return Outcome(code, out.getvalue(), err.getvalue())


def contents(folder: pathlib.Path) -> dict[str, bytes | str]:
  """{path: bytes of a file, or type of anything else} below a folder."""
  found = {}
  for parent, folders, files in os.walk(folder):
    for name in (*folders, *files):
      path = pathlib.Path(parent, name)
      mode = path.lstat().st_mode
      if stat.S_ISREG(mode):
        found[str(path.relative_to(folder))] = path.read_bytes()
      else:
        link = os.readlink(path) if path.is_symlink() else ''
        found[str(path.relative_to(folder))] = f'{stat.S_IFMT(mode)} {link}'
  return found
