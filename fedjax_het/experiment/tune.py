"""Measures the speeds that `auto` follows on a CPU; see `experiment.tuned`."""

from collections.abc import Callable
import contextlib
import datetime
import functools
import itertools
import logging
import os
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax

from fedjax_het.data.federated import Normalise, federate
from fedjax_het.engine.local import fit_model
from fedjax_het.engine.mapping import client_mesh
from fedjax_het.engine.types import LocalTraining, Visit
from fedjax_het.experiment import predict, tuned
from fedjax_het.experiment.workdir import hold
from fedjax_het.kernels import libraries
from fedjax_het.kernels.lowering import using_conv_backend
from fedjax_het.models import BlockModel, create

_log = logging.getLogger(__name__)
# Above this load per core, other processes make a measurement slower.
_IDLE = 0.5
# A call takes at least about so many seconds. The fastest of `_TURNS` counts,
# or of those that a net's share of the time allows.
_CALL, _TURNS, _SHARE = 0.2, 5, 5.0
_CLASSES = 10


class _Work(NamedTuple):
  """A net and the local steps of a visit.

  Attributes:
    make: Makes the net.
    batch_size: Examples of a step.
    steps: Steps of a visit.
  """

  make: Callable[[], BlockModel]
  batch_size: int
  steps: int


def _part(name: str, start: int, stop: int) -> BlockModel:
  """The blocks [start, stop) of a net for CIFAR-10, and a head."""
  model = create(name, (32, 32, 3), _CLASSES)
  blocks = model.blocks[start:stop]
  return BlockModel.from_module(
      {block.name: block.module for block in blocks},
      model.inputs[blocks[0].name],
      _CLASSES,
      name=name,
  )


def _whole(name: str, shape: tuple[int, int, int], **options) -> BlockModel:
  return create(name, shape, _CLASSES, **options)


# Small nets and parts of nets, which compile faster; the most telling ones
# first, since slow machines may not come to the last.
_NETS = {
    'thin convolutions': _Work(
        functools.partial(_part, 'preresnet20', 5, 7), 16, 4
    ),
    'small dense': _Work(
        functools.partial(_whole, 'mlp', (28, 28, 1)), 32, 40
    ),
    'wide convolutions': _Work(
        functools.partial(_whole, 'fedhe_cnn5', (28, 28, 1)), 50, 1
    ),
    'wide convolutions, large maps': _Work(
        functools.partial(_whole, 'fedhe_cnn0', (28, 28, 1)), 50, 1
    ),
    'medium convolutions': _Work(
        functools.partial(_whole, 'dropout_cnn', (32, 32, 3)), 10, 8
    ),
    'thin convolutions, small maps': _Work(
        functools.partial(_whole, 'simple_cnn', (32, 32, 3)), 64, 4
    ),
    'large dense': _Work(
        functools.partial(_whole, 'mlp', (32, 32, 3), hidden=768), 128, 4
    ),
}


class _Program(NamedTuple):
  """A compiled program of visits.

  Attributes:
    call: `(visits of each device) -> None`, blocks until they are done.
    images: Images of a visit.
    compile_seconds: Of tracing and compiling it.
  """

  call: Callable[[list[int]], None]
  images: int
  compile_seconds: float


def busy() -> float:
  """The machine's load if that makes measurements slower, else 0."""
  load = os.getloadavg()[0] if hasattr(os, 'getloadavg') else 0.0
  return load if load > _IDLE * tuned.cores() else 0.0


def measure_apart(limit: float = 300.0) -> tuned.Table | None:
  """Measures and stores the speeds in a process of its own.

  Args:
    limit: Seconds after which that process is ended.

  Returns:
    The speeds; None after a warning if that process fails or takes too long, if
    another one measures, or if the speeds could not be stored.
  """
  with contextlib.ExitStack() as stack:
    try:
      path = tuned.table_path()
      path.parent.mkdir(parents=True, exist_ok=True)
      file = stack.enter_context(open(path.with_suffix('.lock'), 'a'))
      hold(file, stack)
      done = subprocess.run(
          [sys.executable, '-m', __name__],
          stdin=subprocess.DEVNULL, capture_output=True, text=True,
          timeout=limit, env=_environment(),
      )  # fmt: skip
      failed = done.returncode and (done.stderr.splitlines() or ['nothing'])[-1]
    except BlockingIOError:
      failed = 'another process measures it'
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as e:
      failed = str(e)
  if failed:
    _log.warning(
        'This machine could not be measured (%s); see `fedjax-het tune`.',
        failed,
    )
    return None
  return tuned.read()


def _environment() -> dict[str, str]:
  """This process' variables, but for those that set the number of devices."""
  env = {k: v for k, v in os.environ.items() if k != 'JAX_NUM_CPU_DEVICES'}
  options = env.pop('XLA_FLAGS', '').split()
  kept = [o for o in options if not o.startswith(f'--{tuned.DEVICES_FLAG}')]
  return env | ({'XLA_FLAGS': ' '.join(kept)} if kept else {})


def measure(
    *,
    seconds: float = 120.0,
    small: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuned.Table:
  """Times local training of a few nets, in each form that there is.

  Nothing else should run on the machine. JAX's compilation cache is not used.

  Args:
    seconds: After this time no further net is begun.
    small: Whether batches and calls are tiny, for tests.
    say: Called with a line for each net.

  Returns:
    The speeds, of as many devices as JAX has.

  Raises:
    ValueError: If the device is no CPU.
  """
  if jax.default_backend() != 'cpu':
    raise ValueError(
        'These are forms of CPUs; `python -m benchmarks.accelerator` measures '
        f'others, such as {jax.devices()[0].device_kind}.'
    )
  begin, cases = time.monotonic(), {}
  for name, work in _NETS.items():
    if time.monotonic() - begin > seconds:
      say(f'{name}: left out, the {seconds:g} seconds are over.')
      continue
    cases[name] = _measure(work, small)
    say(f'{name}: {_rates(cases[name])}')
  today = datetime.date.today().isoformat()
  return tuned.Table(today, len(jax.local_devices()), cases)


def _rates(case: tuned.Case) -> str:
  """The measurements of a net in words."""
  return ', '.join(
      f'{libraries.title(row.conv_backend)} on {row.devices} '
      f'device{"s" * (row.devices > 1)} {row.images_per_second:,.0f}'
      for row in case.rows
  )


def _measure(work: _Work, small: bool) -> tuned.Case:
  """Images a second of a net, in all forms in turns."""
  if small:
    work = work._replace(batch_size=2, steps=1)
  model = work.make()
  net, devices = predict.describe(model), len(jax.local_devices())
  names = [
      name for name in libraries.CONV_BACKENDS
      if libraries.why_not(name) is None
      and (net.convolutional or name == predict.PLAIN.conv_backend)
  ]  # fmt: skip
  programs = {name: _compile(model, work, name) for name in names}
  # Whole visits of every device, so that all forms do equally many.
  one = _time(programs[names[0]], [devices] + [0] * (devices - 1))
  times = 1 if small else max(1, round(_CALL / one))
  visits = times * devices
  shares = {devices: [times] * devices, 1: [visits] + [0] * (devices - 1)}
  best: dict[tuple[str, int], float] = {}
  begin = time.monotonic()
  for turn in range(1 if small else _TURNS):
    if turn > 1 and time.monotonic() - begin > _SHARE:
      break
    for name, number in itertools.product(names, shares):
      found = _time(programs[name], shares[number])
      best[name, number] = min(found, best.get((name, number), found))
  rows = tuple(
      tuned.Row(
          name,
          number,
          visits * programs[name].images / best[name, number],
          programs[name].compile_seconds,
      )
      for name, number in sorted(best, key=lambda pair: pair[1])
  )
  return tuned.Case(net, rows)


def _time(program: _Program, visits: list[int]) -> float:
  begin = time.perf_counter()
  program.call(visits)
  return time.perf_counter() - begin


def _compile(model: BlockModel, work: _Work, name: str) -> _Program:
  """The program of one library, called once.

  Each device does its visits one after another, so that one program serves for
  one device, if it does all of them, and for a device per core.
  """
  mesh = client_mesh()
  (axis,) = mesh.axis_names
  each, everywhere = PartitionSpec(axis), PartitionSpec()
  images = work.batch_size * work.steps
  local = LocalTraining(
      functools.partial(optax.sgd, momentum=0.9), lambda round_num: 1e-3, 1,
      work.batch_size, steps=work.steps, drop_unused_weights=True,
  )  # fmt: skip
  data = _noise(model.input_shape, images)

  @jax.jit
  @functools.partial(
      jax.shard_map,
      mesh=mesh,
      in_specs=(each, everywhere, everywhere),
      out_specs=each,
      check_vma=False,
  )
  def train(visits, variables, data):
    def visit(i, variables):
      key = jax.random.key(0)
      client = data.client(jnp.int32(0))
      return fit_model(
          model, local, variables, client, Visit(jnp.int32(0), i, key)
      )[0]

    end = jax.lax.fori_loop(0, visits[0], visit, variables)
    return jnp.stack([leaf.sum() for leaf in jax.tree.leaves(end)]).sum()[None]

  args = jax.device_put(
      (model.init(jax.random.key(0)), data), NamedSharding(mesh, everywhere)
  )

  def place(visits):
    return jax.device_put(
        np.array(visits, np.int32), NamedSharding(mesh, each)
    )

  with libraries.no_compilation_cache(), using_conv_backend(name):
    begin = time.perf_counter()
    compiled = train.lower(place([1] * mesh.size), *args).compile()
    seconds = time.perf_counter() - begin

  def call(visits):
    jax.block_until_ready(compiled(place(visits), *args))

  call([1] * mesh.size)
  return _Program(call, images, seconds)


def _noise(shape: tuple[int, ...], number: int):
  """Federated data of one client with random examples of a shape."""
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (number, *shape), np.uint8)
  labels = rng.integers(0, _CLASSES, number, np.int32)
  channels = shape[-1]
  normalise = Normalise((0.5,) * channels, (0.25,) * channels)
  return federate(images, labels, [np.arange(number)], normalise)


if __name__ == '__main__':
  tuned.start_devices(tuned.devices())
  tuned.write(measure())
