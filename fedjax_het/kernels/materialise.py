"""Stops XLA for CPUs from recomputing an array for each of its readers."""

import jax
from jax import lax

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


@jax.custom_vjp
def _apart(x):
  first = x[(0,) * x.ndim]
  # Always true, but XLA cannot simplify it.
  always = (first == first) | (first != first)
  return lax.cond(always, lambda x: x, lambda x: -x, x)


# Without this, the backward pass would also contain a conditional.
_apart.defvjp(lambda x: (_apart(x), None), lambda _, dy: (dy,))
