"""Layer-wise averaging: closed forms and refusals."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.aggregation import exchange as ex
from fedjax_het.engine.types import Federation, Group
from fedjax_het.models.blocks import Variables
from tests.tiny import tiny_federation, tiny_local, tiny_model


def stub_group(name, ids, sizes, stats=()):
  """A group of which only block names and shapes matter."""
  leaf = lambda n: jax.ShapeDtypeStruct((n,), jnp.float32)  # noqa: E731
  variables = Variables(
      {block: {'w': leaf(n)} for block, n in sizes.items()},
      {block: {'mean': leaf(1), 'var': leaf(1)} for block in stats},
  )
  model = types.SimpleNamespace(
      abstract_variables=variables, intermediate=tuple(sizes)[1:-1]
  )
  return Group(name, model, np.asarray(ids))


def three_groups(**kwargs):
  """Models that own {l1}, {l1, l2}, {l1, l2, l3}."""
  sizes = {'l1': 1, 'l2': 1, 'l3': 1}
  owned = [dict(list(sizes.items())[: i + 1]) for i in range(3)]
  groups = tuple(stub_group(f'g{i}', [i], o) for i, o in enumerate(owned))
  return Federation(groups, tiny_local(), **kwargs)


def weights_of(**leaves):
  return Variables({k: {'w': jnp.array([v])} for k, v in leaves.items()}, {})


def send(exchange, group, before, after, size=1, steps=1):
  return exchange.upload(group, before, after, size, jnp.int32(steps))[1]


def test_layerwise_mean_over_the_owners():
  """l1 = mean(1, 2, 3), l2 = mean(10, 20), l3 = 5 (FedIN v2 Eq. 19)."""
  federation = three_groups()
  exchange = ex.make_exchange(federation, 'layerwise')
  server = weights_of(l1=0.5, l2=0.5, l3=0.5)
  sent = [dict(l1=1.0), dict(l1=2.0, l2=10.0), dict(l1=3.0, l2=20.0, l3=5.0)]

  def average(senders):
    deltas = {}
    for i, (group, after) in enumerate(
        zip(federation.groups, sent, strict=True)
    ):
      before = exchange.download(server, group)
      steps = int(i in senders)
      deltas[group.name] = send(
          exchange, group, before, weights_of(**after), steps=steps
      )
    new = exchange.average(server, deltas).params
    return [float(new[k]['w'][0]) for k in ('l1', 'l2', 'l3')]

  np.testing.assert_allclose(average({0, 1, 2}), [2, 15, 5], rtol=1e-6)
  # Without the last client l3 keeps its value exactly.
  np.testing.assert_allclose(average({0, 1}), [1.5, 10, 0.5], rtol=1e-6)
  assert average(set()) == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    'weights,want', [('data', 0.76), ('uniform', 0.57)]
)
def test_weights(weights, want):
  """FedAvg's worked example: y = (0.19, 0.95), sizes 1 and 3."""
  groups = tuple(stub_group(f'g{i}', [i], {'l1': 1}) for i in range(2))
  exchange = ex.make_exchange(
      Federation(groups, tiny_local()), 'layerwise', weights
  )
  start = weights_of(l1=0.0)
  deltas = {
      g.name: send(exchange, g, start, weights_of(l1=y), size=n)
      for g, y, n in zip(groups, (0.19, 0.95), (1, 3), strict=True)
  }
  new = exchange.average(start, deltas)
  np.testing.assert_allclose(new.params['l1']['w'], [want], rtol=1e-6)


def test_server_lr_scales_weights_but_not_statistics():
  group = stub_group('g', [0], {'a': 1}, stats=['a'])
  exchange = ex.make_exchange(
      Federation((group,), tiny_local()), 'layerwise', server_lr=0.2
  )
  before = Variables(
      {'a': {'w': jnp.array([1.0])}},
      {'a': {'mean': jnp.array([1.0]), 'var': jnp.array([1.0])}},
  )
  after = Variables(
      {'a': {'w': jnp.array([2.0])}},
      {'a': {'mean': jnp.array([3.0]), 'var': jnp.array([-1.0])}},
  )
  new = exchange.average(before, {'g': send(exchange, group, before, after)})
  np.testing.assert_allclose(new.params['a']['w'], [1.2], rtol=1e-6)
  np.testing.assert_allclose(new.stats['a']['mean'], [3.0], rtol=1e-6)
  # A variance never falls below zero.
  np.testing.assert_allclose(new.stats['a']['var'], [0.0])


def test_one_architecture_layerwise_equals_per_architecture():
  """With a single group both sharings give the same numbers, bit for bit."""
  federation = tiny_federation(depths=(2,), per_group=3)
  group = federation.groups[0]
  results = []
  for name in ('layerwise', 'architecture'):
    exchange = ex.make_exchange(federation, name)
    server = exchange.init(jax.random.key(0))
    before = exchange.assemble(
        group, Variables({}, {}), exchange.download(server, group)
    )
    after = jax.tree.map(lambda x: x + 0.3, before)
    new = exchange.average(
        server, {group.name: send(exchange, group, before, after)}
    )
    results.append(
        exchange.assemble(
            group, Variables({}, {}), exchange.download(new, group)
        )
    )
  jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize('name', sorted(ex.SHARINGS))
def test_assemble_undoes_the_split(name):
  """Download and client part together are the group's initial model."""
  federation = tiny_federation()
  exchange = ex.make_exchange(federation, name)
  key = jax.random.key(3)
  server = exchange.init(key)
  for group in federation.groups:
    model = exchange.assemble(
        group,
        exchange.init_client(group, key),
        exchange.download(server, group),
    )
    jax.tree.map(
        np.testing.assert_array_equal, model, group.model.init(key)
    )
  assert exchange.personal == (name in ('ends', 'none'))


def test_local_statistics_stay_on_the_client():
  federation = tiny_federation(local_stats=True)
  exchange = ex.make_exchange(federation, 'layerwise')
  server = exchange.init(jax.random.key(0))
  assert not server.stats
  client = exchange.init_client(federation.groups[0], jax.random.key(0))
  assert set(client.stats) == {'stem', 'mid0'} and not client.params
  assert exchange.personal


def test_shared_blocks_of_other_shapes_are_refused():
  groups = (
      Group('narrow', tiny_model(1, width=4), np.array([0])),
      Group('wide', tiny_model(1, width=5), np.array([1])),
  )
  federation = Federation(groups, tiny_local())
  with pytest.raises(
      ValueError, match=r"Block 'head' is shared, but group 'wide' has.*5x3"
  ):
    ex.make_exchange(federation, 'layerwise')
  ex.make_exchange(federation, 'architecture')


@pytest.mark.parametrize(
    'kwargs,message',
    [
        (dict(aggregation='layer'), "^Unknown aggregation 'layer'"),
        (dict(aggregation='none', weights='n'), "^Unknown weights 'n'"),
        (dict(aggregation='none', server_lr=0), 'server_lr must be above 0'),
    ],
)
def test_options_are_checked(kwargs, message):
  with pytest.raises(ValueError, match=message):
    ex.make_exchange(tiny_federation(), **kwargs)
