"""Users' arrays are stored unchanged, or refused in one line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_het as fh
from fedjax_het.data import arrays
from fedjax_het.data.federated import (
    NO_LABEL,
    Normalise,
    federate,
    unchanged,
)
from fedjax_het.data.preprocess import (
  Standardise,
  as_floats,
  make_preprocess,
  statistics,
)
from fedjax_het.engine.task import CLASSIFICATION

PARTS = [[0, 1], [2, 3, 4]]


def images(dtype, shape=()):
  rng = np.random.default_rng(0)
  return (2 * rng.random((5, *shape))).astype(dtype)


@pytest.mark.parametrize('shape', [(), (3,), (2, 2), (4, 4, 1), (2, 3, 2, 2)])
@pytest.mark.parametrize(
    'dtype',
    ['float32', 'float16', 'bfloat16', 'int32', 'int16', 'uint8', 'bool'],
)
def test_features_of_any_rank_are_stored_as_they_are(dtype, shape):
  x = images(jnp.dtype(dtype), shape)
  data = federate(x, np.arange(5), PARTS)
  assert data.images.dtype == x.dtype and data.images.shape == x.shape
  np.testing.assert_array_equal(np.asarray(data.images), x)
  batch = data.client(1).batch(jnp.array([0, 2]))
  np.testing.assert_array_equal(np.asarray(batch.x), x[[2, 4]])
  assert batch.y.tolist() == [2, 4] and batch.x.dtype == x.dtype


@pytest.mark.parametrize(
    ('wide', 'narrow'),
    [
        ('float64', 'float32'), ('int64', 'int32'), ('uint64', 'uint32'),
        ('longdouble', 'float32'), ('>f4', 'float32'), ('>u2', 'uint16'),
    ],
)  # fmt: skip
def test_what_jax_lacks_becomes_what_it_has(wide, narrow):
  data = federate(images(wide, (3,)), np.arange(5), PARTS)
  assert data.images.dtype == narrow
  np.testing.assert_array_equal(
      np.asarray(data.images), images(wide, (3,)).astype(narrow)
  )


def test_float_images_in_0_1_are_not_rounded():
  """They were once rounded to uint8 zeros without a warning."""
  x = np.linspace(0, 0.99, 5 * 16).reshape(5, 4, 4, 1)
  data = federate(x, np.arange(5), PARTS)
  np.testing.assert_allclose(np.asarray(data.images), x, rtol=1e-6)


def test_labels_are_int32_or_float32():
  for given, dtype in (
      (np.arange(5, dtype=np.int64), 'int32'),
      (np.array([True, False, True, True, False]), 'int32'),
      (np.linspace(0, 1, 5), 'float32'),
      (np.linspace(0, 1, 10).reshape(5, 2), 'float32'),
      ([4, 3, 2, 1, 0], 'int32'),
  ):
    data = federate(images('float32'), given, PARTS)
    assert data.labels.dtype == dtype
    np.testing.assert_allclose(np.asarray(data.labels), np.float32(given))


def test_partitions_of_the_same_labels_need_one_program():
  """The largest label is static: it is that of the examples in use."""
  y = np.array([0, 1, 2, 1, 9])
  one, other, fewer = (
      federate(images('float32'), y, parts)
      for parts in (PARTS, [[4, 3, 2], [0, 1]], [[0, 1], [1, 2, 3]])
  )
  assert jax.tree.structure(one) == jax.tree.structure(other)
  assert one.largest_label == 9 and fewer.largest_label == 2
  public = federate(images('float32'), y, [[0], [1]], public=np.array([4]))
  assert public.largest_label == 9
  assert federate(images('float32'), y / 2, PARTS).largest_label is None


@pytest.mark.parametrize(
    ('y', 'hidden'),
    [
        (np.array([9, 1, 2, 1, 3]), NO_LABEL),
        (np.linspace(0, 1, 5), np.nan),
        (np.arange(10).reshape(5, 2), NO_LABEL),
    ],
)
def test_labels_of_a_public_set_can_be_hidden(y, hidden):
  given, data = (
      federate(
          images('uint8'),
          y,
          [[1], [3, 2, 4]],
          public=np.array([0]),
          public_labels=visible,
      )
      for visible in (True, False)
  )
  y, first = np.asarray(given.labels), jnp.array([0])
  np.testing.assert_array_equal(given.of_public().batch(first).y, y[:1])
  got = data.client(1).of_public().batch(first).y
  np.testing.assert_array_equal(got, np.full_like(y[:1], hidden))
  assert got.dtype == y.dtype
  # Clients keep their labels, and their padding has labels, too.
  np.testing.assert_array_equal(data.labels[1:], y[1:])
  assert data.index.tolist() == [[1, 1, 1, 1], [3, 2, 4, 1]]
  assert given.index.tolist() == [[1, 0, 0, 0], [3, 2, 4, 0]]
  if y.ndim == 1 and y.dtype == np.int32:
    assert (given.largest_label, data.largest_label) == (9, 3)


def test_the_loss_of_a_hidden_label_is_nan():
  losses = CLASSIFICATION.losses(jnp.zeros((2, 3)), jnp.array([NO_LABEL, 2]))
  np.testing.assert_allclose(losses, [np.nan, np.log(3)], rtol=1e-6)


def refused(message, x=None, y=None, parts=PARTS, **options):
  x = images('float32', (3,)) if x is None else x
  y = np.arange(5) if y is None else y
  with pytest.raises(ValueError) as error:
    federate(x, y, parts, **options)
  assert '\n' not in str(error.value)
  assert message in str(error.value)


def test_wrong_features_are_refused():
  nan = images('float32', (2, 2))
  nan[3, 0, 1] = np.nan
  refused('images must be finite, got nan in example 3.', nan)
  huge = images('float64', (2,))
  huge[1, 1] = 1e300
  refused('images must be finite, got inf in example 1.', huge)
  refused(
      'images must lie in -2147483648..2147483647, which int32 holds, got '
      '1099511627776.',
      np.array([0, 1, 2, 3, 2**40]),
  )
  refused('floats, integers or bools, got dtype <U1', np.array(list('abcde')))
  refused('floats, integers or bools, got dtype complex', np.zeros(5, complex))
  refused('images must be one array', [[1.0], [1.0, 2.0]])
  refused('images must be [N, ...], got the number', np.float32(1))


def test_wrong_labels_are_refused():
  refused('labels holds 1,442 entries for 5 examples.', y=np.zeros(1442, int))
  refused('labels must be classes from 0 on, got -1', y=[0, 1, 2, -1, 0])
  refused(
      'labels must lie in 0..2 for 3 classes, got 4.', num_classes=3
  )
  refused(
      'labels must be integers in 0..2 for 3 classes, got dtype float32',
      y=np.zeros(5), num_classes=3,
  )  # fmt: skip
  refused('labels must be finite, got inf', y=np.array([0, 1, np.inf, 0, 0]))
  federate(images('uint8'), np.arange(5), PARTS, num_classes=5)
  words = np.full((5, 2), -1)  # A task may read -1 as missing.
  assert federate(images('uint8'), words, PARTS).labels.min() == -1
  refused('labels must be classes from 0', y=words, num_classes=3)


def test_wrong_indices_are_refused():
  refused('at least one client, got none', parts=[])
  refused('Client 1 has no example', parts=[[0], []])
  refused(
      'client 1 names example 5, but there are 5 examples, 0..4.',
      parts=[[0], [5]],
  )
  refused('client 0 names example -1', parts=[[-1]])
  refused('client 0 must be a list of example numbers', parts=[[0.5]])
  refused('client 0 must be a list of example numbers', parts=[[[0, 1]]])
  refused('client 0 names example 1099511627776', parts=[[2**40]])
  refused('the public set names example 9', public=[9])
  refused(
      'Client 1 has example 3 of the public set, whose label '
      'public_labels=False hides.',
      public=[3],
      public_labels=False,
  )
  assert arrays.indices([], 3, 'x').dtype == np.int32


def test_statistics_of_floats_are_those_of_each_column():
  rng = np.random.default_rng(0)
  x = rng.normal([3.0, -50.0, 7.0], [2.0, 0.1, 0.0], (3000, 3))
  x = x.reshape(1000, 3, 3).astype(np.float32)
  mean, std = statistics(x)
  rows = x.reshape(-1, 3).astype(np.float64)
  np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-9)
  np.testing.assert_allclose(std[:2], rows.std(0)[:2], rtol=1e-9)
  assert std[2] == 1  # A constant column stays 0 instead of NaN.
  inputs = np.asarray(make_preprocess(x)(x))
  np.testing.assert_allclose(inputs.reshape(-1, 3).mean(0), 0, atol=1e-3)
  np.testing.assert_allclose(
      inputs.reshape(-1, 3).std(0), [1, 1, 0], atol=1e-3
  )


def test_a_constant_column_of_pixels_is_not_nan():
  x = np.array([[7, 0], [7, 255]], np.uint8)
  mean, std = statistics(x)
  np.testing.assert_allclose(mean, [7 / 255, 0.5])
  np.testing.assert_allclose(std, [1, 0.5])
  inputs = make_preprocess(x)(x)
  np.testing.assert_allclose(inputs, [[0, -1], [0, 1]], atol=1e-6)


def test_the_preprocessing_follows_the_type():
  pixels = images('uint8', (2, 2, 3))
  assert make_preprocess(pixels) == Normalise(*statistics(pixels))
  floats = images('float32', (2,))
  assert make_preprocess(floats, (0.5,), (2.0,)) == Standardise((0.5,), (2.0,))
  assert make_preprocess(images('int32')) is unchanged
  assert make_preprocess(images('bool')) is as_floats
  assert as_floats(images('bool')).dtype == np.float32


@pytest.mark.parametrize('kind', ['uint8', 'float32'])
def test_a_scale_that_is_not_finite_is_refused(kind):
  features = images(kind, (2,))
  for wrong in (np.nan, np.inf, -np.inf, 0.0, -1.0):
    with pytest.raises(ValueError, match=r'^std of the features must be '):
      make_preprocess(features, (0.5, 0.5), (1.0, wrong))
  for wrong in (np.nan, np.inf, -np.inf):
    with pytest.raises(ValueError, match=r'^mean of the features must be a f'):
      make_preprocess(features, (0.5, wrong), (1.0, 1.0))


def test_features_without_a_mean_are_refused():
  with pytest.raises(ValueError, match=r'^mean of the features must be a f'):
    make_preprocess(np.array([[1.0, np.nan]]))


def test_standardised_features_are_augmented_with_a_key():
  def add(amount):
    return lambda key, x: x + amount

  x = np.array([[1.0], [3.0]], np.float32)
  standardise = Standardise((1.0,), (2.0,), add(4.0), add(0.5))
  assert standardise(x).tolist() == [[0.0], [1.0]]
  key = jax.random.key(0)
  assert standardise(x, key).tolist() == [[2.5], [3.5]]


class _Tracked:
  """An array that NumPy cannot convert, such as a tensor with gradients."""

  def __array__(self, dtype=None, copy=None):
    raise RuntimeError('Use tensor.detach().numpy() instead.')


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (dict(images=_Tracked()), 'images must be one array: .*detach'),
        (dict(labels=np.array(['cat', 'dog'])), 'np.unique.labels, return_in'),
        (dict(labels=np.eye(2)), r'dtype float32 and shape \(2, 2\)'),
        (dict(num_classes='2'), "num_classes must be an integer, got '2'"),
        (dict(num_classes=2.0), 'num_classes must be an integer, got 2.0'),
        (dict(parts=2), 'parts must be a list of example numbers .* got int'),
        (dict(parts=None), 'parts must be .* got NoneType'),
        (dict(parts={'a': [0], 'b': [1]}), 'parts must be .* got dict'),
        (dict(preprocess=None), r'preprocess must be .* make_preprocess'),
    ],
)
def test_what_a_notebook_may_hand_over_by_mistake(change, words):
  given = dict(
      images=np.ones((2, 3)), labels=np.arange(2), parts=[[0], [1]],
      num_classes=2,
  )  # fmt: skip
  with pytest.raises(ValueError, match=words) as error:
    fh.federate(**{**given, **change})
  assert '\n' not in str(error.value)


def test_no_preprocess_of_text_or_of_nothing():
  with pytest.raises(ValueError, match='features must be floats, integers'):
    fh.make_preprocess(np.array(['a b', 'c']))
  with pytest.raises(ValueError, match=r'empty, of shape \(0, 3\)'):
    fh.make_preprocess(np.ones((0, 3)))


@pytest.mark.parametrize('config', ['fedavg', None])
def test_a_run_needs_a_config(config):
  with pytest.raises(ValueError, match=r"such as default_config\('fedavg'\)"):
    fh.run(config)


def test_a_workdir_is_a_path():
  with pytest.raises(ValueError, match='workdir must be a path, got 5'):
    fh.run(fh.default_config('fedavg'), 5)
