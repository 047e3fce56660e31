"""Matrix products with operands rounded to bfloat16.

Hardware multiplies bfloat16 operands two or more times faster than float32.
Only the operands of products are rounded, in a layer and in its two gradients.
Sums, parameters, optimizer state, norms, losses and uploads stay float32.

`conv` and the dense layers of all models are affected. The products of
attention, which have no parameters, are not. On a CPU, neither are the layers
for which `choose_lowering` picks convolutions of XLA or oneDNN: XLA has no
bfloat16 convolution for CPUs.
"""

import contextlib
import functools

import jax
from jax import lax
import jax.numpy as jnp

MATMUL_DTYPES = ('float32', 'bfloat16')

_operands = jax.make_user_context(default_value=None)


def using_matmul_dtype(matmul_dtype: str) -> contextlib.AbstractContextManager:
  """A context that sets the operand dtype of products traced inside.

  It is local to the thread and part of the cache key of `jax.jit`.

  Args:
    matmul_dtype: 'float32' does not round; 'bfloat16' rounds float32 operands.

  Returns:
    A context manager.
  """
  return _operands(None if matmul_dtype == 'float32' else matmul_dtype)


def operand_dtype(dtype) -> jnp.dtype:
  """The dtype to which operands of `dtype` are rounded.

  Args:
    dtype: Dtype of the operands.

  Returns:
    `dtype` outside of `using_matmul_dtype`, or if it is not float32.
  """
  dtype = jnp.dtype(dtype)
  if _operands.value is None or dtype != jnp.float32:
    return dtype
  return jnp.dtype(_operands.value)


def dot(a, b, a_axes, b_axes, precision=None) -> jax.Array:
  """Contracts axes of two arrays, with sums in float32 or wider.

  Args:
    a: Array of any shape, floating.
    b: Array of the same dtype.
    a_axes: Axes of `a` to contract.
    b_axes: Axes of `b` to contract, of the same lengths.
    precision: As in `lax.dot_general`.

  Returns:
    The remaining axes of `a`, then of `b`; float32, or `a`'s dtype if wider.
  """
  return lax.dot_general(
      a,
      b,
      ((a_axes, b_axes), ((), ())),
      precision=precision,
      preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
  )


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """The product of a dense layer, with operands rounded to `operand_dtype`.

  Args:
    x: [..., D], floating.
    kernel: [D, F], of the same dtype.

  Returns:
    [..., F] of the same dtype.
  """
  operands = operand_dtype(x.dtype)
  # Two axes: with more, XLA for CPUs chooses slower layouts for the gradients.
  rows = x.reshape((-1, x.shape[-1]))
  if operands == x.dtype:
    y = rows @ kernel
  else:
    y = _narrow(rows, kernel, operands)
  return y.reshape((*x.shape[:-1], kernel.shape[1]))


def dot_general(x, kernel, dimension_numbers, precision=None, **kwargs):
  """`matmul` as `nn.Dense(dot_general=...)` calls it.

  Args:
    x: [..., D].
    kernel: [D, F].
    dimension_numbers: (((last axis,), (0,)), ((), ())).
    precision: None.
    **kwargs: Other arguments of `lax.dot_general`, ignored.

  Returns:
    [..., F].

  Raises:
    ValueError: For other dimension numbers.
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
