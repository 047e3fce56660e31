"""An estimate of how long a run's local training takes on this machine."""

import dataclasses
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.engine.local import fit_model, visit_steps
from fedjax_het.engine.mapping import resolve_backend
from fedjax_het.engine.types import Group, Visit
from fedjax_het.experiment.build import Experiment
from fedjax_het.models.blocks import BlockModel
from fedjax_het.models.flops import forward_flops

# A measurement has `_FEW` local steps, or `_MANY` if `_FEW` take at most
# `_ENOUGH` seconds. The fastest of `_TRIALS` counts.
_FEW, _MANY, _ENOUGH, _TRIALS = 2, 50, 0.1, 3


class Duration(NamedTuple):
  """An estimate of the time of local training.

  Attributes:
    round_seconds: Seconds of plain local training in a round, mean over
      cohorts.
    group: The group whose step was timed.
    step_seconds: Seconds of one of its local steps.
  """

  round_seconds: float
  group: str
  step_seconds: float


def estimate(
    experiment: Experiment, backend: str | None = None
) -> Duration | None:
  """Times a local step of one group, and scales it by FLOPs for the others.

  The group with the most FLOPs in total is timed: a compiled step of plain
  local training of what its clients train, with the run's batch size and
  optimiser. If they train several models, the one with the most is timed.

  Args:
    experiment: The experiment.
    backend: How clients are mapped; None for the config's `backend`.

  Returns:
    The estimate, for one device; None for backends that may batch clients,
    because a single client's step does not predict their time.
  """
  asked = backend or experiment.config.backend
  if resolve_backend(asked) not in ('map', 'loop'):
    return None
  federation = experiment.federation
  steps = visit_steps(federation.local, federation.sizes)
  models = [
      (group, model)
      for group in federation.groups
      for model in experiment.algorithm.trained_models(group)
  ]
  # Forward FLOPs of an example, times the steps of all its clients.
  work = [
      forward_flops(model) * float(steps[group.client_ids].sum())
      for group, model in models
  ]
  timed, model = models[work.index(max(work))]
  seconds = _step_seconds(experiment, timed, model)
  rate = forward_flops(model) / seconds
  share = experiment.cohort_size / federation.num_clients
  return Duration(share * sum(work) / rate, timed.name, seconds)


def _step_seconds(
    experiment: Experiment, group: Group, model: BlockModel
) -> float:
  """Seconds of one compiled local step of a model on a client of a group."""
  seconds = _visit_seconds(experiment, group, model, _FEW)
  if seconds > _ENOUGH:
    return seconds / _FEW
  return _visit_seconds(experiment, group, model, _MANY) / _MANY


def _visit_seconds(
    experiment: Experiment, group: Group, model: BlockModel, steps: int
) -> float:
  """Seconds of a visit of `steps` local steps, without compilation."""
  local = dataclasses.replace(experiment.federation.local, steps=steps)
  client_id = jnp.int32(group.client_ids[0])

  @jax.jit
  def train(variables, data, key):
    visit = Visit(client_id, jnp.int32(0), key)
    return fit_model(
        model, local, variables, data.client(client_id), visit
    )[0]

  key = jax.random.key(0)
  args = model.init(key), experiment.data, key
  jax.block_until_ready(train(*args))
  times = []
  for _ in range(_TRIALS):
    begin = time.perf_counter()
    jax.block_until_ready(train(*args))
    times.append(time.perf_counter() - begin)
  return min(times)
