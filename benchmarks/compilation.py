"""Times the programs that a run compiles before its first round.

  python -m benchmarks.compilation [--works=default,resnets,...] [--quick]
    [--output=FILE]

Each work is prepared in two processes: the first has an empty folder of
compiled programs, the second has the folder that the first has filled. The
round is that of one device with XLA's convolutions (`backend='map'`). A process
builds the experiment, compiles the round and evaluates once; it trains
nothing. The table has the CPU seconds of the imports and of the rest of the
process. For the largest programs it has the seconds of tracing, of lowering to
XLA, of compiling and of loading from the folder, and then the begin, end and
thread of each longer compilation or loading. These are wall times: let the
machine be idle, or multiply by the share of a core that the process gets.
"""

import argparse
import collections
import importlib
import json
import tempfile
import threading
import time

import jax
import ml_collections
import numpy as np

from benchmarks import common
from fedjax_het.experiment import programs
from fedjax_het.experiment.build import build

# {work: a config of `configs` and its variants}. All works except those on the
# digits take random images: compilation depends only on their shape.
WORKS = {
    'default': 'fedin',
    'resnets': 'fedin:v2',
    'fedhe': 'fedhe:fedhe',
    'fedepth': 'fedepth:fedepth',
}
_QUICK = {'quick': 'fedavg:quick'}
_IMAGE = (32, 32, 3)
# Ends of the names of JAX's events.
_PARTS = {
    'jaxpr_trace_duration': 'trace',
    'jaxpr_to_mlir_module_duration': 'lower',
    'backend_compile_duration': 'compile',
    'cache_retrieval_time_sec': 'load',
}
# Compilations that take more seconds have a line with their begin and end.
_LONG = 0.5


class Programs:
  """Adds up the seconds of each part of a compilation, by program.

  Attributes:
    seconds: {program: {part: seconds}}. JAX reports loading without a program's
      name; the seconds are also part of 'compile' of the program.
    count: Number of programs that were compiled or loaded.
    spans: (begin, end, thread, program) of the longer compilations, in seconds
      since the start.
  """

  def __init__(self):
    self.seconds = collections.defaultdict(collections.Counter)
    self.count = 0
    self.spans = []
    self._start = time.perf_counter()
    jax.monitoring.register_event_duration_secs_listener(self._hear)

  def _hear(self, event: str, seconds: float, **kwargs) -> None:
    part = _PARTS.get(event.rpartition('/')[2])
    if part is None:
      return
    name = str(kwargs.get('fun_name', 'all programs'))
    name = name.removeprefix('jit(').removesuffix(')')
    self.seconds[name][part] += seconds
    if part == 'compile':
      self.count += 1
      end = time.perf_counter() - self._start
      thread = threading.current_thread().name
      if seconds > _LONG:
        self.spans.append((end - seconds, end, thread, name))


def prepare(config) -> None:
  """Does what `experiment.run` does before the first round, and evaluates.

  Args:
    config: Its config.
  """
  built = build(config)
  driver = programs.make_driver(built)
  state = driver.init(programs.run_keys(built.config)[0])
  made = programs.compile_programs(built, driver, state)
  jax.block_until_ready(made.evaluate(state))
  made.memory()  # Waits for the round's compilation.


def _config(text: str, folder: str):
  """The config of a work, on the digits or on random images in a folder."""
  name, _, variants = text.partition(':')
  module = importlib.import_module(f'fedjax_het.configs.{name}')
  config = module.get_config(variants)
  if config.dataset != 'digits':
    clients = sum(
        group if isinstance(group, int) else group.clients
        for group in config.groups.values()
    )
    # Two batches for each client.
    number = 2 * clients * config.local.batch_size
    config.dataset, config.data_file = 'npz', f'{folder}/images.npz'
    config.partition = ml_collections.ConfigDict({'name': 'iid', 'seed': 0})
    _write_images(config.data_file, number)
  config.backend = 'map'
  return config


def _write_images(path: str, number: int) -> None:
  """Writes random images of ten classes, a thousand of them for testing."""
  random = np.random.default_rng(0)
  parts = {}
  for part, size in (('train', number), ('test', 1000)):
    parts[f'x_{part}'] = random.integers(0, 256, (size, *_IMAGE), np.uint8)
    parts[f'y_{part}'] = np.arange(size) % 10
  np.savez(path, **parts)


def measure(text: str, cache: str) -> dict[str, object]:
  """Measures in this process, which stores programs in the folder `cache`."""
  jax.config.update('jax_compilation_cache_dir', cache)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  found = Programs()
  with tempfile.TemporaryDirectory() as folder:
    imports = time.process_time()
    config = _config(text, folder)
    made, begin = time.process_time(), time.perf_counter()
    prepare(config)
  return dict(
      imports=imports,
      cpu=time.process_time() - made,
      seconds=time.perf_counter() - begin,
      count=found.count,
      programs=found.seconds,
      spans=found.spans,
  )


def lines(work: str, found: dict[str, dict], most: int = 6) -> list[str]:
  """A work's table: a line for each cache, then its largest programs."""
  text = []
  for cache, one in found.items():
    text.append(
        f'{work}, {cache} cache: {one["cpu"]:.1f} CPU s in {one["seconds"]:.1f}'
        f' s after {one["imports"]:.1f} CPU s of imports; '
        f'{one["count"]} programs'
    )
    by_size = sorted(one['programs'].items(), key=lambda p: -sum(p[1].values()))
    for name, parts in by_size[:most]:
      shares = ', '.join(f'{k} {v:.2f}' for k, v in sorted(parts.items()))
      text.append(f'  {name[:40]:40} {shares}')
    for begin, end, thread, name in one['spans']:
      text.append(f'  {begin:7.1f} to {end:7.1f} s, {thread}: {name}')
  return text


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--works', default=','.join(WORKS))
  parser.add_argument('--quick', action='store_true', help='one small work')
  parser.add_argument('--output', help='JSON file to write')
  parser.add_argument('--child', nargs=2, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    print(json.dumps(measure(*args.child)))
    return
  works = _QUICK if args.quick else {w: WORKS[w] for w in args.works.split(',')}
  results = {}
  for work, text in works.items():
    with tempfile.TemporaryDirectory() as cache:
      results[work] = {
          state: common.in_child('benchmarks.compilation', text, cache)
          for state in ('empty', 'warm')
      }
    print(*lines(work, results[work]), sep='\n', flush=True)
  if args.output:
    common.write(args.output, results)


if __name__ == '__main__':
  main()
