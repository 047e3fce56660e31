"""Programs in processes that are forked from one with all imports done.

Imports take most of a program's start; the fork server of `multiprocessing`
does each once. All processes compute on the CPU.
"""

from collections.abc import Callable, Sequence
import contextlib
import multiprocessing
import os
import pathlib
import runpy
import sys
import tempfile
from typing import Any, NamedTuple

from tests.experiment.tiny_runs import without_pictures

_PRELOADED = (
    'fedjax_het.experiment', 'fedjax_het.experiment.sweep', 'matplotlib.pyplot',
    'sklearn.datasets', 'fedjax_het.analysis.pictures', 'tests.fuzz.forks',
)  # fmt: skip


class Ended(NamedTuple):
  """How a program ended: exit status (None for a hang) and output."""

  code: int | None
  out: str
  err: str


def context():
  """The multiprocessing context, with modules preloaded in its server."""
  forks = multiprocessing.get_context('forkserver')
  forks.set_forkserver_preload([*_PRELOADED])
  return forks


def _become(
    name: str, args: Sequence[str], cwd: str, streams: str, drawn: bool
) -> None:
  """Runs `python -m launch.<name>` in this process."""
  os.chdir(cwd)
  for number, stream in ((1, 'out'), (2, 'err')):
    file = os.open(f'{streams}/{stream}', os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(file, number)
  sys.argv = [name, *args]
  with contextlib.nullcontext() if drawn else without_pictures():
    runpy.run_module(f'launch.{name}', run_name='__main__')


class Begun:
  """A running program of `launch`.

  Args:
    name: The program.
    args: Its arguments.
    cwd: Its working directory.
    drawn: Whether its reports have pictures, see `without_pictures`.
    **settings: Entries of `jax.config` in its process.
  """

  def __init__(
      self,
      name: str,
      args: Sequence[str],
      cwd: pathlib.Path,
      drawn: bool = True,
      **settings,
  ):
    self._streams = tempfile.TemporaryDirectory()
    self._process = context().Process(
        target=_on_the_cpu,
        args=(
            _become, name, [*map(str, args)], str(cwd), self._streams.name,
            drawn,
        ),
        kwargs=settings,
    )  # fmt: skip
    self._process.start()

  def poll(self) -> int | None:
    """Its exit status, None while it runs."""
    return self._process.exitcode

  def send_signal(self, number: int) -> None:
    """Sends a signal."""
    os.kill(self._process.pid, number)

  def end(self, seconds: float = 600.0) -> Ended:
    """Waits for the program to end; kills it after `seconds`."""
    self._process.join(seconds)
    code = self.poll()
    if code is None:
      self._process.kill()
      self._process.join()
    out, err = (
        pathlib.Path(self._streams.name, stream).read_text(
            errors='backslashreplace'
        )
        for stream in ('out', 'err')
    )
    self._streams.cleanup()
    return Ended(code, out, err)


def run(
    name: str, args: Sequence[str], cwd: pathlib.Path, seconds: float = 600.0
) -> Ended:
  """Runs a program of `launch` and waits for its end; see `Begun`."""
  return Begun(name, args, cwd).end(seconds)


def _on_the_cpu(fn: Callable[..., Any], *args, **settings) -> None:
  import jax

  jax.config.update('jax_platforms', 'cpu')
  for name, value in settings.items():
    jax.config.update(name, value)
  fn(*args)


def start(fn: Callable[..., Any], *args):
  """Starts a forked process that calls a function."""
  process = context().Process(target=_on_the_cpu, args=(fn, *args))
  process.start()
  return process
