"""Preview of a results table without training: states and times of cells."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import os
from typing import Any

from fedjax_het.experiment import duration, form
from fedjax_het.experiment.build import build
from fedjax_het.experiment.sweep import Job, check_cells, jobs
from fedjax_het.experiment.sweep_table import find_cell, read_cell
from fedjax_het.reporting import tables
from fedjax_het.reporting.results_table import Table
from fedjax_het.reporting.run_files import read_rows

# Entries of a config without which a round of plain local training takes as
# long. The partition's seed changes sizes of clients by chance only.
_OTHERS = (
    'algorithm', 'seed', 'sampling_seed', 'num_rounds', 'eval_every',
    'checkpoint_every', 'target_accuracy', 'callbacks', 'label_noise',
)  # fmt: skip


def lines(
    table: Table,
    out: str | os.PathLike,
    workdirs: str | os.PathLike,
    *,
    overrides: Mapping[str, Any] | None = None,
    reuse: Sequence[str | os.PathLike] = (),
) -> Iterator[str]:
  """Describes the cells of a table; one local step per setting is timed.

  Where data is absent, cells and states are listed without times.

  Args:
    table: The table.
    out: Folder of the results, as of `run_cells`.
    workdirs: Folder of the runs' workdirs, as of `run_cells`.
    overrides: {dotted key: value} set in every config, such as `data_dir`.
    reuse: Folders of other tables' results, as of `copy_cells`.

  Yields:
    Lines of text; a table is one entry of several lines.

  Raises:
    ValueError: As `build`, or if a stored result is of another config.
    FileNotFoundError: As `build`, after the last line.
  """
  rows = [['cell', 'state', 'rounds left', 'local training']]
  rounds: dict[str, float | None] = {}  # {setting: seconds of a round}
  total, unknown, number = 0.0, 0, 0
  absent = None
  chosen = [*jobs(table, out, workdirs, overrides or {})]
  with contextlib.suppress(FileNotFoundError):  # It is raised at the end.
    check_cells(chosen)
  for job in chosen:
    state, left = _state(job, reuse)
    if not left:
      rows.append([job.name, state, '-', '-'])
      continue
    setting = _setting(job.config)
    if setting not in rounds:
      try:
        rounds[setting] = _round_seconds(job)
      except FileNotFoundError as e:
        absent, rounds[setting] = e, None
    once = rounds[setting]
    number += 1
    if once is None:
      unknown += 1
    else:
      total += left * once
    shown = '-' if once is None else tables.duration(left * once)
    rows.append([job.name, state, str(left), shown])
  yield tables.as_text(rows)
  yield ''
  if absent is not None:
    yield f'{number} cells to run.'
  elif number:
    text = f'{number} cells to run: about {tables.duration(total)} of plain '
    text += 'local training on one device'
    if unknown:
      text += f', without {unknown} whose backend trains several at once'
    yield (
        f'{text}. Compilation, evaluation and what methods add are not '
        'included.'
    )
  yield 'Nothing was run.'
  if absent is not None:
    raise absent


def _state(job: Job, reuse) -> tuple[str, int]:
  """The state of a cell in words, and its rounds left."""
  if job.path.exists():
    cell = read_cell(job.path, job.config, job.mean)
    return f'has a result: {tables.percent(cell["last"])}', 0
  found = find_cell(job.config, job.mean, reuse)
  if found is not None:
    return f'to be copied from {found[0]}', 0
  rows = read_rows(job.workdir / 'metrics.jsonl')
  done, rounds = rows[-1]['round'] if rows else 0, job.config.num_rounds
  if not done:
    return 'not begun', rounds
  return f'begun, {done} of {rounds} rounds', max(1, rounds - done)


def _setting(config) -> str:
  """What the time of a round of plain local training depends on."""
  entries = json.loads(config.to_json_best_effort())
  entries = {k: v for k, v in entries.items() if k not in _OTHERS}
  entries['partition'].pop('seed', None)
  entries['local'].pop('learning_rate', None)
  return json.dumps(entries, sort_keys=True)


def _round_seconds(job: Job) -> float | None:
  """Seconds of plain local training in a round, if they can be estimated."""
  with contextlib.ExitStack() as stack:
    choose = form.Chooser(job.config, job.workdir, stack)
    experiment = build(job.config, choose)
    found = duration.estimate(experiment, job.config.backend)
  return found and found.round_seconds
