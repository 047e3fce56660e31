"""FjORD: ordered dropout, self-distillation, shells of widths."""

from fractions import Fraction
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.nested_widths import make_nets, nested
from fedjax_het.aggregation.slicing import extract, narrow
from fedjax_het.algorithms import fedavg, fjord
from fedjax_het.algorithms.fjord import Sent
from fedjax_het.algorithms.fjord.steps import draw_width, step_loss
from fedjax_het.data.federated import Batch, federate
from fedjax_het.engine import rounds
from fedjax_het.engine.local import model_loss, train_model
from fedjax_het.engine.task import CLASSIFICATION, Task
from fedjax_het.engine.types import Federation, Group, Received, Visit
from fedjax_het.models import BlockModel, Variables, create
from fedjax_het.models.blocks import Block
from fedjax_het.models.slices import Slices
from tests.algorithms import fjord_numpy
from tests.algorithms.nested import (
  KEYS,
  SGD,
  check_evaluation,
  check_messages,
  check_weights,
  run,
  small,
)
from tests.algorithms.suite import Case
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  one_model_federation,
  preprocess,
  server_step,
  tiny_data,
  tiny_local,
  with_group_options,
)
from tests.trees import assert_equal, assert_trees

# What the shared suite runs, see `tests/algorithms/suite.py`.
SUITE = [Case(), Case(dict(distill_weight=0.0, widths=('1', '1/2', '1/4')))]
HALF, WHOLE = Fraction(1, 2), Fraction(1)


@pytest.mark.parametrize(
    'norm,options,error',
    [
        ('none', dict(distill_weight=0.0), 0),
        # Statistics, too; XLA fuses the two programs differently.
        ('batch', dict(weights='uniform'), 1e-6),
    ],
)
def test_one_width_is_fedavg(norm, options, error):
  """Bit for bit without distillation, from oneself up to rounding with it."""
  federation = small('1', '1', norm=norm, local=tiny_local())
  _, got = run(fjord(federation, **options), federation)
  weights = options.get('weights', 'data')
  _, want = run(fedavg(federation, weights=weights), federation)
  for mine, its in (
      (got.params, want.params),
      (got.stats['rate_1'], want.stats),
  ):
    assert_trees(mine, its, rtol=error, atol=error)


def biases(federation, algorithm, server, **returned):
  """One server step; each group's client returns these biases of layer1.

  Args:
    federation: The federation.
    algorithm: The algorithm.
    server: Its state.
    **returned: {group: (n, values) or None for no client}.

  Returns:
    The biases afterwards.
  """
  received = {}
  for group in federation.groups:
    sent = algorithm.downlink(server, group, None)
    change = jax.tree.map(jnp.zeros_like, sent.params)
    n, values = returned[group.name] or (0, 0)
    old = sent.params['layer1']['linear']['bias']
    change['layer1']['linear']['bias'] = n * (jnp.asarray(values) - old)
    stats = jax.tree.map(lambda s, n=n: n * (s + 2), sent.stats)
    up = Sent(change, stats, jnp.float32(n))
    received[group.name] = Received(up, None, None)
  return server_step(algorithm, server, received)


def layer1(server):
  return server.params['layer1']['linear']['bias'].tolist()


def test_shells_are_averaged_over_those_who_hold_them():
  """4 units, P = {1/2, 1}; A has n = 1 and all of them, B n = 3 and two."""
  federation = small('1', '1/2', norm='batch', per_group=1)
  algorithm = fjord(federation)
  first = algorithm.init(jax.random.key(0))
  first.params['layer1']['linear']['bias'] = jnp.full(4, 9.0)
  step = functools.partial(biases, federation, algorithm, first)
  after = step(g0=(1, [1.0] * 4), g1=(3, [5.0, 5]))
  assert layer1(after) == [4, 4, 1, 1]
  # Both have the statistics of 1/2, A alone those of 1; all returned + 2.
  for name in ('rate_0.5', 'rate_1'):
    assert_equal(
        after.stats[name], jax.tree.map(lambda s: s + 2, first.stats[name])
    )
  after = step(g0=None, g1=(3, [5.0, 5]))
  assert layer1(after) == [5, 5, 9, 9]
  assert_equal(after.stats['rate_1'], first.stats['rate_1'])
  assert np.all(after.stats['rate_0.5']['stem']['norm']['mean'] == 2)
  assert_equal(step(g0=None, g1=None), first)


def test_statistics_are_averaged_over_all_who_have_the_width():
  """Those of 1/2 from 0 with n = 1 and 4 with n = 3: 3."""
  federation = small('1', '1/2', norm='batch', per_group=1)
  algorithm = fjord(federation)
  server = algorithm.init(jax.random.key(0))
  received = {}
  for group, n, value in zip(federation.groups, (1, 3), (0, 4)):
    sent = algorithm.downlink(server, group, None)
    change = jax.tree.map(jnp.zeros_like, sent.params)
    stats = jax.tree.map(
        lambda s, x=n * value: jnp.full_like(s, x), sent.stats
    )
    up = Sent(change, stats, jnp.float32(n))
    received[group.name] = Received(up, None, None)
  after = server_step(algorithm, server, received)
  assert np.all(after.stats['rate_0.5']['stem']['norm']['mean'] == 3)
  assert np.all(after.stats['rate_1']['stem']['norm']['mean'] == 0)


def random_batch(size=8, real=6):
  """A batch whose last examples are padding."""
  rng = np.random.default_rng(3)
  x = jnp.asarray(rng.normal(size=(size, *SHAPE)), jnp.float32)
  y = jnp.asarray(rng.integers(0, NUM_CLASSES, size), jnp.int32)
  position = jnp.arange(size)
  return Batch(x, y, position < real, position)


def key_of(draw, number):
  """A key with which `draw_width` gives this position."""
  keys = jax.random.split(jax.random.key(0), 20)
  draws = jax.vmap(lambda key: draw_width(key, number))(keys).tolist()
  return keys[draws.index(draw)]


@functools.cache
def two_nets(norm='batch'):
  """The nets 1/2 and 1 of an MLP, and the wide one's variables, not special."""
  full = create('mlp', SHAPE, NUM_CLASSES, hidden=4, norm=norm)
  nets = nested(make_nets(full, [HALF, WHOLE]))
  leaves, tree = jax.tree.flatten(full.init(jax.random.key(0)).params)
  rng = np.random.default_rng(5)
  params = jax.tree.unflatten(
      tree,
      [
          leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32)
          for leaf in leaves
      ],
  )
  stats = {net.name: net.model.init(jax.random.key(0)).stats for net in nets}
  return nets, Variables(params, stats)


@functools.cache
def gradient_of(alpha, temperature=1.0):
  """Jitted `(params, key) -> ((loss, (stats, metrics)), gradient)`."""
  nets, (_, stats) = two_nets()
  loss_fn = step_loss(nets, CLASSIFICATION, alpha, temperature)
  batch = random_batch()

  def loss(params, key):
    return loss_fn(Variables(params, stats), batch, key)

  return jax.jit(jax.value_and_grad(loss, has_aux=True))


def own_gradient(net, params, stats):
  """Loss, statistics and gradient of the plain loss of one net."""
  loss_fn, batch = model_loss(net.model, CLASSIFICATION), random_batch()

  def loss(params):
    return loss_fn(
        Variables(extract(params, net.index.params), stats[net.name]),
        batch,
        None,
    )

  return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.mark.parametrize('draw', [0, 1])
def test_a_step_moves_the_drawn_net_and_nothing_else(draw):
  nets, (params, stats) = two_nets()
  (loss, (new, metrics)), grads = gradient_of(0.0)(params, key_of(draw, 2))
  net, other = nets[draw], nets[1 - draw]
  (want, (its_stats, _)), its = own_gradient(net, params, stats)
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  assert_trees(grads, its, rtol=1e-5, atol=1e-6)
  assert_trees(new[net.name], its_stats, rtol=1e-6, atol=1e-6)
  assert np.any(
      new[net.name]['stem']['norm']['mean']
      != stats[net.name]['stem']['norm']['mean']
  )
  assert_equal(new[other.name], stats[other.name])
  assert metrics['rate'] == (0.5, 1.0)[draw]
  if draw == 0:
    part = extract(params, net.index.params)
    for grad, held in zip(jax.tree.leaves(grads), jax.tree.leaves(part)):
      outside = np.ones(grad.shape, bool)
      outside[tuple(map(slice, held.shape))] = False
      assert np.all(grad[outside] == 0)


def test_the_widest_net_teaches_and_learns_from_labels_alone():
  """The gradient is that of CE(F_1) and of KL with a constant teacher."""
  nets, (params, stats) = two_nets()
  temperature, batch = 2.0, random_batch()
  (_, (new, _)), grads = gradient_of(1.0, temperature)(params, key_of(0, 2))
  (_, (wide_stats, _)), own = own_gradient(nets[1], params, stats)

  def logits(net, params):
    held = extract(params, net.index.params)
    return net.model.apply(
        Variables(held, stats[net.name]), batch.x, train=True, mask=batch.mask
    )[0]

  target = jax.nn.softmax(logits(nets[1], params) / temperature)

  def soft(params):
    log_q = jax.nn.log_softmax(logits(nets[0], params) / temperature)
    each = -temperature**2 * jnp.sum(target * log_q, axis=1)
    return jnp.sum(jnp.where(batch.mask, each, 0)) / jnp.sum(batch.mask)

  want = jax.tree.map(jnp.add, own, jax.jit(jax.grad(soft))(params))
  assert_trees(grads, want, rtol=1e-4, atol=1e-6)
  assert_trees(new['rate_1'], wide_stats, rtol=1e-6, atol=1e-6)
  mean = new['rate_0.5']['stem']['norm']['mean']
  np.testing.assert_allclose(
      mean, new['rate_1']['stem']['norm']['mean'][:2], rtol=1e-6
  )


def test_a_net_that_teaches_itself_learns_nothing_from_it():
  """p = p_k: KL and its gradient are 0; at alpha = 1 only CE remains."""
  nets, (params, stats) = two_nets()
  (want, (its_stats, _)), own = own_gradient(nets[1], params, stats)
  for alpha, factor in ((1.0, 1.0), (0.25, 1.75)):
    (loss, (new, _)), grads = gradient_of(alpha)(params, key_of(1, 2))
    np.testing.assert_allclose(loss, factor * want, rtol=1e-6)
    assert_trees(
        grads,
        jax.tree.map(lambda g, f=factor: f * g, own),
        rtol=1e-5,
        atol=1e-6,
    )
    # The teacher's pass moves the statistics, once.
    assert_trees(new['rate_1'], its_stats, rtol=1e-6, atol=1e-6)
    assert_equal(new['rate_0.5'], stats['rate_0.5'])


@pytest.mark.parametrize(
    'name,options',
    [
        ('preresnet20', dict(num_blocks=1, shortcut='A', width=0.25)),
        ('mlp', dict(hidden=5)),
    ],
)
def test_slices_are_nested(name, options):
  """A slice of a slice has the numbers that the slice of the whole has."""
  full = create(name, (8, 8, 1), 3, **options)
  rates = [Fraction(1, 5), HALF, Fraction(3, 5), WHOLE]
  nets = make_nets(full, rates)
  numbers = jax.tree.map(
      lambda leaf: np.arange(leaf.size).reshape(leaf.shape),
      full.abstract_variables,
  )
  for wide in range(1, len(nets)):
    outer = extract(numbers.params, nets[wide].index.params)
    for net, inner in zip(nets, nested(nets[: wide + 1])):
      assert_equal(
          extract(outer, inner.index.params),
          extract(numbers.params, net.index.params),
      )


def test_the_loss_reads_the_slices_of_a_slice():
  """Where shortcuts pad, a slice is no prefix, and its indices change."""
  full = create(
      'preresnet20', (4, 4, 1), 3, num_blocks=1, shortcut='A', width=0.25,
      norm='none',
  )  # fmt: skip
  nets = make_nets(full, [HALF])
  params = nets[0].model.init(jax.random.key(0)).params
  batch = Batch(jnp.ones((2, 4, 4, 1)), jnp.arange(2), jnp.ones(2, bool),
                jnp.arange(2))  # fmt: skip
  ours = step_loss(nets, CLASSIFICATION, 0.0, 1.0)
  plain = model_loss(nets[0].model, CLASSIFICATION)

  @jax.jit
  def both(params):
    key = jax.random.key(0)
    mine, _ = ours(Variables(params, {nets[0].name: {}}), batch, key)
    return mine, plain(Variables(params, {}), batch, key)[0]

  got, want = both(params)
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_client_of_one_width_is_a_client_of_fedavg():
  """One admissible width, no randomness: bit for bit the narrow model."""
  federation = small('1', '1/2', norm='batch', local=tiny_local())
  algorithm = fjord(federation, distill_weight=0.0)
  server, group = algorithm.init(jax.random.key(0)), federation.groups[1]
  visit = Visit(jnp.int32(1), jnp.int32(0), jax.random.key(4))
  sent, data = algorithm.downlink(server, group, visit), tiny_data().client(1)
  assert list(sent.stats) == ['rate_0.5']
  update = jax.jit(functools.partial(algorithm.client_update, group))
  _, up, metrics = update((), sent, data, visit)
  model = make_nets(group.model, [HALF])[0].model
  begin = Variables(sent.params, sent.stats['rate_0.5'])

  @jax.jit
  def plain(begin, data, visit):
    end, metrics, _ = train_model(model, federation.local, begin, data, visit)
    change = jax.tree.map(lambda y, x: 8 * (y - x), end.params, begin.params)
    return change, jax.tree.map(lambda s: 8 * s, end.stats), metrics

  change, stats, its = plain(begin, data, visit)
  assert_trees(up.summed.change, change, rtol=1e-6, atol=1e-6)
  assert_trees(up.summed.stats['rate_0.5'], stats, rtol=1e-6, atol=1e-6)
  assert up.summed.weight == 8
  np.testing.assert_allclose(metrics['train_loss'], its['train_loss'])
  assert metrics['rate'] == 0.5


def test_widths_are_drawn_anew_in_each_step_and_equally_often():
  keys = jax.random.split(jax.random.key(0), 3000)
  draws = jax.jit(jax.vmap(lambda key: draw_width(key, 3)))(keys)
  count = np.bincount(np.asarray(draws), minlength=3)
  assert len(count) == 3 and np.all(np.abs(count - 1000) < 100)


def test_decay_reaches_what_is_not_drawn():
  """Weight decay shrinks all of the slice, gradients move the drawn part."""

  def decayed(lr):
    return optax.chain(optax.add_decayed_weights(0.5), optax.sgd(lr))

  federation = small(
      '1/2', '1', local=tiny_local(decayed, 0.1, 1, 8), per_group=1
  )
  algorithm = fjord(federation, distill_weight=0.0)
  server, group = algorithm.init(jax.random.key(0)), federation.groups[1]
  update = jax.jit(functools.partial(algorithm.client_update, group))
  data, seen = tiny_data((8,)).client(0), set()
  for seed in range(20):
    visit = Visit(jnp.int32(1), jnp.int32(0), jax.random.key(seed))
    sent = algorithm.downlink(server, group, visit)
    _, up, metrics = update((), sent, data, visit)
    seen.add(float(metrics['rate']))
    if metrics['rate'] == 0.5:
      change = up.summed.change['layer1']['linear']['kernel'] / 8
      old = server.params['layer1']['linear']['kernel']
      gap = np.abs(change + 0.05 * old)
      assert np.max(gap[2:]) < 1e-6 and np.max(gap[:, 2:]) < 1e-6
      assert np.max(gap[:2, :2]) > 1e-4
  assert seen == {0.5, 1.0}


def test_bytes_and_sizes_are_those_of_the_slices():
  """ResNet18 of the paper: 456K, 2M, 4M, 7M and 11M parameters."""
  model = create('resnet18', (32, 32, 3), 10, stem='cifar')
  for rate, number in ((1, 457_578), (3, 4_049_352), (5, 11_173_962)):
    small_model = narrow(model, lambda k, rate=rate: -(-rate * k // 5))
    assert small_model.num_params == number
  check_messages(fjord, 1)


def test_widths_are_exact():
  """ceil(5 * 3/5) is 3; a float 2 * 0.2 + 0.2 is above 0.6."""
  federation = small(2 * 0.2 + 0.2, '1', hidden=5)
  algorithm = fjord(federation)
  server = jax.eval_shape(algorithm.init, jax.random.key(0))
  sent = jax.eval_shape(
      lambda server: algorithm.downlink(server, federation.groups[0], None),
      server,
  )
  assert sent.params['layer1']['linear']['kernel'].shape == (3, 3)
  assert list(sent.stats) == ['rate_0.6']


def test_every_width_is_evaluated_with_its_own_statistics():
  check_evaluation(fjord)


def test_weights_are_the_number_of_examples_or_one_and_0_without_a_step():
  check_weights(fjord)


@pytest.mark.parametrize(
    'rates,options,message',
    [
        (('1',), dict(distill_weight=1.5), 'distill_weight must be at least 0'),
        (('1',), dict(temperature=0.0), 'temperature must be above 0'),
        (('1',), dict(weights='size'), 'weights'),
        (('1', '1/2'), dict(widths=('1',)), r'groups\.g1\.rate=1/2 must be'),
        (('1/2',), dict(widths=('1/2', '1')), 'at most the largest rate'),
        (('1',), dict(widths=('1', 0)), r'widths\[1\] must be a share'),
        (('1', '3/2'), {}, r'groups\.g1\.rate must be a share'),
        (('0.333333', '1/3'), {}, 'must differ in their first four digits'),
    ],
)
def test_bad_options_are_refused(rates, options, message):
  with pytest.raises(ValueError, match=message):
    fjord(small(*rates), **options)


def test_other_models_and_tasks_are_refused():
  one, other = one_model_federation().groups[0], small('1').groups[0]
  groups = (
      Group('x', other.model, np.array([1, 2, 4, 5])),
      Group('y', one.model, np.array([0, 3])),
  )
  with pytest.raises(ValueError, match='fjord needs one model for all groups'):
    fjord(Federation(groups, SGD))
  with pytest.raises(ValueError, match='fjord with distill_weight is made for'):
    fjord(linear_maps()[0])


# Linear maps: the paper's Theorem 1.


class Linear(nn.Module):
  """A linear map without bias; the hidden one is narrowed."""

  slices = Slices(('features',), dict(linear=('x', 'y')))

  features: int

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    x = x.reshape(len(x), -1)
    return nn.Dense(self.features, use_bias=False, name='linear')(x)


class Last(Linear):
  """The last one, whose outputs are never dropped."""

  slices = Slices((), dict(linear=('x', '*')))


class Same(nn.Module):
  """The identity."""

  slices = Slices()

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    return x


def target():
  """A 4x4 matrix of the singular values 4, 3, 2 and 1."""
  rng = np.random.default_rng(1)
  u, v = (np.linalg.qr(rng.normal(size=(4, 4)))[0] for _ in range(2))
  return u @ np.diag([4.0, 3, 2, 1]) @ v


def linear_maps():
  """One client with the examples (e_i, row i of the target)."""
  rows = jnp.asarray(target(), jnp.float32)

  def losses(outputs, labels):
    return 0.5 * jnp.sum((outputs - rows[labels]) ** 2, axis=1)

  task = Task('regression', losses, {'loss': losses})
  modules = dict(stem=Same(), inner=Linear(4), outer=Last(4))
  blocks = tuple(Block(*item) for item in modules.items())
  model = BlockModel('linear', blocks, (4,), 4, (1, 2))
  local = tiny_local(optax.sgd, 0.1, 1, 4, steps=8000, task=task)
  federation = Federation((Group('g0', model, np.array([0])),), local)
  data = federate(
      np.eye(4, dtype=np.uint8),
      np.arange(4),
      [np.arange(4)],
      lambda images, key=None: images.astype(jnp.float32),
  )
  return with_group_options(federation, rate=('1',)), data


def test_all_widths_of_a_linear_map_are_the_best_of_their_rank():
  """Theorem 1: width b / 4 converges to the truncated SVD of rank b."""
  federation, data = linear_maps()
  widths = tuple(f'{b}/4' for b in (1, 2, 3, 4))
  algorithm = fjord(federation, widths=widths, distill_weight=0.0)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=1, backend='map'
  )
  state, _ = run_round(state, data, *KEYS)
  params = jax.device_get(state.server.params)
  inner, outer = (params[n]['linear']['kernel'] for n in ('inner', 'outer'))
  u, s, v = np.linalg.svd(target())
  for b in (1, 2, 3, 4):
    best = u[:, :b] * s[:b] @ v[:b]
    np.testing.assert_allclose(inner[:, :b] @ outer[:b], best, atol=1e-3)


# One round in NumPy.

RATES = (Fraction(1, 5), HALF, WHOLE)
LR, MOMENTUM, DECAY, STEPS, HIDDEN = 0.2, 0.9, 0.05, 3, 5
SIZES = (5, 8, 3, 7)


def decayed_momentum(lr):
  return optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(lr, MOMENTUM))


def flat(params, stats):
  """The MLP's parameters and statistics as `fjord_numpy` names them."""
  names = dict(kernel='w', bias='b', scale='scale')
  theta = {}
  for layer in fjord_numpy.LAYERS:
    linear, norm = params[layer]['linear'], params[layer]['norm']
    theta.update({(layer, names[k]): leaf for k, leaf in linear.items()})
    theta[layer, 'scale'], theta[layer, 'shift'] = norm['scale'], norm['bias']
  theta.update({('head', names[k]): v for k, v in params['head'].items()})
  moments = {
      rate: {
          (layer, kind): np.asarray(leaf, np.float64)
          for layer, tree in stats[f'rate_{float(rate):.4g}'].items()
          for kind, leaf in tree['norm'].items()
      }
      for rate in RATES
  }
  return {k: np.asarray(v, np.float64) for k, v in theta.items()}, moments


def step_draws(key, number):
  """The widths that a visit draws, from the keys of `train_epochs`."""
  _, steps = jax.random.split(key)
  keys = [
      jax.random.split(jax.random.fold_in(steps, i))[1] for i in range(STEPS)
  ]
  return [RATES[draw_width(key, number)] for key in keys]


def oracle_keys(federation):
  """A key for each client, with which each group draws all of its widths."""
  found = {}
  for group, number in zip(federation.groups, (3, 2)):
    for first in range(0, 100, 10):
      keys = {i: jax.random.key(first + i) for i in group.client_ids.tolist()}
      draws = [step_draws(key, number) for key in keys.values()]
      if set().union(*draws) == set(RATES[:number]):
        break
    found.update(keys)
  return found


@pytest.fixture(scope='module')
def oracle_inputs():
  """The federation, its data and a server without special values."""
  local = tiny_local(decayed_momentum, LR, STEPS, 8)
  federation = small('1', '1/2', hidden=HIDDEN, norm='batch', local=local)
  data, rng = tiny_data(SIZES), np.random.default_rng(5)
  server = jax.device_get(fjord(federation, widths=('1/5', '1/2', '1')).init(
      jax.random.key(0)
  ))  # fmt: skip

  def moved(leaf):
    return leaf + (0.3 * rng.normal(size=leaf.shape)).astype(np.float32)

  stats = jax.tree.map(
      lambda s: s + rng.uniform(size=s.shape).astype(np.float32), server.stats
  )
  return federation, data, server._replace(
      params=jax.tree.map(moved, server.params), stats=stats
  )


@pytest.mark.parametrize('alpha,temperature', [(0.7, 2.0), (0.0, 1.0)])
def test_a_round_in_numpy(oracle_inputs, alpha, temperature):
  """Nets of 1, 3 and 5 units; partial batches; two groups of two clients."""
  federation, data, server = oracle_inputs
  algorithm = fjord(
      federation,
      widths=('1/5', '1/2', '1'),
      distill_weight=alpha,
      temperature=temperature,
  )
  received, clients, keys = {}, [], oracle_keys(federation)
  for group, largest in zip(federation.groups, (WHOLE, HALF)):
    update = jax.jit(functools.partial(algorithm.client_update, group))
    uplinks = []
    for i in group.client_ids.tolist():
      visit = Visit(jnp.int32(i), jnp.int32(0), keys[i])
      sent = algorithm.downlink(server, group, visit)
      _, up, metrics = update((), sent, data.client(i), visit)
      uplinks.append(up.summed)
      index = np.asarray(data.index[i, : SIZES[i]])
      x = np.asarray(preprocess(data.images[index]), np.float64)
      draws = step_draws(keys[i], len(sent.stats))
      np.testing.assert_allclose(
          metrics['rate'], np.mean([float(p) for p in draws]), rtol=1e-6
      )
      clients.append((
          largest, x.reshape(SIZES[i], -1), np.asarray(data.labels[index]),
          draws,
      ))  # fmt: skip
    total = jax.tree.map(lambda *leaves: sum(leaves), *uplinks)
    received[group.name] = Received(total, None, None)
  after = jax.device_get(server_step(algorithm, server, received))
  theta, stats = flat(server.params, server.stats)
  want = fjord_numpy.one_round(
      theta, stats, clients, HIDDEN, alpha=alpha, temperature=temperature,
      lr=LR, momentum=MOMENTUM, decay=DECAY,
  )  # fmt: skip
  got = flat(after.params, after.stats)
  assert_trees(got, want, rtol=1e-4, atol=1e-5)
  for new, old in zip(jax.tree.leaves(want[0]), jax.tree.leaves(theta)):
    assert np.max(np.abs(new - old)) > 1e-3
