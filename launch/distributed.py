"""Start and shutdown of several processes of one run."""

import ctypes
import os
import re
import signal
import sys
from typing import NoReturn

from .terminal import line

# Seconds without a heartbeat after which a process counts as lost.
LOST_AFTER = 30
# Timeout in seconds for start and shutdown of all processes.
START_WITHIN = 120
END_WITHIN = 20

_LOST = (
    'Error: Another process of this run was lost, so this one ends too. See '
    'what the others wrote; then start all of them again with the same '
    'commands, and the run goes on after its last checkpoint.'
)
# Error messages of JAX and its collectives for a lost peer.
_SIGNS = re.compile(
    r'gloo|nccl|coordination service|distributed service|socket closed|'
    r'connection (reset|closed|refused)|heartbeat|barrier',
    re.IGNORECASE,
)
# What to print, and the exit code, if JAX's service aborts the process.
_aborted = dict(line='', code=1)
_state = dict(on=False)


def start(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
  """Joins the processes of a run; call it before JAX initialises devices.

  Args:
    coordinator: HOST:PORT of process 0; None where JAX knows the cluster.
    num_processes: Number of processes; None as above.
    process_id: Id of this process, from 0; None as above.

  Raises:
    ValueError: If JAX finds no cluster, or the numbers do not fit.
  """
  import jax

  if coordinator is not None and not re.fullmatch(r'.+:\d+', coordinator):
    raise ValueError(f'--coordinator must be HOST:PORT, got {coordinator!r}.')
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  # The run itself handles SIGTERM (as from Slurm) and Ctrl-C.
  jax.config.update('jax_enable_preemption_service', False)
  missing = (
      f'Error: The processes did not find each other within {START_WITHIN} s; '
      'check --coordinator and --num_processes, and that all were started.'
  )
  _aborted.update(line=missing, code=2)
  _catch_abort()
  try:
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        initialization_timeout=START_WITHIN,
        heartbeat_timeout_seconds=LOST_AFTER,
        shutdown_timeout_seconds=END_WITHIN,
    )
  except ValueError as e:
    raise ValueError(
        f'--distributed found no cluster ({line(e)}); give --coordinator='
        'HOST:PORT, --num_processes and --process_id.'
    ) from e
  except RuntimeError as e:  # Such as a port that is in use.
    raise ValueError(f'The processes cannot be joined: {line(e)}') from e
  _aborted.update(line=_LOST, code=1)
  _state['on'] = True


def _catch_abort() -> None:
  """Prints one line and exits when JAX's service aborts the process.

  Its C++ threads abort when another process is lost, without any notice to
  Python. Does nothing on Windows, where JAX prints its own message.
  """
  if os.name == 'nt':
    return

  @ctypes.CFUNCTYPE(None, ctypes.c_int)
  def ended(number):
    del number
    os.write(2, _aborted['line'].encode() + b'\n' * bool(_aborted['line']))
    os._exit(_aborted['code'])

  _state['handler'] = ended  # Keeps Python from garbage-collecting it.
  libc = ctypes.CDLL(None)
  libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
  libc.signal(signal.SIGABRT, ctypes.cast(ended, ctypes.c_void_p))


def is_on() -> bool:
  """Whether this is one of several processes."""
  return _state['on']


def _is_lost(error: BaseException) -> bool:
  """Whether an error means that another process is lost."""
  return (
      isinstance(error, (ValueError, RuntimeError, OSError))
      and not getattr(error, 'on_all', False)
      and _SIGNS.search(str(error)) is not None
  )


def end(error: BaseException, code: int, text: str) -> NoReturn:
  """Ends this process with one line, without blocking others.

  Args:
    error: The error that ends it.
    code: The exit code.
    text: The line.
  """
  if _is_lost(error):
    print(_LOST, file=sys.stderr)
    leave(1)
  print(text, file=sys.stderr)
  if getattr(error, 'on_all', False):
    finish(code)
  leave(code)


def leave(code: int) -> NoReturn:
  """Exits at once, without waiting for the others."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def finish(code: int) -> None:
  """Shuts down together with the other processes."""
  if not _state['on']:
    return
  import jax

  sys.stdout.flush()
  sys.stderr.flush()
  _aborted.update(line='', code=code)
  jax.distributed.shutdown()
  _state['on'] = False
