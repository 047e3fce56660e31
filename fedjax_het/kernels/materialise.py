"""Stops XLA for CPUs from recomputing an array for each of its readers."""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp

# Smaller arrays are not worth the longer compilation.
_LEAST = 1 << 16


def materialise(x: jax.Array) -> jax.Array:
  """`x`, written to memory once.

  XLA for CPUs fuses elementwise and pooling operations into each operation
  that reads their result, even if it reads the result many times. The slices
  of all taps of a 5x5 kernel compute the ReLU and the pooling before it 25
  times. XLA ignores `optimization_barrier` here, but it does not fuse into a
  conditional. It removes a conditional whose branches are equal, so these
  differ.

  Args:
    x: A floating array. Under `vmap` the conditional becomes a `select`, which
      neither helps nor harms.

  Returns:
    The array. For small arrays and on accelerators the program does not
    change.
  """
  if jax.default_backend() != 'cpu' or x.size < _LEAST:
    return x
  return _apart(x)


def apart(function: Callable, *arrays: jax.Array) -> jax.Array:
  """`function(*arrays)`, written to memory once, as are its operands.

  For a function that many operations read and that is expensive to compute
  again, or one that reads an operand in another order than that of memory, as a
  transpose does: XLA for CPUs would compute the operand in that order, one
  element at a time.

  Args:
    function: `(*arrays) -> array`.
    *arrays: Arrays, the first not empty.

  Returns:
    What `function` returns. If all arrays are small, and on accelerators, the
    program does not change.
  """
  out = jax.eval_shape(function, *arrays)
  largest = max(array.size for array in (out, *arrays))
  if jax.default_backend() != 'cpu' or largest < _LEAST:
    return function(*arrays)
  nothing = jnp.zeros(out.shape, out.dtype)
  return lax.cond(_always(arrays[0]), function, lambda *_: nothing, *arrays)


def _always(x):
  """True, but XLA cannot simplify it."""
  first = x[(0,) * x.ndim].astype(jnp.float32)
  return (first == first) | (first != first)


@jax.custom_vjp
def _apart(x):
  return lax.cond(_always(x), lambda x: x, lambda x: -x, x)


# Without this, the backward pass would also contain a conditional.
_apart.defvjp(lambda x: (_apart(x), None), lambda _, dy: (dy,))
