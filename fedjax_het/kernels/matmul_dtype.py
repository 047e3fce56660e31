"""Matrix products whose operands may be narrower than what they are part of.

With bfloat16 operands the hardware multiplies two to many times as fast as
with float32 ones. Weights, optimiser, norms, losses and all that travels stay
float32, and so do the sums of products: a product (of a layer, and of its two
gradients) reads its operands rounded to eight bits, and nothing else changes.
`conv` and the dense layers of all models take part; the products of attention,
which have no weights, do not, nor do, on a CPU, those layers of large maps that
`choose_lowering` leaves to XLA's convolutions, which know no bfloat16 there, or
to oneDNN's.
"""

import contextlib
import functools

import jax
from jax import lax
import jax.numpy as jnp

MATMUL_DTYPES = ('float32', 'bfloat16')

_operands = jax.make_user_context(default_value=None)


def using_matmul_dtype(matmul_dtype: str) -> contextlib.AbstractContextManager:
  """A context in which the products of models are traced.

  It belongs to the thread that enters it and is part of the key of `jax.jit`'s
  cache.

  Args:
    matmul_dtype: 'float32' leaves operands as they are, 'bfloat16' rounds those
      of 32 bits.

  Returns:
    A context manager.
  """
  return _operands(None if matmul_dtype == 'float32' else matmul_dtype)


def operand_dtype(dtype) -> jnp.dtype:
  """The dtype that operands of `dtype` are rounded to.

  Args:
    dtype: Of the operands as they come.

  Returns:
    `dtype` itself outside of `using_matmul_dtype`, and where it is not float32.
  """
  dtype = jnp.dtype(dtype)
  if _operands.value is None or dtype != jnp.float32:
    return dtype
  return jnp.dtype(_operands.value)


def dot(a, b, a_axes, b_axes, precision=None) -> jax.Array:
  """Contracts axes of two arrays, and sums in float32 or wider.

  Args:
    a: Of any shape, floating.
    b: Of the same dtype.
    a_axes: Of `a`, to be summed over.
    b_axes: Of `b`, of the same lengths.
    precision: As in `lax.dot_general`.

  Returns:
    The other axes of `a`, then those of `b`; float32, or `a`'s dtype if wider.
  """
  return lax.dot_general(
      a,
      b,
      ((a_axes, b_axes), ((), ())),
      precision=precision,
      preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
  )


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """A dense layer's product; its operands may be rounded.

  Args:
    x: [..., D], floating.
    kernel: [D, F], of the same dtype.

  Returns:
    [..., F] of the same dtype.
  """
  operands = operand_dtype(x.dtype)
  return x @ kernel if operands == x.dtype else _narrow(x, kernel, operands)


def dot_general(x, kernel, dimension_numbers, precision=None, **kwargs):
  """`matmul` as `nn.Dense(dot_general=...)` calls it.

  Args:
    x: [..., D].
    kernel: [D, F].
    dimension_numbers: (((last axis,), (0,)), ((), ())).
    precision: None.
    **kwargs: Of `lax.dot_general`, of no meaning here.

  Returns:
    [..., F].

  Raises:
    ValueError: If other axes are to be summed over.
  """
  del precision, kwargs
  if dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
    raise ValueError(f'Not the axes of a dense layer: {dimension_numbers}.')
  return matmul(x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _narrow(x, kernel, operands):
  return _narrow_fwd(x, kernel, operands)[0]


def _narrow_fwd(x, kernel, operands):
  dtype = x.dtype
  x, kernel = x.astype(operands), kernel.astype(operands)
  return dot(x, kernel, (x.ndim - 1,), (0,)).astype(dtype), (x, kernel)


def _narrow_bwd(operands, residuals, dy):
  x, kernel = residuals
  dtype, dy = dy.dtype, dy.astype(operands)
  examples = tuple(range(x.ndim - 1))
  d_x = dot(dy, kernel, (dy.ndim - 1,), (1,))
  d_kernel = dot(x, dy, examples, examples)
  return d_x.astype(dtype), d_kernel.astype(dtype)


_narrow.defvjp(_narrow_fwd, _narrow_bwd)
