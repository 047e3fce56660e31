"""Tasks: the loss of an example and its metrics.

Algorithms know a task only by these functions. Another task, such as
regression, is another `Task`, given as `LocalTraining(task=...)`; methods that
exchange logits or class means need a classification task.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Task(NamedTuple):
  """A task, defined by functions of a batch of outputs and labels.

  Attributes:
    name: Its name.
    losses: `(outputs [B, ...], labels [B, ...]) -> [B]` float32, the loss of
      each example.
    metrics: {name: `(outputs, labels) -> [B]` float32}, reported as means over
      the test set. The first one is used to compare rounds and methods.
    predicted: `outputs -> [B]` integers, the class that a model chooses, from
      which confusion matrices are counted; None for a task without classes.
  """

  name: str
  losses: Callable[..., jax.Array]
  metrics: dict[str, Callable[..., jax.Array]]
  predicted: Callable[..., jax.Array] | None = None

  def loss(self, outputs, labels, mask=None) -> jax.Array:
    """Mean loss of a batch.

    Args:
      outputs: [B, ...].
      labels: [B, ...].
      mask: [B] bool, examples that count; None for all.

    Returns:
      A float32 scalar, 0 when no example counts.
    """
    return masked_mean(self.losses(outputs, labels), mask)


def masked_mean(values, mask=None):
  """Mean of [B] `values` where [B] `mask` is True; 0 if it is all False."""
  if mask is None:
    return jnp.mean(values)
  total = jnp.sum(jnp.where(mask, values, 0.0))
  return total / jnp.maximum(jnp.sum(mask), 1)


def _cross_entropy(logits, labels):
  """Softmax cross-entropy in nats of [B, C] logits and [B] int32 labels."""
  return optax.softmax_cross_entropy_with_integer_labels(
      logits.astype(jnp.float32), labels
  )


def _largest(logits):
  """The class of the largest of the [B, C] logits."""
  return jnp.argmax(logits, axis=-1)


def _hits(logits, labels):
  """1 where the largest of the [B, C] logits is the label's, else 0."""
  return (_largest(logits) == labels).astype(jnp.float32)


CLASSIFICATION = Task(
    'classification', _cross_entropy, {'accuracy': _hits}, _largest
)
