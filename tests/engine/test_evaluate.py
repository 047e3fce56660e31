"""Evaluation: views, confusion matrices, calibration and shared models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms import fedavg, private
from fedjax_het.engine import confusion, rounds
from fedjax_het.engine import evaluate as evaluate_lib
from fedjax_het.engine.mapping import Backend
from fedjax_het.engine.types import Federation, Group
from fedjax_het.experiment import metrics
from fedjax_het.models import create
from tests.engine.test_asynchronous import probe
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  one_model_federation,
  preprocess,
  tiny_data,
  tiny_federation,
  tiny_local,
)

FEDERATION = tiny_federation((1, 2), norm=False)
DATA = tiny_data((5, 8, 3, 7))
IMAGES, LABELS = np.asarray(DATA.images), np.asarray(DATA.labels)


def evaluate(algorithm, **kwargs):
  state = rounds.init_state(algorithm, FEDERATION, jax.random.key(0))
  run = evaluate_lib.make_evaluate(
      algorithm, FEDERATION, IMAGES, LABELS, preprocess, batch_size=7, **kwargs
  )
  return state, run(state)


def constant(number):
  """Predicts one class."""

  def predict(group, variables, x):
    return jnp.tile(jax.nn.one_hot(number, NUM_CLASSES)[None], (len(x), 1))

  return predict


def test_views_are_scored_beside_the_prediction():
  algorithm = private(FEDERATION)._replace(
      views={'first': constant(0), 'last': constant(2)}
  )
  _, scores = evaluate(algorithm)
  _, plain = evaluate(private(FEDERATION))
  row = metrics.test_row(3, scores, FEDERATION, 0.0)
  for group in FEDERATION.groups:
    got = scores[group.name]
    np.testing.assert_array_equal(got.accuracy, plain[group.name].accuracy)
    for name, number in (('first', 0), ('last', 2)):
      share = np.mean(LABELS == number)
      np.testing.assert_allclose(got.views[name], [share] * 2, rtol=1e-6)
      assert row[f'views/{name}/{group.name}'] == pytest.approx(share)
      assert row[f'views/{name}'] == pytest.approx(share)
  assert not any(
      key.startswith('views')
      for key in metrics.test_row(3, plain, FEDERATION, 0.0)
  )


@pytest.mark.parametrize('backend, chunk', [('vmap', 1), ('vmap', None)])
def test_models_are_batched_as_clients_are(backend, chunk):
  algorithm = private(FEDERATION)
  _, want = evaluate(algorithm, backend='map')
  _, got = evaluate(algorithm, backend=Backend(backend, chunk))
  for name, scores in want.items():
    assert len(scores.accuracy) == 2
    np.testing.assert_array_equal(got[name].accuracy, scores.accuracy)
    np.testing.assert_allclose(got[name].loss, scores.loss, rtol=1e-5)
    np.testing.assert_array_equal(got[name].confusion, scores.confusion)
    counts = np.asarray(scores.confusion)
    assert counts.shape == (2, NUM_CLASSES, NUM_CLASSES)
    # Padding of the last batch is not counted.
    np.testing.assert_array_equal(
        counts.sum(axis=2), [np.bincount(LABELS, minlength=NUM_CLASSES)] * 2
    )
    right = np.trace(counts, axis1=1, axis2=2)
    np.testing.assert_allclose(right / len(LABELS), scores.accuracy, rtol=1e-6)


def test_confusion_matrices_count_by_true_and_predicted_class():
  predicted, labels = jnp.array([2, 1, 1, 0]), jnp.array([0, 1, 0, 2])
  mask = jnp.array([True, True, True, False])
  counts = confusion.count(predicted, labels, mask, 3)
  np.testing.assert_array_equal(counts, [[0, 1, 1], [0, 1, 0], [0, 0, 0]])


def test_calibration_replaces_the_server_for_evaluation_alone():
  """If all parameters but one bias are 0, that class is predicted."""

  def calibrate(server, data):
    zeros = jax.tree.map(jnp.zeros_like, server)
    top = jnp.argmax(jnp.bincount(data.labels, length=NUM_CLASSES))
    bias = jax.nn.one_hot(top, NUM_CLASSES)
    zeros.params['head']['Dense_0']['bias'] = bias
    return zeros

  algorithm = fedavg(FEDERATION)._replace(calibrate=calibrate)
  state, scores = evaluate(algorithm, data=DATA)
  most = np.bincount(LABELS).max() / len(LABELS)
  for score in scores.values():
    np.testing.assert_allclose(score.accuracy, [most], rtol=1e-6)
  assert np.any(state.server.params['stem']['Dense_0']['kernel'])


def test_calibration_needs_data():
  algorithm = fedavg(FEDERATION)._replace(calibrate=lambda server, data: server)
  with pytest.raises(ValueError, match='This algorithm needs make_eval'):
    evaluate(algorithm)


def test_one_model_for_all_groups_is_evaluated_once():
  federation = one_model_federation(norm=False, num_groups=2)
  plain = fedavg(federation)
  groups = []

  def predict(group, variables, x):
    groups.append(group.name)
    return plain.predict(group, variables, x)

  def scores(algorithm):
    state = rounds.init_state(algorithm, federation, jax.random.key(0))
    return evaluate_lib.make_evaluate(
        algorithm, federation, IMAGES, LABELS, preprocess, batch_size=7
    )(state)

  want = scores(plain._replace(one_model=False))
  got = scores(plain._replace(predict=predict))
  assert set(groups) == {'tiny1'}
  for group in federation.groups:
    mine = got[group.name]
    np.testing.assert_array_equal(mine.client_id, group.client_ids[:1])
    np.testing.assert_array_equal(mine.accuracy, want[group.name].accuracy)
    np.testing.assert_array_equal(mine.loss, want[group.name].loss)


def test_every_model_needs_an_output_for_each_class_of_the_test_set():
  groups = tuple(
      Group(f'of{n}', create('mlp', SHAPE, n, hidden=2), [i])
      for i, n in enumerate((4, 3, 5))
  )
  federation = Federation(groups, tiny_local())

  def make(labels):
    return evaluate_lib.make_evaluate(
        probe(1), federation, IMAGES[:4], labels, preprocess
    )

  make(np.array([0, 1, 2, 2]))
  with pytest.raises(ValueError, match=r'^test labels must lie in 0\.\.2 for'):
    make(np.array([0, 1, 2, 3]))
