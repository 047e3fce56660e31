"""RHFL: losses and weights by hand, and rounds against NumPy."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.algorithms import private
from fedjax_het.algorithms import rhfl as make
from fedjax_het.algorithms.rhfl import (
    Server,
    Teacher,
    Upload,
    client_weights,
    public_loss,
    symmetric,
    teacher_of,
)
from fedjax_het.data.federated import Batch
from fedjax_het.engine import rounds
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.types import Maybe, Received, Visit
from fedjax_het.models import Variables
from tests.algorithms import rhfl_numpy
from tests.algorithms.suite import Case, Clocks
from tests.tiny import (
    NUM_CLASSES,
    bytes_of_a_visit,
    momentum,
    preprocess,
    server_step,
    tiny_data,
    tiny_federation,
    tiny_local,
)
from tests.trees import assert_equal, assert_trees

SHORT = dict(pretrain_epochs=2, public_batch_size=4)
SUITE = [Case(SHORT)]
CLOCKS = Clocks(SHORT, 'public_loss')
NUM_PUBLIC = 7
KEY = jax.random.key(1)


# The symmetric cross-entropy.


@jax.jit
def losses_and_gradient(logits, labels, a, b):
  def total(logits):
    found = symmetric(CLASSIFICATION, a, b).losses(logits, labels)
    return jnp.sum(found), found

  grad, found = jax.grad(total, has_aux=True)(logits)
  return found, grad


def losses(logits, labels, a=0.1, b=1.0):
  return losses_and_gradient(jnp.float32(logits), jnp.array(labels), a, b)[0]


def test_worked_symmetric_cross_entropy():
  logits = np.log([[0.7, 0.3]])
  for a, b, want in [(1, 0, 0.356675), (0, 1, 2.763102), (0.1, 1, 2.798770)]:
    np.testing.assert_allclose(losses(logits, [0], a, b), want, rtol=1e-6)
  # RCE is -log(1e-4) (1 - p_y), for any distribution over the other classes.
  found = losses(np.log([[0.2, 0.5, 0.3]]), [1], 0, 1)
  np.testing.assert_allclose(found, 9.210340 * 0.5, rtol=1e-6)


def test_a_wrong_label_has_a_bounded_loss():
  """Probabilities are at least 1e-7, so that a loss is never 0."""
  logits = np.array([[60.0, 0.0], [0.0, 60.0], [200.0, -200.0]], np.float32)
  found = losses(logits, [0, 0, 0], 0, 1)
  least = 9.210340e-7
  np.testing.assert_allclose(found, [least, 9.210340, least], rtol=1e-5)
  _, grad = losses_and_gradient(logits, jnp.zeros(3, int), 0.1, 1.0)
  # That of CE in the logits is bounded; RCE has none where p is clipped.
  np.testing.assert_allclose(grad[1], [-0.1, 0.1], rtol=1e-5)
  assert not np.any(grad[2])


# The weights.


def server_of(before, now, num_uploads=2, outputs=None):
  num = len(now)
  outputs = np.zeros((num, 1, 2)) if outputs is None else outputs
  return Server(
      Upload(jnp.float32(outputs), jnp.float32(now)),
      jnp.float32(before),
      jnp.broadcast_to(jnp.int32(num_uploads), num),
  )


def weights_of(*args, eta=0.5, **kwargs):
  weights, total = jax.device_get(
      jax.jit(client_weights, static_argnums=1)(server_of(*args, **kwargs), eta)
  )
  return weights, total


def test_worked_weights():
  """F = [1, 1/3, 1/9, 0], exponents 1/3 + F / (2 sum F)."""
  weights, total = weights_of([2, 2, 2, 2], [1, 1.5, 1.8, 2])
  np.testing.assert_allclose(total, 13 / 9, rtol=1e-5)
  np.testing.assert_allclose(
      weights, [0.308979, 0.245305, 0.227143, 0.218573], rtol=3e-6
  )


@pytest.mark.parametrize(
    ('before', 'now', 'eta'),
    [
        ([4, 2, 1, 6], [2, 1, 0.5, 3], 0.5),  # Equal F.
        ([2, 2, 2, 2], [1, 1.5, 1.8, 2], 0.0),
        ([2, 3, 4, 5], [2, 3, 4, 5], 0.5),  # F = 0.
        ([2, 0, 1, 1], [1, 1, 1, 1], 0.5),  # F = 1, -1, 0, 0.
        ([0, 0, 0, 0], [0, 0, 0, 0], 0.5),
    ],
)
def test_equal_weights_are_one_over_all_clients(before, now, eta):
  weights, _ = weights_of(before, now, eta=eta)
  np.testing.assert_allclose(weights, np.full(4, 0.25), rtol=1e-6)


def test_first_weights_are_one_over_all_others():
  weights, total = weights_of([0] * 4, [1, 2, 3, 4], num_uploads=1)
  np.testing.assert_allclose(weights, np.full(4, 1 / 3), rtol=1e-6)
  assert total == 0


def test_a_negative_sum_favours_the_client_whose_loss_rises_most():
  """F = [-1/2, -1/4], as the formula says."""
  weights, total = weights_of([1, 3], [2, 4])
  assert total == -0.75
  e = np.exp([1 + 1 / 3, 1 + 1 / 6])
  np.testing.assert_allclose(weights, e / e.sum(), rtol=1e-6)


def test_clients_without_two_losses():
  """Clients 0 to 3 have sent 2, 1, 0 and 2 of them: K is 3."""
  num_uploads = np.array([2, 1, 0, 2])
  weights, total = weights_of([2, 9, 9, 3], [1, 5, 7, 2], num_uploads)
  assert total == 1.5
  e = np.exp(0.5 + 0.5 * np.array([1, 0, 0, 0.5]) / 1.5) * (num_uploads > 0)
  np.testing.assert_allclose(weights, e / e.sum(), rtol=1e-6)
  nobody, total = weights_of([1, 1], [2, 2], num_uploads=0)
  assert not np.any(nobody) and total == 0
  alone, _ = weights_of([1, 1], [2, 2], np.array([0, 1]))
  assert alone.tolist() == [0, 1]


# What is taught.


def distributions(num, seed=0):
  """[num, NUM_PUBLIC, NUM_CLASSES] probabilities."""
  rng = np.random.default_rng(seed)
  return rng.dirichlet(np.ones(NUM_CLASSES), (num, NUM_PUBLIC))


@functools.cache
def public_gradient():
  """`(logits, teacher, batch)`, of a model whose outputs are its parameters."""
  model = types.SimpleNamespace(
      apply=lambda variables, x, **kwargs: (variables.params, {})
  )

  def loss(logits, teacher, batch):
    return public_loss(model, teacher)(Variables(logits, {}), batch, None)[0]

  return jax.jit(jax.value_and_grad(loss))


def test_the_mixture_has_the_gradient_of_the_sum_of_divergences():
  """Also where a teacher's probability is 0, and without the padding."""
  p, weights = distributions(4), np.array([0.1, 0.4, 0.2, 0.3])
  p[:, 2] = np.eye(NUM_CLASSES)[0]
  sent = teacher_of(2, jnp.float32(p), jnp.float32(weights))
  assert bool(sent.present)
  np.testing.assert_allclose(sent.value.weight, 0.8, rtol=1e-6)
  mixture = (0.1 * p[0] + 0.4 * p[1] + 0.3 * p[3]) / 0.8
  np.testing.assert_allclose(sent.value.outputs, mixture, atol=1e-6)
  logits = np.random.default_rng(1).normal(size=(4, NUM_CLASSES))
  position = np.array([5, 2, 0, 3])
  batch = Batch(None, None, jnp.arange(4) < 3, jnp.array(position))
  loss, grad = public_gradient()(jnp.float32(logits), sent.value, batch)
  want = np.zeros_like(logits)
  for i in (0, 1, 3):
    q = rhfl_numpy.softmax(logits)
    want += weights[i] * (q - p[i, position]) / 3
  want[3] = 0
  np.testing.assert_allclose(grad, want, atol=1e-6)
  mixture = np.maximum(mixture[position], 1e-300)
  gap = np.sum(mixture * (np.log(mixture) - np.log(q)), axis=1)
  np.testing.assert_allclose(loss, 0.8 * gap[:3].mean(), rtol=1e-5)


def test_equal_clients_teach_each_other_nothing():
  p = np.repeat(distributions(1), 3, axis=0)
  sent = teacher_of(0, jnp.float32(p), jnp.float32([0.5, 0.3, 0.2]))
  batch = Batch(None, None, jnp.ones(NUM_PUBLIC, bool), jnp.arange(NUM_PUBLIC))
  loss, grad = public_gradient()(jnp.log(p[0]), sent.value, batch)
  np.testing.assert_allclose(loss, 0, atol=1e-6)
  np.testing.assert_allclose(grad, np.zeros_like(p[0]), atol=1e-7)


def test_nobody_teaches_a_client_that_is_alone():
  p = jnp.float32(distributions(3))
  for weights in ([1.0, 0.0, 0.0], [0.0, 0.0, 0.0]):
    assert not bool(teacher_of(0, p, jnp.float32(weights)).present)


# The server.


def test_the_server_keeps_the_last_upload_of_every_client():
  """Padding slots, which hold NaN here, change nothing."""
  federation = tiny_federation((1, 2), norm=False, num_public=NUM_PUBLIC)
  algorithm = make(federation)
  p = np.float32(distributions(8))

  def received(uploads):
    """{client: (row of p, loss)}."""
    found = {}
    for group in federation.groups:
      ids = group.client_ids.tolist()
      rows = [uploads.get(i) for i in ids]
      nan = np.full_like(p[0], np.nan)
      found[group.name] = Received(
          (),
          Upload(
              jnp.stack([nan if r is None else p[r[0]] for r in rows]),
              jnp.float32([np.nan if r is None else r[1] for r in rows]),
          ),
          jnp.int32([4 if r is None else i for i, r in zip(ids, rows)]),
      )
    return found

  server = algorithm.init(KEY)
  first = {k: (k, 1.0 + k) for k in range(4)}
  server = server_step(algorithm, server, received(first))
  assert server.num_uploads.tolist() == [1, 1, 1, 1]
  np.testing.assert_array_equal(server.last.outputs, p[:4])
  second = {0: (4, 0.5), 3: (7, 3.0)}
  server = server_step(algorithm, server, received(second))
  np.testing.assert_array_equal(server.last.outputs, p[[4, 1, 2, 7]])
  assert server.last.loss.tolist() == [0.5, 2, 3, 3]
  assert server.num_uploads.tolist() == [2, 1, 1, 2]
  assert server.loss_before[jnp.array([0, 3])].tolist() == [1, 4]
  # The order of groups does not matter.
  third = received({0: (5, 0.25), 1: (6, 7.0)})
  backwards = dict(reversed(third.items()))
  after = server_step(algorithm, server, third)
  assert_equal(server_step(algorithm, server, backwards), after)
  assert after.num_uploads.tolist() == [2, 2, 1, 2]
  assert after.loss_before.tolist()[:2] == [0.5, 2]
  # F = [1, -5/7, 0, 1/3].
  metrics = algorithm.server_update(server, third, None)[1]
  np.testing.assert_allclose(metrics['confidence_sum'], 13 / 21, rtol=1e-5)
  weights, _ = client_weights(after, 0.5)
  for k in range(4):
    sent = algorithm.downlink(
        after, None, Visit(jnp.int32(k), jnp.int32(0), KEY)
    )
    assert_equal(sent, teacher_of(k, after.last.outputs, weights))


# A visit.


def visit_of(algorithm, federation, sent, data, client_id=1):
  """A visit of a client that has just been made, and its first variables."""
  group = federation.groups[client_id % len(federation.groups)]
  client = algorithm.init_client(group, client_id, KEY)
  visit = Visit(jnp.int32(client_id), jnp.int32(0), KEY)
  update = jax.jit(functools.partial(algorithm.client_update, group))
  return update(client, sent, data.client(client_id), visit), client


def a_teacher():
  """One that knows all of the public set."""
  p = jnp.float32(distributions(1)[0])
  return Maybe(Teacher(p, jnp.float32(0.7)), jnp.bool_(True))


def test_without_a_teacher_cross_entropy_alone_trains_as_private_does():
  federation = tiny_federation((1, 2), num_public=NUM_PUBLIC)
  data = tiny_data(public=NUM_PUBLIC)
  algorithm = make(federation, ce_weight=1.0, rce_weight=0.0)
  sent = a_teacher()._replace(present=jnp.bool_(False))
  got, _ = visit_of(algorithm, federation, sent, data)
  variables, uplink, metrics = got
  baseline = private(federation)
  (want, _), _, told = visit_of(baseline, federation, (), data)[0]
  assert_trees(variables, want, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
      metrics['train_loss'], told['train_loss'], rtol=1e-5
  )
  assert metrics['public_loss'] == 0
  assert uplink.summed == ()


def test_the_public_pass_is_not_augmented_and_may_restart_the_optimiser():
  """Restarted momentum is plain SGD, and has no state between batches."""
  data = dataclasses.replace(
      tiny_data(public=NUM_PUBLIC),
      preprocess=lambda images, key=None: (
          preprocess(images) + (0 if key is None else jnp.nan)
      ),
  )

  def run(tx, **options):
    federation = tiny_federation(
        (1, 2), norm=False, num_public=NUM_PUBLIC,
        local=tiny_local(tx, 0.1, epochs=0),
    )  # fmt: skip
    algorithm = make(federation, public_batch_size=4, **options)
    (variables, uplink, metrics), before = visit_of(
        algorithm, federation, a_teacher(), data
    )
    assert metrics['public_loss'] > 0 and metrics['train_loss'] == 0
    assert np.all(np.isfinite(uplink.kept.outputs))
    gap = jax.tree.map(
        lambda a, b: np.max(np.abs(a - b)), variables.params, before.params
    )
    assert max(jax.tree.leaves(gap)) > 1e-3
    return variables

  plain = run(optax.sgd)
  assert_trees(
      run(momentum, fresh_optimizer=True), plain, rtol=1e-5, atol=1e-6
  )
  with pytest.raises(AssertionError):
    assert_trees(run(momentum), plain, rtol=1e-3, atol=1e-4)


def test_what_travels():
  federation = tiny_federation((1, 2), num_public=NUM_PUBLIC)
  data = tiny_data(public=NUM_PUBLIC)
  size = 4 * (NUM_PUBLIC * NUM_CLASSES + 1)
  algorithm = make(federation)
  for group in federation.groups:
    assert bytes_of_a_visit(algorithm, group, data) == (size, size)


# Whole rounds.

SIZES = (5, 8, 4, 7)
NAMES = {'tiny1': ('stem', 'mid0', 'head'), 'tiny2': (
    'stem', 'mid0', 'mid1', 'head'
)}  # fmt: skip
RUN = dict(eta=2.0, lr=0.2)


def in_numpy(variables):
  """A net as `rhfl_numpy` has it."""
  params, stats = jax.device_get(tuple(variables))
  p = {
      (block, layer, leaf): np.float64(value)
      for block, layers in params.items()
      for layer, leaves in layers.items()
      for leaf, value in leaves.items()
  }
  s = {
      block: tuple(np.float64(moments['BatchNorm_0'][m])
                   for m in ('mean', 'var'))
      for block, moments in stats.items()
      if moments
  }  # fmt: skip
  return p, s


def models_of(federation, state):
  """The nets of all clients, by id."""
  found = {}
  for group in federation.groups:
    clients = jax.device_get(state.clients[group.name])
    for row, k in enumerate(group.client_ids.tolist()):
      found[k] = in_numpy(jax.tree.map(lambda a, row=row: a[row], clients))
  return [found[k] for k in range(len(found))]


def test_three_rounds_in_numpy():
  """Two architectures with norms, four clients, one minibatch in each set."""
  federation = tiny_federation(
      (1, 2), num_public=NUM_PUBLIC,
      local=tiny_local(optax.sgd, RUN['lr'], epochs=2, batch_size=8),
  )  # fmt: skip
  data = tiny_data(SIZES, public=NUM_PUBLIC)
  algorithm = make(
      federation, eta=RUN['eta'], ce_weight=0.3, rce_weight=0.5,
      pretrain_epochs=3,
  )  # fmt: skip
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  start = models_of(federation, state)
  warm_up = rounds.make_warm_up(algorithm, federation, backend='map')
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  state, _ = warm_up(state, data, KEY)
  reports = []
  for key in jax.random.split(KEY, 3):
    state, report = run_round(state, data, key, KEY)
    reports.append(jax.device_get(report))

  images = np.asarray(preprocess(data.images), np.float64)
  images, labels = images.reshape(len(images), -1), np.asarray(data.labels)
  clients = []
  for k, size in enumerate(SIZES):
    index = np.asarray(data.index)[k, :size]
    names = NAMES[f'tiny{k % 2 + 1}']
    clients.append((names, images[index], labels[index]))
  nets, told = rhfl_numpy.run(
      start, clients, images[np.asarray(data.public)],
      num_rounds=3, pretrain=3, epochs=2, a=0.3, b=0.5, **RUN,
  )  # fmt: skip
  # The weights of the last two rounds differ enough for a test.
  assert all(np.ptp(weights) > 0.05 for weights, _, _ in told[1:])
  for got, want in zip(models_of(federation, state), nets, strict=True):
    assert_trees(got, want, rtol=2e-4, atol=2e-4)
  for report, (_, divergences, own) in zip(reports, told, strict=True):
    for i, group in enumerate(federation.groups):
      metrics = report[group.name].metrics
      np.testing.assert_allclose(
          metrics['public_loss'], divergences[i::2], rtol=1e-3, atol=1e-4
      )
      np.testing.assert_allclose(metrics['train_loss'], own[i::2], rtol=1e-3)


# Refusals.


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(eta=-0.1), 'eta must be at least 0'),
        (dict(ce_weight=-1.0), 'ce_weight must be at least 0'),
        (dict(rce_weight=-1.0), 'rce_weight must be at least 0'),
        (dict(ce_weight=0.0, rce_weight=0.0), r'ce_weight \+ rce_weight must'),
        (dict(pretrain_epochs=-1), 'pretrain_epochs must be at least 0'),
        (dict(public_batch_size=0), 'public_batch_size must be at least 1'),
    ],
)
def test_bad_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    make(tiny_federation((1,), num_public=NUM_PUBLIC), **options)


def test_a_federation_without_a_public_set_is_refused():
  with pytest.raises(ValueError, match='rhfl needs a public set'):
    make(tiny_federation((1,)))
