"""Lists the operations in which the local steps of a net spend their time.

  python -m benchmarks.step_profile [--models=vit_t16,...] [--quick]
    [--conv_backend=onednn] [--output=FILE]

The steps are those of `benchmarks.local_step`, recorded once by JAX's profiler.
An operation is a kernel of the compiled program, without its number: the name
of a fusion lists what it fuses, and matrix products are `ynn_fusion`, `dot` and
`dot_general`. Milliseconds are those of a step, summed over the threads that
XLA records: operations may run at the same time, and helpers in a product are
not recorded, so shares of the step need not add up to 100. The operations of
the products are those of three forward passes. Let the machine be idle.
"""

import collections
from collections.abc import Mapping
import pathlib
import re
import tempfile
import time

import jax

from benchmarks import common, flops, nets
from fedjax_het.models import create

# Events of the profiler that enclose others, or are no work.
_FRAMES = re.compile(r'end: |.*::|while|call|conditional|\$')
# Operations that are listed; the others are added up.
_SHOWN = 12


def kernels(folder: str) -> dict[str, float]:
  """Seconds of each operation, summed over threads.

  Args:
    folder: What `jax.profiler.trace` has written.

  Returns:
    {name without number: seconds}.
  """
  (path,) = pathlib.Path(folder).rglob('*.xplane.pb')
  seconds = collections.Counter()
  for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
    for line in plane.lines:
      if line.name.startswith('tf_XLA'):
        for event in line.events:
          if not _FRAMES.match(event.name):
            name = re.sub(r'\.\d+', '', event.name)
            seconds[name] += event.duration_ns / 1e9
  return dict(seconds)


def profile(name: str, conv_backend: str) -> dict[str, object]:
  """Records a call of `nets.local_epoch`.

  Args:
    name: A net.
    conv_backend: Backend of its convolutions.

  Returns:
    'step', milliseconds of a step; 'gflop', the operations of its products,
    in 10^9; and 'operations', {name: milliseconds of a step}.
  """
  program = nets.local_epoch(name, conv_backend=conv_backend)
  program.call()
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      begin = time.perf_counter()
      program.call()
      seconds = time.perf_counter() - begin
    found = kernels(folder)
  each = 1e3 / nets.STEPS
  batch_size, _ = (nets.NETS | nets.MORE)[name]
  model = create(name, nets.INPUT_SHAPE, 10)
  return {
      'step': each * seconds,
      'gflop': batch_size * flops.training_flops(model) / 1e9,
      'operations': {
          name: each * found[name]
          for name in sorted(found, key=found.__getitem__, reverse=True)
      },
  }


def report(found: Mapping[str, object]) -> str:
  """The table of one net."""
  operations = [*found['operations'].items()]
  rows = operations[:_SHOWN]
  rows.append(('others', sum(ms for _, ms in operations[_SHOWN:])))
  return common.markdown(
      ['operation', 'ms', 'of the step, %'],
      [[name, ms, 100 * ms / found['step']] for name, ms in rows],
  )


def main() -> None:
  known = nets.NETS | nets.MORE
  flags = nets.parser(__doc__.splitlines()[0], known)
  flags.add_argument('--conv_backend', default='xla', choices=('xla', 'onednn'))
  args, names = nets.parsed(flags, known)
  # The compilation cache does not support oneDNN's convolutions.
  jax.config.update('jax_compilation_cache_dir', None)
  found = {}
  suffix = '_quick' if args.quick else ''
  path = args.output or common.RESULTS / f'step_profile{suffix}.json'
  for name in names:
    found[name] = profile(name, args.conv_backend)
    step, gflop = found[name]['step'], found[name]['gflop']
    print(f'{name}, {step:.3g} ms a step, products of {gflop:.3g} GFLOP\n')
    print(report(found[name]) + '\n', flush=True)
    common.write(path, {'conv_backend': args.conv_backend, 'nets': found})


if __name__ == '__main__':
  main()
