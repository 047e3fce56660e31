"""What an FCCL client does on the public set: learn from it, and publish."""

from collections.abc import Callable
from typing import Any

import jax

from fedjax_het.algorithms.fccl.correlation import collaborative_loss
from fedjax_het.engine.local import map_examples
from fedjax_het.models.blocks import BlockModel, Variables


def public_loss(
    model: BlockModel,
    others: jax.Array,
    own: jax.Array | None,
    off_diagonal_weight: float,
) -> Callable[..., Any]:
  """The loss of a step on public examples, as `fit` takes it.

  Args:
    model: The architecture.
    others: [P, C], S_k.
    own: [P, C], the client's part of the target; None for its current logits.
    off_diagonal_weight: lambda.

  Returns:
    The function; labels are not read.
  """

  def loss_fn(variables, batch, key):
    z, stats = model.apply(
        variables, batch.x, train=True, mask=batch.mask, key=key
    )
    # K T = S_k(b) + own. M is the same for T and K T, so nobody sends K.
    mine = z if own is None else own[batch.position]
    target = others[batch.position] + mine
    loss = collaborative_loss(z, target, off_diagonal_weight, batch.mask)
    return loss, (stats, {})

  return loss_fn


def publish(
    model: BlockModel, variables: Variables, public, batch_size: int, key
) -> jax.Array:
  """Z_k(X), logits of the public examples in training mode.

  Args:
    model: The architecture.
    variables: w_k; its running statistics are neither read nor changed.
    public: The public examples, P of them.
    batch_size: The largest batch, over which norms take their statistics.
    key: A random key, for dropout.

  Returns:
    [P, C], in the order of the public set.
  """

  def logits(batch):
    z, _ = model.apply(
        variables,
        batch.x,
        train=True,
        mask=batch.mask,
        key=jax.random.fold_in(key, batch.position[0]),
    )
    return z

  return map_examples(logits, public, batch_size)
