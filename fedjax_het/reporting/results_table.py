"""A results table: its rows and columns, and what the papers print there."""

from collections.abc import Mapping, Sequence
import json
import re
from typing import Any, NamedTuple

from fedjax_het.reporting.paper_targets import Target


class Table(NamedTuple):
  """A table of results: a row per method, some seeds each, maybe columns.

  Attributes:
    title: Its heading.
    setting: The setting of all cells, in words.
    rows: {label: config}; with columns {label: {column: config}}. A row may
      lack columns: there is no such cell.
    paper: {label: target}; with columns {label: {column: target}}: what the
      paper prints, in its own setting.
    seeds: Seeds of training, partition and sampling, all three alike.
    families: {name: groups}: sets of groups that are compared besides, in a
      second table and in bars; {} for none.
    bars: Rows whose models are drawn as bars; () for all.
    columns: Names of the columns, such as data set and split; one without a
      name for a table that has none.
    views: {label: (row, view)}: further rows, which show a view of the models
      of another row, such as FedGKT's clients beside its server; or, where
      `view` is a tuple of groups, the mean over these groups alone.
    mean: Which mean of accuracies the paper reports: over 'groups', all alike,
      or over 'clients', each group counting with the number of its clients.
      Results hold this one, best rounds and targets refer to it. Views are
      means over clients in either case.
    notes: {label: what the row is}, where its name does not say it.
    overheads: {label: (millions of numbers that a client sends, MB of memory of
      one client of each model together)}, as the paper prints them.
    axis: What the columns change, and {column: number}: accuracy is also drawn
      over these numbers. ('', {}) where columns are no numbers.
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
  """A table's runs once each, with one seed and without the paper's numbers.

  Args:
    table: A table, of which cells may have equal configs, as where a scale
      has one data set for all columns.

  Returns:
    The table with the first of equal cells. Rows and columns of which no cell
    is left are left out.
  """
  seen, rows = set(), {row: {} for row in table.rows}
  for column in table.columns:
    for row in table.rows:
      config = table.config(row, column)
      if config is None:
        continue
      entries = json.loads(config.to_json_best_effort())
      del entries['target_accuracy']  # Of the report alone.
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
  """A label in lower case, with nothing but letters, digits and _."""
  return re.sub(r'[^a-z0-9]+', '_', label.lower()).strip('_')


def cell_name(row: str, column: str) -> str:
  """The name of a cell's file and workdir, without the seed."""
  return '-'.join(slug(part) for part in (row, column) if part)
