"""A table of the other models that runs evaluated, such as a server's."""

from fedjax_het.reporting import tables
from fedjax_het.reporting.results_table import Table
from fedjax_het.reporting.table_cells import Cells, cells_of

_NOTE = (
    'Besides the models of the table above, these methods evaluate other ones, '
    'in the same runs and on the same examples; the page of a method describes '
    'its views. A view is a mean over clients.'
)


def render(table: Table, cells: Cells, column: str) -> str:
  """The last accuracies of the views in a column, one line per view.

  Views that are rows of the table are left out.

  Args:
    table: The table.
    cells: Its results.
    column: A column.

  Returns:
    A section of Markdown; '' if no cell has other views.
  """
  rows = [['method', 'last round', 'view', 'seeds', 'last round of the view']]
  for label in table.rows:
    shown = {view for row, view in table.views.values() if row == label}
    mine = cells_of(table, cells, label, column)
    views = dict.fromkeys(v for cell in mine for v in cell.get('views', ()))
    for view in (v for v in views if v not in shown):
      # Cells of older versions may lack it.
      own = [cell for cell in mine if view in cell.get('views', ())]
      rows.append([
          label,
          tables.spread([cell['last'] for cell in own]),
          view,
          str(len(own)),
          tables.spread([cell['views'][view][-1] for cell in own]),
      ])
  if len(rows) == 1:
    return ''
  level = '###' if column else '##'
  return (
      f'{level} Other models\n\n{tables.as_markdown(rows)}\n\n{_NOTE}\n\n'
  )
