"""Runs the cells of a results table, each once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import ctypes
import datetime
import gc
import importlib.metadata
import json
import os
import pathlib
import platform
import time
from typing import Any, NamedTuple

import jax

from fedjax_het.data import sources
from fedjax_het.experiment import facts as facts_lib
from fedjax_het.experiment import tuned
from fedjax_het.experiment.build import check_method
from fedjax_het.experiment.checks import check
from fedjax_het.experiment.costs import client_costs
from fedjax_het.experiment.examples import naming
from fedjax_het.experiment.progress import Progress
from fedjax_het.experiment.runner import run
from fedjax_het.experiment.sweep_table import find_cell, read_cell, with_seed
from fedjax_het.files import check_local, write_atomically
from fedjax_het.kernels import libraries
from fedjax_het.reporting import tables
from fedjax_het.reporting.results_table import Table, cell_name
from fedjax_het.reporting.run_files import Row
from fedjax_het.reporting.summary import summarise, views_of


class Job(NamedTuple):
  """A cell to run: its place in the table, its config and its paths."""

  number: int
  row: str
  column: str
  seed: int
  config: Any
  mean: str
  path: pathlib.Path
  workdir: pathlib.Path

  @property
  def name(self) -> str:
    """Row, column and seed in words."""
    parts = (self.row, self.column, f'seed {self.seed}')
    return ', '.join(part for part in parts if part)


def hardware(form: Mapping[str, Any] | None = None) -> str:
  """What a run used, in words.

  Args:
    form: The run's `facts['form']`, if it has one.

  Returns:
    The device, the cores that this process may use of all cores, and the
    library of convolutions that the run chose on a CPU.
  """
  kind, backend = jax.devices()[0].device_kind, jax.default_backend()
  name = tuned.cpu_name() if backend == 'cpu' else kind
  cores = f'{tuned.cores()} of {os.cpu_count()} cores, {platform.machine()}'
  words = [f'{name or kind} ({backend})', cores]
  if form is not None:
    words.append(f"{libraries.title(form['conv_backend'])}'s convolutions")
  return ', '.join(words)


def versions() -> dict[str, str]:
  """Versions of Python, JAX, this library and the libraries that it uses."""
  found = dict(facts_lib.versions(), python=platform.python_version())
  for name in ('fedjax_het', 'flax', 'optax', 'numpy'):
    # The library itself may be on the path without being installed.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[name] = importlib.metadata.version(name)
  return found


def jobs(table: Table, out, workdirs, overrides) -> Iterator[Job]:
  """All cells, ordered by seed, then column, then row.

  Args:
    table: The table.
    out: Folder of the results, as of `run_cells`.
    workdirs: Folder of the runs' workdirs, as of `run_cells`.
    overrides: {dotted key: value} set in every config.

  Yields:
    The cells, whether they have a result or not.
  """
  number = 0
  for seed in table.seeds:
    for column in table.columns:
      for row in table.rows:
        config = table.config(row, column)
        if config is None:
          continue
        number += 1
        name = f'{cell_name(row, column)}-{seed}'
        yield Job(
            number, row, column, seed, with_seed(config, seed, overrides),
          table.mean,
            pathlib.Path(out, 'cells', f'{name}.json'),
            pathlib.Path(workdirs, name),
        )  # fmt: skip


def copy_cells(
    table: Table,
    out: str | os.PathLike,
    folders: Sequence[str | os.PathLike],
    *,
    announce: Callable[[str], None] = lambda line: None,
) -> None:
  """Copies the results that other tables have of a table's configs.

  Args:
    table: The table; its cells that have a result are left as they are.
    out: Folder of its results, as of `run_cells`.
    folders: Folders with results, or folders of such folders.
    announce: Called with a line of text for each copied cell.

  Raises:
    OSError: If a result cannot be written.
  """
  checked: dict[tuple[Any, ...], int | None] = {}
  for job in jobs(table, out, '', {}):
    if job.path.exists():
      continue
    found = find_cell(job.config, job.mean, folders)
    if found is not None and _is_of_data(job, found[1], checked):
      path, cell = found
      cell = dict(cell, row=job.row, column=job.column, mean=job.mean)
      if not job.column:
        del cell['column']
      _write(job, cell)
      announce(f'{job.name}: copied from {path}')


def run_cells(
    table: Table,
    out: str | os.PathLike,
    workdirs: str | os.PathLike,
    *,
    overrides: Mapping[str, Any] | None = None,
    announce: Callable[[str], None] = lambda line: None,
    progress: Callable[[int], Progress] | None = None,
) -> list[dict[str, Any]]:
  """Runs every cell that has no result yet.

  An interrupted cell is resumed from its last checkpoint. Processes that have
  the same folders share the work: a cell that another process runs is skipped,
  and tried again as long as other cells are run.

  Args:
    table: The table.
    out: Folder of the results, with one JSON file per cell under `cells/`.
    workdirs: Folder of the runs' workdirs, which may be deleted afterwards.
    overrides: {dotted key: value} set in every config, such as `data_dir`.
    announce: Called with a line of text before and after each cell.
    progress: Called with the number of rounds of each run; returns its
      observer.

  Returns:
    The cells' results, by seed, column and row; without those that other
    processes still run.

  Raises:
    ValueError: As `run`, if a stored result is of another config, or if a
      folder is a cloud folder.
    FileNotFoundError: If the data of a cell are missing; before any cell runs.
    FloatingPointError: If updates were not finite in some cells; after all
      other cells have run.
    OSError: As `run`.
  """
  check_local(out, 'out')
  check_local(workdirs, 'workdirs')
  chosen = [*jobs(table, out, workdirs, overrides or {})]
  check_cells(chosen)
  sweep = _Sweep(chosen, announce, progress)
  todo, ran = chosen, -1
  while todo and sweep.runs > ran:
    ran = sweep.runs
    todo = [job for job in todo if not sweep.attempt(job)]
  for job in todo:
    sweep.say(job, 'still run by another process; no result yet')
  if sweep.failures:
    more = len(sweep.failures) - 1
    raise FloatingPointError(
        sweep.failures[0] + (f' And {more} more cells failed.' if more else '')
    )
  return [_read(job) for job in chosen if job not in todo]


def _read(job: Job) -> dict[str, Any]:
  return read_cell(job.path, job.config, job.mean)


def _write(job: Job, cell: dict[str, Any]) -> None:
  job.path.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(job.path, json.dumps(cell, indent=1))


def _is_of_data(
    job: Job,
    cell: Mapping[str, Any],
    found: dict[tuple[Any, ...], int | None],
) -> bool:
  """Whether a stored result is of the user's data that a job names.

  Args:
    job: The job.
    cell: The stored result; those of the library's data sets do not say.
    found: {entries of the data: their CRC-32, None for absent data}, extended.

  Returns:
    Whether it is, or may be.
  """
  if 'data' not in cell:
    return True
  data = tuple(job.config[entry] for entry in sources.ENTRIES)
  if data not in found:
    found[data] = None
    with contextlib.suppress(FileNotFoundError):
      found[data] = facts_lib.data_crc(sources.load_entries(*data))
  return found[data] in (None, cell['data'])


# Entries that do not matter to a method's and a model's options.
_CHANCE = ('seed', 'sampling_seed', 'group_seed', 'partition')


def check_cells(chosen: Sequence[Job]) -> None:
  """Checks all cells before the first one runs.

  Args:
    chosen: The cells; of those with a result, that it is of their config.

  Raises:
    ValueError: If a config, or an option of a method or a model, is wrong.
    FileNotFoundError: If data are missing, after all other checks.
  """
  columns: dict[tuple[Any, ...], list[Job]] = {}
  checked: dict[tuple[Any, ...], int | None] = {}
  for job in chosen:
    if job.path.exists():
      if not _is_of_data(job, _read(job), checked):
        raise ValueError(
            f'{job.path} is of other data than those of data_file or data_dir '
            'here; delete it, or choose another folder.'
        )
    else:
      with naming(f'Cell {job.name}'):
        check(job.config)
      data = tuple(job.config[entry] for entry in sources.ENTRIES)
      columns.setdefault(data, []).append(job)
  absent: FileNotFoundError | None = None
  for data, cells in columns.items():
    try:
      dataset = sources.load_entries(*data)
    except FileNotFoundError as e:
      needed = ', '.join(filter(None, dict.fromkeys(j.column for j in cells)))
      text = f'{e} It is for {needed}; --cols chooses columns.'
      absent = absent or FileNotFoundError(text if needed else str(e))
      continue
    seen = set()
    for job in cells:
      entries = json.loads(job.config.to_json_best_effort())
      setting = json.dumps(
          {k: v for k, v in entries.items() if k not in _CHANCE}, sort_keys=True
      )
      if setting not in seen:
        seen.add(setting)
        with naming(f'Cell {job.name}'):
          check_method(job.config, dataset)
  if absent is not None:
    raise absent


class _Sweep:
  """A process's progress on a table's cells.

  Attributes:
    runs: How many cells it ran.
    failures: A line for each cell whose run ended without a result.
  """

  def __init__(self, chosen, announce, progress):
    self.runs = 0
    self.failures: list[str] = []
    self._jobs, self._announce = chosen, announce
    self._progress = progress
    self._seconds = 0.0

  def say(self, job: Job, text: str) -> None:
    """Announces the status of a cell."""
    self._announce(
        f'Cell {job.number} of {len(self._jobs)}, {job.name}: {text}'
    )

  def attempt(self, job: Job) -> bool:
    """Runs a cell without a result; False if another process runs it."""
    if job.path.exists():
      cell = _read(job)
      self.say(job, f'skipped, has a result: {tables.percent(cell["last"])}')
      return True
    self.say(job, 'running')
    begin = time.perf_counter()
    try:
      cell = self._run(job)
      _write(job, cell)
      text = tables.percent(cell['last'])
    except ValueError as e:
      if not isinstance(e.__cause__, BlockingIOError):  # The workdir's lock.
        raise
      self.say(job, 'another process runs it; going on')
      return False
    except FloatingPointError as e:
      self.failures.append(f'{job.name}: {e}')
      text = f'failed: {e}'
    _free_memory()
    self.runs += 1
    self._seconds += time.perf_counter() - begin
    self.say(job, text + self._left())
    return True

  def _run(self, job: Job) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
      options = {}
      if self._progress is not None:
        observe = self._progress(job.config.num_rounds)
        options['observe'] = stack.enter_context(contextlib.closing(observe))
      return _cell(job, run(job.config, job.workdir, **options))

  def _left(self) -> str:
    """How many cells are left, and how long they may take."""
    left = sum(not job.path.exists() for job in self._jobs)
    left -= len(self.failures)
    if not left:
      return ''
    each = self._seconds / self.runs
    duration = datetime.timedelta(seconds=round(left * each))
    return f' ({left} left, about {duration})'


def _free_memory() -> None:
  """Frees the programs and the heap of the last cell.

  Otherwise the programs of all cells stay in memory, and the C library keeps
  most of what was freed.
  """
  jax.clear_caches()
  gc.collect()
  # Only glibc has this function.
  with contextlib.suppress(AttributeError, OSError, TypeError):
    ctypes.CDLL(None).malloc_trim(0)


def _cell(job: Job, result) -> dict[str, Any]:
  """The stored result of a run, without the paths of this machine's data."""
  config = json.loads((result.workdir / 'config.json').read_text())
  for name in ('data_dir', 'data_file'):
    config.pop(name, None)
  rows = _of_mean(result.rows, job.mean)
  tests = [row for row in rows if row['split'] == 'test']
  summary = summarise(rows, config['target_accuracy'])
  models = {
      group: summary.last[f'accuracy/{group}/models']
      for group in config['groups']
  }
  # Tables without columns and methods without views lack these entries.
  more = dict(column=job.column) if job.column else {}
  views = {
      name: [row[f'views/{name}'] for row in tests]
      for name in views_of(summary.last)
  }
  if views:
    more['views'] = views
  personal = {
      name: summary.last[f'personal/{name}']
      for name in ('accuracy', 'std', 'worst', 'p10')
      if f'personal/{name}' in summary.last
  }
  if personal:
    more['personal'] = personal
  if all('virtual_time' in row for row in tests):
    more['virtual_times'] = [row['virtual_time'] for row in tests]
  if config['dataset'] not in sources.DATASETS:
    more['data'] = result.facts['data']
  seconds = result.facts.get('compile_seconds')
  if seconds is not None:  # A run without a round that is compiled has none.
    more['compile_seconds'] = seconds
  more.update(client_costs(job.config))
  more['groups'] = {
      group: [row[f'accuracy/{group}'] for row in tests] for group in models
  }
  return dict(
      row=job.row,
      seed=job.seed,
      mean=job.mean,
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
      hardware=hardware(result.facts.get('form')),
      versions=versions(),
      config=config,
      **more,
  )


def _of_mean(rows, mean: str) -> list[Row]:
  """Rows with that mean as `accuracy`, by which best rounds are chosen."""
  if mean == 'groups':
    return list(rows)
  return [
      {**row, 'accuracy': row[f'accuracy/{mean}']} if 'accuracy' in row else row
      for row in rows
  ]
