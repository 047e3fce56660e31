"""Hyper-parameter searches: results tables over the points of a grid."""

import ast
from collections.abc import Mapping, Sequence
import copy
import itertools
import math
import random
import re
from typing import Any

from .table_files import Found, choose
from .terminal import CommandError, line

# Sections of arguments of optax's functions, which have no type of their own.
_ARGUMENTS = ('local.optimizer_args.', 'local.schedule_args.')
# Largest number of points; more are likely a mistake.
_MOST = 1000


def find(config, text: str, samples: int | None, seed: int) -> Found:
  """A table with a row for each point of a grid, or for a random sample.

  Args:
    config: The config of all rows.
    text: Entries and their values, such as 'local.learning_rate=1e-3,1e-2;
      algorithm.mu=0,0.1'. A range LOW..HIGH is sampled log-uniformly.
    samples: Number of points drawn at random; None for the whole grid.
    seed: Seed of the draw.

  Returns:
    The table.

  Raises:
    CommandError: If an entry is unknown, a value is of the wrong type, the
      grid is too large, or the config has seeds that differ.
  """
  from fedjax_het.reporting.results_table import Table

  _check_seeds(config)
  points = _points(config, text, samples, seed)
  rows = {_label(point): _with(config, point) for point in points}
  _check_names(rows, 'rows')
  method = config.algorithm.name
  table = Table(
      title=f'{method} on {config.dataset}: {text}',
      setting='A row for each setting of these entries; all else is equal.',
      rows=rows,
      paper={},
      seeds=(config.seed,),
      mean='clients',
  )
  return Found(table, f'grid_{method}', '')


def of_table(
    found: Found,
    text: str,
    samples: int | None,
    seed: int,
    rows: Sequence[str] | None = None,
) -> Found:
  """A table with a column for each point of a grid, the same for all rows.

  Args:
    found: The table; each of its columns becomes one column per point.
    text: As for `find`.
    samples: As for `find`.
    seed: As for `find`.
    rows: Rows that must take the points; the others are left out where they do
      not. None for all.

  Returns:
    The table, without the paper's numbers. It has an axis if the given table
    has no columns and the search is over one entry with numbers.

  Raises:
    CommandError: As `find`, for any cell of `rows`.
    ValueError: If a row is unknown.
  """
  table, cells, axis = found.table, {}, {}
  needed = choose(table, rows=rows).rows
  columns: dict[str, None] = {}
  for column in table.columns:
    for row in table.rows:
      config = table.config(row, column)
      if config is None:
        continue
      try:
        points = _points(config, text, samples, seed)
        configs = [_with(config, point) for point in points]
      except CommandError:
        if row in needed:
          raise
        continue
      for point, changed in zip(points, configs, strict=True):
        name = ' '.join(filter(None, (column, _label(point))))
        columns[name] = None
        cells.setdefault(row, {})[name] = changed
        value = next(iter(point.values()))
        if len(point) == 1 and type(value) in (int, float):
          axis[name] = value
  _check_names(columns, 'columns')
  one = tuple(table.columns) == ('',) and axis
  table = table._replace(
      title=f'{table.title}: {text}',
      rows=cells,
      views={k: v for k, v in table.views.items() if v[0] in cells},
      columns=tuple(columns),
      paper={},
      overheads={},
      axis=(text.partition('=')[0].strip(), axis) if one else ('', {}),
  )
  return Found(table, f'grid_{found.name}', found.scale)


def _check_names(labels, what: str) -> None:
  """Raises CommandError if files of two labels would have one name."""
  from fedjax_het.reporting.results_table import slug

  if len({slug(label) for label in labels}) < len(labels):
    raise CommandError(f'--grid: some {what} differ in signs alone.')


def _check_seeds(config) -> None:
  """Raises CommandError for a seed of its own, which a sweep would replace."""
  from fedjax_het.experiment.sweep_table import SEEDS

  own = dict(
      sampling_seed=config.sampling_seed,
      **{'partition.seed': config.partition.get('seed', 0)},
  )
  for key, value in own.items():
    if value not in (0, config.seed):
      raise CommandError(
          f'--grid: {key}={value}, but --seeds sets {", ".join(SEEDS)} alike; '
          f'leave {key} out and give --seeds={value}, with the comma.'
      )


def _points(config, text, samples, seed) -> list[dict[str, Any]]:
  entries = _entries(config, text)
  if samples is None:
    return _all_points(entries)
  return _drawn(entries, samples, random.Random(seed))


def _entries(config, text: str) -> dict[str, list[Any] | range]:
  """{entry: its values, or (low, high, type) for a range}."""
  from fedjax_het.experiment.sweep_table import SEEDS

  found: dict[str, Any] = {}
  config = copy.deepcopy(config)
  for part in filter(None, (part.strip() for part in text.split(';'))):
    key, equals, values = (piece.strip() for piece in part.partition('='))
    if not equals or not values:
      raise CommandError(
          f'--grid: {part!r} is not KEY=VALUE,VALUE; separate entries by ;.'
      )
    if key in found:
      raise CommandError(f'--grid names {key} twice.')
    if key in SEEDS:
      raise CommandError(f'--grid: --seeds=N sets {key}.')
    bounds = re.fullmatch(r'(.+)\.\.(.+)', values)
    first = bounds[1] if bounds else values.split(',')[0]
    _open(config, {key: first.strip()})
    kind = _type(config, key)
    if bounds:
      low, high = (_number(key, bound) for bound in bounds.groups())
      if not 0 < low < high < math.inf:
        raise CommandError(f'--grid: {key}={values} needs 0 < LOW < HIGH.')
      found[key] = (low, high, kind)
    else:
      found[key] = [_value(key, v.strip(), kind) for v in values.split(',')]
  if not found:
    raise CommandError('--grid names no entry, as --grid=algorithm.mu=0,0.1.')
  return found


def _open(config, point: Mapping[str, Any]) -> None:
  """Adds entries that a config may have but does not list."""
  from fedjax_het.experiment import open_entries

  given = {key: str(value) for key, value in point.items()}
  try:
    for key in point:
      open_entries.open_entry(config, key, given)
      open_entries.open_argument(config, key, given)
  except ValueError as e:
    raise CommandError(f'--grid: {line(e)}') from e


def _type(config, key: str) -> Any:
  """The type of an entry; CommandError if there is none."""
  from fedjax_het.names import suggest
  from fedjax_het.renamed import new_name

  section, where = config, key.split('.')
  for depth, name in enumerate(where):
    known = list(section) if hasattr(section, 'get_type') else []
    if name not in known:
      place = '.'.join(where[: depth + 1])
      method = config.algorithm.name if where[0] == 'algorithm' else ''
      sentence = new_name(place, method)
      if sentence:
        raise CommandError(f'--grid: {sentence}')
      raise CommandError(f'Unknown config key {place}{suggest(name, known)}')
    kind, section = section.get_type(name), section[name]
  if hasattr(section, 'get_type'):
    raise CommandError(f'--grid: {key} is a section; name one of its entries.')
  return object if key.startswith(_ARGUMENTS) else kind


def _number(key: str, text: str) -> float:
  try:
    return float(text)
  except ValueError:
    raise CommandError(f'--grid: {key}: {text!r} is no number.') from None


def _value(key: str, text: str, kind: Any) -> Any:
  """Parses a value of an entry's type."""
  if kind is str:
    return text
  try:
    value = ast.literal_eval(text.capitalize() if kind is bool else text)
  except (SyntaxError, ValueError, MemoryError, RecursionError):
    value = text
  if kind is float and type(value) is int:
    value = float(value)
  if kind is not object and not isinstance(value, kind):
    raise CommandError(
        f'--grid: {key} must be of type {kind.__name__}, got {text!r}.'
    )
  return value


def _all_points(entries) -> list[dict[str, Any]]:
  """Every combination of the values."""
  for key, values in entries.items():
    if isinstance(values, tuple):
      raise CommandError(f'--grid: the range of {key} needs --samples=N.')
  number = math.prod(map(len, entries.values()))
  if number > _MOST:
    raise CommandError(
        f'--grid has {number} points, more than {_MOST}; --samples=N draws N.'
    )
  return [
      dict(zip(entries, values, strict=True))
      for values in itertools.product(*entries.values())
  ]


def _drawn(entries, samples: int, rng: random.Random) -> list[dict[str, Any]]:
  """Distinct random points; fewer if so many are not found."""
  if not 1 <= samples <= _MOST:
    raise CommandError(f'--samples must be 1 to {_MOST}, got {samples}.')
  found: dict[str, dict[str, Any]] = {}
  for _ in range(100 * samples):
    if len(found) < samples:
      point = {key: _draw(values, rng) for key, values in entries.items()}
      found.setdefault(_label(point), point)
  return [*found.values()]


def _draw(values, rng: random.Random) -> Any:
  if isinstance(values, list):
    return rng.choice(values)
  low, high, kind = values
  drawn = math.exp(rng.uniform(math.log(low), math.log(high)))
  # Three digits suffice, and the row's name shows them all.
  return round(drawn) if kind is int else float(f'{drawn:.3g}')


def _label(point: Mapping[str, Any]) -> str:
  """A name such as 'learning_rate=0.001 mu=0.1', without commas for flags."""
  names = [key.removesuffix('.name').split('.')[-1] for key in point]
  if len({*names}) < len(names):
    names = [*point]
  return ' '.join(
      f'{name}={value}'
      for name, value in zip(names, point.values(), strict=True)
  )


def _with(config, point: Mapping[str, Any]):
  """A copy of a config at one point."""
  from fedjax_het.experiment.switch import SWITCHES

  config = config.copy_and_resolve_references()
  try:
    for key, switch in SWITCHES.items():
      if key in point:
        switch(config, point[key])
    _open(config, point)
    config.update_from_flattened_dict(dict(point))
  except (AttributeError, KeyError, TypeError, ValueError) as e:
    raise CommandError(f'--grid: {_label(point)}: {line(e)}') from e
  return config
