"""Personalised evaluation tests each client's model on its own examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms import fedavg, private
from fedjax_het.data.federated import federate
from fedjax_het.engine import rounds
from fedjax_het.engine.evaluate import make_evaluate
from fedjax_het.engine.mapping import Backend, client_mesh
from fedjax_het.engine.own_test import make_own_test
from tests.tiny import NUM_CLASSES, preprocess, tiny_data, tiny_federation

TWO_GROUPS = tiny_federation((1, 2), per_group=3, norm=False)
ONE_GROUP = tiny_federation((1,), per_group=6, norm=False)
DATA = tiny_data((5, 8, 3, 7, 6, 4))
IMAGES, LABELS = np.asarray(DATA.images), np.asarray(DATA.labels)
# Several batches, one and none; clients 4 and 0 share examples.
LISTS = [[0, 1, 2, 3, 4, 5, 6, 7], [9], [], [20, 21, 22], [7, 1, 2], [30]]
TESTS = federate(IMAGES, LABELS, LISTS, preprocess, allow_empty=True)


def test_a_class_without_an_output_is_refused():
  with pytest.raises(ValueError, match=r'classes 0\.\.2, but a label is 3'):
    make_own_test(
        fedavg(ONE_GROUP), ONE_GROUP, TESTS.replace(largest_label=3)
    )


def test_a_test_set_of_other_clients_is_refused():
  with pytest.raises(ValueError, match='of 6 clients, but the groups hold 3'):
    make_own_test(fedavg(ONE_GROUP), tiny_federation((1,), 3), TESTS)


def make_state(algorithm, federation):
  """A state in which personal models differ from client to client."""
  state = rounds.init_state(algorithm, federation, jax.random.key(3))

  def move(leaf):
    places = np.arange(leaf.size).reshape(leaf.shape)
    return jnp.asarray(leaf + np.float32(0.5) * np.sin(7 * places))

  return state._replace(clients=jax.tree.map(move, state.clients))


def numpy_model(model, variables, images):
  """Logits of a tiny dense model, in float64."""
  x = images.reshape(len(images), -1) / 127.5 - 1.0
  for name in model.block_names:
    layer = variables.params[name]['Dense_0']
    x = x @ np.asarray(layer['kernel'], np.float64) + np.asarray(layer['bias'])
    x = x if name == 'head' else np.maximum(x, 0)
  return x


def expected(algorithm, federation, state):
  """{client: (accuracy, loss)} of each model on the client's examples."""
  found = {}
  for group in federation.groups:
    for row, client_id in enumerate(group.client_ids):
      mine = LISTS[client_id]
      if not mine:
        found[client_id] = 0.0, 0.0
        continue
      client = jax.tree.map(lambda a, r=row: a[r], state.clients[group.name])
      variables = algorithm.client_model(state.server, client, group)
      logits = numpy_model(group.model, variables, IMAGES[mine])
      y = LABELS[mine]
      log_sum = np.log(np.exp(logits).sum(axis=1))
      loss = log_sum - logits[np.arange(len(y)), y]
      found[client_id] = np.mean(logits.argmax(axis=1) == y), loss.mean()
  return found


@pytest.mark.parametrize(
    ('make', 'backend'),
    [
        (fedavg, Backend('map')),
        (private, Backend('map')),
        (private, Backend('vmap', 2)),
    ],
)
def test_each_client_is_tested_on_its_own_examples(make, backend):
  algorithm = make(TWO_GROUPS)
  state = make_state(algorithm, TWO_GROUPS)
  run = make_own_test(
      algorithm, TWO_GROUPS, TESTS, batch_size=3, backend=backend
  )
  found = run(state.server, state.clients)
  want = expected(algorithm, TWO_GROUPS, state)
  for group in TWO_GROUPS.groups:
    own = found[group.name]
    np.testing.assert_array_equal(own.client_id, group.client_ids)
    assert own.size.tolist() == [len(LISTS[k]) for k in group.client_ids]
    for i, client_id in enumerate(group.client_ids):
      accuracy, loss = want[client_id]
      np.testing.assert_allclose(own.accuracy[i], accuracy, rtol=1e-5)
      np.testing.assert_allclose(own.loss[i], loss, rtol=1e-5)
  assert len({loss for _, loss in want.values()}) == 6  # No two are alike.


def test_states_on_the_host_and_on_devices_give_the_same():
  algorithm = private(ONE_GROUP)
  state = make_state(algorithm, ONE_GROUP)
  want = expected(algorithm, ONE_GROUP, state)
  on_host = jax.tree.map(np.array, state.clients)
  mesh = client_mesh(jax.devices()[:2])
  # Five of six clients: one device has three, the other two and a repeated
  # one.
  rows = {'tiny1': np.array([0, 1, 3, 4, 5])}
  for clients, backend in (
      (on_host, Backend('map')),
      (state.clients, Backend('shard_map', mesh=mesh)),
  ):
    run = make_own_test(
        algorithm, ONE_GROUP, TESTS, batch_size=3, rows=rows, backend=backend
    )
    own = run(state.server, clients)['tiny1']
    assert own.client_id.tolist() == rows['tiny1'].tolist()
    accuracy, loss = zip(*(want[k] for k in own.client_id), strict=True)
    np.testing.assert_allclose(own.accuracy, accuracy, rtol=1e-5)
    np.testing.assert_allclose(own.loss, loss, rtol=1e-5)


def evaluate(algorithm, state, **options):
  run = make_evaluate(
      algorithm, ONE_GROUP, IMAGES, LABELS, preprocess, batch_size=8, **options
  )
  return run(state)['tiny1']


def test_the_global_results_stay_bit_for_bit_and_rows_are_the_same():
  algorithm = private(ONE_GROUP)
  state = make_state(algorithm, ONE_GROUP)
  plain = evaluate(algorithm, state, clients_per_group=2)
  both = evaluate(algorithm, state, clients_per_group=2, own_tests=TESTS)
  assert plain.own is None
  np.testing.assert_array_equal(both.accuracy, plain.accuracy)
  np.testing.assert_array_equal(both.loss, plain.loss)
  assert both.own.client_id.tolist() == both.client_id.tolist() == [0, 5]


def test_calibration_comes_before_both_and_shared_models_serve_all():
  algorithm = fedavg(ONE_GROUP)._replace(
      calibrate=lambda server, data: jax.tree.map(jnp.zeros_like, server)
  )
  state = make_state(algorithm, ONE_GROUP)
  scores = evaluate(
      algorithm, state, clients_per_group=2, own_tests=TESTS, data=DATA
  )
  assert scores.own.size.tolist() == [8, 1, 0, 3, 3, 1]
  tested = scores.own.size > 0
  np.testing.assert_allclose(scores.own.loss[tested], np.log(3), rtol=1e-5)
  np.testing.assert_allclose(scores.loss, np.log(3), rtol=1e-5)


def test_padding_repeats_the_first_examples():
  """It matters to models that compare the examples of a batch."""

  def predict(group, variables, x):
    x = x.reshape(len(x), -1)[:, :NUM_CLASSES]
    return x - jnp.mean(x, axis=0, keepdims=True)

  tests = federate(
      IMAGES, LABELS, [[0, 1, 2, 3, 4]] * 6, preprocess, allow_empty=True
  )
  algorithm = fedavg(ONE_GROUP)._replace(predict=predict)
  evaluate = make_evaluate(
      algorithm, ONE_GROUP, IMAGES[:5], LABELS[:5], preprocess, batch_size=4,
      own_tests=tests,
  )  # fmt: skip
  scores = evaluate(make_state(algorithm, ONE_GROUP))['tiny1']
  x = preprocess(IMAGES).reshape(-1, 4)[:, :NUM_CLASSES]
  losses = []
  for batch, some in (([0, 1, 2, 3], [0, 1, 2, 3]), ([4, 0, 1, 2], [4])):
    logits = x - x[np.array(batch)].mean(axis=0, keepdims=True)
    losses += [-jax.nn.log_softmax(logits[i])[LABELS[i]] for i in some]
  want = np.mean(losses)
  np.testing.assert_allclose(scores.loss, [want], rtol=1e-5)
  np.testing.assert_allclose(scores.own.loss, [want] * 6, rtol=1e-5)
