"""Helpers for tests of convolutions."""

import jax
import jax.numpy as jnp
import numpy as np


def draw(shape, seed, dtype=np.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def value_and_gradients(fn, x, w):

  @jax.jit
  def run(x, w):
    y, vjp = jax.vjp(fn, x, w)
    return y, *vjp(draw(y.shape, 2, y.dtype))

  return run(x, w)


def assert_same(got, want, tolerance=1e-4):
  for a, b in zip(got, want, strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
