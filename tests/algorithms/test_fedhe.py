"""FedHe: its equations by hand, its stores, and its messages."""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.class_means import (
  ClassVectors,
  class_means,
  class_sums,
)
from fedjax_het.aggregation.uploads import keep_latest
from fedjax_het.algorithms import fedhe, private
from fedjax_het.algorithms.fedhe import Folded, add_and_fold, class_upload
from fedjax_het.engine import rounds, traffic
from fedjax_het.engine.types import (
  Federation,
  Group,
  Maybe,
  Received,
  Visit,
)
from fedjax_het.models import create
from tests.algorithms.suite import Clocks
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  server_step,
  tiny_data,
  tiny_federation,
  tiny_local,
)

# For the shared tests, see `tests/algorithms/suite.py`.
CLOCKS = Clocks(dict(plus_one=False), 'logit_loss')
SIZES = (5, 8, 3, 7)
KEYS = (jax.random.key(1), jax.random.key(2))


def federate(**kwargs):
  """Two groups of two clients, depths 1 and 2, with norms."""
  return tiny_federation((1, 2), **kwargs)


def run(algorithm, federation, num_rounds=1, data=None, cohort_size=4):
  """The state after some rounds, and the last reports, on the host."""
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=cohort_size, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  data = tiny_data(SIZES) if data is None else data
  for _ in range(num_rounds):
    state, reports = run_round(state, data, *KEYS)
  return jax.device_get(state), jax.device_get(reports)


# Eq. 7 and 8.


@pytest.mark.parametrize(
    ('plus_one', 'want'), [(True, [2, 2 / 3]), (False, [3, 1])]
)
def test_upload_of_two_examples(plus_one, want):
  logits = jnp.array([[2.0, 0.0], [4.0, 2.0]])
  total = class_sums(logits, jnp.array([0, 0]), 2)
  np.testing.assert_allclose(class_means(total)[0], [3, 1], rtol=1e-6)
  upload = class_upload(total, plus_one, strict=False)
  np.testing.assert_allclose(upload.value.vectors[0], want, rtol=1e-6)
  assert upload.value.counts.tolist() == [1, 0]
  assert upload.present.tolist() == [True, False]


def test_only_examples_that_count_are_added():
  logits = jnp.array([[2.0, 0.0], [4.0, 2.0], [9.0, 9.0]])
  mask = jnp.array([True, True, False])
  total = class_sums(logits, jnp.array([0, 1, 1]), 2, mask)
  assert total.vectors.tolist() == [[2, 0], [4, 2]]
  assert total.counts.tolist() == [1, 1]


def test_strict_sends_zeros_for_unseen_classes_but_not_without_a_step():
  total = class_sums(jnp.array([[2.0, 4.0]]), jnp.array([1]), 2)
  upload = class_upload(total, plus_one=True, strict=True)
  assert upload.value.vectors.tolist() == [[0, 0], [1, 2]]
  assert upload.value.counts.tolist() == [1, 1]
  nothing = jax.tree.map(jnp.zeros_like, total)
  idle = class_upload(nothing, plus_one=True, strict=True)
  assert not np.any(idle.present) and not np.any(idle.value.counts)


# Eq. 13, by the visit of a client whose logits are its last bias.


def linear_client(server_vectors, known, alpha):
  """Gradient on the logits [1, 0] of one example of class 0, by one SGD step.

  All parameters but the last bias are 0, so that the logits are this bias.
  """
  model = create('mlp', (1, 1, 1), 2, hidden=1, depth=2, norm='none')
  federation = Federation(
      (Group('mlp', model, np.array([0])),),
      tiny_local(optax.sgd, lr=1.0, batch_size=1, epochs=1),
  )
  (group,) = federation.groups
  algorithm = fedhe(federation, distill_weight=alpha)
  zeros = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))
  head = jax.tree.map(
      lambda leaf: jnp.array([1.0, 0.0]) if leaf.shape == (2,) else leaf,
      zeros.params['head'],
  )
  start = zeros._replace(params={**zeros.params, 'head': head})
  client = algorithm.init_client(group, 0, jax.random.key(0))
  client = client._replace(variables=start)
  sent = Maybe(
      ClassVectors(jnp.asarray(server_vectors), jnp.asarray(known)),
      jnp.asarray(known) > 0,
  )
  data = tiny_data((1,)).replace(
      images=jnp.zeros((1, 1, 1, 1), jnp.uint8), labels=jnp.zeros(1, jnp.int32)
  )
  turn = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(3))
  after, uplink, metrics = algorithm.client_update(
      group, client, sent, data.client(0), turn
  )
  moved = jax.tree.map(
      jnp.subtract, start.params['head'], after.variables.params['head']
  )
  (bias,) = [x for x in jax.tree.leaves(moved) if x.shape == (2,)]
  return bias, uplink.summed, metrics


def test_logit_loss_of_one_example():
  """MSE ((-2)^2 + (-2)^2) / 2 = 4, gradient [-2, -2] plus that of CE."""
  known = [1.0, 1.0]
  plain, _, _ = linear_client([[3.0, 2.0], [0.0, 0.0]], known, alpha=0.0)
  pulled, uplink, metrics = linear_client(
      [[3.0, 2.0], [0.0, 0.0]], known, alpha=1.0
  )
  np.testing.assert_allclose(pulled - plain, [-2, -2], rtol=1e-5)
  p = np.exp([1.0, 0.0]) / np.exp([1.0, 0.0]).sum()
  np.testing.assert_allclose(plain, p - [1, 0], rtol=1e-5)
  np.testing.assert_allclose(metrics['logit_loss'], 4.0, rtol=1e-6)
  np.testing.assert_allclose(metrics['cross_entropy'], -np.log(p[0]), rtol=1e-5)
  np.testing.assert_allclose(
      metrics['train_loss'], 4.0 - np.log(p[0]), rtol=1e-5
  )
  # The upload has the logits before the step: [1, 0] over V + 1 = 2.
  np.testing.assert_allclose(uplink.value.vectors[0], [0.5, 0.0], rtol=1e-6)


def test_a_class_that_the_server_does_not_know_has_cross_entropy_alone():
  """The values in its row have no effect."""
  plain, _, _ = linear_client([[3.0, 2.0], [0.0, 0.0]], [1.0, 1.0], alpha=0.0)
  got, _, metrics = linear_client([[3.0, 2.0], [5.0, 5.0]], [0.0, 1.0], 1.0)
  np.testing.assert_array_equal(got, plain)
  assert metrics['logit_loss'] == 0


# The server's stores, Eq. 9 and 10.


def one_class(vector, num=1.0):
  """Vectors and counts [1, 1, 2] of one upload for one class."""
  return ClassVectors(jnp.array([[vector]]), jnp.array([[num]]))


def stack(uploads):
  return jax.tree.map(lambda *parts: jnp.concatenate(parts), *uploads)


@functools.cache
def folder(num_uploads, every):
  """`add_and_fold`, compiled."""
  return jax.jit(
      functools.partial(add_and_fold, every=every, num=num_uploads)
  )


def empty(num_classes=1, dim=2):
  zeros = jnp.zeros((num_classes, dim)), jnp.zeros(num_classes)
  return Folded(ClassVectors(*zeros), jnp.int32(0))


def test_mean_of_three_uploads_and_with_a_fold_before_the_third():
  uploads = stack([one_class(v) for v in ([1.0, 1.0], [3.0, 3.0], [5.0, 2.0])])
  ids = jnp.arange(3)
  plain = add_and_fold(empty(), ids, uploads, every=100, num=3)
  np.testing.assert_allclose(class_means(plain.total), [[3, 2]], rtol=1e-6)
  folded = add_and_fold(empty(), ids, uploads, every=2, num=3)
  np.testing.assert_allclose(class_means(folded.total), [[3.5, 2]], rtol=1e-6)
  assert folded.total.counts.tolist() == [2] and folded.num_uploads == 3


def test_fold_goes_by_client_and_skips_padding():
  uploads = stack([one_class(v) for v in ([5.0, 2.0], [9.0, 9.0], [1.0, 1.0],
                                          [3.0, 3.0])])  # fmt: skip
  ids = jnp.array([2, 3, 0, 1])  # There are three clients: 3 is padding.
  got = add_and_fold(empty(), ids, uploads, every=2, num=3)
  np.testing.assert_allclose(class_means(got.total), [[3.5, 2]], rtol=1e-6)
  swapped = jnp.array([0, 3, 2, 1])  # Now [5, 2] is folded with [3, 3].
  other = add_and_fold(empty(), swapped, uploads, every=2, num=3)
  np.testing.assert_allclose(class_means(other.total), [[2.5, 1.75]], rtol=1e-6)


NUM = 6
whole = st.integers(-8, 8)
histories = st.lists(
    st.lists(st.none() | st.tuples(whole, whole), min_size=2, max_size=2),
    min_size=NUM,
    max_size=NUM,
)


def as_uploads(history):
  """`history[s][y]` is the vector of upload s for class y, or None."""
  vectors = [[(0, 0) if v is None else v for v in one] for one in history]
  counts = [[v is not None for v in one] for one in history]
  return ClassVectors(
      jnp.array(vectors, jnp.float32), jnp.array(counts, jnp.float32)
  )


def explicit_mean(history, y, every=None):
  """The mean of a list of vectors, Eq. 9 and 10; folded if `every` is set."""
  found = []
  for number, upload in enumerate(history, start=1):
    if upload[y] is not None:
      found.append(np.array(upload[y], np.float64))
    if every and number % every == 0 and found:
      found = [np.mean(found, axis=0)]
  return np.mean(found, axis=0) if found else np.zeros(2)


@settings(max_examples=40, deadline=None)
@given(histories, st.permutations(range(NUM)))
def test_running_sums_are_the_list_of_all_uploads_in_any_order(history, order):
  for rows in (history, [history[i] for i in order]):
    state = empty(2)
    got = folder(NUM, 100)(state, jnp.arange(NUM), as_uploads(rows)).total
    for y in range(2):
      want = explicit_mean(history, y)
      np.testing.assert_allclose(class_means(got)[y], want, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(histories)
def test_folded_sums_are_the_folded_list(history):
  got = folder(NUM, 4)(empty(2), jnp.arange(NUM), as_uploads(history)).total
  for y in range(2):
    want = explicit_mean(history, y, every=4)
    np.testing.assert_allclose(class_means(got)[y], want, atol=1e-5)


def test_latest_replaces_the_whole_upload_of_its_sender():
  store = ClassVectors(jnp.ones((3, 2, 2)), jnp.ones((3, 2)))
  upload = ClassVectors(jnp.full((2, 2, 2), 5.0), jnp.array([[1.0, 0], [1, 1]]))
  got = keep_latest(store, jnp.array([1, 3]), upload)
  assert got.counts.tolist() == [[1, 1], [1, 0], [1, 1]]
  assert got.vectors[:, 0, 0].tolist() == [1, 5, 1]


@pytest.mark.parametrize('store', ['all', 'fold', 'latest'])
def test_every_store_holds_the_mean_of_the_first_round(store):
  """With a learning rate of 0 the logits are known in closed form."""
  federation = federate(norm=False, local=tiny_local(optax.sgd, lr=0.0))
  algorithm = fedhe(federation, store=store)
  state, reports = run(algorithm, federation)
  data = jax.device_get(tiny_data(SIZES))
  sums = np.zeros((NUM_CLASSES, NUM_CLASSES))
  counts = np.zeros(NUM_CLASSES)
  for group in federation.groups:
    variables = group.model.init(jax.random.key(0))
    # All images at once: one program per model.
    logits_of_all, _ = jax.jit(group.model.apply)(
        variables, data.preprocess(data.images)
    )
    logits_of_all = np.asarray(logits_of_all)
    for i in group.client_ids:
      mine = data.index[i, : SIZES[i]]
      logits = logits_of_all[mine]
      rows = np.eye(NUM_CLASSES)[data.labels[mine]]
      # Two passes over the data: each example counts twice.
      v = 2 * rows.sum(0)[:, None]
      sums += 2 * rows.T @ np.asarray(logits) / (v + 1)
      counts += rows.any(0)
  sent = algorithm.downlink(state.server, federation.groups[0], None)
  np.testing.assert_array_equal(sent.value.counts, counts)
  want = sums / np.maximum(counts, 1)[:, None]
  np.testing.assert_allclose(sent.value.vectors, want, rtol=1e-4, atol=1e-5)
  assert all(np.all(r.metrics['logit_loss'] == 0) for r in reports.values())


def planted(vectors):
  """One upload of one class for each of the clients 0, 1, ..."""
  uploads = ClassVectors(
      jnp.asarray(vectors, jnp.float32)[:, None], jnp.ones((len(vectors), 1))
  )
  ids = jnp.arange(len(vectors))
  total = jax.tree.map(lambda a: jnp.sum(a, axis=0), uploads)
  whole = Maybe(uploads, jnp.ones((len(vectors), 1), bool))
  return Maybe(total, jnp.ones(1, bool)), whole, ids


@pytest.mark.parametrize(('options', 'want'), [
    (dict(store='all'), 3.5),  # Eq. 9: the mean over both rounds.
    # Eq. 10: (1 + 3) / 2 is one vector of three, or (1 + 3 + 5) / 3 of two.
    (dict(store='fold', fold_every=2), 4.0),
    (dict(store='fold', fold_every=3), 4.0),
    (dict(store='fold', fold_every=100), 3.5),
    (dict(store='latest'), 5.0),
])  # fmt: skip
def test_stores_over_two_rounds(options, want):
  """Two clients send 1 and 3, then 5 and 5."""
  model = create('mlp', SHAPE, 1, hidden=4, norm='none')
  federation = Federation((Group('g', model, np.arange(2)),), tiny_local())
  algorithm = fedhe(federation, **options)
  server = algorithm.init(jax.random.key(0))
  for vectors in ([[1.0], [3.0]], [[5.0], [5.0]]):
    total, whole, ids = planted(vectors)
    one = (
        Received(total, None, ids)
        if options['store'] == 'all'
        else Received((), whole, ids)
    )
    server = server_step(algorithm, server, {'g': one})
  sent = algorithm.downlink(server, federation.groups[0], None)
  np.testing.assert_allclose(sent.value.vectors[0, 0], want, rtol=1e-6)


# What travels.


def ten_classes(num_examples):
  """A client that sees the classes 0, 1, ... of ten, in one batch."""
  model = create('mlp', SHAPE, 10, hidden=4, depth=2, norm='none')
  federation = Federation(
      (Group('mlp', model, np.array([0])),),
      tiny_local(batch_size=num_examples, steps=3),
  )
  images = np.zeros((num_examples, *SHAPE), np.uint8)
  data = tiny_data((num_examples,)).replace(
      images=jnp.asarray(images), labels=jnp.arange(num_examples) % 10
  )
  return federation, data


@pytest.mark.parametrize(
    ('options', 'seen', 'up'),
    [
        (dict(), 10, 440),
        (dict(store='latest'), 10, 440),
        (dict(), 7, 7 * 44),
        (dict(strict=True), 7, 440),
    ],
)
def test_ten_classes_take_440_bytes_and_unseen_ones_none(options, seen, up):
  federation, data = ten_classes(seen)
  algorithm = fedhe(federation, **options)
  _, reports = run(algorithm, federation, 2, data, cohort_size=1)
  assert traffic.num_bytes(reports['mlp'].up).tolist() == [up]
  # The second round's downlink is the first round's uplink.
  assert traffic.num_bytes(reports['mlp'].down).tolist() == [up]
  _, first = run(algorithm, federation, 1, data, cohort_size=1)
  assert traffic.num_bytes(first['mlp'].down).tolist() == [0]


def test_a_class_that_a_client_lacks_is_left_to_the_others():
  """Client 0 has no example of class 0, no client has one of class 2."""
  data = tiny_data(SIZES)
  owner = np.repeat(np.arange(4), SIZES)
  labels = np.where(owner == 0, 1, np.arange(len(owner)) % 2)
  data = data.replace(labels=jnp.asarray(labels, jnp.int32))
  federation = federate()
  state, reports = run(fedhe(federation), federation, 1, data)
  assert state.server.counts.tolist() == [3, 4, 0]
  assert not np.any(state.server.vectors[2])
  assert np.any(state.server.vectors[0])
  size = 4 * (NUM_CLASSES + 1)
  up = traffic.num_bytes(reports['tiny1'].up).tolist()
  assert up == [size, 2 * size]  # Clients 0 and 2.


def test_a_class_that_nobody_has_changes_nothing():
  """Its row in the server's state is not read."""
  federation, data = federate(), tiny_data(SIZES)
  data = data.replace(labels=data.labels % 2)
  algorithm, group = fedhe(federation), federation.groups[0]
  turn = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(3))
  client = algorithm.init_client(group, 0, jax.random.key(0))

  @jax.jit
  def visit(row):
    vectors = jnp.arange(9.0).reshape(3, 3).at[2].set(row)
    server = ClassVectors(vectors, jnp.array([2.0, 2.0, 0.0]))
    sent = algorithm.downlink(server, group, turn)
    return algorithm.client_update(group, client, sent, data.client(0), turn)

  pairs = zip(*map(jax.tree.leaves, (visit(0.0), visit(7.0))))
  assert all(np.array_equal(a, b) for a, b in pairs)


# Against Private.


@functools.cache
def after_three_rounds(constructor, keep_optimizer=None, **options):
  """Leaves of the clients' variables and optimisers, sizes 5 and 8."""
  federation = tiny_federation(
      (1,), local=tiny_local(optax.adam, keep_optimizer=keep_optimizer)
  )
  algorithm = constructor(federation, **options)
  state, _ = run(algorithm, federation, 3, tiny_data((5, 8)), cohort_size=2)
  return tuple(map(jax.tree.leaves, state.clients['tiny1']))


def test_distill_weight_0_is_private_bit_for_bit():
  got = after_three_rounds(fedhe, distill_weight=0.0)
  want = after_three_rounds(private, keep_optimizer=True)
  for a, b in zip(got, want, strict=True):
    assert len(a) == len(b) > 0
    assert all(np.array_equal(x, y) for x, y in zip(a, b))
  pulled = after_three_rounds(fedhe, distill_weight=1.0)
  gaps = [np.abs(x - y).max() for x, y in zip(pulled[0], got[0])]
  assert max(gaps) > 1e-3


def test_private_keeps_its_optimiser_or_begins_anew():
  kept = after_three_rounds(private, keep_optimizer=True)
  anew = after_three_rounds(private)
  (count,) = [leaf for leaf in kept[1] if leaf.dtype == np.int32]
  assert count.tolist() == [3 * 2 * 2, 3 * 2 * 2]  # Rounds, epochs, batches.
  assert anew[1] == []
  assert any(np.any(x != y) for x, y in zip(kept[0], anew[0], strict=True))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(store='last'), "^Unknown store 'last'"),
        (dict(distill_weight=-1.0), 'distill_weight must be at least 0'),
        (dict(fold_every=0), 'fold_every must be at least 1, got 0'),
    ],
)
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    fedhe(federate(), **options)


def test_models_of_different_outputs_are_refused():
  groups = tuple(
      Group(f'c{c}', create('mlp', SHAPE, c, hidden=2), np.array([i]))
      for i, c in enumerate((3, 4))
  )
  with pytest.raises(ValueError, match='number of outputs, got c3 3, c4 4'):
    fedhe(Federation(groups, tiny_local()))
