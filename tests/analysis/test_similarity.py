"""CKA and CCA: closed forms, invariances, and the command that compares."""

import jax
import numpy as np
import pytest

from fedjax_het.analysis import pictures, similarity
from fedjax_het.models import create
from launch import similarity as command
from tests.experiment.tiny_runs import tiny_config
from tests.tiny import tiny_data, tiny_model

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 4))
MEASURES = [similarity.linear_cka, similarity.mean_cca]


@pytest.mark.parametrize('measure', MEASURES)
def test_a_representation_is_like_its_rotations_and_scales(measure):
  rotation, _ = np.linalg.qr(RNG.normal(size=(4, 4)))
  assert measure(X, X) == pytest.approx(1)
  assert measure(X, 3 * X @ rotation + 7) == pytest.approx(1)


def test_cca_sees_no_linear_map_and_cka_does():
  map_ = np.diag([10.0, 1.0, 1.0, 0.1])
  assert similarity.mean_cca(X, X @ map_) == pytest.approx(1)
  assert similarity.linear_cka(X, X @ map_) < 0.95


@pytest.mark.parametrize('measure', MEASURES)
def test_orthogonal_representations_have_nothing_in_common(measure):
  columns, _ = np.linalg.qr(X - X.mean(0))
  assert measure(columns[:, :2], columns[:, 2:]) == pytest.approx(0, abs=1e-12)


def test_worked_numbers():
  """Orthonormal u, v, w: X = (u, v), Y = (u, 2 w)."""
  columns, _ = np.linalg.qr(X - X.mean(0))
  u, v, w = columns[:, :3].T
  x, y = np.stack([u, v], 1), np.stack([u, 2 * w], 1)
  # ||Y'X||^2 = 1, ||X'X|| = sqrt(2), ||Y'Y|| = sqrt(1 + 16).
  assert similarity.linear_cka(x, y) == pytest.approx(1 / np.sqrt(2 * 17))
  assert similarity.mean_cca(x, y) == pytest.approx(0.5)  # rho = (1, 0).
  # An additional constant column changes nothing.
  y = np.concatenate([y, np.ones((50, 1))], axis=1)
  assert similarity.mean_cca(x, y) == pytest.approx(0.5)


def test_constant_features_have_no_similarity():
  for measure in MEASURES:
    assert np.isnan(measure(X, np.ones((50, 3))))


def test_wrong_shapes_are_refused():
  with pytest.raises(ValueError, match='same examples, got 50 and 49'):
    similarity.linear_cka(X, X[1:])
  with pytest.raises(ValueError, match=r'y must be \[n, d\].*shape \(50,\)'):
    similarity.mean_cca(X, X[:, 0])
  with pytest.raises(ValueError, match='at least 2 clients, got 1'):
    similarity.mean_similarity([{'a': X}])


def test_features_are_those_of_the_span_up_to_each_block():
  model = tiny_model(1)
  variables = model.init(jax.random.key(0))
  data = tiny_data()
  x = data.preprocess(data.images[:5])
  features = similarity.block_features(model, variables, x)
  assert list(features) == list(model.block_names)
  for stop, name in enumerate(model.block_names, 1):
    want, _ = model.apply(variables, x, stop=stop)
    np.testing.assert_allclose(features[name], want, rtol=1e-5, atol=1e-6)


def test_means_run_over_ordered_pairs():
  clients = [{'a': X, 'b': X[:, :1]}, {'a': X[:, 1:], 'b': X[:, 2:]}]
  got = similarity.mean_similarity(clients)
  cka = similarity.linear_cka
  one, other = clients
  np.testing.assert_allclose(got[0, 0], cka(one['a'], other['a']))
  np.testing.assert_allclose(
      got[0, 1], (cka(one['a'], other['b']) + cka(other['a'], one['b'])) / 2
  )
  np.testing.assert_allclose(got, got.T)


@pytest.mark.slow
def test_a_run_is_compared_and_drawn(tmp_path):
  layers, matrices, number = command.compare(
      tiny_config('private'), tmp_path / 'run', 1000, 2
  )
  assert number == 355  # All of the test set.
  for matrix in matrices.values():
    assert matrix.shape == (len(layers),) * 2
    assert np.all((matrix > 0) & (matrix <= 1 + 1e-9))
    assert np.diag(matrix)[-1] < 0.999  # Of two clients, not of one.
  path = pictures.draw_matrices(matrices, layers, tmp_path / 'a.png')
  assert path.stat().st_size > 1000
  with pytest.raises(ValueError, match='nothing to draw'):
    pictures.draw_matrices({}, layers, tmp_path / 'a.png')


def test_a_method_without_personal_models_is_refused(tmp_path):
  with pytest.raises(ValueError, match='fedavg has one model for a group'):
    command.compare(tiny_config('fedavg'), tmp_path / 'run', 100, 2)


def test_stages_end_in_their_last_block():
  model = create('mini_resnet10', (8, 8, 1), 10)
  assert similarity.stages(model) == {
      'stem': 'stem', 'stage1': 'stage1_block1', 'stage2': 'stage2_block1',
  }  # fmt: skip
  assert similarity.stage_block(model, 'stage2') == 'stage2_block1'
  assert similarity.stage_block(model, 'pool') == 'pool'
  with pytest.raises(ValueError, match="Unknown stage of mini_resnet10 'x'"):
    similarity.stage_block(model, 'x')


def test_pairs_of_networks_are_symmetric():
  clients = [X, X[:, :1], X[:, 1:]]
  matrix = similarity.pairwise(clients)
  np.testing.assert_allclose(matrix, matrix.T)
  one = similarity.linear_cka(X, X[:, 1:])
  # A matrix product may round differently by the alignment of its operands.
  np.testing.assert_allclose(matrix[0, 2], one, rtol=1e-12)
  others = matrix[0, 1] + matrix[0, 2] + matrix[1, 2]
  assert similarity.mean_of_pairs(matrix) == pytest.approx(others / 3)
  with pytest.raises(ValueError, match='at least 2 networks'):
    similarity.pairwise([X])
