"""Noise on features and clipping, before a client uploads them."""

import numbers

import jax
import jax.numpy as jnp

from fedjax_het.options import not_negative, positive


def add_feature_noise(key, x, scale, mask=None):
  """Adds noise in units of x's spread: x + z, z ~ N(0, (scale std(x))^2).

  This is FedIN's "+Noise", with scale 0.8 on s_in and s_out. Noise is
  independent for each element. std(x) is one scalar for the whole tensor, and
  its gradient is stopped, so the gradient with respect to x is the identity.

  The noise makes reconstruction harder. It does not give differential privacy
  at any scale: features are not bounded (see `clip_features`), and the scale of
  the noise depends on the private data.

  Args:
    key: Random key.
    x: [B, ...], floating.
    scale: Scalar >= 0, standard deviation of the noise in units of std(x);
      may be traced.
    mask: [B] bool, False for padding examples, which std(x) ignores; None for
      no padding.

  Returns:
    [B, ...] of the dtype of `x`; std(x) is computed in float32.

  Raises:
    ValueError: If `x` is not floating, or `scale` is a number that is
      negative or not finite.

  References:
    Chan et al., `FedIN <https://arxiv.org/abs/2304.00759>`_, journal version
    (noise of N(0, (0.8 sigma)^2)).
  """
  _check_floating(x)
  if isinstance(scale, numbers.Real):
    not_negative(scale=scale)
  wide = jax.lax.stop_gradient(x).astype(_wide_dtype(x))
  if mask is None:
    spread = jnp.std(wide)
  else:
    spread = jnp.std(wide, where=_per_example(mask, x))
    # Avoids NaN for a batch of padding only.
    spread = jnp.where(jnp.any(mask), spread, 0.0)
  noise = jax.random.normal(key, x.shape, wide.dtype)
  return x + (scale * spread * noise).astype(x.dtype)


def clip_features(x, max_norm):
  """Scales each example down to an L2 norm of at most `max_norm`.

  Args:
    x: [B, ...], floating; the norm is over all elements of an example.
    max_norm: Scalar > 0 (the clipping constant C); may be traced.

  Returns:
    [B, ...] of the dtype of `x`: x_i min(1, max_norm / ||x_i||), computed in
    float32 and rounded to that dtype; of a narrower one to a norm of
    (1 - its epsilon) max_norm, so that rounding does not exceed `max_norm`.
    Differentiable, also at x_i = 0, where the derivative is the identity.

  Raises:
    ValueError: If `x` is not floating or has no batch axis, or `max_norm` is
      a number that is not > 0 or not finite.
  """
  _check_floating(x)
  if not jnp.ndim(x):
    raise ValueError('clip_features takes [B, ...], but x is a scalar.')
  if isinstance(max_norm, numbers.Real):
    positive(max_norm=max_norm)
  wide = x.astype(_wide_dtype(x))
  squared = jnp.sum(jnp.square(wide), axis=range(1, x.ndim), keepdims=True)
  # x_i <- x_i min(1, C / ||x_i||).
  too_long = squared > max_norm**2
  if wide.dtype != x.dtype:
    max_norm = (1 - float(jnp.finfo(x.dtype).eps)) * max_norm
  # The inner `where` keeps the square root's gradient finite at zero.
  norm = jnp.sqrt(jnp.where(too_long, squared, 1.0))
  return (wide * jnp.where(too_long, max_norm / norm, 1.0)).astype(x.dtype)


def _check_floating(x):
  if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
    raise ValueError(
        f'Features must be floating, but have dtype {jnp.result_type(x)}.'
    )


def _wide_dtype(x):
  return jnp.promote_types(x.dtype, jnp.float32)


def _per_example(mask, x):
  return jnp.broadcast_to(
      mask.reshape(mask.shape + (1,) * (x.ndim - 1)), x.shape
  )
