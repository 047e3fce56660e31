"""FedIN's store of pairs: who gets what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.aggregation import pairs as ps
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


def test_groups_must_agree_in_their_features():
  assert ps.check_pair_shapes(tiny_federation()) == ((4,), (4,))
  groups = (
      Group('narrow', tiny_model(1, width=4), np.array([0])),
      Group('wide', tiny_model(1, width=5), np.array([1])),
  )
  with pytest.raises(ValueError, match=r"in group 'wide' and .* 'narrow'"):
    ps.check_pair_shapes(Federation(groups, tiny_local()))
