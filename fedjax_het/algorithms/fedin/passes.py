"""FedIN's forward passes: the features, and the loss on pairs of them.

Minibatch and received pairs can go through the intermediate layers in one pass,
as a batch in two parts (see `Block`). Forward and backward pass then read every
parameter once instead of twice.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.fedin.pairs import Pairs
from fedjax_het.engine.task import masked_mean
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.privacy import add_feature_noise, clip_features


class Features(NamedTuple):
  """How a client protects the features it produces.

  Attributes:
    clip: Largest L2 norm of one example's feature, None for no clipping.
    noise: Standard deviation of the Gaussian noise in units of the feature's
      own (v2 takes 0.8), 0 for none.
    sigma: Standard deviation of further noise in absolute units, 0 for none.
  """

  clip: float | None = None
  noise: float = 0.0
  sigma: float = 0.0

  def __call__(self, key, feature, mask):
    """Clips [B, ...] features and adds noise; `mask` is [B] bool or None."""
    if self.clip is not None:
      feature = clip_features(feature, self.clip)
    if self.noise:
      feature = add_feature_noise(key, feature, self.noise, mask)
    if self.sigma:
      draw = jax.random.normal(jax.random.fold_in(key, 1), feature.shape)
      feature = feature + self.sigma * draw
    return feature


PLAIN = Features()


def forward(
    model: BlockModel, variables, x, mask, key, protect=PLAIN, received=None
):
  """A training forward pass that also returns the features (v2 Eq. 4-6).

  Args:
    model: The client's architecture.
    variables: Its variables.
    x: [B, ...] inputs.
    mask: [B] bool or None.
    key: A random key, for dropout and noise.
    protect: Applied to s_in and s_out before the next layers.
    received: `Maybe` of as many `Pairs`, [B, ...]. Their s_in go through the
      intermediate layers in the same pass, with batch statistics of their own,
      and do not update the running ones. None for no pairs.

  Returns:
    Logits [B, C], `Pairs` (s_in, s_out), the updated running statistics, and
    the intermediate layers' output for `received` ([0, ...] if None).
  """
  keys = jax.random.split(key, 5)
  first, last = model.cut
  s_in, stats = model.apply(
      variables, x, stop=first, train=True, mask=mask, key=keys[0]
  )
  s_in = protect(keys[1], s_in, mask)
  rows, row_mask = s_in, mask
  if received is not None:
    own = jnp.ones(len(x), bool) if mask is None else mask
    rows = jnp.concatenate([s_in, received.value.s_in])
    row_mask = jnp.stack([own, received.present])  # Two parts, see `Block`.
  rows, stats = model.apply(
      Variables(variables.params, stats),
      rows,
      start=first,
      stop=last,
      train=True,
      mask=row_mask,
      key=keys[2],
  )
  s_out, out = rows[: len(x)], rows[len(x) :]
  s_out = protect(keys[3], s_out, mask)
  logits, stats = model.apply(
      Variables(variables.params, stats),
      s_out,
      start=last,
      train=True,
      mask=mask,
      key=keys[4],
  )
  return logits, Pairs(s_in, s_out), stats, out


def clipped_logits(model: BlockModel, variables, x, clip: float):
  """A test forward pass of a net whose training clips s_in and s_out.

  Args:
    model: The client's architecture.
    variables: Its variables.
    x: [B, ...] inputs.
    clip: Largest L2 norm of one example's s_in, and of its s_out.

  Returns:
    Logits [B, C].
  """
  first, last = model.cut
  s_in, _ = model.apply(variables, x, stop=first)
  s_in = clip_features(s_in, clip)
  s_out, _ = model.apply(variables, s_in, start=first, stop=last)
  s_out = clip_features(s_out, clip)
  return model.apply(variables, s_out, start=last)[0]


def in_loss(model: BlockModel, variables, pairs: Pairs, mask, key):
  """L_IN: mean squared error of the intermediate layers on given pairs.

  Norms use the batch statistics of the pairs; running statistics are not
  updated.

  Args:
    model: The client's architecture.
    variables: Variables with at least the intermediate layers.
    pairs: `Pairs` [B, ...], constants.
    mask: [B] bool, pairs that count.
    key: A random key, for dropout.

  Returns:
    The mean over pairs and elements, 0 when no pair counts.
  """
  out, _ = model.apply(
      variables,
      pairs.s_in,
      start=model.cut[0],
      stop=model.cut[1],
      train=True,
      mask=mask,
      key=key,
  )
  return feature_error(out, pairs.s_out, mask)


def feature_error(out, s_out, mask):
  """L_IN: mean squared distance of [B, ...] features; `mask` [B] bool."""
  # L_IN = mean (f(s_in; w_in) - s_out)^2.
  error = jnp.square(out - s_out)
  return masked_mean(jnp.mean(error.reshape(len(mask), -1), axis=1), mask)
