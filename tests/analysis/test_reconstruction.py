"""The attack on features, and the quality of what it finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.analysis import image_quality, pictures, reconstruction
from fedjax_het.analysis.image_quality import psnr, ssim

RNG = np.random.default_rng(0)
IMAGES = RNG.uniform(size=(3, 16, 13, 3))
OTHERS = np.clip(IMAGES + 0.2 * RNG.normal(size=IMAGES.shape), 0, 1)


def test_psnr_of_known_errors():
  # 10 log10(1 / 0.1^2) = 20; a tenth of the pixels off by 1 is 10 dB.
  some = np.zeros((2, 10, 10, 1))
  off = some + 0.1
  off[1] = 0
  off[1, 0] = 1
  np.testing.assert_allclose(psnr(some, off), [20, 10])
  assert np.isposinf(psnr(some, some)).all()


def test_ssim_of_constant_images_is_that_of_their_means():
  x, y = np.full((1, 11, 12, 1), 0.3), np.full((1, 11, 12, 1), 0.7)
  want = (2 * 0.3 * 0.7 + 1e-4) / (0.3**2 + 0.7**2 + 1e-4)
  np.testing.assert_allclose(ssim(x, y), want, rtol=1e-6)


def test_ssim_of_a_scaled_pattern_in_one_window():
  """For zero mean SSIM(x, a x) = (2 a v + C_2) / ((1 + a^2) v + C_2)."""
  window = image_quality._window(11)
  pattern = RNG.normal(size=(11, 11))
  pattern -= window @ pattern @ window
  variance = window @ pattern**2 @ window
  x = pattern[None, ..., None]
  c2 = 0.03**2
  for scale in (1.0, 0.5, -1.0):
    want = (2 * scale * variance + c2) / ((1 + scale**2) * variance + c2)
    np.testing.assert_allclose(ssim(x, scale * x), want, rtol=1e-6)


def test_ssim_is_that_of_scikit_image():
  metrics = pytest.importorskip('skimage.metrics')
  # scikit-image leaves out 5 pixels at each border, as full windows do.
  want = [
      metrics.structural_similarity(
          x, y, data_range=1.0, gaussian_weights=True, sigma=1.5,
          use_sample_covariance=False, channel_axis=-1,
      )
      for x, y in zip(IMAGES, OTHERS)
  ]  # fmt: skip
  np.testing.assert_allclose(ssim(IMAGES, OTHERS), want, rtol=1e-6)


@pytest.mark.parametrize('side, window', [(1, 1), (7, 7), (8, 7), (28, 11)])
def test_small_images_have_a_smaller_window(side, window, monkeypatch):
  sides = []
  make = image_quality._window
  monkeypatch.setattr(
      image_quality, '_window', lambda side: sides.append(side) or make(side)
  )
  image = RNG.uniform(size=(1, side, 30, 1))
  np.testing.assert_allclose(ssim(image, image), 1)
  assert sides == [window]


def test_unequal_batches_are_refused():
  for measure in (psnr, ssim):
    with pytest.raises(ValueError, match='two equal batches'):
      measure(IMAGES, IMAGES[:1])
    with pytest.raises(ValueError, match='two equal batches'):
      measure(IMAGES[0], IMAGES[0])


def test_total_variation_of_a_ramp():
  ramp = jnp.broadcast_to(0.25 * jnp.arange(4.0)[:, None, None], (2, 4, 5, 1))
  assert reconstruction.total_variation(ramp) == pytest.approx(0.25)
  aside = ramp.swapaxes(1, 2)
  assert reconstruction.total_variation(aside) == pytest.approx(0.25)


def test_the_steps_shrink_to_nothing():
  """A half cosine; a pixel far from its bounds moves by the rate of a step."""
  attack = reconstruction.make_attack(
      lambda x: 1e6 * x.reshape(len(x), -1), (1, 1, 1), steps=40,
      learning_rate=1e-3, num_snapshots=40,
  )  # fmt: skip
  found = attack(jnp.full((1, 1), 1e9), jax.random.key(0))
  moved = np.diff(np.ravel(found.images))
  rates = 1e-3 * (1 + np.cos(np.pi * np.arange(1, 40) / 40)) / 2
  np.testing.assert_allclose(moved, rates, rtol=0.05, atol=2e-6)


def linear_extractor(num_features):
  weights = jax.random.normal(jax.random.key(1), (25, num_features)) / 5
  return lambda x: x.reshape(len(x), -1) @ weights


def test_an_invertible_linear_extractor_gives_the_images_back():
  """Also black and white pixels, which lie on the bounds."""
  extract = linear_extractor(60)
  images = jax.random.uniform(jax.random.key(2), (4, 5, 5, 1))
  images = images.at[0].set(jnp.round(images[0]))
  attack = reconstruction.make_attack(extract, (5, 5, 1), steps=500)
  found = attack(extract(images), jax.random.key(3))
  assert found.images.shape == (20, 4, 5, 5, 1)
  assert found.step.tolist() == list(range(25, 501, 25))
  assert np.min(psnr(found.images[-1], images)) > 60
  assert found.error[-1] < 1e-7 < found.error[0]
  difference = extract(found.images[3]) - extract(images)
  np.testing.assert_allclose(found.error[3], np.mean(difference**2), rtol=1e-4)
  # Noise limits the attack: least squares fits 25 / 60 of its variance.
  noise = 0.1 * jax.random.normal(jax.random.key(4), (4, 60))
  noisy = attack(extract(images) + noise, jax.random.key(3))
  assert np.max(psnr(noisy.images[-1], images)) < 40
  assert noisy.error[-1] == pytest.approx(0.01 * 35 / 60, rel=0.35)


def test_variation_is_what_features_leave_open():
  """With 10 features for 25 pixels, `tv` prefers smooth images."""
  extract = linear_extractor(10)
  images = jnp.full((1, 5, 5, 1), 0.4)

  def variation(tv):
    attack = reconstruction.make_attack(
        extract, (5, 5, 1), steps=300, tv=tv, num_snapshots=2
    )
    found = attack(extract(images), jax.random.key(3)).images[-1]
    assert found.min() >= 0 and found.max() <= 1
    return reconstruction.total_variation(found)

  assert variation(0.01) < 0.1 * variation(0.0)


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(steps=5), 'steps must be at least 20, got 5'),
        (dict(learning_rate=0.0), 'learning_rate must be above 0'),
        (dict(tv=-1.0), 'tv must be at least 0'),
        (dict(num_snapshots=0), 'num_snapshots must be at least 1'),
    ],
)
def test_options_out_of_their_range_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    reconstruction.make_attack(lambda x: x, (5, 5, 1), **options)


def test_rows_of_images_are_drawn(tmp_path):
  rows = dict(grey=IMAGES[..., :1], coloured=IMAGES)
  path = pictures.draw_images(
      rows, tmp_path / 'a.png', captions=dict(grey=['1', '2', '3'])
  )
  assert path.stat().st_size > 1000
  with pytest.raises(ValueError, match='equally many images'):
    pictures.draw_images(dict(a=IMAGES, b=IMAGES[:1]), path)
  with pytest.raises(ValueError, match='equally many images'):
    pictures.draw_images({}, path)
