"""Exchange: what travels, means over owners, server steps, refusals."""

import dataclasses
import math
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation import exchange as ex
from fedjax_het.aggregation.server import (
    SERVER_OPTIMIZERS,
    init_server_step,
    make_server_optimizer,
    server_step,
    server_variables,
    weighted_mean,
)
from fedjax_het.aggregation.sharing import Sharing, ends_only
from fedjax_het.engine.types import Federation, Group
from fedjax_het.models.blocks import Block, BlockModel, Variables
from tests.test_docs import ROOT, examples, execute
from tests.tiny import (
    one_model_federation,
    tiny_federation,
    tiny_local,
    tiny_model,
)


def stub_group(name, ids, sizes, stats=()):
  """A stub group: only block names and shapes matter."""
  leaf = lambda n: jax.ShapeDtypeStruct((n,), jnp.float32)  # noqa: E731
  variables = Variables(
      {block: {'w': leaf(n)} for block, n in sizes.items()},
      {block: {'mean': leaf(1), 'var': leaf(1)} for block in stats},
  )
  model = mock.Mock(
      spec=BlockModel,
      abstract_variables=variables,
      intermediate=tuple(sizes)[1:-1],
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
def test_coefficients(weights, want):
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


@pytest.mark.parametrize(
    'options,want',
    [
        (dict(server_lr=0.2), 1.2),
        (dict(server_lr=0.2, server_momentum=0.5), 1.2),
        (dict(server_lr=0.2, server_optimizer='adam'), 1 + 0.2 * 0.1 / 0.10105),
    ],
)
def test_the_server_steps_on_parameters_but_not_on_statistics(options, want):
  group = stub_group('g', [0], {'a': 1}, stats=['a'])
  exchange = ex.make_exchange(
      Federation((group,), tiny_local()), 'layerwise', **options
  )
  before = Variables(
      {'a': {'w': jnp.array([1.0])}},
      {'a': {'mean': jnp.array([1.0]), 'var': jnp.array([1.0])}},
  )
  after = Variables(
      {'a': {'w': jnp.array([2.0])}},
      {'a': {'mean': jnp.array([3.0]), 'var': jnp.array([2.0])}},
  )
  server = before
  if len(options) > 1:
    opt_state = init_server_step(exchange.tx, before.params)
    server = ex.Optimized(before, opt_state)
  delta = send(exchange, group, before, after)
  new = server_variables(exchange.average(server, {'g': delta}))
  np.testing.assert_allclose(new.params['a']['w'], [want], rtol=1e-4)
  np.testing.assert_allclose(new.stats['a']['mean'], [3.0], rtol=1e-6)
  np.testing.assert_allclose(new.stats['a']['var'], [2.0], rtol=1e-6)


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


@pytest.mark.parametrize(
    ('aggregation', 'local_stats', 'want'),
    [
        ('layerwise', False, True),
        # The means stay inside a group, or blocks or statistics on a client.
        ('architecture', False, False),
        ('classifier', False, False),
        ('layerwise', True, False),
    ],
)
def test_one_model_serves_groups_that_share_all_of_it(
    aggregation, local_stats, want
):
  federation = one_model_federation(num_groups=2)
  federation = dataclasses.replace(federation, local_stats=local_stats)
  assert ex.make_exchange(federation, aggregation).one_model == want
  # Of two architectures with common blocks each has its own model.
  assert not ex.make_exchange(tiny_federation(), 'layerwise').one_model


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
  assert exchange.personal == (name in ('ends', 'classifier', 'none'))


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


def test_a_group_that_shares_nothing_is_named_in_a_warning(caplog):
  one, two = tiny_model(1), tiny_model(2)
  blocks = [Block(f'other_{block.name}', block.module) for block in one.blocks]
  other = dataclasses.replace(one, name='other', blocks=tuple(blocks))

  def warned(models, aggregation):
    caplog.clear()
    groups = tuple(
        Group(f'g{i}', model, np.array([i])) for i, model in enumerate(models)
    )
    ex.make_exchange(Federation(groups, tiny_local()), aggregation)
    return [record.getMessage() for record in caplog.records]

  (line,) = warned((one, two, other), 'layerwise')
  assert line.startswith('Group g2 shares no block with another group: ')
  assert len(warned((one, other), 'ends')) == 2
  for models, aggregation in (
      ((one, two), 'classifier'), ((other,), 'layerwise'),
      ((one, two, other), 'architecture'), ((one, other), 'none'),
  ):  # fmt: skip
    assert not warned(models, aggregation)


@pytest.mark.parametrize(
    'kwargs,message',
    [
        (dict(aggregation='layer'), "^Unknown aggregation 'layer'"),
        (dict(aggregation='none', weights='n'), "^Unknown weights 'n'"),
        (dict(aggregation='none', server_lr=0), 'server_lr must be above 0'),
        (
            dict(aggregation='none', server_optimizer='lamb'),
            "^Unknown server_optimizer 'lamb'",
        ),
        (
            dict(aggregation='none', server_momentum=1.0),
            'server_momentum must be at least 0 and below 1, got 1.0',
        ),
    ]
    + [
        (dict({'aggregation': 'none', name: value}), f'^{name} must be ')
        for name in ('server_lr', 'server_momentum', 'server_eps')
        for value in (math.nan, math.inf, -math.inf, -1.0)
    ],
)
def test_options_are_checked(kwargs, message):
  with pytest.raises(ValueError, match=message):
    ex.make_exchange(tiny_federation(), **kwargs)


def test_any_tree_is_split_and_joined():
  """Trees of some blocks, under a sharing that keeps the middle block."""
  group = stub_group('g', [0], {'a': 1, 'b': 1, 'c': 1})
  sharing = Sharing(lambda g, n: {'a': 'A', 'c': 'C'}.get(n))
  for tree in (dict(a=1, b=2, c=3), dict(b=2, c=3), dict(a=1), {}):
    shared, own = sharing.split(group, tree)
    assert set(shared) == {n.upper() for n in tree if n != 'b'}
    assert set(own) == set(tree) & {'b'}
    assert sharing.join(group, own, shared) == tree
  # A group picks its own part of a server's tree, and joins nothing else.
  server = dict(A=1, C=3, D=4)
  assert sharing.pick(group, server) == dict(A=1, C=3)
  assert sharing.join(group, (), server) == dict(a=1, c=3)


def test_a_sharing_splits_both_parts_of_variables():
  group = stub_group('g', [0], {'a': 1, 'b': 1, 'c': 1}, stats=['a', 'b'])
  tree = Variables(dict(a=1, b=2, c=3), dict(a=4, b=5))
  for local_stats, shared_stats in ((False, dict(a=4)), (True, {})):
    sharing = Sharing(ends_only, local_stats)
    shared, own = sharing.split(group, tree)
    assert shared == (dict(a=1, c=3), shared_stats)
    assert sharing.join(group, own, shared) == tree
    assert sharing.pick(group, tree) == shared


def test_a_mean_says_who_was_sent():
  sums = [
      (dict(a=jnp.array([2.0, 4.0]), b=jnp.array(3.0)), jnp.float32(2.0)),
      (dict(a=jnp.array([4.0, 8.0])), jnp.float32(1.0)),
      (dict(c=jnp.array([9.0])), jnp.float32(0.0)),
  ]
  mean, sent = weighted_mean(sums)
  np.testing.assert_allclose(mean['a'], [2.0, 4.0])
  np.testing.assert_allclose(mean['b'], 1.5)
  np.testing.assert_array_equal(mean['c'], [0.0])
  assert {k: bool(v) for k, v in sent.items()} == dict(a=True, b=True, c=False)


def test_means_of_classes_and_of_single_numbers():
  """Coefficients per class, and per entry of a leaf."""
  protos = jnp.arange(6.0).reshape(3, 2)
  counts = jnp.array([2.0, 0.0, 4.0])
  mean, sent = weighted_mean([(dict(z=protos), dict(z=counts))] * 2)
  np.testing.assert_allclose(mean['z'], [[0, 0.5], [0, 0], [1, 1.25]])
  np.testing.assert_array_equal(sent['z'], [True, False, True])
  held = dict(x=dict(w=jnp.array([1.0, 2.0]), b=jnp.float32(0.0)))
  total = dict(x=dict(w=jnp.array([3.0, 3.0]), b=jnp.float32(0.0)))
  mean, sent = weighted_mean([(total, held)])
  np.testing.assert_allclose(mean['x']['w'], [3.0, 1.5])
  assert not sent['x']['b']


def steps(name, changes, x=0.0, sent=True, **options):
  """Values of one parameter after each server step, and the last state."""
  tx = make_server_optimizer(name, **options)
  params = dict(k=jnp.float32(x))
  state, seen = init_server_step(tx, params), []
  for change in changes:
    params, state = server_step(
        tx, params, state, dict(k=jnp.float32(change)), dict(k=jnp.bool_(sent))
    )
    seen.append(float(params['k']))
  return seen, state['k']


@pytest.mark.parametrize(
    'sent,rows',
    [
        ([[1, 0], [1, 0]], [[1, 0], [1, 0]]),  # Single entries.
        ([0, 1], [[0, 0], [1, 1]]),  # Rows.
        (1, [[1, 1], [1, 1]]),
    ],
)
@pytest.mark.parametrize('name', ['momentum', 'adam', 'counted'])
def test_entries_that_nobody_sent_keep_values_and_moments(name, sent, rows):
  """The other entries move as if all had been sent."""
  tx = dict(
      momentum=make_server_optimizer(momentum=0.9),
      adam=make_server_optimizer('adam', 0.1),
      counted=optax.adam(0.1),  # With a step count.
  )[name]
  x = dict(k=dict(w=jnp.array([[1.0, 2], [3, 4]])))
  mean = dict(k=dict(w=jnp.array([[0.5, 1], [2, 3]])))
  whole = dict(k=jnp.bool_(True))
  before = server_step(tx, x, init_server_step(tx, x), mean, whole)
  want = server_step(tx, *before, mean, whole)
  sent = dict(k=dict(w=jnp.array(sent, bool)))
  got = server_step(tx, *before, mean, sent)
  for old, new, mine in zip(*map(jax.tree.leaves, (before, want, got))):
    moved = jnp.array(rows, bool) if old.shape else True
    np.testing.assert_array_equal(mine, jnp.where(moved, new, old))
    assert np.any(new != old)
  none = dict(k=dict(w=jnp.zeros((2, 2), bool)))
  after = server_step(tx, *before, mean, none)
  jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize(
    'name,options,want,v',
    [
        ('adam', {}, 0.00980202, 0.00250099),
        ('yogi', {}, 0.00980200, 0.002501),
        # sqrt(0.25 + 1e-6) + 1e-3 in place of 0.501.
        ('adagrad', {}, 0.005 / 0.501001, 0.250001),
        ('adam', dict(momentum=0.0), 0.0980202, 0.00250099),
    ],
)
def test_one_adaptive_step_by_hand(name, options, want, v):
  """Reddi et al.: D = 0.5, lr = 0.01, tau = 1e-3, from v = tau^2."""
  seen, state = steps(name, [0.5], learning_rate=0.01, **options)
  np.testing.assert_allclose(seen, [want], rtol=1e-6)
  np.testing.assert_allclose(state.v, v, rtol=1e-6)
  beta = options.get('momentum', 0.0 if name == 'adagrad' else 0.9)
  np.testing.assert_allclose(state.m, -0.5 * (1 - beta), rtol=1e-6)


@pytest.mark.parametrize(
    'name,change,want',
    [
        ('adam', 0.1, 0.002575), ('adam', 0.01, 0.002476),
        ('yogi', 0.1, 0.0026), ('yogi', 0.01, 0.002499),
    ],
)  # fmt: skip
def test_yogi_forgets_slowly(name, change, want):
  """The second moment after another change, from about 0.0025."""
  _, state = steps(name, [0.5, change], learning_rate=0.01, eps=1e-8)
  np.testing.assert_allclose(state.v, want, rtol=1e-5)


def test_momentum_and_plain_steps_by_hand():
  """FedAvgM: 0.5, then 0.95 more; b = 0 is x + D bit for bit."""
  seen, _ = steps('sgd', [0.5, 0.5], momentum=0.9)
  np.testing.assert_allclose(seen, [0.5, 1.45], rtol=1e-6)
  for options in ({}, dict(momentum=0.0)):
    seen, state = steps('sgd', [0.1, 0.2], x=0.7, **options)
    first = np.float32(0.7) + np.float32(0.1)
    assert seen == [first, first + np.float32(0.2)]
    assert not jax.tree.leaves(state)


def test_adam_beside_optax():
  """m equals optax's; v is optax's plus the decayed v_0 = tau^2."""
  changes = [0.5, -0.2, 0.3]
  seen, state = steps('adam', changes, learning_rate=0.01)
  tx = optax.adam(0.01, 0.9, 0.99)
  theirs = tx.init(jnp.float32(0.0))
  for change in changes:
    _, theirs = tx.update(jnp.float32(-change), theirs)
  np.testing.assert_allclose(state.m, theirs[0].mu, rtol=1e-6)
  v = theirs[0].nu + 0.99**3 * 1e-6
  np.testing.assert_allclose(state.v, v, rtol=1e-6)
  last = -0.01 * state.m / (np.sqrt(v) + 1e-3)
  np.testing.assert_allclose(seen[2] - seen[1], last, rtol=1e-4)


def test_adam_from_zero_is_optax_with_another_rate_and_eps():
  """With v_0 near 0 it is optax's Adam at rescaled lr and eps.

  lr = lr_optax sqrt(1 - b2^t) / (1 - b1^t), tau = eps_optax sqrt(1 - b2^t).
  """
  tau, changes = 1e-9, [0.5, -0.2, 0.3]
  seen, _ = steps('adam', changes, learning_rate=0.01, eps=tau)
  theirs, x = optax.scale_by_adam(0.9, 0.99, tau).init(jnp.float32(0.0)), 0.0
  for t, (change, got) in enumerate(zip(changes, seen), 1):
    root = np.sqrt(1 - 0.99**t)
    tx = optax.scale_by_adam(0.9, 0.99, tau / root)
    update, theirs = tx.update(jnp.float32(-change), theirs)
    x -= 0.01 * float(update) * (1 - 0.9**t) / root
    np.testing.assert_allclose(got, x, rtol=1e-4)


@pytest.mark.parametrize('name', SERVER_OPTIMIZERS)
def test_what_nobody_sent_keeps_its_values_and_moments(name):
  """Bit for bit, whatever the mean holds; the other blocks move."""
  groups = tuple(
      stub_group(f'g{i}', [i], sizes)
      for i, sizes in enumerate(({'l1': 1}, {'l1': 1, 'l2': 1}))
  )
  exchange = ex.make_exchange(
      Federation(groups, tiny_local()), 'layerwise', server_optimizer=name,
      server_momentum=0.5,
  )  # fmt: skip
  start = weights_of(l1=0.3, l2=0.7)
  server = ex.Optimized(start, init_server_step(exchange.tx, start.params))
  servers = [server]
  for senders in ({0, 1}, {0}, {0}):
    deltas = {}
    for i, group in enumerate(groups):
      before = exchange.download(servers[-1], group)
      after = jax.tree.map(lambda leaf: leaf + 0.1, before)
      deltas[group.name] = send(
          exchange, group, before, after, steps=int(i in senders)
      )
    servers.append(exchange.average(servers[-1], deltas))

  def parts(server, key):
    kept = server.variables.params[key], server.opt_state[key]
    return jax.tree.leaves(kept)

  first, second, third = servers[1:]
  assert parts(second, 'l2') == parts(first, 'l2') == parts(third, 'l2')
  assert parts(first, 'l2') != parts(server, 'l2')
  for a, b in zip(parts(second, 'l1'), parts(third, 'l1'), strict=True):
    assert a != b


def test_only_an_optimiser_with_a_state_changes_the_servers_structure():
  """Plain averaging keeps the tree that older checkpoints hold."""
  federation = tiny_federation()
  key = jax.random.key(0)
  plain = ex.make_exchange(federation, 'layerwise', server_lr=0.5).init(key)
  assert isinstance(plain, Variables)
  for options in (dict(server_optimizer='adam'), dict(server_momentum=0.1)):
    server = ex.make_exchange(federation, 'layerwise', **options).init(key)
    jax.tree.map(np.testing.assert_array_equal, server.variables, plain)
    assert set(server.opt_state) == set(plain.params)


def test_statistics_of_stale_uploads_do_not_add_up():
  """Two clients train from one x; their uploads arrive one after the other."""
  federation = tiny_federation((1,), 2)
  (group,) = federation.groups
  exchange = ex.make_exchange(federation, 'layerwise')
  x = exchange.init(jax.random.key(0))
  server = x
  for number in (1.0, 5.0):
    end = jax.tree.map(lambda leaf, n=number: leaf + n, x)
    _, delta = exchange.upload(group, x, end, jnp.int32(4), jnp.int32(1))
    server = exchange.average(server, {group.name: delta})
  # Parameters: x + d_1 + d_2; statistics: s_2.
  for field, moved in (('params', 6), ('stats', 5)):
    got, old = (jax.tree.leaves(getattr(tree, field)) for tree in (server, x))
    assert got
    for new, start in zip(got, old, strict=True):
      np.testing.assert_allclose(new, start + moved, rtol=1e-6)
  ended = ex.end_of(x, delta)
  for got, want in zip(jax.tree.leaves(ended), jax.tree.leaves(end)):
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_the_pieces_of_the_page_average_and_step():
  code = examples(ROOT / 'docs' / 'adding_an_algorithm.md')['pieces']
  federation = three_groups()
  tree = {name: {'w': jnp.ones(1)} for name in ('l1', 'l2')}
  change = jax.tree.map(lambda leaf: 4 * leaf, tree)
  tx = optax.sgd(1.0)
  found = execute(
      code,
      sharing=ex.make_exchange(federation, 'layerwise').sharing,
      group=federation.groups[1],
      groups=[types.SimpleNamespace(
          summed=types.SimpleNamespace(change=change, weight=jnp.array(2.0))
      )],
      weighted_mean=weighted_mean, server_step=server_step,
      tx=tx, tree=tree, params=tree, opt_state=init_server_step(tx, tree),
  )  # fmt: skip
  assert found['shared'] == found['tree'] == tree and not found['own']
  for block in found['params'].values():
    np.testing.assert_allclose(block['w'], 1 + 4 / 2)
