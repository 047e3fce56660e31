"""Phases of a visit other than training on the client's own examples.

Methods with a public set pass over it with the clients' optimiser, and send
what their models say of it.
"""

import dataclasses

import jax
import optax

from fedjax_het.data.federated import Examples
from fedjax_het.engine.local import map_examples
from fedjax_het.engine.types import LocalTraining
from fedjax_het.models.blocks import BlockModel, Variables


def passes(
    local: LocalTraining,
    epochs: int,
    batch_size: int | None = None,
    *,
    fresh_optimizer: bool = False,
) -> LocalTraining:
  """Whole passes with the optimiser and the learning rate of `local`.

  Args:
    local: Local training.
    epochs: Passes.
    batch_size: Examples a step; None for those of `local`.
    fresh_optimizer: Whether each step has a new optimiser, see `restarted`.

  Returns:
    The settings, for `fit`.
  """
  if fresh_optimizer:
    optimizer = local.optimizer
    local = dataclasses.replace(
        local, optimizer=lambda rate: restarted(optimizer(rate))
    )
  if batch_size is None:
    batch_size = local.batch_size
  return dataclasses.replace(
      local, epochs=epochs, batch_size=batch_size, steps=None
  )


def restarted(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """An optimiser whose every step is the first one; it has no state."""

  def update(grads, state, params=None):
    updates, _ = tx.update(grads, tx.init(params), params)
    return updates, state

  return optax.GradientTransformation(optax.init_empty_state, update)


def inference_logits(
    model: BlockModel, variables: Variables, examples: Examples
) -> jax.Array:
  """Logits of all examples in inference mode, [M, C], in their order."""
  return map_examples(
      lambda batch: model.apply(variables, batch.x, mask=batch.mask)[0],
      examples,
  )
