"""The virtual clock: schedules worked out by hand, and their invariances."""

import dataclasses
import itertools
import types

import jax
import numpy as np
import pytest

from fedjax_het.engine import timelines
from fedjax_het.engine.clock import (
  Device,
  Fleet,
  Schedule,
  check_return,
  plan,
  stream,
)
from fedjax_het.engine.cohort import sample_cohort
from tests.engine.rounds import round_ends


def device(seconds, **options):
  """A device that takes `seconds` for a visit of one example."""
  options = dict(latency=0.0, up=1e30, down=1e30) | options
  return Device(examples_per_second=1 / seconds, **options)


def fleet(*devices, seed=0):
  nothing = [0] * len(devices)
  return Fleet(devices, [1] * len(devices), nothing, nothing, seed)


SHAKY = dict(jitter=0.5, pause=0.7, drop_out=0.3)


def test_two_speeds_by_hand():
  # Client 0 takes 2 s, client 1 takes 5 s; uploads at 2, 4, 5, 6, 8, 10, 10.
  got = plan(fleet(device(2), device(5)), 7)
  assert got.client.tolist() == [0, 0, 1, 0, 0, 0, 1]
  assert got.time.tolist() == [2, 4, 5, 6, 8, 10, 10]
  assert got.visit.tolist() == [0, 1, 0, 2, 3, 4, 1]
  assert got.version.tolist() == [0, 1, 0, 2, 4, 5, 3]
  assert got.staleness.tolist() == [0, 0, 2, 1, 0, 0, 3]
  # At 10 s both upload before anyone downloads.
  assert got.down_client.tolist() == [0, 1, 0, 0, 1, 0, 0]
  assert got.down_visit.tolist() == [0, 0, 1, 2, 1, 3, 4]
  assert got.down_version.tolist() == [0, 0, 1, 2, 3, 4, 5]


def test_uploads_that_are_dropped_make_nobody_staler():
  got = plan(fleet(device(2), device(5)), 7, max_staleness=1)
  free = plan(fleet(device(2), device(5)), 7)
  # Client 1 is dropped at 5 s, so that client 0 is not stale at 6 s.
  assert got.staleness.tolist() == [0, 0, 2, 0, 0, 0, 3]
  assert free.staleness.tolist() == [0, 0, 2, 1, 0, 0, 3]
  # All other fields are the same.
  for a, b in zip(got[:-1], free[:-1], strict=True):
    np.testing.assert_array_equal(a, b)
  # Of three equal devices the second is at the limit, and counts.
  equal = plan(fleet(*[device(1)] * 3), 6, max_staleness=1)
  assert equal.staleness.tolist() == [0, 1, 2] * 2
  tighter = plan(fleet(*[device(1)] * 3), 6, max_staleness=0)
  assert tighter.staleness.tolist() == [0, 1, 1] * 2


def test_a_visit_takes_what_its_parts_take():
  one = Device(
      examples_per_second=10.0, up=100.0, down=400.0, latency=0.25
  )
  got = plan(Fleet([one], [20], [800], [300]), 2)
  # Down 0.25 + 2, training 2, up 0.25 + 3.
  assert got.time.tolist() == [7.5, 15.0]


def test_a_device_with_a_speed_in_operations_does_not_count_examples():
  by_flops = Device(
      examples_per_second=10.0, flops_per_second=8.0, up=1.0, latency=0.0
  )
  by_examples = dataclasses.replace(by_flops, flops_per_second=None)
  both = Fleet([by_flops, by_examples], [20, 30], [0] * 2, [0, 0], 0, [4, 99])
  for client, seconds in enumerate((0.5, 3.0)):
    assert next(both.visits(client))[0] == seconds
  with pytest.raises(ValueError, match='flops must be a row of integers'):
    dataclasses.replace(both, flops=None)
  with pytest.raises(ValueError, match='flops must be 2 integers, one for'):
    dataclasses.replace(both, flops=[4])
  with pytest.raises(ValueError, match='of 0 operations, would take 0'):
    next(dataclasses.replace(both, flops=[0, 1]).visits(0))


def test_at_one_time_uploads_come_first_each_by_client_id():
  got = plan(fleet(*[device(1)] * 3), 6)
  assert got.client.tolist() == [0, 1, 2, 0, 1, 2]
  # As in synchronous rounds, all download after all have uploaded.
  assert got.version.tolist() == [0, 0, 0, 3, 3, 3]
  assert got.staleness.tolist() == [0, 1, 2, 0, 1, 2]
  assert got.visit.tolist() == [0, 0, 0, 1, 1, 1]
  assert got.time.tolist() == [1, 1, 1, 2, 2, 2]


def assert_prefix(short: Schedule, long: Schedule):
  for a, b in zip(short, long, strict=True):
    np.testing.assert_array_equal(a, b[: len(a)])


@pytest.mark.parametrize('mode', ['async', 'sequential'])
def test_deterministic_and_extendable(mode):
  many = fleet(*(device(s, **SHAKY) for s in (1, 2, 3)), seed=5)
  short, long = plan(many, 10, mode), plan(many, 40, mode)
  assert_prefix(short, long)
  assert_prefix(plan(many, 40, mode), long)
  assert len(long.client) == 40 and len(long.lost_client) > 0
  other = plan(dataclasses.replace(many, seed=6), 40, mode)
  assert not np.array_equal(other.time, long.time)
  assert np.all(np.diff(long.time) >= 0)


def test_times_of_visits_are_drawn_as_described():
  """Training is log-normal, messages are constant, pauses exponential."""
  shaky = device(2, jitter=0.5, pause=3.0, latency=2.5, drop_out=0.25)
  visits = fleet(shaky, shaky).visits(0)
  drawn = itertools.islice(visits, 4000)
  seconds, lost, pauses = map(np.array, zip(*drawn, strict=True))
  assert np.all(seconds > 5.0)
  factors = np.log((seconds - 5.0) / 2.0)
  assert abs(np.median(factors)) < 0.05 and abs(np.std(factors) - 0.5) < 0.03
  assert abs(np.mean(lost) - 0.25) < 0.03
  # An exponential distribution has its median at log 2 of its mean.
  assert abs(np.mean(pauses) - 3.0) < 0.2
  assert abs(np.median(pauses) - 3.0 * np.log(2)) < 0.2
  # None of the three draws says anything about another.
  draws = np.corrcoef([factors, lost, pauses])
  assert np.max(np.abs(draws - np.eye(3))) < 0.05


def test_streams_belong_to_clients():
  """A client's draws do not depend on the other clients."""
  shaky = device(1, **SHAKY)
  alone, pair = plan(fleet(shaky), 5), plan(fleet(shaky, device(3)), 20)
  np.testing.assert_array_equal(pair.time[pair.client == 0][:5], alone.time)
  # Equal devices have different ones.
  first, second = (next(fleet(shaky, shaky).visits(k)) for k in (0, 1))
  assert first[0] != second[0] and first[2] != second[2]
  # An option of a device does not shift the draws for other options.
  steady = dataclasses.replace(shaky, jitter=0.0)
  np.testing.assert_array_equal(
      plan(fleet(steady), 9).visit, plan(fleet(shaky), 9).visit
  )


def test_lost_visits_never_arrive():
  got = plan(fleet(device(1, drop_out=0.5), device(1)), 60)
  lost = np.flatnonzero(got.lost_client == 0)
  assert len(lost) == len(got.lost_client) > 5
  # They count as visits, and are not trained.
  visits = got.visit[got.client == 0]
  assert visits[-1] + 1 == len(visits) + np.sum(
      got.lost_version[lost] <= np.flatnonzero(got.client == 0)[-1]
  )
  downloaded = got.down_visit[got.down_client == 0]
  assert set(visits) <= set(downloaded) and len(downloaded) <= len(visits) + 1
  never = plan(fleet(device(1, drop_out=1.0), device(2)), 3)
  assert never.client.tolist() == [1, 1, 1]
  assert never.time.tolist() == [2, 4, 6]
  assert set(never.lost_client) == {0} and 0 not in never.down_client


def test_a_pause_delays_the_next_download():
  plain, pausing = device(1), device(1, pause=2.0)
  got = plan(fleet(pausing), 400).time
  waits = np.diff(got) - plan(fleet(plain), 1).time[0]
  assert np.all(waits >= 0) and abs(np.mean(waits) - 2.0) < 0.3


def test_sequential_is_never_stale_and_takes_turns_at_random():
  three = fleet(device(1), device(2), device(3, pause=5.0))
  got = plan(three, 300, 'sequential')
  assert not np.any(got.staleness)
  steps = np.diff(got.time, prepend=0.0)
  np.testing.assert_allclose(steps, 1.0 + got.client, rtol=1e-9)
  assert np.all(np.bincount(got.client) > 70)
  np.testing.assert_array_equal(got.down_client, got.client)


def test_a_lost_visit_takes_its_time_in_sequence_too():
  got = plan(fleet(device(1, drop_out=0.5)), 20, 'sequential')
  before = np.searchsorted(got.lost_version, np.arange(20), side='right')
  assert before[-1] > 5
  np.testing.assert_array_equal(got.time, 1.0 + np.arange(20) + before)


def test_synchronous_rounds_wait_for_the_slowest():
  three = fleet(device(1), device(2), device(7))
  times = round_ends(three, np.array([[0, 1], [0, 2], [1, 2]]))
  assert times.tolist() == [2.0, 9.0, 16.0]
  # A lost visit is repeated, so the same draws give the times of `plan`.
  shaky = fleet(device(1, **SHAKY), seed=3)
  np.testing.assert_allclose(
      round_ends(shaky, np.zeros((8, 1), int)), plan(shaky, 8).time
  )


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        (dict(up=0.0), 'up of a device must be above 0, got 0.0.'),
        (dict(down=-1.0), 'down of a device must be above 0, got -1.0.'),
        (
            dict(examples_per_second=0),
            'examples_per_second of a device must be above 0, got 0.',
        ),
        (
            dict(flops_per_second=0.0),
            'flops_per_second of a device must be above 0, got 0.0.',
        ),
        (
            dict(drop_out=1.5),
            'drop_out of a device must be at least 0 and at most 1, got 1.5.',
        ),
        (
            dict(jitter=float('nan')),
            'jitter of a device must be a finite number, got nan.',
        ),
    ],
)
def test_wrong_devices_are_refused(options, expected):
  with pytest.raises(ValueError) as error:
    Device(**options)
  assert str(error.value) == expected


def test_a_wrong_fleet_and_a_wrong_plan_are_refused():
  two = fleet(device(1), device(2))
  wrong = [('devices', (), 'must hold at'), ('devices', (1,), 'must be a Dev')]
  for name in ('examples', 'down_bytes', 'up_bytes'):
    wrong += [
        (name, [1, value], 'must be integers of at least 0, got ')
        for value in (float('nan'), float('inf'), -1, 0.5)
    ]
    wrong += [(name, [1], 'must be 2 integers, one for each device, got 1')]
  wrong += [('seed', 0.5, 'must be an integer'), ('seed', -1, 'must be at l')]
  for name, value, words in wrong:
    with pytest.raises(ValueError, match=f'^{name} {words}'):
      dataclasses.replace(two, **{name: value})
  for value in (0.5, float('nan'), float('inf'), -1):
    with pytest.raises(ValueError, match=r'^num_uploads must be '):
      plan(two, value)
    with pytest.raises(ValueError, match=r'^max_staleness must be '):
      stream(two, max_staleness=value)


def test_a_client_that_never_returns_may_stay_out_of_all_rounds(monkeypatch):
  key = jax.random.key(0)
  rounds = [int(sample_cohort(key, r, 2, 1)[0]) for r in range(40)]
  lost = 1 - rounds[0]
  returns = rounds.index(lost)  # The rounds before draw the other one alone.
  devices = [device(1), device(1)]
  devices[lost] = device(1, drop_out=1.0)
  gone = fleet(*devices)
  monkeypatch.setattr(timelines, 'make_fleet', lambda job: gone)
  job = types.SimpleNamespace(
      devices=gone.devices, federation=types.SimpleNamespace(num_clients=2),
      cohort_size=1, sampling_key=key, num_rounds=returns, capacity=1,
  )  # fmt: skip
  timeline = timelines.synchronous_timeline(job)
  assert timeline(returns) == dict(
      virtual_time=float(returns), lost=0, bytes_lost=0
  )
  job.num_rounds += 1
  with pytest.raises(ValueError, match=f'Client {lost} never returns'):
    timelines.synchronous_timeline(job)


def test_what_can_never_run_is_refused():
  gone = device(1, drop_out=1.0)
  with pytest.raises(ValueError, match='No upload would ever arrive: drop_out'):
    plan(fleet(gone, gone), 1)
  with pytest.raises(ValueError, match='Client 1 never returns'):
    check_return(fleet(device(1), gone), np.array([[0], [1]]))
  with pytest.raises(ValueError, match="Unknown mode 'asnyc'; did you mean"):
    plan(fleet(device(1)), 1, 'asnyc')
  with pytest.raises(ValueError, match='client 0, of 0 examples, would take 0'):
    plan(Fleet([Device(latency=0.0)], [0], [0], [0]), 1)
