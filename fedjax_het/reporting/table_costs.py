"""A table of what a client of each method sends, holds and computes."""

import numpy as np

from fedjax_het.reporting import tables
from fedjax_het.reporting.results_table import Table
from fedjax_het.reporting.summary import num_clients
from fedjax_het.reporting.table_cells import Cells, cells_of

_NOTE = (
    'Sent and received: MB (10^6 bytes) of a client in the whole run, the mean '
    'over clients and seeds. Peak memory: of a visit, MB, counted from the '
    'traced program (activations, gradients, optimiser, messages and state; '
    'not the data set). Operations: GFLOP of the matrix products and '
    'convolutions of a visit, a mean over the clients of a group. Both of the '
    'smallest and the largest group.'
)
_SOME = (
    ' Of {} of {} runs memory or operations are not known; the means are over '
    'the others.'
)
_ADDED = (
    ' Cells whose memory and operations were traced after the run, from the '
    'program of that day: {}.'
)


def render(table: Table, cells: Cells, column: str) -> str:
  """The costs of a column, one line per method.

  Args:
    table: The table.
    cells: Its results.
    column: A column.

  Returns:
    A section of Markdown; '' if no cell has costs.
  """
  rows = [[
      'method', 'last round', 'sent, MB', 'received, MB', 'peak memory, MB',
      'operations of a visit, GFLOP',
  ]]  # fmt: skip
  used, lack = [], 0
  for label in table.rows:  # Views show the same runs, so they are left out.
    mine = cells_of(table, cells, label, column)
    # Cells of older versions may lack them; operations that depend on learned
    # values are not known.
    sent, received, memory, flops = (
        [cell[name] for cell in mine if name in cell]
        for name in ('bytes_up', 'bytes_down', 'client_memory', 'client_flops')
    )
    if memory or flops:
      used += mine
      lack += len(mine) - min(len(memory), len(flops))
      number = num_clients(mine[0]['config'])
      rows.append([
          label,
          tables.spread([cell['last'] for cell in mine]),
          _mean(sent, number * 1e6),
          _mean(received, number * 1e6),
          _ends(memory, 1e6),
          _ends(flops, 1e9),
      ])
  if len(rows) == 1:
    return ''
  level = '###' if column else '##'
  shown = tables.as_markdown(rows)
  added = sum('costs_added' in cell for cell in used)
  note = _NOTE + (_SOME.format(lack, len(used)) if lack else '')
  note += _ADDED.format(added) if added else ''
  return f'{level} Costs of a client\n\n{shown}\n\n{note}\n\n'


def _mean(values, unit: float) -> str:
  """The mean of several cells; '-' for none."""
  return f'{np.mean(values) / unit:.2f}' if values else '-'


def _ends(costs, unit: float) -> str:
  """The costs of the cheapest and the most expensive group; '-' for none."""
  if not costs:
    return '-'
  groups = [np.mean([cost[name] for cost in costs]) for name in costs[0]]
  low, high = min(groups) / unit, max(groups) / unit
  if len(groups) == 1 or f'{low:.2f}' == f'{high:.2f}':
    return f'{high:.2f}'
  return f'{low:.2f} to {high:.2f}'
