"""Renders a results table: our results, the paper's, and figures."""

from collections.abc import Sequence
import itertools
import os
import pathlib
from typing import Any

import numpy as np

from fedjax_het.files import write_atomically
from fedjax_het.reporting import (
  table_costs,
  table_pictures,
  table_rounds,
  table_times,
  table_views,
  tables,
)
from fedjax_het.reporting.paper_targets import Target
from fedjax_het.reporting.results_table import Table
from fedjax_het.reporting.table_cells import Cells, cells_of

# Of the round: tracing it, and compiling or loading it.
_COMPILED = 'compilation, s'
# Columns on clients' own test examples, if a cell has them.
_PERSONAL = dict(
    accuracy='own test: mean',
    std='own test: deviation',
    worst='own test: worst',
    p10='own test: 10th percentile',
)


def _difference(values: Sequence[float | None], target: Target | None) -> str:
  """Mean of fractions minus a target, in percentage points."""
  if target is None or not values:
    return '-'
  if None in values:
    return 'not finite'
  return f'{100 * np.mean(values) - target.accuracy:+.1f}'


def _best(cells: Cells) -> str:
  """A sentence on how best rounds were chosen; older cells lack the entry."""
  if all(cell.get('validated', False) for cell in cells):
    return 'The best round is chosen on examples that clients hold out.'
  return 'The best round is chosen on the test set, so it is optimistic.'


def _seeds(cells: Cells) -> str:
  return ', '.join(map(str, sorted({cell['seed'] for cell in cells})))


def render(
    table: Table,
    cells: Cells,
    out: str | os.PathLike,
    formats: Sequence[str] = (),
) -> str:
  """Writes table.md and, with matplotlib, its figures.

  Missing cells leave gaps. A column without cells appears only in the overview
  of all columns, and there only with numbers of the paper; likewise a row.

  Args:
    table: The table.
    cells: Results as from `read_cells`, at least one.
    out: Folder of the results.
    formats: Additional formats from `tables.FORMATS`: 'csv' writes cells.csv
      with one line per cell, 'tex' writes table.tex (methods by columns), and
      'pdf' and 'svg' write the figures.

  Returns:
    The tables as Markdown.
  """
  folder = pathlib.Path(out)
  shown, parts = [], []
  overview = _overview(table, cells)
  if len(table.columns) > 1:
    shown.append(tables.as_markdown(overview))
    paper = ', and in brackets the paper' if table.paper else ''
    parts.append(f'Last round{paper}:\n\n{shown[0]}\n\n')
  if 'csv' in formats:
    write_atomically(folder / 'cells.csv', tables.as_csv(_long(cells)))
  if 'tex' in formats:
    write_atomically(folder / 'table.tex', tables.as_latex(overview))
  there = {cell.get('column', '') for cell in cells}
  for column in table.columns:
    if column not in there:
      continue
    markdown = _column(table, cells, column)
    if column:
      shown.append(f'{column}\n\n{markdown}')
      parts.append(f'## {column}\n\n')
    else:
      shown.append(markdown)
    parts.append(markdown + '\n\n' + _notes(table, cells, column))
    parts.append(table_rounds.render(table, cells, column))
    parts.append(table_times.render(table, cells, column))
    parts.append(table_views.render(table, cells, column))
    parts.append(table_costs.render(table, cells, column))
    parts.append(_families(table, cells, column))
  parts.append(table_pictures.draw(table, cells, folder, formats))
  where = sorted({cell['hardware'] for cell in cells})
  write_atomically(
      folder / 'table.md',
      f'# {table.title}\n\n{table.setting}\n\n{_meanings(table)}'
      'Test accuracy in percent on the whole test set, mean over '
      f'{table.mean}; mean ± sample deviation over seeds {_seeds(cells)} (of '
      'training, partition and sampling), of which a row has as many as it '
      f'says. {_best(cells)} {_missing(table, cells)}'
      f'Hardware: {"; ".join(where)}.\n\n' + ''.join(parts).rstrip() + '\n',
  )
  return '\n\n'.join(shown)


def _missing(table: Table, cells: Cells) -> str:
  """A sentence with the number of cells without any result; '' for none."""
  known = {
      (row, column)
      for column in table.columns
      for row in table.rows
      if table.config(row, column) is not None
  }
  there = {(cell['row'], cell.get('column', '')) for cell in cells}
  number = len(known - there)
  if not number:
    return ''
  return f'Incomplete: {number} of {len(known)} cells have not been run. '


def _meanings(table: Table) -> str:
  """The table's notes on its rows, one line each."""
  lines = [
      f'- {label}: {table.notes[label]}'
      for label in table.labels
      if label in table.notes
  ]
  return '\n'.join(lines) + '\n\n' if lines else ''


def _long(cells: Cells) -> list[list[Any]]:
  """One line of plain numbers per cell; accuracies are fractions."""
  names = (
      'row', 'column', 'seed', 'last', 'best', 'best_round', 'worst',
      'reached', 'bytes_up', 'bytes_down', 'round_seconds', 'compile_seconds',
  )  # fmt: skip
  lines = [list(names), *([cell.get(n) for n in names] for cell in cells)]
  if any('personal' in cell for cell in cells):
    lines[0] += [f'personal_{name}' for name in _PERSONAL]
    for line, cell in zip(lines[1:], cells, strict=True):
      line += [cell.get('personal', {}).get(name) for name in _PERSONAL]
  return lines


def _overview(table: Table, cells: Cells) -> list[list[str]]:
  """The overview of the columns, one line per method.

  A column or row with neither results nor the paper's numbers is left out.
  """
  found = {c: _labels(table, cells, c) for c in table.columns}
  known = [column for column, labels in found.items() if labels]
  rows = [['method', *(c or 'accuracy, %' for c in known)]]
  for label in table.labels:
    if not any(label in found[column] for column in known):
      continue
    row = [label]
    for column in known:
      mine = cells_of(table, cells, label, column)
      target = table.target(label, column)
      text = tables.spread([cell['last'] for cell in mine])
      row.append(text if target is None else f'{text} ({target.text})')
    rows.append(row)
  return rows


def _labels(table: Table, cells: Cells, column: str) -> list[str]:
  """The rows and views with a result or a number of the paper in a column."""
  return [
      label
      for label in table.labels
      if table.target(label, column) or cells_of(table, cells, label, column)
  ]


def _column(table: Table, cells: Cells, column: str) -> str:
  """The table of one column, one line per method."""
  labels = [
      label
      for label in _labels(table, cells, column)
      if table.config(label, column) is not None
  ]
  targets = {label: table.target(label, column) for label in labels}
  header = [
      'method', 'seeds', 'last round', 'best round', 'worst model',
      'target in round', 'seconds a round',
  ]  # fmt: skip
  compiled = any(
      'compile_seconds' in cell
      for label in labels
      for cell in cells_of(table, cells, label, column)
  )
  header += [_COMPILED] * compiled
  compared = any(target is not None for target in targets.values())
  timed = any(target and target.reached for target in targets.values())
  header += ['paper', 'last - paper'] * compared
  header += ['paper: target in round'] * timed
  tested = any(
      'personal' in cell
      for label in labels
      for cell in cells_of(table, cells, label, column)
  )
  header += [*_PERSONAL.values()] * tested
  rows = [header]
  for label, target in targets.items():
    mine = cells_of(table, cells, label, column)
    last = [cell['last'] for cell in mine]
    reached = [
        '-' if cell['reached'] is None else str(cell['reached'])
        for cell in mine
    ]
    row = [
        label,
        str(len(mine)),
        tables.spread(last),
        tables.spread([cell['best'] for cell in mine]),
        tables.spread([cell['worst'] for cell in mine if 'worst' in cell]),
        ', '.join(reached) or '-',
        _seconds(mine),
    ]
    row += [_compile_seconds(mine)] * compiled
    if compared:
      text = '-' if target is None else target.text
      row += [text, _difference(last, target)]
    row += ['-' if target is None else target.first_round] * timed
    row += [
        tables.spread([c['personal'][name] for c in mine if 'personal' in c])
        for name in _PERSONAL
    ] * tested
    rows.append(row)
  return tables.as_markdown(rows)


def _seconds(cells: Cells) -> str:
  known = [cell['round_seconds'] for cell in cells]
  known = [seconds for seconds in known if seconds is not None]
  return f'{np.median(known):.1f}' if known else '-'


def _compile_seconds(cells: Cells) -> str:
  """The fewest and the most seconds; older cells have none."""
  known = [c['compile_seconds'] for c in cells if 'compile_seconds' in c]
  if not known:
    return '-'
  low, high = f'{min(known):.1f}', f'{max(known):.1f}'
  return low if low == high else f'{low} to {high}'


def _notes(table: Table, cells: Cells, column: str) -> str:
  """A paragraph with our target and the paper's setting."""
  levels = {
      cell['config']['target_accuracy']
      for label in table.rows
      for cell in cells_of(table, cells, label, column)
  }
  found = [table.target(label, column) for label in table.labels]
  paper = {f'{t.source}: {t.setting}.': None for t in found if t is not None}
  notes = [
      f'Our target: {100 * level:g} %.' for level in sorted(levels - {None})
  ]
  notes += [f'The paper, {text}' for text in paper]
  notes += _orders(table, cells, column)
  return ' '.join(notes) + '\n\n' if notes else ''


def _orders(table: Table, cells: Cells, column: str) -> list[str]:
  """Sentences on the settings in which the paper ranks methods differently."""
  found: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
  for label in table.labels:
    target = table.target(label, column)
    values = [cell['last'] for cell in cells_of(table, cells, label, column)]
    if target is not None and values and None not in values:
      entry = label, float(np.mean(values)), target.accuracy
      found.setdefault((target.source, target.setting), []).append(entry)
  sentences = []
  for (source, setting), entries in found.items():
    here = sorted(entries, key=lambda e: -e[1])
    if all(a[2] >= b[2] for a, b in itertools.pairwise(here)):
      continue
    there = sorted(entries, key=lambda e: -e[2])
    ours, theirs = (', '.join(e[0] for e in order) for order in (here, there))
    sentences.append(
        f'The order differs from that of {source} ({setting}): here, from the '
        f'best, {ours}; there {theirs}.'
    )
  return sentences


def _families(table: Table, cells: Cells, column: str) -> str:
  """A section with the table of model families; '' if there are none."""
  rows = [['method', *table.families]]
  found = table_pictures.models_of(table, cells, column)
  for label, dots in found.items():
    row = [label]
    for groups in table.families.values():
      values = [dots[group] for group in groups if group in dots]
      mean = list(np.mean(values, axis=0)) if values else []
      row.append(tables.spread(mean))
    rows.append(row)
  if len(rows) == 1:
    return ''
  level = '###' if column else '##'
  return f'{level} By family of models\n\n{tables.as_markdown(rows)}\n\n'
