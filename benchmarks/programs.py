"""Timed programs: rounds of the library, and references.

A program is called repeatedly; a call blocks until its work is done.
"""

from collections.abc import Callable
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine.rounds import init_state, make_round
from fedjax_het.engine.types import FederatedAlgorithm, Federation
from fedjax_het.kernels.lowering import conv_lowering, using_conv_backend


class Program(NamedTuple):
  """A program that can be called repeatedly.

  Attributes:
    call: Runs the program once.
    num_images: Images per call.
    compile_seconds: Seconds of tracing and compilation, or None.
    megabytes: XLA's planned memory (arguments, results and temporaries), or
      None.
    compilations: Number of programs that XLA compiled in each call so far, or
      None if not counted.
    flops: Operations per image, if different from the workload's.
  """

  call: Callable[[], object]
  num_images: int
  compile_seconds: float | None = None
  megabytes: float | None = None
  compilations: list[int] | None = None
  flops: float | None = None


class Round(NamedTuple):
  """A round of the library.

  Attributes:
    algorithm: The algorithm.
    federation: The clients.
    data: Their examples.
    cohort_size: Clients per round.
  """

  algorithm: FederatedAlgorithm
  federation: Federation
  data: FederatedData
  cohort_size: int


class CompileCounter:
  """Counts the programs that XLA compiles from now on."""

  def __init__(self):
    self.number = 0
    jax.monitoring.register_event_duration_secs_listener(self._hear)

  def _hear(self, event: str, seconds: float, **kwargs) -> None:
    del seconds, kwargs
    self.number += event.endswith('/backend_compile_duration')


_compilations = CompileCounter()


def _compile(jitted, *args):
  """The compiled program, seconds, and XLA's planned megabytes."""
  start = time.perf_counter()
  compiled = jitted.lower(*args).compile()
  seconds = time.perf_counter() - start
  memory = compiled.memory_analysis()
  total = (
      memory.argument_size_in_bytes
      + memory.output_size_in_bytes
      + memory.temp_size_in_bytes
      - memory.alias_size_in_bytes
  )
  return compiled, seconds, total / 2**20


def library(
    task: Round, backend: str, num_images: int, conv_backend: str = 'xla'
) -> Program:
  """A whole round: downlink, client updates and server update.

  Args:
    task: The round.
    backend: Backend that maps the clients.
    num_images: Images per round.
    conv_backend: Convolutions that models call on a CPU.

  Returns:
    The program; each call runs the next round, with a new cohort.
  """
  algorithm, federation, data, cohort_size = task
  run_round = make_round(
      algorithm, federation, cohort_size=cohort_size, backend=backend
  )
  keys = jax.random.split(jax.random.key(0))
  state = init_state(algorithm, federation, keys[0])
  # JAX caches the program, so later calls do not compile it again.
  with using_conv_backend(conv_backend):
    _, seconds, megabytes = _compile(run_round, state, data, *keys)
  compilations = []

  def call():
    nonlocal state
    before = _compilations.number
    with using_conv_backend(conv_backend):
      state, _ = jax.block_until_ready(run_round(state, data, *keys))
    compilations.append(_compilations.number - before)

  return Program(call, num_images, seconds, megabytes, compilations)


def naive(
    client: Callable[..., object], args: tuple[object, ...], num_images: int
) -> Program:
  """A client's training under `vmap`, with native convolutions.

  Args:
    client: Trains one client.
    args: Its arguments, leaves [K, ...].
    num_images: Images of all clients.

  Returns:
    The program; every call starts from the same arguments.
  """
  return together([(client, args)], num_images)


def together(
    clients: list[tuple[Callable[..., object], tuple[object, ...]]],
    num_images: int,
) -> Program:
  """`naive` for several architectures, one compiled program each."""
  with conv_lowering('native'):
    parts = [_compile(jax.jit(jax.vmap(c)), *args) for c, args in clients]

  def call():
    for (compiled, _, _), (_, args) in zip(parts, clients, strict=True):
      jax.block_until_ready(compiled(*args))

  return Program(
      call,
      num_images,
      sum(seconds for _, seconds, _ in parts),
      max(megabytes for _, _, megabytes in parts),
  )


def matrix_product(
    size: int | None = None,
) -> tuple[Callable[[], object], int]:
  """Large float32 matrix products, which measure the peak speed.

  Args:
    size: Rows and columns; None for 2,048 on a CPU, 8,192 elsewhere.

  Returns:
    A function that runs the products, and its floating-point operations.
  """
  size = size or (2048 if jax.default_backend() == 'cpu' else 8192)
  times = 4
  a = jnp.full((size, size), 1 / size)

  @jax.jit
  def multiply(a):
    return jax.lax.fori_loop(0, times, lambda i, b: a @ b, a)

  jax.block_until_ready(multiply(a))
  return lambda: jax.block_until_ready(multiply(a)), times * 2 * size**3
