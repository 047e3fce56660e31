"""`local.keep_optimizer`: which methods keep optimisers, and its effect."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine import rounds, traffic
from fedjax_het.engine.needs import needs_of
from fedjax_het.engine.types import Visit
from fedjax_het.experiment.checks import check
from fedjax_het.experiment.config import default_config
from tests.tiny import tiny_data, tiny_federation, tiny_local, tiny_model

NUM_PUBLIC = 5
# {method: whether it keeps its clients' optimisers by default; None: never}.
KEEPS = {
    name: needs_of(constructor).keep_optimizer
    for name, constructor in ALGORITHMS.items()
}
CAN_KEEP = sorted(name for name, keeps in KEEPS.items() if keeps is not None)


def federate(keep, depths=(1, 2), **kwargs):
  return tiny_federation(
      depths,
      norm=False,
      local=tiny_local(optax.adam, keep_optimizer=keep),
      num_public=NUM_PUBLIC,
      sizes=np.full(2 * len(depths), 6),
      **kwargs,
  )


def visit_shapes(name, keep):
  """Client before and after, downlink and uplink, as shapes."""
  large = needs_of(ALGORITHMS[name]).server_model
  federation = federate(
      keep, server_model=tiny_model(3, norm=False) if large else None
  )
  algorithm, group = ALGORITHMS[name](federation), federation.groups[1]
  turn = Visit(jnp.int32(1), jnp.int32(0), jax.random.key(0))

  def visit(key, data):
    client = algorithm.init_client(group, 1, key)
    sent = algorithm.downlink(algorithm.init(key), group, turn)
    after, uplink, _ = algorithm.client_update(
        group, client, sent, data.client(1), turn
    )
    return client, after, (sent, uplink)

  data = tiny_data((6,) * 4, public=NUM_PUBLIC)
  return jax.eval_shape(visit, jax.random.key(0), data)


def states(tree):
  """The states of Adam in a tree."""
  def is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)

  return [n for n in jax.tree.leaves(tree, is_leaf=is_adam) if is_adam(n)]


@pytest.mark.parametrize('name', CAN_KEEP)
def test_the_state_stays_on_the_client_and_never_travels(name):
  found = {keep: visit_shapes(name, keep) for keep in (True, False, None)}
  for keep, (before, after, messages) in found.items():
    assert jax.tree.structure(before) == jax.tree.structure(after)
    kept = KEEPS[name] if keep is None else keep
    assert len(states(after)) == (1 + (name == 'fedmd') if kept else 0)
    assert not states(messages)
    assert traffic.full_bytes(messages) == traffic.full_bytes(found[None][2])


@pytest.mark.parametrize('name', sorted(ALGORITHMS))
def test_the_config_has_the_methods_default_and_refuses_what_cannot_be(name):
  config = default_config(name)
  assert config.local.keep_optimizer is bool(KEEPS[name])
  for keep in (True, False):
    config.local.keep_optimizer = keep
    if keep and name not in CAN_KEEP:
      with pytest.raises(ValueError, match='begins the optimiser anew in each'):
        check(config)
    else:
      check(config)


@functools.cache
def alone(name, keep, **options):
  """The model and the state of a lone client after three rounds."""
  federation = tiny_federation(
      (1,),
      1,
      norm=False,
      local=tiny_local(optax.adam, epochs=1, keep_optimizer=keep),
  )
  algorithm = ALGORITHMS[name](federation, **options)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=1, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  for _ in range(3):
    state, _ = run_round(
        state, tiny_data((8,)), jax.random.key(1), jax.random.key(2)
    )
  client = jax.tree.map(lambda leaf: leaf[0], state.clients['tiny1'])
  (group,) = federation.groups
  return algorithm.client_model(state.server, client, group), client


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        ('fedavg', {}),
        ('fedprox', dict(mu=0.0)),
        ('fedasync', dict(alpha=1.0, mu=0.0)),
    ],
)
def test_a_client_alone_trains_as_if_private(name, options):
  """The mean of one client is its model, whatever its optimiser does."""
  kept, anew = (alone('private', keep)[0] for keep in (True, False))
  gap = jax.tree.map(lambda a, b: np.abs(a - b).max(), kept, anew)
  assert max(jax.tree.leaves(gap)) > 1e-3
  for keep, want in ((True, kept), (False, anew)):
    got, client = alone(name, keep, **options)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        got,
        want,
    )
    # Three rounds of two steps; nothing is kept unless `keep`.
    assert [int(s.count) for s in states(client)] == [6] * keep
