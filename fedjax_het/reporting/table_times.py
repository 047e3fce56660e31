"""A table of the virtual seconds that runs need for accuracies."""

from fedjax_het.reporting import table_rounds, tables
from fedjax_het.reporting.results_table import Table
from fedjax_het.reporting.table_cells import Cells, cells_of

_NOTE = (
    'Seconds of the virtual clock at the end of a run, and at the first '
    'evaluation of each seed at an accuracy; "-" if the run ends without it. '
    'On the test set, so a lucky evaluation counts.'
)


def render(table: Table, cells: Cells, column: str) -> str:
  """The virtual seconds of the runs of a column.

  Args:
    table: The table.
    cells: Its results.
    column: A column.

  Returns:
    A section of Markdown; '' if no run has a virtual clock.
  """
  found = {
      label: [
          cell
          for cell in cells_of(table, cells, label, column)
          if 'virtual_times' in cell
      ]
      for label in table.rows
  }
  curves = {
      label: [table_rounds.curve_of(cell, 'virtual_times') for cell in mine]
      for label, mine in found.items()
      if mine
  }
  known = [curve for mine in curves.values() for curve in mine]
  if not any(known):
    return ''
  levels = table_rounds.levels_of(known)
  rows = [['method', 'last round', 'whole run', *(f'{n} %' for n in levels)]]
  for label, mine in curves.items():
    rows.append([
        label,
        tables.spread([cell['last'] for cell in found[label]]),
        ', '.join(f'{c["virtual_times"][-1]:,.0f}' for c in found[label]),
        *(', '.join(_seconds(curve, n) for curve in mine) for n in levels),
    ])
  heading = '###' if column else '##'
  shown = tables.as_markdown(rows)
  return f'{heading} Virtual seconds to an accuracy\n\n{shown}\n\n{_NOTE}\n\n'


def _seconds(curve: list[tuple[float, float]], level: int) -> str:
  time = table_rounds.first_at(curve, level)
  return '-' if time is None else f'{time:,.0f}'
