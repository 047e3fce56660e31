"""Clients of unequal work are assigned to devices evenly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.engine.balance import assign, assign_cohort, step_costs
from fedjax_het.engine.cohort import make_plan
from tests.tiny import tiny_data, tiny_federation


def by_hand(loads, num_devices, capacity):
  """Assigns the longest first, to the least loaded device, in Python."""
  total, who = [0.0] * num_devices, [[] for _ in range(num_devices)]
  for client in np.argsort(-np.asarray(loads), kind='stable'):
    free = [d for d in range(num_devices) if len(who[d]) < capacity]
    device = min(free, key=lambda d: total[d])
    who[device].append(int(client))
    total[device] += float(loads[client])
  return who, total


def clients_of(loads, num_valid, num_devices):
  """Checks that the fields agree; returns the clients of each device."""
  result = jax.jit(assign, static_argnums=2)(
      jnp.asarray(loads), num_valid, num_devices
  )
  capacity = -(-len(loads) // num_devices)
  places = np.asarray(result.slot).reshape(num_devices, capacity)
  who = [row[:num].tolist() for row, num in zip(places, result.num)]
  assert sorted(c for mine in who for c in mine) == list(range(num_valid))
  place = np.asarray(result.place)
  np.testing.assert_array_equal(
      result.slot[place[:num_valid]], np.arange(num_valid)
  )
  assert np.all(place[num_valid:] == num_devices * capacity)
  back = result.collect(jnp.asarray(loads)[result.slot] + 1)
  want = np.where(np.arange(len(loads)) < num_valid, loads + 1, 0)
  np.testing.assert_array_equal(back, want)
  return who


@pytest.mark.parametrize('num_devices', [1, 2, 3, 8])
@pytest.mark.parametrize('num_valid', [0, 1, 7, 20, 24])
def test_is_the_greedy_rule(num_devices, num_valid):
  rng = np.random.default_rng(num_valid)
  loads = rng.integers(1, 50, 24)
  who, _ = by_hand(loads[:num_valid], num_devices, -(-24 // num_devices))
  assert clients_of(loads, num_valid, num_devices) == who


def test_equal_loads_are_assigned_in_turn():
  assert clients_of(np.ones(7), 6, 3) == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize('seed', range(20))
def test_keeps_grahams_bound(seed):
  """If no device is full, at most 4/3 - 1/(3 D) of the optimum."""
  rng = np.random.default_rng(seed)
  num_devices, num = 4, 30
  # Twice as many slots as clients, as if a group had half of a cohort.
  loads = np.ceil(rng.lognormal(2, 1, 2 * num)).astype(np.int32)
  who = clients_of(loads, num, num_devices)
  largest = max(sum(loads[c] for c in mine) for mine in who)
  jobs = np.sort(loads[:num])[::-1]
  # Lower bounds of the optimum: the mean, the longest job, and the sum of the
  # shortest two of the D + 1 longest, two of which share a device.
  best = max(
      jobs.sum() / num_devices,
      jobs[0],
      jobs[num_devices - 1] + jobs[num_devices],
  )
  assert largest <= (4 / 3 - 1 / (3 * num_devices)) * best
  in_turn = max(loads[:num][d::num_devices].sum() for d in range(num_devices))
  assert largest <= in_turn


def test_a_full_device_gets_no_more():
  # Three places on each device bound its memory.
  loads = np.array([100, 1, 1, 1, 1, 1])
  assert clients_of(loads, 6, 2) == [[0, 4, 5], [1, 2, 3]]


def test_a_second_group_goes_on_from_the_first():
  first = assign(jnp.array([5.0]), 1, 2)
  second = assign(jnp.array([3.0, 1.0]), 2, 2, first.total)
  np.testing.assert_array_equal(first.num, [1, 0])
  # One place per device: the longer job goes to the idle device.
  np.testing.assert_array_equal(second.slot, [1, 0])
  np.testing.assert_array_equal(second.total, [6.0, 3.0])


def test_small_groups_share_the_devices():
  """Groups of one client each, the most expensive first, on two devices."""
  federation = tiny_federation((1, 2, 3), norm=False)
  counts = step_costs(federation)
  names = [group.name for group in federation.groups]
  assert list(counts) == names[::-1] and max(counts.values()) == 1.0
  data = tiny_data((8,) * federation.num_clients)
  shares = make_plan(federation, federation.num_clients)(0, jax.random.key(0))
  assigned = assign_cohort(federation, counts, shares, data, 2)
  assert list(assigned) == names
  total = np.asarray(assigned[names[0]].total)
  assert total.max() <= 4 / 3 * total.mean()
