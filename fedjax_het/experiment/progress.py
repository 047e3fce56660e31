"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from typing import Any, TextIO

import tqdm

from fedjax_het.engine.task import ACCURACY, Metric


class Progress:
  """Shows the rows of a run as they come: pass it as `run(observe=...)`.

  On a terminal it is a bar with round, the mean metric on the test set and time
  left; elsewhere one line after every tenth of the rounds.
  """

  def __init__(
      self,
      num_rounds: int,
      stream: TextIO | None = None,
      metric: Metric = ACCURACY,
  ):
    """Prepares to show rounds.

    Args:
      num_rounds: Rounds of the run.
      stream: Where to; None for stderr.
      metric: The main metric of the run's task.
    """
    self._num_rounds = num_rounds
    self._stream = sys.stderr if stream is None else stream
    self._bar: tqdm.tqdm | None = None
    self._metric, self._score = metric, ''
    self._first: int | None = None
    self._begin = 0.0
    self._tenths = -1

  def __call__(self, row: dict[str, Any]) -> None:
    """Takes a line of metrics.jsonl."""
    train = row['split'] == 'train'
    done = row['round']
    if row['split'] in ('warm_up', 'validation'):
      return
    if self._first is None:
      self._start(done - 1 if train else done)
    if train:
      self._step(done)
      return
    score = row[self._metric.name]
    if score is not None:
      form = '.3f' if self._metric.percent else '.4g'
      self._score = f'{self._metric.name} {score:{form}}'
    if self._bar is not None:
      self._bar.set_description_str(self._score)
    elif done * 10 // self._num_rounds > self._tenths:
      self._tenths = done * 10 // self._num_rounds
      self._line(done)

  def _start(self, done: int) -> None:
    self._first, self._begin = done, time.perf_counter()
    if self._stream.isatty():
      self._bar = tqdm.tqdm(
          total=self._num_rounds,
          initial=done,
          file=self._stream,
          dynamic_ncols=True,
          bar_format='Round {n_fmt}/{total_fmt} |{bar}| {desc} '
          '[{elapsed}, {remaining} left]',
      )

  def _step(self, done: int) -> None:
    if self._bar is not None:
      self._bar.update(done - self._bar.n)

  def _line(self, done: int) -> None:
    ran = done - self._first
    seconds = time.perf_counter() - self._begin
    left = ''
    if ran and done < self._num_rounds:
      left = f', {seconds / ran * (self._num_rounds - done):.0f} s left'
    print(
        f'Round {done}/{self._num_rounds}: {self._score}{left}',
        file=self._stream,
        flush=True,
    )

  def close(self) -> None:
    """Ends the bar."""
    if self._bar is not None:
      self._bar.close()
