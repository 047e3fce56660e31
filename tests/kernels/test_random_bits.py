"""The random bits are those of JAX, drawn once."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.kernels import materialise, random_bits
from fedjax_het.models import layers

# Tests use another generator by default.
KEY = jax.random.key(7, impl='threefry2x32')


@pytest.mark.parametrize('shape', [(), (0, 3), (5,), (3, 4, 5), (2, 1 << 16)])
def test_the_bits_are_those_of_jax(shape):
  expected = jax.random.bits(KEY, shape)
  got = random_bits.bits(KEY, shape)
  assert got.dtype == jnp.uint32
  np.testing.assert_array_equal(got, expected)
  np.testing.assert_array_equal(
      jax.jit(random_bits.bits, static_argnums=1)(KEY, shape), expected
  )


@pytest.mark.parametrize('p', [0.0, 1e-9, 0.2, 0.7, 0.123456789, 1.0])
@pytest.mark.parametrize('shape', [(4000,), (2, 40, 1000)])
def test_bernoulli_is_that_of_jax(p, shape):
  """Also where the array is large enough to be written to memory once."""
  compiled = jax.jit(random_bits.bernoulli, static_argnums=(1, 2))
  for draw in (random_bits.bernoulli, compiled):
    np.testing.assert_array_equal(
        draw(KEY, p, shape), jax.random.bernoulli(KEY, p, shape)
    )


def test_under_vmap_each_client_has_its_own_bits(monkeypatch):
  monkeypatch.setattr(materialise, '_LEAST', 1)
  keys = jax.random.split(KEY, 3)
  got = jax.vmap(lambda key: random_bits.bernoulli(key, 0.4, (50, 2)))(keys)
  for i, key in enumerate(keys):
    np.testing.assert_array_equal(
        got[i], jax.random.bernoulli(key, 0.4, (50, 2))
    )


@pytest.mark.parametrize('impl', [None, 'rbg'])
def test_other_generators_are_left_to_jax(impl):
  key = jax.random.key(7, impl=impl)
  np.testing.assert_array_equal(
      random_bits.bits(key, (9,)), jax.random.bits(key, (9,))
  )
  np.testing.assert_array_equal(
      random_bits.bernoulli(key, 0.4, (300, 300)),
      jax.random.bernoulli(key, 0.4, (300, 300)),
  )


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg'])
def test_half_are_true_if_numbers_have_64_bits(impl):
  with jax.enable_x64(True):
    key = jax.random.key(7, impl=impl)
    assert random_bits.bits(key, (9,)).dtype == jnp.uint32
    share = random_bits.bernoulli(key, 0.5, (1000,)).mean()
  assert 0.45 < share < 0.55


def test_bits_of_older_jax_are_left_to_jax():
  """Without `jax_threefry_partitionable` an element depends on the shape."""
  with jax.threefry_partitionable(False):
    np.testing.assert_array_equal(
        random_bits.bits(KEY, (9,)), jax.random.bits(KEY, (9,))
    )


@pytest.mark.parametrize('rate', [0.0, 0.3])
@pytest.mark.parametrize('train', [False, True])
def test_dropout_is_that_of_flax(rate, train):
  """Output and gradient, where the mask is computed apart."""

  class Net(nn.Module):
    kind: type

    @nn.compact
    def __call__(self, x):
      return self.kind(rate, deterministic=not train, name='drop')(x)

  def both(kind):
    net = Net(kind)
    return jax.value_and_grad(
        lambda x: jnp.sum(jnp.sin(net.apply({}, x, rngs={'dropout': KEY})))
    )

  x = jax.random.normal(KEY, (4, 130, 130))
  assert x.size > materialise._LEAST
  (loss, grad), (expected, expected_grad) = (
      jax.jit(both(kind))(x) for kind in (layers.Dropout, nn.Dropout)
  )
  np.testing.assert_allclose(loss, expected, rtol=1e-6)
  np.testing.assert_array_equal(grad == 0, expected_grad == 0)
  np.testing.assert_allclose(grad, expected_grad, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(jax.default_backend() != 'cpu', reason='for CPUs')
@pytest.mark.parametrize('least, times', [(1, 1), (1 << 30, 2)])
def test_a_mask_is_drawn_once(least, times, monkeypatch):
  """XLA would draw it again for each of its readers."""
  monkeypatch.setattr(materialise, '_LEAST', least)

  def readers(key, x):
    mask = random_bits.bernoulli(key, 0.5, x.shape)
    sums = jnp.sum(jnp.where(mask, x, 0), 0)
    return sums, jnp.where(mask, 0, jnp.sin(x)).T.reshape(-1)

  compiled = jax.jit(readers).lower(KEY, jnp.ones((300, 300))).compile()
  assert compiled.as_text().count(' shift-left(') == 20 * times
