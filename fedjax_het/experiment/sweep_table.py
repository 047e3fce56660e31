"""Results tables: what cells they have, and the results that are there."""

from collections.abc import Mapping, Sequence
import json
import os
import pathlib
import re
from typing import Any, NamedTuple

from fedjax_het.experiment.config import group_spec
from fedjax_het.experiment.paper_targets import Target
from fedjax_het.experiment.stored_config import with_new_entries
from fedjax_het.experiment.workdir import read_json

# Entries of a config that do not change a cell's numbers, but for rounding.
_IRRELEVANT = (
    'data_dir', 'compilation_cache', 'tensorboard', 'conv_backend'
)  # fmt: skip


class Table(NamedTuple):
  """A table of results: a row per method, some seeds each, maybe columns.

  Attributes:
    title: Its heading.
    setting: What all cells share, in words.
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
    """What the paper prints for a cell; None if it prints nothing."""
    return self._at(self.paper, label, column)

  def _at(self, entries: Mapping[str, Any], label: str, column: str) -> Any:
    if tuple(self.columns) == ('',):
      return entries.get(label)
    return entries.get(label, {}).get(column)


def slug(label: str) -> str:
  """A label in lower case, with nothing but letters, digits and _."""
  return re.sub(r'[^a-z0-9]+', '_', label.lower()).strip('_')


def cell_name(row: str, column: str) -> str:
  """The name of a cell's file and workdir, without the seed."""
  return '-'.join(slug(part) for part in (row, column) if part)


def with_seed(config, seed: int, overrides: Mapping[str, Any]):
  """A copy of a cell's config for one seed."""
  config = config.copy_and_resolve_references()
  config.seed = config.sampling_seed = config.partition.seed = seed
  config.update_from_flattened_dict(dict(overrides))
  return config


def read_cells(table: Table, out: str | os.PathLike) -> list[dict[str, Any]]:
  """All results that are there, of whatever seeds.

  Args:
    table: The table.
    out: Folder of the results.

  Returns:
    The cells, by column, row and seed.

  Raises:
    FileNotFoundError: If there is none at all.
    ValueError: If a result is damaged, or of another config.
  """
  files = sorted(pathlib.Path(out, 'cells').glob('*.json'))
  cells = []
  for column in table.columns:
    for row in table.rows:
      config = table.config(row, column)
      if config is None:
        continue
      pattern = re.compile(re.escape(cell_name(row, column)) + r'-(\d+)')
      seeds = {
          int(match[1]): path
          for path in files
          if (match := pattern.fullmatch(path.stem))
      }
      cells += [
          read_cell(path, with_seed(config, seed, {}), table.mean)
          for seed, path in sorted(seeds.items())
      ]
  if not cells:
    raise FileNotFoundError(f'There is no result under {out}/cells yet.')
  return cells


def read_cell(
    path: pathlib.Path, config, mean: str = 'groups'
) -> dict[str, Any]:
  """A stored result, if it is one of this config and mean.

  Args:
    path: Its file.
    config: The config of the cell.
    mean: The table's, see `Table`.

  Returns:
    The cell. Where all groups are equally large both means are one, and a cell
    of either will do.

  Raises:
    ValueError: If the file is damaged, or the result is of another config or
      mean; in one line that names the file.
  """
  advice = 'delete it to run the cell again'
  cell = read_json(path, advice)
  wanted = _comparable(json.loads(config.to_json_best_effort()))
  try:
    _check_cell(cell)
    stored = _comparable(with_new_entries(cell['config']))
  except (AttributeError, LookupError, TypeError) as e:
    raise ValueError(
        f'{path} is damaged ({type(e).__name__}: {e}); {advice}.'
    ) from e
  odd = sorted(k for k in wanted | stored if wanted.get(k) != stored.get(k))
  if odd:
    raise ValueError(
        f'{path} is of another config: {odd[0]} is {stored.get(odd[0])} there '
        f'and {wanted.get(odd[0])} here; delete it to run the cell again.'
    )
  # Older cells do not say it.
  there = cell.get('mean', 'groups')
  sizes = {group_spec(config, name)[1] for name in config.groups}
  if there != mean and len(sizes) > 1:
    raise ValueError(
        f'{path} holds the mean over {there}, but the table reports that over '
        f'{mean}; delete it to run the cell again.'
    )
  return cell


def _check_cell(cell: Mapping[str, Any]) -> None:
  """Raises an error if a table cannot be made of a cell."""
  number = int | float
  kinds = dict(
      row=str, column=str, seed=int, last=number | None, worst=number | None,
      best=number | None, best_round=int, reached=int | None,
      round_seconds=number | None, hardware=str, config=dict,
  )  # fmt: skip
  for name, kind in kinds.items():
    # Cells without columns, and older ones, lack some.
    if name not in ('column', 'worst') or name in cell:
      if not isinstance(cell[name], kind):
        raise TypeError(f'{name} is {cell[name]!r}')
  series = dict(accuracy=cell['accuracy'], **cell.get('views', {}))
  for name, values in series.items():
    if len(values) != len(cell['rounds']) or not values:
      raise TypeError(f'{name} does not fit the rounds')
    _check_numbers(name, values)
  for name, values in cell.get('models', {}).items():
    _check_numbers(name, values)
  _check_numbers('rounds', cell['rounds'])


def _check_numbers(name: str, values: Sequence[Any]) -> None:
  if not all(isinstance(value, int | float | None) for value in values):
    raise TypeError(f'{name} holds {values!r:.60}')


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
  """A config's top level without what does not change a result."""
  return {k: v for k, v in config.items() if k not in _IRRELEVANT}
