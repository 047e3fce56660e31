"""Several workdirs in one table and one picture."""

from collections.abc import Sequence
import pathlib

from fedjax_het.analysis import pictures
from fedjax_het.files import write_atomically
from fedjax_het.reporting import report, tables
from fedjax_het.reporting.run_files import read_run
from fedjax_het.reporting.summary import summarise


def compare(folders: Sequence[pathlib.Path]) -> str:
  """A table with a line for each of several workdirs.

  Args:
    folders: The workdirs.

  Returns:
    The table as Markdown.

  Raises:
    FileNotFoundError: If a folder is no workdir with an evaluated run.
    ValueError: If a file is damaged.
  """
  table = [[
      'run', 'method', 'data', 'split', 'seed', 'rounds', 'last', 'worst',
      'best (round)', 'target in round', 'up', 'down', 'a round',
      'virtual time', 'own test examples',
  ]]  # fmt: skip
  for folder in folders:
    config, _, rows = read_run(folder)
    with report.fitting(folder):
      table.append(_line(folder, config, rows))
  if all(line[-1] == '-' for line in table[1:]):
    table = [line[:-1] for line in table]
  return tables.as_markdown(table)


def _line(folder: pathlib.Path, config, rows) -> list[str]:
  """The cells of one workdir."""
  summary = summarise(rows, config['target_accuracy'])
  best = summary.best
  return [
      str(folder),
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


def write_comparison(
    folders: Sequence[pathlib.Path], out: pathlib.Path
) -> str:
  """Writes comparison.md and, with matplotlib, its pictures.

  comparison.png is over rounds, and times.png over virtual time, of the runs
  that have it.

  Args:
    folders: The workdirs.
    out: A folder, created if it is not there.

  Returns:
    The table as Markdown.

  Raises:
    FileNotFoundError: If a folder is no workdir with an evaluated run.
    ValueError: If a file is damaged.
    OSError: If nothing can be written there.
  """
  table = compare(folders)
  by_round, by_time = {}, {}
  for folder in folders:
    _, _, rows = read_run(folder)
    tests = [row for row in rows if row['split'] == 'test']
    with report.fitting(folder):
      accuracies = [report.or_nan(row['accuracy']) for row in tests]
      by_round[str(folder)] = [row['round'] for row in tests], accuracies
      if all('virtual_time' in row for row in tests):
        times = [float(row['virtual_time']) for row in tests]
        by_time[str(folder)] = times, accuracies
  out.mkdir(parents=True, exist_ok=True)
  label = 'Mean test accuracy'
  try:
    pictures.draw_curves(by_round, out / 'comparison.png', label, percent=True)
    picture = '![Mean test accuracy by round](comparison.png)'
    if by_time:
      pictures.draw_curves(
          by_time,
          out / 'times.png',
          label,
          xlabel=report.VIRTUAL_TIME,
          percent=True,
      )
      picture += '\n\n![Mean test accuracy by virtual time](times.png)'
  except ImportError:
    picture = report.NO_PICTURES
  text = f'# Comparison\n\n{table}\n\n{picture}\n'
  write_atomically(out / 'comparison.md', text)
  return table
