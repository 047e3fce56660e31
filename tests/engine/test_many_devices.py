"""Rounds on 1 to 4 devices: equal results, and client states sharded."""

import functools

import jax
import numpy as np
import pytest

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine import mapping, placement, rounds
from fedjax_het.engine.evaluate import make_evaluate
from tests.engine.collectives import computations
from tests.tiny import preprocess, tiny_data, tiny_federation

# XLA does not partition conftest's random number generator.
KEYS = tuple(jax.random.key(i, impl='threefry2x32') for i in (1, 2))
# Two groups of four clients, some with several times the work of others.
SIZES = (5, 31, 3, 7, 18, 6, 9, 4)


def run(name, num_devices, cohort_size=6, per_group=4):
  """State, reports and scores after two rounds; 'map' if no `num_devices`."""
  federation = tiny_federation(
      (1, 2), per_group, norm=False, sizes=np.array(SIZES)
  )
  algorithm = ALGORITHMS[name](federation)
  mesh, backend = None, 'map'
  if num_devices:
    mesh = mapping.client_mesh(jax.devices()[:num_devices])
    backend = mapping.Backend('shard_map', mesh=mesh)
  state = rounds.init_state(algorithm, federation, jax.random.key(0), mesh)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=cohort_size, backend=backend
  )
  data = tiny_data(SIZES)
  if mesh is not None:
    data = placement.put(data, placement.everywhere(mesh))
  for _ in range(2):
    state, reports = run_round(state, data, *KEYS)
  evaluate = make_evaluate(
      algorithm,
      federation,
      np.asarray(data.images)[:11],
      np.asarray(data.labels)[:11],
      preprocess,
      batch_size=2,
      backend=backend,
  )
  return state, jax.device_get(reports), jax.device_get(evaluate(state))


@functools.cache
def reference(name):
  return run(name, None)


def assert_close(got, want):
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      got,
      want,
  )


@pytest.mark.parametrize(
    'name,num_devices',
    [
        ('fedavg', 2),
        pytest.param('private', 4, marks=pytest.mark.slow),
        pytest.param('private', 1, marks=pytest.mark.slow),
        pytest.param('private', 2, marks=pytest.mark.slow),
        pytest.param('fedavg', 4, marks=pytest.mark.slow),
    ],
)
def test_every_number_of_devices_agrees(name, num_devices):
  state, reports, scores = run(name, num_devices)
  want_state, want_reports, want_scores = reference(name)
  assert_close(jax.device_get(state), jax.device_get(want_state))
  for group, report in reports.items():
    want = want_reports[group]
    np.testing.assert_array_equal(report.client_id, want.client_id)
    assert_close(report, want)
  for group, score in scores.items():
    want = want_scores[group]
    np.testing.assert_array_equal(score.accuracy, want.accuracy)
    assert_close(score, want)
  if name == 'private' and num_devices == 4:
    _in_their_place(state)


def _in_their_place(state):
  leaf = jax.tree.leaves(state.clients['tiny1'])[0]
  assert {s.data.shape[0] for s in leaf.addressable_shards} == {1}
  leaves = jax.tree.leaves((state.round_num, state.server))
  assert all(a.sharding.is_fully_replicated for a in leaves)


def test_the_first_state_is_the_same_bits():
  federation = tiny_federation((1, 2), 4, sizes=np.array(SIZES))
  algorithm = ALGORITHMS['private'](federation)
  want = rounds.init_state(algorithm, federation, jax.random.key(0))
  for num in (1, 3, 4):
    mesh = mapping.client_mesh(jax.devices()[:num])
    got = rounds.init_state(algorithm, federation, jax.random.key(0), mesh)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_no_collective_is_in_a_loop(monkeypatch):
  """Otherwise a round may never end, see `placement._blocks`."""
  monkeypatch.setattr(placement, '_BUFFER', 1)
  federation = tiny_federation((1,), 8, sizes=np.array(SIZES))
  algorithm = ALGORITHMS['private'](federation)
  mesh = mapping.client_mesh(jax.devices()[:2])
  state = rounds.init_state(algorithm, federation, jax.random.key(0), mesh)
  run_round = rounds.make_round(
      algorithm,
      federation,
      cohort_size=6,
      backend=mapping.Backend('shard_map', mesh=mesh),
  )
  data = placement.put(tiny_data(SIZES), placement.everywhere(mesh))
  found = computations(run_round.lower(state, data, *KEYS).compile())
  assert len(found) == 1 and min(found).startswith('main')


@pytest.mark.slow
def test_a_group_that_does_not_divide_lies_everywhere():
  """Three devices, groups of four: the same results."""
  state, reports, _ = run('private', 3)
  want, want_reports, _ = reference('private')
  assert_close(jax.device_get(state), jax.device_get(want))
  assert_close(reports, want_reports)
  leaf = jax.tree.leaves(state.clients['tiny1'])[0]
  assert leaf.sharding.is_fully_replicated
