"""DepthFL: levels, classifiers, losses by hand, a round in NumPy."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.averaging import average_weights
from fedjax_het.aggregation.exchange import Delta, make_exchange
from fedjax_het.algorithms import depthfl, fedavg
from fedjax_het.algorithms.depthfl import mutual_loss, prefixes, ramp_up
from fedjax_het.algorithms.depthfl.classifiers import (
  Attention,
  DepthwiseConv,
  Separable,
)
from fedjax_het.data.federated import Batch
from fedjax_het.engine import rounds
from fedjax_het.engine.local import fit
from fedjax_het.engine.needs import with_heads
from fedjax_het.engine.task import CLASSIFICATION, Task
from fedjax_het.engine.traffic import full_bytes
from fedjax_het.engine.types import Federation, Group, Received, Visit
from fedjax_het.models import create
from fedjax_het.models.vit import vit
from tests.algorithms import depthfl_numpy
from tests.algorithms.suite import Case
from tests.quadratics import quadratics
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  preprocess,
  server_step,
  tiny_data,
  tiny_local,
  with_group_options,
)
from tests.trees import assert_equal, assert_trees

SUITE = [Case({}, dict(tiny1=dict(exit='1/2')))]
SGD = tiny_local(optax.sgd, 0.1, 2, 8)


def federation_of(model, exits, per_group=1, **fields):
  """Groups g0, g1, ... of one model, with an exit each."""
  groups = tuple(
      Group(f'g{i}', model, np.arange(per_group) * len(exits) + i)
      for i in range(len(exits))
  )
  federation = Federation(groups, fields.pop('local', SGD), **fields)
  return with_heads(depthfl, with_group_options(federation, exit=exits))


def dense_net(names=None, **options):
  """Four numbered layers of four units; `names` renames all layers."""
  net = create('mlp', SHAPE, NUM_CLASSES, **(dict(depth=5, hidden=4) | options))
  if names is None:
    return net
  blocks = tuple(
      block._replace(name=name)
      for block, name in zip(net.blocks, names, strict=True)
  )
  return dataclasses.replace(net, blocks=blocks)


def two_stages(**options):
  """Layers a0 and b0, two stages of one layer."""
  return dense_net(('stem', 'a0', 'b0', 'head'), depth=3, **options)


# The levels and their classifiers.

QUARTERS = ('1/4', '1/2', '3/4', '1')


def sizes(model, exits):
  return [g.model.num_params for g in prefixes(
      federation_of(model, exits)).values()]  # fmt: skip


def test_the_levels_of_two_resnets():
  """ResNet26 with ten classes; the paper's ResNet18 for CIFAR-100."""
  model = create('resnet26', (32, 32, 3), 10)
  got = sizes(model, (*QUARTERS, '1'))
  assert got == [515_146, 1_632_084, 5_257_566, 18_377_064, 18_377_064]
  assert got[3] - model.num_params == 924_702
  model = create('resnet18', (32, 32, 3), 100, stem='cifar')
  got = sizes(model, QUARTERS)
  assert got == [479_652, 1_347_336, 3_838_316, 12_283_344]


def test_the_side_modules_of_a_resnet():
  """Attention, a halving for each doubling of channels, pool, classifier."""
  federation = federation_of(
      create('resnet26', (32, 32, 3), 10), ('1/4', '1')
  )
  model = federation.groups[0].model
  # No group ends behind stages 2 and 3, which have classifiers, too.
  assert [(head.name, head.after) for head in model.heads] == [
      ('exit1', 'stage1_block2'), ('exit2', 'stage2_block2'),
      ('exit3', 'stage3_block2'),
  ]  # fmt: skip
  shapes = [
      {b.name.split('/')[-1]: model.outputs[b.name] for b in head.blocks}
      for head in model.heads
  ]
  assert shapes == [
      dict(attention=(8, 8, 64), down1=(4, 4, 128), down2=(2, 2, 256),
           down3=(1, 1, 512), pool=(512,), exit1=(10,)),
      dict(attention=(4, 4, 128), down1=(2, 2, 256), down2=(1, 1, 512),
           pool=(512,), exit2=(10,)),
      dict(attention=(2, 2, 256), down1=(1, 1, 512), pool=(512,),
           exit3=(10,)),
  ]  # fmt: skip
  params = model.abstract_variables.params
  counts = [
      [sum(leaf.size for leaf in jax.tree.leaves(params[b.name]))
       for b in head.blocks]
      for head in model.heads
  ]  # fmt: skip
  # Attention, the chain, pool and the linear layer.
  assert [(c[0], sum(c[1:-2]), *c[-2:]) for c in counts] == [
      (9_728, 268_800, 0, 5_130), (35_840, 254_976, 0, 5_130),
      (137_216, 202_752, 0, 5_130),
  ]  # fmt: skip
  # The trunk goes on behind a classifier with x, not with the attention's y.
  shallow, full = prefixes(federation).values()
  assert shallow.model.head_names == ('exit1',)
  assert full.model.head_names == ('exit1', 'exit2', 'exit3', 'head')
  assert shallow.model.block_names[:4] == full.model.block_names[:4]
  assert full.model.blocks == create('resnet26', (32, 32, 3), 10).blocks


def test_classifiers_of_other_families():
  """Behind tokens and dense layers they are copies of the trunk's head."""
  net = vit((8, 8, 1), 3, depth=4, variant='mini')
  model = federation_of(net, ('1/2', '1')).groups[0].model
  assert [block.name for block in model.heads[0].blocks] == [
      'exit1/token', 'exit1'
  ]  # fmt: skip
  # One behind each stage and each group's last block; 3/8 of 4 are 1.
  for exits in (('1', '1'), ('1/2', '1')):
    model = federation_of(two_stages(), exits).groups[0].model
    assert [head.after for head in model.heads] == ['a0']
  model = federation_of(dense_net(), ('3/8', '3/4')).groups[0].model
  assert [head.after for head in model.heads] == ['layer1', 'layer3']


def depthwise(x, kernel, stride):
  """A 3x3 convolution of each channel, position by position."""
  _, height, width, _ = x.shape
  padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
  rows, cols = range(0, height, stride), range(0, width, stride)
  return np.stack([
      np.stack([
          (padded[:, i : i + 3, j : j + 3] * kernel[:, :, 0]).sum(axis=(1, 2))
          for j in cols
      ], axis=1)
      for i in rows
  ], axis=1)  # fmt: skip


def normed(x, p, s):
  return (x - s['mean']) / np.sqrt(s['var'] + 1e-5) * p['scale'] + p['bias']


def separable(x, p, s):
  for i, stride in ((1, 2), (2, 1)):
    x = depthwise(x, p[f'depthwise{i}']['kernel'], stride)
    x = x @ p[f'conv{i}']['kernel'][0, 0]
    x = np.maximum(normed(x, p[f'norm{i}'], s[f'norm{i}']), 0)
  return x


def bilinear(x, size, axis):
  """PyTorch's interpolation without aligned corners, along one axis."""
  old = x.shape[axis]
  place = np.clip((np.arange(size) + 0.5) * old / size - 0.5, 0, old - 1)
  low = np.floor(place).astype(int)
  high = np.minimum(low + 1, old - 1)
  shape = [1] * x.ndim
  shape[axis] = size
  part = (place - low).reshape(shape)
  return x.take(low, axis) * (1 - part) + x.take(high, axis) * part


def random_variables(module, x):
  """Variables and an input with random entries; variances are positive."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(module.init, jax.random.key(0), x)
  return jax.tree_util.tree_map_with_path(
      lambda path, leaf: np.abs(rng.normal(0.5, 0.5, leaf.shape)).astype('f')
      if path[-1].key == 'var'
      else rng.normal(0.3, 0.5, leaf.shape).astype('f'),
      shapes,
  )


@pytest.mark.parametrize('size', [1, 4, 5])
def test_the_side_modules_in_numpy(size):
  """In tests, on maps of one pixel and of even and odd sizes."""
  rng = np.random.default_rng(1)
  x = rng.normal(0, 1, (2, size, size, 4)).astype(np.float32)
  module = Separable(3)
  variables = random_variables(module, x)
  p, s = variables['params'], variables['batch_stats']
  np.testing.assert_allclose(
      jax.jit(module.apply)(variables, x), separable(x, p, s),
      rtol=1e-4, atol=1e-5,
  )  # fmt: skip
  module = Attention()
  variables = random_variables(module, x)
  p, s = variables['params'], variables['batch_stats']
  a = separable(x, p['separable'], s['separable'])
  a = np.maximum(normed(a, p['norm'], s['norm']), 0)
  a = bilinear(bilinear(a, size, 1), size, 2)
  assert 0.3 < np.mean(a > 0) < 1 and a.shape == x.shape
  np.testing.assert_allclose(
      jax.jit(module.apply)(variables, x), x / (1 + np.exp(-a)),
      rtol=1e-4, atol=1e-5,
  )  # fmt: skip


# The loss.


def batch_of(labels, mask=None):
  y = jnp.array(labels, jnp.int32)
  mask = jnp.ones(len(y), bool) if mask is None else jnp.array(mask)
  return Batch(None, y, mask, None)


def logits_of(*rows):
  return {f'exit{j}': jnp.array(z) for j, z in enumerate(rows, 1)}


def test_the_loss_of_two_classifiers_by_hand():
  """CE 0.313262 and 2.126928, KL 0.828725 and 1.006842."""
  z1, z2 = [[1.0, 0.0]], [[0.0, 2.0]]
  loss = functools.partial(mutual_loss, task=CLASSIFICATION)
  for logits, gain, want in (
      (logits_of(z1, z2), 1.0, 4.275757),
      (logits_of(z1, z2), 0.0, 2.440190),
      (logits_of(z1, z2), 0.5, 3.357974),
      # One classifier has no other to learn from.
      (logits_of(z1), 7.0, 0.313262),
      # Each of three learns from the mean of two: KL(p_2 || p_1) = 0.828725
      # and KL(p_1 || p_2) = 1.006842, each twice, halved.
      (logits_of(z1, z2, z1), 1.0, 2.753452 + 0.828725 + 1.006842),
  ):
    np.testing.assert_allclose(
        loss(logits, batch_of([0]), gain=gain), want, rtol=2e-6
    )
  # The mean over examples without the padding.
  two = logits_of(z1 + [[5.0, -5.0]], z2 + [[3.0, 0.0]])
  np.testing.assert_allclose(
      loss(two, batch_of([0, 1], [True, False]), gain=1.0), 4.275757, rtol=2e-6
  )


def test_only_the_student_of_a_pair_learns():
  """The gradient at z_j is w / (d - 1) sum_m (p_j - p_m)."""
  rng = np.random.default_rng(0)
  task = Task('none', lambda z, y: 0.0 * z[:, 0], {})
  logits = {f'exit{j}': rng.normal(0, 1, (1, 3)) for j in (1, 2, 3)}
  got = jax.grad(mutual_loss)(
      jax.tree.map(jnp.float32, logits), batch_of([0]), task, 0.5
  )
  p = {name: np.exp(z) / np.exp(z).sum() for name, z in logits.items()}
  for name in logits:
    want = sum(p[name] - p[other] for other in p) * 0.5 / 2
    np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-6)


def test_the_ramp():
  """exp(-5 (1 - t / 300)^2) up to the round 300."""
  for t, want in ((0, 0.006738), (150, 0.286505), (300, 1.0), (500, 1.0)):
    np.testing.assert_allclose(ramp_up(jnp.int32(t), 300.0), want, atol=5e-7)
  assert ramp_up(jnp.int32(0), 0.0) == 1


def visits(federation, round_nums, data=None, drop=False, **options):
  """What the first client returns in visits to the initial server."""
  data = tiny_data((8,)) if data is None else data
  algorithm = depthfl(federation, **options)
  group, server = federation.groups[0], algorithm.init(jax.random.key(1))
  client = algorithm.init_client(group, 0, jax.random.key(1))

  @jax.jit
  def visit(round_num):
    turn = Visit(jnp.int32(0), round_num, jax.random.key(0))
    sent = algorithm.downlink(server, group, turn)
    return algorithm.client_update(group, client, sent, data.client(0), turn)

  return [jax.device_get(visit(jnp.int32(t))) for t in round_nums]


def test_distillation_rises_over_a_share_of_the_rounds():
  """At rate 0: CE + w_t KD, w_t at rounds 0, 150 and 400 of 1000."""
  still = tiny_local(optax.sgd, 0.0, 1, 8)
  federation = federation_of(
      dense_net(), ('1', '1/2'), local=still, num_rounds=1000
  )

  def losses(federation, round_nums, **options):
    found = visits(federation, round_nums, **options)
    return np.array([metrics['train_loss'] for *_, metrics in found])

  plain = losses(federation, (0, 400), distill_weight=0.0)
  assert plain[0] == plain[1]
  first, middle, last = losses(federation, (0, 150, 400)) - plain[0]
  assert last > 0.01
  np.testing.assert_allclose(first / last, 0.006738, rtol=1e-3)
  np.testing.assert_allclose(middle / last, 0.286505, rtol=1e-3)
  unknown = dataclasses.replace(federation, num_rounds=None)
  double = losses(unknown, (0,), distill_weight=2.0) - plain[0]
  np.testing.assert_allclose(double, 2 * last, rtol=1e-5)


# FedDyn.


def change(federation, server, changes, stats=0.0, **options):
  """The server after mean changes {group: (number of clients, change)}."""
  algorithm = depthfl(federation, **options)
  received = {}
  for group in federation.groups:
    sent = algorithm.downlink(server, group, None)
    count, mean = changes.get(group.name, (0, 0.0))
    received[group.name] = Received(
        Delta(
            jax.tree.map(
                lambda x, d=count * mean: np.full_like(x, d), sent.params
            ),
            jax.tree.map(lambda x, s=count * stats: np.full_like(x, s),
                         sent.stats),
            np.float32(count),
        ), None, None,
    )  # fmt: skip
  return server_step(algorithm, server, received)


def values(tree):
  return {float(v) for leaf in jax.tree.leaves(tree) for v in leaf.reshape(-1)}


def test_the_server_by_hand():
  """N = 4, alpha = 0.1: two of theta = 1 return 1.4 and 1.2."""
  federation = federation_of(two_stages(norm='batch'), ('1/2', '1'), 2)
  algorithm = depthfl(federation, alpha=0.1)
  theta, h = jax.device_get(algorithm.init(jax.random.key(0)))
  assert values(h) == {0.0} and jax.tree.structure(h) == jax.tree.structure(
      theta.params
  )
  theta = theta._replace(params=jax.tree.map(np.ones_like, theta.params))

  def step(server, changes, stats):
    return jax.device_get(
        change(federation, server, changes, stats, alpha=0.1)
    )

  def close(tree, want):
    np.testing.assert_allclose(list(values(tree)), want, rtol=1e-6)

  # One client of each level, so that c = 2 in the blocks of both.
  theta, h = step((theta, h), dict(g0=(1, 0.4), g1=(1, 0.2)), 3.0)
  for block in ('stem', 'a0', 'exit1'):
    close(h[block], -0.015)
    close(theta.params[block], 1.45)
  # c = 1: h = -0.1 / 4 * 0.2 and theta = 1.2 + 0.05.
  for block in ('b0', 'head'):
    close(h[block], -0.005)
    close(theta.params[block], 1.25)
  # Statistics are means, without h.
  assert values(theta.stats) == {3.0}
  # A mean change of 0 leaves h, and theta moves by -h / alpha.
  theta, h = step((theta, h), dict(g0=(2, 0.0)), 5.0)
  close(h['a0'], -0.015)
  close(theta.params['a0'], 1.6)
  # Without a holder nothing moves.
  close(h['b0'], -0.005)
  close(theta.params['b0'], 1.25)
  assert values(theta.stats['a0']) == {5.0} != values(theta.stats['b0'])


def test_without_alpha_the_server_averages():
  federation = federation_of(two_stages(), ('1/2', '1'), 2)
  algorithm = depthfl(federation, alpha=0.0)
  theta, h = jax.device_get(algorithm.init(jax.random.key(0)))
  assert h == ()
  assert algorithm.init_client(federation.groups[0], 0, None)[1] == ()
  theta = theta._replace(params=jax.tree.map(np.zeros_like, theta.params))
  theta, _ = change(
      federation, (theta, h), dict(g0=(2, 1.0), g1=(1, 4.0)), alpha=0.0
  )
  assert values(theta.params['a0']) == {2.0}
  assert values(theta.params['b0']) == {4.0}


def test_the_first_step_is_that_without_feddyn():
  """lambda_k = 0, and theta = theta_k; then lambda_k = -alpha change."""
  one_step = tiny_local(optax.sgd, 0.1, 1, 8)
  federation = federation_of(two_stages(), ('1', '1/2'), local=one_step)
  ((_, plain, _),) = visits(federation, (0,), alpha=0.0)
  (((_, multiplier), uplink, _),) = visits(federation, (0,), alpha=0.5)
  assert_equal(uplink, plain)
  assert_trees(
      multiplier, jax.tree.map(lambda d: -0.5 * d, uplink.summed.change),
      rtol=1e-6,
  )  # fmt: skip
  assert all(np.any(leaf) for leaf in jax.tree.leaves(multiplier['b0']))


# Limits.


def run(algorithm, federation, num=2):
  """The server's state after some rounds of all clients."""
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=federation.num_clients, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  for _ in range(num):
    state, _ = run_round(
        state, tiny_data((5, 8, 3, 7)), jax.random.key(1), jax.random.key(2)
    )
  return jax.device_get(state.server)


def test_the_full_level_is_fedavg_of_the_sum_of_losses():
  """Bit for bit, with momentum, norms and partial batches."""
  federation = federation_of(
      two_stages(norm='batch'), ('1',), 4, local=tiny_local()
  )
  got, _ = run(
      depthfl(federation, distill_weight=0.0, alpha=0.0), federation
  )

  def train(group, start, data, visit):
    def objective(variables, batch, key):
      logits, stats = group.model.apply_heads(
          variables, batch.x, train=True, mask=batch.mask, key=key
      )
      loss = sum(
          CLASSIFICATION.loss(logits[name], batch.y, batch.mask)
          for name in ('exit1', 'head')
      )
      return loss, (stats, {})

    end, _, *rest = fit(objective, federation.local, start, data, visit)
    return end, *rest

  reference = average_weights(make_exchange(federation, 'layerwise'), train)
  assert_equal(got, run(reference, federation))


def test_the_first_level_alone_is_fedavg_of_a_short_net():
  """Bit for bit, whatever the distill_weight."""
  federation = federation_of(
      two_stages(norm='batch'), ('1/2',), 4, local=tiny_local()
  )
  got, _ = run(
      depthfl(federation, distill_weight=7.0, alpha=0.0), federation
  )
  short = dataclasses.replace(
      federation,
      groups=tuple(
          dataclasses.replace(group, model=group.model.chain('exit1'))
          for group in federation.groups
      ),
  )
  assert_equal(got, run(fedavg(short), short))


# A round in NumPy, from multipliers and h that are not zero.

EXITS = {'1/4': 1, '1/2': 2, '1': 4}  # Layers behind the stem.
SIZES = (5, 8, 7, 6, 4, 8, 3, 5, 6)
ALPHA = 0.2


def by_path(tree):
  return {
      tuple(entry.key for entry in path): np.asarray(leaf, np.float64)
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def by_layer(stats):
  """{layer: (mean, variance)} of the statistics of dense layers."""
  return {
      name: (np.float64(s['norm']['mean']), np.float64(s['norm']['var']))
      for name, s in stats.items()
  }


def multipliers_of(federation, state):
  """{client: lambda_k by path}."""
  return {
      k: by_path(jax.tree.map(lambda leaf, row=row: leaf[row],
                              state.clients[group.name][1]))
      for group in federation.groups
      for row, k in enumerate(group.client_ids.tolist())
  }  # fmt: skip


@pytest.fixture(scope='module')
def dense_rounds():
  """Two rounds of six of nine clients on three levels; rate 0 in the second.

  A client of the first cohort has no example.
  """
  local = dataclasses.replace(
      SGD, learning_rate=lambda t: jnp.where(t == 2, 0.1, 0.0)
  )
  federation = federation_of(
      dense_net(norm='batch'), tuple(EXITS), 3, local=local, num_rounds=10
  )
  algorithm = depthfl(federation, distill_weight=3.0, ramp=0.6, alpha=ALPHA)
  data = tiny_data(SIZES)
  data = data.replace(sizes=data.sizes.at[4].set(0))
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=6, backend='map'
  )
  rng = np.random.default_rng(1)

  def noise(tree, scale=0.2):
    return jax.tree.map(
        lambda a: a + rng.normal(0, scale, a.shape).astype(np.float32), tree
    )

  state = jax.device_get(
      rounds.init_state(algorithm, federation, jax.random.key(0))
  )
  theta, h = state.server
  stats = jax.tree.map(lambda a: a + np.float32(0.3), theta.stats)
  state = state._replace(
      server=(theta._replace(params=noise(theta.params), stats=stats),
              noise(h, 0.05)),
      clients={
          name: (own, noise(multiplier, 0.1))
          for name, (own, multiplier) in state.clients.items()
      },
      round_num=np.int32(2),
  )  # fmt: skip
  states, cohorts = [state], []
  for _ in range(2):
    new, reports = run_round(
        jax.tree.map(jnp.asarray, states[-1]), data, jax.random.key(1),
        jax.random.key(2),
    )  # fmt: skip
    states.append(jax.device_get(new))
    found = np.concatenate([r.client_id for r in reports.values()])
    cohorts.append(sorted(found[found < len(SIZES)].tolist()))
  return algorithm, federation, data, states, cohorts


def test_one_round_in_numpy(dense_rounds):
  """Two full-batch steps; w_t = 3 exp(-5 (1 - 2 / 6)^2)."""
  _, federation, data, (before, after, _), (cohort, _) = dense_rounds
  images = np.asarray(preprocess(data.images), np.float64)
  images, clients = images.reshape(len(images), -1), {}
  depths = [EXITS[group.options['exit']] for group in federation.groups]
  for k in cohort:
    index = np.asarray(data.index[k, : data.sizes[k]])
    if len(index):
      labels = np.asarray(data.labels)[index]
      clients[k] = depths[k % 3], images[index], labels
  assert len(cohort) == 6 and len(clients) == 5
  assert {k % 3 for k in clients} == {0, 1, 2}
  theta, h = before.server
  want_theta, want_stats, want_h, want_multipliers = depthfl_numpy.one_round(
      by_path(theta.params), by_layer(theta.stats), by_path(h),
      multipliers_of(federation, before), clients,
      weight=3.0 * np.exp(-5 * (1 - 2 / 6) ** 2), alpha=ALPHA,
      num_clients=len(SIZES), lr=0.1, steps=2,
  )  # fmt: skip
  theta, h = after.server
  close = dict(rtol=1e-4, atol=1e-5)
  assert_trees(by_path(theta.params), want_theta, **close)
  assert_trees(by_layer(theta.stats), want_stats, **close)
  assert_trees(by_path(h), want_h, **close)
  got = multipliers_of(federation, after)
  assert_trees(got, want_multipliers, **close)
  # Clients without a step or a visit keep theirs.
  old = multipliers_of(federation, before)
  for k in range(len(SIZES)):
    same = [np.array_equal(got[k][path], old[k][path]) for path in got[k]]
    assert any(same) == all(same) == (k not in clients)


def test_h_moves_with_the_mean_of_all_multipliers(dense_rounds):
  """N counts all clients, those without the leaf, too."""
  _, federation, _, states, _ = dense_rounds
  for before, after in itertools.pairwise(states):
    old, new = (by_path(state.server[1]) for state in (before, after))
    mine = [multipliers_of(federation, state) for state in (before, after)]
    for path in old:
      moved = sum(
          mine[1][k][path] - mine[0][k][path]
          for k in mine[0] if path in mine[0][k]
      )  # fmt: skip
      np.testing.assert_allclose(
          new[path] - old[path], moved / len(SIZES), rtol=1e-3, atol=1e-6
      )


def test_at_rate_zero_theta_moves_by_h(dense_rounds):
  """By -h / alpha; h and lambda_k stay."""
  _, federation, _, (_, before, after), (_, cohort) = dense_rounds
  assert_equal(after.server[1], before.server[1])
  assert_equal(
      multipliers_of(federation, after), multipliers_of(federation, before)
  )
  theta, h = before.server
  deepest = max(k % 3 for k in cohort)
  held = prefixes(federation)[f'g{deepest}'].model.abstract_variables.params
  for block in theta.params:
    scale = 1 / ALPHA if block in held else 0.0
    want = jax.tree.map(
        lambda x, m, s=scale: x - s * m, theta.params[block], h[block]
    )
    assert_trees(after.server[0].params[block], want, rtol=1e-5, atol=1e-6)


def test_predictions_in_numpy(dense_rounds):
  """The mean of the logits of all classifiers, and the deepest one alone."""
  algorithm, federation, data, (_, state, _), _ = dense_rounds
  x = np.asarray(preprocess(data.images))
  for group in federation.groups:
    model = algorithm.client_model(state.server, ({}, ()), group)
    want, _ = depthfl_numpy.forward(
        by_path(model.params), by_layer(model.stats),
        np.float64(x).reshape(len(x), -1), EXITS[group.options['exit']], False,
    )  # fmt: skip
    mean, deepest = jax.jit(
        lambda model, group=group: [
            predict(group, model, x)
            for predict in (algorithm.predict, algorithm.views['deepest'])
        ]
    )(model)
    np.testing.assert_allclose(
        mean, np.mean(want, axis=0), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(deepest, want[-1], rtol=1e-4, atol=1e-5)


def test_training_and_test_logits_are_equal():
  """Without norms, the loss at rate 0 is that of the logits in a test."""
  still = tiny_local(optax.sgd, 0.0, 1, 8)
  federation = federation_of(two_stages(), ('1',), local=still)
  data = tiny_data((8,))
  ((*_, metrics),) = visits(federation, (0,), data=data)
  algorithm, group = depthfl(federation), federation.groups[0]
  model = prefixes(federation)[group.name].model
  sent = algorithm.downlink(algorithm.init(jax.random.key(1)), group, None)
  batch = batch_of(np.asarray(data.labels))

  @jax.jit
  def test(sent):
    logits, _ = model.apply_heads(sent, preprocess(data.images))
    return mutual_loss(logits, batch, CLASSIFICATION, 1.0)

  want = test(sent)
  np.testing.assert_allclose(metrics['train_loss'], want, rtol=1e-5)


# What travels, and the form of the states.


def small_resnet(shape):
  """A block of 4 and one of 8 channels."""
  return create('mini_resnet6', shape, NUM_CLASSES, width=1 / 8)


def shapes_of(federation, **options):
  """Shapes of the first client's state, downlink, and new state and uplink."""
  algorithm, group = depthfl(federation, **options), federation.groups[0]
  data = tiny_data((8,))

  def visit(key):
    client = algorithm.init_client(group, 0, key)
    turn = Visit(jnp.int32(0), jnp.int32(0), key)
    sent = algorithm.downlink(algorithm.init(key), group, turn)
    return client, sent, *algorithm.client_update(
        group, client, sent, data.client(0), turn
    )[:2]

  return jax.eval_shape(visit, jax.random.key(0))


@pytest.mark.parametrize('exit', ['1/2', '1'])
def test_bytes_are_those_of_the_level(exit):
  """FedDyn sends nothing; the uplink adds the coefficient."""
  federation = federation_of(small_resnet(SHAPE), (exit,))
  variables = prefixes(federation)['g0'].model.abstract_variables
  size = full_bytes(variables)
  assert variables.stats
  for alpha in (0.0, 0.1):
    client, sent, end, uplink = shapes_of(federation, alpha=alpha)
    assert full_bytes(sent) == size and full_bytes(uplink) == size + 4
    kept = full_bytes(variables.params) if alpha else 0
    assert full_bytes(client) == kept and client == end


def test_statistics_can_stay_on_the_clients():
  federation = federation_of(small_resnet(SHAPE), ('1',), local_stats=True)
  assert depthfl(federation).personal
  client, sent, end, uplink = shapes_of(federation, alpha=0.1)
  assert not sent.stats and not uplink.summed.stats
  stats = prefixes(federation)['g0'].model.abstract_variables.stats
  assert client == end and client[0].stats == stats


def unused_weights(drop, tx=optax.sgd):
  local = tiny_local(tx, 0.1, 2, 4, drop_unused_weights=drop)
  return federation_of(small_resnet(SHAPE), ('1',), local=local)


def test_unused_weights_can_be_dropped():
  """On 1x1 maps kernels are trained with one of their nine taps."""
  seen = []

  def spy(rate):
    tx = optax.sgd(rate)

    def init(params):
      seen.append({
          name: getattr(params[name], 'params', params[name])
          for name in ('stage2_block0', 'exit1/down1')
      })
      return tx.init(params)

    return optax.GradientTransformation(init, tx.update)

  for drop in (False, True):
    client, sent, end, uplink = shapes_of(unused_weights(drop, spy), alpha=0.1)
    assert client == end and uplink.summed.change == sent.params
  kernels = [
      (found['stage2_block0']['conv2']['kernel'].shape,
       found['exit1/down1']['depthwise2']['kernel'].shape)
      for found in seen
  ]  # fmt: skip
  assert kernels == [((3, 3, 8, 8), (3, 3, 1, 4)), ((1, 1, 8, 8), (1, 1, 1, 4))]


@pytest.mark.slow
def test_dropping_unused_weights_changes_no_result():
  """Two visits, the second from multipliers that are not zero."""
  states = []
  for drop in (False, True):
    federation = unused_weights(drop)
    algorithm = depthfl(federation, alpha=0.1)
    run_round = rounds.make_round(
        algorithm, federation, cohort_size=1, backend='map'
    )
    state = rounds.init_state(algorithm, federation, jax.random.key(0))
    for _ in range(2):
      state, _ = run_round(
          state, tiny_data((8,)), jax.random.key(1), jax.random.key(2)
      )
    states.append(jax.device_get((state.server, state.clients)))
  assert_trees(states[1], states[0], rtol=1e-4, atol=1e-5)


# Refusals.


@pytest.mark.parametrize('value', [np.nan, np.inf, -1.0])
@pytest.mark.parametrize('option', ['distill_weight', 'ramp', 'alpha'])
def test_wrong_numbers_are_refused(option, value):
  federation = federation_of(dense_net(), ('1',))
  with pytest.raises(ValueError, match=f'{option} must be'):
    depthfl(federation, **{option: value})


def test_wrong_federations_are_refused():
  with pytest.raises(ValueError, match='ramp must be at least 0 and at most 1'):
    depthfl(federation_of(dense_net(), ('1',)), ramp=1.5)
  with pytest.raises(ValueError, match=r'groups\.g0\.exit must be a share'):
    federation_of(dense_net(), ('0',))
  with pytest.raises(ValueError, match=r'groups\.g0: .* has no numbered block'):
    federation_of(dense_net(tuple('abcdef')), ('1',))
  federation = with_group_options(
      federation_of(dense_net(), ('1', '1')), exit=('1/2', '1')
  )
  with pytest.raises(ValueError, match='needs the heads exit1'):
    depthfl(federation)
  regression, _ = quadratics([1, 5])
  with pytest.raises(ValueError, match="made for the task 'classification'"):
    depthfl(regression)


def test_a_depthwise_convolution_keeps_its_channels_apart():
  """The kernel has one input channel, as in PyTorch's weight [C, 1, 3, 3]."""
  module = DepthwiseConv(2)
  x = jnp.zeros((1, 5, 4, 3))
  out, variables = jax.eval_shape(module.init_with_output, jax.random.key(0), x)
  assert out.shape == (1, 3, 2, 3)
  assert variables['params']['kernel'].shape == (3, 3, 1, 3)
