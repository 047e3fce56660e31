"""InCoAvg's correction by hand, a round against NumPy, and beside FedAvg."""

from flax.traverse_util import flatten_dict
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.exchange import Delta
from fedjax_het.algorithms import fedavg, incoavg
from fedjax_het.algorithms.incoavg import RULES, corrected, layer_pairs
from fedjax_het.engine import rounds
from fedjax_het.engine.projection import project_gradient
from fedjax_het.engine.types import Federation, Group, Received
from fedjax_het.models import create
from fedjax_het.models.blocks import Block, BlockModel, Variables
from tests.algorithms.test_scaffold import oracle_gradient, rounds_of
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  Dense,
  preprocess,
  server_step,
  tiny_data,
  tiny_federation,
  tiny_local,
  tiny_model,
)
from tests.trees import assert_trees

BOUNDS = dict(max_ratio=5.0, max_change=0.1)
WIDE = dict(max_ratio=5.0, max_change=1e9)


def vector(g, reference, rule, **bounds):
  return corrected(jnp.array(g), jnp.array(reference), rule=rule, **bounds)


@pytest.mark.parametrize(
    ('g', 'reference', 'rule', 'want'),
    [
        # beta = -8, alpha = 25; where beta < 0, 'code' and 'paper' agree.
        ([-4.0, 1.0], [3.0, 4.0], 'theorem', [-3.04, 2.28]),
        ([-4.0, 1.0], [3.0, 4.0], 'code', [-3.549538, 2.274097]),
        ([-4.0, 1.0], [3.0, 4.0], 'paper', [-3.549538, 2.274097]),
        # beta = 16.
        ([4.0, 1.0], [3.0, 4.0], 'theorem', [4.0, 1.0]),
        ([0.04, 0.01], [0.03, 0.04], 'code', [0.061770, 0.034419]),
        ([0.04, 0.01], [0.03, 0.04], 'paper', [0.026737, -0.012292]),
        # |beta| / alpha = 50 counts as 5.
        ([0.05, 0.02], [0.001, 0.0], 'code', [0.162593, 0.010186]),
        ([0.05, 0.02], [0.001, 0.0], 'paper', [-0.111651, 0.010186]),
        ([-0.05, 0.02], [0.001, 0.0], 'code', [0.111651, 0.010186]),
        ([-0.05, 0.02], [0.001, 0.0], 'paper', [0.111651, 0.010186]),
        # alpha = 1e-8 and beta = 3e-8: theta = 3e-8 / (1e-8 + 1e-7).
        ([3e-4, 0.0], [1e-4, 0.0], 'code', [2.544243e-4, 0.0]),
        # Equal changes, no change of the reference, no change.
        ([3.0, 4.0], [3.0, 4.0], 'code', [6.0, 8.0]),
        ([3.0, 4.0], [0.0, 0.0], 'code', [1.5, 2.0]),
        ([3.0, 4.0], [0.0, 0.0], 'theorem', [3.0, 4.0]),
        ([0.0, 0.0], [3.0, 4.0], 'code', [0.0, 0.0]),
        ([0.0, 0.0], [0.0, 0.0], 'paper', [0.0, 0.0]),
    ],
)
def test_vectors_by_hand(g, reference, rule, want):
  got = vector(g, reference, rule, **WIDE)
  # The constants 1e-7 matter where a change is small.
  np.testing.assert_allclose(got, want, rtol=3e-4, atol=1e-6)


def test_changes_are_bounded_but_by_the_theorem():
  for rule in ('code', 'paper'):
    got = vector([-4.0, 1.0], [3.0, 4.0], rule, **BOUNDS)
    np.testing.assert_allclose(got, [-0.1, 0.1])
  got = vector([0.05, 0.02], [0.001, 0.0], 'code', **BOUNDS)
  np.testing.assert_allclose(got, [0.1, 0.010186], rtol=1e-4)
  got = vector([-4.0, 1.0], [3.0, 4.0], 'theorem', **BOUNDS)
  np.testing.assert_allclose(got, [-3.04, 2.28], rtol=1e-6)


def test_the_theorem_is_a_projection():
  """It equals the engine's, with G_in = g_l and G_local = g_0."""
  rng = np.random.default_rng(0)
  signs = set()
  for g, reference in rng.normal(0, 1, (8, 2, 6)).astype(np.float32):
    want = project_gradient(g, reference, rule='exact')
    got = vector(g, reference, 'theorem', **BOUNDS)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    signs.add(np.sign(g @ reference))
  assert signs == {-1, 1}


# The correction in NumPy, of each column of a matrix by itself.


def oracle_columns(g, reference, rule, max_ratio):
  """Corrected changes [D, N], with the default `max_change` of 0.1."""
  new = np.zeros_like(g)
  for n in range(g.shape[1]):
    a, b = g[:, n], reference[:, n]
    alpha, beta = b @ b, b @ a
    if rule == 'theorem':
      new[:, n] = a if beta >= 0 else a - beta / alpha * b
      continue
    theta = min(abs(beta) / (alpha + 1e-7), max_ratio)
    if rule == 'paper':
      theta = -np.sign(beta) * theta
    size_a, size_b = np.linalg.norm(a), np.linalg.norm(b)
    u = a / (size_a + 1e-7) + theta * b / (size_b + 1e-7)
    new[:, n] = np.clip(u * (size_a + size_b) / 2, -0.1, 0.1)
  return new


def oracle_correction(g, reference, rule, max_ratio=5):
  """Corrects each h x w kernel of [h, w, i, o], and other leaves as a whole."""
  rows = -1 if g.ndim != 4 else g.shape[0] * g.shape[1]
  shape = (g.size, 1) if rows == -1 else (rows, -1)
  g64, ref64 = (np.float64(a).reshape(shape) for a in (g, reference))
  return oracle_columns(g64, ref64, rule, max_ratio).reshape(g.shape)


@pytest.mark.parametrize('rule', RULES)
def test_kernels_are_corrected_one_by_one(rule):
  rng = np.random.default_rng(1)
  g, reference = rng.normal(0, 0.05, (2, 3, 3, 4, 5)).astype(np.float32)
  got = corrected(jnp.array(g), jnp.array(reference), rule=rule, **BOUNDS)
  want = oracle_correction(g, reference, rule)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
  # Another reference kernel (1, 2) changes only that kernel.
  reference[:, :, 1, 2] *= -1.5
  other = corrected(jnp.array(g), jnp.array(reference), rule=rule, **BOUNDS)
  changed = np.any(np.asarray(other != got), axis=(0, 1))
  assert set(zip(*np.nonzero(changed), strict=True)) == {(1, 2)}


# The pairs of leaves.


def test_the_pairs_of_a_resnet26():
  params = create('resnet26', (32, 32, 3), 10).abstract_variables.params
  pairs = layer_pairs(params)
  want = {
      (f'stage{s}_block{b}', f'conv{c}', 'kernel'): (
          f'stage{s}_block0', 'conv2', 'kernel',
      )
      for s in (1, 2, 3, 4) for b in (1, 2) for c in (1, 2)
  }  # fmt: skip
  assert dict(pairs) == want and len(pairs) == 16
  shapes = [params[key][conv][leaf].shape for (key, conv, leaf), _ in pairs]
  assert sum(i * o for _, _, i, o in shapes) == 1_392_640
  assert sum(h * w * i * o for h, w, i, o in shapes) == 12_533_760


def test_the_pairs_of_other_nets():
  vit = create('mini_vit4', (8, 8, 1), 10).abstract_variables.params
  assert dict(layer_pairs(vit)) == {
      (f'encoder{i:02d}', 'norm2', 'scale'): (
          f'encoder{i:02d}', 'norm1', 'scale'
      )
      for i in range(4)
  }  # fmt: skip
  mlp = create('mlp', (8, 8, 1), 10, depth=4).abstract_variables.params
  assert dict(layer_pairs(mlp)) == {
      (f'layer{i}', 'linear', 'kernel'): ('layer1', 'linear', 'kernel')
      for i in (2, 3)
  }
  cnn = create('simple_cnn', (32, 32, 3), 10).abstract_variables.params
  assert not layer_pairs(cnn)
  resnet10 = create('resnet10', (32, 32, 3), 10).abstract_variables.params
  assert not layer_pairs(resnet10)


@pytest.mark.parametrize('name', ['mini_vit4', 'mini_resnet10'])
def test_the_pairs_of_a_net_made_of_modules_are_the_nets_own(name):
  net = create(name, (8, 8, 3), 10)
  made = BlockModel.from_module(
      dict(net.blocks), (8, 8, 3), 10, name='made', head=False
  )

  def pairs(model):
    return [
        tuple(tuple(n for n in path if n != 'module') for path in pair)
        for pair in layer_pairs(model.abstract_variables.params)
    ]

  assert pairs(made) == pairs(net) != []


def test_the_first_of_a_shape_in_the_order_of_numbers():
  def block(**shapes):
    return {
        name: dict(kernel=jax.ShapeDtypeStruct(shape, jnp.float32))
        for name, shape in shapes.items()
    }

  params = {
      'a/s10': block(conv1=(3, 3, 8, 4), conv2=(3, 3, 4, 4)),
      'a/s2': block(conv1=(3, 3, 8, 4), conv3=(1, 1, 2, 4)),
      'a/s1': block(conv3=(1, 1, 2, 4), conv_shortcut=(1, 1, 2, 4)),
      'b/s3': block(conv1=(3, 3, 8, 4)),
      's': block(conv1=(3, 3, 8, 4)),
  }
  assert dict(layer_pairs(params)) == {
      ('a/s2', 'conv3', 'kernel'): ('a/s1', 'conv3', 'kernel'),
      ('a/s10', 'conv1', 'kernel'): ('a/s2', 'conv1', 'kernel'),
  }


@pytest.mark.parametrize('leaf,want', [
    ('kernel', {('layer2', 'kernel'): ('layer1', 'kernel')}),
    ('scale', {}),
])  # fmt: skip
def test_blocks_of_one_leaf(leaf, want):
  layer = {leaf: jax.ShapeDtypeStruct((4, 4), jnp.float32)}
  assert dict(layer_pairs({'layer1': layer, 'layer2': layer})) == want


# The server alone, from uploads made by hand.


def random_like(tree, seed, size=0.05):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda leaf: jnp.asarray(rng.normal(0, size, leaf.shape), jnp.float32),
      tree,
  )


@pytest.fixture(scope='module')
def resnets():
  """ResNet14 and ResNet26 at 1/32 of the width."""
  groups = tuple(
      Group(
          f'resnet{depth}',
          create(f'resnet{depth}', (8, 8, 1), 3, width=1 / 32, stem='cifar'),
          np.array([i]),
      )
      for i, depth in enumerate((14, 26))
  )
  return Federation(groups, tiny_local())


def uploads(federation, weights):
  """Random sums of changes; weight 0 for a group that sends nothing."""
  received = {}
  for i, (group, p) in enumerate(zip(federation.groups, weights)):
    change = random_like(group.model.abstract_variables, i)
    change = jax.tree.map(lambda d, p=p: p * d, change)
    received[group.name] = Received(
        Delta(*change, jnp.float32(p)), None, group.client_ids
    )
  return received


def after(algorithm, server, received):
  return jax.device_get(
      jax.jit(lambda server: server_step(algorithm, server, received))(server)
  )


@pytest.fixture(scope='module')
def server(resnets):
  return random_like(resnets.groups[1].model.abstract_variables, 5, 1.0)


@pytest.fixture(scope='module')
def plain(resnets, server):
  """FedAvg's server after one and three clients' uploads."""
  return after(fedavg(resnets), server, uploads(resnets, (1, 3)))


@pytest.mark.parametrize('rule', RULES)
def test_the_servers_step_in_numpy(resnets, server, plain, rule):
  ratio = 0.05  # So small that it takes effect.
  algorithm = incoavg(resnets, rule=rule, max_ratio=ratio)
  got = after(algorithm, server, uploads(resnets, (1, 3)))
  pairs = dict(layer_pairs(server.params))
  assert len(pairs) == 16
  # All else is FedAvg's, bit for bit: statistics, stem, first blocks, norms.
  assert_trees(got.stats, plain.stats, rtol=0)
  mean = jax.tree.map(lambda a, b: a - b, plain.params, server.params)
  for key, tree in got.params.items():
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      names = (key, *(entry.key for entry in path))
      x, g, want = (
          np.asarray(tree_at(part, names))
          for part in (server.params, mean, plain.params)
      )
      if names in pairs:
        reference = np.asarray(tree_at(mean, pairs[names]))
        want = x + oracle_correction(g, reference, rule, ratio)
        # The mean above is a difference of rounded numbers.
        np.testing.assert_allclose(leaf, want, rtol=1e-5, atol=2e-5)
      else:
        np.testing.assert_array_equal(leaf, want)


def tree_at(tree, names):
  for name in names:
    tree = tree[name]
  return tree


def test_the_owners_of_the_five_resnets():
  """All changes are positive, so that 'theorem' leaves the owners' mean.

  The changes 1, 2, 4, 8 and 16 tell the owners from their sum.
  """
  depths = (10, 14, 18, 22, 26)
  federation = Federation(
      tuple(
          Group(
              f'resnet{depth}',
              create(f'resnet{depth}', (8, 8, 1), 3, width=1 / 64),
              np.array([i]),
          )
          for i, depth in enumerate(depths)
      ),
      tiny_local(),
  )

  def full(tree, value):
    return jax.tree.map(lambda a: np.full(a.shape, value, a.dtype), tree)

  algorithm = incoavg(federation, rule='theorem')
  start = full(jax.eval_shape(algorithm.init, jax.random.key(0)), 0.0)
  received = {}
  for i, group in enumerate(federation.groups):
    sent = full(algorithm.downlink(start, group, None), 2.0**i)
    received[group.name] = Received(Delta(*sent, np.float32(1)), None, None)
  got = after(algorithm, start, received)
  largest = federation.groups[-1].model.abstract_variables.params
  owners = dict.fromkeys(largest, depths)
  owners |= dict.fromkeys(('stage1_block1', 'stage2_block1'), (18, 22, 26))
  owners |= dict.fromkeys(('stage1_block2', 'stage2_block2'), (26,))
  owners |= dict.fromkeys(('stage3_block1', 'stage4_block1'), (14, 18, 22, 26))
  owners |= dict.fromkeys(('stage3_block2', 'stage4_block2'), (22, 26))
  assert got.params.keys() == owners.keys()
  for tree in (got.params, got.stats):
    for key, block in tree.items():
      want = np.mean([2.0 ** depths.index(depth) for depth in owners[key]])
      for leaf in jax.tree.leaves(block):
        np.testing.assert_allclose(leaf, want, rtol=1e-6)


def test_a_kernel_of_the_reference_corrects_the_same_kernel(resnets, server):
  """Only its own, in the later blocks of its stage."""
  algorithm, received = incoavg(resnets), uploads(resnets, (1, 3))
  update = jax.jit(lambda received: server_step(algorithm, server, received))
  old = flatten_dict(jax.device_get(update(received).params))
  change = received['resnet26'].summed.change
  conv2 = change['stage4_block0']['conv2']
  conv2['kernel'] = conv2['kernel'].at[:, :, 3, 5].multiply(-1.5)
  new, moved = flatten_dict(jax.device_get(update(received).params)), {}
  for path, leaf in new.items():
    differs = np.any(leaf != old[path], axis=tuple(range(leaf.ndim))[:2])
    if np.any(differs):
      moved[path] = np.argwhere(differs).tolist()
  later = ('stage4_block1', 'stage4_block2')
  want = {(block, f'conv{c}', 'kernel') for block in later for c in (1, 2)}
  want.add(('stage4_block0', 'conv2', 'kernel'))
  assert moved == {path: [[3, 5]] for path in want}


def test_blocks_that_nobody_sent_stay(resnets, server):
  received = uploads(resnets, (2, 0))
  got = after(incoavg(resnets), server, received)
  assert_trees(
      got.params['stage1_block1'], server.params['stage1_block1'], rtol=0
  )
  want = after(fedavg(resnets), server, received)
  moved = got.params['stage3_block1']['conv1']['kernel']
  assert np.max(np.abs(moved - server.params['stage3_block1']['conv1'][
      'kernel'])) <= 0.1 + 1e-5  # fmt: skip
  assert np.any(moved != want.params['stage3_block1']['conv1']['kernel'])


def test_a_reference_that_nobody_sent_corrects_nothing():
  """The only sender has mid1 but not mid0."""
  blocks = (
      Block('stem', Dense(4)),
      Block('mid1', Dense(4)),
      Block('head', Dense(NUM_CLASSES, relu=False)),
  )
  odd = BlockModel('odd', blocks, SHAPE, NUM_CLASSES, (1, 2))
  federation = Federation(
      (Group('tiny', tiny_model(2, norm=False), np.array([0])),
       Group('odd', odd, np.array([1]))),
      tiny_local(),
  )  # fmt: skip
  start = random_like(
      federation.groups[0].model.abstract_variables, 3, 1.0
  )
  received = uploads(federation, (0, 1))
  got, want = (
      after(make(federation), start, received) for make in (incoavg, fedavg)
  )
  assert_trees(got, want, rtol=0)


@pytest.mark.parametrize('rule', RULES)
def test_no_change_remains_no_change(rule):
  federation = tiny_federation((2, 3), 1, norm=False)
  start = random_like(federation.groups[1].model.abstract_variables, 3, 1.0)
  received = jax.tree.map(
      lambda leaf: leaf * 0, uploads(federation, (1, 1))
  )
  one = {
      name: r._replace(summed=r.summed._replace(weight=jnp.float32(1)))
      for name, r in received.items()
  }
  got = after(incoavg(federation, rule=rule), start, one)
  assert_trees(got, jax.device_get(start), rtol=0)


# Whole rounds.


def test_without_pairs_it_is_fedavg_bit_for_bit():
  """All clients hold one net with one layer in a stage."""
  federation = tiny_federation((1,), 4, local=tiny_local(epochs=1))
  data = tiny_data((5, 8, 3, 7))
  got, want = (
      rounds_of(make(federation), federation, data, 2, 3)[-1]
      for make in (incoavg, fedavg)
  )
  assert_trees(got, want, rtol=0, atol=0)


@pytest.mark.parametrize('aggregation', ['layerwise', 'architecture'])
def test_one_round_in_numpy(aggregation):
  """Depths 2 and 3, three full-batch steps, means, then the correction."""
  federation = tiny_federation(
      (2, 3), norm=False, local=tiny_local(optax.sgd, 0.1, 3, 8)
  )
  data = tiny_data((5, 8, 3, 7))
  algorithm = incoavg(federation, aggregation=aggregation)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  params = random_like(state.server.params, 4, 0.5)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  x = dense(jax.device_get(params))
  new, _ = run_round(
      state._replace(server=Variables(params, {})), data, jax.random.key(1),
      jax.random.key(2),
  )  # fmt: skip
  images = np.asarray(preprocess(data.images), np.float64)
  changes = {key: [] for key in x}
  for group in federation.groups:
    names = list(group.model.block_names)
    prefix = '' if aggregation == 'layerwise' else f'{group.name}/'
    for k in group.client_ids.tolist():
      index = np.asarray(data.index[k, : data.sizes[k]])
      batch = (
          images[index].reshape(len(index), -1), np.asarray(data.labels)[index]
      )
      y = {n: dict(x[prefix + n]) for n in names}
      for _ in range(3):
        grads = oracle_gradient(y, names, *batch)
        for n in names:
          y[n] = {i: y[n][i] - 0.1 * grads[n][i] for i in y[n]}
      for n in names:
        old = x[prefix + n]
        changes[prefix + n].append({i: y[n][i] - old[i] for i in old})
  g = {
      key: {i: np.mean([d[i] for d in sent], axis=0) for i in x[key]}
      for key, sent in changes.items()
  }
  want = {key: {i: x[key][i] + g[key][i] for i in x[key]} for key in x}
  later = [key for key in x if key.endswith(('mid1', 'mid2'))]
  assert len(later) == (2 if aggregation == 'layerwise' else 3)
  for key in later:
    reference = g[key[:-1] + '0']['kernel']
    u = oracle_correction(g[key]['kernel'], reference, 'code')
    assert np.max(np.abs(u - g[key]['kernel'])) > 1e-3
    want[key]['kernel'] = x[key]['kernel'] + u
  assert_trees(dense(new.server.params), want, rtol=1e-5, atol=1e-5)


def dense(tree):
  """The tree in float64, without Flax's layer names."""
  return {
      n: {i: np.float64(leaf) for i, leaf in block['Dense_0'].items()}
      for n, block in tree.items()
  }


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(rule='sign'), 'rule'),
        (dict(max_ratio=np.nan), 'max_ratio must be'),
        (dict(max_ratio=0.0), 'max_ratio must be'),
        (dict(max_change=np.inf), 'max_change must be'),
        (dict(max_change=-0.1), 'max_change must be'),
    ],
)
def test_wrong_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    incoavg(tiny_federation(), **options)
