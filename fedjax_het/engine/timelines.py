"""Virtual times of rounds, and the events that asynchronous rounds follow."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.engine.client_flops import visit_flops
from fedjax_het.engine.clock import (
    Fleet,
    Window,
    check_return,
    stream,
    synchronous_rounds,
)
from fedjax_het.engine.cohort import sample_cohort
from fedjax_het.engine.events import lay_out, plan_rounds
from fedjax_het.engine.job import Job
from fedjax_het.engine.local import visit_examples
from fedjax_het.engine.tiers import tier_stream
from fedjax_het.engine.visits import expected_bytes

# For the end times of synchronous rounds: cohorts drawn at once, and rounds
# whose clients are checked before the first round.
_COHORTS, _FIRST_ROUNDS = 256, 8192


def make_fleet(job: Job) -> Fleet:
  """The fleet, which determines the clients' virtual durations.

  Args:
    job: The run, with devices.

  Returns:
    The fleet.

  Raises:
    ValueError: If a device has `flops_per_second`, but the operations of a
      visit are not known, see `client_flops.visit_flops`.
  """
  federation = job.federation
  sent = np.zeros((federation.num_clients, 2), np.int64)
  for group in federation.groups:
    sent[group.client_ids] = expected_bytes(
        job.algorithm, group, job.data, federation.sizes[group.client_ids]
    )
  return Fleet(
      job.devices,
      [visit_examples(federation.local, int(n)) for n in federation.sizes],
      *sent.T.tolist(),
      job.clock_seed,
      _flops(job),
  )


def _flops(job: Job) -> list[int] | None:
  """Operations of each client's visit; None if no device needs them."""
  if all(device.flops_per_second is None for device in job.devices):
    return None
  counted = np.zeros(job.federation.num_clients, np.int64)
  for group in job.federation.groups:
    try:
      counted[group.client_ids] = visit_flops(job.algorithm, group, job.data)
    except ValueError as e:
      raise ValueError(
          'devices: the operations of a visit are not known in advance, so '
          'flops_per_second gives no time; use examples_per_second.'
      ) from e
  return counted.tolist()


def _window(job: Job, begin) -> Window:
  """Keeps the rounds of two dispatches, one of which is not yet reported."""
  return Window(begin, 2 * (job.capacity or 1) + 2)


def timeline_of(job: Job, mode: str):
  """Virtual times of rounds under any clock, without a program.

  Args:
    job: The run.
    mode: 'synchronous', or one of `tiers.UPLOAD_MODES`.

  Returns:
    See `drivers.Program.timeline`.

  Raises:
    ValueError: As `synchronous_timeline` and `plan_events`.
  """
  if mode == 'synchronous':
    return synchronous_timeline(job)
  return plan_events(job, mode)[1]


def synchronous_timeline(job: Job):
  """Virtual times of synchronous rounds.

  Args:
    job: The run; without devices there are no times.

  Returns:
    See `drivers.Program.timeline`.

  Raises:
    ValueError: If a client of the first rounds can never return.
  """
  if job.devices is None:
    return lambda done: {}
  num_clients = job.federation.num_clients

  @jax.jit
  def cohorts(rounds):
    return jax.lax.map(
        lambda r: sample_cohort(
            job.sampling_key, r, num_clients, job.cohort_size
        ),
        rounds,
    )

  def chunks():
    for first in range(0, job.num_rounds, _COHORTS):
      of_chunk = np.asarray(cohorts(first + jnp.arange(_COHORTS)))
      yield of_chunk[: job.num_rounds - first]

  fleet = make_fleet(job)
  if any(device.drop_out == 1 for device in fleet.devices):
    for some in itertools.islice(chunks(), _FIRST_ROUNDS // _COHORTS):
      check_return(fleet, some)
  rounds = _window(
      job,
      lambda: synchronous_rounds(
          fleet, itertools.chain.from_iterable(chunks())
      ),
  )

  def timeline(done):
    if not done:
      return {'virtual_time': 0.0}
    end, lost = rounds[done - 1]
    return {'virtual_time': end, **_lost(fleet, lost)}

  return timeline


def _lost(fleet: Fleet, clients: list[int]) -> dict[str, int]:
  """Entries of a round in which visits of these clients were lost."""
  messages = np.add(fleet.down_bytes, fleet.up_bytes)
  return {
      'lost': len(clients),
      'bytes_lost': int(messages[np.array(clients, int)].sum()),
  }


def plan_events(job: Job, mode: str):
  """Events and virtual times of asynchronous rounds.

  Args:
    job: The run, with devices.
    mode: One of `tiers.UPLOAD_MODES`.

  Returns:
    `(rounds done) -> Events` of the next round, and the timeline (see
    `drivers.Program.timeline`).

  Raises:
    ValueError: If the devices can never finish a round, or a tier is smaller
      than a cohort.
  """
  fleet, limit = make_fleet(job), job.algorithm.max_staleness
  tiers = [group.client_ids.tolist() for group in job.federation.groups]

  def events():
    if mode == 'tiers':
      return tier_stream(fleet, tiers, job.cohort_size, limit)
    return stream(fleet, mode, limit)

  rounds = _window(job, lambda: plan_rounds(events(), job.cohort_size))

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
        **_lost(fleet, plan.lost),
        **dropped,
    }

  return lambda done: lay_out(rounds[done], job.federation), timeline
