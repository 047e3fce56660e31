"""Embeddings, their sums by class, and the global prototypes."""

from collections.abc import Callable
import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.class_means import (
  ClassVectors,
  class_means,
  class_sums,
)
from fedjax_het.data.federated import Examples
from fedjax_het.engine.local import (
  map_examples,
  steps_per_epoch,
  visit_steps,
)
from fedjax_het.engine.types import Federation, LocalTraining, Maybe
from fedjax_het.models.blocks import BlockModel, Variables


def embedding_width(federation: Federation) -> int:
  """d, the numbers in the input of the last block.

  Args:
    federation: The federation.

  Returns:
    The width that all groups have.

  Raises:
    ValueError: If two groups differ.
  """
  widths = {g.name: math.prod(g.model.shapes[-2]) for g in federation.groups}
  (first, width), *others = widths.items()
  for name, other in others:
    if other != width:
      raise ValueError(
          'fedproto needs embeddings (inputs of the last block) of one width, '
          f'but {first} has {width} and {name} has {other}; choose models that '
          'agree.'
      )
  return width


def embed(
    model: BlockModel, variables: Variables, x, **options
) -> tuple[jax.Array, jax.Array, Any]:
  """Embeddings and logits.

  Args:
    model: The architecture.
    variables: Its variables.
    x: [B, ...], the inputs.
    **options: `train`, `mask` and `key` of `BlockModel.apply`.

  Returns:
    f(x) [B, d] and F(x) [B, C], both float32, and the running statistics.
  """
  last = len(model.blocks) - 1
  h, stats = model.apply(variables, x, stop=last, **options)
  logits, stats = model.apply(
      Variables(variables.params, stats), h, start=last, **options
  )
  z = h.reshape(len(h), -1).astype(jnp.float32)
  return z, logits.astype(jnp.float32), stats


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
