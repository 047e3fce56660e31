"""Normalisation layers under one explicit policy.

  'batch': batch norm with running statistics.
  'batch_only': batch norm from the current batch in training and test, no
    running statistics (FeDepth; the static batch norm of HeteroFL).
  'group': group norm with 4 groups, or the largest number below 4 that divides
    the channels.
  'none': the identity; convolutions then get the bias that norm would add.

Whether running statistics are averaged by the server or stay on the client
('local' batch norm, FedHe, FedBN) is decided by the aggregation, not by the
model: both are 'batch' here.

Batch norm does not use `flax.linen.BatchNorm`, which returns NaN if every
example is masked, sums the broadcast mask over all positions to count them, and
by default computes the variance as E[x^2] - E[x]^2, which cancels in float32.
Here two passes over `x` reduce each example first, so that the mask costs
[B, C] work. On a CPU this is as fast, because XLA does not fuse the two sums of
the one-pass form.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
from jax import lax
import jax.numpy as jnp

from fedjax_het.kernels.layer_norm import layer_norm
from fedjax_het.options import at_least, between, not_negative, one_of


def _example_mean(x):
  """Mean over the positions of each example: [B, ..., C] -> [B, C]."""
  return jnp.mean(x, axis=tuple(range(1, x.ndim - 1)))


def _spread(v, x):
  """Shapes [C] or [B, C] for broadcasting against [B, ..., C]."""
  batch = v.shape[0] if v.ndim == 2 else 1
  return v.reshape((batch, *(1,) * (x.ndim - 2), v.shape[-1]))


def batch_moments(
    x: jax.Array, mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Mean and biased variance per channel of the examples that count.

  Args:
    x: [B, ..., C], float32.
    mask: [B] bool, False for examples to ignore; None means that all count.
      [G, B / G] divides the batch into G parts with separate moments.

  Returns:
    Mean and variance, [C] each; zeros if every example is masked. [G, C] each
    for G parts; a part with every example masked has variance 1. Variance 0
    would enlarge its activations in every layer until they overflow, and the
    gradients of the other parts would become NaN.
  """
  if mask is not None and mask.ndim == 2:
    parts = x.reshape((*mask.shape, *x.shape[1:]))
    centre, variance = jax.vmap(batch_moments)(parts, mask)
    return centre, jnp.where(jnp.any(mask, axis=1)[:, None], variance, 1)

  def mean(values):
    values = _example_mean(values)
    if mask is None:
      return jnp.mean(values, axis=0)
    values = jnp.where(mask[:, None], values, 0)
    return jnp.sum(values, axis=0) / jnp.maximum(jnp.sum(mask), 1)

  centre = mean(x)
  return centre, mean(jnp.square(x - _spread(centre, x)))


class BatchNorm(nn.Module):
  """Batch normalisation over all axes but the last.

  The running variance is the biased one. PyTorch stores the unbiased one, a
  factor n / (n - 1) for n = B * H * W values: visible only on 1x1 maps (1.067
  for 16 examples). Flax momentum m is 1 - m in PyTorch.

  Attributes:
    momentum: Fraction of the old running statistics that a training step keeps;
      None means no running statistics: test batches, too, are normalised by
      their own moments.
    epsilon: Added to the variance.

  Raises:
    ValueError: If a number is out of its range.

  References:
    Ioffe and Szegedy, `Batch Normalization
    <https://arxiv.org/abs/1502.03167>`_, 2015.
  """

  momentum: float | None = 0.9
  epsilon: float = 1e-5

  def __post_init__(self):
    if self.momentum is not None:
      between(0, 1, momentum=self.momentum)
    not_negative(epsilon=self.epsilon)
    super().__post_init__()

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """Normalises [B, ..., C]; see `Block` for `train` and `mask`.

    If every example is masked, the running statistics do not change. In a batch
    of parts, only the first part updates them.
    """
    channels = x.shape[-1:]
    scale = self.param('scale', nn.initializers.ones, channels)
    bias = self.param('bias', nn.initializers.zeros, channels)
    if self.momentum is None:
      mean, var = batch_moments(x, mask)
    else:
      running_mean = self.variable('batch_stats', 'mean', jnp.zeros, channels)
      running_var = self.variable('batch_stats', 'var', jnp.ones, channels)
      if train:
        mean, var = batch_moments(x, mask)
        if not self.is_initializing():
          keep = self.momentum
          if mask is not None:
            some = jnp.any(jnp.atleast_2d(mask)[0])
            keep = jnp.where(some, keep, 1.0)
          for running, new in ((running_mean, mean), (running_var, var)):
            new = jnp.atleast_2d(new)[0]
            running.value = keep * running.value + (1 - keep) * new
      else:
        mean, var = running_mean.value, running_var.value
    if mean.ndim == 2:  # [G, C] -> [B, C]
      mean, var = (jnp.repeat(m, len(x) // len(m), axis=0) for m in (mean, var))
      scale, bias = scale[None], bias[None]
    # One multiplication and one addition per number of x.
    scale = scale * lax.rsqrt(var + self.epsilon)
    return x * _spread(scale, x) + _spread(bias - mean * scale, x)


class GroupNorm(nn.Module):
  """Group normalisation; an example's output depends on that example alone.

  Attributes:
    groups: Number of groups, lowered to the largest divisor of the channels.
    epsilon: Added to the variance.

  Raises:
    ValueError: If a number is out of its range.

  References:
    Wu and He, `Group Normalization <https://arxiv.org/abs/1803.08494>`_, 2018.
  """

  groups: int = 4
  epsilon: float = 1e-5

  def __post_init__(self):
    at_least(1, groups=self.groups)
    not_negative(epsilon=self.epsilon)
    super().__post_init__()

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """Normalises [B, ..., C]; `train` and `mask` change nothing."""
    del train, mask
    channels = x.shape[-1]
    scale = self.param('scale', nn.initializers.ones, (channels,))
    bias = self.param('bias', nn.initializers.zeros, (channels,))
    groups = max(g for g in range(1, self.groups + 1) if channels % g == 0)

    def mean(values):  # [B, ..., C] -> [B, C], equal within a group.
      values = _example_mean(values).reshape((-1, groups, channels // groups))
      values = jnp.broadcast_to(values.mean(2, keepdims=True), values.shape)
      return values.reshape((-1, channels))

    centre = mean(x)
    var = mean(jnp.square(x - _spread(centre, x)))
    scale = scale[None] * lax.rsqrt(var + self.epsilon)
    return x * _spread(scale, x) + _spread(bias[None] - centre * scale, x)


class LayerNorm(nn.Module):
  """Layer norm over the last axis, with the same leaves as `nn.LayerNorm`.

  Attributes:
    eps: Added to the variance.

  Raises:
    ValueError: If it is negative or not finite.
  """

  eps: float = 1e-6

  def __post_init__(self):
    not_negative(eps=self.eps)
    super().__post_init__()

  @nn.compact
  def __call__(self, x):
    """[..., D] -> [..., D]."""
    scale = self.param('scale', nn.initializers.ones, x.shape[-1:])
    bias = self.param('bias', nn.initializers.zeros, x.shape[-1:])
    return layer_norm(x, scale, bias, self.eps)


class Identity(nn.Module):
  """No normalisation."""

  def __call__(self, x, train=False, mask=None):
    """Returns `x`."""
    del train, mask
    return x


POLICIES: dict[str, Callable[..., nn.Module]] = {
    'batch': BatchNorm,
    'batch_only': lambda momentum, epsilon, name: BatchNorm(
        momentum=None, epsilon=epsilon, name=name
    ),
    'group': lambda momentum, epsilon, name: GroupNorm(
        epsilon=epsilon, name=name
    ),
    'none': lambda momentum, epsilon, name: Identity(name=name),
}


def check_policy(norm: str) -> None:
  """Raises ValueError for a norm that is not in `POLICIES`."""
  one_of('norm', norm, POLICIES)


def norm_layer(
    norm: str, name: str, *, momentum: float = 0.9, epsilon: float = 1e-5
) -> nn.Module:
  """A norm module, called as `module(x, train, mask)`.

  Args:
    norm: 'batch', 'batch_only', 'group' or 'none'.
    name: Name of the submodule. With every policy, its leaves, if any, are
      `scale` and `bias`, and its running statistics, if any, `mean` and `var`.
    momentum: Momentum of the running statistics, if any.
    epsilon: Added to the variance.

  Returns:
    A linen module.

  Raises:
    ValueError: For an unknown policy.
  """
  check_policy(norm)
  return POLICIES[norm](momentum=momentum, epsilon=epsilon, name=name)
