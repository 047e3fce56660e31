"""FedProto: its equations by hand, whole rounds in NumPy, its messages."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.class_means import ClassVectors
from fedjax_het.algorithms import fedproto, private
from fedjax_het.algorithms.fedproto import prototype_loss
from fedjax_het.algorithms.fedproto.prediction import (
  Evaluated,
  nearest,
  predict_head,
  predict_nearest,
)
from fedjax_het.algorithms.fedproto.prototypes import (
  global_prototypes,
  sums_of_last_epoch,
)
from fedjax_het.engine import rounds, traffic
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Group,
  Maybe,
  Received,
  Visit,
)
from fedjax_het.models import create
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.simple_cnn import Hidden
from tests.algorithms import fedproto_numpy
from tests.algorithms.suite import Clocks
from tests.models.test_reach import small_maps
from tests.numeric import as_list, nets_and_examples
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  Dense,
  server_step,
  tiny_data,
  tiny_federation,
  tiny_local,
  tiny_model,
)

# For the shared tests, see `tests/algorithms/suite.py`. The prototypes of an
# evaluated model change in the first round.
CLOCKS = Clocks(loss='prototype_loss', part=lambda model: model[:2])
SIZES = (5, 8, 3, 7)
WIDTH = 4  # d of `tiny_model`.
VISIT = Visit(jnp.int32(0), jnp.int32(1), jax.random.key(3))


def known(*rows, present=None):
  """`Maybe` of prototypes; all are known by default."""
  value = jnp.array(rows, jnp.float32)
  present = [True] * len(rows) if present is None else present
  return Maybe(value, jnp.array(present))


def data_without_class_0_on_client_0():
  """Four clients with random labels; nobody has class 2."""
  data = tiny_data(SIZES)
  owner = np.repeat(np.arange(4), SIZES)
  labels = np.where(owner == 0, 1, np.arange(len(owner)) % 2)
  return data.replace(labels=jnp.asarray(labels, jnp.int32))


def visit(algorithm, group, sent, data, client_id=0, times=1):
  """The client after some visits, its uplink and metrics, on the host."""
  client = algorithm.init_client(group, client_id, jax.random.key(0))

  @jax.jit
  def update(client, sent, data):
    return algorithm.client_update(
        group, client, sent, data.client(client_id), VISIT
    )

  for _ in range(times):
    client, uplink, metrics = update(client, sent, data)
  return jax.device_get((client, uplink, metrics))


# Eq. 6, by hand.


def two_clients():
  """Prototypes of class 0: 10 examples at [1, 0], 30 at [0, 1]."""
  vectors = jnp.array([[[1.0, 0.0]], [[0.0, 1.0]]])
  return ClassVectors(vectors, jnp.array([[10.0], [30.0]]))


@pytest.mark.parametrize(
    ('weights', 'want'), [('uniform', [0.5, 0.5]), ('data', [0.25, 0.75])]
)
def test_the_mean_of_two_clients(weights, want):
  """Eq. 6 as printed would give [0.125, 0.375]."""
  got = global_prototypes(two_clients(), weights)
  np.testing.assert_allclose(got.value, [want], rtol=1e-6)
  assert got.present.tolist() == [True]


@pytest.mark.parametrize('weights', ['uniform', 'data'])
def test_a_class_is_the_mean_over_those_who_have_it(weights):
  """Rows of a class that a client lacks are not read."""
  vectors = jnp.array([[[7.0, 7.0], [2.0, 3.0]], [[9.0, 9.0], [5.0, 5.0]]])
  counts = jnp.array([[0.0, 4.0], [0.0, 0.0]])
  got = global_prototypes(ClassVectors(vectors, counts), weights)
  assert got.value.tolist() == [[0, 0], [2, 3]]
  assert got.present.tolist() == [False, True]


def uploads(ids, rows, counts):
  """Uploads of one class as a group's `Received`."""
  vectors = jnp.array(rows, jnp.float32)[:, None]
  counts = jnp.array(counts, jnp.float32)[:, None]
  upload = Maybe(ClassVectors(vectors, counts), counts > 0)
  return Received((), upload, jnp.array(ids))


@pytest.mark.parametrize(
    ('weights', 'first_mean', 'second_mean'),
    [('uniform', [2, 7 / 3], [1, 1]), ('data', [1.6, 1.4], [1, 0.6])],
)
def test_the_server_keeps_the_last_upload_of_every_client(
    weights, first_mean, second_mean
):
  """In any order, and without padding."""
  model = create('mlp', SHAPE, 1, hidden=2, norm='none')
  groups = tuple(
      Group(name, model, np.array(ids))
      for name, ids in (('a', [0, 2]), ('b', [1]))
  )
  algorithm = fedproto(Federation(groups, tiny_local()), weights=weights)
  first = dict(
      a=uploads([0, 2], [[1, 0], [5, 5]], [3, 1]), b=uploads([1], [[0, 2]], [1])
  )
  server = server_step(algorithm, algorithm.init(jax.random.key(0)), first)
  sent = algorithm.downlink(server, groups[0], VISIT)
  np.testing.assert_allclose(sent.value, [first_mean], rtol=1e-6)
  turned = dict(
      b=uploads([1], [[0, 2]], [1]), a=uploads([2, 0], [[5, 5], [1, 0]], [1, 3])
  )
  other = server_step(algorithm, algorithm.init(jax.random.key(0)), turned)
  jax.tree.map(np.testing.assert_array_equal, other, server)
  # Client 2 alone takes part; 3 marks padding.
  nan = float('nan')
  second = dict(
      a=uploads([2, 3], [[2, 1], [nan, nan]], [1, nan]),
      b=uploads([3], [[nan, nan]], [nan]),
  )
  server = server_step(algorithm, server, second)
  sent = algorithm.downlink(server, groups[0], VISIT)
  np.testing.assert_allclose(sent.value, [second_mean], rtol=1e-6)
  client = algorithm.init_client(groups[0], 0, jax.random.key(0))
  model = algorithm.client_model(server, client, groups[0])
  jax.tree.map(np.testing.assert_array_equal, model.prototypes, sent)
  assert algorithm.personal and not algorithm.one_model


# Eq. 7 and 8, by hand.


def test_the_loss_of_one_embedding_and_its_gradient():
  z, labels = jnp.array([[1.0, 1.0]]), jnp.array([1])
  value, grad = jax.value_and_grad(
      lambda z: prototype_loss(z, labels, known([9.0, 9.0], [0.0, 1.0]))[0]
  )(z)
  assert value == 0.5
  assert grad.tolist() == [[1, 0]]  # 2 (f - c) / d.


def test_an_example_of_an_unknown_class_has_no_loss_and_no_gradient():
  z, labels = jnp.array([[1.0, 1.0], [2.0, 2.0]]), jnp.array([0, 1])
  prototypes = known([0.0, 1.0], [5.0, 5.0], present=[True, False])
  value, grad = jax.value_and_grad(
      lambda z: jnp.sum(prototype_loss(z, labels, prototypes))
  )(z)
  assert value == 0.5
  assert grad.tolist() == [[1, 0], [0, 0]]


LAM, RATE = 3.0, 0.3


class Run(NamedTuple):
  """Three rounds of the library, and of `fedproto_numpy` in `want`."""

  federation: Federation
  algorithm: FederatedAlgorithm
  images: np.ndarray
  state: Any
  reports: list[dict[str, Any]]
  want: tuple[Any, ...]


@functools.cache
def three_rounds(weights):
  """The run with two epochs of one step in a round."""
  local = tiny_local(optax.sgd, RATE, epochs=2, batch_size=8)
  federation = tiny_federation((1, 2), norm=False, local=local)
  algorithm = fedproto(federation, prototype_weight=LAM, weights=weights)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  data = data_without_class_0_on_client_0()
  before = jax.device_get(state.clients)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  reports = []
  for _ in range(3):
    state, report = run_round(
        state, data, jax.random.key(1), jax.random.key(2)
    )
    reports.append(jax.device_get(report))

  nets, owned = nets_and_examples(federation, before, data, SIZES)
  images = np.asarray(data.preprocess(data.images), np.float64)
  images = images.reshape(len(images), -1)
  want = fedproto_numpy.run(
      nets, owned, 3, weights == 'data', lam=LAM, lr=RATE, epochs=2
  )
  return Run(
      federation, algorithm, images, jax.device_get(state), reports, want
  )


@pytest.mark.parametrize(
    'weights', ['uniform', pytest.param('data', marks=pytest.mark.slow)]
)
def test_three_rounds_are_those_of_the_paper(weights):
  """Models, prototypes, both terms of the loss, and predictions.

  The clients have two architectures, and the first has no example of class 0.
  """
  federation, algorithm, images, after, reports, want = three_rounds(weights)
  nets, mine, prototypes, want_losses = want
  group_of, row_of = federation.places()
  sent = algorithm.downlink(after.server, federation.groups[0], VISIT)
  assert sent.present.tolist() == [j in prototypes for j in range(NUM_CLASSES)]
  assert sent.present.tolist() == [True, True, False]
  close = functools.partial(
      np.testing.assert_allclose, rtol=1e-4, atol=1e-5
  )
  for j, vector in prototypes.items():
    close(sent.value[j], vector)
  assert 0 not in mine[0]
  found = []
  for k, net in enumerate(nets):
    group, row = federation.groups[group_of[k]], row_of[k]
    client = jax.tree.map(
        lambda leaf, row=row: leaf[row], after.clients[group.name]
    )
    for got, layer in zip(as_list(group.model, client.variables), net):
      close(got[0], layer[0])
      close(got[1], layer[1])
    for j in range(NUM_CLASSES):
      vector, number = mine[k].get(j, (np.zeros(WIDTH), 0))
      assert after.server.counts[k, j] == number
      close(after.server.vectors[k, j], vector)
    for t in range(3):
      metrics = reports[t][group.name].metrics
      close(metrics['cross_entropy'][row], want_losses[t, k, 0])
      close(metrics['prototype_loss'][row], want_losses[t, k, 1])
      close(metrics['train_loss'][row], want_losses[t, k] @ [1, LAM])
    model = algorithm.client_model(after.server, client, group)
    x = images.reshape(-1, *SHAPE).astype(np.float32)
    logits = jax.device_get(algorithm.predict(group, model, x))
    classes = fedproto_numpy.predict(net, images, prototypes)
    assert np.argmax(logits, axis=1).tolist() == classes.tolist()
    found.extend(classes)
  assert len(set(found)) == 2
  assert np.all(want_losses[0, :, 1] == 0) and np.all(want_losses[1:, :, 1] > 0)


def test_lambda_0_is_private_bit_for_bit():
  """With norms, dropout and an optimiser that is kept, too."""
  blocks = (
      Block('stem', Dense(WIDTH, norm=True)),
      Block('mid', Hidden(WIDTH, dropout=0.5)),
      Block('head', Dense(NUM_CLASSES, relu=False)),
  )
  model = BlockModel('net', blocks, SHAPE, NUM_CLASSES, (1, 2))
  group = Group('g', model, np.arange(2))
  federation = Federation((group,), tiny_local(keep_optimizer=True))
  data = tiny_data((5, 8))
  sent = known(*np.ones((NUM_CLASSES, WIDTH)))
  got, _, metrics = visit(
      fedproto(federation, prototype_weight=0.0), group, sent, data, times=2
  )
  want, _, _ = visit(private(federation), group, sent, data, times=2)
  jax.tree.map(np.testing.assert_array_equal, tuple(got), want)
  assert metrics['prototype_loss'] > 0


def test_a_class_that_the_server_lacks_changes_nothing():
  """Whatever its row says, nothing moves; a known class does."""
  federation, data = tiny_federation((1,)), tiny_data((5, 8))
  algorithm, group = fedproto(federation), federation.groups[0]
  rows = np.ones((NUM_CLASSES, WIDTH))
  client = algorithm.init_client(group, 0, jax.random.key(0))

  @jax.jit
  def update(sent):
    return algorithm.client_update(group, client, sent, data.client(0), VISIT)

  nobody = [False] * NUM_CLASSES
  a, b = (
      update(known(*(rows * scale), present=nobody)) for scale in (0.0, 50.0)
  )
  jax.tree.map(np.testing.assert_array_equal, a, b)
  assert a[2]['prototype_loss'] == 0
  assert update(known(*rows))[2]['prototype_loss'] > 0


# Eq. 3: which embeddings are collected.


def class_mean(model, variables, data, client_id, j):
  """Mean embedding of a client's examples of a class, and their number."""
  index = np.asarray(data.index[client_id, : SIZES[client_id]])
  index = index[np.asarray(data.labels)[index] == j]
  x = data.preprocess(data.images[index])
  z, _ = model.apply(variables, x, stop=len(model.blocks) - 1)
  return np.mean(z, axis=0), len(index)


def test_prototypes_are_the_means_over_the_last_of_three_epochs():
  """Of all minibatches, and each example counts once; the model stays."""
  local = tiny_local(optax.sgd, lr=0.0, epochs=3, batch_size=4)
  federation = tiny_federation((1, 2), norm=False, local=local)
  data, group = data_without_class_0_on_client_0(), federation.groups[1]
  sent = known(*np.zeros((NUM_CLASSES, WIDTH)))
  client, uplink, _ = visit(fedproto(federation), group, sent, data, 1)
  upload = uplink.kept.value
  for j in (0, 1):
    mean, number = class_mean(group.model, client.variables, data, 1, j)
    assert upload.counts[j] == number == 4
    np.testing.assert_allclose(upload.vectors[j], mean, rtol=1e-5, atol=1e-6)
  assert uplink.kept.present.tolist() == [True, True, False]


@pytest.mark.parametrize(
    ('steps', 'drop_last', 'want'),
    # Batches of 4 and 1 examples: an epoch has 2 steps, 1 if one is dropped.
    [(None, False, 5), (None, True, 4), (3, False, 5), (1, False, 4)],
)
def test_which_steps_are_the_last_epoch(steps, drop_last, want):
  local = tiny_local(epochs=2, steps=steps, drop_last=drop_last)
  sizes = [4] if drop_last else [4, 1]
  number = len(sizes) * 2 if steps is None else steps
  sizes = (sizes * 2)[:number]
  add = jax.jit(sums_of_last_epoch(1, local, jnp.int32(5)))
  zeros = ClassVectors(jnp.zeros((1, 1)), jnp.zeros(1))
  record = zeros, jnp.int32(0)
  batch = tiny_data((5,)).client(0).batch(jnp.arange(4))
  for size in sizes:
    batch = batch._replace(
        y=jnp.zeros(4, jnp.int32), mask=jnp.arange(4) < size
    )
    record = add(record, jnp.full((4, 1), 2.0), batch)
  assert record[0].counts.tolist() == [want]
  assert record[0].vectors.tolist() == [[2 * want]]


def test_recomputed_prototypes_are_of_the_model_after_training():
  """In eval mode, of all examples, and without those of the padding."""
  federation = tiny_federation((1,), local=tiny_local(drop_last=True))
  data, group = tiny_data((5, 8)), federation.groups[0]
  sent = known(*np.zeros((NUM_CLASSES, WIDTH)))
  algorithm = fedproto(federation, recompute=True)
  client, uplink, _ = visit(algorithm, group, sent, data)
  first, other, _ = visit(fedproto(federation), group, sent, data)
  jax.tree.map(np.testing.assert_array_equal, client, first)
  upload = uplink.kept.value
  assert upload.counts.sum() == 5 and other.kept.value.counts.sum() == 4
  for j in range(NUM_CLASSES):
    mean, number = class_mean(group.model, client.variables, data, 0, j)
    assert upload.counts[j] == number
    if number:
      np.testing.assert_allclose(upload.vectors[j], mean, rtol=1e-5, atol=1e-6)


def test_one_client_gets_its_own_prototypes():
  federation = tiny_federation((1,), 1, norm=False)
  data, algorithm = tiny_data((8,)), fedproto(federation, weights='data')
  group, sent = federation.groups[0], known(*np.zeros((NUM_CLASSES, WIDTH)))
  _, uplink, _ = visit(algorithm, group, sent, data)
  one = jax.tree.map(lambda leaf: leaf[None], uplink.kept)
  server = server_step(
      algorithm,
      algorithm.init(jax.random.key(0)),
      {group.name: Received((), one, jnp.array([0]))},
  )
  sent = algorithm.downlink(server, group, VISIT)
  np.testing.assert_allclose(
      sent.value, uplink.kept.value.vectors, rtol=1e-6, atol=1e-7
  )
  np.testing.assert_array_equal(sent.present, uplink.kept.present)


# Prediction.


def test_the_nearest_prototype_has_the_largest_logit():
  prototypes = known([1.0, 1.0], [0.0, 2.0], [3.0, 0.0])
  z = jnp.array([[0.0, 1.0], [2.0, 0.0]])
  want = [[-1, -1, -10], [-2, -8, -1]]
  np.testing.assert_allclose(nearest(z, prototypes), want, rtol=1e-6)
  shift = jnp.array([8.0, -4.0])
  moved = prototypes._replace(value=prototypes.value + shift[None])
  got = nearest(z + shift[None], moved)
  np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize('scale', [0.0, 1.0, 1e10])
def test_a_class_without_a_prototype_is_last_and_finite(scale):
  prototypes = known([scale, 0.0], [0.0, 0.0], [0.0, scale],
                     present=[True, False, True])  # fmt: skip
  logits = nearest(jnp.array([[0.0, 0.0], [0.5 * scale, 0.0]]), prototypes)
  assert np.all(np.isfinite(logits))
  assert np.all(logits[:, 1] < jnp.minimum(logits[:, 0], logits[:, 2]))
  losses = CLASSIFICATION.losses(logits, jnp.array([1, 1]))
  assert np.all(np.isfinite(losses))


def test_without_any_prototype_the_head_predicts():
  federation = tiny_federation((1,))
  algorithm, group = fedproto(federation), federation.groups[0]
  assert algorithm.predict is predict_nearest
  assert dict(algorithm.views) == dict(head=predict_head)
  server = algorithm.init(jax.random.key(0))
  client = algorithm.init_client(group, 0, jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (5, *SHAPE))
  want, _ = group.model.apply(client.variables, x)
  model = algorithm.client_model(server, client, group)
  np.testing.assert_array_equal(predict_nearest(group, model, x), want)
  np.testing.assert_array_equal(predict_head(group, model, x), want)
  model = Evaluated(*client.variables, known(*np.eye(NUM_CLASSES, WIDTH)))
  np.testing.assert_array_equal(predict_head(group, model, x), want)
  z, _ = group.model.apply(client.variables, x, stop=2)
  gaps = np.asarray(z)[:, None] - np.eye(NUM_CLASSES, WIDTH)
  np.testing.assert_allclose(
      predict_nearest(group, model, x), -np.sum(gaps**2, axis=2), rtol=1e-5
  )


# What travels.


def test_a_class_takes_d_and_1_numbers_up_and_d_down():
  """Client 0 has one class, the others two; no client has the third."""
  reports = three_rounds('uniform').reports
  one, down = 4 * (WIDTH + 1), 4 * 2 * WIDTH
  for t in range(3):
    up = {n: traffic.num_bytes(r.up).tolist() for n, r in reports[t].items()}
    assert up == dict(tiny1=[one, 2 * one], tiny2=[2 * one, 2 * one])
    for report in reports[t].values():
      want = [down if t else 0] * 2
      assert traffic.num_bytes(report.down).tolist() == want


# Models and options.


def test_unused_weights_can_be_dropped():
  """Unless the client keeps its optimiser, whose state is untrimmed."""
  model, data = small_maps(), tiny_data((6,))
  group = Group('g', model, np.array([0]))
  sent = known(*np.ones((model.num_classes, model.shapes[-2][0])))
  found = []
  for drop, keep in ((False, False), (True, False), (True, True)):
    local = tiny_local(drop_unused_weights=drop, keep_optimizer=keep)
    client, uplink, metrics = visit(
        fedproto(Federation((group,), local)), group, sent, data
    )
    found.append((client.variables, uplink, metrics))
  for other in found[1:]:
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        other,
        found[0],
    )


def test_embeddings_of_different_widths_are_refused():
  groups = (
      Group('narrow', tiny_model(1, width=3), np.array([0])),
      Group('wide', tiny_model(1, width=5), np.array([1])),
  )
  with pytest.raises(ValueError, match='but narrow has 3 and wide has 5'):
    fedproto(Federation(groups, tiny_local()))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(prototype_weight=-1.0), 'prototype_weight must be at least 0'),
        (dict(weights='count'), "^Unknown weights 'count'"),
    ],
)
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    fedproto(tiny_federation((1,)), **options)


def test_models_of_different_outputs_are_refused():
  groups = tuple(
      Group(f'c{c}', create('mlp', SHAPE, c, hidden=2), np.array([i]))
      for i, c in enumerate((3, 4))
  )
  with pytest.raises(ValueError, match='number of outputs, got c3 3, c4 4'):
    fedproto(Federation(groups, tiny_local()))
