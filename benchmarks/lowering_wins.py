"""Times all ways to compute all layers, and lists where each is fastest.

  python -m benchmarks.lowering_wins [--data=cifar10,...] [--batches=16,...]
    [--every=4] [--quick] [--output=FILE]

The result shows which ways of `fedjax_het.kernels.conv` can be deleted. It
covers each distinct convolution of the nets of `configs` and of
`benchmarks.nets`, with batches of 10, 16 and 64, on one and on two threads. All
data sets take hours; `--every=4` measures every fourth layer. One worker
process per number of threads measures as `benchmarks.lowerings` does: the ways
of a pass are timed in a loop and take turns, and the minimum time of each
counts. The two workers take turns layer by layer. A way that is three times
slower than another in its first call is not repeated.

A way wins if it is more than 3 % faster than every other way. Wins are counted
twice: among all ways, and among the ways without oneDNN. The file is written
after each layer; the same command continues it. Let the machine be idle.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
import itertools
import json
import os
import pathlib
import subprocess
import sys

import jax

from benchmarks import common, lowerings, nets
from benchmarks.lowerings import Layer
from fedjax_het.configs import fedavg
from fedjax_het.data.catalog import DATASETS
from fedjax_het.experiment.config import group_spec
from fedjax_het.kernels import taps as taps_lib
from fedjax_het.kernels.libraries import LIBRARIES
from fedjax_het.models import create

BATCH_SIZES = (10, 16, 64)
THREADS = (1, 2)
MARGIN = 1.03
SLOWEST = 3.0
# Variants of `configs.common` that select the nets.
_SETTINGS = ('', 'v1', 'v2', 'fedhe', 'fedepth')
_SIZES = ('', 'cpu')
# Data sets of different image shapes.
_DATA = ('digits', 'fashion_mnist', 'cifar10')
_QUICK_LAYER = Layer((4, 4, 3), (3, 3, 3, 4), (1, 1), ((1, 1), (1, 1)))


def models(
    data: Sequence[str] = _DATA,
) -> Iterator[tuple[str, tuple[int, int, int], dict]]:
  """Yields (model, input shape, options) of the distinct nets of configs."""
  seen = []
  # Settings other than the default one replace 'digits' by CIFAR-10.
  variants = itertools.product([d for d in data if d != 'digits'], _SETTINGS)
  variants = [*variants, *([('', '')] if 'digits' in data else [])]
  for variant, size in itertools.product(variants, _SIZES):
    config = fedavg.get_config(','.join(filter(None, (*variant, size))))
    for name in config.groups:
      spec = group_spec(config, name)
      shape = DATASETS[config.dataset].image_shape
      found = spec.model, shape, spec.options
      if found not in seen:
        seen.append(found)
        yield found
  if 'cifar10' in data:
    for name in nets.NETS:
      yield name, nets.INPUT_SHAPE, {}


def distinct_layers(data: Sequence[str] = _DATA) -> list[Layer]:
  """The convolutions of `models(data)`, without repetition."""
  layers = {}
  for name, shape, options in models(data):
    for layer in lowerings.layers_of(create(name, shape, 10, **options)):
      geometry = taps_lib.resolve_padding(
          layer.padding, layer.images[:2], layer.kernel[:2], layer.strides
      )
      layers[layer._replace(padding=geometry.padding)] = None
  return list(layers)


def _as_layer(lists) -> Layer:
  images, kernel, strides, padding = lists
  return Layer(*map(tuple, (images, kernel, strides, map(tuple, padding))))


def serve(threads: int, jobs: Iterable[str]) -> None:
  """Measures the layers that `jobs` names, and prints a JSON line for each.

  Args:
    threads: CPUs that this process may use.
    jobs: JSON lines [layer, batch size, repetitions].
  """
  # XLA creates one thread per CPU that the process may use.
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
  jax.config.update('jax_compilation_cache_dir', None)
  for job in jobs:
    layer, batch_size, repetitions = json.loads(job)
    found, _ = lowerings.measure(
        _as_layer(layer), batch_size, repetitions, SLOWEST
    )
    print(json.dumps(found), flush=True)


class Worker:
  """A process with some threads that measures layers."""

  def __init__(self, threads: int):
    self._process = subprocess.Popen(
        [sys.executable, '-m', __spec__.name, f'--child={threads}'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

  def measure(self, layer: Layer, batch_size: int, repetitions: int):
    """{pass: {way: milliseconds}}; raises RuntimeError if the process died."""
    print(
        json.dumps([layer, batch_size, repetitions]),
        file=self._process.stdin,
        flush=True,
    )
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError(f'The worker ended at {layer}, batch {batch_size}.')
    return json.loads(line)

  def close(self) -> None:
    """Ends the process."""
    self._process.stdin.close()
    self._process.wait()


def stored_rows(path: pathlib.Path) -> list[dict]:
  """Rows of an earlier run; [] if the file is of another machine."""
  if not path.is_file():
    return []
  found, now = json.loads(path.read_text()), common.machine()
  if any(found['machine'][k] != now[k] for k in now if k != 'load_average'):
    print(f'{path.name} is of another machine or version: starts from zero.')
    return []
  return found['rows']


def survey(
    layers: Sequence[Layer],
    batch_sizes: Sequence[int],
    repetitions: int,
    path: pathlib.Path,
) -> list[dict]:
  """Measures what is not yet in the file `path`, and adds it.

  Args:
    layers: Layers to measure.
    batch_sizes: Batch sizes of each.
    repetitions: Repetitions of each way.
    path: JSON file, written after each layer.

  Returns:
    A row per layer, batch size, number of threads and pass.
  """
  rows = stored_rows(path)
  done = {(r['shape'], r['batch'], r['threads']) for r in rows}
  num_cpus = len(os.sched_getaffinity(0))
  todo = [
      (layer, batch_size, threads)
      for layer, batch_size, threads in itertools.product(
          layers, batch_sizes, [n for n in THREADS if n <= num_cpus]
      )
      if (json.dumps(layer), batch_size, threads) not in done
  ]
  workers = {n: Worker(n) for n in {threads for *_, threads in todo}}
  try:
    for i, (layer, batch_size, threads) in enumerate(todo, 1):
      found = workers[threads].measure(layer, batch_size, repetitions)
      rows += [
          dict(layer=str(layer), shape=json.dumps(layer), batch=batch_size,
               threads=threads, milliseconds=ways) | {'pass': kind}
          for kind, ways in found.items()
      ]  # fmt: skip
      _write(path, rows)
      print(f'{i} of {len(todo)}: {layer}, batch {batch_size}, {threads} '
            'threads', flush=True)
  finally:
    for worker in workers.values():
      worker.close()
  return rows


def _write(path: pathlib.Path, rows) -> None:
  """Replaces the file atomically, so that a killed run can be continued."""
  temporary = path.with_suffix('.part')
  results = {'machine': common.machine(), 'rows': rows}
  temporary.write_text(json.dumps(results, indent=1) + '\n')
  os.replace(temporary, path)


def winner(milliseconds: Mapping[str, float]) -> tuple[str | None, float]:
  """The way that is fastest by more than `MARGIN`, and its speed-up.

  Args:
    milliseconds: {way: time} of at least two ways.

  Returns:
    The way, None if none wins, and the second-best time over the best.
  """
  (way, best), (_, second) = sorted(
      milliseconds.items(), key=lambda item: item[1]
  )[:2]
  return (way if second > MARGIN * best else None), second / best


def wins(rows: Sequence[Mapping]) -> list[list]:
  """Counts the wins of each way of each pass.

  Args:
    rows: Rows of `survey`.

  Returns:
    [pass, way, threads, 'all' or 'without oneDNN', rows won, rows, largest
    speed-up, the row with it], for every way.
  """
  table = []
  for kind, ways in lowerings.WAYS.items():
    for threads in sorted({row['threads'] for row in rows}):
      mine = [r for r in rows if (r['pass'], r['threads']) == (kind, threads)]
      for among, left_out in (('all', ()), ('without oneDNN', LIBRARIES)):
        won = {way: [] for way in ways if way not in left_out}
        for row in mine:
          times = row['milliseconds'].items()
          way, gain = winner({w: t for w, t in times if w not in left_out})
          if way:
            best = f'{row["milliseconds"][way]:.3g} ms'
            where = f'{row["layer"]}, batch {row["batch"]}, {best}'
            won[way].append((gain, where))
        for way, found in won.items():
          table.append([
              kind, way, threads, among, len(found), len(mine),
              *max(found, default=(1.0, '')),
          ])  # fmt: skip
  return table


HEADER = [
    'pass', 'way', 'threads', 'among', 'wins', 'rows', 'largest speed-up',
    'where',
]  # fmt: skip


def report(table: Sequence[Sequence]) -> str:
  """The ways that win somewhere as a table, then those that never win."""
  num = HEADER.index('wins')
  lines = [common.markdown(HEADER, [row for row in table if row[num]])]
  for kind, ways in lowerings.WAYS.items():
    winners = {row[1] for row in table if row[0] == kind and row[num]}
    never = [way for way in ways if way not in winners]
    lines.append(f'{kind}: never fastest: {", ".join(never)}')
  return '\n'.join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='one tiny layer')
  parser.add_argument('--data', default=','.join(_DATA), help='data sets')
  parser.add_argument('--batches', default=','.join(map(str, BATCH_SIZES)))
  parser.add_argument('--every', type=int, default=1, help='each n-th layer')
  parser.add_argument('--output', help='JSON file to write or to continue')
  parser.add_argument('--child', type=int, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if not hasattr(os, 'sched_setaffinity'):
    parser.error('this needs Linux: it sets the CPUs that a process may use.')
  if args.every < 1:
    parser.error(f'--every must be at least 1, got {args.every}.')
  if args.child:
    serve(args.child, sys.stdin)
    return
  data = args.data.split(',')
  if unknown := set(data) - set(_DATA):
    parser.error(f'Unknown data {unknown}; known are {", ".join(_DATA)}.')
  suffix = '_quick' if args.quick else ''
  path = args.output or common.RESULTS / f'lowering_wins{suffix}.json'
  rows = survey(
      [_QUICK_LAYER] if args.quick else distinct_layers(data)[:: args.every],
      BATCH_SIZES[:1] if args.quick else [*map(int, args.batches.split(','))],
      2 if args.quick else 4,
      pathlib.Path(path),
  )
  print(report(wins(rows)))


if __name__ == '__main__':
  main()
