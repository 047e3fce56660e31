"""The programs that a run calls every round, and what they need."""

from collections.abc import Callable
import itertools
import logging
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.engine import placement
from fedjax_het.engine.asynchronous import (
  AsyncState,
  init_async_state,
  lay_out,
  make_async_round,
  plan_rounds,
)
from fedjax_het.engine.clock import (
  Fleet,
  Window,
  check_return,
  stream,
  synchronous_ends,
)
from fedjax_het.engine.cohort import sample_cohort
from fedjax_het.engine.evaluate import make_evaluate
from fedjax_het.engine.local import visit_examples
from fedjax_het.engine.rounds import (
  GroupReport,
  State,
  init_state,
  make_round,
  make_rounds,
  make_warm_up,
)
from fedjax_het.engine.streaming import (
  init_streamed_state,
  make_streamed_round,
)
from fedjax_het.engine.visits import message_bytes
from fedjax_het.experiment import footprint, layout
from fedjax_het.experiment.build import Experiment

_log = logging.getLogger(__name__)

# The most rounds in one dispatch: enough that none waits for the host.
_MOST_ROUNDS = 1000
# Cohorts that are drawn at once, and those looked at before the first round.
_COHORTS, _FIRST_ROUNDS = 256, 8192

Collect = Callable[[], list[dict[str, GroupReport]]]


class Programs(NamedTuple):
  """The compiled functions of a run.

  Attributes:
    run_rounds: `(state, done, num) -> (state, collect)`: the rounds after
      `done` rounds; donates the state and does not wait for the device.
      `collect() -> [{group: report}]` does, and has one entry a round, on the
      host.
    evaluate: `(state) -> {group: scores}` on the test set.
    validate: The same on the examples that clients have held out; None if
      there are none.
    warm_up: `(state) -> (state, {group: report})`, what comes before the first
      round; None for nothing.
    memory: Bytes that XLA planned for a round; {} where it does not say.
    timeline: `(rounds done) -> {name: number}`, what the virtual clock says of
      a round; {} without one.
  """

  run_rounds: Callable[..., tuple[Any, Collect]]
  evaluate: Callable[[Any], Any]
  validate: Callable[[Any], Any] | None
  warm_up: Callable[..., tuple[Any, dict[str, GroupReport]]] | None
  memory: dict[str, int]
  timeline: Callable[[int], dict[str, float]]


def run_keys(config) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The keys of a run.

  Args:
    config: Its config.

  Returns:
    The keys of initial values, of training, and of sampling.
  """
  init_key, train_key = jax.random.split(jax.random.key(config.seed))
  # Folded, so that equal seeds do not give sampling the keys of the others.
  sampling_key = jax.random.fold_in(jax.random.key(config.sampling_seed), 2)
  return init_key, train_key, sampling_key


def first_state(experiment: Experiment) -> State | AsyncState:
  """The state before the first round, of the driver that the config asks for.

  Args:
    experiment: The experiment.

  Returns:
    The state.
  """
  key, _, _ = run_keys(experiment.config)
  algorithm, federation = experiment.algorithm, experiment.federation
  if experiment.config.client_store == 'host':
    return init_streamed_state(algorithm, federation, key)
  if experiment.config.clock.mode == 'synchronous':
    return init_state(algorithm, federation, key, experiment.mesh)
  state = init_state(algorithm, federation, key)
  state = init_async_state(algorithm, federation, state, experiment.data)
  return layout.place(experiment, state)


def state_shapes(experiment: Experiment) -> State | AsyncState:
  """What `first_state` is like, and where; nothing is computed."""
  key, _, _ = run_keys(experiment.config)
  algorithm, federation = experiment.algorithm, experiment.federation

  def init():
    state = init_state(algorithm, federation, key)
    if experiment.config.clock.mode == 'synchronous':
      return state
    return init_async_state(algorithm, federation, state, experiment.data)

  return layout.with_shardings(experiment, jax.eval_shape(init))


def dispatch_size(config) -> int:
  """The most rounds that one dispatch of a run can have."""
  return min(
      config.rounds_per_dispatch,
      config.eval_every,
      config.checkpoint_every,
      config.num_rounds,
      _MOST_ROUNDS,
  )


def _fleet(experiment: Experiment) -> Fleet:
  """All that the clients' virtual durations follow from."""
  federation = experiment.federation
  sent = np.zeros((federation.num_clients, 2), np.int64)
  for group in federation.groups:
    sent[group.client_ids] = message_bytes(
        experiment.algorithm, group, experiment.data
    )
  return Fleet(
      experiment.devices,
      [visit_examples(federation.local, int(n)) for n in federation.sizes],
      *sent.T.tolist(),
      experiment.config.clock.seed,
  )


def _synchronous(experiment: Experiment, options):
  """The round, `(round) -> its sampling key`, and the timeline."""
  config, federation = experiment.config, experiment.federation
  size = experiment.cohort_size
  make = make_round
  if config.client_store == 'host':
    make = make_streamed_round
  run_round = make(
      experiment.algorithm, federation, cohort_size=size, **options
  )
  _, _, key = run_keys(config)
  if experiment.devices is None:
    return run_round, lambda round_num: key, lambda done: {}

  @jax.jit
  def cohorts(rounds):
    return jax.lax.map(
        lambda r: sample_cohort(key, r, federation.num_clients, size), rounds
    )

  def chunks():
    for first in range(0, config.num_rounds, _COHORTS):
      yield np.asarray(cohorts(first + jnp.arange(_COHORTS)))

  fleet = _fleet(experiment)
  if any(device.drop_out == 1 for device in fleet.devices):
    for cohorts_ in itertools.islice(chunks(), _FIRST_ROUNDS // _COHORTS):
      check_return(fleet, cohorts_)
  times = Window(
      lambda: synchronous_ends(fleet, itertools.chain.from_iterable(chunks())),
      2 * dispatch_size(config) + 2,
  )

  def timeline(done):
    return {'virtual_time': times[done - 1] if done else 0.0}

  return run_round, lambda round_num: key, timeline


def _asynchronous(experiment: Experiment, options):
  """As `_synchronous`, `(round) -> its events`."""
  config, federation = experiment.config, experiment.federation
  size = experiment.cohort_size
  fleet = _fleet(experiment)
  limit = experiment.algorithm.max_staleness
  # One dispatch is planned while the lines of another are still to come.
  rounds = Window(
      lambda: plan_rounds(stream(fleet, config.clock.mode, limit), size),
      2 * dispatch_size(config) + 2,
  )
  messages = np.add(fleet.down_bytes, fleet.up_bytes)

  def timeline(done):
    if not done:
      return {'virtual_time': 0.0}
    plan, dropped = rounds[done - 1], {}
    if limit is not None:
      late = np.asarray(plan.staleness) > limit
      dropped['dropped'] = int(np.sum(late))
    return {
        'virtual_time': plan.time,
        'staleness': float(np.mean(plan.staleness)),
        'lost': len(plan.lost),
        'bytes_lost': int(messages[np.array(plan.lost, int)].sum()),
        **dropped,
    }

  run_round = make_async_round(
      experiment.algorithm, federation, cohort_size=size, **options
  )
  return run_round, lambda done: lay_out(rounds[done], federation), timeline


def compile_programs(
    experiment: Experiment, state: State | AsyncState
) -> Programs:
  """Builds the round and evaluation programs, and compiles the former.

  Args:
    experiment: The experiment.
    state: A state of the shapes to expect; it is not used up.

  Returns:
    The programs.

  Raises:
    ValueError: If the fleet of devices can never finish a round, or the
      clients' states cannot lie where the config wants them.
  """
  config = experiment.config
  mesh, where = experiment.mesh, layout.shardings(experiment)
  options = dict(backend=config.backend, chunk=config.chunk, mesh=mesh)
  driver = _asynchronous
  if config.clock.mode == 'synchronous':
    driver = _synchronous
  run_round, participants, timeline = driver(experiment, options)
  dataset, held_out = experiment.dataset, experiment.validation
  evaluate = _evaluate_on(
      experiment, dataset.test_images, dataset.test_labels
  )
  validate = None
  if held_out is not None:
    validate = _evaluate_on(
        experiment,
        dataset.train_images[held_out],
        dataset.train_labels[held_out],
    )
  _, key, _ = run_keys(config)
  capacity, several = dispatch_size(config), config.rounds_per_dispatch > 1
  if several:
    results = where and (where, placement.everywhere(mesh))
    run_round = make_rounds(run_round, capacity, results)
  memory = {}

  def arguments(done: int, num: int):
    """What the program takes beside the state."""
    if not several:
      return experiment.data, key, jax.device_put(participants(done))
    # Entries beyond the rounds to run are not read.
    who = [participants(done + i) for i in range(num)]
    who += who[-1:] * (capacity - num)
    stacked = jax.tree.map(_stack, *who)
    return experiment.data, key, stacked, jax.device_put(np.int32(num))

  if hasattr(run_round, 'lower'):
    _log.info('Compiling the round program ...')
    begin = time.perf_counter()
    run_round = run_round.lower(state, *arguments(0, 1)).compile()
    seconds = time.perf_counter() - begin
    _log.info('Compiled in %.1f s.', seconds)
    memory = _program_memory(run_round)
    if memory:
      more = memory['temporary'] + memory['outputs'] - memory['reused']
      footprint.refuse_if_too_large(
          {'groups, chunk and local.batch_size': more},
          'a round needs, by its compiled program,',
      )

  def run_rounds(state, done: int, num: int):
    state, reports = run_round(state, *arguments(done, num))

    def collect():
      host = jax.device_get(reports)
      if not several:
        return [host]
      return [jax.tree.map(lambda a, i=i: a[i], host) for i in range(num)]

    return state, collect

  warm_up = None
  if experiment.algorithm.warm_up is not None:
    if config.client_store == 'host':
      raise ValueError(
          "client_store='host' does not fit a method with a warm-up, in which "
          'all clients take part at once.'
      )
    program = make_warm_up(
        experiment.algorithm, experiment.federation, **options
    )

    def warm_up(state):
      # A synchronous visit of all: nothing is in flight before the first round.
      warm, reports = program(State(*state[:3]), experiment.data, key)
      state = state._replace(**warm._asdict())
      return layout.place(experiment, state), reports

  return Programs(run_rounds, evaluate, validate, warm_up, memory, timeline)


def _stack(*leaves):
  """Stacks arrays of the host there, and copies of one key on the device."""
  if isinstance(leaves[0], jax.Array):
    return jnp.broadcast_to(leaves[0], (len(leaves), *leaves[0].shape))
  return jax.device_put(np.stack(leaves))


def _evaluate_on(experiment: Experiment, images, labels):
  config, algorithm = experiment.config, experiment.algorithm
  return make_evaluate(
      algorithm,
      experiment.federation,
      images,
      labels,
      experiment.preprocess,
      batch_size=min(config.eval_batch_size, len(labels)),
      clients_per_group=config.eval_clients_per_group,
      data=None if algorithm.calibrate is None else experiment.data,
      mesh=experiment.mesh,
      backend=config.backend,
      chunk=config.chunk,
  )


def _program_memory(compiled) -> dict[str, int]:
  """Bytes that XLA planned for a compiled program, where it says so."""
  try:
    stats = compiled.memory_analysis()
    return dict(
        arguments=int(stats.argument_size_in_bytes),
        outputs=int(stats.output_size_in_bytes),
        reused=int(stats.alias_size_in_bytes),
        temporary=int(stats.temp_size_in_bytes),
    )
  except (AttributeError, NotImplementedError, TypeError):
    return {}
