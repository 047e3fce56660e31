"""Metrics of a training server, also when they are NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine import asynchronous, rounds, streaming
from fedjax_het.engine.clock import Device, Fleet, plan
from fedjax_het.engine.events import round_events
from fedjax_het.engine.visits import server_turn
from tests.tiny import tiny_data, tiny_federation

KEYS = (jax.random.key(1), jax.random.key(2))
FEDERATION = tiny_federation((1, 2), norm=False)  # Four clients.
DATA = tiny_data((6, 6, 6, 6))


def counting(broken=-1, measure=True):
  """A server that counts its updates; number `broken`, from 0, is NaN."""
  start = dict(count=jnp.float32(0), updates=0, key=jax.random.key(5))

  def server_update(server, received, turn):
    del received, turn
    number = server['updates'] + 1
    bad = number == broken + 1
    count = jnp.where(bad, jnp.nan, server['count'] + 1)
    # A metric of every second update only.
    odd = jnp.where(number % 2, server['count'], jnp.nan)
    metrics = dict(before=server['count'], odd=odd) if measure else {}
    return dict(server, count=count, updates=number), metrics

  algorithm = ALGORITHMS['private'](FEDERATION)
  return algorithm._replace(
      init=lambda key: jax.tree.map(jnp.asarray, start),
      server_update=server_update,
  )


def run(algorithm, num_rounds=2, make=rounds.make_round, init=None):
  init = rounds.init_state if init is None else init
  run_round = make(algorithm, FEDERATION, cohort_size=3, backend='map')
  state, reports = init(algorithm, FEDERATION, jax.random.key(0)), []
  for _ in range(num_rounds):
    state, report = run_round(state, DATA, *KEYS)
    reports.append(jax.device_get(report))
  return state, reports


def test_a_report_is_a_mapping_of_groups():
  _, (report,) = run(counting(), 1)
  names = {group.name for group in FEDERATION.groups}
  assert set(report) == set(dict(report)) == names and len(report) == 2
  assert report['tiny1'] is report.groups['tiny1']
  same = jax.tree.map(lambda leaf: leaf, report)
  assert type(same) is type(report) and same.server == report.server
  with pytest.raises(KeyError):
    report['server']


@pytest.mark.parametrize('make,init', [
    (rounds.make_round, rounds.init_state),
    (streaming.make_streamed_round, streaming.init_streamed_state),
])
def test_rounds_report_the_servers_metrics(make, init):
  state, reports = run(counting(), 3, make, init)
  assert [r.server['before'] for r in reports] == [0, 1, 2]
  assert all(r.server['before'].dtype == np.float32 for r in reports)
  assert all(r.server_finite for r in reports)
  assert state.server['count'] == 3


def test_an_update_that_is_not_finite_leaves_the_server_as_it_was():
  state, reports = run(counting(broken=1), 2)
  assert [bool(r.server_finite) for r in reports] == [True, False]
  # The whole state is kept, not only its floats: the same turn comes again.
  assert state.server['count'] == 1 and state.server['updates'] == 1
  assert state.server['key'] == jax.random.key(5)


def test_several_rounds_of_a_dispatch_report_each():
  algorithm = counting()
  run_round = rounds.make_round(
      algorithm, FEDERATION, cohort_size=3, backend='map'
  )
  run_rounds = rounds.make_rounds(run_round, 3)
  who = jnp.broadcast_to(KEYS[1], (3,))
  state = rounds.init_state(algorithm, FEDERATION, jax.random.key(0))
  _, reports = run_rounds(state, DATA, KEYS[0], who, 2)
  np.testing.assert_array_equal(reports.server['before'], [0, 1, 0])
  np.testing.assert_array_equal(reports.server_finite, [True, True, False])


@pytest.mark.parametrize(
    'broken,before,odd,count',
    [
        # Updates 0 to 3; the mean of 0, 1, 2, 3 and of 0, 2.
        (-1, 1.5, 1.0, 4),
        # Updates 0, 1; then number 2, which fails, twice.
        (2, np.mean([0, 1, 2, 2]), np.mean([0, 2, 2]), 2),
    ],
)
def test_an_asynchronous_round_reports_means_over_its_updates(
    broken, before, odd, count
):
  algorithm = counting(broken)
  fleet = Fleet([Device()] * 4, [6] * 4, [0] * 4, [0] * 4)
  (events,) = round_events(plan(fleet, 4), FEDERATION, 4)
  state = rounds.init_state(algorithm, FEDERATION, jax.random.key(0))
  state = asynchronous.init_async_state(algorithm, FEDERATION, state, DATA)
  run_round = asynchronous.make_async_round(
      algorithm, FEDERATION, cohort_size=4, backend='map'
  )
  state, report = run_round(state, DATA, KEYS[0], events)
  np.testing.assert_allclose(report.server['before'], before, rtol=1e-6)
  np.testing.assert_allclose(report.server['odd'], odd, rtol=1e-6)
  assert bool(report.server_finite) == (broken < 0)
  assert state.server['count'] == count


@pytest.mark.parametrize('measure', [True, False])
def test_only_a_server_that_trains_is_checked(measure):
  algorithm = counting(measure=measure)

  def turn(server):
    return server_turn(
        algorithm, server, {}, DATA, KEYS[0],
        round_num=0, update=0, num_clients=4,
    )  # fmt: skip

  server = algorithm.init(KEYS[0])
  _, metrics, finite = turn(server)
  assert (finite is None) == (not metrics) == (not measure)
  assert ('is_finite' in str(jax.make_jaxpr(turn)(server))) == measure


@pytest.mark.parametrize('result', [
    lambda server: server,
    lambda server: (server, server['count']),
    lambda server: (server, {}, {}),
])
def test_a_server_that_returns_no_metrics_is_told_what_to_return(result):
  algorithm = counting()._replace(
      server_update=lambda server, received, turn: result(server)
  )
  with pytest.raises(TypeError, match=r'must return \(server, metrics\), with'):
    run(algorithm, 1)
