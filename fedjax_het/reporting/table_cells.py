"""The cells of a results table by row and column."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_het.engine.task import ACCURACY
from fedjax_het.reporting.results_table import Table

Cells = Sequence[Mapping[str, Any]]


def cells_of(
    table: Table, cells: Cells, label: str, column: str
) -> list[Any]:
  """The cells of a row or view in one column.

  Args:
    table: The table.
    cells: All cells.
    label: A row, or a view, whose cells are computed from those of its row.
    column: A column.

  Returns:
    The cells, one per seed.
  """
  row, view = table.views.get(label, (label, None))
  mine = [
      cell
      for cell in cells
      if cell['row'] == row and cell.get('column', '') == column
  ]
  if view is None:
    return mine
  if isinstance(view, tuple):  # Older cells hold no curves of groups.
    mine = [cell for cell in mine if 'groups' in cell]
  return [_viewed(cell, view) for cell in mine]


def _viewed(
    cell: Mapping[str, Any], view: str | tuple[str, ...]
) -> dict[str, Any]:
  """A cell with the accuracies of a view; the best round stays the cell's."""
  if isinstance(view, tuple):
    curves = zip(*(cell['groups'][group] for group in view), strict=True)
    values = [None if None in v else sum(v) / len(v) for v in curves]
  else:
    values = cell['views'][view]
  target = cell['config']['target_accuracy']
  reached = [
      round_num
      for round_num, value in zip(cell['rounds'], values, strict=True)
      if None not in (value, target) and ACCURACY.reaches(value, target)
  ]
  left_out = ('worst', 'models', 'personal')
  return {
      **{k: v for k, v in cell.items() if k not in left_out},
      'accuracy': values,
      'last': values[-1],
      'best': values[cell['rounds'].index(cell['best_round'])],
      'reached': reached[0] if reached else None,
  }
