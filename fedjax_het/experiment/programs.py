"""The programs that a run calls every round, and what they need."""

from collections.abc import Callable
import logging
import time
from typing import Any, NamedTuple

import jax

from fedjax_het.engine.evaluate import make_evaluate
from fedjax_het.engine.rounds import (
  GroupReport,
  State,
  make_round,
  make_warm_up,
)
from fedjax_het.experiment.build import Experiment

_log = logging.getLogger(__name__)


class Programs(NamedTuple):
  """The compiled functions of a run.

  Attributes:
    run_round: `(state) -> (state, {group: report})`; donates the state.
    evaluate: `(state) -> {group: scores}`.
    warm_up: As `run_round`, what comes before the first round; None for
      nothing.
    memory: Bytes that XLA planned for a round; {} where it does not say.
  """

  run_round: Callable[..., tuple[State, dict[str, GroupReport]]]
  evaluate: Callable[[State], Any]
  warm_up: Callable[..., tuple[State, dict[str, GroupReport]]] | None
  memory: dict[str, int]


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


def compile_programs(experiment: Experiment, state: State) -> Programs:
  """Builds the round and evaluation programs, and compiles the former.

  Args:
    experiment: The experiment.
    state: A state of the shapes to expect; it is not used up.

  Returns:
    The programs.
  """
  config = experiment.config
  run_round = make_round(
      experiment.algorithm,
      experiment.federation,
      cohort_size=experiment.cohort_size,
      backend=config.backend,
      chunk=config.chunk,
  )
  evaluate = make_evaluate(
      experiment.algorithm,
      experiment.federation,
      experiment.dataset.test_images,
      experiment.dataset.test_labels,
      experiment.preprocess,
      batch_size=min(
          config.eval_batch_size, len(experiment.dataset.test_labels)
      ),
      clients_per_group=config.eval_clients_per_group,
      data=(
          None if experiment.algorithm.calibrate is None else experiment.data
      ),
  )
  _, key, sampling_key = run_keys(config)
  memory = {}
  # The backends of several devices change where the state lies in the first
  # round, which a program compiled ahead of time would refuse.
  if hasattr(run_round, 'lower') and config.backend != 'shard_map':
    _log.info('Compiling the round program ...')
    begin = time.perf_counter()
    run_round = run_round.lower(
        state, experiment.data, key, sampling_key
    ).compile()
    seconds = time.perf_counter() - begin
    _log.info('Compiled in %.1f s.', seconds)
    memory = _program_memory(run_round)

  def one_round(state):
    return run_round(state, experiment.data, key, sampling_key)

  warm_up = None
  if experiment.algorithm.warm_up is not None:
    program = make_warm_up(
        experiment.algorithm,
        experiment.federation,
        backend=config.backend,
        chunk=config.chunk,
    )

    def warm_up(state):
      return program(state, experiment.data, key)

  return Programs(one_round, evaluate, warm_up, memory)


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
