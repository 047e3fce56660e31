"""A process that tries one input after another, and may be killed.

An input that hangs, or takes all memory, must not end the tests.
"""

import contextlib
import functools
import importlib
import os
import pathlib
import pickle
import resource
import select
import subprocess
import sys
import tempfile
import traceback
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Bytes of address space; more than any tiny run needs.
_MEMORY = 12 << 30


class Outcome(NamedTuple):
  """The outcome of an input.

  Attributes:
    kind: 'done', 'refused' (one line), 'traceback', 'hang' or 'died'.
    text: The line, the traceback, or ''.
  """

  kind: str
  text: str = ''


class Worker:
  """Calls `module:function` in another process, within a time limit."""

  def __init__(self):
    self._process = None

  def __call__(self, function: str, *args, seconds: float = 60.0) -> Outcome:
    """Returns the outcome of `function(*args)`; kills a hanging process."""
    if self._process is None:
      self._start()
    pickle.dump((function, args), self._process.stdin)
    self._process.stdin.flush()
    if not select.select([self._process.stdout], [], [], seconds)[0]:
      self.close()
      return Outcome('hang', f'no answer in {seconds:.0f} s')
    try:
      outcome = Outcome(*pickle.load(self._process.stdout))
      printed = self._printed()
      if 'Traceback' in printed:
        return Outcome('traceback', printed)
      return outcome
    except EOFError:
      code = self._process.wait()
      self.close()
      return Outcome('died', f'exit status {code}')

  def _printed(self) -> str:
    """The stderr of the process since the last call."""
    return self._errors.read().decode(errors='backslashreplace')

  def _start(self):
    writing, path = tempfile.mkstemp()
    self._errors = open(path, 'rb')
    os.unlink(path)
    self._process = subprocess.Popen(
        [sys.executable, '-m', 'tests.fuzz.worker'],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=writing,
        env=dict(
            os.environ,
            JAX_PLATFORMS='cpu',
            JAX_DEFAULT_PRNG_IMPL='threefry2x32',  # For several devices.
            PYTHONPATH=str(ROOT),
        ),
    )
    os.close(writing)
    # The time limits do not include the start of Python and JAX.
    pickle.load(self._process.stdout)

  def close(self):
    if self._process is not None:
      self._process.kill()
      self._process.wait()
      self._process = None
      self._errors.close()


def judge(call) -> tuple[str, str]:
  """Calls a function as `launch.train` does, and classifies the outcome."""
  try:
    call()
  except (ValueError, FileNotFoundError, ImportError, FloatingPointError) as e:
    text = str(e)
    # The commands print an error on one line, so its message must be short,
    # have one line, and be written for users.
    if isinstance(e, UnicodeError) or text.count('\n') or len(text) > 2000:
      return 'traceback', traceback.format_exc()
    return 'refused', text
  except BaseException:
    return 'traceback', traceback.format_exc()
  return 'done', ''


def _load(function: str) -> Any:
  module, name = function.split(':')
  return getattr(importlib.import_module(module), name)


def main():
  """Answers calls until standard input ends."""
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  # Text that libraries print must not mix with the answers.
  answers = os.fdopen(os.dup(1), 'wb')
  os.dup2(2, 1)
  from tests import conftest  # The settings of all tests.

  del conftest
  pickle.dump('ready', answers)
  answers.flush()
  with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EOFError):
    os.chdir(folder)
    sys.path.insert(0, str(ROOT))
    while True:
      function, args = pickle.load(sys.stdin.buffer)
      answer = judge(functools.partial(_load(function), *args))
      pickle.dump(answer, answers)
      answers.flush()


if __name__ == '__main__':
  main()
