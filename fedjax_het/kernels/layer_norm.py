"""Layer norm whose backward pass computes each sum once."""

import functools

import jax
from jax import lax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float
) -> jax.Array:
  """Normalises the last axis: scale (x - mean) / sqrt(var + eps) + bias.

  The backward pass uses the stored normalised input and computes its sums in
  two passes. Forward-mode differentiation is not supported.

  Args:
    x: [..., D], floating.
    scale: [D].
    bias: [D].
    eps: Added to the variance.

  Returns:
    [..., D] of x's dtype; mean and variance are in float32 or wider.

  References:
    Ba et al., `Layer Normalization <https://arxiv.org/abs/1607.06450>`_, 2016.
  """
  return _forward(x, scale, bias, eps)[0]


def _forward(x, scale, bias, eps):
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  centred = wide - jnp.mean(wide, -1, keepdims=True)
  inverse = lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + eps)
  normal = centred * inverse
  y = normal * _like(scale, normal) + _like(bias, normal)
  return y.astype(x.dtype), (normal, inverse, scale)


def _backward(eps, residuals, dy):
  del eps
  normal, inverse, scale = residuals
  dtype, dy = dy.dtype, dy.astype(normal.dtype)
  # d_x = (g - mean(g) - normal mean(g normal)) / sqrt(var + eps), g = scale dy
  g = _like(scale, dy) * dy
  mean = jnp.mean(g, -1, keepdims=True)
  along = jnp.mean(g * normal, -1, keepdims=True)
  d_x = inverse * (g - mean - normal * along)
  d_scale, d_bias = _sum_rows(dy * normal), _sum_rows(dy)
  return (
      d_x.astype(dtype), d_scale.astype(scale.dtype), d_bias.astype(scale.dtype)
  )  # fmt: skip


def _like(v, x):
  """[D] with the rank of `x`."""
  return v.reshape((1,) * (x.ndim - 1) + v.shape)


def _sum_rows(x):
  """[..., D] -> [D], as a product: XLA does not fuse the summands into it."""
  rows = x.reshape((-1, x.shape[-1]))
  # Accelerators would round the summands.
  return jnp.matmul(jnp.ones(len(rows), x.dtype), rows, precision='highest')


layer_norm.defvjp(_forward, _backward)
