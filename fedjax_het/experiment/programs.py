"""Makes the driver and the programs of a run from its config."""

from collections.abc import Callable
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import FederatedData, federate
from fedjax_het.engine import placement
from fedjax_het.engine.driver_kinds import driver_kind
from fedjax_het.engine.drivers import Collect, Driver
from fedjax_het.engine.evaluate import Scores, make_evaluate
from fedjax_het.engine.job import Job
from fedjax_het.engine.mapping import Backend
from fedjax_het.engine.reports import RoundReport
from fedjax_het.engine.traffic import full_bytes
from fedjax_het.experiment import footprint
from fedjax_het.experiment.build import Experiment
from fedjax_het.experiment.processes import several

_log = logging.getLogger(__name__)

# Maximum rounds per dispatch; enough to hide the host's overhead.
_MOST_ROUNDS = 1000
# Warn if clients' states of more bytes than this are replicated on every device
# of a mesh.
_LARGE = 1 << 28


class Programs(NamedTuple):
  """The functions that a run calls.

  Attributes:
    run_rounds: See `drivers.Program.run`.
    evaluate: `(state) -> {group: scores}` on the test set.
    validate: The same on the examples that clients have held out; None if
      there are none.
    warm_up: See `drivers.Driver.warm_up`.
    memory: See `drivers.Program.memory`; raises ValueError if a round does not
      fit into memory.
    timeline: See `drivers.Program.timeline`.
    compile_seconds: See `drivers.Program.seconds`.
  """

  run_rounds: Callable[..., tuple[Any, Collect]]
  evaluate: Callable[[Any], Any]
  validate: Callable[[Any], Any] | None
  warm_up: Callable[..., tuple[Any, RoundReport]] | None
  memory: Callable[[], dict[str, int]]
  timeline: Callable[[int], dict[str, float]]
  compile_seconds: Callable[[], float | None]


def run_keys(config) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The keys of a run.

  Args:
    config: Its config.

  Returns:
    The keys of initial values, of training, and of sampling.
  """
  init_key, train_key = jax.random.split(jax.random.key(config.seed))
  # Folded, so that equal seeds give sampling a different key.
  sampling_key = jax.random.fold_in(jax.random.key(config.sampling_seed), 2)
  return init_key, train_key, sampling_key


def make_driver(experiment: Experiment) -> Driver:
  """Makes the driver of a run; nothing is computed or compiled yet.

  Args:
    experiment: The experiment.

  Returns:
    The driver.

  Raises:
    ValueError: If it does not support the method or several processes.
  """
  config = experiment.config
  kind = driver_kind(config.clock.mode, config.client_store)
  if kind.states_on_device:
    _warn_of_copies(experiment)
  elif several():
    raise ValueError(
        "client_store='host' is for one process; several of them share the "
        "clients' states among their devices (client_store='device')."
    )
  return kind.make(make_job(experiment))


def make_job(experiment: Experiment) -> Job:
  """What the driver of a run runs."""
  config = experiment.config
  _, key, sampling_key = run_keys(config)
  return Job(
      experiment.algorithm,
      experiment.federation,
      experiment.data,
      experiment.cohort_size,
      _backend(experiment),
      key,
      sampling_key,
      config.num_rounds,
      dispatch_size(config) if config.rounds_per_dispatch > 1 else None,
      experiment.devices,
      config.clock.seed,
  )


def _backend(experiment: Experiment) -> Backend:
  config = experiment.config
  return Backend.of(Backend(config.backend, config.chunk, experiment.mesh))


def _warn_of_copies(experiment: Experiment) -> None:
  """Warns if large client states are replicated on each device of a mesh."""
  if experiment.mesh is None:
    return
  init_client = experiment.algorithm.init_client
  for group in experiment.federation.groups:
    one = jax.eval_shape(
        lambda key, group=group: init_client(group, jnp.int32(0), key),
        jax.random.key(0),
    )
    size = group.num_clients * full_bytes(one)
    cut = placement.is_cut(group.num_clients, experiment.mesh)
    if not cut and size > _LARGE:
      _log.warning(
          'The %d clients of group %s do not divide by %d devices, so their '
          'states, %.0f MB, are copied to each of them.',
          group.num_clients, group.name, experiment.mesh.devices.size,
          size / 1e6,
      )  # fmt: skip


def dispatch_size(config) -> int:
  """The most rounds that one dispatch of a run can have."""
  return min(
      config.rounds_per_dispatch,
      config.eval_every,
      config.checkpoint_every,
      config.num_rounds,
      _MOST_ROUNDS,
  )


def rounds_to_run(config, done: int) -> int:
  """Rounds of the next dispatch, up to an evaluation or a checkpoint."""
  ends = [config.num_rounds]
  for every in (config.eval_every, config.checkpoint_every):
    ends.append(done + every - done % every)
  return min(dispatch_size(config), min(ends) - done)


def compile_programs(
    experiment: Experiment, driver: Driver, state: Any
) -> Programs:
  """Starts to compile the rounds in a thread, and builds the evaluations.

  Meanwhile the state may be evaluated or warmed up, which compiles those
  programs.

  Args:
    experiment: The experiment.
    driver: Its driver.
    state: A state of the driver; it is not donated.

  Returns:
    The programs.

  Raises:
    ValueError: If the devices can never finish a round.
  """
  rounds = driver.compile(state)

  def memory():
    if planned := rounds.memory():
      more = planned['temporary'] + planned['outputs'] - planned['reused']
      if experiment.mesh is not None:  # The plan is that of one device.
        more *= len(experiment.mesh.local_devices)
      footprint.refuse_if_too_large(
          {'groups, chunk and local.batch_size': more},
          'a round needs, by its compiled program,',
      )
    return planned

  dataset, held_out = experiment.dataset, experiment.validation
  validate = None
  if held_out is not None:
    validate = _evaluate_on(
        experiment,
        dataset.train_images[held_out],
        dataset.train_labels[held_out],
    )
  return Programs(
      rounds.run,
      make_test(experiment),
      validate,
      driver.warm_up,
      memory,
      rounds.timeline,
      rounds.seconds,
  )


def make_test(experiment: Experiment) -> Callable[[Any], dict[str, Scores]]:
  """Builds the evaluation on the test set, and on clients' own test examples.

  Args:
    experiment: The experiment.

  Returns:
    `test(state) -> {group: Scores}`, for states on the experiment's devices.
  """
  dataset = experiment.dataset
  return _evaluate_on(
      experiment,
      dataset.test_images,
      dataset.test_labels,
      _own_tests(experiment),
  )


def _own_tests(experiment: Experiment) -> FederatedData | None:
  """The test examples of each client; None without `personal_test`."""
  if experiment.own_tests is None:
    return None
  dataset = experiment.dataset
  return federate(
      dataset.test_images,
      dataset.test_labels,
      experiment.own_tests,
      experiment.preprocess,
      num_classes=dataset.num_classes,
      allow_empty=True,
  )


def _evaluate_on(experiment: Experiment, images, labels, own_tests=None):
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
      backend=_backend(experiment),
      own_tests=own_tests,
  )
