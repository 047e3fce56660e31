"""Checks feature noise, clipping and the Gaussian calibration."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedjax_het import privacy

KEY = jax.random.key(0)


def features(shape=(64, 8, 8, 16), spread=3.0, mean=5.0):
  return mean + spread * jax.random.normal(jax.random.key(7), shape)


def test_noise_has_the_moments_asked_for():
  x = features()
  noise = np.asarray(privacy.add_feature_noise(KEY, x, 0.8) - x)
  # 65,536 draws: the standard error of the mean is 0.004 of the deviation.
  want = 0.8 * float(jnp.std(x))
  np.testing.assert_allclose(noise.std(), want, rtol=0.015)
  assert abs(noise.mean()) < 0.02 * want
  assert stats.kstest(noise.ravel() / want, 'norm').pvalue > 1e-3


def test_noise_has_one_scale_for_the_whole_tensor():
  x = jnp.concatenate([jnp.zeros((500, 20)), features((500, 20))])
  noise = np.asarray(privacy.add_feature_noise(KEY, x, 0.8) - x)
  np.testing.assert_allclose(noise[:500].std(), noise[500:].std(), rtol=0.05)


def test_noise_is_drawn_per_element_and_key():
  x = features((4, 10))
  noise = privacy.add_feature_noise(KEY, x, 0.8) - x
  assert len(np.unique(noise)) == 40
  other = privacy.add_feature_noise(jax.random.key(1), x, 0.8) - x
  assert not np.allclose(noise, other)


def test_no_noise_without_scale_or_spread():
  x = features((4, 10))
  np.testing.assert_array_equal(privacy.add_feature_noise(KEY, x, 0.0), x)
  x = jnp.full((4, 10), 2.0)
  np.testing.assert_array_equal(privacy.add_feature_noise(KEY, x, 0.8), x)


def test_the_gradient_passes_the_noise_as_if_it_were_constant():
  x, weight = features((4, 10)), features((4, 10), mean=0.0)

  def loss(x):
    return jnp.sum(weight * privacy.add_feature_noise(KEY, x, 0.8))

  np.testing.assert_array_equal(jax.grad(loss)(x), weight)


def test_padding_does_not_change_the_noise():
  x = features((6, 10))
  mask = jnp.arange(6) < 4
  padded = jnp.where(mask[:, None], x, 1e6)
  got = privacy.add_feature_noise(KEY, padded, 0.8, mask)
  noise = np.asarray(got - padded)[:4]
  draw = np.asarray(jax.random.normal(KEY, x.shape))[:4]
  np.testing.assert_allclose(noise, 0.8 * np.std(x[:4]) * draw, rtol=1e-4)
  none = privacy.add_feature_noise(KEY, x, 0.8, jnp.zeros(6, bool))
  np.testing.assert_array_equal(none, x)


def test_noise_keeps_the_dtype():
  x = features((16, 100)).astype(jnp.bfloat16)
  got = privacy.add_feature_noise(KEY, x, 0.8)
  assert got.dtype == jnp.bfloat16
  noise = np.asarray(got, np.float32) - np.asarray(x, np.float32)
  np.testing.assert_allclose(noise.std(), 2.4, rtol=0.1)


def test_noise_under_jit_and_vmap():
  x = features((3, 4, 10))
  keys = jax.random.split(KEY, 3)
  add = jax.jit(privacy.add_feature_noise)
  got = jax.vmap(add, in_axes=(0, 0, None))(keys, x, 0.8)
  for i in range(3):
    want = privacy.add_feature_noise(keys[i], x[i], 0.8)
    np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-5)


def test_a_nan_is_not_swallowed_by_noise_or_clipping():
  x = jnp.array([[jnp.nan, 1.0], [2.0, 3.0]])
  mask = jnp.ones(2, bool)
  assert jnp.isnan(privacy.add_feature_noise(KEY, x, 0.8, mask)).all()
  assert jnp.isnan(privacy.clip_features(x, 1.0)[0, 0])


def test_clipping_bounds_each_example():
  x = jnp.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
  got = privacy.clip_features(x, 1.0)
  want = [[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]
  np.testing.assert_allclose(got, want, rtol=1e-6)
  np.testing.assert_array_equal(got[1], x[1])


def test_clipping_takes_the_norm_over_all_but_the_batch():
  x = features((5, 4, 4, 3))
  got = privacy.clip_features(x, 2.0)
  norms = np.linalg.norm(np.asarray(got).reshape(5, -1), axis=1)
  np.testing.assert_allclose(norms, 2.0, rtol=1e-5)
  np.testing.assert_allclose(privacy.clip_features(got, 2.0), got, rtol=1e-5)


def test_clipping_has_finite_gradients():
  x = jnp.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
  jacobian = jax.jacobian(lambda x: privacy.clip_features(x, 1.0))(x)
  # Clipped: the Jacobian is (I - u u^T) / ||x||. A short one is not changed.
  u = np.array([0.6, 0.8])
  np.testing.assert_allclose(
      jacobian[0, :, 0], (np.eye(2) - np.outer(u, u)) / 5, atol=1e-6
  )
  np.testing.assert_array_equal(jacobian[1, :, 1], np.eye(2))
  np.testing.assert_array_equal(jacobian[2, :, 2], np.eye(2))


def test_clipping_keeps_the_dtype():
  x = features((5, 300)).astype(jnp.bfloat16)
  got = privacy.clip_features(x, 1.0)
  assert got.dtype == jnp.bfloat16
  norms = np.linalg.norm(np.asarray(got, np.float32), axis=1)
  np.testing.assert_allclose(norms, 1.0, rtol=0.01)
  # The sensitivity, on which epsilon depends, holds after rounding.
  norms = np.linalg.norm(np.asarray(got, np.float64), axis=1)
  assert np.all(norms <= 1.0)


def test_sigma_of_the_papers_example():
  got = privacy.gaussian_sigma(0.1, 10.0, 1e-6)
  np.testing.assert_allclose(got, 0.10598, atol=5e-6)
  base_two = 0.2 * np.sqrt(2 * np.log2(1.25e6)) / 10
  np.testing.assert_allclose(base_two, 0.12729, atol=5e-6)
  # Outside its theorem's range the formula does not reach delta = 1e-6.
  np.testing.assert_allclose(
      privacy.gaussian_delta(got, 0.1, 10.0), 1.9e-6, rtol=0.05
  )


def test_sigma_scales_with_the_sensitivity():
  one = privacy.gaussian_sigma(0.1, 0.5, 1e-5, sensitivity_factor=1)
  np.testing.assert_allclose(privacy.gaussian_sigma(0.1, 0.5, 1e-5), 2 * one)
  np.testing.assert_allclose(privacy.gaussian_sigma(0.2, 0.25, 1e-5), 8 * one)


@pytest.mark.parametrize('epsilon', [0.01, 0.5, 1.0, 10.0, 200.0])
@pytest.mark.parametrize('delta', [1e-12, 1e-6, 0.01, 0.7])
def test_analytic_sigma_solves_its_equation(epsilon, delta):
  sigma = privacy.analytic_gaussian_sigma(0.1, epsilon, delta)
  assert privacy.gaussian_delta(sigma, 0.1, epsilon) <= delta
  np.testing.assert_allclose(
      privacy.gaussian_delta(sigma, 0.1, epsilon), delta, rtol=1e-6
  )
  assert privacy.gaussian_delta(sigma * (1 - 1e-6), 0.1, epsilon) > delta


@pytest.mark.parametrize('sigma, epsilon', [(1.0, 0.5), (0.6, 2.0), (3.0, 0.1)])
def test_delta_is_the_largest_privacy_violation(sigma, epsilon):
  # Hockey-stick divergence of N(0, sigma) and N(1, sigma), integrated.
  x = np.linspace(-12 * sigma, 1 + 12 * sigma, 400_001)
  p, q = stats.norm.pdf(x, 1, sigma), stats.norm.pdf(x, 0, sigma)
  want = np.trapezoid(np.maximum(p - np.exp(epsilon) * q, 0), x)
  got = privacy.gaussian_delta(sigma, 1.0, epsilon, sensitivity_factor=1)
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_classical_bound_holds_below_epsilon_one():
  for epsilon in (0.05, 0.5, 0.99):
    classical = privacy.gaussian_sigma(1.0, epsilon, 1e-5)
    assert privacy.analytic_gaussian_sigma(1.0, epsilon, 1e-5) < classical


@pytest.mark.parametrize(
    'arguments, message',
    [
        ((0.0, 1.0, 1e-6), 'clip must be above 0, got 0.0'),
        ((0.1, -1.0, 1e-6), 'epsilon must be above 0, got -1.0'),
        ((0.1, 1.0, 0.0), 'delta must be above 0 and below 1, got 0.0'),
        ((0.1, 1.0, 1.0), 'delta must be'),
        ((0.1, float('nan'), 1e-6), 'epsilon must be a finite number, got nan'),
        ((0.1, 1.0, 1e-6, 0.0), 'sensitivity_factor must be'),
    ],
)
def test_impossible_guarantees_are_refused(arguments, message):
  for calibrate in (privacy.gaussian_sigma, privacy.analytic_gaussian_sigma):
    with pytest.raises(ValueError, match=message):
      calibrate(*arguments)


def test_impossible_features_are_refused():
  x = jnp.ones((2, 3))
  for value in (-1.0, math.inf, math.nan, True):
    with pytest.raises(ValueError, match=rf'scale must be .* got {value}'):
      privacy.add_feature_noise(KEY, x, value)
  for value in (0.0, math.inf, math.nan, True):
    with pytest.raises(ValueError, match=rf'max_norm must be .* got {value}'):
      privacy.clip_features(x, value)
  for refuse in (
      lambda x: privacy.add_feature_noise(KEY, x, 1.0),
      lambda x: privacy.clip_features(x, 1.0),
  ):
    with pytest.raises(ValueError, match='floating, but have dtype int32'):
      refuse(jnp.ones((2, 3), jnp.int32))
