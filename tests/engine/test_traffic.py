"""Bytes of messages, and what cannot be counted."""

import jax
import jax.numpy as jnp
import pytest

from fedjax_het.engine import traffic
from fedjax_het.engine.types import Maybe


def test_the_bytes_of_absent_parts_do_not_count():
  message = dict(
      always=jnp.zeros((3, 2)),
      maybe=Maybe(jnp.zeros((4, 5)), jnp.array([True, False, True, True])),
  )
  measured = jax.jit(traffic.measure)(message)
  assert int(traffic.num_bytes(measured)) == 4 * 6 + 0.75 * 4 * 20


def test_a_message_of_4_gib_is_refused():
  message = dict(a=jax.ShapeDtypeStruct((2**15, 2**15), jnp.float32))
  with pytest.raises(ValueError, match='A message of 4294967296 bytes'):
    jax.eval_shape(traffic.measure, message)


def test_an_optional_part_without_entries_counts_nothing():
  message = (jnp.zeros(4), Maybe(jnp.zeros((0, 3)), jnp.zeros(0, bool)))
  assert traffic.num_bytes(traffic.measure(message)) == 16


def test_random_keys_have_the_bytes_of_their_numbers():
  key = jax.eval_shape(lambda: jax.random.key(0, impl='threefry2x32'))
  assert traffic.full_bytes([key, jnp.zeros(3, jnp.bfloat16)]) == 8 + 6
