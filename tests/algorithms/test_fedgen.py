"""FedGen: losses by hand, FedAvg as a limit, and a round in NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.algorithms import fedavg
from fedjax_het.algorithms import fedgen as make
from fedjax_het.algorithms.fedgen import client, server
from fedjax_het.algorithms.fedgen.client import (
  Sent,
  client_loss,
  count_labels,
  strength,
)
from fedjax_het.algorithms.fedgen.generator import (
  Generator,
  draw_labels,
  draw_noise,
  generate,
  init_generator,
)
from fedjax_het.algorithms.fedgen.server import (
  diversity_loss,
  generator_loss,
  generator_training,
  label_weights,
  train_generator,
)
from fedjax_het.algorithms.fedgen.uploads import Heads, sent_heads
from fedjax_het.data.federated import Batch, InMemory
from fedjax_het.engine import rounds
from fedjax_het.engine.local import shuffled_positions
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.traffic import full_bytes
from fedjax_het.engine.types import Federation, Group, Received, Turn, Visit
from fedjax_het.engine.visits import client_key, visit_pair
from fedjax_het.models import create
from fedjax_het.models.blocks import Block, Variables
from fedjax_het.models.layers import GlobalPool
from tests import numeric
from tests.algorithms.suite import Case, Clocks
from tests.models.test_reach import small_maps
from tests.tiny import (
  NUM_CLASSES,
  Dense,
  preprocess,
  tiny_data,
  tiny_federation,
  tiny_local,
  tiny_model,
  uploads_of,
)
from tests.trees import assert_trees

SMALL = dict(noise_size=3, hidden=4, server_steps=2)
# What the shared suite runs, see `tests/algorithms/suite.py`.
SUITE = [Case(SMALL), Case(dict(SMALL, aggregation='classifier'))]
# What the generator draws differs from visit to visit.
CLOCKS = Clocks(
    dict(generative_alpha=0.0, distill_weight=0.0, server_steps=1)
)
SIZES = (5, 8, 3, 7)
LATENT = 4
NET = Generator(LATENT, NUM_CLASSES, 3, 4)
KEY = jax.random.key(1)
TURN = Turn(jnp.int32(0), KEY)


def federate(norm=False, tx=optax.sgd, lr=0.1, batch_size=4, **kwargs):
  """Depths 1 and 2, four clients: 0 and 2, 1 and 3."""
  local = tiny_local(tx, lr, 2, batch_size)
  return tiny_federation((1, 2), norm=norm, local=local, **kwargs)


def play(algorithm, federation, num=1, cohort_size=4):
  """The states before the first round and after each."""
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=cohort_size, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  states = [jax.tree.map(np.array, state)]
  for _ in range(num):
    state, _ = run_round(state, tiny_data(SIZES), KEY, jax.random.key(2))
    states.append(jax.tree.map(np.array, state))
  return states


def same(a, b):
  return all(
      np.array_equal(x, y)
      for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


# Formulas.


def test_worked_diversity():
  noise = jnp.array([[0.0, 0.0], [1.0, 1.0]])
  z = jnp.array([[0.0], [2.0]])
  narrow = jax.jit(diversity_loss)(noise, z)
  np.testing.assert_allclose(narrow, 0.367879, rtol=1e-5)
  # Means over m and d: repeated columns change nothing.
  wide = jax.jit(diversity_loss)(np.tile(noise, (1, 3)), np.tile(z, (1, 5)))
  np.testing.assert_allclose(wide, 0.367879, rtol=1e-5)
  for equal in (jnp.ones((2, 4)), jnp.ones((1, 4))):
    value, grad = jax.jit(jax.value_and_grad(diversity_loss, 1))(
        noise[: len(equal)], equal
    )
    assert value == 1.0
    np.testing.assert_allclose(grad, 0.0, atol=1e-7)


def test_worked_label_weights():
  """Real examples [30, 0] and [10, 20]; an absent client has weight 0."""
  counts = jnp.array([[31.0, 1.0], [500.0, 700.0], [11.0, 21.0]])
  omega = label_weights(counts, jnp.array([True, False, True]))
  want = [[0.738095, 0.045455], [0.0, 0.0], [0.261905, 0.954545]]
  np.testing.assert_allclose(omega, want, atol=1e-6)
  losses = jnp.array([1.0, 7.0, 0.5])
  np.testing.assert_allclose(omega[:, 0] @ losses, 0.869048, rtol=1e-5)
  assert not np.any(label_weights(counts, jnp.zeros(3, bool)))


def heads_of(params):
  """Heads of two groups: row 0 of the leaves [S, ...], and the other rows."""
  model = tiny_model(1, norm=False)
  first = jax.tree.map(lambda a: a[:1], params)
  return [
      Heads(model, {'head': first}),
      Heads(model, {'head': jax.tree.map(lambda a: a[1:], params)}),
  ]


def batch_of(noise, y):
  return Batch(noise, y, jnp.ones(len(y), bool), jnp.arange(len(y)))


def test_the_generators_loss_is_a_sum_over_clients_and_a_mean_over_rows():
  rng = np.random.default_rng(0)
  variables = init_generator(NET, jax.random.key(3))
  noise = jnp.asarray(rng.random((6, 3)), jnp.float32)
  y = np.array([0, 1, 2, 0, 1, 1])
  params = {'Dense_0': dict(
      kernel=jnp.asarray(rng.normal(size=(3, LATENT, 3)), jnp.float32),
      bias=jnp.asarray(rng.normal(size=(3, 3)), jnp.float32),
  )}  # fmt: skip
  omega = jnp.asarray(rng.random((3, NUM_CLASSES)), jnp.float32)

  @jax.jit
  def loss_of(params, omega, eta):
    loss_fn = generator_loss(NET, CLASSIFICATION, heads_of(params), omega, eta)
    z, _ = generate(NET, variables, noise, y, train=True)
    return *loss_fn(variables, batch_of(noise, y), None), z

  loss, (stats, metrics), z = loss_of(params, omega, 0.7)

  def losses(k):
    head = {i: np.float64(a[k]) for i, a in params['Dense_0'].items()}
    return numeric.cross_entropies(numeric.dense(np.float64(z), head), y)

  want = sum(np.mean(np.asarray(omega)[k, y] * losses(k)) for k in range(3))
  spread = diversity_loss(noise, z)
  np.testing.assert_allclose(metrics['teacher_loss'], want, rtol=1e-5)
  np.testing.assert_allclose(loss, want + 0.7 * spread, rtol=1e-5)
  assert not same(stats, variables.stats)
  # With equal heads any counts give the loss of one head.
  one = jax.tree.map(lambda a: jnp.stack([a[0]] * 3), params)
  counts = jnp.array([[1.0, 4, 2], [7, 1, 1], [3, 5, 9]])
  omega = label_weights(counts, jnp.ones(3, bool))
  loss, *_ = loss_of(one, omega, 0.0)
  np.testing.assert_allclose(loss, np.mean(losses(0)), rtol=1e-5)


def test_weights_and_learning_rate_fall():
  known, nobody = jnp.array([True, False]), jnp.zeros(2, bool)
  got = [strength(10.0, 0.98, jnp.int32(t), known) for t in (1, 100, 2000)]
  np.testing.assert_allclose(got, [9.8, 1.3262, 1e-4], rtol=2e-5)
  assert strength(10.0, 0.98, jnp.int32(1), nobody) == 0.0
  assert strength(0.0, 0.98, jnp.int32(1), known) is None
  local = generator_training(CLASSIFICATION, 3e-4, 0.98, 1e-2, 8)
  np.testing.assert_allclose(
      local.learning_rate(jnp.int32(100)), 3.979e-5, rtol=2e-4
  )


@pytest.mark.parametrize(
    'features,classes,hidden,want',
    [
        (32, 10, 256, 19_744),
        (512, 100, 512, 331_776),
        (512, 10, 512, 285_696),
        (384, 10, 512, 220_032),
    ],
)
def test_size_of_the_generator(features, classes, hidden, want):
  net = Generator(features, classes, 32, hidden)
  params, stats = jax.eval_shape(
      functools.partial(init_generator, net), jax.random.key(0)
  )
  assert full_bytes(params) == 4 * want
  assert full_bytes(stats) == 4 * 2 * hidden


def test_generator_in_eval_mode_has_no_batch():
  variables = init_generator(NET, jax.random.key(3))
  noise, y = jax.random.uniform(KEY, (5, 3)), jnp.array([0, 1, 2, 0, 1])
  together, stats = generate(NET, variables, noise, y)
  assert same(stats, variables.stats) and np.any(together < 0)
  for i in range(5):
    alone, _ = generate(NET, variables, noise[i : i + 1], y[i : i + 1])
    np.testing.assert_allclose(alone[0], together[i], rtol=1e-6, atol=1e-7)
  other, _ = generate(NET, variables, noise, (y + 1) % 3)
  assert not np.any(np.all(other == together, axis=1))
  # 0.9 of the old statistics, 0.1 of the batch.
  x = np.concatenate([noise, np.eye(3)[y]], axis=1)
  hidden = numeric.dense(x, jax.device_get(variables.params['hidden']))
  _, stats = generate(NET, variables, noise, y, train=True)
  np.testing.assert_allclose(
      stats['norm']['mean'], 0.1 * hidden.mean(0), rtol=1e-4, atol=1e-6
  )


def test_draws():
  noise = draw_noise(KEY, 2000, 2)
  assert noise.min() >= 0 and noise.max() < 1
  np.testing.assert_allclose(noise.mean(0), 0.5, atol=0.03)
  labels = draw_labels(KEY, jnp.array([True, False, True]), 2000)
  assert set(np.unique(labels)) == {0, 2} and labels.dtype == jnp.int32
  np.testing.assert_allclose(np.mean(labels == 0), 0.5, atol=0.05)


def test_counts_leave_padding_out():
  batch = Batch(None, jnp.array([2, 2, 0, 1]), jnp.array([1, 1, 1, 0], bool), 0)
  counts = count_labels(jnp.ones(3), (), batch)
  assert counts.tolist() == [2.0, 1.0, 3.0]


# The clients' loss.


def a_batch(mask=(True, True, False, True)):
  data = tiny_data(SIZES).client(1)
  return data.batch(jnp.arange(4), jnp.array(mask))


@functools.cache
def losses_of(a_t, b_t, num=4):
  """A client's loss, metrics, and gradients for the client's and G's leaves."""
  model = tiny_model(1, norm=False)
  keys = [jax.random.key(i, impl='threefry2x32') for i in (5, 3)]
  variables = model.init(keys[0])
  generator = init_generator(NET, keys[1])

  def loss(params, generator):
    sent = Sent(None, generator, jnp.ones(NUM_CLASSES, bool))
    loss_fn = client_loss(model, CLASSIFICATION, NET, sent, a_t, b_t, num)
    value, (_, metrics, _) = loss_fn(Variables(params, {}), a_batch(), KEY)
    return value, metrics

  run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
  return jax.device_get(run(variables.params, generator))


@pytest.mark.parametrize('num', [4, 8])
def test_terms_are_added_with_their_weights(num):
  (value, metrics), _ = losses_of(10.0, 7.0, num)
  assert len(metrics) == 3 and min(metrics.values()) > 0.01
  # CE + a_t B_g / B CE_gen + b_t KL, with B = 4.
  want = (
      metrics['cross_entropy'] + 10 * num / 4 * metrics['generated_loss']
      + 7 * metrics['distillation_loss']
  )  # fmt: skip
  np.testing.assert_allclose(value, want, rtol=1e-6)
  (plain, alone), _ = losses_of(None, None)
  assert alone == {'cross_entropy': plain}
  np.testing.assert_allclose(plain, metrics['cross_entropy'], rtol=1e-6)


def test_gradients_reach_what_they_should():
  """CE_gen reaches the head and G; the KL reaches all blocks, but not G."""
  _, (plain, _) = losses_of(None, None)
  for a_t, b_t, name in (
      (10.0, None, 'generated_loss'), (None, 7.0, 'distillation_loss')
  ):  # fmt: skip
    (_, metrics), (grads, to_generator) = losses_of(a_t, b_t)
    assert set(metrics) == {'cross_entropy', name}
    to_generator = [np.any(leaf) for leaf in jax.tree.leaves(to_generator)]
    assert not any(to_generator) if b_t else any(to_generator)
    extra = jax.tree.map(np.subtract, grads, plain)
    assert all(np.abs(a).max() > 0.05 for a in jax.tree.leaves(extra['head']))
    for block in ('stem', 'mid0'):
      sizes = [np.abs(leaf).max() for leaf in jax.tree.leaves(extra[block])]
      assert max(sizes) < 1e-6 if a_t else max(sizes) > 0.01


def loss_at(p, q, batch, num, a_t, b_t):
  """The loss where generated rows have probabilities `p` and real ones `q`."""

  class Model:
    cut = (1, 2)

    @staticmethod
    def apply(variables, x, *, start=0, **kwargs):
      row = jnp.log(jnp.array(p if start == 2 else q))
      return jnp.tile(row, (len(x), 1)), {}

  known = jnp.array([True, False, True])
  sent = Sent(None, init_generator(NET, KEY), known)
  loss_fn = client_loss(Model, CLASSIFICATION, NET, sent, a_t, b_t, num)
  loss, (_, metrics, _) = loss_fn(None, batch, KEY)
  return loss, metrics


@pytest.fixture
def drawn(monkeypatch):
  """All drawn labels are 0; the classes that were allowed, call by call."""
  allowed = []

  def spy(key, known, num):
    allowed.append(known.tolist())
    return jnp.zeros(num, jnp.int32)

  monkeypatch.setattr(client, 'draw_labels', spy)
  return allowed


def test_the_divergence_is_from_the_generated_to_the_real(drawn):
  """p = (0.8, 0.2), q = (0.5, 0.5): 0.192745, not 0.223144."""
  p, q = (0.8, 0.2, 1e-30), (0.5, 0.5, 1e-30)
  _, metrics = loss_at(p, q, a_batch(), 4, 1.0, 1.0)
  np.testing.assert_allclose(
      metrics['distillation_loss'], 0.192745, rtol=1e-5
  )
  np.testing.assert_allclose(metrics['generated_loss'], -np.log(0.8), rtol=1e-5)
  assert drawn == [[True, False, True]]  # Only classes that G knows.


def test_draws_have_keys_of_their_own(monkeypatch):
  """Two of noise and one of labels a step, and two a round of the server."""
  seen = []

  def spied(draw):
    def spy(key, *args):
      seen.append(tuple(np.ravel(jax.random.key_data(key)).tolist()))
      return draw(key, *args)

    return spy

  for module in (client, server):
    for name in ('draw_noise', 'draw_labels'):
      monkeypatch.setattr(module, name, spied(getattr(module, name)))
  model = tiny_model(1, norm=False)
  sent = Sent(None, init_generator(NET, KEY), jnp.ones(NUM_CLASSES, bool))
  loss_fn = client_loss(model, CLASSIFICATION, NET, sent, 1.0, 1.0, 4)
  for seed in (1, 2):
    loss_fn(model.init(KEY), a_batch(), jax.random.key(seed))
  assert len(set(seen)) == len(seen) == 6
  local = generator_training(CLASSIFICATION, 1e-3, 1.0, 0.0, 4)
  variables = init_generator(NET, KEY)
  opt_state = local.optimizer(1.0).init(variables.params)

  def loss(variables, batch, key):
    zero = 0.0 * sum(a.sum() for a in jax.tree.leaves(variables.params))
    return zero, (variables.stats, {})

  for seed in (1, 2):
    turn = TURN._replace(key=jax.random.key(seed))
    train_generator(
        NET, variables, opt_state, loss, local, jnp.ones(NUM_CLASSES, bool), 1,
        turn,
    )  # fmt: skip
  assert len(set(seen)) == len(seen) == 10


@pytest.mark.parametrize('num,want', [(4, 4.7), (8, 7.7)])
def test_worked_loss(drawn, num, want):
  """CE = 1.2, CE_gen = 0.3, KL = 0.05, a_t = b_t = 10, and B_g = B or 2 B."""
  # Real labels are 1, drawn labels are 0. q_0 gives the KL its value.
  p_0, q_1 = np.exp(-0.3), np.exp(-1.2)
  p_1 = 1 - p_0
  q_0 = p_0 * np.exp((p_1 * np.log(p_1 / q_1) - 0.05) / p_0)
  p, q = (p_0, p_1, 1e-30), (q_0, q_1, 1 - q_0 - q_1)
  batch = batch_of(jnp.zeros((4, 3)), jnp.ones(4, jnp.int32))
  loss, metrics = loss_at(p, q, batch, num, 10.0, 10.0)
  for name, value in dict(
      cross_entropy=1.2, generated_loss=0.3, distillation_loss=0.05
  ).items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-5)
  np.testing.assert_allclose(loss, want, rtol=1e-6)


def test_features_and_head_are_the_model():
  """The generator imitates the classifier's inputs."""
  model = tiny_model(2)
  variables = model.init(jax.random.key(0))
  x = preprocess(tiny_data(SIZES).images)
  whole, _ = model.apply(variables, x)
  z, _ = model.apply(variables, x, stop=model.cut[1])
  again, _ = model.apply(variables, z, start=model.cut[1])
  np.testing.assert_array_equal(again, whole)


# Rounds.


def test_without_its_terms_it_is_fedavg():
  """Bit for bit, statistics too, while the generator trains."""
  federation = federate(norm=True)
  off = dict(SMALL, generative_alpha=0.0, distill_weight=0.0)
  got = play(make(federation, weights='data', **off), federation, 2)
  want = play(fedavg(federation, weights='data'), federation, 2)
  for a, b in zip(got[1:], want[1:], strict=True):
    assert_trees(a.server.model, b.server, rtol=0, atol=0)
  generators = [state.server.generator for state in got]
  assert not same(generators[0], generators[1])
  assert not same(generators[1], generators[2])


@pytest.fixture(scope='module')
def played():
  """Three rounds with the default weights of both terms."""
  federation = federate()
  return play(make(federation, **SMALL), federation, 3)


def test_the_first_round_is_that_of_fedavg(played):
  """Bit for bit: 0 times the finite gradients of both terms is added."""
  federation = federate()
  want = play(fedavg(federation), federation, 2)
  assert_trees(played[1].server.model, want[1].server, rtol=0, atol=0)
  assert not same(played[0].server.generator, played[1].server.generator)
  apart = np.abs(
      played[2].server.model.params['head']['Dense_0']['kernel']
      - want[2].server.params['head']['Dense_0']['kernel']
  )
  assert apart.max() > 1e-3


def test_adam_of_the_generator_goes_on(played):
  """Two steps a round."""
  counts = [state.server.opt_state[1][0].count for state in played]
  assert counts == [0, 2, 4, 6]


@pytest.fixture(scope='module')
def uploads():
  """The federation, the server's state, all uploads, and the server update."""
  federation = federate()
  algorithm = make(federation, weights='data', **SMALL)
  state = algorithm.init(jax.random.key(0))
  state = state._replace(known=jnp.ones(NUM_CLASSES, bool))
  received = uploads_of(algorithm, federation, state, tiny_data(SIZES), KEY, 1)
  step = jax.jit(lambda *args: algorithm.server_update(*args, TURN))
  return federation, state, received, step


def without(received, *names):
  """`received` with padding in all slots of some groups."""
  new = dict(received)
  for name in names:
    one = received[name]
    zeros = jax.tree.map(jnp.zeros_like, one.summed)
    kept = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), one.kept)
    new[name] = Received(zeros, kept, jnp.full_like(one.client_id, 4))
  return new


def test_counts_are_of_the_steps(uploads):
  """Two epochs over each client's examples, plus 1 for each class."""
  _, _, received, _ = uploads
  data = jax.device_get(tiny_data(SIZES))
  for group in jax.device_get(received).values():
    for row, k in enumerate(group.client_id.tolist()):
      labels = data.labels[data.index[k, : SIZES[k]]]
      want = 1 + 2 * np.bincount(labels, minlength=NUM_CLASSES)
      np.testing.assert_array_equal(group.kept.counts[row], want)


def test_blocks_without_a_sender_stay(uploads):
  """tiny2 alone owns mid1; the head becomes the mean of tiny1's clients."""
  _, state, received, step = uploads
  after, _ = step(state, without(received, 'tiny2'))
  assert same(after.model.params['mid1'], state.model.params['mid1'])
  for name in ('stem', 'mid0', 'head'):
    assert not same(after.model.params[name], state.model.params[name])
  change, _, weight = received['tiny1'].kept.classifier
  assert weight.tolist() == [5.0, 3.0]
  want = jax.tree.map(
      lambda x, d: x + d.sum(0) / 8, state.model.params['head'],
      change['head'],
  )  # fmt: skip
  assert_trees(after.model.params['head'], want, rtol=1e-6)
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(after)
             if leaf.dtype == np.float32)  # fmt: skip


def test_heads_are_those_after_training(uploads):
  """Each client's own y = x + change / weight, not the mean."""
  federation, state, received, _ = uploads
  exchange = make_exchange(federation, 'layerwise', 'data')
  before = state.model.params['head']['Dense_0']['kernel']
  for group in federation.groups:
    r = received[group.name]
    heads = sent_heads(exchange, group, state.model, r)
    change, _, weight = r.kept.classifier
    change = change['head']['Dense_0']['kernel']
    for row in range(2):
      got = heads.params['head']['Dense_0']['kernel'][row]
      want = before + change[row] / weight[row]
      np.testing.assert_allclose(got, want, rtol=1e-6)
      assert np.any(got != before)


def test_classes_of_the_round_and_classes_of_the_run(uploads):
  """G trains on this cohort's classes; `known` keeps those of all rounds."""
  _, state, received, step = uploads
  ones = {
      name: r._replace(kept=r.kept._replace(
          counts=jnp.array([[1.0, 9.0, 1.0], [1.0, 1.0, 1.0]])
      ))
      for name, r in received.items()
  }  # fmt: skip
  state = state._replace(known=jnp.array([True, False, False]))
  after, metrics = step(state, ones)
  assert after.known.tolist() == [True, True, False]
  assert np.isfinite(metrics['generator_loss'])
  # Padding slots have no effect.
  after, metrics = step(state, without(ones, 'tiny1', 'tiny2'))
  assert after.known.tolist() == [True, False, False]
  assert_trees(after, state, rtol=0, atol=0)
  assert all(np.isnan(value) for value in metrics.values())


def test_the_server_draws_qualified_labels():
  local = generator_training(CLASSIFICATION, 1e-3, 1.0, 0.0, 4)
  variables = init_generator(NET, KEY)

  def loss_fn(variables, batch, key):
    rows = jax.nn.one_hot(batch.y, NUM_CLASSES)
    metrics = dict(labels=rows.mean(0), noise=batch.x.mean())
    zero = 0.0 * sum(a.sum() for a in jax.tree.leaves(variables.params))
    return zero, (variables.stats, metrics)

  *_, metrics = train_generator(
      NET, variables, local.optimizer(1.0).init(variables.params), loss_fn,
      local, jnp.array([True, False, True]), 50, TURN,
  )  # fmt: skip
  np.testing.assert_allclose(metrics['labels'], [0.5, 0, 0.5], atol=0.1)
  np.testing.assert_allclose(metrics['noise'], 0.5, atol=0.05)


def test_a_client_without_a_step_is_no_teacher(uploads):
  """Its weight is 0, and its label counts are ignored."""
  _, state, received, step = uploads

  def absent(r):
    delta = jax.tree.map(jnp.zeros_like, r.kept.classifier)
    return r._replace(
        summed=jax.tree.map(jnp.zeros_like, r.summed),
        kept=r.kept._replace(classifier=delta),
    )

  idle = dict(received, tiny2=absent(received['tiny2']))
  got, _ = step(state, idle)
  want, _ = step(state, without(received, 'tiny2'))
  assert_trees(got, want, rtol=1e-6, atol=1e-7)


def test_clients_that_do_not_learn_still_teach():
  federation = federate(lr=0.0)
  before, after = play(make(federation, **SMALL), federation)
  assert same(before.server.model, after.server.model)
  for part in ('params', 'stats'):
    old, new = (getattr(s.server.generator, part) for s in (before, after))
    assert not same(old, new)


def test_a_generator_that_does_not_learn(uploads):
  """Only its statistics move."""
  federation, state, received, _ = uploads
  algorithm = make(federation, weights='data', **SMALL, generator_lr=0.0)
  after, _ = jax.jit(algorithm.server_update)(state, received, TURN)
  assert same(after.generator.params, state.generator.params)
  assert not same(after.generator.stats, state.generator.stats)
  assert not same(after.model, state.model)


def test_clients_leave_the_generator_as_it_is(uploads):
  """Without steps of the server G, its statistics and Adam's state stay.

  The uploads are of clients that trained with both of G's terms.
  """
  federation, state, received, step = uploads
  state, _ = step(state, received)  # Adam's moments are no longer 0.
  assert all(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
  algorithm = make(federation, weights='data', **{**SMALL, 'server_steps': 0})
  after, metrics = jax.jit(algorithm.server_update)(state, received, TURN)
  assert metrics == {}
  assert same(after.generator, state.generator)
  assert same(after.opt_state, state.opt_state)
  assert not same(after.model, state.model)


def test_a_download_generates_what_the_server_would(uploads):
  """In eval mode, bit for bit, after G and its statistics have moved."""
  federation, state, received, step = uploads
  after, _ = step(state, received)
  assert not same(after.generator.stats, state.generator.stats)
  y = jnp.array([0, 1, 2, 0, 1])
  row = jax.jit(lambda generator: generate(
      NET, generator, jax.random.uniform(KEY, (5, 3)), y
  )[0])  # fmt: skip
  for group in federation.groups:
    client_id = jnp.asarray(group.client_ids)[0]
    sent = make(federation, **SMALL).downlink(
        after, group, Visit(client_id, jnp.int32(1), KEY)
    )
    np.testing.assert_array_equal(row(sent.generator), row(after.generator))


@pytest.mark.parametrize('aggregation', ['layerwise', 'classifier'])
def test_what_travels(aggregation):
  """Up: the model once, its coefficient and a count for each class."""
  federation = federate(norm=True)
  algorithm = make(federation, aggregation=aggregation, **SMALL)
  group, data = federation.groups[1], tiny_data(SIZES)
  state = algorithm.init(jax.random.key(0))
  visit = Visit(jnp.int32(1), jnp.int32(0), KEY)
  sent = algorithm.downlink(state, group, visit)
  own = algorithm.init_client(group, 1, KEY)
  _, uplink, _ = jax.eval_shape(
      lambda: algorithm.client_update(group, own, sent, data.client(1), visit)
  )
  model = full_bytes(group.model.abstract_variables)
  if aggregation == 'classifier':
    model = full_bytes(group.model.abstract_variables.params['head'])
    assert set(own.params) == {'stem', 'mid0', 'mid1'}
    assert set(state.model.params) == {'head'}
  generator = full_bytes(state.generator)
  assert full_bytes(sent) == model + generator + NUM_CLASSES
  assert full_bytes(uplink) == model + 4 + 4 * NUM_CLASSES
  assert algorithm.personal == (aggregation == 'classifier')


def test_unused_weights_can_be_dropped():
  """The steps are the same with smaller kernels."""
  plain = small_maps()
  stem, middle, _ = plain.blocks
  last = Block('head', Dense(NUM_CLASSES, relu=False))
  blocks = (stem, middle, Block('pool', GlobalPool()), last)
  model = dataclasses.replace(plain, blocks=blocks, cut=(1, 3))
  uploads = []
  for drop in (False, True):
    local = tiny_local(optax.sgd, 0.1, drop_unused_weights=drop)
    federation = Federation((Group('g', model, np.arange(4)),), local)
    algorithm = make(federation, **SMALL)
    state = algorithm.init(jax.random.key(0))
    state = state._replace(known=jnp.ones(NUM_CLASSES, bool))
    data = tiny_data(SIZES)
    received = uploads_of(algorithm, federation, state, data, KEY, 1)['g']
    uploads.append((received.summed, received.kept))
  assert_trees(uploads[1], uploads[0], rtol=1e-5, atol=1e-6)
  kernel = uploads[0][0].params['mid0']['Conv_0']['kernel']
  assert np.any(kernel[1, 1]) and not np.any(kernel[0])


# One round in NumPy.

NAMES = {'tiny1': ['stem', 'mid0', 'head'],
         'tiny2': ['stem', 'mid0', 'mid1', 'head']}  # fmt: skip
ORACLE = dict(
    generative_alpha=3.0, distill_weight=2.0, decay=0.9, hidden=4,
    noise_size=2, server_steps=2, server_batch_size=4, eta=0.5,
    generated_batch_size=4, generator_lr=0.02, generator_l2=0.1,
)  # fmt: skip
RNG = np.random.default_rng(7)
NOISE = RNG.random((8, 2)).astype(np.float32)
LABELS = np.array([0, 2, 1, 1, 2, 0, 0, 1], np.int32)
ROUND = 3


def features(generator, stats, noise, y):
  """G in NumPy; if `stats` is None, it uses those of the batch."""
  x = np.concatenate([noise, np.eye(NUM_CLASSES)[y]], axis=1)
  x = numeric.dense(x, generator['hidden'])
  mean, var = (x.mean(0), x.var(0)) if stats is None else stats
  x = (x - mean) / np.sqrt(var + 1e-5)
  x = np.maximum(x * generator['norm']['scale'] + generator['norm']['bias'], 0)
  return numeric.dense(x, generator['output'])


def oracle_client(params, names, generator, stats, batches):
  """The parameters after SGD on the batches (x, y), in the order of rows."""
  decay = ORACLE['decay'] ** ROUND
  extra = features(generator, stats, NOISE[:4], LABELS[:4])
  for x, y in batches:
    z = features(generator, stats, NOISE[: len(y)], y)
    teacher = numeric.dense(z, params['head'])

    def loss(w, x=x, y=y, teacher=teacher):
      logits = numeric.net(w, names, x)
      fake = numeric.dense(extra, w['head'])
      return (
          numeric.cross_entropies(logits, y).mean()
          # B_g = 4 of B = 8.
          + 3.0 * decay * 0.5 * numeric.cross_entropies(fake, LABELS[:4]).mean()
          + 2.0 * decay * numeric.divergences(teacher, logits).mean()
      )

    grads = numeric.gradient(loss, params)
    params = numeric.combine(lambda w, g: w - 0.1 * g, params, grads)
  return params


def oracle_generator(generator, stats, heads, counts, batches):
  """G and its statistics after steps of a new Adam with L2."""
  mean, var = stats
  zeros = numeric.combine(np.zeros_like, generator)
  m, v = zeros, zeros
  for t, (noise, y) in enumerate(batches, 1):

    def loss(g, noise=noise, y=y):
      z = features(g, None, noise, y)
      total = 0.0
      for head, c in zip(heads, counts, strict=True):
        omega = c[y] / sum(counts)[y]
        logits = numeric.dense(z, head)
        total += np.mean(omega * numeric.cross_entropies(logits, y))
      exponent = 0.0
      for i in range(len(y)):
        for j in range(len(y)):
          exponent += np.mean((noise[i] - noise[j]) ** 2) * np.mean(
              np.abs(z[i] - z[j])
          )
      return total + 0.5 * np.exp(-exponent / len(y) ** 2)

    x = np.concatenate([noise, np.eye(NUM_CLASSES)[y]], axis=1)
    x = numeric.dense(x, generator['hidden'])
    mean, var = 0.9 * mean + 0.1 * x.mean(0), 0.9 * var + 0.1 * x.var(0)
    grads = numeric.gradient(loss, generator)
    grads = numeric.combine(lambda g, w: g + 0.1 * w, grads, generator)
    m = numeric.combine(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
    v = numeric.combine(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)
    rate = 0.02 * ORACLE['decay'] ** ROUND
    generator = numeric.combine(
        lambda w, m, v, t=t, rate=rate: w - rate * (m / (1 - 0.9**t)) / (
            np.sqrt(v / (1 - 0.999**t)) + 1e-8
        ),
        generator, m, v,
    )  # fmt: skip
  return generator, (mean, var)


def doubles(tree):
  """The tree in float64, without Flax's layer names."""
  return {
      n: {i: np.float64(a) for i, a in block.get('Dense_0', block).items()}
      for n, block in tree.items()
  }


def test_one_round_in_numpy(monkeypatch):
  """Two architectures, four clients; the same draws in every step."""
  for module in (client, server):
    monkeypatch.setattr(
        module, 'draw_noise', lambda key, num, size: jnp.asarray(NOISE[:num])
    )
    monkeypatch.setattr(
        module, 'draw_labels', lambda key, allowed, num: jnp.asarray(
            LABELS[:num]
        )
    )  # fmt: skip
  federation, data = federate(batch_size=8), tiny_data(SIZES)
  algorithm = make(federation, **ORACLE)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  norm = dict(scale=jnp.array([1.0, 0.5, 1.5, -1.0]),
              bias=jnp.array([0.3, 0.5, -0.2, 1.0]))  # fmt: skip
  stats = dict(mean=jnp.array([0.1, 0.4, -0.3, 0.2]),
               var=jnp.array([0.5, 0.2, 1.0, 0.3]))  # fmt: skip
  before = state.server._replace(
      generator=Variables(
          {**state.server.generator.params, 'norm': norm}, {'norm': stats}
      ),
      known=jnp.array([True, False, True]),
  )
  before = jax.device_get(before)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  state = state._replace(
      round_num=jnp.int32(ROUND), server=jax.tree.map(jnp.asarray, before)
  )
  after, _ = run_round(state, data, KEY, jax.random.key(2))
  weights, g = doubles(before.model.params), doubles(before.generator.params)
  stats = tuple(np.float64(before.generator.stats['norm'][n])
                for n in ('mean', 'var'))  # fmt: skip
  images = np.asarray(preprocess(data.images), np.float64)
  ends, counts = {}, []
  for k in range(4):
    names = NAMES[f'tiny{k % 2 + 1}']
    visit = visit_pair(KEY, jnp.int32(ROUND), jnp.int32(k))[1]
    order_key, _ = jax.random.split(visit.key)
    batches = []
    for epoch in range(2):
      order = shuffled_positions(
          jax.random.fold_in(order_key, epoch), data.client(k)
      )[: SIZES[k]]
      index = np.asarray(data.index[k])[order]
      x = images[index].reshape(len(index), -1)
      batches.append((x, np.asarray(data.labels)[index]))
    start = {n: weights[n] for n in names}
    ends[k] = oracle_client(start, names, g, stats, batches)
    counts.append(1.0 + 2 * np.bincount(batches[0][1], minlength=NUM_CLASSES))
  drawn = InMemory(jnp.asarray(NOISE), jnp.asarray(LABELS), jnp.int32(8))
  turn_key = client_key(KEY, jnp.int32(ROUND), 4)
  order_key, _ = jax.random.split(turn_key)
  order_key = jax.random.fold_in(order_key, 0)
  order = np.asarray(shuffled_positions(order_key, drawn))
  steps = [(np.float64(NOISE[order[i]]), LABELS[order[i]])
           for i in (slice(0, 4), slice(4, 8))]  # fmt: skip
  heads = [ends[k]['head'] for k in range(4)]
  want_g, want_stats = oracle_generator(g, stats, heads, counts, steps)
  want = {
      n: numeric.combine(
          lambda *leaves: sum(leaves) / len(leaves),
          *({n: end[n]} for end in ends.values() if n in end),
      )[n]
      for n in weights
  }
  got = after.server
  assert_trees(doubles(got.model.params), want, rtol=1e-5, atol=1e-5)
  assert_trees(doubles(got.generator.params), want_g, rtol=1e-5, atol=1e-5)
  got_stats = tuple(got.generator.stats['norm'][n] for n in ('mean', 'var'))
  assert_trees(got_stats, want_stats, rtol=1e-5, atol=1e-5)
  moved = np.abs(want_g['output']['kernel'] - g['output']['kernel'])
  assert np.median(moved) > 1e-2
  assert got.known.all()


# Refusals.


@pytest.mark.parametrize(
    'options,message',
    [
        (dict(aggregation='none'), "^Unknown aggregation 'none'"),
        (dict(generative_alpha=-1.0), 'generative_alpha must be at least 0'),
        (dict(distill_weight=np.nan), 'distill_weight must be a finite'),
        (dict(eta=np.inf), 'eta must be a finite number'),
        (dict(decay=0.0), 'decay must be above 0 and at most 1'),
        (dict(decay=1.5), 'decay must be above 0 and at most 1'),
        (dict(noise_size=0), 'noise_size must be at least 1'),
        (dict(hidden=0), 'hidden must be at least 1'),
        (dict(server_steps=-1), 'server_steps must be at least 0'),
        (dict(server_batch_size=0), 'server_batch_size must be at least 1'),
        (dict(generated_batch_size=0), 'generated_batch_size must be at least'),
        (dict(generator_lr=-1e-3), 'generator_lr must be at least 0'),
        (dict(generator_l2=np.nan), 'generator_l2 must be a finite number'),
    ],
)
def test_bad_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    make(federate(), **options)


def test_models_that_do_not_fit_are_refused():
  def of(*models):
    groups = tuple(
        Group(f'g{i}', model, np.array([i])) for i, model in enumerate(models)
    )
    return Federation(groups, tiny_local())

  message = 'vectors of one size, got g0 4, g1 5; choose models that agree'
  with pytest.raises(ValueError, match=message):
    make(of(tiny_model(1), tiny_model(1, width=5)), aggregation='architecture')
  flat = create('mini_resnet6', (8, 8, 1), 3, norm='batch', width=0.25)
  early = dataclasses.replace(flat, cut=(1, len(flat.blocks) - 2))
  with pytest.raises(ValueError, match=r'one size, got g0 \d+x\d+x\d+; choose'):
    make(of(early))


def test_a_classifier_with_running_statistics_is_refused():
  model = tiny_model(2)
  model = dataclasses.replace(model, cut=(1, 2))  # mid1 has a norm.
  federation = Federation((Group('g', model, np.array([0])),), tiny_local())
  with pytest.raises(ValueError, match="group 'g' has running statistics in "):
    make(federation)
