"""Callbacks that write files and need no extra package."""

from collections.abc import Callable, Mapping
import csv
import pathlib

import jax

from fedjax_het.experiment.callbacks.base import Callback, Start, numbers
from fedjax_het.experiment.trained import Trained
from fedjax_het.options import at_least
from fedjax_het.reporting.run_files import Row


class CSV(Callback):
  """Writes the numbers of metrics.jsonl as tables, `<split>.csv`.

  Each line of a table is one line of metrics.jsonl. A cell is empty if the line
  lacks the number or it is not finite.
  """

  def __init__(self):
    self._folder: pathlib.Path | None = None
    self._rows: dict[str, list[dict[str, float]]] = {}
    self._columns: dict[str, list[str]] = {}

  def on_start(self, run: Start) -> None:
    """Writes the lines so far; removes those of rounds to be run again."""
    self._folder, self._rows, self._columns = run.workdir, {}, {}
    for row in run.rows:
      self._rows.setdefault(row['split'], []).append(_cells(row))
    for split in ('train', 'test', 'validation', 'warm_up'):
      if split in self._rows:
        self._write(split)
      else:
        (self._folder / f'{split}.csv').unlink(missing_ok=True)

  def on_row(self, row: Row) -> None:
    """Appends one line, or writes all of them if there is a new column."""
    split, cells = row['split'], _cells(row)
    rows = self._rows.setdefault(split, [])
    rows.append(cells)
    columns = self._columns.get(split, [])
    if set(cells) <= set(columns):
      self._append(split, [cells])
    else:
      self._write(split)

  def _write(self, split: str) -> None:
    rows = self._rows[split]
    names = dict.fromkeys(name for cells in rows for name in cells)
    self._columns[split] = [*names]
    with open(self._folder / f'{split}.csv', 'w', encoding='utf-8') as file:
      csv.writer(file, lineterminator='\n').writerow(names)
    self._append(split, rows)

  def _append(self, split: str, rows) -> None:
    path = self._folder / f'{split}.csv'
    with open(path, 'a', encoding='utf-8', newline='') as file:
      writer = csv.DictWriter(
          file, self._columns[split], lineterminator='\n', restval=''
      )
      writer.writerows(rows)


def _cells(row: Row) -> dict[str, float]:
  return {'round': row['round'], **numbers(row)}


class Profile(Callback):
  """Writes a JAX profiler trace of some rounds to the workdir's `profile`.

  The trace begins before the dispatch that contains the first round, and ends
  when the line of the last one is written, while the next rounds may run.
  """

  def __init__(self, first: int, last: int | None = None):
    """Chooses the rounds.

    Args:
      first: The first round, counted from 1.
      last: The last one; None for the first alone.

    Raises:
      ValueError: If `first` is below 1, or `last` is below `first`.
    """
    last = first if last is None else last
    at_least(1, first=first)
    at_least(first, last=last)
    self._first, self._last = first, last
    self._folder, self._runs = None, False

  def on_start(self, run: Start) -> None:
    """Sets the folder; rounds that are already done are not traced."""
    self._folder = run.workdir / 'profile'

  def on_dispatch(self, first: int, last: int) -> None:
    """Begins the trace if it contains one of these rounds."""
    if not self._runs and first <= self._last and last >= self._first:
      jax.profiler.start_trace(str(self._folder))
      self._runs = True

  def on_row(self, row: Row) -> None:
    """Ends the trace after its last round."""
    if row['split'] == 'train' and row['round'] >= self._last:
      self.close()

  def close(self) -> None:
    """Ends the trace."""
    if self._runs:
      self._runs = False
      jax.profiler.stop_trace()


class CustomMetrics(Callback):
  """Adds your own metrics to the test lines."""

  def __init__(self, fn: Callable[[Trained], Mapping[str, float]]):
    """Takes `fn`: `(models) -> {name: number}`, called at each evaluation."""
    self._fn = fn

  def on_evaluation(
      self, rows: Mapping[str, Row], models: Trained
  ) -> Mapping[str, float]:
    """Returns the numbers."""
    del rows
    return self._fn(models)
