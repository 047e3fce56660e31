"""Writes metrics.jsonl, and restores it from a copy."""

from collections.abc import Callable
import json
import logging
import os
import pathlib
import zlib

from fedjax_het.files import read_bytes, set_aside, write_atomically
from fedjax_het.reporting.run_files import Row, parse_line, read_lines

_log = logging.getLogger(__name__)

# Describes the first lines of a file: {'bytes': length, 'crc32': CRC-32}.
Mark = dict[str, int]
NO_LINES: Mark = dict(bytes=0, crc32=0)


class MetricsFile:
  """Appends lines to metrics.jsonl without buffering.

  At each checkpoint the new lines are also appended to a copy, from which the
  file is restored if it is damaged.

  Attributes:
    path: The file.
  """

  def __init__(self, path: pathlib.Path, copy: pathlib.Path | None = None):
    """Opens the file; the copy must hold all its lines so far."""
    self.path = path
    self._file = open(path, 'ab', buffering=0)
    self._copy = copy and open(copy, 'ab', buffering=0)
    self._new = b''  # What the copy does not hold yet.
    lines = path.read_bytes()
    self._mark = Mark(bytes=len(lines), crc32=zlib.crc32(lines))

  def append(self, row: Row) -> None:
    """Writes one line; raises OSError if it does not fit on the disk."""
    line = json.dumps(row, allow_nan=False).encode() + b'\n'
    _write(self._file, line)
    self._new += line
    self._mark = Mark(
        bytes=self._mark['bytes'] + len(line),
        crc32=zlib.crc32(line, self._mark['crc32']),
    )

  def mark(self) -> tuple[Mark, Callable[[], None]]:
    """Describes the lines so far, for the notes of a checkpoint.

    Returns:
      The mark, and a function that stores these lines on disk, in the file and
      in its copy, before it returns. Another thread may call it.
    """
    new, self._new = self._new, b''

    def keep():
      _sync(self._file)
      if self._copy is not None:
        _write(self._copy, new)
        _sync(self._copy)

    return self._mark, keep

  def close(self) -> None:
    """Closes the file and its copy."""
    self._file.close()
    if self._copy is not None:
      self._copy.close()


def _write(file, data: bytes) -> None:
  """Appends bytes to an unbuffered file."""
  try:
    while data:
      data = data[file.write(data) :]
  except OSError as e:
    raise OSError(e.errno, f'{e.strerror} while writing {file.name}') from e


def _sync(file) -> None:
  """Waits until a file is on disk."""
  try:
    os.fsync(file.fileno())
  except OSError as e:
    raise OSError(e.errno, f'{e.strerror} while writing {file.name}') from e


def restore_rows(
    path: pathlib.Path,
    copy: pathlib.Path,
    rounds: int,
    mark: Mark | None,
) -> list[Row]:
  """Restores metrics.jsonl to its state when a checkpoint was written.

  Later lines are removed. If the earlier lines are damaged, they are taken from
  the copy, and the damaged file is renamed.

  Args:
    path: metrics.jsonl; it may be absent.
    copy: The copy beside the checkpoints; it may be absent.
    rounds: Rounds that the restored state has done.
    mark: The checkpoint's description of the file; None for a checkpoint of a
      version without copies.

  Returns:
    The rows that stay.

  Raises:
    ValueError: If lines of rounds up to `rounds` are missing or damaged, in
      the copy as well.
  """
  if mark is None:
    rows = cut_rows(path, rounds)
    lines = _contents(path)
  else:
    found = _contents(path)
    lines = None if found is None else _marked(path, mark)
    if lines is None:
      lines = _marked(copy, mark)
      if lines is None:
        raise ValueError(
            f'{path} and its copy {copy} are both damaged or missing; restore '
            'one of them or choose another workdir.'
        )
      _log.warning(
          '%s is damaged; restored as of round %d from %s.', path, rounds, copy
      )
      if os.path.lexists(path):
        set_aside(path)
      write_atomically(path, lines)
    elif found != lines:
      write_atomically(path, lines)
    rows = [json.loads(line) for line in lines.splitlines()]
  kept = _contents(copy)
  if kept != lines:
    if kept is None:
      set_aside(copy)
    write_atomically(copy, lines)
  return rows


def _contents(path: pathlib.Path) -> bytes | None:
  """A file's bytes; b'' if it is absent, None if it cannot be read."""
  try:
    return read_bytes(path)
  except FileNotFoundError:
    return b''
  except ValueError:
    return None


def _marked(path: pathlib.Path, mark: Mark) -> bytes | None:
  """The first bytes of a file if they match a mark, else None."""
  lines = (_contents(path) or b'')[: mark['bytes']]
  return lines if zlib.crc32(lines) == mark['crc32'] else None


def cut_rows(path: pathlib.Path, rounds: int) -> list[Row]:
  """Removes the lines of rounds after `rounds`, and an incomplete last line.

  The lines that stay are kept byte for byte.

  Args:
    path: metrics.jsonl; it may be absent.
    rounds: Rounds that the restored state has done.

  Returns:
    The rows that stay.

  Raises:
    ValueError: If lines of rounds up to `rounds` are missing or damaged.
  """
  kept, rows = [], []
  lines = read_lines(path)
  for line in lines:
    row = parse_line(line)
    if row is None or row['round'] > rounds:
      break
    kept.append(line)
    rows.append(row)
  done = [row['round'] for row in rows if row['split'] == 'train']
  if done != [*range(1, rounds + 1)]:
    missing = next(
        i for i in range(1, rounds + 2) if i > len(done) or done[i - 1] != i
    )
    raise ValueError(
        f'{path} lacks or repeats round {missing}, but the checkpoint has '
        f'done {rounds} rounds; restore the file or choose another workdir.'
    )
  if len(kept) < len(lines):
    write_atomically(path, b''.join(kept))
  return rows
