"""Prediction by the nearest prototype, or by the output layer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.embeddings import embed
from fedjax_het.engine.types import Group, Maybe
from fedjax_het.models.blocks import Variables


class Evaluated(NamedTuple):
  """What a client predicts with.

  Attributes:
    params: Parameters of its model.
    stats: Its running statistics.
    prototypes: C, see `global_prototypes`.
  """

  params: Any
  stats: Any
  prototypes: Maybe


def nearest(z, prototypes: Maybe) -> jax.Array:
  """Logits whose largest is that of the nearest prototype (Eq. 4).

  Args:
    z: [B, d], embeddings.
    prototypes: `Maybe` of C [C, d]; its mask is [C].

  Returns:
    [B, C] float32, -|f(x) - C[j]|^2. A class without a prototype has a finite
    logit below those of all others.
  """
  # -|f(x) - C[j]|^2; the expanded square would lose digits.
  logits = -jnp.sum(jnp.square(z[:, None] - prototypes.value[None]), axis=2)
  known = prototypes.present
  lowest = jnp.min(jnp.where(known, logits, 0.0), axis=1, keepdims=True)
  return jnp.where(known, logits, 2.0 * lowest - 1.0)


def predict_nearest(group: Group, model: Evaluated, x) -> jax.Array:
  """[B, C]: `nearest`, or the head's logits if there is no prototype at all."""
  z, logits, _ = embed(group.model, Variables(model.params, model.stats), x)
  any_known = jnp.any(model.prototypes.present)
  return jnp.where(any_known, nearest(z, model.prototypes), logits)


def predict_head(group: Group, model: Evaluated, x) -> jax.Array:
  """[B, C]: logits of the client's output layer."""
  return group.model.apply(Variables(model.params, model.stats), x)[0]
