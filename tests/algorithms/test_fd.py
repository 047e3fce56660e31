"""FD: its means and targets by hand, and its server."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.class_means import class_means, class_sums
from fedjax_het.algorithms import fd, private
from fedjax_het.algorithms.fd import divergence, targets
from fedjax_het.engine import rounds, traffic
from fedjax_het.engine.types import Federation, Group, Maybe, Visit
from fedjax_het.models import create
from tests.algorithms.suite import Clocks
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  tiny_data,
  tiny_federation,
  tiny_local,
)

# For the shared tests, see `tests/algorithms/suite.py`.
CLOCKS = Clocks(dict(regulariser='kl'), 'distillation_loss')
SIZES = (5, 8, 3, 7)


def federate(**kwargs):
  """Two groups of two clients, depths 1 and 2, with norms."""
  return tiny_federation((1, 2), **kwargs)


def run(algorithm, federation, num_rounds=1, data=None):
  """The state after some rounds, and the last reports, on the host."""
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=federation.num_clients, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  data = tiny_data(SIZES) if data is None else data
  for _ in range(num_rounds):
    state, reports = run_round(
        state, data, jax.random.key(1), jax.random.key(2)
    )
  return jax.device_get(state), jax.device_get(reports)


def test_sums_and_counts_of_a_batch():
  a, b, c = jnp.array([[1.0, 2.0], [3.0, 6.0], [5.0, 7.0]])
  total = class_sums(jnp.stack([a, b, c]), jnp.array([0, 0, 1]), 3)
  assert total.counts.tolist() == [2, 1, 0]
  assert class_means(total).tolist() == [[2, 4], [5, 7], [0, 0]]


def test_leave_one_out_means():
  vectors = jnp.array([[3.0, 0.0], [0.0, 3.0], [3.0, 3.0]])[:, None]
  store = Maybe(vectors, jnp.ones((3, 1), bool))
  assert targets(store).value.tolist() == [[2, 2]]
  others = [targets(store, i).value[0] for i in range(3)]
  assert others[0].tolist() == [1.5, 3] and others[2].tolist() == [1.5, 1.5]
  # (sum - F_k) / (|K_y| - 1) averages back to the plain mean.
  np.testing.assert_allclose(np.mean(others, axis=0), [2, 2], rtol=1e-6)


def test_a_client_that_has_sent_nothing_is_not_subtracted():
  vectors = jnp.array([[3.0, 0.0], [0.0, 3.0], [9.0, 9.0]])[:, None]
  store = Maybe(vectors, jnp.array([[True], [True], [False]]))
  assert targets(store, 2).value.tolist() == [[1.5, 1.5]]
  assert targets(store, 0).value.tolist() == [[0, 3]]


def test_two_clients_get_each_other_and_one_gets_nothing():
  vectors = jnp.array([[0.1, 0.7], [1e6, -0.3]])[:, None]
  both = Maybe(vectors, jnp.ones((2, 1), bool))
  for i in range(2):
    goal = targets(both, i)
    np.testing.assert_array_equal(goal.value, vectors[1 - i])
    assert goal.present.tolist() == [True]
  alone = targets(Maybe(vectors, jnp.array([[True], [False]])), 0)
  assert alone.present.tolist() == [False] and not np.any(alone.value)


@pytest.mark.parametrize(
    ('regulariser', 'want'),
    [('kl', 0.0), ('cross_entropy', 0.25 * np.log(4) + 0.75 * np.log(4 / 3))],
)
def test_an_output_at_its_target_has_no_gradient(regulariser, want):
  target = jnp.array([[0.25, 0.75]])
  value, grad = jax.value_and_grad(
      lambda z: divergence(z, target, regulariser)[0]
  )(jnp.log(target) + 3.0)
  np.testing.assert_allclose(value, want, atol=1e-6)
  np.testing.assert_allclose(grad, np.zeros((1, 2)), atol=1e-6)
  # Elsewhere both have the gradient p - t.
  grad = jax.grad(lambda z: divergence(z, target, regulariser)[0])(
      jnp.zeros((1, 2))
  )
  np.testing.assert_allclose(grad, [[0.25, -0.25]], atol=1e-6)


def test_a_certain_target_has_a_finite_divergence():
  target, logits = jnp.array([[1.0, 0.0]]), jnp.zeros((1, 2))
  for regulariser in ('kl', 'cross_entropy'):
    value = divergence(logits, target, regulariser)
    np.testing.assert_allclose(value, [np.log(2)], rtol=1e-6)


def outputs_by_class(space, data, federation):
  """F_k of all clients in NumPy, [K, C, C], and which classes each has."""
  num = federation.num_clients
  means = np.zeros((num, NUM_CLASSES, NUM_CLASSES), np.float32)
  seen = np.zeros((num, NUM_CLASSES), bool)
  for group in federation.groups:
    variables = group.model.init(jax.random.key(0))
    for i in group.client_ids:
      mine = data.index[i, : SIZES[i]]
      z, _ = group.model.apply(variables, data.preprocess(data.images[mine]))
      out = np.asarray(jax.nn.softmax(z) if space == 'prob' else z)
      for y in range(NUM_CLASSES):
        rows = out[np.asarray(data.labels[mine]) == y]
        seen[i, y] = len(rows) > 0
        means[i, y] = rows.mean(0) if len(rows) else 0
  return means, seen


@pytest.mark.parametrize(
    'space', ['logit', pytest.param('prob', marks=pytest.mark.slow)]
)
@pytest.mark.parametrize('mean', ['leave_one_out', 'all'])
def test_the_server_keeps_means_and_sends_those_of_the_others(space, mean):
  """With a learning rate of 0 the outputs are known in closed form."""
  local = tiny_local(optax.sgd, lr=0.0, epochs=1)  # Some class is seen once.
  federation = federate(norm=False, local=local)
  algorithm = fd(federation, space=space, mean=mean)
  state, reports = run(algorithm, federation)
  means, seen = outputs_by_class(space, tiny_data(SIZES), federation)
  np.testing.assert_array_equal(state.server.present, seen)
  np.testing.assert_allclose(state.server.value, means, rtol=1e-4, atol=1e-5)
  assert all(np.all(r.metrics['distillation_loss'] == 0)
             for r in reports.values())  # fmt: skip
  for i in range(4):
    visit = Visit(jnp.int32(i), jnp.int32(1), jax.random.key(0))
    sent = algorithm.downlink(state.server, federation.groups[0], visit)
    who = seen & (np.arange(4) != i)[:, None] if mean != 'all' else seen
    number = who.sum(0)
    want = (means * who[..., None]).sum(0) / np.maximum(number, 1)[:, None]
    np.testing.assert_array_equal(sent.present, number > 0)
    np.testing.assert_allclose(sent.value, want, rtol=1e-4, atol=1e-5)


def one_visit_loss(space, regulariser):
  """The distillation loss at learning rate 0, and that of each example."""
  federation = federate(norm=False, local=tiny_local(optax.sgd, lr=0.0))
  algorithm = fd(federation, space=space, regulariser=regulariser)
  group, data = federation.groups[0], tiny_data(SIZES)
  client = algorithm.init_client(group, 0, jax.random.key(0))
  rows = np.array([[1.0, 2.0, 3.0], [0.5, 0.0, 0.5], [4.0, 4.0, 4.0]])
  if space == 'prob':
    rows = rows / rows.sum(1, keepdims=True)
  sent = Maybe(jnp.asarray(rows, jnp.float32), jnp.array([True, True, False]))
  visit = Visit(jnp.int32(0), jnp.int32(1), jax.random.key(0))
  _, _, metrics = algorithm.client_update(
      group, client, sent, data.client(0), visit
  )
  logits, _ = group.model.apply(
      group.model.init(jax.random.key(0)),
      data.preprocess(data.images[data.index[0, :5]]),
  )
  goal = rows if space == 'prob' else np.asarray(jax.nn.softmax(rows))
  labels = np.asarray(data.labels[data.index[0, :5]])
  log_q = np.asarray(jax.nn.log_softmax(logits))
  losses = []
  for y, q in zip(labels, log_q):
    t = goal[y]
    entropy = -np.sum(t[t > 0] * np.log(t[t > 0]))
    value = -np.sum(t * q) - (entropy if regulariser == 'kl' else 0)
    losses.append(0 if y == 2 else value)
  return metrics['distillation_loss'], losses


@pytest.mark.parametrize('space', ['logit', 'prob'])
@pytest.mark.parametrize('regulariser', ['kl', 'cross_entropy'])
def test_the_client_measures_its_outputs_against_the_target(space, regulariser):
  """A class that no other client has adds 0; batches have 4 and 1 examples."""
  got, losses = one_visit_loss(space, regulariser)
  assert len(losses) == 5
  # The order is random: any one example may be alone in its batch.
  total, alone = sum(losses), np.array(losses)
  each = (alone + (total - alone) / 4) / 2
  # Two passes, whose last examples may differ.
  pairs = (each[:, None] + each[None]) / 2
  assert np.abs(pairs - np.asarray(got)).min() < 1e-5


def test_a_step_of_the_head_by_hand():
  """b <- b - lr mean(p - y + distill_weight (p - t_y))."""
  rate, weight = 0.1, 0.5
  local = tiny_local(optax.sgd, rate, epochs=1, batch_size=4)
  federation = tiny_federation((1,), norm=False, local=local)
  data = tiny_data((4, 4))
  group, (y, x) = federation.groups[0], (data.labels, data.images)
  algorithm = fd(federation, distill_weight=weight, space='logit')
  client = algorithm.init_client(group, 0, jax.random.key(0))
  rows = jnp.array([[1.0, 2.0, 3.0], [0.5, 0.0, 0.5], [4.0, 1.0, 0.0]])
  visit = Visit(jnp.int32(0), jnp.int32(1), jax.random.key(0))
  after, _, _ = algorithm.client_update(
      group, client, Maybe(rows, jnp.ones(3, bool)), data.client(0), visit
  )
  mine = data.index[0, :4]
  logits, _ = group.model.apply(client.variables, data.preprocess(x[mine]))
  p, labels = jax.nn.softmax(logits), np.asarray(y[mine])
  pull = p - jax.nn.softmax(rows)[labels]
  step = np.mean(p - np.eye(3)[labels] + weight * pull, axis=0)
  got, before = (
      c.variables.params['head']['Dense_0']['bias'] for c in (after, client)
  )
  np.testing.assert_allclose(got, before - rate * step, rtol=1e-5, atol=1e-7)


def test_distill_weight_0_is_private_bit_for_bit():
  local = tiny_local(keep_optimizer=True)
  federation, data = tiny_federation((1,), local=local), tiny_data((5, 8))
  got, want = (
      jax.tree.leaves(run(algorithm, federation, 3, data)[0].clients['tiny1'])
      for algorithm in (
          fd(federation, distill_weight=0.0),
          private(federation),
      )
  )
  assert len(got) == len(want)
  assert all(np.array_equal(x, y) for x, y in zip(got, want))


def test_ten_classes_take_400_bytes_and_what_is_not_there_none():
  model = create('mlp', SHAPE, 10, hidden=4, depth=2, norm='none')
  federation = Federation(
      (Group('mlp', model, np.arange(2)),), tiny_local(batch_size=10, steps=3)
  )
  data = tiny_data((10, 10)).replace(
      labels=jnp.concatenate([jnp.arange(10), jnp.arange(10) % 7])
  )
  _, reports = run(fd(federation), federation, 2, data)
  assert traffic.num_bytes(reports['mlp'].up).tolist() == [400, 280]
  # Each gets what the other has.
  assert traffic.num_bytes(reports['mlp'].down).tolist() == [280, 400]


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(space='logits'), "^Unknown space 'logits'"),
        (dict(regulariser='mse'), "^Unknown regulariser 'mse'"),
        (dict(mean='some'), "^Unknown mean 'some'"),
        (dict(distill_weight=-1.0), 'distill_weight must be at least 0'),
    ],
)
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    fd(federate(), **options)


def test_models_of_different_outputs_are_refused():
  groups = tuple(
      Group(f'c{c}', create('mlp', SHAPE, c, hidden=2), np.array([i]))
      for i, c in enumerate((3, 4))
  )
  with pytest.raises(ValueError, match='number of outputs, got c3 3, c4 4'):
    fd(Federation(groups, tiny_local()))
