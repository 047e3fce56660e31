"""The cross-correlation of logits, and FCCL's loss on public examples."""

import jax
import jax.numpy as jnp

# A column with a smaller variance counts as constant.
_SMALLEST = 1e-8


def standardise(z, mask=None) -> jax.Array:
  """Gives each column mean 0 and unbiased variance 1 over a minibatch.

  Args:
    z: [B, C].
    mask: [B] bool, rows that count; None for all.

  Returns:
    [B, C] float32; 0 in the other rows, and about 0 in constant columns.
  """
  rows = (jnp.ones(len(z), bool) if mask is None else mask)[:, None]
  num = jnp.sum(rows)
  z = jnp.where(rows, z.astype(jnp.float32), 0.0)
  mean = jnp.sum(z, axis=0, keepdims=True) / jnp.maximum(num, 1)
  z = jnp.where(rows, z - mean, 0.0)
  variance = jnp.sum(z * z, axis=0, keepdims=True) / jnp.maximum(num - 1, 1)
  # Neither the square root nor its derivative may meet 0.
  return z / jnp.sqrt(jnp.where(variance > _SMALLEST, variance, 1.0))


def cross_correlation(z, target, mask=None) -> jax.Array:
  """M of a minibatch, whose entry u, v is of `z`'s class u, `target`'s v.

  Args:
    z: [B, C] logits.
    target: [B, C] logits.
    mask: [B] bool, rows that count; None for all.

  Returns:
    [C, C] float32.
  """
  num = len(z) if mask is None else jnp.maximum(jnp.sum(mask), 1)
  # M = A^T B / N.
  a, b = standardise(z, mask), standardise(target, mask)
  return jnp.matmul(a.T, b, precision='highest') / num


def collaborative_loss(
    z, target, off_diagonal_weight: float, mask=None
) -> jax.Array:
  """The loss on a minibatch of public examples.

  Args:
    z: [B, C], Z_k.
    target: [B, C], T; no gradient flows into it.
    off_diagonal_weight: lambda, the factor on entries off the diagonal.
    mask: [B] bool, rows that count; None for all.

  Returns:
    A float32 scalar.
  """
  m = cross_correlation(z, jax.lax.stop_gradient(target), mask)
  # sum_u (M_uu - 1)^2 + lambda sum_{u != v} (M_uv + 1)^2.
  diagonal = jnp.eye(len(m), dtype=bool)
  return jnp.sum(
      jnp.where(diagonal, (m - 1) ** 2, off_diagonal_weight * (m + 1) ** 2)
  )
