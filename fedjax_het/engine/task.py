"""Tasks: the loss of an example and its metrics.

Algorithms know a task only by these functions. Another task, such as
regression, is another `Task`, given as `LocalTraining(task=...)`; methods that
exchange logits or class means need a classification task.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class Metric(NamedTuple):
  """A metric's name, direction and unit.

  Attributes:
    name: Its name.
    larger_is_better: Whether larger numbers are better.
    percent: Whether it is a share, shown in percent.
  """

  name: str
  larger_is_better: bool = True
  percent: bool = False

  def merit(self, value: float) -> float:
    """The value, with its sign changed if smaller values are better."""
    return value if self.larger_is_better else -value

  def reaches(self, value: float, target: float) -> bool:
    """Whether a value, stored as float32, is at least as good as a target."""
    slack = 1e-6 * max(1.0, abs(target))
    return self.merit(value) >= self.merit(target) - slack

  def worst(self, values):
    """The worst of several values; NaN if one is NaN."""
    return np.min(values) if self.larger_is_better else np.max(values)

  @property
  def tail(self) -> int:
    """The percentile that describes the worst values, 10 or 90."""
    return 10 if self.larger_is_better else 90


ACCURACY = Metric('accuracy', percent=True)


class Task(NamedTuple):
  """A task, defined by functions of a batch of outputs and labels.

  Attributes:
    name: Its name.
    losses: `(outputs [B, ...], labels [B, ...]) -> [B]` float32, the loss of
      each example.
    metrics: {name: `(outputs, labels) -> [B]` float32}, reported as means over
      the test set. The first one is used to compare rounds and methods.
    predicted: `outputs -> [B]` integers, the predicted classes, for confusion
      matrices; None for a task without classes.
    larger_is_better: Whether larger values of the first metric are better.
    percent: Whether the first metric is a share, shown in percent.
    before_loss: `(outputs, labels, mask) -> outputs`, changes the outputs of a
      minibatch of training, such as a label mask; None for no change.
  """

  name: str
  losses: Callable[..., jax.Array]
  metrics: dict[str, Callable[..., jax.Array]]
  predicted: Callable[..., jax.Array] | None = None
  larger_is_better: bool = True
  percent: bool = False
  before_loss: Callable[..., jax.Array] | None = None

  @property
  def main(self) -> Metric:
    """The metric by which rounds and methods are compared."""
    return Metric(
        next(iter(self.metrics)), self.larger_is_better, self.percent
    )

  def loss(self, outputs, labels, mask=None) -> jax.Array:
    """Mean loss of a batch.

    Args:
      outputs: [B, ...].
      labels: [B, ...].
      mask: [B] bool, examples that count; None for all.

    Returns:
      A float32 scalar, 0 when no example counts.
    """
    return masked_mean(self.example_losses(outputs, labels, mask), mask)

  def example_losses(self, outputs, labels, mask=None) -> jax.Array:
    """The loss of each example of a minibatch of training.

    Args:
      outputs: [B, ...].
      labels: [B, ...].
      mask: [B] bool, examples that count; None for all.

    Returns:
      [B] float32; those of examples that do not count have no meaning.
    """
    if self.before_loss is not None:
      outputs = self.before_loss(outputs, labels, mask)
    return self.losses(outputs, labels)


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
    'classification',
    _cross_entropy,
    {ACCURACY.name: _hits},
    _largest,
    ACCURACY.larger_is_better,
    ACCURACY.percent,
)
