"""Fed-ET's ensemble: what the clients' models agree on, example by example."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Consensus(NamedTuple):
  """Predictions of an ensemble on P examples.

  Attributes:
    labels: [P] int32, the pseudo-labels.
    diverse: [P, C], s_div, weighted mean logits of the models that disagree
      with the label; 0 where none does.
    disputed: [P] bool, whether any model disagrees (D(x) is not empty).
  """

  labels: jax.Array
  diverse: jax.Array
  disputed: jax.Array


def confidence_weights(logits, voters) -> jax.Array:
  """alpha_k(x) = v_k(x) / sum_j v_j(x), v_k the variance of the logits.

  Args:
    logits: [S, P, C]; the variance is over the classes.
    voters: [S, P] bool, the models in the sum.

  Returns:
    [S, P], 0 for the others; equal weights where all variances are 0.
  """
  # v_k = var_c s_k
  v = jnp.where(voters, jnp.var(logits, axis=2), 0.0)
  total = jnp.sum(v, axis=0)[None]
  equal = voters / jnp.maximum(jnp.sum(voters, axis=0), 1)[None]
  # alpha_k = v_k / sum_j v_j
  return jnp.where(total > 0, v / jnp.where(total > 0, total, 1.0), equal)


def find_consensus(logits, took_part) -> Consensus:
  """The weighted consensus, and the models that disagree with it.

  Args:
    logits: [S, P, C], s_k(x).
    took_part: [S] bool, whose logits count.

  Returns:
    The consensus.
  """

  def mean(voters):
    # s(x) = sum_k alpha_k(x) s_k(x).
    alpha = confidence_weights(logits, voters)[..., None]
    return jnp.sum(jnp.where(voters[..., None], alpha * logits, 0.0), axis=0)

  voters = jnp.broadcast_to(took_part[:, None], logits.shape[:2])
  # y^(x) = argmax s(x).
  labels = jnp.argmax(mean(voters), axis=1)
  # D(x) = {k : argmax s_k(x) != y^(x)}.
  others = voters & (jnp.argmax(logits, axis=2) != labels[None])
  return Consensus(labels, mean(others), jnp.any(others, axis=0))
