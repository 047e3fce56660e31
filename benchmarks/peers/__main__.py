"""Compares the library with published programs, on the work they report.

  python -m benchmarks.peers [--rows=a,e/torch,flwr] [--seconds=30] [--quick]
    [--epochs=N] [--data_dir=DIR] [--output=DIR] [--environments=DIR] [--again]

The works have the shapes of the published programs (`tasks`): a is
pfl-research's CIFAR-10 benchmark of simulators, b PFLlib's FedAvg, c-local and
c-fd HtFLlib's local training and FD, d InCo's five ResNets, e NIID-Bench's
simple-CNN. Images are random, or those of CIFAR-10 with `--data_dir`.

Programs:

  default    the library as `launch.train` runs it with default options, by the
    speeds that are part of it
  tuned      the same by what `fedjax-het tune` has measured here, as a long run
    does, whose first one measures
  onednn, shard_map, ...   the library with a form chosen by hand
  torch      eager PyTorch, one client after another, the baseline
  flwr, pfl, fluke, fedjax   peers from the package registry by their public
    API, on works a, b and e (elsewhere models differ). Each is installed into
    its own environment in the user's cache folder. If that fails, the row says
    why. PFLlib, HtFLlib, InCo and NIID-Bench are not packages; eager PyTorch
    does their work.

Every row runs alone in a process. All programs read the same images and
partition, and must train the same numbers of parameters and images; otherwise
the row says what differs. The fastest round after the first counts; these
rounds take at least `--seconds`. The first round counts from the start of the
process, with imports, data and compilation, from an empty cache of compiled
programs; `default` and `tuned` run a second time with the cache that this
leaves. Memory
is the peak of resident memory, or the sum of the peaks of several processes.

A row is one JSON file in the output folder. It is measured again on the same
machine only with `--again`. `--rows` selects works, programs, or both, with the
wildcards of file names. `--epochs` limits the local epochs (e has ten).
`--quick` has tiny sizes, has few rows unless `--rows` selects others, and does
not install peers. On an accelerator only the library is run. Let the machine be
idle.
"""

import argparse
import datetime
import fnmatch
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import jax

from benchmarks import common
from benchmarks.peers import environments, rows, table, tasks

# Rows of a quick run, one of every kind.
_QUICK_ROWS = (
    'a/torch,a/flwr,a/pfl,a/fluke,a/fedjax,a/default,a/shard_map-onednn,'
    'c-fd/torch,c-fd/default,d/torch,e/torch'
)


def all_rows(platform: str) -> list[tuple[str, str]]:
  """(work, program) of every row, in the order in which they are run."""
  return [
      (work, name)
      for work, settings in tasks.WORKS.items()
      for name, program in rows.programs(platform).items()
      if program.algorithms is None or settings.algorithm in program.algorithms
  ]


def choose(
    text: str | None, known: list[tuple[str, str]]
) -> list[tuple[str, str]]:
  """The rows that `--rows` selects.

  Args:
    text: Parts such as 'a', 'torch', 'e/flwr' or 'c-*/torch', separated by
      commas; None for all.
    known: All rows.

  Returns:
    The selected rows.

  Raises:
    ValueError: If a part selects no row.
  """
  if not text:
    return known
  chosen = set()
  for part in text.split(','):
    work, slash, program = part.strip().partition('/')
    found = [
        row
        for row in known
        if (fnmatch.fnmatch(row[0], work) and fnmatch.fnmatch(row[1], program))
        or (not slash and any(fnmatch.fnmatch(name, work) for name in row))
    ]
    if not found:
      names = dict.fromkeys(name for row in known for name in row)
      raise ValueError(
          f'--rows={part.strip()!r} selects no row; known are '
          f'{", ".join(names)}, or both, such as a/torch.'
      )
    chosen.update(found)
  return [row for row in known if row in chosen]


def settings_of(work: tasks.Work, data_dir: str | None) -> dict:
  """The settings that two rows of a work must share, as JSON holds them."""
  facts = dict(
      work._asdict(),
      source='random' if data_dir is None else 'CIFAR-10',
      threads=os.environ.get('OMP_NUM_THREADS'),
  )
  return json.loads(json.dumps(facts))


def stored(path: pathlib.Path, settings: dict) -> dict | None:
  """A row of this machine with these settings; None if there is none."""
  try:
    found = json.loads(path.read_text())
  except (OSError, ValueError):
    return None
  same = found.get('settings') == settings and common.same_machine(found)
  return found if same else None


def measure(entries, work, name, args, folder) -> dict:
  """Runs one row.

  Args:
    entries: From `tasks.write_data`.
    work: The work.
    name: Name of the program.
    args: The arguments of the command.
    folder: Folder for the task.

  Returns:
    The result; it has an 'error' if the program cannot be measured.
  """
  program = rows.programs(jax.default_backend())[name]
  images = work.images_per_round
  # A program may fill the last minibatch of a client.
  most = images + work.cohort * (work.local['batch_size'] - 1)
  facts = {}

  def run(cache, max_rounds):
    task = tasks.write_task(
        entries,
        folder,
        seconds=args.seconds,
        max_rounds=max_rounds,
        overrides=program.overrides,
        device_per_core=program.device_per_core,
    )
    found = rows.run_child(
        python, program.module, task, cache, args.limit, speeds
    )
    rows.check(found, tasks.num_parameters(work), images, most)
    return rows.summarise(found, images)

  try:
    speeds = rows.speeds_of(program)
    python, facts['versions'] = rows.find_python(
        program, pathlib.Path(args.environments), not args.quick
    )
    with tempfile.TemporaryDirectory() as cache:
      if name not in rows.TWICE:
        return facts | run(cache, args.max_rounds)
      empty = run(cache, 1)
      warm = run(cache, args.max_rounds)
  except rows.Failed as e:
    return facts | dict(error=str(e))
  except (OSError, subprocess.SubprocessError, StopIteration, KeyError) as e:
    # Such as an environment that was damaged, or a full disk.
    return facts | dict(error=f'failed: {e!r}'[:300])
  once = ('first_round', 'xla_seconds')
  again = {f'{key}_warm': warm[key] for key in once}
  return facts | warm | again | {key: empty[key] for key in once}


def parse_args() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rows', help='such as a,e/torch,flwr')
  parser.add_argument('--seconds', type=float, help='of timed rounds of a row')
  parser.add_argument('--epochs', type=int, help='most local epochs')
  parser.add_argument('--quick', action='store_true', help='tiny sizes')
  parser.add_argument('--again', action='store_true', help='measure again')
  parser.add_argument('--data_dir', help='folder of CIFAR-10')
  parser.add_argument('--output', help='folder of the rows and the table')
  parser.add_argument('--environments', default=environments.folder())
  parser.add_argument(
      '--limit', type=float, default=3600, help='most seconds of a process'
  )
  args = parser.parse_args()
  if args.seconds is None:
    args.seconds = 0 if args.quick else 30
  suffix = '_quick' if args.quick else ''
  args.output = pathlib.Path(args.output or common.RESULTS / f'peers{suffix}')
  args.max_rounds = 3 if args.quick else 50
  platform = jax.default_backend()
  known = all_rows(platform)
  if args.quick and not args.rows:
    args.rows = _QUICK_ROWS if platform == 'cpu' else 'a'
  try:
    args.chosen = choose(args.rows, known)
    if args.epochs is not None and args.epochs < 1:
      raise ValueError(f'--epochs={args.epochs} must be at least 1.')
  except ValueError as e:
    parser.error(str(e))
  args.known = known
  return args


def run_work(name: str, work: tasks.Work, programs: list[str], args) -> None:
  """Measures and stores the programs of a work that have no stored row."""
  settings = settings_of(work, args.data_dir)
  with tempfile.TemporaryDirectory() as temporary:
    folder, entries = pathlib.Path(temporary), None
    for program in programs:
      path = path_of(args, name, program)
      before = None if args.again else stored(path, settings)
      if before and not before.get('error'):
        print(f'{name}/{program}: done before', flush=True)
        continue
      if entries is None:
        entries = tasks.write_data(work, folder, args.data_dir)
      load = os.getloadavg()[0] if hasattr(os, 'getloadavg') else None
      result = measure(entries, work, program, args, folder)
      now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
      more = dict(settings=settings, load_average_before=load, time=now)
      common.write(path, result | more)
      print(f'{name}/{program}: {result.get("error", "done")}', flush=True)


def path_of(args, work: str, program: str) -> pathlib.Path:
  """The file of a row."""
  return args.output / f'{work}-{program}.json'


def main() -> None:
  args = parse_args()
  # Turns SIGTERM into SystemExit, so that no child outlives the command.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  platform = jax.default_backend()
  works = {
      name: tasks.work(name, args.quick, args.epochs) for name in tasks.WORKS
  }
  for name, work in works.items():
    programs = [program for w, program in args.chosen if w == name]
    if programs:
      run_work(name, work, programs, args)
  found = {}
  for row in args.known:
    settings = settings_of(works[row[0]], args.data_dir)
    found[row] = stored(path_of(args, *row), settings)
  shown = {row: result for row, result in found.items() if result}
  text = table.report(shown, platform, args.epochs)
  print(f'\n{text}')
  (args.output / 'table.md').write_text(text)


if __name__ == '__main__':
  main()
