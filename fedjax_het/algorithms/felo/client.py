"""Felo's clients: their loss, and what they record while they train."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.class_means import (
  ClassVectors,
  class_means,
  class_sums,
)
from fedjax_het.aggregation.embeddings import embed
from fedjax_het.algorithms.felo.rings import (
  Rings,
  empty_rings,
  oldest_first,
  push,
)
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.types import Maybe, Uplink
from fedjax_het.models.blocks import BlockModel


class Targets(NamedTuple):
  """What a client trains towards, by class.

  Attributes:
    features: f_bar [C, d] float32.
    logits: z_bar [C, C] float32.
  """

  features: jax.Array
  logits: jax.Array


def logit_gap(z, z_bar, kind: str) -> jax.Array:
  """The second term of the distillation loss, for each example.

  Args:
    z: [B, C], the client's logits.
    z_bar: [B, C], their targets.
    kind: 'mse' for the mean of the squared errors over the C logits, 'kl' for
      KL(softmax(z_bar) || softmax(z)) / C in nats.

  Returns:
    [B] float32.
  """
  if kind == 'kl':
    return distillation(z, z_bar) / z.shape[1]
  return jnp.mean(jnp.square(z - z_bar), axis=1)


def client_loss(
    model: BlockModel, task: Task, sent: Maybe, weight: float, logit_loss: str
) -> Callable[..., Any]:
  """The loss of a local step, as `fit_and_record` takes it.

  Args:
    model: The client's model.
    task: The task.
    sent: `Maybe` of `Targets`; its mask is [C].
    weight: alpha; 0 leaves both distances out of the gradient.
    logit_loss: See `logit_gap`; 'none' for no distance of the logits.

  Returns:
    The loss function, which outputs features f [B, d] and logits z [B, C].
  """

  def loss_fn(variables, batch, key):
    f, z, stats = embed(
        model, variables, batch.x, train=True, mask=batch.mask, key=key
    )
    loss = task.loss(z, batch.y, batch.mask)
    f_bar, z_bar = (target[batch.y] for target in sent.value)
    known = sent.present[batch.y]

    def mean(gaps):
      """Over the batch; examples of classes without a target add 0."""
      return masked_mean(jnp.where(known, gaps, 0.0), batch.mask)

    # MSE(f, f_bar[y]) + MSE(z, z_bar[y]), means over batch and dimensions.
    gaps = dict(feature_loss=mean(jnp.mean(jnp.square(f - f_bar), axis=1)))
    if logit_loss != 'none':
      gaps['logit_loss'] = mean(logit_gap(z, z_bar, logit_loss))
    metrics = dict(cross_entropy=loss, **gaps)
    if weight:
      # L = CE + alpha (MSE(f, f_bar[y]) + MSE(z, z_bar[y])).
      loss += weight * sum(gaps.values())
    return loss, (stats, metrics, (f, z))

  return loss_fn


class Record(NamedTuple):
  """What a client records in one visit.

  Attributes:
    features: Sums by class as `ClassVectors` of [C, d] and [C]; for Velo one
      ring of the last features and their labels.
    logits: Sums by class, [C, C] and [C].
  """

  features: ClassVectors | Rings
  logits: ClassVectors


def empty_record(
    num_classes: int, width: int, num_features: int | None
) -> Record:
  """The record before the first step.

  Args:
    num_classes: C.
    width: d.
    num_features: The features that Velo sends at most; None for Felo.

  Returns:
    The record.
  """

  def nothing(size):
    return ClassVectors(
        jnp.zeros((num_classes, size)), jnp.zeros(num_classes)
    )

  features = nothing(width)
  if num_features is not None:
    row = jnp.zeros(width), jnp.int32(0)
    features = empty_rings(1, num_features, row)
  return Record(features, nothing(num_classes))


def add_batch(record: Record, outputs, batch) -> Record:
  """Adds f [B, d] and z [B, C] of a training pass, before its step."""
  f, z = outputs
  num_classes = z.shape[1]
  if isinstance(record.features, ClassVectors):
    sums = class_sums(f, batch.y, num_classes, batch.mask)
    features = jax.tree.map(jnp.add, record.features, sums)
  else:
    ring = jnp.zeros_like(batch.y)
    features = push(record.features, (f, batch.y), ring, batch.mask)
  sums = class_sums(z, batch.y, num_classes, batch.mask)
  return Record(features, jax.tree.map(jnp.add, record.logits, sums))


def make_upload(record: Record) -> Uplink:
  """A client's upload.

  Args:
    record: What it has recorded.

  Returns:
    To be summed, `Maybe` of its mean logits of each class [C, C]. Kept per
    client, `Maybe` of means and counts by class (`ClassVectors`), or for Velo
    of features [M, d] and labels [M].
  """
  features, logits = record
  # sum z / n for every class that the client has seen.
  seen = (logits.counts > 0).astype(jnp.float32)
  summed = Maybe(class_means(logits), seen)
  if isinstance(features, ClassVectors):
    f_k = features._replace(vectors=class_means(features))
    return Uplink(summed, Maybe(f_k, f_k.counts > 0))
  rows = oldest_first(features, 0)
  return Uplink(summed, Maybe(rows, features.filled[0]))
