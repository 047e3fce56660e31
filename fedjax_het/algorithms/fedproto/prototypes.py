"""Sums of embeddings by class, and the global prototypes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.class_means import (
  ClassVectors,
  class_means,
  class_sums,
)
from fedjax_het.aggregation.embeddings import embed
from fedjax_het.data.federated import Examples
from fedjax_het.engine.local import (
  map_examples,
  steps_per_epoch,
  visit_steps,
)
from fedjax_het.engine.types import LocalTraining, Maybe
from fedjax_het.models.blocks import BlockModel, Variables


def sums_of_last_epoch(
    num_classes: int, local: LocalTraining, size
) -> Callable[..., Any]:
  """`add` of `fit_and_record`: sums the embeddings of the last epoch by class.

  With `local.steps`, the last epoch is as many last steps as an epoch has.

  Args:
    num_classes: C.
    local: The local training.
    size: [] int32, the client's examples.

  Returns:
    `(record, z [B, d], batch) -> record`; a record is `ClassVectors` and []
    int32, the number of steps so far.
  """
  epoch = steps_per_epoch(size, local.batch_size, local.drop_last)
  first = visit_steps(local, size) - epoch

  def add(record, z, batch):
    total, step = record
    batch_sums = class_sums(z, batch.y, num_classes, batch.mask)
    total = jax.tree.map(
        lambda t, s: t + jnp.where(step >= first, s, 0.0), total, batch_sums
    )
    return total, step + 1

  return add


def sums_of_all(
    model: BlockModel, variables: Variables, data: Examples
) -> ClassVectors:
  """Sums the embeddings of all examples by class, in eval mode.

  Args:
    model: The architecture.
    variables: Its variables.
    data: The client's examples.

  Returns:
    Sums [C, d] and counts [C].
  """

  def one(batch):
    return embed(model, variables, batch.x, mask=batch.mask)[0], batch.y

  z, labels = map_examples(one, data)
  # Rows of padding are arbitrary.
  real = jnp.arange(data.length) < data.size
  return class_sums(z, labels, model.num_classes, real)


def global_prototypes(store: ClassVectors, weights: str) -> Maybe:
  """C: the mean prototype of each class over the clients that have it (Eq. 6).

  Args:
    store: The clients' prototypes C_k [N, C, d], and how many embeddings each
      is the mean of, [N, C]; 0 for a class that a client does not have.
    weights: 'uniform' or 'data', see `fedproto`.

  Returns:
    `Maybe` of C [C, d]; its mask [C] is False for a class that no client has.
  """
  # a_k[j]: 1, or |D_kj|, if client k has class j.
  a = store.counts
  if weights == 'uniform':
    a = (a > 0).astype(jnp.float32)
  # C[j] = sum_k a_k[j] C_k[j] / sum_k a_k[j].
  total = ClassVectors(
      jnp.sum(a[..., None] * store.vectors, axis=0), jnp.sum(a, axis=0)
  )
  return Maybe(class_means(total), total.counts > 0)
