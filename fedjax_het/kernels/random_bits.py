"""Random bits as `jax.random.bits` draws them, faster on CPUs.

For CPUs, JAX compiles Threefry to a loop over four of its twenty rounds, which
writes all counters to memory after each pass. For an array of several axes XLA
takes seconds to compile it. Here the rounds are one elementwise expression on a
flat array.

References:
  Salmon et al., `Parallel Random Numbers: As Easy as 1, 2, 3
  <https://doi.org/10.1145/2063384.2063405>`_, SC 2011 (Threefry-2x32-20).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.kernels.materialise import apart

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA


def bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """`jax.random.bits(key, shape, jnp.uint32)`.

  Args:
    key: A random key.
    shape: Of the result.

  Returns:
    uint32 of that shape: the same bits. For keys that are not of 'threefry2x32'
    and on accelerators it is JAX's own function.
  """
  size = math.prod(shape)
  if not _is_threefry(key) or jax.default_backend() != 'cpu' or size >> 32:
    return jax.random.bits(key, shape, jnp.uint32)
  low = jnp.arange(size, dtype=jnp.uint32)
  left, right = _threefry(jax.random.key_data(key), jnp.zeros_like(low), low)
  return (left ^ right).reshape(shape)


def bernoulli(key: jax.Array, p: float, shape: tuple[int, ...]) -> jax.Array:
  """`jax.random.bernoulli(key, p, shape)`, the same booleans.

  Args:
    key: A random key.
    p: Probability of True, a number.
    shape: Of the result.

  Returns:
    Boolean of that shape.
  """
  # JAX compares a float32 of 23 random bits with p in float32.
  least = math.ceil(float(np.float32(p)) * (1 << 23))

  def draw(data):
    key = jax.random.wrap_key_data(data, impl=impl)
    return (bits(key, shape) >> 9) < jnp.uint32(least)

  impl = jax.random.key_impl(key)
  return apart(draw, jax.random.key_data(key))


def _is_threefry(key) -> bool:
  """Whether JAX counts the elements of an array for this key."""
  typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
  name = str(jax.random.key_impl(key)) if typed else ''
  return name == 'threefry2x32' and bool(jax.config.jax_threefry_partitionable)


def _threefry(key, left, right):
  """Twenty rounds on counters of two words; all arrays are uint32."""
  words = *key, key[0] ^ key[1] ^ jnp.uint32(_PARITY)
  left, right = left + words[0], right + words[1]
  for i in range(1, 6):
    for shift in _ROTATIONS[(i - 1) % 2]:
      left = left + right
      right = left ^ ((right << shift) | (right >> (32 - shift)))
    left = left + words[i % 3]
    right = right + words[(i + 1) % 3] + jnp.uint32(i)
  return left, right
