"""Fed-ET: the consensus by hand, FedAvg as a limit, and a round in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.teachers import group_logits
from fedjax_het.algorithms import fedavg
from fedjax_het.algorithms import fedet as make
from fedjax_het.algorithms.fedet import ensemble
from fedjax_het.algorithms.fedet.ensemble import Consensus
from fedjax_het.algorithms.fedet.server import (
  server_loss,
  with_common_classifier,
)
from fedjax_het.data.federated import Batch
from fedjax_het.engine import rounds
from fedjax_het.engine.evaluate import make_evaluate
from fedjax_het.engine.local import shuffled_positions
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.types import Received, Turn, Visit
from fedjax_het.engine.visits import client_key
from fedjax_het.models.blocks import Variables
from tests import numeric
from tests.algorithms.suite import Case
from tests.models.test_reach import small_maps
from tests.tiny import (
  bytes_of_a_visit,
  preprocess,
  tiny_data,
  tiny_federation,
  tiny_local,
  tiny_model,
  uploads_of,
)
from tests.trees import assert_trees

SUITE = [Case(dict(server_batch_size=4))]
SIZES = (5, 8, 3, 7)
NUM_PUBLIC = 6
KEY = jax.random.key(1)


def federate(norm=False, lr=0.1, batch_size=8, large=2, **kwargs):
  """Depths 1 and 2, four clients (0 and 2, 1 and 3), and a large model."""
  kwargs.setdefault('server_model', tiny_model(large, norm=norm))
  return tiny_federation(
      (1, 2), norm=norm, local=tiny_local(optax.sgd, lr, 2, batch_size),
      num_public=NUM_PUBLIC, **kwargs,
  )  # fmt: skip


def data_of(seed=0):
  return tiny_data(SIZES, seed, public=NUM_PUBLIC)


def play(algorithm, federation, num=1, cohort_size=4):
  """The states before the first round and after each, and the last report."""
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=cohort_size, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  states, report = [jax.tree.map(np.array, state)], None
  for _ in range(num):
    state, report = run_round(state, data_of(), KEY, jax.random.key(2))
    states.append(jax.tree.map(np.array, state))
  return states, report


def same(a, b):
  return all(
      np.array_equal(x, y)
      for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


# The consensus.

# Compiled once for each shape.
confidence_weights = jax.jit(ensemble.confidence_weights)
find_consensus = jax.jit(ensemble.find_consensus)


def consensus_of(rows, took_part=None):
  """The consensus on one example, from the logits of each client."""
  logits = jnp.asarray(rows, jnp.float32)[:, None]
  if took_part is None:
    took_part = np.ones(len(rows), bool)
  return find_consensus(logits, jnp.asarray(took_part))


def test_two_clients_by_hand():
  rows = jnp.array([[4.0, 0, 0], [0, 1, 0]])[:, None]
  alpha = confidence_weights(rows, jnp.ones((2, 1), bool))
  np.testing.assert_allclose(alpha[:, 0], [0.941176, 0.058824], atol=1e-6)
  got = find_consensus(rows, jnp.ones(2, bool))
  assert got.labels.tolist() == [0] and got.disputed.tolist() == [True]
  np.testing.assert_allclose(got.diverse, [[0, 1, 0]])


def test_three_clients_by_hand():
  rows = [[4, 0, 0], [0, 1, 0], [0, 0, 2]]
  alpha = confidence_weights(
      jnp.asarray(rows, jnp.float32)[:, None], jnp.ones((3, 1), bool)
  )
  want = [0.761905, 0.047619, 0.190476]
  np.testing.assert_allclose(alpha[:, 0], want, atol=1e-6)
  got = consensus_of(rows)
  assert got.labels.tolist() == [0]
  np.testing.assert_allclose(got.diverse, [[0, 0.2, 1.6]], rtol=1e-6)
  loss, metrics = loss_of(np.zeros((1, 3)), got, 0.05)
  np.testing.assert_allclose(metrics['server_diversity'], 0.266732, rtol=1e-5)
  np.testing.assert_allclose(loss - np.log(3), 0.013337, rtol=1e-4)
  # A client that took no part has no weight, whatever its logits are.
  padded = consensus_of([*rows[:2], [90, 0, 99], rows[2]], [1, 1, 0, 1])
  assert_trees(padded, got, rtol=1e-6)


def loss_of(logits, consensus, lam, mask=None):
  """The server's loss at given outputs of the large model."""
  mask = np.ones(len(logits), bool) if mask is None else np.array(mask)
  return _loss(jnp.asarray(logits, jnp.float32), consensus, lam, mask)


@jax.jit
def _loss(logits, consensus, lam, mask):
  class Model:
    @staticmethod
    def apply(variables, x, **kwargs):
      assert kwargs['train']
      return logits, {}

  batch = Batch(None, None, mask, jnp.arange(len(logits)))
  loss_fn = server_loss(Model, CLASSIFICATION, consensus, lam)
  loss, (_, metrics) = loss_fn(None, batch, None)
  return loss, metrics


def random_rows(num=5, examples=7, seed=0):
  """Logits of clients that mostly agree."""
  rng = np.random.default_rng(seed)
  rows = rng.normal(0, 2, (examples, 4)) + rng.normal(0, 1, (num, examples, 4))
  return jnp.asarray(rows, jnp.float32)


def probabilities(consensus):
  return consensus._replace(diverse=jax.nn.softmax(consensus.diverse))


def test_scales_shifts_and_order():
  rows, everybody = random_rows(), jnp.ones(5, bool)
  want = find_consensus(rows, everybody)
  assert want.disputed.any() and not want.disputed.all()
  # alpha, with the unbiased variance: the factor C / (C - 1) cancels.
  voters = jnp.ones(rows.shape[:2], bool)
  v = np.var(np.float64(rows), axis=2, ddof=1)
  rng = np.random.default_rng(1)
  shift = jnp.asarray(rng.normal(size=(5, 7, 1)), jnp.float32)
  for other in (rows, 3 * rows, rows + shift, jax.nn.log_softmax(rows)):
    alpha = confidence_weights(other, voters)
    np.testing.assert_allclose(alpha, v / v.sum(axis=0), rtol=1e-5)
  scaled = find_consensus(3 * rows, everybody)
  np.testing.assert_array_equal(scaled.labels, want.labels)
  np.testing.assert_allclose(scaled.diverse, 3 * want.diverse, rtol=1e-5)
  for other in (rows + shift, jax.nn.log_softmax(rows)):
    got = find_consensus(other, everybody)
    differ = np.where(want.disputed[:, None], 1, 0)
    np.testing.assert_array_equal(got.labels, want.labels)
    np.testing.assert_allclose(
        differ * probabilities(got).diverse,
        differ * probabilities(want).diverse, rtol=1e-4, atol=1e-6,
    )  # fmt: skip
  order = np.array([3, 1, 4, 0, 2])
  got = find_consensus(rows[order], everybody)
  np.testing.assert_array_equal(got.labels, want.labels)
  np.testing.assert_allclose(got.diverse, want.diverse, rtol=1e-5, atol=1e-6)


def test_a_single_client():
  rows = random_rows()
  alone = find_consensus(rows, jnp.array([False, True, False, False, False]))
  np.testing.assert_array_equal(alone.labels, jnp.argmax(rows[1], 1))
  assert not alone.disputed.any() and not np.any(alone.diverse)
  loss, metrics = loss_of(np.zeros((7, 4)), alone, 9.0)
  np.testing.assert_allclose(loss, np.log(4), rtol=1e-6)
  assert metrics['server_diversity'] == 0
  grad = jax.grad(lambda z: loss_of(z, alone, 9.0)[0])(jnp.zeros((7, 4)))
  want = (0.25 - np.eye(4)[alone.labels]) / 7
  np.testing.assert_allclose(grad, want, rtol=1e-5)


@pytest.mark.parametrize('scale', [1.0, 1000.0])
def test_unanimous_clients_by_hand(scale):
  """D is empty: the loss is the cross-entropy of y^, whatever lam is."""
  rows = scale * np.array([[4.0, 0, 0], [2, 0, 0], [6, 0, 0]])
  alpha = confidence_weights(
      jnp.asarray(rows, jnp.float32)[:, None], jnp.ones((3, 1), bool)
  )
  np.testing.assert_allclose(alpha[:, 0], [2 / 7, 1 / 14, 9 / 14], rtol=1e-6)
  got = consensus_of(rows)
  assert got.labels.tolist() == [0] and not got.disputed.any()
  assert not np.any(got.diverse)
  # The large model's probabilities are 1/4, 1/2 and 1/4.
  loss, grad = jax.value_and_grad(lambda z: loss_of(z, got, 9.0)[0])(
      jnp.log(jnp.array([[1.0, 2, 1]]))
  )
  np.testing.assert_allclose(loss, np.log(4), rtol=1e-6)
  np.testing.assert_allclose(grad, [[-0.75, 0.5, 0.25]], rtol=1e-6)


def test_constant_logits_weigh_alike():
  """Without variance all clients weigh alike; ties go to the lowest class."""
  got = consensus_of([[2.0, 2, 2], [5, 5, 5], [0, 0, 0]])
  assert got.labels.tolist() == [0] and not got.disputed.any()
  voters = jnp.array([[True], [True], [False]])
  alpha = confidence_weights(jnp.ones((3, 1, 4)), voters)
  np.testing.assert_allclose(alpha[:, 0], [0.5, 0.5, 0.0])
  # Constant logits beside confident ones have no weight.
  alpha = confidence_weights(
      jnp.array([[[1.0, 1, 1]], [[2, 0, 0]]]), jnp.ones((2, 1), bool)
  )
  np.testing.assert_allclose(alpha[:, 0], [0.0, 1.0])
  nobody = consensus_of([[1.0, 2, 3]], [False])
  assert not nobody.disputed.any() and np.all(np.isfinite(nobody.diverse))


def test_both_terms_are_means_over_the_whole_batch():
  """CE 1 and 3, KL 0.2 in one row: 2 + 0.05 * 0.2 / 2 = 2.005."""
  def row(entropy):
    """Logits of two classes whose cross-entropy for class 0 is `entropy`."""
    return [0.0, np.log(np.exp(entropy) - 1)]

  logits = np.array([row(1.0), row(3.0)])

  def excess(t):
    teacher = np.array([[0.0, t]])
    return float(numeric.divergences(teacher, logits[:1])[0]) - 0.2

  low, high = logits[0, 1], 20.0  # KL rises from 0 at `low`.
  for _ in range(80):
    middle = (low + high) / 2
    low, high = (low, middle) if excess(middle) > 0 else (middle, high)
  consensus = Consensus(
      jnp.zeros(2, jnp.int32), jnp.array([[0, low], [0, 0]], jnp.float32),
      jnp.array([True, False]),
  )
  loss, _ = loss_of(logits, consensus, 0.05)
  np.testing.assert_allclose(loss, 2.005, rtol=1e-5)
  # Padding counts in neither term.
  padded = jax.tree.map(lambda a: a[jnp.array([0, 1, 0])], consensus)
  loss, _ = loss_of(logits[[0, 1, 1]], padded, 0.05, [1, 1, 0])
  np.testing.assert_allclose(loss, 2.005, rtol=1e-5)
  # distill_weight = 0 is distillation of hard labels.
  loss, _ = loss_of(logits, consensus, 0.0)
  np.testing.assert_allclose(loss, 2.0, rtol=1e-6)


# Rounds.


@pytest.fixture(scope='module')
def averages():
  """Two rounds of FedAvg, with norms."""
  federation = federate(norm=True)
  return play(fedavg(federation), federation, 2)[0]


def assert_averages(states, averages):
  """The small models are FedAvg's, and W has their classifier, bit for bit.

  The other blocks of W stay. The classifier is not the first one, which the
  server would write back if it did not average.
  """
  first = states[0].server.model.params
  for got, want in zip(states[1:], averages[1:], strict=True):
    assert_trees(got.server.small, want.server, rtol=0, atol=0)
    large, head = got.server.model.params, want.server.params['head']
    assert same(large['head'], head) and not same(head, first['head'])
    for name in ('stem', 'mid0', 'mid1'):
      assert same(large[name], first[name])


@pytest.fixture(scope='module')
def still():
  """Two rounds in which the server's learning rate is 0, with norms."""
  federation = federate(norm=True)
  algorithm = make(federation, distill_lr=0.0, distill_weight=3.0)
  return play(algorithm, federation, 2)


def test_a_server_that_does_not_learn_is_fedavg(still, averages):
  assert_averages(still[0], averages)


def test_the_servers_momentum_is_fedavgs():
  """Over two rounds, the second of which has moments from the first."""
  federation = federate()
  options = dict(server_optimizer='sgd', server_momentum=0.9)
  got = play(make(federation, server_epochs=0, **options), federation, 2)[0]
  want = play(fedavg(federation, **options), federation, 2)[0]
  for a, b in zip(got[1:], want[1:], strict=True):
    assert_trees(a.server.small, b.server, rtol=1e-6, atol=1e-7)


def test_a_server_that_takes_no_step_is_fedavg(averages):
  """tau_s = 0: there are no metrics, and W's running statistics stay."""
  federation = federate(norm=True)
  algorithm = make(federation, server_epochs=0, distill_weight=3.0)
  states, report = play(algorithm, federation, 2)
  assert_averages(states, averages)
  assert not report.server
  assert same(states[-1].server.model.stats, states[0].server.model.stats)


def test_public_examples_move_the_large_models_statistics(still):
  states, report = still
  first, last = states[0].server.model.stats, states[-1].server.model.stats
  assert all(
      not np.array_equal(a, b)
      for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(last))
  )
  assert set(report.server) == {
      'server_loss', 'server_entropy', 'server_diversity', 'disputed'
  }  # fmt: skip
  assert all(np.isfinite(value) for value in report.server.values())


@pytest.fixture(scope='module')
def played():
  """A round of each aggregation."""
  federation = federate()
  return federation, {
      name: play(make(federation, aggregation=name, weights='data'), federation)
      for name in ('layerwise', 'architecture')
  }


@pytest.mark.parametrize('aggregation', ['layerwise', 'architecture'])
def test_after_a_round_all_have_one_classifier(played, aggregation):
  """Of the small models the server's training moves only the classifier."""
  federation, found = played
  (before, after), _ = found[aggregation]
  small, large = after.server.small.params, after.server.model.params
  assert same(before.server.small.params['head'],
              before.server.model.params['head'])  # fmt: skip
  assert same(small['head'], large['head'])
  assert not same(large['head'], before.server.model.params['head'])
  assert not same(large['mid0'], before.server.model.params['mid0'])
  assert ('tiny1/mid0' in small) == (aggregation == 'architecture')
  if aggregation == 'architecture':
    (_, want), _ = play(
        fedavg(federation, aggregation=aggregation, weights='data'), federation
    )
    heads = {'tiny1/head', 'tiny2/head'}
    assert set(small) - {'head'} == set(want.server.params) - heads
    for name in set(small) - {'head'}:
      assert same(small[name], want.server.params[name])


def test_without_learning_rates_nothing_moves():
  federation = federate(lr=0.0)
  (before, after), _ = play(make(federation), federation)
  assert same(before.server, after.server)


@pytest.fixture(scope='module')
def uploads():
  """The federation, the server's state, all uploads, data and server update."""
  federation = federate(norm=True)
  algorithm = make(federation, weights='data', server_epochs=2)
  state, data = algorithm.init(jax.random.key(0)), data_of()
  received = uploads_of(algorithm, federation, state, data, KEY)
  step = jax.jit(lambda server, received: algorithm.server_update(
      server, received, Turn(jnp.int32(0), KEY, data.of_public())
  ))  # fmt: skip
  return federation, state, received, data, step


def test_teachers_are_the_clients_own_models(uploads):
  """Each with its own running statistics, in eval mode, in its own slot."""
  federation, state, received, data, _ = uploads
  exchange = with_common_classifier(
      make_exchange(federation, 'layerwise', 'data')
  )
  public = data.of_public().unaugmented()
  x = public.batch(jnp.arange(NUM_PUBLIC)).x
  for group in federation.groups:
    r = received[group.name]
    before = exchange.download(state.small, group)
    # Slots in another order, with padding first.
    slots = jnp.array([0, 1, 0])
    ids = jnp.array([4, r.client_id[1], r.client_id[0]])
    kept = jax.tree.map(lambda a, slots=slots: a[slots], r.kept)
    moved = Received((), kept, ids)
    got = group_logits(exchange, group, state.small, moved, public)
    assert not np.any(got[0])
    for slot in (1, 2):
      change, stats, weight = jax.tree.map(lambda a, s=slot: a[s], kept)
      params = jax.tree.map(
          lambda x, d, weight=weight: x + d / weight, before.params, change
      )
      stats = jax.tree.map(lambda s, weight=weight: s / weight, stats)
      model = Variables(params, stats)
      want, _ = group.model.apply(model, x)
      np.testing.assert_allclose(got[slot], want, rtol=1e-5, atol=1e-6)
    assert np.abs(got[1] - got[2]).max() > 1e-3


def absent(received, *names):
  """`received` with padding in all slots of some groups."""
  return {
      name: r if name not in names else Received(
          (), jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), r.kept),
          jnp.full_like(r.client_id, 4),
      )
      for name, r in received.items()
  }  # fmt: skip


def test_the_servers_training_moves_only_the_classifier(uploads):
  """Two epochs and none, on the same uploads and by the default sharing.

  All other blocks of the small models, and their running statistics, are equal
  bit for bit.
  """
  federation, state, received, _, step = uploads
  learned, _ = step(state, received)
  mean, _ = jax.jit(make(federation, server_epochs=0).server_update)(
      state, received, Turn(jnp.int32(0), KEY)
  )
  got, want = learned.small, mean.small
  assert not same(got.params['head'], want.params['head'])
  assert same(got.params['head'], learned.model.params['head'])
  for name in ('stem', 'mid0', 'mid1'):
    assert same(got.params[name], want.params[name])
    assert not same(got.params[name], state.small.params[name])
    assert not same(learned.model.params[name], state.model.params[name])
  assert same(got.stats, want.stats)


def test_blocks_without_a_sender_stay(uploads):
  _, state, received, _, step = uploads
  after, metrics = step(state, absent(received, 'tiny2'))
  assert same(after.small.params['mid1'], state.small.params['mid1'])
  assert not same(after.small.params['mid0'], state.small.params['mid0'])
  assert all(np.isfinite(value) for value in metrics.values())
  assert not same(after.model, state.model)


def test_nobody_has_sent(uploads):
  """Neither model moves, and the metrics are NaN."""
  _, state, received, _, step = uploads
  after, metrics = step(state, absent(received, 'tiny1', 'tiny2'))
  assert_trees(after, state, rtol=0, atol=0)
  assert all(np.isnan(value) for value in metrics.values())


def test_a_client_without_a_step_is_no_teacher(uploads):
  _, state, received, _, step = uploads
  zeros = jax.tree.map(jnp.zeros_like, received['tiny2'].kept)
  idle = dict(received, tiny2=received['tiny2']._replace(kept=zeros))
  got, _ = step(state, idle)
  want, _ = step(state, absent(received, 'tiny2'))
  assert_trees(got, want, rtol=1e-6, atol=1e-7)


def test_uploads_are_as_large_as_fedavgs():
  federation, data = federate(norm=True), data_of()
  mine, other = (
      bytes_of_a_visit(method(federation), federation.groups[1], data)
      for method in (make, fedavg)
  )
  assert mine == other


def test_both_models_are_evaluated(played):
  federation, found = played
  algorithm, data = make(federation), data_of()
  (_, after), _ = found['layerwise']
  images, labels = np.asarray(data.images), np.asarray(data.labels)
  scores = make_evaluate(
      algorithm, federation, images, labels, preprocess, batch_size=len(labels)
  )(after)
  x = preprocess(images)
  large, _ = federation.server_model.apply(after.server.model, x)
  for group in federation.groups:
    small, _ = group.model.apply(after.server.small, x)
    for got, logits in (
        (scores[group.name].accuracy, small),
        (scores[group.name].views['server'], large),
    ):
      want = np.mean(np.argmax(logits, 1) == labels)
      np.testing.assert_allclose(got[0], want, rtol=1e-6)


def test_public_examples_are_not_augmented():
  """A preprocessing function that augments gets no key."""
  def augments(images, key=None):
    return preprocess(images) + (0.0 if key is None else jnp.nan)

  federation = federate()
  algorithm = make(federation)
  state = algorithm.init(jax.random.key(0))
  public = data_of().of_public().replace(preprocess=augments)
  kept = {
      group.name: jax.tree.map(
          lambda s: jnp.ones((1, *s.shape), s.dtype),
          jax.eval_shape(lambda g=group: algorithm.client_update(
              g, algorithm.init_client(g, 0, KEY),
              algorithm.downlink(state, g, None), data_of().client(0),
              Visit(jnp.int32(0), jnp.int32(0), KEY),
          )[1].kept),
      )
      for group in federation.groups
  }  # fmt: skip
  received = {
      name: Received((), delta, jnp.array([i]))
      for i, (name, delta) in enumerate(kept.items())
  }
  _, metrics = jax.jit(algorithm.server_update)(
      state, received, Turn(jnp.int32(0), KEY, public)
  )
  assert np.isfinite(metrics['server_loss'])


def test_unused_weights_of_the_large_model_can_be_dropped(uploads):
  """The steps are the same with smaller kernels."""
  federation, state, received, data, _ = uploads
  large = small_maps()
  state = state._replace(model=large.init(jax.random.key(1)))
  turn, results = Turn(jnp.int32(0), KEY, data.of_public()), []
  for drop in (False, True):
    local = dataclasses.replace(federation.local, drop_unused_weights=drop)
    used = dataclasses.replace(federation, local=local, server_model=large)
    update = jax.jit(make(used).server_update)
    results.append(update(state, received, turn)[0])
  assert_trees(results[1], results[0], rtol=1e-5, atol=1e-6)
  old, new = (
      tree.params['mid0']['Conv_0']['kernel']
      for tree in (state.model, results[1].model)
  )
  assert np.any(new[1, 1] != old[1, 1])
  np.testing.assert_array_equal(new[0], old[0])


# One round in NumPy.

NAMES = {'tiny1': ['stem', 'mid0', 'head'],
         'tiny2': ['stem', 'mid0', 'mid1', 'head']}  # fmt: skip
LARGE = ['stem', 'mid0', 'mid1', 'mid2', 'head']


def descend(params, loss, rate):
  grads = numeric.gradient(loss, params)
  return numeric.combine(lambda w, g: w - rate * g, params, grads)


def oracle_consensus(logits):
  """(label, s_div or None) of each example; `logits` [S, P, C]."""
  found = []
  for x in range(logits.shape[1]):
    s = logits[:, x]
    v = s.var(axis=1)
    label = np.argmax(v / v.sum() @ s)
    others = [k for k in range(len(s)) if np.argmax(s[k]) != label]
    diverse = None
    if others:
      diverse = v[others] @ s[others] / v[others].sum()
    found.append((label, diverse))
  return found


def oracle_server(model, x, found, batches, lam, rate):
  """The model after SGD steps on batches of positions."""
  for batch in batches:

    def loss(w, batch=batch):
      total = 0.0
      for i in batch:
        logits = numeric.net(w, LARGE, x[i : i + 1])
        label, diverse = found[i]
        total += numeric.cross_entropies(logits, np.array([label]))[0]
        if diverse is not None:
          total += lam * numeric.divergences(diverse[None], logits)[0]
      return total / len(batch)

    model = descend(model, loss, rate)
  return model


def doubles(tree):
  """The tree in float64, without Flax's layer names."""
  return {
      n: {i: np.float64(a) for i, a in block['Dense_0'].items()}
      for n, block in tree.items()
  }


def sharpened(tree):
  """Larger parameters, so that clients disagree."""
  return jax.tree.map(lambda a: 1.5 * a, tree)


def test_one_round_in_numpy():
  """Two architectures, four clients, a larger model; SGD, full batches."""
  federation, data = federate(large=3), data_of(3)
  options = dict(
      distill_weight=0.4, server_epochs=2, server_batch_size=4, distill_lr=0.2
  )
  algorithm = make(federation, **options)
  key = jax.random.key(0, impl='threefry2x32')  # Both cases occur.
  state = rounds.init_state(algorithm, federation, key)
  state = state._replace(server=sharpened(state.server))
  before = jax.tree.map(np.array, state.server)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  after, report = run_round(state, data, KEY, jax.random.key(2))
  images = np.asarray(preprocess(data.images), np.float64)
  images = images.reshape(len(images), -1)
  weights, ends = doubles(before.small.params), {}
  for k in range(4):
    names = NAMES[f'tiny{k % 2 + 1}']
    index = np.asarray(data.index[k, : SIZES[k]])
    x, y = images[index], np.asarray(data.labels)[index]
    model = {n: weights[n] for n in names}
    for _ in range(2):
      model = descend(
          model,
          lambda w, names=names, x=x, y=y: numeric.cross_entropies(
              numeric.net(w, names, x), y
          ).mean(),
          0.1,
      )
    ends[k] = model
  want = {
      n: numeric.combine(
          lambda *leaves: sum(leaves) / len(leaves),
          *({n: end[n]} for end in ends.values() if n in end),
      )[n]
      for n in weights
  }
  public = images[np.asarray(data.public)]
  logits = np.stack([
      numeric.net(end, NAMES[f'tiny{k % 2 + 1}'], public)
      for k, end in ends.items()
  ])
  found = oracle_consensus(logits)
  disputed = [diverse is not None for _, diverse in found]
  assert 0 < sum(disputed) < NUM_PUBLIC  # Both cases occur.
  order_key, _ = jax.random.split(client_key(KEY, jnp.int32(0), 4))
  batches = []
  for epoch in range(2):
    order = np.asarray(shuffled_positions(
        jax.random.fold_in(order_key, epoch), data.of_public()
    ))  # fmt: skip
    batches += [order[:4], order[4:]]
  large = {**doubles(before.model.params), 'head': want['head']}
  large = oracle_server(large, public, found, batches, 0.4, 0.2)
  want['head'] = large['head']
  got = after.server
  assert_trees(doubles(got.model.params), large, rtol=1e-5, atol=1e-5)
  assert_trees(doubles(got.small.params), want, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(report.server['disputed'], np.mean(disputed))


# Refusals.


@pytest.mark.parametrize(
    'options,message',
    [
        (dict(distill_weight=-0.1), 'distill_weight must be at least 0'),
        (dict(distill_weight=np.nan), 'distill_weight must be a finite number'),
        (dict(server_epochs=-1), 'server_epochs must be at least 0'),
        (dict(server_batch_size=0), 'server_batch_size must be at least 1'),
        (dict(distill_lr=np.inf), 'distill_lr must be a finite number'),
        (dict(aggregation='ends'), "^Unknown aggregation 'ends'"),
        (dict(weights='size'), "^Unknown weights 'size'"),
    ],
)
def test_bad_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    make(federate(), **options)


def test_federations_that_do_not_fit_are_refused():
  private = dataclasses.replace(federate(), num_public=0)
  with pytest.raises(ValueError, match=r'^fedet needs a public set, Fede'):
    make(private)
  with pytest.raises(ValueError, match=r'needs Federation\(server_model=\.'):
    make(federate(server_model=None))
  wide = federate(server_model=tiny_model(2, width=5, norm=False))
  message = r"^server_model='tiny2' has the classifier .*\(5, 3\).*'tiny1' .*\("
  with pytest.raises(ValueError, match=message):
    make(wide)
  with pytest.raises(ValueError, match='fedet does not keep running stati'):
    make(federate(norm=True, local_stats=True))
  assert make(federate(local_stats=True))
