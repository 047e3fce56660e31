"""Compares the speed of two versions of the library, round by round.

  python -m benchmarks.compare --before=DIR [--workloads=a,b,...] [--quick]
    [--references=PyTorch] [--repetitions=30] [--processes=3] [--output=FILE]

DIR is another checkout, such as from `git worktree add DIR COMMIT`. Each
version builds the forms of `benchmarks.engine` with its own code. Two
processes, one per version, compile a form and take turns at single rounds, in
the order before, after, after, before, ..., so that both have the same load.
This is repeated with new processes, because all rounds of one process may be
slower than those of another.

Quotients are times of the later version divided by those of the earlier one:
the median over pairs of neighbouring rounds, with its 95 % interval (in JSON
also for each pair of processes), the quotient of the medians, and that of the
minima. CPU seconds are those of all threads of a process. Compilation is the
minimum of CPU seconds; memory is what XLA plans. A reference such as PyTorch
has the same code in both versions, so its quotients show the measurement error.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
from unittest import mock

import jax
import numpy as np

from benchmarks import common, engine, programs

TREE = pathlib.Path(__file__).resolve().parents[1]
CLOCKS = {'wall': time.perf_counter, 'cpu': time.process_time}


def form_names(case, references: list[str]) -> list[str]:
  """The library's forms of a `Case` in one process, then its `references`."""
  auto = engine.resolve_backend('auto')
  names = (auto, *case.backends, *engine.onednn_forms(case, auto))
  names = [name for name in dict.fromkeys(names) if 'shard_map' not in name]
  return names + [name for name in references if name in case.references]


def make_program(name: str, scale: str, form: str):
  """The program of a form; its `compile_seconds` are CPU seconds.

  It also runs with the earlier version, so it uses only what both have.

  Args:
    name: 'workload/case'.
    scale: Scale of the case.
    form: One of `form_names`.
  """
  workload, _, case_name = name.partition('/')
  case = engine.WORKLOADS[workload].make(case_name, scale)
  if form in case.references:
    return case.references[form].make(case.references[form].steps)
  backend, _, library = form.partition(', ')
  with mock.patch.object(time, 'perf_counter', time.process_time):
    return programs.library(
        case.task(), backend, case.num_images, library.lower() or 'xla'
    )


def work(name: str, scale: str, form: str) -> None:
  """Prints a line of JSON after compilation and for each line of input."""
  # All other output goes to standard error.
  answers = os.fdopen(os.dup(1), 'w', buffering=1)
  os.dup2(2, 1)
  jax.config.update('jax_compilation_cache_dir', None)
  program = make_program(name, scale, form)
  program.call()
  row = dict(compile=program.compile_seconds, megabytes=program.megabytes)
  print(json.dumps(row), file=answers)
  for _ in sys.stdin:
    start = {clock: now() for clock, now in CLOCKS.items()}
    program.call()
    row = {clock: now() - start[clock] for clock, now in CLOCKS.items()}
    print(json.dumps(row), file=answers)


class Worker:
  """A process that runs one form with the code of a tree.

  Attributes:
    compiled: {'compile': CPU seconds or None, 'megabytes': or None}.
  """

  def __init__(self, tree: str, *args: str):
    self._process = subprocess.Popen(
        # -P: modules come from the tree, not from the folder of this file.
        [sys.executable, '-P', __file__, '--worker', *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tree,
        env=os.environ | {'PYTHONPATH': tree},
    )
    self.compiled = self._answer()

  def _answer(self) -> dict:
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError(f'{" ".join(self._process.args)}: see its error above')
    return json.loads(line)

  def round(self) -> dict[str, float]:
    """Runs a round and returns its seconds by clock."""
    print(file=self._process.stdin, flush=True)
    return self._answer()

  def close(self) -> None:
    """Ends the process."""
    self._process.stdin.close()
    self._process.wait()
    self._process.stdout.close()


def take_turns(before, after, repetitions: int, pause=0.02) -> np.ndarray:
  """Seconds of alternating rounds, [2 clocks, repetitions, 2 versions]."""
  rounds = np.zeros((len(CLOCKS), repetitions, 2))
  for i, second in itertools.product(range(repetitions), range(2)):
    version = second ^ (i % 2)
    time.sleep(pause)  # Lets the threads of the other process go idle.
    row = (before, after)[version].round()
    rounds[:, i, version] = [row[clock] for clock in CLOCKS]
  return rounds


def quotients(rounds: np.ndarray) -> dict[str, object]:
  """The reported numbers of one clock.

  Args:
    rounds: Seconds, [processes, repetitions, 2 versions].

  Returns:
    Seconds, and quotients of the later by the earlier version; 'interval' is
    the 95 % interval of 'pairs', from order statistics.
  """
  both = rounds.reshape((-1, 2))
  pairs = np.sort(both[:, 1] / both[:, 0])
  # The number of pairs below their median is binomial.
  rank = max(0, int(len(pairs) / 2 - 0.98 * np.sqrt(len(pairs))))
  median, least = np.median(both, axis=0), np.min(both, axis=0)
  by_process = np.median(rounds[..., 1] / rounds[..., 0], axis=1)
  return {
      'median_seconds': median.tolist(),
      'pairs': float(np.median(pairs)),
      'interval': [pairs[rank], pairs[-1 - rank]],
      'pairs_by_process': by_process.tolist(),
      'medians': median[1] / median[0],
      'minima': least[1] / least[0],
  }


def compare(
    trees: tuple[str, str],
    form: tuple[str, str, str],
    repetitions: int,
    processes: int,
) -> dict[str, object]:
  """Results of one form.

  Args:
    trees: Folders of the earlier and of the later version.
    form: 'workload/case', scale and name of the form.
    repetitions: Rounds of each process.
    processes: Pairs of processes.

  Returns:
    `quotients` by clock, and [before, after] of 'compile' (CPU seconds) and
    'megabytes', None if unknown.
  """
  compiled, rounds = [], []
  for i in range(processes):
    with contextlib.ExitStack() as stack:
      pair = [None, None]
      for version in (0, 1) if i % 2 == 0 else (1, 0):
        worker = Worker(trees[version], *form)
        pair[version] = stack.enter_context(contextlib.closing(worker))
      compiled.append([worker.compiled for worker in pair])
      rounds.append(take_turns(*pair, repetitions))
  result = {
      clock: quotients(np.array([r[c] for r in rounds]))
      for c, clock in enumerate(CLOCKS)
  }
  for key in ('compile', 'megabytes'):
    values = [[pair[version][key] for pair in compiled] for version in (0, 1)]
    result[key] = [None if None in v else min(v) for v in values]
  return result


def line(name: str, form: str, result: dict[str, object]) -> list[object]:
  """A row of the printed table."""
  cells = []
  for clock in CLOCKS:
    found = result[clock]
    low, high = found['interval']
    cells.append(f'{found["pairs"]:.3f} ({low:.3f} to {high:.3f})')
    cells += [f'{found[key]:.3f}' for key in ('medians', 'minima')]
  for key in ('compile', 'megabytes'):
    before, after = result[key]
    cells.append('-' if before is None else f'{after / before:.3f}')
  return [name, form, *cells]


HEADER = ['case', 'form', *(f'{c}, {s}' for c in CLOCKS for s in
          ('pairs', 'medians', 'minima')), 'compile', 'memory']  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--before', help='folder of the earlier version')
  parser.add_argument('--workloads', help='such as a,b or fedin/resnet10')
  parser.add_argument('--quick', action='store_true', help='small cases')
  parser.add_argument('--scale', help='of the cases; "tiny" for tests')
  parser.add_argument('--references', default='PyTorch', help='such as PyTorch')
  parser.add_argument('--repetitions', type=int, default=30)
  parser.add_argument('--processes', type=int, default=3)
  parser.add_argument('--output', help='JSON file to write')
  parser.add_argument('--worker', nargs=3, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.worker:
    work(*args.worker)
    return
  before = pathlib.Path(args.before or '.').resolve()
  if not args.before or not (before / 'benchmarks' / 'engine.py').is_file():
    parser.error(f'--before={args.before} must be a checkout of the library.')
  if min(args.repetitions, args.processes) < 1:
    parser.error('--repetitions and --processes must be at least 1.')
  try:
    chosen = engine.choose(args.workloads, args.quick)
  except ValueError as e:
    parser.error(str(e))
  scale = args.scale or ('quick' if args.quick else 'full')
  cases, rows = {}, []
  for name in chosen:
    workload, _, case_name = name.partition('/')
    case = engine.WORKLOADS[workload].make(case_name, scale)
    cases[name] = {}
    for form in form_names(case, args.references.split(',')):
      result = cases[name][form] = compare(
          (str(before), str(TREE)),
          (name, scale, form),
          args.repetitions,
          args.processes,
      )
      rows.append(line(name, form, result))
      print(*rows[-1], sep=' | ', flush=True)
    if args.output:
      common.write(args.output, {'cases': cases, 'scale': scale})
  print(common.markdown(HEADER, rows))


if __name__ == '__main__':
  main()
