"""Static batch norm: statistics over all clients' data."""

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import FederatedData
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.models.intercept import (
    batch_moments_as_stats,
    keeps_moments_of_batches,
)


def example_order(data: FederatedData) -> tuple[jax.Array, jax.Array]:
  """All clients' examples in one fixed random order.

  The order is drawn for the examples; it does not depend on the padding of the
  clients' tables.

  Args:
    data: The federated data.

  Returns:
    [K * M] int32 indices of examples, padding last, and the number of real
    ones, [] int32.
  """
  score = jax.random.uniform(jax.random.key(0), (len(data.labels),))
  inside = jnp.arange(data.index.shape[1])[None] < data.sizes[:, None]
  score = jnp.where(inside, score[data.index], 2.0).reshape(-1)
  return data.index.reshape(-1)[jnp.argsort(score)], jnp.sum(data.sizes)


def check_static(model: BlockModel) -> None:
  """Raises ValueError if `static_statistics` cannot compute a model's."""
  if not keeps_moments_of_batches(model):
    raise ValueError(
        f'Static statistics: {model.name!r} keeps statistics of other layers '
        "than batch norms of this library or of flax.linen, or of norms over "
        'another axis than the last.'
    )


def static_statistics(
    model: BlockModel,
    params,
    data: FederatedData,
    *,
    batch_size: int,
    num_batches: int | None = None,
):
  """Running statistics for a model that is trained without them.

  One pass in batch-statistics mode over all training examples: for every norm
  the mean over batches of the batch mean, and of the UNBIASED variance within
  the batch. Every batch has the same weight. The variance of the means between
  batches is ignored, as in the paper's code. Images are not augmented; the
  paper's code augments them.

  Args:
    model: A model with 'batch' norms.
    params: Its parameters.
    data: The federated data.
    batch_size: Examples a batch.
    num_batches: Batches at most; None for all examples.

  Returns:
    Running statistics, {block name: tree}.

  Raises:
    ValueError: If the model has other statistics than those of batch norms.

  References:
    Diao et al., `HeteroFL <https://arxiv.org/abs/2010.01264>`_, ICLR 2021,
    static batch normalisation (sBN).
  """
  check_static(model)
  order, total = example_order(data)
  steps = -(-total // batch_size)
  if num_batches is not None:
    steps = jnp.minimum(steps, num_batches)
  zeros = jax.tree.map(
      lambda s: jnp.zeros(s.shape, s.dtype), model.abstract_variables.stats
  )
  last = len(order) - 1

  def body(i, sums):
    place = i * batch_size + jnp.arange(batch_size)
    example = order[jnp.minimum(place, last)]
    x = data.preprocess(data.images[example])
    mask = place < total
    with batch_moments_as_stats(mask):
      _, stats = model.apply_heads(
          Variables(params, zeros), x, train=True, mask=mask
      )
    return jax.tree.map(jnp.add, sums, stats)

  sums = jax.lax.fori_loop(0, steps, body, zeros)
  return jax.tree.map(lambda s: s / steps, sums)
