"""A table of how runs end, and of the rounds that they need for accuracies."""

from collections.abc import Sequence
import math
import statistics

from fedjax_het.engine.task import ACCURACY
from fedjax_het.reporting import tables
from fedjax_het.reporting.results_table import Table
from fedjax_het.reporting.table_cells import Cells, cells_of

# With fewer evaluations a round says too little.
_FEWEST = 10
_STEP = 5  # Between levels, in percentage points.
_LEVELS = 4
_LAST = 5  # Evaluations at the end of a run.
_NOTE = (
    'The mean of the last {} evaluations of a run, in percent, then the first '
    'evaluated round of each seed at an accuracy; "-" if the run ends without '
    'it. The levels are the highest multiples of {} % that a run reaches. On '
    'the test set, so a lucky round counts.'
)


def render(table: Table, cells: Cells, column: str) -> str:
  """The ends of the runs of a column, and the first rounds at accuracies.

  Args:
    table: The table.
    cells: Its results.
    column: A column.

  Returns:
    A section of Markdown; '' if runs have few evaluations.
  """
  curves = {
      label: [curve_of(cell) for cell in cells_of(table, cells, label, column)]
      for label in table.labels
  }
  ends = {
      label: [_end(cell) for cell in cells_of(table, cells, label, column)]
      for label in table.labels
  }
  known = [curve for mine in curves.values() for curve in mine]
  if max(map(len, known), default=0) < _FEWEST:
    return ''
  levels = levels_of(known)
  if not levels:
    return ''
  mean = f'mean of the last {_LAST}'
  rows = [['method', mean, *(f'{level} %' for level in levels)]]
  for label, mine in curves.items():
    if mine:
      rows.append([
          label,
          tables.spread(ends[label]),
          *(', '.join(_round(curve, n) for curve in mine) for n in levels),
      ])
  heading = '###' if column else '##'
  shown = tables.as_markdown(rows)
  note = _NOTE.format(_LAST, _STEP)
  title = f'{heading} Last evaluations, and rounds to an accuracy'
  return f'{title}\n\n{shown}\n\n{note}\n\n'


def curve_of(cell, entry: str = 'rounds') -> list[tuple[float, float]]:
  """The finite accuracies of a cell, each with its entry of `cell[entry]`."""
  pairs = zip(cell[entry], cell['accuracy'], strict=True)
  return [(n, value) for n, value in pairs if value is not None]


def levels_of(curves: Sequence[list[tuple[float, float]]]) -> range:
  """The accuracies to ask for, the highest multiples of 5 % that are reached.

  Args:
    curves: As from `curve_of`, at least one of them not empty.

  Returns:
    Percentages, at most four, ascending.
  """
  highest = max(value for curve in curves for _, value in curve)
  # Rounding lets 0.85, stored as float32, reach 85 %.
  last = math.floor(round(100 * highest, 3) / _STEP) * _STEP
  first = max(_STEP, last - (_LEVELS - 1) * _STEP)
  return range(first, last + _STEP, _STEP)


def _end(cell) -> float | None:
  """The mean of a cell's last accuracies; None if one is not finite.

  The untrained models of round 0 are none of them.
  """
  pairs = zip(cell['rounds'], cell['accuracy'], strict=True)
  last = [value for n, value in pairs if n][-_LAST:]
  return statistics.fmean(last) if last and None not in last else None


def first_at(curve: list[tuple[float, float]], level: int) -> float | None:
  """The first round or time of a curve at `level` percent; None if none is."""
  reached = (n for n, value in curve if ACCURACY.reaches(value, level / 100))
  return next(reached, None)


def _round(curve: list[tuple[float, float]], level: int) -> str:
  found = first_at(curve, level)
  return '-' if found is None else str(found)
