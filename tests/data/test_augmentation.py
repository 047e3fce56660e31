"""Crops, flips and cut-outs: their places and colours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.data.federated import Normalise, crop_flip, cut_out
from fedjax_het.experiment import examples


def preprocess(**local):
  config = experiment.default_config('fedavg')
  config.local.update(local)
  return experiment.build(config).preprocess


@pytest.fixture(scope='module')
def images():
  """Random images without a black pixel."""
  draw = np.random.default_rng(0).integers(1, 256, (32, 20, 20, 1), np.uint8)
  return jnp.asarray(draw)


def test_a_cut_out_is_one_square_around_a_pixel(images):
  side = 6
  cut = np.asarray(cut_out(jax.random.key(0), images, side=side))[..., 0]
  assert cut.dtype == np.uint8
  for image, before in zip(cut, np.asarray(images)[..., 0], strict=True):
    rows, cols = np.nonzero(image == 0)
    low, high = (rows.min(), cols.min()), (rows.max() + 1, cols.max() + 1)
    # The whole square, cropped at the border of the image.
    for begin, end in zip(low, high, strict=True):
      assert side // 2 <= end - begin <= side
      assert end - begin == side or begin == 0 or end == 20
    assert len(rows) == np.prod(np.subtract(high, low))
    rest = image != 0
    np.testing.assert_array_equal(image[rest], before[rest])


def test_a_cut_out_has_the_mean_colour_or_is_black():
  """Squares and crops are the same; only the colour differs."""
  key = jax.random.key(3)
  # Grey images, so that outside the squares only the crop's padding is black.
  images = jnp.full((64, 32, 32, 1), 200, jnp.uint8)
  augment = 'crop_flip_cutout'
  after = preprocess(augment=augment)
  before = preprocess(augment=augment, cutout='before')
  black = -np.float32(after.mean[0] / after.std[0])
  plain = np.asarray(preprocess(augment='crop_flip')(images, key))
  mean_colour = np.asarray(after(images, key))
  dark = np.asarray(before(images, key))
  hole = mean_colour == 0
  assert 0 < hole.mean() < 1
  # The squares have the 16 pixels of DeVries and Taylor.
  assert hole[..., 0].any(2).sum(1).max() == 16
  assert hole[..., 0].any(1).sum(1).max() == 16
  np.testing.assert_array_equal(mean_colour[~hole], plain[~hole])
  np.testing.assert_array_equal(dark[~hole], plain[~hole])
  np.testing.assert_allclose(dark[hole], black, rtol=1e-6)
  # Test images are left alone.
  np.testing.assert_array_equal(after(images), before(images))


def test_crops_and_cut_outs_are_uniform_and_independent():
  key = jax.random.key(1)
  dots = np.zeros((4000, 9, 9, 1), np.uint8)
  dots[:, 4, 4] = 255
  moved = np.asarray(crop_flip(key, jnp.asarray(dots), flip=False))
  crops = np.argwhere(moved[..., 0] == 255)
  assert len(crops) == 4000
  np.testing.assert_array_equal(crops[:, 0], np.arange(4000))

  def centres(height, width):
    cut = cut_out(key, jnp.ones((4000, height, width, 1)), side=1)
    return np.argwhere(np.asarray(cut)[..., 0] == 0)

  holes = centres(9, 9)
  for places, sizes in (
      (crops, (9, 9)), (holes, (9, 9)), (centres(8, 20), (8, 20)),
  ):  # fmt: skip
    for column, size in zip(places[:, 1:].T, sizes, strict=True):
      counts = np.bincount(column, minlength=size)
      np.testing.assert_allclose(counts, 4000 / size, rtol=0.3)
  pairs = np.corrcoef(np.concatenate([crops[:, 1:], holes[:, 1:]], 1).T)
  assert np.abs(pairs - np.eye(4)).max() < 0.06


def test_images_may_be_cropped_and_flipped_once_before_the_first_round(
    monkeypatch
):
  monkeypatch.setattr(examples, '_AT_ONCE', 1000)  # Two batches.

  def built(augment, seed=0, validation=None):
    config = experiment.default_config('fedavg')
    config.validation = validation
    config.local.augment, config.partition.seed = augment, seed
    return experiment.build(config)

  plain, once = built('none'), built('crop_flip_once')
  before, after = plain.dataset.train_images, once.dataset.train_images
  assert after.dtype == before.dtype and after.shape == before.shape
  ways = []
  for image, new in zip(before, after, strict=True):
    padded = np.pad(image, ((4, 4), (4, 4), (0, 0)))
    crops = np.lib.stride_tricks.sliding_window_view(
        padded[..., 0], image.shape[:2]
    )
    ways.append([
        np.any(np.all(crops == side, axis=(2, 3)))
        for side in (new[..., 0], new[:, ::-1, 0])
    ])
  assert np.all(np.any(ways, axis=1))
  # Half are mirrored, and most are moved.
  assert 0.4 < np.mean(np.array(ways)[:, 1]) < 0.6
  assert np.mean(np.any(before != after, axis=(1, 2, 3))) > 0.9
  # All else is as it was, and batches are not augmented again.
  for a, b in zip(plain.parts, once.parts, strict=True):
    np.testing.assert_array_equal(a, b)
  np.testing.assert_array_equal(
      plain.dataset.test_images, once.dataset.test_images
  )
  batch, key = after[:8], jax.random.key(0)
  np.testing.assert_array_equal(
      once.preprocess(batch, key), plain.preprocess(batch)
  )
  # So are the examples that nobody trains on.
  held = built('crop_flip_once', validation=0.2)
  left = held.dataset.train_images[held.validation]
  np.testing.assert_array_equal(left, before[held.validation])
  assert np.any(held.dataset.train_images != before)
  again = built('crop_flip_once').dataset.train_images
  np.testing.assert_array_equal(after, again)
  other = built('crop_flip_once', seed=1).dataset.train_images
  assert np.any(after != other)


def test_what_follows_normalisation_sees_normalised_images(images):
  seen = []

  def look(key, x):
    del key
    seen.append(x)
    return x

  normalise = Normalise((0.5,), (0.25,), crop_flip, look)
  normalise(images)
  assert not seen
  out = normalise(images, jax.random.key(0))
  assert seen[0].dtype == jnp.float32 and float(jnp.abs(seen[0]).max()) <= 2.0
  np.testing.assert_array_equal(out, seen[0])
