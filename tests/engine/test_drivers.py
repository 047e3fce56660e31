"""The fleet of a run, its virtual times, and several rounds in a dispatch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms import fedavg
from fedjax_het.engine import timelines
from fedjax_het.engine.clock import Device, plan
from fedjax_het.engine.cohort import sample_cohort
from fedjax_het.engine.drivers import clock_driver
from fedjax_het.engine.job import Job
from fedjax_het.engine.mapping import Backend
from fedjax_het.engine.types import Maybe, Uplink
from tests.engine.rounds import round_ends
from tests.engine.test_asynchronous import KEY, SPEEDS, probe
from tests.tiny import tiny_data, tiny_federation, tiny_local

SAMPLING = jax.random.key(2)


def make_job(algorithm, seconds=SPEEDS, sizes=(4, 4, 4, 4), **options) -> Job:
  """Clients 0 and 2 of one group and 1 and 3 of another.

  A visit with 8 examples to train on takes about `seconds`.
  """
  devices = tuple(
      Device(examples_per_second=8 / s, up=1e30, down=1e30, latency=0.0)
      for s in seconds
  )
  federation = tiny_federation((1, 2), norm=False, sizes=np.array(sizes))
  options = dict(cohort_size=4, num_rounds=5, devices=devices) | options
  return Job(
      algorithm, federation, tiny_data(sizes), backend=Backend('map'), key=KEY,
      sampling_key=SAMPLING, **options,
  )  # fmt: skip


def test_a_fleet_has_the_work_and_the_messages_of_each_client():
  """Messages by architecture, and an optional part by number of examples."""

  def downlink(server, group, visit):
    return jnp.zeros(len(group.model.blocks))

  def client_update(group, client, sent, data, visit):
    part = Maybe(jnp.zeros(100), jnp.ones(100, bool))
    return client, Uplink((jnp.zeros((10, *sent.shape)), part)), {}

  algorithm = probe(1)._replace(
      downlink=downlink,
      client_update=client_update,
      sent_shares=lambda group, sizes: (1.0, sizes / 10),
  )
  job = make_job(algorithm, sizes=(5, 8, 3, 7), clock_seed=9)
  fleet = timelines.make_fleet(job)
  assert fleet.devices == job.devices and fleet.seed == 9
  assert fleet.examples == [10, 16, 6, 14]  # In two epochs.
  # Models of three and of four blocks.
  assert fleet.down_bytes == [12, 16, 12, 16]
  assert fleet.up_bytes == [120 + 200, 160 + 320, 120 + 120, 160 + 280]


def test_a_fleet_counts_the_operations_of_each_client():
  """A step of stem, `depth` layers and classifier has whole batches of four.

  Each layer has three products, of which the first needs no gradient of the
  images.
  """
  seconds, sizes = SPEEDS, (5, 3, 12, 8)
  job = make_job(probe(1), seconds, sizes)
  assert timelines.make_fleet(job).flops is None
  local = dataclasses.replace(tiny_local(), batch_size=4, epochs=2)
  federation = tiny_federation(
      (1, 3), norm=False, local=local, sizes=np.array(sizes)
  )
  job = job._replace(federation=federation, algorithm=fedavg(federation))
  devices = list(job.devices)
  devices[1] = dataclasses.replace(devices[1], flops_per_second=1e3)
  fleet = timelines.make_fleet(job._replace(devices=tuple(devices)))
  steps, depths = (4, 2, 6, 4), (1, 3, 1, 3)
  assert fleet.flops == [
      number * 4 * 2 * (2 * 16 + 3 * (depth * 16 + 12))
      for number, depth in zip(steps, depths, strict=True)
  ]
  assert next(fleet.visits(1))[0] == pytest.approx(fleet.flops[1] / 1e3)
  assert next(fleet.visits(0))[0] == pytest.approx(10 / 8 * SPEEDS[0])


def test_operations_that_are_not_known_in_advance_are_refused():

  def client_update(group, client, sent, data, visit):
    end = visit.round_num
    sent = jax.lax.fori_loop(0, end, lambda _, x: x @ jnp.eye(4), sent)
    return client, Uplink(sent), {}

  algorithm = probe(1)._replace(
      downlink=lambda server, group, visit: jnp.ones(4),
      client_update=client_update,
  )
  job = make_job(algorithm)
  timelines.make_fleet(job)
  device = dataclasses.replace(job.devices[0], flops_per_second=1.0)
  with pytest.raises(ValueError, match='flops_per_second gives no time; use'):
    timelines.make_fleet(job._replace(devices=(device,) * 4))


def test_times_of_rounds_are_those_of_their_cohorts(monkeypatch):
  """Cohorts are drawn four at a time."""
  monkeypatch.setattr(timelines, '_COHORTS', 4)
  job = make_job(probe(1), cohort_size=1, num_rounds=10)
  timeline = timelines.synchronous_timeline(job)
  cohorts = np.stack([sample_cohort(SAMPLING, r, 4, 1) for r in range(10)])
  want = round_ends(timelines.make_fleet(job), cohorts)
  got = [timeline(done)['virtual_time'] for done in range(11)]
  assert got == [0.0, *want]


def test_uploads_at_the_limit_of_staleness_are_not_dropped():
  """Four equal devices upload with the staleness 0, 1, 2 and 2."""
  job = make_job(probe(1)._replace(max_staleness=1), seconds=[1.0] * 4)
  _, timeline = timelines.plan_events(job, 'async')
  assert timeline(2) == dict(
      virtual_time=2.0, staleness=1.25, lost=0, bytes_lost=0, dropped=2
  )


def test_rounds_of_a_dispatch_follow_their_own_events():
  """Three rounds in one dispatch, then two in another."""
  job = make_job(probe(20), capacity=3)
  driver = clock_driver(job, 'async')
  state = driver.init(jax.random.key(0))
  program = driver.compile(state)
  reports = []
  for done, num in ((0, 3), (3, 2)):
    state, collect = program.run(state, done, num)
    reports += collect()
  schedule = plan(timelines.make_fleet(job), 20)
  log, number = jax.device_get(state.server)
  assert number == 20 and state.round_num == 5 and len(reports) == 5
  np.testing.assert_array_equal(log[:, 0], schedule.client)
  np.testing.assert_array_equal(log[:, 1], schedule.staleness)
  np.testing.assert_array_equal(log[:, 3], schedule.visit)
  for report, want in zip(reports, schedule.client.reshape(5, 4)):
    ids = np.min([r.client_id for r in report.values()], axis=0)
    np.testing.assert_array_equal(ids, want)
