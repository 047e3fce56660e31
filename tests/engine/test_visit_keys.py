"""The keys and turns of visits, and the keys of the server's updates."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.engine import rounds
from fedjax_het.engine.clock import plan
from fedjax_het.engine.cohort import sample_cohort
from fedjax_het.engine.types import FederatedAlgorithm, Uplink
from fedjax_het.engine.visits import client_key, visit_pair
from tests.engine.test_asynchronous import (
    KEY,
    SPEEDS,
    make_events,
    make_fleet,
    run,
)
from tests.tiny import tiny_data, tiny_federation

SAMPLING = jax.random.key(2)
SIZES = (6, 6, 6, 6)


def note(visit):
  """[3] uint32: a draw from the key, the turn, and the round."""
  numbers = jax.random.bits(visit.key), visit.turn, visit.round_num
  return jnp.stack([jnp.uint32(number) for number in numbers])


def diary(
    num_visits, num_updates, number=lambda visit: visit.round_num
) -> FederatedAlgorithm:
  """An algorithm without training, in which everyone logs keys and turns.

  A client's state has a row for each visit, in the place `number(visit)`: the
  notes of its downlink and of its training.
  """

  def client_update(group, client, sent, data, visit):
    row = jnp.concatenate([sent, note(visit)])
    return client.at[number(visit)].set(row), Uplink(jnp.int32(1)), {}

  def server_update(server, received, turn):
    now, drawn, ends = server
    drawn = drawn.at[now].set(jax.random.bits(turn.key))
    last = jnp.all(jnp.stack([r.round_ends for r in received.values()]))
    return (now + 1, drawn, ends.at[now].set(last)), {}

  return FederatedAlgorithm(
      init=lambda key: (
          jnp.int32(0),
          jnp.zeros(num_updates, jnp.uint32),
          jnp.zeros(num_updates, bool),
      ),
      init_client=lambda group, client_id, key: jnp.zeros(
          (num_visits, 6), jnp.uint32
      ),
      downlink=lambda server, group, visit: note(visit),
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: client,
      warm_up=client_update,
  )


@jax.jit
def row_of(round_num, client_id, turn, number=None):
  """The row of a client's state that one visit should write."""
  pair = visit_pair(KEY, round_num, client_id, turn, number)
  return jnp.concatenate([*map(note, pair)])


def by_client(federation, clients):
  """{client id: its state}."""
  return {
      int(k): np.asarray(clients[group.name][row])
      for group in federation.groups
      for row, k in enumerate(group.client_ids)
  }


def server_draws(num_updates, num_clients):
  return jax.vmap(
      lambda u: jax.random.bits(client_key(KEY, u, num_clients))
  )(jnp.arange(num_updates))


def test_no_two_keys_are_equal():
  """Those of three clients and a server in three rounds."""
  visits = [row_of(r, k, 0) for r, k in itertools.product(range(3), range(3))]
  drawn = [*np.stack(visits)[:, [0, 3]].ravel(), *server_draws(3, 3)]
  assert len(set(map(int, drawn))) == 9 * 2 + 3


def test_keys_and_turns_of_synchronous_rounds():
  """A warm-up and three rounds of two clients of two groups."""
  federation = tiny_federation((1, 2), norm=False)
  algorithm, data = diary(3, 4), tiny_data(SIZES)
  warm_up = rounds.make_warm_up(algorithm, federation, backend='map')
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=2, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  state, _ = warm_up(state, data, KEY)
  want = by_client(federation, state.clients)
  # The warm-up draws from keys that no round has.
  warm = [row[0, [0, 3]] for row in want.values()]
  known = [row_of(r, k, 0)[jnp.array([0, 3])] for r in range(3) for k in want]
  assert len(np.unique(np.stack([*warm, *known]))) == 2 * (4 + 3 * 4)
  for r in range(3):
    state, _ = run_round(state, data, KEY, SAMPLING)
    for i, k in enumerate(sample_cohort(SAMPLING, r, 4, 2).tolist()):
      want[k] = want[k].copy()
      want[k][r] = row_of(r, k, 2 * r + i)
  got = by_client(federation, state.clients)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  _, drawn, ends = state.server
  np.testing.assert_array_equal(drawn[1:], server_draws(3, 4))
  assert np.all(ends)


def test_keys_and_turns_of_asynchronous_rounds():
  """Two rounds of four uploads; some clients upload more often."""
  federation = tiny_federation((1, 2), norm=False)
  schedule = plan(make_fleet(SPEEDS), 8)
  events = make_events(federation, schedule, 4)
  algorithm = diary(8, 8, number=lambda visit: visit.turn // 4)
  state, _ = run(algorithm, federation, tiny_data(SIZES), events)
  for k, got in by_client(federation, state.clients).items():
    want = np.zeros_like(got)
    mine = schedule.client == k
    for visit, version in zip(schedule.visit[mine], schedule.version[mine]):
      # The round of the download; the key depends on the client's own visits.
      want[visit] = row_of(version // 4, k, 4 * visit + k, visit)
    np.testing.assert_array_equal(got, want)
  _, drawn, ends = state.server
  np.testing.assert_array_equal(drawn, server_draws(8, 4))
  assert len(np.unique(drawn)) == 8
  assert ends.tolist() == ([False] * 3 + [True]) * 2
