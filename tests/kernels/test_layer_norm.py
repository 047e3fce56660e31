"""Compares layer norm with its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.kernels.layer_norm import layer_norm
from tests.kernels.convolutions import assert_same, draw

EPS = 1e-3


def _definition(x, scale, bias):
  mean = jnp.mean(x, -1, keepdims=True)
  var = jnp.mean((x - mean) ** 2, -1, keepdims=True)
  scale, bias = (jnp.broadcast_to(v, x.shape) for v in (scale, bias))
  return (x - mean) / jnp.sqrt(var + EPS) * scale + bias


def test_two_features_by_hand():
  """x = (1, 3): mean 2, variance 1."""
  y = layer_norm(jnp.array([1.0, 3.0]), jnp.array([2.0, 3.0]), jnp.ones(2), 0.0)
  np.testing.assert_allclose(y, [-1.0, 4.0], rtol=1e-6)


@pytest.mark.parametrize('shape', [(5,), (3, 5), (2, 3, 5)])
def test_value_and_gradients(shape):
  args = draw(shape, 0) * 3 + 2, draw((5,), 1), draw((5,), 2)
  y, vjp = jax.vjp(lambda *args: layer_norm(*args, EPS), *args)
  want, want_vjp = jax.vjp(_definition, *args)
  dy = draw(shape, 3)
  assert_same((y, *vjp(dy)), (want, *want_vjp(dy)), 2e-5)


def test_second_derivatives():
  x, one, zero = draw((2, 4), 0), jnp.ones(4), jnp.zeros(4)

  def penalty(norm):
    def squared(x):
      grad = jax.grad(lambda x: jnp.sum(jnp.sin(norm(x))))(x)
      return jnp.sum(grad**2)

    return jax.grad(squared)(x)

  got = penalty(lambda x: layer_norm(x, one, zero, EPS))
  assert_same([got], [penalty(lambda x: _definition(x, one, zero))], 2e-4)


def test_bfloat16_is_normalised_in_float32():
  x = (draw((4, 64), 0) + 100).astype(jnp.bfloat16)
  one, zero = jnp.ones(64, jnp.bfloat16), jnp.zeros(64, jnp.bfloat16)
  y, vjp = jax.vjp(lambda *args: layer_norm(*args, EPS), x, one, zero)
  assert [a.dtype for a in (y, *vjp(y))] == [jnp.bfloat16] * 4
  want = _definition(x.astype(jnp.float32), 1.0, 0.0)
  np.testing.assert_allclose(y.astype(jnp.float32), want, atol=2e-2)
