"""Task, data and clock, shared by all measured programs.

It imports only the standard library and NumPy, since peers run in their own
environments without this library.
"""

import functools
import json
import os
import pathlib
import sys
import time
import types

import numpy as np

from benchmarks.peak import MEGABYTE, peak_bytes

# Environment variable with the start time of the process.
STARTED = 'FEDJAX_HET_PEERS_STARTED'


def read(path: str) -> types.SimpleNamespace:
  """The task that `tasks.write_task` wrote."""
  return types.SimpleNamespace(**json.loads(pathlib.Path(path).read_text()))


def this_task() -> types.SimpleNamespace:
  """The task of the command line."""
  return read(sys.argv[1])


@functools.cache
def examples(data: str, parts: str) -> list[tuple[np.ndarray, np.ndarray]]:
  """Images [N, H, W, C] uint8 and labels [N] int32 of each client."""
  with np.load(data) as found:
    images, labels = found['x_train'], found['y_train']
  return [
      (images[part], labels[part])
      for part in map(np.array, json.loads(pathlib.Path(parts).read_text()))
  ]


def normalised(task, images: np.ndarray) -> np.ndarray:
  """uint8 images as float32 with zero mean and unit variance per channel."""
  x = images.astype(np.float32) / 255
  return (x - np.float32(task.mean)) / np.float32(task.std)


class Meter:
  """The clock of a program; it rewrites the task's result after every round.

  The first round counts from the start of the process, with imports, data and
  compilation. A later round counts from the end of the previous one.
  """

  def __init__(self, task, parameters: int, **facts):
    """Creates the clock of a task.

    Args:
      task: The task.
      parameters: Number of parameters of all architectures of the program.
      **facts: Additional entries of the result.
    """
    self._task = task
    self.facts = dict(parameters=parameters, **facts)
    self._seconds: list[float] = []
    self._images: list[int] = []
    self._last = float(os.environ[STARTED])

  def round(self, images: int) -> bool:
    """Records the end of a round.

    Args:
      images: Images of the round, each counted once per epoch.

    Returns:
      Whether the program should stop: the rounds after the first have taken
      `task.seconds`, or there have been `task.max_rounds` rounds.
    """
    now = time.time()
    self._seconds.append(now - self._last)
    self._images.append(int(images))
    self._last = now
    self.write()
    after_first = self._seconds[1:]
    long = bool(after_first) and sum(after_first) >= self._task.seconds
    return long or len(self._seconds) >= self._task.max_rounds

  def write(self) -> None:
    """Writes the result."""
    found = dict(
        self.facts,
        round_seconds=self._seconds,
        images=self._images,
        peak_megabytes=peak_bytes() / MEGABYTE,
    )
    path = pathlib.Path(self._task.out)
    new = path.with_suffix('.new')
    new.write_text(json.dumps(found))
    new.replace(path)
