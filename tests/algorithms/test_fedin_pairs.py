"""FedIN's store of pairs: storing, drawing and ages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms.fedin import pairs as ps
from fedjax_het.engine.types import Federation, Group, Maybe
from tests.tiny import tiny_federation, tiny_local, tiny_model


def filled_store(owners, num_clients=4, size=3):
  """Pair j of client k has s_in = 10 k + j and s_out = -(10 k + j)."""
  store = ps.empty_store(num_clients, size, ((1,), (1,)))
  ids = jnp.asarray(owners, jnp.int32)
  values = (10.0 * ids[:, None] + jnp.arange(size)[None])[..., None]
  sent = Maybe(ps.Pairs(values, -values), jnp.ones((len(owners), size), bool))
  return ps.store_pairs(store, ids, sent)


def test_pairs_of_others_without_replacement():
  store = filled_store([0, 2, 3])
  for seed in range(5):
    drawn = ps.draw_pairs(store, 2, 5, jax.random.key(seed))
    values = np.asarray(drawn.value.s_in).ravel()
    assert np.all(drawn.present)
    assert len(set(values)) == 5
    assert set(values // 10) <= {0, 3}
    np.testing.assert_array_equal(drawn.value.s_out.ravel(), -values)


def test_own_pairs_only_fill_up():
  drawn = ps.draw_pairs(filled_store([0, 2]), 2, 5, jax.random.key(0))
  values = np.asarray(drawn.value.s_in).ravel()
  assert np.all(drawn.present) and len(set(values)) == 5
  assert set(values[:3]) == {0, 1, 2} and set(values[3:]) <= {20, 21, 22}


def test_what_is_missing_is_marked():
  drawn = ps.draw_pairs(filled_store([1]), 0, 5, jax.random.key(0))
  assert np.asarray(drawn.present).tolist() == [True] * 3 + [False] * 2
  empty = ps.empty_store(4, 3, ((1,), (1,)))
  assert not np.any(ps.draw_pairs(empty, 0, 20, jax.random.key(0)).present)


def test_the_draw_is_uniform_over_the_others():
  store = filled_store([0, 1, 2])
  keys = jax.random.split(jax.random.key(0), 3000)
  drawn = jax.vmap(lambda k: ps.draw_pairs(store, 0, 1, k).value.s_in)(keys)
  _, counts = np.unique(np.asarray(drawn), return_counts=True)
  assert len(counts) == 6
  np.testing.assert_allclose(counts / 3000, 1 / 6, atol=0.03)


def test_a_draw_takes_others_then_own_pairs_by_the_numbers_of_the_key():
  key = jax.random.key(3)
  drawn = ps.draw_pairs(filled_store([0, 2, 3]), 2, 9, key)
  numbers = np.asarray(jax.random.uniform(key, (12,)))
  order = sorted(range(12), key=lambda i: (i // 3 == 2, numbers[i]))
  want = [10 * (i // 3) + i % 3 for i in order if i // 3 != 1]
  assert np.asarray(drawn.value.s_in).ravel().tolist() == want


def test_latest_upload_wins_and_padding_slots_are_ignored():
  store = filled_store([0, 1])
  one = Maybe(
      ps.Pairs(jnp.full((2, 3, 1), 7.0), jnp.full((2, 3, 1), 8.0)),
      jnp.ones((2, 3), bool),
  )
  new = ps.store_pairs(store, jnp.array([1, 4]), one)
  np.testing.assert_array_equal(new.pairs.s_in[0], store.pairs.s_in[0])
  assert np.all(new.pairs.s_in[1] == 7.0)
  assert not np.any(new.filled[2:])


def aged(seen, num_clients=4, size=3):
  """A store after one update for each list of senders in `seen`."""
  store = ps.empty_store(num_clients, size, ((1,), (1,)), with_age=True)
  for ids in seen:
    values = jnp.tile(10.0 * jnp.array(ids)[:, None, None], (1, size, 1))
    sent = Maybe(ps.Pairs(values, -values), jnp.ones((len(ids), size), bool))
    store = ps.older(ps.store_pairs(store, jnp.array(ids, jnp.int32), sent))
  return store


def test_age_counts_the_updates_since_the_last_upload():
  """Pairs of the last update have age 1; a padding slot resets no age."""
  store = aged([[0, 2], [1], [2, 4]])
  assert np.asarray(store.age).tolist()[:3] == [3, 2, 1]
  assert np.asarray(store.filled).any(1).tolist() == [True] * 3 + [False]


@pytest.mark.parametrize('max_age,owners', [
    (1, {2}), (2, {1, 2}), (3, {0, 1, 2}), (None, {0, 1, 2})
])  # fmt: skip
def test_pairs_that_are_too_old_are_left_out(max_age, owners):
  drawn = ps.draw_pairs(
      aged([[0, 2], [1], [2]]), 3, 9, jax.random.key(0), max_age=max_age
  )
  values = np.asarray(drawn.value.s_in).ravel()[np.asarray(drawn.present)]
  assert set(values // 10) == owners and len(values) == 3 * len(owners)


def test_own_pairs_age_like_those_of_others():
  """Client 2 can draw only its own pairs, and only while they are young."""
  for age, count in ((1, 3), (2, 0)):
    store = aged([[2]] + [[3]] * (age - 1))
    store = store._replace(filled=store.filled.at[3].set(False))
    drawn = ps.draw_pairs(store, 2, 5, jax.random.key(0), max_age=1)
    assert int(drawn.present.sum()) == count


def test_a_tenth_of_the_clients_a_round_makes_pairs_ten_rounds_old():
  """As `older` states: the mean of a geometric distribution of ages."""
  store = ps.empty_store(100, 1, ((1,), (1,)), with_age=True)

  def update(store, key):
    ids = jax.random.permutation(key, 100)[:10].astype(jnp.int32)
    sent = Maybe(
        ps.Pairs(jnp.zeros((10, 1, 1)), jnp.zeros((10, 1, 1))),
        jnp.ones((10, 1), bool),
    )
    store = ps.older(ps.store_pairs(store, ids, sent))
    return store, jnp.mean(store.age.astype(jnp.float32))

  keys = jax.random.split(jax.random.key(0), 600)
  _, ages = jax.lax.scan(update, store, keys)
  np.testing.assert_allclose(np.mean(ages[200:]), 10, atol=0.5)


def test_groups_must_agree_in_their_features():
  assert ps.check_pair_shapes(tiny_federation()) == ((4,), (4,))
  groups = (
      Group('narrow', tiny_model(1, width=4), np.array([0])),
      Group('wide', tiny_model(1, width=5), np.array([1])),
  )
  with pytest.raises(ValueError, match=r"in group 'wide' and .* 'narrow'"):
    ps.check_pair_shapes(Federation(groups, tiny_local()))
