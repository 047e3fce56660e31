"""Several workdirs in one table and one picture."""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.analysis import pictures
from fedjax_het.engine.task import Metric
from fedjax_het.files import check_local, write_atomically
from fedjax_het.reporting import report, tables
from fedjax_het.reporting.looks import method_looks
from fedjax_het.reporting.report_pictures import (
  CLIENT_BYTES,
  NO_PICTURES,
  VIRTUAL_TIME,
  or_nan,
)
from fedjax_het.reporting.run_files import (
  Row,
  early_stopping,
  fitting,
  read_run,
  short_names,
)
from fedjax_het.reporting.setting import named
from fedjax_het.reporting.summary import (
  Summary,
  in_common_rounds,
  main_metric,
  num_clients,
  summarise,
)

# Entries that differ between repetitions of a run, and entries that do not
# affect what it computes.
_SEEDS = (
    'seed', 'sampling_seed', 'group_seed', 'partition.seed', 'clock.seed',
    'clock.device_seed',
)  # fmt: skip
_PLACES = (
    'data_dir', 'data_file', 'compilation_cache', 'tensorboard', 'callbacks',
)  # fmt: skip


class _Run(NamedTuple):
  """The results in a workdir, and a name for legends."""

  folder: pathlib.Path
  name: str
  config: dict[str, Any]
  rows: list[Row]
  summary: Summary
  data: int | None = None  # Runs of older versions do not say.


def _read(folders: Sequence[pathlib.Path]) -> list[_Run]:
  runs = []
  for folder, name in zip(folders, short_names(folders), strict=True):
    config, facts, rows = read_run(folder)
    with fitting(folder):
      metric = main_metric(facts)
      summary = summarise(rows, config['target_accuracy'], metric)
      runs.append(
          _Run(folder, name, config, rows, summary, facts.get('data'))
      )
  return runs


def _without_seeds(config: Mapping[str, Any]) -> dict[str, Any]:
  """A config without seeds and without entries that do not affect results."""
  plain = json.loads(json.dumps(config))
  for key in (*_SEEDS, *_PLACES):
    *path, name = key.split('.')
    section = plain
    for part in path:
      section = section.get(part)
    if isinstance(section, dict):  # A damaged file may hold anything.
      section.pop(name, None)
  return plain | dict(callbacks=early_stopping(config))


def _seeds(config: Mapping[str, Any]) -> str:
  """The values of a config's seeds."""
  values = []
  for key in _SEEDS:
    value = config
    for name in key.split('.'):
      value = value.get(name) if isinstance(value, Mapping) else None
    values.append(value)
  return json.dumps(values)


def _repetitions(runs: Sequence[_Run]) -> list[list[_Run]]:
  """Sets of two or more runs that differ in their seeds alone."""
  found: dict[str, dict[str, _Run]] = {}
  for run in runs:
    key = json.dumps([_without_seeds(run.config), run.data], sort_keys=True)
    found.setdefault(key, {})[_seeds(run.config)] = run
  return [[*same.values()] for same in found.values() if len(same) > 1]


def _table(runs: Sequence[_Run]) -> tables.Table:
  """A line for each run, then one for each set of repetitions."""
  table = [[
      'run', 'method', 'data', 'split', 'seed', 'rounds', 'last', 'worst',
      'best (round)', 'target in round', 'up, a client', 'down, a client',
      'a round', 'virtual time', 'own test examples',
  ]]  # fmt: skip
  for run in runs:
    with fitting(run.folder):
      table.append(_line(run))
  for same in _repetitions(runs):
    with fitting(same[0].folder):
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
    FileNotFoundError: If a folder is not a workdir with an evaluated run.
    ValueError: If a file is damaged.
  """
  return tables.as_markdown(_table(_read(folders)))


def _line(run: _Run) -> list[str]:
  """The cells of one workdir."""
  config, summary, best = run.config, run.summary, run.summary.best
  metric = summary.metric
  return [
      str(run.folder),
      str(config['algorithm']['name']),
      str(config['dataset']),
      named(config['partition']),
      str(config['seed']),
      str(summary.rounds),
      report.mean_of(summary, summary.last),
      tables.amount(summary.last[f'{metric.name}/worst'], metric),
      report.mean_of(summary, best) + (f' ({best["round"]})' if best else ''),
      '-' if summary.reached is None else str(summary.reached),
      *(tables.megabytes(sent) for sent in _client_bytes(run)),
      tables.seconds(summary.round_seconds),
      '-'
      if summary.virtual_time is None
      else f'{summary.virtual_time:,.1f} s',
      tables.personal_line(summary.last, metric=metric),
  ]


def _mean_line(runs: Sequence[_Run]) -> list[str]:
  """The cells of repetitions: mean and deviation of their results."""
  config = _without_seeds(runs[0].config)
  summaries = [run.summary for run in runs]
  reached = ['-' if s.reached is None else str(s.reached) for s in summaries]
  best = [s.best for s in summaries if s.best]

  metric = summaries[0].metric

  def spread(values):
    return tables.spread(values, metric) + metric.percent * ' %'

  both_ways = zip(*map(_client_bytes, runs), strict=True)
  return [
      f'mean of {len(runs)} seeds',
      str(config['algorithm']['name']),
      str(config['dataset']),
      named(config['partition']),
      ', '.join(str(run.config['seed']) for run in runs),
      ', '.join(dict.fromkeys(str(s.rounds) for s in summaries)),
      spread([s.last[metric.name] for s in summaries]),
      spread([s.last[f'{metric.name}/worst'] for s in summaries]),
      spread([row[metric.name] for row in best]) if best else '-',
      ', '.join(reached),
      *(tables.megabytes(np.mean(sent)) for sent in both_ways),
      '-',
      '-',
      tables.personal_line(*(s.last for s in summaries), metric=metric),
  ]


def _client_bytes(run: _Run) -> tuple[float, float]:
  """Bytes up and down in the whole run, the mean over all clients."""
  number = num_clients(run.config)
  return run.summary.bytes_up / number, run.summary.bytes_down / number


def _panels(curves, runs: Sequence[_Run]) -> dict[str, dict[str, Any]]:
  """Sorts curves into one panel for each data set and split."""
  split_of = {}
  for run in runs:
    config = _without_seeds(run.config)
    split = named(config['partition']).strip()
    split_of[run.folder] = f'{config["dataset"]}, {split}'
  panels: dict[str, dict[str, Any]] = {}
  for (folder, label), curve in curves.items():
    panels.setdefault(split_of[folder], {})[label] = curve
  return panels


def _tests(run: _Run) -> tuple[list[int], list[float]]:
  """Rounds and mean metrics of a run's evaluations."""
  with fitting(run.folder):
    tests = [row for row in run.rows if row['split'] == 'test']
    main = run.summary.metric.name
    values = [or_nan(row[main]) for row in tests]
    return [row['round'] for row in tests], values


def _drawn(
    runs: Sequence[_Run],
) -> dict[tuple[pathlib.Path, str], list[_Run]]:
  """{(folder, label): runs}: repetitions are drawn as one, others alone."""
  sets = [same for same in _repetitions(runs) if _curve(same)[0]]
  repeated = [run.folder for same in sets for run in same]
  alone = [run for run in runs if run.folder not in repeated]
  return {(run.folder, run.name): [run] for run in alone} | {
      (same[0].folder, f'{same[0].name} and {len(same) - 1} more seeds'): same
      for same in sets
  }


def _curve(runs: Sequence[_Run]) -> tuple[list[int], np.ndarray]:
  """The rounds [R] that all runs evaluated, and their metrics [S, R]."""
  return in_common_rounds(*zip(*map(_tests, runs), strict=True))


def _by_round(drawn) -> dict[Any, tuple[list[int], np.ndarray]]:
  """{(folder, label): (rounds [R], metrics [S, R])}."""
  return {key: _curve(same) for key, same in drawn.items()}


def _by_time(drawn) -> dict[Any, tuple[list[float], Any]]:
  """{(folder, label): (mean virtual times [R], metrics [S, R])}.

  Runs without a virtual clock are left out.
  """
  curves = {}
  for key, (rounds, values) in _by_round(drawn).items():
    times = []
    for run in drawn[key]:
      with fitting(run.folder):
        tests = [row for row in run.rows if row['split'] == 'test']
        if all('virtual_time' in row for row in tests):
          time_of = {row['round']: row['virtual_time'] for row in tests}
          times.append([float(time_of[r]) for r in rounds])
    if len(times) == len(drawn[key]):
      curves[key] = np.mean(times, axis=0).tolist(), values
  return curves


def _by_bytes(drawn) -> dict[Any, tuple[list[float], list[float]]]:
  """{(folder, label): (bytes of a client [S], last metrics [S])}."""
  return {
      key: (
          [sum(_client_bytes(run)) for run in same],
          [_tests(run)[1][-1] for run in same],
      )
      for key, same in drawn.items()
  }


def _one_metric(runs: Sequence[_Run]) -> Metric:
  """The metric of all runs; raises ValueError if they differ."""
  first = runs[0]
  for run in runs:
    if run.summary.metric != first.summary.metric:
      raise ValueError(
          f'{first.folder} is measured by {first.summary.metric.name}, but '
          f'{run.folder} by {run.summary.metric.name}: their curves share no '
          'axis.'
      )
  return first.summary.metric


def write_comparison(
    folders: Sequence[pathlib.Path],
    out: pathlib.Path,
    formats: Sequence[str] = (),
) -> str:
  """Writes comparison.md and, with matplotlib, its pictures.

  comparison.png plots the metric over rounds, times.png over virtual time (for
  runs that have it), and bytes.png against the bytes that a client sends and
  receives, the sum of the table's two columns. Each data set and split has a
  panel. Runs that differ in their seeds alone are one curve with a band.

  Args:
    folders: The workdirs.
    out: A folder, created if missing.
    formats: Additional formats from `tables.FORMATS`: 'csv' and 'tex' for the
      table, 'pdf' and 'svg' for the pictures.

  Returns:
    The table as Markdown.

  Raises:
    FileNotFoundError: If a folder is not a workdir with an evaluated run.
    ValueError: If a file is damaged, the runs have different metrics, or `out`
      is a cloud folder.
    OSError: If nothing can be written there.
  """
  check_local(out, 'out')
  runs = _read(folders)
  metric = _one_metric(runs)
  table = _table(runs)
  drawn = _drawn(runs)
  by_round, by_time = _by_round(drawn), _by_time(drawn)
  by_bytes = _by_bytes(drawn)
  looks = method_looks({
      label: run.config['algorithm']['name']
      for (_, label), (run, *_) in drawn.items()
  })
  out.mkdir(parents=True, exist_ok=True)
  label = f'Mean test {metric.name}'
  picture = f'![{label} by round](comparison.png)'
  if by_time:
    picture += f'\n\n![{label} by virtual time](times.png)'
  picture += f'\n\n![{label} against bytes sent](bytes.png)'
  try:
    for ending in ('png', *(f for f in ('pdf', 'svg') if f in formats)):
      path = out / f'comparison.{ending}'
      shared = dict(looks=looks, percent=metric.percent)
      pictures.draw_curves(_panels(by_round, runs), path, label, **shared)
      pictures.draw_trade_off(
          _panels(by_bytes, runs),
          out / f'bytes.{ending}',
          CLIENT_BYTES,
          f'{label}, last round',
          **shared,
      )
      if by_time:
        pictures.draw_curves(
            _panels(by_time, runs),
            out / f'times.{ending}',
            label,
            xlabel=VIRTUAL_TIME,
            **shared,
        )
  except ImportError:
    picture = NO_PICTURES
  markdown = tables.as_markdown(table)
  text = f'# Comparison\n\n{markdown}\n\n{picture}\n'
  write_atomically(out / 'comparison.md', text)
  if 'csv' in formats:
    write_atomically(out / 'comparison.csv', tables.as_csv(table))
  if 'tex' in formats:
    write_atomically(out / 'comparison.tex', tables.as_latex(table))
  return markdown
