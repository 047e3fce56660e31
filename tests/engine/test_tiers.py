"""Tiers that do not wait for each other: schedules by hand, and invariances."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from fedjax_het.engine.events import plan_rounds
from fedjax_het.engine.tiers import tier_stream
from tests.engine.rounds import round_ends
from tests.engine.test_clock import SHAKY, device, fleet


def take(stream, num_uploads):
  """The events up to a number of uploads: {kind: list}."""
  found = dict(d=[], u=[], l=[])
  for kind, event in stream:
    found[kind].append(event)
    if len(found['u']) == num_uploads:
      return found


def test_two_tiers_by_hand():
  """Visits of 1, 2 | 5 s: rounds of two end at 2, 4, 6, ..., of one at 5."""
  many = fleet(device(1), device(2), device(5), device(5))
  got = take(tier_stream(many, [[0, 1], [2, 3]], 2), 10)
  # client, visit, version at its download, time, staleness.
  assert got['u'] == [
      (0, 0, 0, 2.0, 0), (1, 0, 0, 2.0, 0),
      (0, 1, 2, 4.0, 0), (1, 1, 2, 4.0, 0),
      (2, 0, 0, 5.0, 4), (3, 0, 0, 5.0, 4),
      (0, 2, 4, 6.0, 2), (1, 2, 4, 6.0, 2),
      (0, 3, 8, 8.0, 0), (1, 3, 8, 8.0, 0),
  ]  # fmt: skip
  # Both tiers begin at 0; each downloads when its round is over.
  assert got['d'] == [
      (0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0),
      (0, 1, 2), (1, 1, 2), (0, 2, 4), (1, 2, 4), (2, 1, 6), (3, 1, 6),
      (0, 3, 8), (1, 3, 8),
  ]  # fmt: skip


def test_periods_of_one_and_three():
  """Over six units: six rounds and two; at one time tiers take turns."""
  got = take(tier_stream(fleet(device(1), device(3)), [[0], [1]], 1), 8)
  clients = [client for client, *_ in got['u']]
  assert clients == [0, 0, 0, 1, 0, 0, 0, 1]
  assert collections.Counter(clients) == {0: 6, 1: 2}
  # At 3 s the second tier downloads after its own upload.
  assert [turn[2] for turn in got['d']] == [0, 0, 1, 2, 3, 4, 5, 6, 7]


def test_uploads_that_are_dropped_make_nobody_staler():
  many = fleet(device(2), device(5))
  for limit, want in (
      (None, [0, 0, 2, 1, 0, 0, 3]),
      (2, [0, 0, 2, 1, 0, 0, 3]),
      (1, [0, 0, 2, 0, 0, 0, 3]),
  ):
    got = take(tier_stream(many, [[0], [1]], 1, limit), 7)
    assert [event[4] for event in got['u']] == want


def test_one_tier_is_a_synchronous_run():
  """The same ends and lost visits, for the cohorts that were drawn."""
  many = fleet(*(device(s, **SHAKY) for s in (1, 2, 3, 4)), seed=5)
  plans = plan_rounds(tier_stream(many, [range(4)], 2), 2)
  plans = [*itertools.islice(plans, 30)]
  cohorts = np.array([one.client for one in plans])
  want = round_ends(many, cohorts)
  np.testing.assert_array_equal([one.time for one in plans], want)
  assert all(one.staleness == [0, 0] for one in plans)
  assert sum(len(one.lost) for one in plans) > 3
  assert len(np.unique(cohorts, axis=0)) == 6  # All pairs are drawn.
  assert np.all(np.diff(cohorts) > 0)


def test_each_tier_runs_as_if_alone():
  """Its clients, times, lost visits and numbers of visits."""
  many = fleet(*(device(s, **SHAKY) for s in (1, 2, 3, 4, 5, 6)), seed=5)
  tiers = [[0, 2, 4], [1, 3, 5]]
  got = take(tier_stream(many, tiers, 2), 400)
  order = [event[3] for event in got['u']]
  assert order == sorted(order)
  both = [event for event in got['u'] if event[0] in tiers[0]]
  alone = take(tier_stream(many, tiers[:1], 2), len(both))
  for one, other in zip(both, alone['u'], strict=True):
    assert (one[0], one[1], one[3]) == (other[0], other[1], other[3])
  # Visits are counted from 0, lost ones included.
  lost = collections.Counter(client for client, _ in got['l'])
  for client in range(6):
    numbers = [event[1] for event in got['u'] if event[0] == client]
    assert numbers == sorted(set(numbers)) and lost[client] > 0
    missing = numbers[-1] + 1 - len(numbers)
    assert 0 < missing <= lost[client]
  # A round is one of a tier, and what it trains has been downloaded.
  plans = plan_rounds(tier_stream(many, tiers, 2), 2)
  for one in itertools.islice(plans, 50):
    assert {*one.client} <= {*tiers[0]} or {*one.client} <= {*tiers[1]}
    assert one.time > 0 and len(set(one.staleness)) == 1
  downloads = {turn[:2] for turn in got['d']}
  assert {event[:2] for event in got['u']} <= downloads


def test_a_longer_plan_begins_with_the_shorter_one():
  many = fleet(*(device(s, **SHAKY) for s in (1, 2, 3, 4)), seed=5)
  tiers = [[0, 1], [2, 3]]
  short, long = (take(tier_stream(many, tiers, 1), n) for n in (20, 60))
  for kind, events in short.items():
    assert events == long[kind][: len(events)]
  other = dataclasses.replace(many, seed=6)
  assert take(tier_stream(other, tiers, 1), 20)['u'] != short['u']


def test_clients_of_a_tier_are_drawn_alike():
  many = fleet(*[device(1)] * 8)
  got = take(tier_stream(many, [range(3), range(3, 8)], 2), 8000)
  counts = np.bincount([event[0] for event in got['u']])
  np.testing.assert_allclose(counts[:3], 4000 / 3, rtol=0.1)
  np.testing.assert_allclose(counts[3:], 4000 / 5, rtol=0.1)
  # Equal tiers draw for themselves.
  pairs = take(tier_stream(many, [range(4), range(4, 8)], 1), 200)['u']
  first, second = (
      [event[0] for event in pairs if event[0] // 4 == tier] for tier in (0, 1)
  )
  assert first != [client - 4 for client in second]
  # The seed matters.
  other = fleet(*[device(1)] * 8, seed=1)
  assert pairs != take(tier_stream(other, [range(4), range(4, 8)], 1), 200)['u']


def test_what_can_never_run_is_refused():
  many = fleet(*[device(1)] * 3)
  with pytest.raises(ValueError, match=r'tiers.* be at most 1, .* got 2\.'):
    tier_stream(many, [[0, 1], [2]], 2)
  with pytest.raises(ValueError, match='cohort_size must be at least 1'):
    tier_stream(many, [[0, 1], [2]], 0)
  never = fleet(device(1), device(1, drop_out=1.0))
  with pytest.raises(ValueError, match='Client 1 never returns'):
    tier_stream(never, [[0], [1]], 1)
