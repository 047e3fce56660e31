"""FCCL: its losses by hand, its limits, and rounds in NumPy."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.algorithms import fccl as make
from fedjax_het.algorithms import private
from fedjax_het.algorithms.fccl import Client, private_loss
from fedjax_het.algorithms.fccl.correlation import (
  collaborative_loss,
  cross_correlation,
)
from fedjax_het.algorithms.fccl.public import public_loss
from fedjax_het.data.federated import Batch
from fedjax_het.engine import rounds
from fedjax_het.engine.local import shuffled_positions
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.types import Group, Received, Visit
from fedjax_het.engine.visits import visit_pair
from fedjax_het.models.blocks import Block, BlockModel, Variables
from fedjax_het.models.norm import BatchNorm
from tests.algorithms import fccl_numpy
from tests.algorithms.suite import Case, Clocks
from tests.models.test_reach import small_maps
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  bytes_of_a_visit,
  momentum,
  preprocess,
  tiny_data,
  tiny_federation,
  tiny_local,
)
from tests.trees import assert_equal, assert_trees

SUITE = [
    Case(dict(public_batch_size=4, pretrain_epochs=2)),
    Case(dict(public_batch_size=4, pretrain_epochs=2, target='previous')),
]
CLOCKS = Clocks(dict(public_batch_size=4, pretrain_epochs=1), 'inter_loss')

SIZES = (5, 8, 3, 7)
NUM_PUBLIC = 9
LAMBDA = 0.0051
KEY = jax.random.key(1)
VISIT = Visit(jnp.int32(0), jnp.int32(0), KEY)


# The loss on public examples.

AXES = np.float32([[1, 0], [-1, 0], [0, 1], [0, -1]])
OPPOSITE = np.float32([[1, -1], [-1, 1], [2, -2], [-2, 2]])
ALL = np.ones(8, bool)
correlation = jax.jit(cross_correlation)


@jax.jit
def loss_and_grad(z, t, mask):
  """The loss, its gradient in z and that in t."""
  loss, grads = jax.value_and_grad(collaborative_loss, (0, 1))(
      z, t, LAMBDA, mask
  )
  return loss, *grads


@pytest.mark.parametrize('rows,m,loss', [
    # Independent columns: (0.75 - 1)^2 on the diagonal, 1 off it.
    (AXES, [[0.75, 0], [0, 0.75]], 0.125 + 2 * LAMBDA),
    # Columns of opposite sign: 0.25^2 off the diagonal, too.
    (OPPOSITE, [[0.75, -0.75], [-0.75, 0.75]], 0.125 + 0.125 * LAMBDA),
])  # fmt: skip
def test_two_correlations_by_hand(rows, m, loss):
  np.testing.assert_allclose(correlation(rows, rows), m, atol=1e-6)
  got = loss_and_grad(rows, rows, ALL[:4])[0]
  np.testing.assert_allclose(got, loss, atol=1e-6)


@functools.cache
def random_logits():
  """Z and T of eight rows and three classes."""
  rng = np.random.default_rng(0)
  return rng.normal(size=(2, 8, 3)).astype(np.float32)


def test_scales_and_shifts_of_classes_do_not_matter():
  """So the gradient has no component along either."""
  z, t = random_logits()
  want, grad, _ = loss_and_grad(z, t, ALL)
  scale, shift = np.array([[0.1, 7.0, 2.0]]), np.array([[3.0, -5.0, 40.0]])
  for args in ((scale * z + shift, t), (z, scale * t + shift)):
    got = loss_and_grad(*map(np.float32, args), ALL)[0]
    np.testing.assert_allclose(got, want, rtol=1e-5)
  np.testing.assert_allclose(grad.sum(axis=0), 0, atol=1e-6)
  np.testing.assert_allclose((grad * z).sum(axis=0), 0, atol=1e-6)


def test_a_permutation_of_classes_permutes_m():
  z, t = random_logits()
  order = np.array([2, 0, 1])
  m = np.asarray(correlation(z, t))
  got = correlation(z[:, order], t[:, order])
  np.testing.assert_allclose(got, m[order][:, order], atol=1e-6)
  # Rows belong to the first argument, columns to the second.
  other = correlation(z[:, order], t)
  np.testing.assert_allclose(other, m[order], atol=1e-6)
  losses = [
      loss_and_grad(*args, ALL)[0]
      for args in ((z, t), (z[:, order], t[:, order]))
  ]
  np.testing.assert_allclose(*losses, rtol=1e-6)


def test_padding_does_not_count():
  z, t = random_logits()
  mask = np.arange(8) % 4 != 1
  loss, grad, _ = loss_and_grad(z, t, mask)
  changed = np.where(mask[:, None], z, 1e4).astype(np.float32)
  again = loss_and_grad(changed, np.where(mask[:, None], t, -9), mask)
  want, part, _ = loss_and_grad(z[mask], t[mask], ALL[mask])
  for got in (loss, again[0]):
    np.testing.assert_allclose(got, want, rtol=1e-6)
  for got in (grad, again[1]):
    np.testing.assert_allclose(np.asarray(got)[mask], part, atol=1e-6)
    assert not np.any(np.asarray(got)[~mask])


@pytest.mark.parametrize('rows', [1, 2])
def test_batches_without_variance_are_finite(rows):
  """Few rows, and a class whose logits are all equal."""
  z, t = random_logits()
  mask = np.arange(8) < rows
  loss, grad, _ = loss_and_grad(z, t, mask)
  assert np.isfinite(loss)
  np.testing.assert_allclose(grad, 0, atol=1e-5)
  z = np.stack([z[:, 0], np.full(8, 37.7, np.float32), z[:, 2]], axis=1)
  m = correlation(z, t)
  np.testing.assert_allclose(m[1], 0, atol=1e-4)
  loss, grad, _ = loss_and_grad(z, t, ALL)
  assert np.isfinite(loss) and np.all(np.abs(grad) < 10)


def test_no_gradient_in_the_target():
  z, t = random_logits()
  assert not np.any(loss_and_grad(z, t, ALL)[2])


class Outputs:
  """A model whose logits are its parameters, [B, C]."""

  @staticmethod
  def apply(variables, x, *, train=False, mask=None, key=None):
    return variables.params, {}


POSITION = np.array([2, 0, 5, 1, 4])


@pytest.mark.parametrize('target', ['current', 'previous'])
def test_the_target_of_three_clients(target):
  """The mean of two others' logits and own ones, by position."""
  z, (total, own) = random_logits()[0, :5], random_logits()
  previous = own if target == 'previous' else None
  mask = np.array([True] * 4 + [False])

  @jax.jit
  @jax.value_and_grad
  def of_target(z, total, previous):
    loss_fn = public_loss(Outputs, total, previous, LAMBDA)
    batch = Batch(None, None, mask, jnp.asarray(POSITION))
    return loss_fn(Variables(z, {}), batch, None)[0]

  value, grad = of_target(z, total, previous)
  mine = z if previous is None else own[POSITION]
  want = loss_and_grad(z, (total[POSITION] + mine) / 3, mask)
  np.testing.assert_allclose(value, want[0], rtol=1e-5)
  np.testing.assert_allclose(grad, want[1], atol=1e-6)


# The loss on own examples.


@functools.partial(jax.jit, static_argnums=(3, 4))
def losses(z, previous, frozen, inter, intra, mask=None):
  """Loss, metrics and gradient for given logits of three models."""
  teachers = dict(
      inter_loss=(Variables(previous, {}), inter),
      intra_loss=(Variables(frozen, {}), intra),
  )
  loss_fn = private_loss(Outputs, CLASSIFICATION, teachers)
  batch = Batch(None, jnp.arange(len(z)) % 2, mask, None)
  (loss, (_, metrics)), grad = jax.value_and_grad(
      lambda z: loss_fn(Variables(z, {}), batch, None), has_aux=True
  )(z)
  return loss, metrics, grad


def test_both_distillations_by_hand():
  """p = 1/2, 1/2, for the label 0; teachers 3/4, 1/4 and 1/5, 4/5.

  The second row is padding.
  """
  z, mask = np.zeros((2, 2), np.float32), np.array([True, False])
  teachers = np.log(np.float32([
      [[0.75, 0.25], [0.1, 0.9]], [[0.2, 0.8], [0.6, 0.4]]
  ]))  # fmt: skip
  inter = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
  intra = 0.2 * np.log(0.4) + 0.8 * np.log(1.6)
  loss, metrics, grad = losses(z, *teachers, 2.0, 0.5, mask)
  want = dict(cross_entropy=np.log(2), inter_loss=inter, intra_loss=intra)
  assert set(metrics) == set(want)
  for name, value in want.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-5)
  np.testing.assert_allclose(
      loss, np.log(2) + 2 * inter + 0.5 * intra, rtol=1e-5
  )
  # p - y + 2 (p - p_prev) + 0.5 (p - p_f).
  first = -0.5 + 2 * (0.5 - 0.75) + 0.5 * (0.5 - 0.2)
  np.testing.assert_allclose(grad, [[first, -first], [0, 0]], atol=1e-6)


def test_equal_models_leave_the_cross_entropy():
  """Of the rows that count."""
  z, mask = np.float32([[1, 3], [2, -1], [0, 5]]), np.array([1, 1, 0], bool)
  loss, metrics, grad = losses(z, z, z, 1.0, 1.0, mask)
  assert metrics['inter_loss'] == metrics['intra_loss'] == 0
  want = jax.jit(jax.value_and_grad(CLASSIFICATION.loss))(
      z, np.arange(3) % 2, mask
  )
  np.testing.assert_allclose(loss, want[0], rtol=1e-6)
  np.testing.assert_allclose(grad, want[1], atol=1e-7)


# The server.


def federate(tx=momentum):
  """Two architectures, four clients (0 and 2, 1 and 3) and a public set."""
  return tiny_federation(
      (1, 2), norm=False, local=tiny_local(tx, 0.05, 2, 8),
      num_public=NUM_PUBLIC,
  )  # fmt: skip


def data_of(seed=0):
  return tiny_data(SIZES, seed, public=NUM_PUBLIC)


def test_each_client_gets_the_last_logits_of_the_others():
  algorithm, shape = make(federate()), (NUM_PUBLIC, NUM_CLASSES)
  update = jax.jit(lambda *args: algorithm.server_update(*args, None)[0])
  sent = jax.jit(lambda server, i: algorithm.downlink(
      server, None, Visit(i, 0, KEY)
  ))  # fmt: skip

  def upload(**values):
    """{group: [(client, value), ...]}; None is a padding slot."""
    return {
        name: Received(
            (),
            jnp.stack([jnp.full(shape, v, jnp.float32) for _, v in slots]),
            jnp.array([4 if i is None else i for i, _ in slots]),
        )
        for name, slots in values.items()
    }

  def totals(server):
    found = []
    for i in range(4):
      total, present = jax.device_get(sent(server, jnp.int32(i)))
      assert np.all(total == total[0, 0])
      assert present or total[0, 0] == 0
      found.append(total[0, 0] if present else None)
    return found

  server = algorithm.init(KEY)
  assert totals(server) == [None] * 4
  alone = upload(a=[(2, 5.0), (None, np.nan)], b=[(None, 7.0)])
  server = update(server, alone)
  assert totals(server) == [5, 5, None, 5]
  server = update(server, upload(a=[(0, 1.0), (2, 2.0)], b=[(1, 10.0)]))
  assert totals(server) == [12, 3, 11, 13]
  server = update(server, upload(a=[(None, 9.0)], b=[(1, 20.0), (3, 40.0)]))
  assert totals(server) == [62, 43, 61, 23]


def test_bytes_of_a_visit():
  """P C numbers each way."""
  federation, data = federate(), data_of()
  down, up = bytes_of_a_visit(make(federation), federation.groups[1], data)
  assert down == up == 4 * NUM_PUBLIC * NUM_CLASSES


# Limits.


def test_without_the_losses_of_others_clients_train_alone():
  """Bit for bit; warming up is training, too."""
  federation, data = federate(), data_of().client(0)
  algorithm = make(
      federation, public_epochs=0, inter_weight=0.0, intra_weight=0.0,
      pretrain_epochs=2,
  )  # fmt: skip
  group, alone = federation.groups[0], private(federation)

  @jax.jit
  def train(start, other):
    sent = algorithm.downlink(algorithm.init(KEY), group, VISIT)
    (variables, _), _, _ = alone.client_update(
        group, (start, None), (), data, VISIT
    )
    visited, _, metrics = algorithm.client_update(
        group, Client(start, other), sent, data, VISIT
    )
    warm, _, _ = algorithm.warm_up(
        group, Client(start, other), sent, data, VISIT
    )
    return variables, visited, warm, metrics

  start = algorithm.init_client(group, 0, KEY).variables
  other = jax.tree.map(lambda leaf: leaf + 1, start)
  variables, visited, warm, metrics = train(start, other)
  assert_equal(visited, Client(variables, other))
  assert_equal(warm, Client(variables, variables))
  assert np.any(variables.params['stem']['Dense_0']['kernel'] !=
                start.params['stem']['Dense_0']['kernel'])  # fmt: skip
  assert set(metrics) == {'cross_entropy', 'collaborative_loss', 'train_loss'}


def test_public_examples_are_not_augmented():
  def augments(images, key=None):
    assert key is None or len(images) == 8  # A batch of own examples.
    return preprocess(images)

  federation, data = federate(), data_of().replace(preprocess=augments)
  for target in ('current', 'previous'):
    algorithm = make(federation, target=target, public_batch_size=4)
    shapes = jax.eval_shape(
        lambda algorithm=algorithm: algorithm.init_client(
            federation.groups[0], 0, KEY
        )
    )
    for update in (algorithm.client_update, algorithm.warm_up):
      sent = algorithm.downlink(algorithm.init(KEY), None, VISIT)
      jax.eval_shape(
          functools.partial(update, federation.groups[0]),
          shapes, sent, data.client(0), VISIT,
      )  # fmt: skip


def with_maps(drop, data):
  """Visit and start of a client whose kernels have unused weights."""
  federation = federate(tx=optax.sgd)
  local = dataclasses.replace(federation.local, drop_unused_weights=drop)
  group = Group('maps', small_maps(), np.arange(4))
  algorithm = make(
      dataclasses.replace(federation, groups=(group,), local=local),
      target='previous',
  )

  def update(client, others):
    sent = algorithm.downlink(algorithm.init(KEY), group, VISIT)
    sent = sent._replace(value=others)
    return algorithm.client_update(group, client, sent, data, VISIT)[:2]

  return update, lambda: algorithm.init_client(group, 0, jax.random.key(2))


LOGITS = np.resize(random_logits(), (NUM_PUBLIC, NUM_CLASSES))


def test_unused_weights_return_after_a_visit():
  update, init = with_maps(True, data_of().client(0))
  before = jax.eval_shape(init)
  after, _ = jax.eval_shape(update, before, LOGITS)
  assert after == before


@pytest.mark.slow
def test_unused_weights_can_be_dropped():
  """The steps are the same with smaller kernels."""
  results = []
  for drop in (False, True):
    update, init = with_maps(drop, data_of().client(0))
    results.append(jax.jit(update)(init(), LOGITS))
  assert_trees(results[1], results[0], rtol=1e-4, atol=1e-5)


# Rounds in NumPy.


class Layer(nn.Module):
  """Dense layer, norm and ReLU."""

  @nn.compact
  def __call__(self, x, train, mask):
    x = nn.Dense(4, use_bias=False)(x.reshape(len(x), -1))
    return nn.relu(BatchNorm()(x, train, mask))


class Last(nn.Module):
  """Dense layer."""

  @nn.compact
  def __call__(self, x, train, mask):
    return nn.Dense(NUM_CLASSES)(x)


NAMES = (['stem', 'mid0', 'head'], ['stem', 'mid0', 'mid1', 'head'])


def of_nets():
  """The federation with nets of two and three layers with norms."""
  federation = federate()
  groups = []
  for group, (*names, _) in zip(federation.groups, NAMES, strict=True):
    blocks = [*(Block(name, Layer()) for name in names), Block('head', Last())]
    model = BlockModel(
        group.name, tuple(blocks), SHAPE, NUM_CLASSES, (1, len(names))
    )
    groups.append(dataclasses.replace(group, model=model))
  return dataclasses.replace(federation, groups=tuple(groups))


def doubles(variables, names):
  """A net as `fccl_numpy` has it."""
  p, s = {}, {}
  for block in names:
    for layer in variables.params[block].values():
      for leaf, value in layer.items():
        p[block, leaf] = np.float64(value)
  for block in names[:-1]:
    moments = variables.stats[block]['BatchNorm_0']
    s[block] = np.float64(moments['mean']), np.float64(moments['var'])
  return p, s


def examples(data, k):
  """Client k's examples and labels, and the public examples."""
  x = np.asarray(preprocess(data.images), np.float64)
  x, y = x.reshape(len(x), -1), np.asarray(data.labels)
  index = np.asarray(data.index)[k, : SIZES[k]]
  return dict(x=x[index], y=y[index]), x[np.asarray(data.public)]


def minibatches(visit, data):
  """The positions of a client's two minibatches of public examples."""
  order_key, _ = jax.random.split(jax.random.fold_in(visit.key, 2))
  key = jax.random.fold_in(order_key, 0)
  order = jax.device_get(shuffled_positions(key, data.of_public()))
  return [order[:4], order[4:8]]


def assert_client(got, want):
  for variables, net in ((got.variables, 'now'), (got.frozen, 'frozen')):
    assert_trees(
        doubles(variables, want['names']), want[net], rtol=1e-3, atol=1e-4
    )


def assert_losses(metrics, want):
  names = 'collaborative_loss', 'cross_entropy', 'inter_loss', 'intra_loss'
  got = [metrics[name] for name in names]
  np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-5)


def test_two_rounds_in_numpy():
  """Nets of two depths with norms, and public batches of 4 of 9 examples."""
  federation, data = of_nets(), data_of(3)
  algorithm = make(federation, public_batch_size=4, pretrain_epochs=3)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  start = jax.device_get(state)
  _, public = examples(data, 0)
  settings = dict(public=public, num_batches=3, lr=0.05)

  def client_of(state, k):
    clients = state.clients[f'tiny{k % 2 + 1}']
    return jax.tree.map(lambda leaf: leaf[k // 2], clients)

  clients = []
  for k in range(4):
    names, (own, _) = NAMES[k % 2], examples(data, k)
    own |= dict(names=names, now=doubles(client_of(start, k).variables, names))
    clients.append(fccl_numpy.pretrain(own, steps=3, **settings))

  def check(state):
    assert np.all(state.server.known)
    for k, client in enumerate(clients):
      assert_client(client_of(state, k), client)
      np.testing.assert_allclose(
          state.server.values[k], client['published'], rtol=1e-3, atol=1e-3
      )

  warm_up = rounds.make_warm_up(algorithm, federation, backend='map')
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  state, _ = warm_up(state, data, KEY)
  check(jax.device_get(state))
  for number in range(2):
    turns = [visit_pair(KEY, jnp.int32(number), k)[1] for k in range(4)]
    clients, losses = fccl_numpy.one_round(
        clients, [minibatches(turn, data) for turn in turns], steps=2,
        weight=LAMBDA, inter=1.0, intra=1.0, previous_target=False,
        forgets=True, **settings,
    )  # fmt: skip
    state, reports = run_round(state, data, KEY, jax.random.key(2))
    check(jax.device_get(state))
  for k, want in enumerate(losses):
    metrics = jax.device_get(reports[f'tiny{k % 2 + 1}'].metrics)
    assert_losses({name: m[k // 2] for name, m in metrics.items()}, want)


def test_a_visit_with_all_options_in_numpy():
  """The previous model's target, one optimiser per visit, other factors."""
  federation, data = of_nets(), data_of(3)
  group, names = federation.groups[1], NAMES[1]
  algorithm = make(
      federation, target='previous', off_diagonal_weight=0.1,
      inter_weight=0.5, intra_weight=3.0, public_batch_size=4,
      fresh_optimizer=False,
  )  # fmt: skip
  others = np.float32(
      np.random.default_rng(1).normal(size=(2, NUM_PUBLIC, NUM_CLASSES))
  )
  own, public = examples(data, 1)
  start, frozen = (group.model.init(jax.random.key(i)) for i in range(2))

  @jax.jit
  def update(client, total):
    sent = algorithm.downlink(algorithm.init(KEY), group, VISIT)
    sent = sent._replace(value=total)
    return algorithm.client_update(group, client, sent, data.client(1), VISIT)

  after, uplink, metrics = update(Client(start, frozen), others.sum(0))
  own |= dict(
      names=names, now=doubles(start, names), frozen=doubles(frozen, names)
  )
  want, losses = fccl_numpy.visit(
      own, list(others), public, minibatches(VISIT, data), num_batches=3,
      lr=0.05, steps=2, weight=0.1, inter=0.5, intra=3.0,
      previous_target=True, forgets=False,
  )  # fmt: skip
  assert_client(after, want)
  assert_losses(metrics, losses)
  np.testing.assert_allclose(
      uplink.kept, want['published'], rtol=1e-3, atol=1e-3
  )


# Refusals.


@pytest.mark.parametrize(
    'options,message',
    [
        (dict(target='prev'), "^Unknown target 'prev'"),
        (dict(off_diagonal_weight=-1.0), '^off_diagonal_weight must be at lea'),
        (dict(inter_weight=-0.1), '^inter_weight must be at least 0'),
        (dict(intra_weight=np.nan), '^intra_weight must be a finite number'),
        (dict(public_epochs=-1), '^public_epochs must be at least 0'),
        (dict(pretrain_epochs=-1), '^pretrain_epochs must be at least 0'),
        (dict(public_batch_size=2), '^public_batch_size must be at least 3'),
    ],
)
def test_bad_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    make(federate(), **options)


def test_a_public_set_of_two_is_refused():
  with pytest.raises(ValueError, match='3 public examples or more, got 2'):
    make(dataclasses.replace(federate(), num_public=2))
