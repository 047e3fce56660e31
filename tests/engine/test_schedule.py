"""A schedule planned round by round equals the one planned as a whole."""

import dataclasses
import itertools
import tracemalloc

import jax
import numpy as np
import pytest

from fedjax_het.engine import events as events_lib
from fedjax_het.engine.clock import (
  Device,
  Fleet,
  Window,
  plan,
  stream,
  synchronous_rounds,
)
from tests.engine.rounds import round_ends
from tests.tiny import tiny_federation

SHAKY = dict(jitter=0.5, pause=0.7, drop_out=0.3)


def fleet(*seconds, seed=0, **options):
  options = dict(latency=0.0, up=1e30, down=1e30) | options
  devices = [Device(examples_per_second=1 / s, **options) for s in seconds]
  nothing = [0] * len(devices)
  return Fleet(devices, [1] * len(devices), nothing, nothing, seed)


def at_once(schedule, federation, cohort_size):
  """The rounds of a whole schedule, found by the versions of downloads."""
  group_of, row_of = federation.places()
  rounds, waiting, begin = [], {}, 0
  for round_num in range(len(schedule.client) // cohort_size):
    wave = np.zeros(cohort_size, np.int32)
    downloads = [[[] for _ in wave] for _ in federation.groups]
    training = [[[] for _ in wave] for _ in federation.groups]
    first = round_num * cohort_size
    senders = schedule.client[first : first + cohort_size]
    for i, sender in enumerate(senders):
      end = np.searchsorted(schedule.down_version, first + i, side='right')
      for client, visit in zip(
          schedule.down_client[begin:end],
          schedule.down_visit[begin:end],
          strict=True,
      ):
        turn = (row_of[client], visit)
        downloads[group_of[client]][i].append(turn)
        waiting[int(client)] = turn
      begin = end
      if int(sender) in waiting:
        wave[i] = 1
        for client, turn in waiting.items():
          training[group_of[client]][i].append(turn)
        waiting = {}

    def turns(lists):
      result = {}
      for group, per_upload in zip(federation.groups, lists, strict=True):
        flat = np.zeros((cohort_size + 2 * group.num_clients, 2), np.int32)
        every = [turn for turns in per_upload for turn in turns]
        if every:
          flat[: len(every)] = every
        ends = np.cumsum([len(turns) for turns in per_upload])
        bounds = np.concatenate([[0], ends]).astype(np.int32)
        result[group.name] = events_lib.Turns(flat[:, 0], flat[:, 1], bounds)
      return result

    rounds.append(
        events_lib.Events(
            np.array(senders, np.int32),
            schedule.staleness[first : first + cohort_size],
            wave,
            turns(downloads),
            turns(training),
        )
    )
  return rounds


@pytest.mark.parametrize('mode', ['async', 'sequential'])
@pytest.mark.parametrize('options', [{}, SHAKY])
@pytest.mark.parametrize('cohort_size', [1, 4, 7])
def test_rounds_are_those_of_the_whole_schedule(mode, options, cohort_size):
  federation = tiny_federation((1, 2, 3))
  many = fleet(1, 2, 3, 1, 1, 7, seed=5, **options)
  schedule = plan(many, 9 * cohort_size, mode)
  want = at_once(schedule, federation, cohort_size)
  planned = events_lib.plan_rounds(stream(many, mode), cohort_size)
  planned = [*itertools.islice(planned, 9)]
  lazily = [events_lib.lay_out(one, federation) for one in planned]
  listed = events_lib.round_events(schedule, federation, cohort_size)
  for got in (lazily, listed):
    assert len(got) == len(want) == 9
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_array_equal(a, b)
      assert a.dtype == b.dtype
  # End and lost visits of each round.
  ends = schedule.time[cohort_size - 1 :: cohort_size]
  assert [one.time for one in planned] == ends.tolist()
  for number, one in enumerate(planned):
    mine = schedule.lost_version // cohort_size == number
    assert one.lost == schedule.lost_client[mine].tolist()


def test_a_synchronous_round_lasts_for_its_slowest_client():
  """Every client's own visits and pauses, one after the other, in any round."""
  shaky = fleet(1, 2, 3, seed=3, **SHAKY)
  draws = np.random.default_rng(0)
  cohorts = [draws.permutation(3)[:2].tolist() for _ in range(20)]
  visits = [shaky.visits(client) for client in range(3)]
  free, now, ends, losses = [0.0] * 3, 0.0, [], []
  for cohort in cohorts:
    arrivals, lost = [], []
    for client in cohort:
      time, arrived = max(now, free[client]), False
      while not arrived:
        seconds, gone, pause = next(visits[client])
        lost += [client] * gone
        arrived, arrival = not gone, time + seconds
        time = free[client] = arrival + pause
      arrivals.append(arrival)
    now = max(arrivals)
    ends.append(now)
    losses.append(lost)
  assert [*synchronous_rounds(shaky, cohorts)] == [*zip(ends, losses)]
  assert any(losses)


def test_lost_visits_of_a_synchronous_round_are_counted():
  """Without pauses and jitter, a round of one client has its visits' time."""
  shaky = fleet(2, seed=3, drop_out=0.6)
  previous = 0.0
  for end, lost in itertools.islice(
      synchronous_rounds(shaky, itertools.repeat([0])), 20
  ):
    assert end - previous == pytest.approx(2 * (len(lost) + 1))
    previous = end


def test_memory_does_not_grow_with_the_rounds():
  rounds = Window(
      lambda: events_lib.plan_rounds(stream(fleet(1, 2, 3)), 5), keep=4
  )
  rounds[10]
  tracemalloc.start()
  rounds[5000]
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert peak < 200_000


def test_a_window_goes_on_skips_and_begins_anew():
  begun = []

  def begin():
    begun.append(0)
    return iter(range(100, 200))

  window = Window(begin, keep=3)
  assert [window[i] for i in (0, 1, 5, 4, 3)] == [100, 101, 105, 104, 103]
  assert len(begun) == 1
  assert window[2] == 102 and len(begun) == 2
  assert window[7] == 107 and len(begun) == 2


def test_a_fleet_that_loses_nearly_all_is_refused(monkeypatch):
  monkeypatch.setattr('fedjax_het.engine.clock._PATIENCE', 1000)
  losing = fleet(1, 1, drop_out=1 - 1e-9)
  for mode in ('async', 'sequential'):
    with pytest.raises(ValueError, match='1000 visits in a row were lost'):
      plan(losing, 1, mode)
  with pytest.raises(ValueError, match='1000 visits of client 0 in a row'):
    round_ends(losing, np.array([[0]]))
  # One client loses very many visits between two uploads of another.
  mixed = fleet(1e-7, 1)
  mixed = dataclasses.replace(
      mixed, devices=[fleet(1e-7, drop_out=1.0).devices[0], mixed.devices[1]]
  )
  with pytest.raises(ValueError, match='1000 visits in a row were lost'):
    plan(mixed, 1)


def test_visits_beyond_all_time_are_refused():
  with pytest.raises(ValueError, match=r'jitter .* at least 0 and at most 10'):
    Device(jitter=11.0)
  with pytest.raises(ValueError, match=r'would take .*e\+30 s; .* less than'):
    plan(fleet(1e30), 1)
