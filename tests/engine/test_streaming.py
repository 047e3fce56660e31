"""Client states in host memory give the same results as on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine import mapping, placement, rounds, streaming
from fedjax_het.engine.cohort import Share, sample_cohort
from tests.tiny import tiny_data, tiny_federation, tiny_local

KEYS = (jax.random.key(1), jax.random.key(2))


def run(
    make_round, init, num_rounds=4, cohort_size=4, stable=False, **options
):
  federation = tiny_federation((1, 2), 3)
  if stable:  # Adam and norms over four examples amplify rounding.
    local = tiny_local(optax.sgd, 0.1)
    federation = tiny_federation((1, 2), 3, norm=False, local=local)
  algorithm = ALGORITHMS['private'](federation)
  run_round = make_round(
      algorithm, federation, cohort_size=cohort_size, **options
  )
  state, reports = init(algorithm, federation, jax.random.key(0)), []
  for _ in range(num_rounds):
    state, report = run_round(state, tiny_data(), *KEYS)
    reports.append(jax.device_get(report))
  return jax.device_get(state), reports


@pytest.mark.parametrize('backend', [
    'map',
    pytest.param('loop', marks=pytest.mark.slow),
    pytest.param('vmap', marks=pytest.mark.slow),
])
def test_equals_states_on_the_device(backend):
  """Cohorts are four of six clients, so every two share some."""
  # 'map' compiles to the same program; others sum in another order.
  stable = backend != 'map'
  options = dict(backend=backend, stable=stable)
  want = run(rounds.make_round, rounds.init_state, **options)
  got = run(
      streaming.make_streamed_round, streaming.init_streamed_state, **options
  )
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 if stable else 0)


@pytest.mark.slow
@pytest.mark.usefixtures('users_generator')
def test_a_round_on_a_mesh_compiles_once():
  federation = tiny_federation((1, 2), 3)
  algorithm = ALGORITHMS['private'](federation)
  mesh = mapping.client_mesh()
  data = placement.put(tiny_data(), placement.everywhere(mesh))
  first, *keys = map(jax.random.key, range(3))
  state = streaming.init_streamed_state(algorithm, federation, first)
  run_round = streaming.make_streamed_round(
      algorithm, federation, cohort_size=4,
      backend=mapping.Backend('shard_map', mesh=mesh),
  )  # fmt: skip
  state, _ = run_round(state, data, *keys)
  events = []
  jax.monitoring.register_event_duration_secs_listener(
      lambda event, secs, **kw: events.append(event)
  )
  try:
    state, _ = run_round(state, data, *keys)
    jax.block_until_ready(state.server)
    found = [event for event in events if 'backend_compile' in event]
  finally:
    jax.monitoring.clear_event_listeners()
  assert not found


def test_first_states_in_chunks_are_those_of_their_clients(monkeypatch):
  monkeypatch.setattr(streaming, '_CHUNK', 2)
  federation = tiny_federation((1, 2), 5)
  algorithm = ALGORITHMS['private'](federation)._replace(
      init_client=lambda group, client_id, key: dict(id=client_id)
  )
  state = streaming.init_streamed_state(algorithm, federation, KEYS[0])
  for group in federation.groups:
    got = state.clients[group.name]['id']
    np.testing.assert_array_equal(got, group.client_ids)


def test_the_tables_stay_on_the_host():
  state, _ = run(
      streaming.make_streamed_round, streaming.init_streamed_state, num_rounds=1
  )
  leaves = jax.tree.leaves(state.clients)
  assert leaves and all(isinstance(leaf, np.ndarray) for leaf in leaves)


def test_another_state_is_not_given_the_rows_of_the_last():
  """Prefetched rows belong to one run and one round."""
  # Not Adam, which amplifies rounding near zero to a whole step.
  federation = tiny_federation((1, 2), 3, local=tiny_local(optax.sgd, 0.1))
  algorithm = ALGORITHMS['private'](federation)
  run_round = streaming.make_streamed_round(
      algorithm, federation, cohort_size=6
  )

  def start(seed):
    return streaming.init_streamed_state(
        algorithm, federation, jax.random.key(seed)
    )

  data = tiny_data()
  want, _ = run_round(start(5), data, *KEYS)
  want = jax.device_get(run_round(want, data, *KEYS)[0])
  first, _ = run_round(start(5), data, *KEYS)
  run_round(start(6), data, *KEYS)
  got = jax.device_get(run_round(first, data, *KEYS)[0])
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_array_equal(a, b)


def test_another_sampling_key_is_not_given_the_cohort_of_the_last():
  federation = tiny_federation((1, 2), 3)
  algorithm = ALGORITHMS['private'](federation)
  run_round = streaming.make_streamed_round(
      algorithm, federation, cohort_size=2
  )
  state = streaming.init_streamed_state(
      algorithm, federation, jax.random.key(0)
  )
  for number in range(3):
    sampling_key = jax.random.key(number + 2)
    state, report = run_round(state, tiny_data(), KEYS[0], sampling_key)
    ids = np.concatenate([r.client_id for r in report.groups.values()])
    want = sample_cohort(sampling_key, number, federation.num_clients, 2)
    got = sorted(ids[ids < federation.num_clients].tolist())
    assert got == sorted(want.tolist())


def test_overlap_names_the_slots_of_clients_in_both_shares():
  def share(rows, num_valid):
    rows = np.array(rows, np.int32)
    return Share(rows, rows, np.int32(num_valid))

  before, after = share([3, 5, 8, 3], 3), share([5, 6, 3, 3], 3)
  slots = streaming._overlap(before, after)
  assert slots.tolist() == [1, 4, 0, 4]


def test_rows_of_the_host_and_of_the_device_are_the_same():
  table = np.arange(200.0, dtype=np.float32).reshape(100, 2)
  rows = np.arange(99, 9, -1)  # 90, more than are copied at once.
  ids = rows % 7
  calls = []

  def score(clients, rows, ids):
    calls.append(len(rows))
    return {'sum': clients[rows].sum(axis=1), 'id': ids}

  want = streaming.run_rows(score, jnp.asarray(table), rows, ids)
  got = streaming.run_rows(score, table, rows, ids)
  assert calls == [90, 64, 64]
  for name, values in want.items():
    np.testing.assert_array_equal(got[name], values)


@pytest.mark.parametrize('on_device', [True, False])
def test_a_state_may_name_an_array_twice(on_device):
  """Buffers of a state are donated, and none can be donated twice."""
  federation = tiny_federation((1,), 2, norm=False)
  algorithm = ALGORITHMS['private'](federation)
  init_client, update = algorithm.init_client, algorithm.client_update

  def init(key):
    del key
    zeros = jnp.zeros(2)
    return zeros, zeros

  def client_update(group, client, sent, data, visit):
    private, once, again = client
    private, uplink, metrics = update(group, private, sent, data, visit)
    return (private, once + 1, again + 2), uplink, metrics

  def twice(group, client_id, key):
    private = init_client(group, client_id, key)
    number = jnp.float32(client_id)
    return private, number, number

  algorithm = algorithm._replace(
      init=init,
      init_client=twice,
      client_update=client_update,
      server_update=lambda server, received, turn: (
          (server[0] + 1, server[1] + 2), {}
      ),
  )
  if on_device:
    start, make = rounds.init_state, rounds.make_round
  else:
    start, make = (
        streaming.init_streamed_state, streaming.make_streamed_round
    )
  state = start(algorithm, federation, jax.random.key(0))
  run_round = make(algorithm, federation, cohort_size=2, backend='map')
  state, _ = run_round(state, tiny_data((4, 4)), *KEYS)
  server, (_, once, again) = jax.device_get(
      (state.server, state.clients['tiny1'])
  )
  np.testing.assert_array_equal(server, [[1, 1], [2, 2]])
  np.testing.assert_array_equal(once, [1, 2])
  np.testing.assert_array_equal(again, [2, 3])
