"""Times a local step of every net with each convolution backend.

  python -m benchmarks.local_step [--models=resnet18,...] [--quick]
    [--torch] [--one-core | --per-core] [--output=FILE]

A local step is that of a FedAvg client: batch, forward pass, gradients and
optimiser, in the compiled loop of a round. The backends take turns; the minimum
time of each counts. Let the machine be idle.

`--torch` adds eager PyTorch with as many threads. `--one-core` does so, too, on
one CPU, and counts CPU seconds, which other processes change less. `--per-core`
does so, too, and has a device and a client for each core, as a run chooses for
most nets; milliseconds are then those of all clients' steps divided by their
number. PyTorch always trains one client after another. The file is written
after every net.
"""

from collections.abc import Callable
import os
import time

import jax
import optax

from benchmarks import common, nets
from benchmarks.lowerings import libraries, local_steps
from fedjax_het.models import create


def known():
  """All nets by name."""
  return nets.NETS | nets.MORE


def eager_epoch(name: str) -> Callable[[], None]:
  """The local steps of `nets.local_epoch` in eager PyTorch."""
  import torch

  from benchmarks import torch_local, torch_models

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  batch_size, optimizer = known()[name]
  net = torch_models.mirror(create(name, nets.INPUT_SHAPE, 10))
  params = list(net.parameters())
  options = getattr(optimizer, 'keywords', {})
  if optimizer is optax.adam:
    stepper = torch.optim.Adam(params, lr=common.LEARNING_RATE, fused=True)
  else:
    stepper = torch.optim.SGD(params, lr=common.LEARNING_RATE, **options)
  height, width, channels = nets.INPUT_SHAPE
  x = torch.randn(batch_size * nets.STEPS, channels, height, width)
  y = torch.randint(0, 10, (len(x),))
  loss = torch_local.CrossEntropy(net)
  return lambda: torch_local.train(loss, params, stepper, x, y, batch_size)


def beside_torch(
    name: str, repetitions: int, clock=time.perf_counter, clients: int = 1
) -> dict[str, float]:
  """Milliseconds of a local step by backend, and of eager PyTorch.

  Args:
    name: A key of `known()`.
    repetitions: Calls of each.
    clock: Counts seconds.
    clients: Clients that train at the same time, each on its device.

  Returns:
    {backend or 'torch': milliseconds}.
  """
  calls = {
      backend: nets.local_epoch(
          name, conv_backend=backend, clients=clients
      ).call
      for backend in libraries()
  }
  calls['torch'] = eager_epoch(name)
  for call in calls.values():
    call()
  seconds = common.interleave(
      {key: (call, repetitions) for key, call in calls.items()},
      pause=0.0 if clock is time.process_time else 0.3,
      clock=clock,
  )
  return {
      key: 1e3 * s / nets.STEPS / (1 if key == 'torch' else clients)
      for key, s in seconds.items()
  }


def main() -> None:
  flags = nets.parser(__doc__.splitlines()[0], known())
  flags.add_argument('--torch', action='store_true', help='and PyTorch')
  cores_used = flags.add_mutually_exclusive_group()
  cores_used.add_argument(
      '--one-core', action='store_true', help='CPU seconds, and PyTorch'
  )
  cores_used.add_argument(
      '--per-core', action='store_true', help='a device a core, and PyTorch'
  )
  args, names = nets.parsed(flags, known())
  if args.one_core:  # Before JAX makes its threads.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
  cores = len(os.sched_getaffinity(0))
  if args.per_core:
    jax.config.update('jax_num_cpu_devices', cores)
  # The compilation cache does not support oneDNN's convolutions.
  jax.config.update('jax_compilation_cache_dir', None)
  found = {}
  suffix = '_quick' if args.quick else ''
  path = args.output or common.RESULTS / f'local_step{suffix}.json'
  for name in names:
    repetitions = 2 if args.quick else 8
    if args.one_core:
      found[name] = beside_torch(name, repetitions, time.process_time)
    elif args.torch or args.per_core:
      clients = cores if args.per_core else 1
      found[name] = beside_torch(name, repetitions, clients=clients)
    else:
      found[name], _ = local_steps(name, repetitions)
    print(f'{name}: done', flush=True)
    common.write(path, {'milliseconds': found})
  header = ['a local step, ms', *next(iter(found.values()))]
  rows = [[name, *steps.values()] for name, steps in found.items()]
  print(common.markdown(header, rows))


if __name__ == '__main__':
  main()
