"""Reads the stored results of a results table, and checks their configs."""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import json
import os
import pathlib
import re
from typing import Any

from fedjax_het.experiment.config import group_spec
from fedjax_het.experiment.stored_config import with_new_entries
from fedjax_het.files import read_json
from fedjax_het.reporting.results_table import Table, cell_name
from fedjax_het.reporting.run_files import early_stopping

# Entries that are set to a cell's seed.
SEEDS = ('seed', 'sampling_seed', 'partition.seed')
# Entries of a config that change a cell's numbers by rounding at most.
_IRRELEVANT = (
    'data_dir', 'data_file', 'compilation_cache', 'tensorboard',
    'conv_backend',
)  # fmt: skip


def with_seed(config, seed: int, overrides: Mapping[str, Any]):
  """A copy of a cell's config for one seed, which a virtual clock has, too."""
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict(dict.fromkeys(SEEDS, seed))
  if config.devices or config.clock.mode != 'synchronous':
    config.clock.seed = seed
  config.update_from_flattened_dict(dict(overrides))
  return config


def read_cells(table: Table, out: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads all stored results, of any seed.

  Args:
    table: The table.
    out: Folder of the results.

  Returns:
    The cells, by column, row and seed.

  Raises:
    FileNotFoundError: If there is none.
    ValueError: If a result is damaged, or of another config.
  """
  return [cell for _, _, cell in stored_cells(table, out)]


def stored_cells(
    table: Table, out: str | os.PathLike
) -> list[tuple[pathlib.Path, Any, dict[str, Any]]]:
  """The results of `read_cells`, each after its file and its config."""
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
      for seed, path in sorted(seeds.items()):
        of_seed = with_seed(config, seed, {})
        cells.append((path, of_seed, read_cell(path, of_seed, table.mean)))
  if not cells:
    raise FileNotFoundError(f'There is no result under {out}/cells yet.')
  return cells


def read_cell(
    path: pathlib.Path, config, mean: str = 'groups'
) -> dict[str, Any]:
  """Reads a stored result, and checks that it has this config and mean.

  Args:
    path: Its file.
    config: The config of the cell.
    mean: The table's, see `Table`.

  Returns:
    The cell. If all groups have equally many clients, both means are equal, and
    a cell of either is accepted.

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
  # Older cells lack it.
  there = cell.get('mean', 'groups')
  sizes = {group_spec(config, name).clients for name in config.groups}
  if there != mean and len(sizes) > 1:
    raise ValueError(
        f'{path} holds the mean over {there}, but the table reports that over '
        f'{mean}; delete it to run the cell again.'
    )
  return cell


def find_cell(
    config, mean: str, folders: Iterable[str | os.PathLike]
) -> tuple[pathlib.Path, dict[str, Any]] | None:
  """Finds a stored result of a config among those of other tables.

  Args:
    config: The config of the cell, with its seed.
    mean: The table's, see `Table`.
    folders: Folders with results, or folders of such folders.

  Returns:
    The file and the cell; None if no file is of this config and mean. Damaged
    files are passed over.
  """
  pattern = f'cells/*-{config.seed}.json'
  for folder in folders:
    for path in sorted(pathlib.Path(folder).rglob(pattern)):
      with contextlib.suppress(ValueError):
        return path, read_cell(path, config, mean)
  return None


def _check_cell(cell: Mapping[str, Any]) -> None:
  """Raises an error if a cell lacks what a table needs."""
  number = int | float
  kinds = dict(
      row=str, column=str, seed=int, last=number | None, worst=number | None,
      best=number | None, best_round=int, reached=int | None,
      round_seconds=number | None, hardware=str, config=dict,
      bytes_up=number, bytes_down=number, client_memory=dict,
      client_flops=dict,
  )  # fmt: skip
  # Cells without columns, and older ones, lack some of these.
  costs = ('client_memory', 'client_flops')
  optional = ('column', 'worst', 'bytes_up', 'bytes_down', *costs)
  for name, kind in kinds.items():
    if name not in optional or name in cell:
      if not isinstance(cell[name], kind):
        raise TypeError(f'{name} is {cell[name]!r}')
  series = dict(accuracy=cell['accuracy'], **cell.get('views', {}))
  for name, values in series.items():
    if len(values) != len(cell['rounds']) or not values:
      raise TypeError(f'{name} does not fit the rounds')
    _check_numbers(name, values)
  for name, values in cell.get('models', {}).items():
    _check_numbers(name, values)
  _check_numbers('personal', [*cell.get('personal', {}).values()])
  _check_numbers('rounds', cell['rounds'])
  for name in costs:
    held = [*cell.get(name, {'': 0}).values()]
    if not held or not all(isinstance(value, number) for value in held):
      raise TypeError(f'{name} holds {held!r:.60}')


def _check_numbers(name: str, values: Sequence[Any]) -> None:
  if not all(isinstance(value, int | float | None) for value in values):
    raise TypeError(f'{name} holds {values!r:.60}')


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
  """The top level of a config without entries that do not change results."""
  kept = {k: v for k, v in config.items() if k not in _IRRELEVANT}
  return kept | dict(callbacks=early_stopping(config))
