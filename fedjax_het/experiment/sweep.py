"""Runs the cells of a results table, each once, and renders the table."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import json
import os
import pathlib
import platform
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_het.analysis import pictures
from fedjax_het.experiment import facts as facts_lib
from fedjax_het.experiment import tables
from fedjax_het.experiment.config import with_new_entries
from fedjax_het.experiment.runner import run
from fedjax_het.experiment.workdir import write_atomically

# Entries of a config that do not change the numbers of a cell.
_IRRELEVANT = ('data_dir', 'compilation_cache', 'tensorboard')


class Table(NamedTuple):
  """A table of results: one row per method, some seeds each.

  Attributes:
    title: Its heading.
    setting: What all cells share, in words.
    rows: {label: config}.
    paper: {label: what the paper reports, in its own setting}.
    seeds: Seeds of training, partition and sampling, all three alike.
    families: {name: groups}: sets of groups that are compared besides, in a
      second table and in bars; {} for none.
    bars: Rows whose models are drawn as bars; () for all.
  """

  title: str
  setting: str
  rows: Mapping[str, Any]
  paper: Mapping[str, str]
  seeds: Sequence[int]
  families: Mapping[str, Sequence[str]] = {}
  bars: Sequence[str] = ()


def hardware() -> str:
  """The device and the number of cores, in words."""
  device = jax.devices()[0]
  return (
      f'{device.device_kind} ({jax.default_backend()}), '
      f'{os.cpu_count()} cores, {platform.machine()}'
  )


def _slug(label: str, seed: int) -> str:
  name = re.sub(r'[^a-z0-9]+', '_', label.lower()).strip('_')
  return f'{name}-{seed}'


def _with_seed(config, seed: int, overrides: Mapping[str, Any]):
  """A copy of a row's config for one seed."""
  config = config.copy_and_resolve_references()
  config.seed = config.sampling_seed = config.partition.seed = seed
  config.update_from_flattened_dict(dict(overrides))
  return config


def run_cells(
    table: Table,
    out: str | os.PathLike,
    workdirs: str | os.PathLike,
    *,
    overrides: Mapping[str, Any] | None = None,
    announce: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
  """Runs every cell that has no result yet.

  A cell that was interrupted goes on from its last checkpoint.

  Args:
    table: The table.
    out: Folder of the results: one JSON file a cell under `cells/`.
    workdirs: Folder of the runs' workdirs, which may be deleted afterwards.
    overrides: {dotted key: value} set in every config, such as `data_dir`.
    announce: Called with a line of text before and after each cell.

  Returns:
    The cells' results, in the order of rows and seeds.

  Raises:
    ValueError: As `run`, and if a stored result is of another config.
    OSError: As `run`.
  """
  cells = []
  for seed in table.seeds:
    for label, config in table.rows.items():
      path = pathlib.Path(out, 'cells', f'{_slug(label, seed)}.json')
      config = _with_seed(config, seed, overrides or {})
      if not path.exists():
        announce(f'{label}, seed {seed}: running')
        result = run(config, pathlib.Path(workdirs, _slug(label, seed)))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(_cell(label, seed, result), indent=1))
        del result
        jax.clear_caches()  # Else the programs of all cells stay in memory.
      cell = _read_cell(path, config)
      announce(f'{label}, seed {seed}: {tables.percent(cell["last"])}')
      cells.append(cell)
  return cells


def read_cells(table: Table, out: str | os.PathLike) -> list[dict[str, Any]]:
  """The results that are there, in the order of rows and seeds.

  Args:
    table: The table.
    out: Folder of the results.

  Returns:
    The cells.

  Raises:
    FileNotFoundError: If a row has no result at all.
    ValueError: If a result is of another config.
  """
  cells = []
  for label, config in table.rows.items():
    paths = {
        seed: pathlib.Path(out, 'cells', f'{_slug(label, seed)}.json')
        for seed in table.seeds
    }
    found = {seed: path for seed, path in paths.items() if path.exists()}
    if not found:
      raise FileNotFoundError(f'No result of {label!r} under {out}/cells.')
    cells += [
        _read_cell(path, _with_seed(config, seed, {}))
        for seed, path in found.items()
    ]
  return cells


def _read_cell(path: pathlib.Path, config) -> dict[str, Any]:
  """A stored result, if it is one of this config."""
  cell = json.loads(path.read_text(encoding='utf-8'))
  wanted = _comparable(json.loads(config.to_json_best_effort()))
  stored = _comparable(with_new_entries(cell['config']))
  odd = sorted(k for k in wanted | stored if wanted.get(k) != stored.get(k))
  if odd:
    raise ValueError(
        f'{path} is of another config: {odd[0]} is {stored.get(odd[0])} there '
        f'and {wanted.get(odd[0])} here; delete it to run the cell again.'
    )
  return cell


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
  """A config's top level without what does not change a result."""
  return {k: v for k, v in config.items() if k not in _IRRELEVANT}


def _cell(label: str, seed: int, result) -> dict[str, Any]:
  """What is kept of a run; paths of the machine are left out."""
  config = json.loads((result.workdir / 'config.json').read_text())
  config.pop('data_dir', None)
  tests = [row for row in result.rows if row['split'] == 'test']
  summary = result.summary
  models = {
      group: summary.last[f'accuracy/{group}/models']
      for group in config['groups']
  }
  return dict(
      row=label,
      seed=seed,
      last=summary.last['accuracy'],
      worst=summary.last['accuracy/worst'],
      best=summary.best['accuracy'],
      best_round=summary.best['round'],
      validated=summary.validated,
      reached=summary.reached,
      bytes_up=summary.bytes_up,
      bytes_down=summary.bytes_down,
      round_seconds=summary.round_seconds,
      rounds=[row['round'] for row in tests],
      accuracy=[row['accuracy'] for row in tests],
      models=models,
      hardware=hardware(),
      versions=facts_lib.versions(),
      config=config,
  )


def _spread(values: Sequence[float | None]) -> str:
  """Mean and sample deviation of fractions, in percent."""
  if None in values:
    return 'not finite'
  percent = 100 * np.asarray(values)
  if len(percent) == 1:
    return f'{percent[0]:.1f}'
  return f'{percent.mean():.1f} ± {percent.std(ddof=1):.1f}'


def _best(cells: Sequence[Mapping[str, Any]]) -> str:
  """On what best rounds were chosen; older cells do not say."""
  if all(cell.get('validated', False) for cell in cells):
    return 'The best round is chosen on examples that clients hold out.'
  return 'The best round is chosen on the test set and flatters.'


def _seeds(cells: Sequence[Mapping[str, Any]]) -> str:
  return ', '.join(map(str, sorted({cell['seed'] for cell in cells})))


def render(
    table: Table, cells: Sequence[Mapping[str, Any]], out: str | os.PathLike
) -> str:
  """Writes table.md and, where the extra `plots` is there, curves.png.

  Args:
    table: The table.
    cells: Results of `run_cells`.
    out: Folder of the results.

  Returns:
    The table as Markdown.
  """
  rows = [[
      'method', 'seeds', 'last round', 'best round', 'worst model',
      'target in round', 'seconds a round', 'paper',
  ]]  # fmt: skip
  curves = {}
  for label in table.rows:
    mine = [cell for cell in cells if cell['row'] == label]
    reached = [
        '-' if cell['reached'] is None else str(cell['reached'])
        for cell in mine
    ]
    rows.append([
        label,
        str(len(mine)),
        _spread([cell['last'] for cell in mine]),
        _spread([cell['best'] for cell in mine]),
        _spread([cell['worst'] for cell in mine]),
        ', '.join(reached),
        f'{np.median([cell["round_seconds"] for cell in mine]):.1f}',
        table.paper.get(label, '-'),
    ])
    curves[label] = (
        mine[0]['rounds'],
        np.array([cell['accuracy'] for cell in mine], float),
    )
  folder = pathlib.Path(out)
  markdown = tables.as_markdown(rows)
  families = _families(table, cells, folder) if table.families else ''
  where = sorted({cell['hardware'] for cell in cells})
  write_atomically(
      folder / 'table.md',
      f'# {table.title}\n\n{table.setting}\n\n'
      'Test accuracy in percent on the whole test set, mean over groups; mean '
      f'± sample deviation over seeds {_seeds(cells)} (of training, partition '
      f'and sampling), of which a row has as many as it says. {_best(cells)} '
      f'Hardware: {"; ".join(where)}.'
      f'\n\n{markdown}\n\n'
      f'![Accuracy by round](curves.png)\n{families}',
  )
  with contextlib.suppress(ImportError):  # No extra `plots`: no picture.
    pictures.draw_curves(
        curves, folder / 'curves.png', 'Mean test accuracy', percent=True
    )
  return markdown


def _families(
    table: Table, cells: Sequence[Mapping[str, Any]], folder: pathlib.Path
) -> str:
  """Draws models and families as bars; returns the families' table."""
  rows = [['method', *table.families]]
  bars = {}
  for label in table.rows:
    mine = [c['models'] for c in cells if c['row'] == label and 'models' in c]
    if not mine:
      continue
    bars[label] = {
        group: [np.mean(models[group]) for models in mine] for group in mine[0]
    }
    row = [label]
    for groups in table.families.values():
      values = [bars[label][group] for group in groups if group in mine[0]]
      row.append(_spread(list(np.mean(values, axis=0))) if values else '-')
    rows.append(row)
  text = f'\n## By family of models\n\n{tables.as_markdown(rows)}\n'
  drawn = {name: bars[name] for name in table.bars or bars if name in bars}
  if not drawn:  # None of the rows that were asked for.
    return text
  with contextlib.suppress(ImportError):  # No extra `plots`: no picture.
    pictures.draw_bars(
        drawn,
        folder / 'models.png',
        'Test accuracy, last round',
        percent=True,
    )
  return f'{text}\n![Accuracy of every model](models.png)\n'
