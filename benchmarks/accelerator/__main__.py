"""Measures what `auto` and the docs need to know about an accelerator.

  python -m benchmarks.accelerator --out=DIR [--minutes=9] [--data-dir=DIR]
    [--sections=agreement,grid,...] [--jobs=N] [--retry] [--quick]
  python -m benchmarks.accelerator --out=DIR --reference
  python -m benchmarks.accelerator.apply --out=DIR

The first command measures on the device that JAX finds, most important first:

  agreement: the `quick` variant of every algorithm compiles, and its metrics
    agree with those of a CPU (products in float32).
  grid: rounds of 64 clients by family of networks: lowering of convolutions x
    mapping (`map`, `vmap` in chunks of 1 to 64) x dtype of matrix products.
  workloads: those of `benchmarks.engine`, beside eager PyTorch and
    `torch.func.vmap` on the same device.
  memory: peaks of a cohort of 10 and of 1,000 clients.
  start: seconds from the start of a run to its first round.
  table: full-length cells of `fedin_v2_table1`, with `--data-dir`.

Every step runs in a child process with its own time limit; a crash, a full
memory or a hang loses only that step. Results are written after each step to
DIR/results.json (device, versions, all results, and what `auto` should choose)
and DIR/table.md. The same command continues an earlier one, even if only
results.json was copied to another machine of that kind; `--retry` repeats steps
that failed. The second command computes the CPU's metrics in advance, on any
machine, which saves time on the accelerator. The third writes the choice into
`fedjax_het/kernels/auto.py`. Let the machine be idle.
"""

import argparse
from collections.abc import Iterable, Mapping
import concurrent.futures
import datetime
import json
import os
import pathlib
import queue
import signal
import sys
import threading
import time
from typing import Any

from benchmarks.accelerator import forms, plan, report
from benchmarks.accelerator.worker import Worker
from fedjax_het.files import read_json, write_atomically

# Seconds that must be left to begin a step and to begin a step without a limit;
# seconds that a step without a limit leaves for its end.
_LEAST, _LEAST_OF_ALL, _MARGIN = 10.0, 90.0, 30.0


class Bench:
  """A folder of results, and the steps that add to it.

  Attributes:
    out: The folder.
    results: {name: result} of all steps that were run.
    device: Result of `tasks.device`, and `quick`; None before it is known.
  """

  def __init__(self, out: pathlib.Path, seconds: float):
    self.out = out
    self.results: dict[str, Any] = {}
    self.device: dict[str, Any] | None = None
    self._end = time.monotonic() + seconds
    self._workers: list[Worker] = []
    self._lock = threading.Lock()
    for name in ('steps', 'logs', 'runs'):
      (out / name).mkdir(parents=True, exist_ok=True)
    self._path = out / 'results.json'
    if self._path.exists():
      found = read_json(self._path, 'delete it to begin anew')
      self.results, self.device = found['results'], found['device']

  @property
  def left(self) -> float:
    """Seconds that are left."""
    return self._end - time.monotonic()

  def save(self) -> str:
    """Writes results.json and table.md, and returns the table."""
    source = 'benchmarks.accelerator, '
    if self.device is not None:
      source += f'jax {self.device["machine"]["versions"]["jax"]}, '
    source += datetime.date.today().isoformat()
    quick = bool(self.device and self.device['quick'])
    choice = forms.choose(
        forms.rates(self.results), forms.families(quick), source
    )
    found = dict(
        quick=quick,
        device=self.device,
        choice=None if choice is None else choice._asdict(),
        results=self.results,
    )
    write_atomically(self._path, json.dumps(found, indent=1))
    text = report.as_markdown(self.results, self.device, choice)
    write_atomically(self.out / 'table.md', text)
    return text

  def worker(self, number: int) -> Worker:
    """A child process by number; each thread has its own."""
    while len(self._workers) <= number:
      log = self.out / 'logs' / f'worker{len(self._workers)}.txt'
      self._workers.append(Worker(log))
    return self._workers[number]

  def run(self, step: plan.Step, number: int = 0) -> None:
    """Runs a step unless the time is over, and prints its status."""
    if self.left < (_LEAST if step.limit else _LEAST_OF_ALL):
      return
    name, args = step.name.replace('/', '--'), dict(step.args)
    limit = min(step.limit or self.left, self.left)
    # Both steps of `start` share a cache of programs.
    folders = dict(first_round='start', table_cell=name)
    if step.task in folders:
      folder = self.out / 'runs' / folders[step.task]
      args['folder'] = str(folder.absolute())
    if step.limit is None:
      args['seconds'] = limit - _MARGIN
    path = (self.out / 'steps' / f'{name}.json').absolute()
    path.unlink(missing_ok=True)
    done = self.worker(number).run(
        step.task, args, path, limit, on_cpu=step.on_cpu, fresh=step.fresh
    )
    result = json.loads(path.read_text()) if done else None
    path.unlink(missing_ok=True)
    if not done and step.limit is not None and limit >= step.limit:
      error = f'more than {step.limit:.0f} s'
      result = dict(status='timeout', error=error, seconds=limit)
    if result is not None:
      with self._lock:
        self.results.pop(step.name, None)  # The newest comes last.
        self.results[step.name] = result
        self.save()
      words = [step.name, result['status'], result.get('error', '')]
      print(f'{result.get("seconds", limit):6.1f} s ', *words, flush=True)

  def run_together(self, steps: Iterable[plan.Step], jobs: int) -> None:
    """Runs steps in `jobs` processes at once."""
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for step in steps:
      waiting.put(step)

    def serve(number):
      while True:
        try:
          step = waiting.get_nowait()
        except queue.Empty:
          return
        self.run(step, number)

    self.worker(jobs - 1)  # Creates all workers, which threads only look up.
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
      try:
        for done in [pool.submit(serve, number) for number in range(jobs)]:
          done.result()
      except BaseException:
        self.close()  # So that no thread waits for its step.
        raise
    for worker in self._workers[1:]:
      worker.close()

  def close(self) -> None:
    """Ends all child processes."""
    self._end = 0.0
    for worker in self._workers:
      worker.close()


def _settle(bench: Bench, quick: bool) -> None:
  """Stores the device; raises ValueError if the results are of another one."""
  step = plan.Step('device', 'device', {}, plan.LIMITS['device'])
  bench.run(step)
  found = bench.results.pop(step.name, {})
  if found.get('status') != 'ok':
    error = found.get('error', 'JAX did not start in time')
    raise ValueError(f'No device: {error}; see {bench.out / "logs"}.')
  found['quick'] = quick

  def what(device):
    versions = device['machine']['versions']
    size = 'quick run' if device['quick'] else 'run'
    return f'a {size} on {device["kind"]} with jax {versions["jax"]}'

  if bench.device is not None and what(bench.device) != what(found):
    bench.save()
    raise ValueError(
        f'{bench.out} holds {what(bench.device)}, and this is {what(found)}; '
        'choose another --out.'
    )
  bench.device = found


def _todo(
    steps: list[plan.Step], results: Mapping[str, Any], retry: bool
) -> list[plan.Step]:
  """The steps without a result, or whose result is to be replaced."""
  final = {'ok'}
  if not retry:
    final |= {'failed', 'crashed', 'timeout', 'skipped'}
  return [
      step for step in steps
      if step.name not in results
      or results[step.name]['status'] not in final
  ]  # fmt: skip


def _measure(bench: Bench, args) -> None:
  """Runs the steps, each at most once."""
  begun: set[str] = set()

  def todo() -> list[plan.Step]:
    steps = plan.plan(
        bench.results,
        quick=args.quick,
        kind=bench.device['kind'],
        data_dir=args.data_dir,
        sections=args.sections,
    )
    steps = [step for step in steps if step.name not in begun]
    return _todo(steps, bench.results, args.retry)

  together = [step for step in todo() if step.parallel]
  begun.update(step.name for step in together)
  bench.run_together(together, args.jobs)
  while bench.left >= _LEAST and (steps := todo()):
    begun.add(steps[0].name)
    bench.run(steps[0])


def _sections(text: str) -> tuple[str, ...]:
  names = tuple(text.split(','))
  for name in names:
    if name not in plan.SECTIONS:
      raise argparse.ArgumentTypeError(
          f'unknown section {name!r}; known are {", ".join(plan.SECTIONS)}.'
      )
  return names


def main() -> None:
  parser = argparse.ArgumentParser(
      prog='python -m benchmarks.accelerator',
      description=__doc__,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--minutes', type=float, default=9.0)
  parser.add_argument('--quick', action='store_true', help='tiny sizes')
  parser.add_argument('--reference', action='store_true', help='CPU only')
  parser.add_argument('--retry', action='store_true')
  parser.add_argument('--data-dir', help='folder of the data sets')
  parser.add_argument('--sections', type=_sections, default=plan.SECTIONS)
  parser.add_argument('--jobs', type=int, help='processes where none is timed')
  args = parser.parse_args()
  if args.jobs is None:
    args.jobs = max(1, min(8, (os.cpu_count() or 1) // 2))
  if args.jobs < 1 or not args.minutes > 0:
    parser.error('--jobs and --minutes must be positive.')
  # Turns SIGTERM into SystemExit, so that the children end, too.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  try:
    bench = Bench(args.out, 60 * args.minutes)
  except (ValueError, OSError) as e:
    parser.error(str(e))
  try:
    if args.reference:
      steps = plan.references(args.quick)
      steps = _todo(steps, bench.results, args.retry)
      bench.run_together(steps, args.jobs)
    else:
      try:
        _settle(bench, args.quick)
      except ValueError as e:
        parser.error(str(e))
      if bench.device['platform'] == 'tpu':
        args.jobs = 1  # A TPU belongs to one process.
      _measure(bench, args)
    text = bench.save()
  finally:
    bench.close()
  print(f'\n{text}\nWritten to {args.out / "results.json"}')


if __name__ == '__main__':
  main()
