"""Several workdirs in one table and one picture."""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.analysis import pictures
from fedjax_het.files import write_atomically
from fedjax_het.reporting import report, tables
from fedjax_het.reporting.run_files import Row, read_run
from fedjax_het.reporting.summary import Summary, summarise

# Entries in which repetitions of a run differ, and those that say nothing of
# what it computes.
_SEEDS = (
    'seed', 'sampling_seed', 'group_seed', 'partition.seed', 'clock.seed',
    'clock.device_seed',
)  # fmt: skip
_PLACES = (
    'data_dir', 'data_file', 'compilation_cache', 'tensorboard', 'callbacks',
)  # fmt: skip


class _Run(NamedTuple):
  """The results in a workdir."""

  folder: pathlib.Path
  config: dict[str, Any]
  rows: list[Row]
  summary: Summary


def _read(folder: pathlib.Path) -> _Run:
  config, _, rows = read_run(folder)
  with report.fitting(folder):
    summary = summarise(rows, config['target_accuracy'])
    return _Run(folder, config, rows, summary)


def _without_seeds(config: Mapping[str, Any]) -> dict[str, Any]:
  """A config without the entries in which repetitions differ."""
  plain = json.loads(json.dumps(config))
  for key in (*_SEEDS, *_PLACES):
    *path, name = key.split('.')
    section = plain
    for part in path:
      section = section.get(part)
    if isinstance(section, dict):  # A damaged file may hold anything.
      section.pop(name, None)
  return plain


def _repetitions(runs: Sequence[_Run]) -> list[list[_Run]]:
  """The runs that differ in their seeds alone, two or more together."""
  found: dict[str, dict[str, _Run]] = {}
  for run in runs:
    key = json.dumps(_without_seeds(run.config), sort_keys=True)
    seeds = json.dumps(run.config, sort_keys=True)
    found.setdefault(key, {})[seeds] = run
  return [[*same.values()] for same in found.values() if len(same) > 1]


def _table(runs: Sequence[_Run]) -> tables.Table:
  """A line for each run, then one for each set of repetitions."""
  table = [[
      'run', 'method', 'data', 'split', 'seed', 'rounds', 'last', 'worst',
      'best (round)', 'target in round', 'up', 'down', 'a round',
      'virtual time', 'own test examples',
  ]]  # fmt: skip
  for run in runs:
    with report.fitting(run.folder):
      table.append(_line(run))
  for same in _repetitions(runs):
    with report.fitting(same[0].folder):
      table.append(_mean_line(same))
  if all(line[-1] == '-' for line in table[1:]):
    table = [line[:-1] for line in table]
  return table


def compare(folders: Sequence[pathlib.Path]) -> str:
  """A table with a line for each of several workdirs.

  Runs that differ in their seeds alone have a further line with the mean and
  the sample deviation over these runs.

  Args:
    folders: The workdirs.

  Returns:
    The table as Markdown.

  Raises:
    FileNotFoundError: If a folder is no workdir with an evaluated run.
    ValueError: If a file is damaged.
  """
  return tables.as_markdown(_table([_read(folder) for folder in folders]))


def _line(run: _Run) -> list[str]:
  """The cells of one workdir."""
  config, summary, best = run.config, run.summary, run.summary.best
  return [
      str(run.folder),
      str(config['algorithm']['name']),
      str(config['dataset']),
      report.named(config['partition']),
      str(config['seed']),
      str(summary.rounds),
      report.percent_of(summary.last),
      tables.percent(summary.last['accuracy/worst']),
      report.percent_of(best) + (f' ({best["round"]})' if best else ''),
      '-' if summary.reached is None else str(summary.reached),
      tables.megabytes(summary.bytes_up),
      tables.megabytes(summary.bytes_down),
      tables.seconds(summary.round_seconds),
      '-'
      if summary.virtual_time is None
      else f'{summary.virtual_time:,.1f} s',
      tables.personal_line(summary.last),
  ]


def _mean_line(runs: Sequence[_Run]) -> list[str]:
  """The cells of repetitions: mean and deviation of their accuracies."""
  config = _without_seeds(runs[0].config)
  summaries = [run.summary for run in runs]
  reached = ['-' if s.reached is None else str(s.reached) for s in summaries]
  best = [s.best for s in summaries if s.best]

  def spread(values):
    return f'{tables.spread(values)} %'

  def mean(name):
    return float(np.mean([getattr(s, name) for s in summaries]))

  return [
      f'mean of {len(runs)} seeds',
      str(config['algorithm']['name']),
      str(config['dataset']),
      report.named(config['partition']),
      ', '.join(str(run.config['seed']) for run in runs),
      ', '.join(dict.fromkeys(str(s.rounds) for s in summaries)),
      spread([s.last['accuracy'] for s in summaries]),
      spread([s.last['accuracy/worst'] for s in summaries]),
      spread([row['accuracy'] for row in best]) if best else '-',
      ', '.join(reached),
      tables.megabytes(mean('bytes_up')),
      tables.megabytes(mean('bytes_down')),
      '-',
      '-',
      '-',
  ]


def _tests(run: _Run) -> tuple[list[int], list[float]]:
  """Rounds and mean accuracies of a run's evaluations."""
  with report.fitting(run.folder):
    tests = [row for row in run.rows if row['split'] == 'test']
    accuracies = [report.or_nan(row['accuracy']) for row in tests]
    return [row['round'] for row in tests], accuracies


def _by_round(runs: Sequence[_Run]) -> dict[str, tuple[list[int], Any]]:
  """A curve for each run, or one with a band for repetitions."""
  curves = {str(run.folder): _tests(run) for run in runs}
  for same in _repetitions(runs):
    found = [_tests(run) for run in same]
    rounds = found[0][0]
    if all(other == rounds for other, _ in found):
      for run in same:
        curves.pop(str(run.folder), None)
      label = f'{same[0].folder} and {len(same) - 1} more seeds'
      curves[label] = rounds, np.array([values for _, values in found])
  return curves


def _by_time(runs: Sequence[_Run]) -> dict[str, tuple[list[float], Any]]:
  """The curves over virtual time, of the runs that have it."""
  curves = {}
  for run in runs:
    with report.fitting(run.folder):
      tests = [row for row in run.rows if row['split'] == 'test']
      if all('virtual_time' in row for row in tests):
        times = [float(row['virtual_time']) for row in tests]
        curves[str(run.folder)] = times, _tests(run)[1]
  return curves


def write_comparison(
    folders: Sequence[pathlib.Path],
    out: pathlib.Path,
    formats: Sequence[str] = (),
) -> str:
  """Writes comparison.md and, with matplotlib, its pictures.

  comparison.png is over rounds, and times.png over virtual time, of the runs
  that have it. Runs that differ in their seeds alone are one curve with a band.

  Args:
    folders: The workdirs.
    out: A folder, created if it is not there.
    formats: Of `tables.FORMATS`, what is written besides: the table as 'csv'
      and 'tex', the pictures as 'pdf' and 'svg'.

  Returns:
    The table as Markdown.

  Raises:
    FileNotFoundError: If a folder is no workdir with an evaluated run.
    ValueError: If a file is damaged.
    OSError: If nothing can be written there.
  """
  runs = [_read(folder) for folder in folders]
  table = _table(runs)
  by_round, by_time = _by_round(runs), _by_time(runs)
  out.mkdir(parents=True, exist_ok=True)
  label = 'Mean test accuracy'
  picture = '![Mean test accuracy by round](comparison.png)'
  if by_time:
    picture += '\n\n![Mean test accuracy by virtual time](times.png)'
  try:
    for ending in ('png', *(f for f in ('pdf', 'svg') if f in formats)):
      path = out / f'comparison.{ending}'
      pictures.draw_curves(by_round, path, label, percent=True)
      if by_time:
        pictures.draw_curves(
            by_time,
            out / f'times.{ending}',
            label,
            xlabel=report.VIRTUAL_TIME,
            percent=True,
        )
  except ImportError:
    picture = report.NO_PICTURES
  markdown = tables.as_markdown(table)
  text = f'# Comparison\n\n{markdown}\n\n{picture}\n'
  write_atomically(out / 'comparison.md', text)
  if 'csv' in formats:
    write_atomically(out / 'comparison.csv', tables.as_csv(table))
  if 'tex' in formats:
    write_atomically(out / 'comparison.tex', tables.as_latex(table))
  return markdown
