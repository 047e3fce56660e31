"""Drivers: three ways to run rounds, with one interface.

  round_driver      a round waits for its cohort; clients' states are on
                    the device, or sharded over the devices of a mesh
  streamed_driver   the same, with clients' states in host memory
  clock_driver      the server updates its state with every upload, in the
                    order of a virtual clock

    driver = round_driver(job)
    state = driver.init(key)
    program = driver.compile(state)
    state, collect = program.run(state, done=0, num=1)
    (report,) = collect()
"""

from collections.abc import Callable
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.engine import placement
from fedjax_het.engine.asynchronous import init_async_state, make_async_round
from fedjax_het.engine.compiling import in_thread, planned_memory
from fedjax_het.engine.job import Job
from fedjax_het.engine.reports import RoundReport
from fedjax_het.engine.rounds import (
    State,
    init_state,
    make_round,
    make_rounds,
    make_warm_up,
    state_shardings,
)
from fedjax_het.engine.streaming import (
    init_streamed_state,
    make_streamed_round,
)
from fedjax_het.engine.timelines import plan_events, synchronous_timeline

Collect = Callable[[], list[RoundReport]]


class Program(NamedTuple):
  """The rounds of a driver, compiled.

  Attributes:
    run: `(state, done, num) -> (state, collect)`: runs the `num` rounds after
      the first `done` ones. It donates the state and does not wait for the
      device; `collect() -> [RoundReport]` does, and returns one report a round,
      on the host. The first call waits for the compilation, and raises its
      error.
    timeline: `(rounds done) -> {name: number}`, the virtual clock's figures for
      the last of these rounds; {} without a clock.
    memory: `() -> ` bytes that XLA planned for the program; {} if they are not
      known. It waits for the compilation, and raises its error.
    seconds: `() -> ` wall seconds of tracing the program, and of compiling it
      or loading it from the cache; None if the first call compiles it. It waits
      like `memory`.
  """

  run: Callable[..., tuple[Any, Collect]]
  timeline: Callable[[int], dict[str, float]]
  memory: Callable[[], dict[str, int]]
  seconds: Callable[[], float | None]


class Driver(NamedTuple):
  """One way to run rounds.

  Attributes:
    init: `(key) -> state`, the state before the first round.
    shapes: `() -> state` of `jax.ShapeDtypeStruct`; no array is computed.
    compile: `(state) -> Program`, for states of these shapes; the state is not
      donated. The program is traced now and compiled in a thread. Raises
      ValueError if the devices can never finish a round.
    warm_up: `(state) -> (state, RoundReport)`, run before the first round; None
      for no warm-up.
    shardings: The state's shardings, a prefix of its tree; None for the default
      device or the host.
    on_host: The path prefix of leaves that stay numpy arrays; None if there are
      none.
  """

  init: Callable[[Any], Any]
  shapes: Callable[[], Any]
  compile: Callable[[Any], Program]
  warm_up: Callable[[Any], tuple[Any, RoundReport]] | None = None
  shardings: Any = None
  on_host: str | None = None

  def place(self, state: Any) -> Any:
    """Places a state, which each process has in full, on the devices."""
    return _place(state, self.shardings)


def round_driver(job: Job) -> Driver:
  """The driver of synchronous rounds.

  Args:
    job: The run.

  Returns:
    The driver; its states are those of `init_state`.
  """
  algorithm, federation, backend = job.algorithm, job.federation, job.backend
  mesh, where = backend.state_mesh, None
  if mesh is not None:
    where = state_shardings(federation, mesh)

  def init(key):
    return init_state(algorithm, federation, key, mesh)

  def compile_rounds(state) -> Program:
    run_round = make_round(
        algorithm, federation, cohort_size=job.cohort_size, backend=backend
    )
    timeline = synchronous_timeline(job)
    return _compile(job, run_round, _same_key(job), timeline, state, where)

  return Driver(
      init,
      lambda: _with_shardings(_init_shapes(job), where),
      compile_rounds,
      _make_warm_up(job, where),
      where,
  )


def streamed_driver(job: Job) -> Driver:
  """The driver of synchronous rounds with clients' states in host memory.

  Args:
    job: The run, with one round a dispatch.

  Returns:
    The driver; its states are those of `init_streamed_state`.

  Raises:
    ValueError: If the algorithm has a warm-up, which needs all clients' states
      on the device.
  """
  algorithm, federation = job.algorithm, job.federation
  if algorithm.warm_up is not None:
    raise ValueError(
        "client_store='host' does not fit a method with a warm-up, in which "
        'all clients take part at once.'
    )

  def compile_rounds(state) -> Program:
    run_round = make_streamed_round(
        algorithm, federation, cohort_size=job.cohort_size, backend=job.backend
    )
    timeline = synchronous_timeline(job)
    return _compile(job, run_round, _same_key(job), timeline, state, None)

  return Driver(
      lambda key: init_streamed_state(algorithm, federation, key),
      lambda: _init_shapes(job),
      compile_rounds,
      on_host='clients/',
  )


def clock_driver(job: Job, mode: str) -> Driver:
  """The driver of asynchronous rounds.

  Args:
    job: The run, with devices.
    mode: One of `tiers.UPLOAD_MODES`.

  Returns:
    The driver; its states are those of `init_async_state`. On a mesh the state
    is replicated, since any device may run any client.
  """
  algorithm, federation = job.algorithm, job.federation
  mesh, where = job.backend.state_mesh, None
  if mesh is not None:
    where = placement.everywhere(mesh)

  def of_synchronous(state):
    return init_async_state(algorithm, federation, state, job.data)

  def init(key):
    state = of_synchronous(init_state(algorithm, federation, key))
    return _place(state, where)

  def shapes():
    shapes = jax.eval_shape(of_synchronous, _init_shapes(job))
    return _with_shardings(shapes, where)

  def compile_rounds(state) -> Program:
    run_round = make_async_round(
        algorithm, federation, cohort_size=job.cohort_size, backend=job.backend
    )
    events, timeline = plan_events(job, mode)
    return _compile(job, run_round, events, timeline, state, where)

  return Driver(init, shapes, compile_rounds, _make_warm_up(job, where), where)


def _place(state, where):
  return state if where is None else placement.put(state, where)


def _init_shapes(job: Job) -> State:
  """Shapes of the initial state of synchronous rounds."""
  return jax.eval_shape(
      lambda key: init_state(job.algorithm, job.federation, key), job.key
  )


def _with_shardings(shapes, where):
  """Adds shardings, a prefix of the tree, to shapes."""
  if where is None:
    return shapes

  def one(sharding, shape):
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

  return jax.tree.map(
      lambda sharding, part: jax.tree.map(lambda s: one(sharding, s), part),
      where,
      shapes,
  )


def _make_warm_up(job: Job, where):
  """The warm-up, for states whose first fields are those of `State`."""
  if job.algorithm.warm_up is None:
    return None
  program = make_warm_up(job.algorithm, job.federation, backend=job.backend)

  def warm_up(state):
    # A synchronous visit of all clients; nothing is in flight yet.
    warm, report = program(State(*state[:3]), job.data, job.key)
    return _place(state._replace(**warm._asdict()), where), report

  return warm_up


def _same_key(job: Job):
  """The last argument of every synchronous round: the sampling key."""
  return lambda done: job.sampling_key


def _compile(job: Job, run_round, who, timeline, state, where) -> Program:
  """Starts to compile rounds, one or several in a dispatch.

  Args:
    job: The run.
    run_round: `(state, data, key, who) -> (state, report)`.
    who: `(rounds done) -> ` the last argument of the next round, a sampling key
      or events.
    timeline: See `Program`.
    state: A state, for its shapes.
    where: See `Driver.shardings`.

  Returns:
    The program.
  """
  several, compiling = job.capacity is not None, None
  if several:
    results = where
    if where is not None:
      results = where, placement.everywhere(job.backend.mesh)
    run_round = make_rounds(run_round, job.capacity, results)

  def arguments(done: int, num: int):
    """Arguments of the program besides the state."""
    if not several:
      return job.data, job.key, jax.device_put(who(done))
    # Entries from `num` on are not read.
    rounds = [who(done + i) for i in range(num)]
    rounds += rounds[-1:] * (job.capacity - num)
    stacked = jax.tree.map(_stack, *rounds)
    return job.data, job.key, stacked, jax.device_put(np.int32(num))

  if hasattr(run_round, 'lower'):
    begin = time.perf_counter()
    lowered = run_round.lower(state, *arguments(0, 1))
    traced = time.perf_counter() - begin
    compiling = in_thread(lowered)

  def run(state, done: int, num: int):
    program = run_round if compiling is None else compiling.result().program
    state, reports = program(state, *arguments(done, num))

    def collect():
      host = jax.device_get(reports)
      if not several:
        return [host]
      return [jax.tree.map(lambda a, i=i: a[i], host) for i in range(num)]

    return state, collect

  def memory():
    if compiling is None:
      return {}
    return planned_memory(compiling.result().program)

  def seconds():
    return None if compiling is None else traced + compiling.result().seconds

  return Program(run, timeline, memory, seconds)


def _stack(*leaves):
  """Stacks numpy arrays on the host, or copies of one key on the device."""
  if isinstance(leaves[0], jax.Array):
    return jnp.broadcast_to(leaves[0], (len(leaves), *leaves[0].shape))
  return jax.device_put(np.stack(leaves))
