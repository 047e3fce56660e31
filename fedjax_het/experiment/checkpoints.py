"""Checkpoints of a run's state that are verified when they are read."""

from collections.abc import Callable, Iterable, Iterator
import concurrent.futures
import contextlib
import errno
import functools
import json
import logging
import pathlib
import re
import shutil
import sys
from typing import Any, NamedTuple
import zlib

from absl import logging as absl_logging
import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_het.files import set_aside
from fedjax_het.renamed import current_paths

_log = logging.getLogger(__name__)


class Restored(NamedTuple):
  """A checkpoint that was read and verified.

  Attributes:
    step: Rounds done.
    state: The state, on the device.
    notes: What was stored beside it.
  """

  step: int
  state: Any
  notes: dict[str, Any]


def leaves(tree) -> dict[str, Any]:
  """{path: leaf} without empty leaves."""
  return {
      jax.tree_util.keystr(path, simple=True, separator='/'): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
      if 0 not in leaf.shape
  }


def _checksum(array: np.ndarray) -> int:
  """CRC-32 of an array's bytes."""
  return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def notes_sum(notes: dict[str, Any]) -> int:
  """CRC-32 of a checkpoint's notes."""
  return zlib.crc32(json.dumps(notes, sort_keys=True).encode())


class Checkpoints:
  """The last few states of a run, each written atomically.

  `save` copies the state, which the next round may overwrite, and returns; a
  thread writes the copy. If that fails, the next `save` or `wait` raises the
  error.

  Attributes:
    folder: Their folder, with one folder per checkpoint named by its step.
  """

  def __init__(
      self, folder: pathlib.Path, keep: int | None = 3, read_only: bool = False
  ):
    """Opens a folder of checkpoints, which may not exist yet.

    Args:
      folder: The folder.
      keep: How many of the latest are kept; None for all until `remove`.
      read_only: If True, nothing is written, renamed or removed; the folder
        must exist, and another process may be writing there.
    """
    self.folder = folder.absolute()
    self._keep = keep
    self._read_only = read_only
    self._manager = self._open()
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._writing = None

  def _open(self) -> ocp.CheckpointManager:
    writing = not self._read_only
    try:
      _check_files(self.folder)
      with quiet():
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep if writing else None,
            create=writing,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=writing,
            read_only=self._read_only,
        )
        return ocp.CheckpointManager(self.folder, options=options)
    except Exception as e:  # orbax raises many types.
      raise ValueError(
          f'The checkpoints in {self.folder} cannot be opened: {_one_line(e)}'
      ) from e

  def finish(self) -> None:
    """Waits until the last checkpoint is written; then `save` cannot be used.

    Logs the error of a failed write if neither `save` nor `wait` raised it.
    """
    self._thread.shutdown()
    writing, self._writing = self._writing, None
    if writing is not None and (error := writing.exception()):
      _log.error('%s', error)

  def close(self) -> None:
    """Calls `finish`, and closes orbax's manager."""
    self.finish()
    with quiet():
      self._manager.close()

  def wait(self) -> None:
    """Returns when the last checkpoint is written.

    Raises:
      OSError: If it could not be written; earlier ones are intact.
    """
    if self._writing is not None:
      writing, self._writing = self._writing, None
      writing.result()

  def save(
      self,
      step: int,
      state: Any,
      notes: dict[str, Any],
      before: Callable[[], None] = lambda: None,
  ) -> None:
    """Writes a checkpoint in a thread; older ones are deleted only afterwards.

    Args:
      step: Rounds done.
      state: A pytree of arrays.
      notes: Anything that JSON can hold.
      before: Called in the thread, before the checkpoint is written.

    Raises:
      OSError: If the previous checkpoint could not be written.
    """
    self.wait()
    arrays = {name: np.array(leaf) for name, leaf in leaves(state).items()}
    self._writing = self._thread.submit(
        self._write, step, arrays, notes, before
    )

  def remove(self, step: int) -> None:
    """Removes a written checkpoint."""
    with quiet():
      self._manager.delete(step)

  def _write(self, step, arrays, notes, before):
    before()
    notes = dict(notes, step=step, checksums=self._checksums(arrays))
    notes['notes'] = notes_sum(notes)
    try:
      with quiet():
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(arrays),
                notes=ocp.args.JsonSave(notes),
            ),
            force=True,
        )
    except Exception as e:  # Several libraries raise many types.
      for rest in self.folder.glob('*orbax-checkpoint-tmp*'):
        shutil.rmtree(rest, ignore_errors=True)
      full = 'No space left' in str(e) or getattr(e, 'errno', 0) == errno.ENOSPC
      reason = 'No space left on device' if full else _one_line(e)
      raise OSError(
          errno.ENOSPC if full else errno.EIO,
          f'{reason} while writing the checkpoint of round {step} to '
          f'{self.folder}',
      ) from e

  def _checksums(self, arrays) -> dict[str, int]:
    return {name: _checksum(array) for name, array in arrays.items()}

  def restore(
      self, like: Any, on_host: str | None = None
  ) -> Restored | None:
    """Reads the latest valid checkpoint.

    Damaged later ones are renamed to damaged-<step>, with a warning; with
    `read_only` they keep their names.

    Args:
      like: A pytree of the shapes and dtypes to expect.
      on_host: Leaves whose path begins with this stay numpy arrays.

    Returns:
      The checkpoint; None if the folder holds none.

    Raises:
      ValueError: If there are checkpoints and none can be read.
      OSError: If the last `save` could not be written.
    """
    self.wait()
    steps = self._steps()
    bad: dict[int, str] = {}
    for step in reversed(steps):
      found = self._attempt(step, like, on_host)
      if isinstance(found, str):
        bad[step] = found
        continue
      state, notes = found
      for worse, reason in bad.items():
        _log.warning(
            'The checkpoint of round %d in %s is damaged (%s); going back to '
            'that of round %d.', worse, self.folder, reason, step,
        )  # fmt: skip
        if not self._read_only:
          self._set_aside(worse)
      if bad and not self._read_only:
        self._manager.reload()
      return Restored(step, state, notes)
    if bad:
      step, reason = next(iter(bad.items()))
      raise ValueError(
          f'None of the checkpoints in {self.folder} (rounds '
          f'{", ".join(map(str, steps))}) can be read; that of round {step}: '
          f'{reason}. Restore one of them or choose another workdir.'
      )
    return None

  def _steps(self) -> list[int]:
    """The steps of the stored checkpoints, ascending."""
    return sorted(
        int(path.name)
        for path in self.folder.glob('*')
        if re.fullmatch('0|[1-9][0-9]{0,17}', path.name) and path.is_dir()
    )

  def _attempt(
      self, step: int, like: Any, on_host: str | None
  ) -> tuple[Any, dict[str, Any]] | str:
    """A checkpoint's state and notes, or one line on why it is damaged."""
    _drop_late_reads()
    try:
      with quiet():
        return self._read(step, like, on_host)
    except Exception as e:  # Any damage: missing, cut or changed files.
      return _one_line(e)

  def _set_aside(self, step: int) -> None:
    """Renames a checkpoint, so that the step can be written again."""
    set_aside(self.folder / str(step))

  def _read(
      self, step: int, like: Any, on_host: str | None
  ) -> tuple[Any, dict[str, Any]]:
    wanted = leaves(like)
    only = ocp.args.Composite(notes=ocp.args.JsonRestore())
    notes = self._manager.restore(step, args=only).notes
    check_notes(notes, step)
    sums = notes.pop('checksums')
    paths = current_paths(sums, wanted)
    check_names(paths, wanted)
    # Broadcast zeros, which take no memory, make orbax restore numpy arrays.
    target = {
        paths[name]: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
        for name, leaf in wanted.items()
    }
    only = ocp.args.Composite(state=ocp.args.StandardRestore(target))
    stored = self._manager.restore(step, args=only).state
    arrays = {name: stored[path] for name, path in paths.items()}
    for name, leaf in wanted.items():
      array = arrays[name]
      if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
        raise ValueError(
            f'{name} is {array.dtype}{array.shape}, expected '
            f'{leaf.dtype}{leaf.shape}'
        )
      if _checksum(array) != sums[paths[name]]:
        raise ValueError(f'the checksum of {name} does not match')
    return _fill(like, arrays, on_host), notes


def _check_files(folder: pathlib.Path) -> None:
  """Raises ValueError for a pipe, which would block the reader."""
  for path in folder.rglob('*'):
    if path.is_fifo():
      raise ValueError(f'{path} is a pipe, not a file')


def check_notes(notes: dict[str, Any], step: int) -> None:
  """Verifies a checkpoint's notes, and removes their checksum and step.

  Args:
    notes: The notes of a checkpoint, changed in place.
    step: The step of its folder.

  Raises:
    ValueError: If the notes are damaged or of another step.
  """
  # Checkpoints of an older version have no such checksum.
  if 'notes' in notes and notes.pop('notes') != notes_sum(notes):
    raise ValueError('the checksum of its notes does not match')
  if notes.pop('step') != step:
    raise ValueError('its folder has been renamed')


def check_names(stored: Iterable[str], wanted: Iterable[str]) -> None:
  """Raises ValueError if a checkpoint holds other arrays than the run.

  Args:
    stored: Names of the checkpoint's arrays.
    wanted: Names of the run's arrays.
  """
  stored, wanted = {*stored}, {*wanted}
  for names, what in ((wanted - stored, 'lacks'), (stored - wanted, 'has')):
    if names:
      raise ValueError(
          f'it is of another state, or of another version: it {what} '
          f'{min(names)}'
      )


def _fill(like: Any, arrays: dict[str, np.ndarray], on_host) -> Any:
  """`like` with the leaves replaced by copies on its devices or the host."""

  def one(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    array = np.zeros(leaf.shape, leaf.dtype)
    if name in arrays:
      array = arrays[name].copy()
    if on_host and name.startswith(on_host):
      return array
    # A table that is divided over devices may not fit into one of them.
    return jax.device_put(array, getattr(leaf, 'sharding', None))

  return jax.tree_util.tree_map_with_path(one, like)


def _one_line(error: Exception) -> str:
  """The beginning of an error's text on one line."""
  text = ' '.join(str(error).split()) or type(error).__name__
  return text if len(text) <= 160 else text[:157] + '...'


@functools.cache
def _drop_late_reads() -> None:
  """Suppresses tracebacks of 'Event loop is closed' from now on.

  When a read of a damaged checkpoint fails, orbax closes its event loop while
  other reads are pending. Python prints a traceback for each of them.
  """
  report = sys.unraisablehook

  def hook(unraisable):
    if str(unraisable.exc_value) != 'Event loop is closed':
      report(unraisable)

  sys.unraisablehook = hook


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Suppresses orbax's log messages; its errors are still raised."""
  level = absl_logging.get_verbosity()
  absl_logging.set_verbosity(absl_logging.FATAL)
  try:
    yield
  finally:
    absl_logging.set_verbosity(level)
