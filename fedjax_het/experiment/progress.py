"""Progress of a run: a bar on a terminal or in a notebook, else some lines."""

import sys
import time
from typing import Any, TextIO

import tqdm

from fedjax_het.engine.task import ACCURACY, Metric

# Minimum seconds between two updates of a notebook's bar.
_INTERVAL = 0.2


def in_notebook() -> bool:
  """Whether this is a cell of a Jupyter notebook."""
  ipython = sys.modules.get('IPython')
  shell = ipython and ipython.get_ipython()
  return type(shell).__name__ in ('ZMQInteractiveShell', 'Shell')  # Or Colab.


class _NotebookBar:
  """A bar in a notebook, with the methods of a tqdm bar that are used here.

  Attributes:
    n: Rounds done.
  """

  def __init__(self, total: int, initial: int):
    from IPython import display

    self.n, self._total, self._initial = initial, total, initial
    self._text, self._begin = '', time.perf_counter()
    self._html, self._shown = display.HTML, self._begin
    self._handle = display.display(self._content(), display_id=True)

  def update(self, rounds: int) -> None:
    """Advances the bar by some rounds."""
    self.n += rounds
    self._show()

  def set_description_str(self, text: str) -> None:
    """Sets the text beside the bar."""
    self._text = text
    self._show()

  def close(self) -> None:
    """Shows the last state, without the time left."""
    self._handle.update(self._content(closed=True))

  def _show(self) -> None:
    """Shows the state, at most once in `_INTERVAL`."""
    now = time.perf_counter()
    if now - self._shown >= _INTERVAL:
      self._shown = now
      self._handle.update(self._content())

  def _content(self, closed: bool = False):
    ran, left = self.n - self._initial, ''
    seconds = time.perf_counter() - self._begin
    if ran and self.n < self._total and not closed:
      left = f', {seconds / ran * (self._total - self.n):.0f} s left'
    return self._html(
        f'<progress value="{self.n}" max="{self._total}"></progress> '
        f'Round {self.n}/{self._total} {self._text}{left}'
    )


class Progress:
  """Shows the rows of a run as they come; pass it as `run(observe=...)`.

  On a terminal and in a notebook it is a bar with the round, the mean metric on
  the test set and the time left; elsewhere it prints a line at the first
  evaluation after every tenth of the rounds.
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
      stream: The output stream; None for stderr.
      metric: The main metric of the run's task.
    """
    self._num_rounds = num_rounds
    self._notebook = stream is None and in_notebook()
    self._stream = sys.stderr if stream is None else stream
    self._bar: tqdm.tqdm | _NotebookBar | None = None
    self._metric, self._score = metric, ''
    self._first: int | None = None
    self._begin = 0.0
    self._compiled = False
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
    if not self._compiled and done > self._first:
      # Later lines do not count the compilation as a part of rounds.
      self._compiled = True
      self._first, self._begin = done, time.perf_counter()

  def _start(self, done: int) -> None:
    self._first, self._begin = done, time.perf_counter()
    if self._notebook:
      self._bar = _NotebookBar(self._num_rounds, done)
    elif self._stream.isatty():
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
    if ran and self._compiled and done < self._num_rounds:
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
