"""A child process that runs steps, and its handle in the parent process.

  python -m benchmarks.accelerator.worker MODULE

MODULE holds the tasks, such as `benchmarks.accelerator.tasks`. The child reads
a request per line, {'task', 'args', 'path'}, and writes the result to that
path. A crash, an exception, a full memory or a hang loses only the current
step.
"""

from collections.abc import Mapping
import contextlib
import gc
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import traceback
from typing import Any

_POLL = 0.02
# Seconds between terminating and killing a child.
_GRACE = 10.0


TASKS = 'benchmarks.accelerator.tasks'


def serve(module: str) -> None:
  """Runs tasks of a module, in the child process, until its input ends."""
  tasks = importlib.import_module(module)
  for line in sys.stdin:
    request = json.loads(line)
    begin = time.perf_counter()
    try:
      result = getattr(tasks, request['task'])(**request['args'])
      result = dict(dict(status='ok'), **result)
    except KeyboardInterrupt:
      return
    except Exception as e:
      traceback.print_exc()
      result = dict(status='failed', error=_in_short(e))
    result['seconds'] = time.perf_counter() - begin
    write(pathlib.Path(request['path']), result)
    del result
    _forget()


def write(path: pathlib.Path, result: Mapping[str, Any]) -> None:
  """Writes a result atomically.

  It does not use `fedjax_het.files`, so that a child starts without JAX.
  """
  temporary = path.with_name(f'{path.name}.{os.getpid()}')
  temporary.write_text(json.dumps(result))
  temporary.replace(path)


def _in_short(error: BaseException) -> str:
  text = ' '.join(str(error).split())
  return f'{type(error).__name__}: {text}'[:300]


def _forget() -> None:
  """Frees the compiled programs and device memory of the last step."""
  if 'jax' not in sys.modules:
    return
  import jax

  jax.clear_caches()
  gc.collect()


class Worker:
  """A child process, which starts with its first step."""

  def __init__(self, log: pathlib.Path, module: str = TASKS):
    """Creates a worker without a process.

    Args:
      log: File to which the process' output is added.
      module: Module of the tasks.
    """
    self._log, self._module = log, module
    self._child: subprocess.Popen | None = None
    self._on_cpu = False

  def run(
      self,
      task: str,
      args: Mapping[str, Any],
      path: pathlib.Path,
      limit: float,
      *,
      on_cpu: bool = False,
      fresh: bool = False,
  ) -> bool:
    """Runs one step and writes its result or its status to a file.

    Args:
      task: A function of the module.
      args: Its arguments.
      path: File of the result.
      limit: Seconds that it may take.
      on_cpu: Whether JAX computes on the CPU.
      fresh: Whether the step needs its own process.

    Returns:
      False if it was ended at its limit and no file was written.
    """
    if fresh or self._on_cpu != on_cpu:
      self.close()
    self._on_cpu = on_cpu
    child = self._start()
    request = dict(task=task, args=args, path=str(path))
    with contextlib.suppress(OSError):  # A dead child is handled below.
      child.stdin.write(json.dumps(request) + '\n')
      child.stdin.flush()
    end = time.monotonic() + limit
    while not path.exists():
      if self._child is not child:  # Another thread has closed it.
        return path.exists()
      if child.poll() is not None:
        if not path.exists():
          error = f'the process ended with code {child.returncode}'
          result = dict(status='crashed', error=error)
          write(path, result)
        break
      if time.monotonic() > end:
        self.close()
        return path.exists()
      time.sleep(_POLL)
    if fresh or json.loads(path.read_text())['status'] in ('crashed', 'failed'):
      self.close()  # A failure may leave memory allocated.
    return True

  def _start(self) -> subprocess.Popen:
    if self._child is not None and self._child.poll() is None:
      return self._child
    env = dict(os.environ)
    # Several processes share the device, and PyTorch is one of them.
    env.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
    if self._on_cpu:
      env['JAX_PLATFORMS'] = 'cpu'
    with open(self._log, 'a') as log:
      self._child = subprocess.Popen(
          [sys.executable, '-m', __name__, self._module],
          stdin=subprocess.PIPE,
          stdout=log,
          stderr=log,
          text=True,
          env=env,
          start_new_session=True,
      )
    return self._child

  def close(self) -> None:
    """Ends the process and all processes that it has started."""
    child, self._child = self._child, None
    if child is None:
      return
    with contextlib.suppress(OSError):
      child.stdin.close()
    with contextlib.suppress(ProcessLookupError):
      os.killpg(child.pid, signal.SIGTERM)
      with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE)
      os.killpg(child.pid, signal.SIGKILL)
    child.wait()


if __name__ == '__main__':
  serve(sys.argv[1])
