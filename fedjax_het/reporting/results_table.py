"""A results table: its rows, its columns and the papers' numbers."""

from collections.abc import Mapping, Sequence
import json
import re
from typing import Any, NamedTuple

from fedjax_het.reporting.paper_targets import Target


class Table(NamedTuple):
  """A table of results: one row per method, several seeds, optional columns.

  Attributes:
    title: Its heading.
    setting: The setting of all cells, in words.
    rows: {label: config}; with columns {label: {column: config}}. A row may
      lack columns, which then have no cell.
    paper: {label: target}; with columns {label: {column: target}}: what the
      paper prints, in its own setting.
    seeds: Seeds; each one seeds training, partition and sampling alike.
    families: {name: groups}: sets of groups that are also compared in a second
      table and in a picture of their models; {} for none.
    bars: Rows whose models are drawn in that picture; () for all.
    columns: Names of the columns, such as data set and split; ('',) for a table
      without columns.
    views: {label: (row, view)}: further rows that show a view of another row's
      models, such as FedGKT's clients beside its server. If `view` is a tuple
      of groups, the row shows the mean over these groups.
    mean: The mean that the paper reports: over 'groups', each with the same
      weight, or over 'clients', each group weighted by its number of clients.
      Cells store this mean, and best rounds and targets refer to it. A view of
      a method is a mean over clients in either case.
    notes: {label: what the row is}, if its name does not say it.
    overheads: {label: (numbers that a client sends, in millions; memory in MB,
      the sum over one client of each model)}, as the paper prints them.
    axis: (what the columns change, {column: number}): accuracy is also plotted
      against these numbers. ('', {}) if columns are not numbers.
  """

  title: str
  setting: str
  rows: Mapping[str, Any]
  paper: Mapping[str, Any]
  seeds: Sequence[int]
  families: Mapping[str, Sequence[str]] = {}
  bars: Sequence[str] = ()
  columns: Sequence[str] = ('',)
  views: Mapping[str, tuple[str, str | tuple[str, ...]]] = {}
  mean: str = 'groups'
  notes: Mapping[str, str] = {}
  overheads: Mapping[str, tuple[str, str]] = {}
  axis: tuple[str, Mapping[str, float]] = ('', {})

  @property
  def labels(self) -> list[str]:
    """All rows in order, each view below the row that it belongs to."""
    labels = []
    for row in self.rows:
      labels += [row, *(v for v, (of, _) in self.views.items() if of == row)]
    return labels

  def config(self, label: str, column: str = ''):
    """The config of a cell; None if there is no such cell."""
    return self._at(self.rows, self.views.get(label, (label,))[0], column)

  def target(self, label: str, column: str = '') -> Target | None:
    """The paper's result for a cell; None if it prints none."""
    return self._at(self.paper, label, column)

  def _at(self, entries: Mapping[str, Any], label: str, column: str) -> Any:
    if tuple(self.columns) == ('',):
      return entries.get(label)
    return entries.get(label, {}).get(column)


def distinct(table: Table) -> Table:
  """Removes repeated cells, all seeds but one, and the paper's numbers.

  Args:
    table: A table whose cells may have equal configs, for example because a
      scale has one data set for all columns.

  Returns:
    The table with the first of equal cells, without empty rows and columns.
  """
  seen, rows = set(), {row: {} for row in table.rows}
  for column in table.columns:
    for row in table.rows:
      config = table.config(row, column)
      if config is None:
        continue
      entries = json.loads(config.to_json_best_effort())
      del entries['target_accuracy']  # It affects the report only.
      key = json.dumps(entries, sort_keys=True)
      if key not in seen:
        rows[row][column] = config
      seen.add(key)
  rows = {row: configs for row, configs in rows.items() if configs}
  columns = [c for c in table.columns if any(c in r for r in rows.values())]
  if tuple(table.columns) == ('',):
    rows = {row: configs[''] for row, configs in rows.items()}
  views = {v: of for v, of in table.views.items() if of[0] in rows}
  table = table._replace(
      rows=rows, columns=tuple(columns), views=views, paper={},
      seeds=tuple(table.seeds[:1]), bars=[b for b in table.bars if b in rows],
  )  # fmt: skip
  notes = {k: text for k, text in table.notes.items() if k in table.labels}
  return table._replace(notes=notes)


def slug(label: str) -> str:
  """A label in lower case, with only letters, digits and _."""
  return re.sub(r'[^a-z0-9]+', '_', label.lower()).strip('_')


def cell_name(row: str, column: str) -> str:
  """The name of a cell's file and workdir, without the seed."""
  return '-'.join(slug(part) for part in (row, column) if part)
