"""Peak memory of a process, and of the processes that it has started.

It imports only the standard library, since other environments use it.
"""

import pathlib
import resource
import sys

MEGABYTE = 2**20
_PROC = pathlib.Path('/proc')


def _high_water(pid: int | str) -> int | None:
  """VmHWM of a process in bytes; None if it is unknown."""
  try:
    status = (_PROC / str(pid) / 'status').read_text()
  except OSError:
    return None
  for line in status.splitlines():
    if line.startswith('VmHWM:'):
      return int(line.split()[1]) * 1024
  return None


def peak_bytes() -> int:
  """Peak resident memory of this process so far.

  Reads /proc/self/status if it exists, because `ru_maxrss` includes the peak of
  the parent process.
  """
  peak = _high_water('self')
  if peak is not None:
    return peak
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == 'darwin' else peak * 1024


def descendants(pid: int) -> list[int]:
  """All descendant processes of a process; [] without /proc."""
  children: dict[int, list[int]] = {}
  for path in _PROC.glob('[0-9]*/stat'):
    try:
      # The name in parentheses may contain spaces.
      parent = int(path.read_text().rpartition(')')[2].split()[1])
    except (OSError, IndexError):
      continue
    children.setdefault(parent, []).append(int(path.parent.name))
  found, todo = [], [pid]
  while todo:
    new = children.get(todo.pop(), [])
    found += new
    todo += new
  return found


def note_peaks(pid: int, peaks: dict[int, int]) -> None:
  """Updates {process: peak bytes} of a process and its descendants."""
  for each in (pid, *descendants(pid)):
    now = _high_water(each)
    if now is not None:
      peaks[each] = max(now, peaks.get(each, 0))
