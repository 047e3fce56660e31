"""An update that is not finite is dropped by every driver."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine import asynchronous, rounds
from fedjax_het.engine.clock import Device, Fleet, plan
from fedjax_het.engine.events import round_events
from fedjax_het.engine.types import Uplink
from fedjax_het.engine.visits import all_finite, make_training, visit_pair
from tests.engine.test_asynchronous import probe
from tests.tiny import tiny_data, tiny_federation

KEY = jax.random.key(1)


def broken(algorithm, client):
  """The same algorithm, in which one client uploads infinity."""

  def client_update(group, state, sent, data, visit):
    updated, uplink, metrics = algorithm.client_update(
        group, state, sent, data, visit
    )

    def spoil(leaf):
      if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
      return jnp.where(visit.client_id == client, leaf + jnp.inf - 1, leaf)

    return updated, jax.tree.map(spoil, uplink), metrics

  return algorithm._replace(client_update=client_update)


def assert_finite(tree):
  for leaf in jax.tree.leaves(jax.device_get(tree)):
    if np.issubdtype(np.asarray(leaf).dtype, np.floating):
      assert np.all(np.isfinite(leaf))


@pytest.mark.parametrize('name', ['fedasync', 'fedin', 'fedgkt'])
def test_nothing_in_flight_is_not_finite(name):
  federation = tiny_federation((1, 2), norm=False, sizes=np.full(4, 6))
  data = tiny_data((6, 6, 6, 6))
  options = dict(server_epochs=1) if name == 'fedgkt' else {}
  algorithm = broken(ALGORITHMS[name](federation, **options), client=2)
  fleet = Fleet([Device()] * 4, [6] * 4, [0] * 4, [0] * 4)
  events = round_events(plan(fleet, 4), federation, 4)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  state = asynchronous.init_async_state(algorithm, federation, state, data)
  run_round = asynchronous.make_async_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  state, reports = run_round(state, data, KEY, events[0])
  bad = [
      int(k)
      for report in reports.values()
      for k in np.asarray(report.client_id)[~np.asarray(report.finite)]
  ]
  assert bad == [2]
  assert_finite(state)


@pytest.mark.parametrize('size', [1, 4096, 4097])  # Small ones are joined.
@pytest.mark.parametrize('wrong', [jnp.nan, jnp.inf, -jnp.inf])
def test_one_wrong_number_is_found_in_leaves_of_any_size(size, wrong):
  good = [jnp.zeros(size), jnp.zeros((3, 2)), jnp.arange(4)]
  bad = good[0].at[size // 2].set(wrong)
  assert all_finite(good) and all_finite(good[:1]) and all_finite([])
  assert not all_finite([bad])
  assert not all_finite([bad, *good])
  assert not all_finite([*good, bad])


def test_a_client_that_is_not_finite_uploads_nothing():
  """Its upload alone would be finite."""

  def client_update(group, client, sent, data, visit):
    return client * jnp.nan, Uplink(jnp.float32(1.0), sent), {}

  algorithm = probe(1)._replace(client_update=client_update)
  train = make_training(algorithm, tiny_federation((1,)).groups[0])
  client = jnp.arange(3.0)
  _, visit = visit_pair(KEY, 0, 0)
  data = tiny_data((6, 6)).client(0)
  summed, (updated, kept, finite, *_) = train(
      client, jnp.float32(2.0), data, visit
  )
  np.testing.assert_array_equal(updated, client)
  assert (float(summed), float(kept), bool(finite)) == (0.0, 0.0, False)
