"""Communication between the processes of one run.

Every process calls these functions, in the same order. In a run of one process
they communicate nothing.
"""

from collections.abc import Callable
import json
import os
import pathlib
import secrets
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from fedjax_het.files import as_json

_ERRORS = {
    kind.__name__: kind
    for kind in (ValueError, FileNotFoundError, ImportError, FloatingPointError)
}
# Seconds to wait for a new file to appear on a network file system.
_PATIENCE = 20.0


def several() -> bool:
  """Whether the run has several processes; starts no devices if it has one."""
  return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
  """Whether this is the first process, which writes the run's files."""
  return not several() or jax.process_index() == 0


def _padded(value: Any) -> np.ndarray:
  """A value as JSON, padded to a power of two to limit recompilation."""
  text = json.dumps(value).encode()
  size = 1 << (len(text) - 1).bit_length()
  return np.frombuffer(text.ljust(size), np.uint8)


def gather(value: Any) -> list[Any]:
  """The values of all processes, in process order; any JSON values."""
  if not several():
    return [value]
  mine = _padded(value)
  sizes = multihost_utils.process_allgather(np.int32(len(mine)))
  mine = np.pad(mine, (0, int(sizes.max()) - len(mine)), constant_values=32)
  rows = multihost_utils.process_allgather(mine)
  return [json.loads(row.tobytes()) for row in rows]


def broadcast(value: Any) -> Any:
  """The value of the first process; those of the others are ignored."""
  if not several():
    return value
  mine = _padded(value if is_first() else None)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(mine))))
  if not is_first():
    mine = np.zeros(size, np.uint8)
  return json.loads(multihost_utils.broadcast_one_to_all(mine).tobytes())


def on_all(error: BaseException) -> BaseException:
  """Marks an error that all processes raise at the same point."""
  error.on_all = True
  return error


def together(fn: Callable[[], Any]) -> Any:
  """Calls a function in every process; if it fails in one, all raise.

  Args:
    fn: Any function.

  Returns:
    Its result in this process.

  Raises:
    Exception: The error of this process, or that of the first process with
      one. Both are marked by `on_all`.
  """
  if not several():
    return fn()
  value, error = None, None
  try:
    value = fn()
  except Exception as e:
    error = e
  found = gather(error and _describe(error))
  failed = [i for i, described in enumerate(found) if described]
  if error is not None:
    raise on_all(error)
  if failed:
    raise on_all(_rebuilt(failed[0], *found[failed[0]]))
  return value


def on_first(fn: Callable[[], Any]) -> Any:
  """Calls a function in the first process; all get its result or its error.

  Args:
    fn: A function whose result JSON can hold.

  Returns:
    The result.
  """
  return broadcast(together(lambda: fn() if is_first() else None))


def _describe(error: Exception) -> tuple[str, int, str]:
  number = getattr(error, 'errno', None) or 0
  text = error.strerror if number and error.strerror else str(error)
  return type(error).__name__, number, text


def _rebuilt(process: int, kind: str, number: int, text: str) -> Exception:
  text = f'Process {process}: {text}'
  if kind in _ERRORS:
    return _ERRORS[kind](text)
  return OSError(number, text) if number else RuntimeError(text)


def check_config(config) -> None:
  """Raises ValueError unless all processes have the same config."""
  mine = as_json(config)
  first = broadcast(mine)
  names = [name for name in mine if mine[name] != first.get(name)]
  check_same(mine, f'the same config, but {", ".join(names)} differs')


def check_same(value: Any, what: str) -> None:
  """Raises ValueError unless the value is the same in all processes.

  Args:
    value: Anything that JSON can hold.
    what: Its description, for the error's text.
  """
  first = broadcast(value)

  def compare():
    if value != first:
      raise ValueError(
          f'All processes of a run must have {what}; start them with the same '
          'command and the same files.'
      )

  together(compare)


def check_folder(folder: pathlib.Path) -> None:
  """Raises ValueError unless all processes see the first one's folder.

  Args:
    folder: The workdir, which exists for the first process.
  """
  if not several():
    return
  path = folder / '.processes'

  def write():
    token = secrets.token_hex(8)
    path.write_text(token, encoding='utf-8')
    return token

  token = on_first(write)

  def look():
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
      # Listing the folder refreshes the cache of a network file system.
      if folder.is_dir() and path.name in os.listdir(folder):
        if path.read_text(encoding='utf-8') == token:
          return
      time.sleep(0.1)
    raise ValueError(
        f'it does not see the files of process 0 in {folder}; the workdir of '
        'a run of several processes must be on a file system that all share.'
    )

  together(look)
  on_first(path.unlink)


class Stop:
  """Tells all processes after the same round whether any wants to stop.

  With several processes, a call returns the result of the previous call, so
  that no process waits for the devices.
  """

  def __init__(self, stop: Callable[[], bool]):
    """Wraps the `stop` function of this process."""
    self._stop = stop
    self._asked = None
    if several():
      mesh = jax.make_mesh(
          (jax.device_count(),),
          ('device',),
          axis_types=(jax.sharding.AxisType.Auto,),
      )
      self._cut = jax.sharding.NamedSharding(mesh, jax.P('device'))
      everywhere = jax.sharding.NamedSharding(mesh, jax.P())
      self._any = jax.jit(lambda flags: flags.max(), out_shardings=everywhere)

  def __call__(self) -> bool:
    """Whether to stop now."""
    if not several():
      return self._stop()
    mine = np.full(jax.device_count(), self._stop(), np.int32)
    before, self._asked = self._asked, self._any(
        jax.make_array_from_callback(
            mine.shape, self._cut, lambda index: mine[index]
        )
    )
    return before is not None and bool(before)
