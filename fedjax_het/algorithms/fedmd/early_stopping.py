"""Training that ends when accuracy on held-out examples stops rising."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import ClientData, Examples
from fedjax_het.engine.local import (
    fit,
    map_examples,
    model_loss,
    shuffled_positions,
)
from fedjax_het.engine.task import CLASSIFICATION, masked_mean
from fedjax_het.engine.types import LocalTraining, Visit
from fedjax_het.models.blocks import BlockModel, Variables


def hold_out(key, data: ClientData) -> tuple[ClientData, ClientData]:
  """Splits a client's data at random, 9 : 1.

  Args:
    key: A random key.
    data: The data.

  Returns:
    (rest, held out). The latter is a tenth, rounded down, but at least one
    example; none of a single example, which is left to train on.
  """
  order = shuffled_positions(key, data)
  longest = max(len(order) // 10, 1)
  num = jnp.where(data.size > 1, jnp.maximum(data.size // 10, 1), 0)
  held = data.replace(index=data.index[order[:longest]], size=num)
  rest = data.replace(
      index=data.index[jnp.roll(order, -num)], size=data.size - num
  )
  return rest, held


def accuracy(model: BlockModel, variables: Variables, data: Examples):
  """[] float32: share of the examples that a model gets right."""

  def hits(batch):
    logits, _ = model.apply(variables, batch.x, mask=batch.mask)
    return CLASSIFICATION.metrics['accuracy'](logits, batch.y)

  hit = map_examples(hits, data)
  return masked_mean(hit, jnp.arange(data.length) < data.size)


def fit_until(
    model: BlockModel,
    local: LocalTraining,
    start: Variables,
    data: ClientData,
    visit: Visit,
    opt_state: Any,
    *,
    patience: int,
    min_delta: float,
) -> tuple[Variables, Any, dict[str, jax.Array], jax.Array]:
  """Trains until accuracy on a held-out tenth stops rising, or epochs end.

  Args:
    model: The architecture.
    local: Local training; its `epochs` are the maximum.
    start: Variables at the beginning.
    data: The data.
    visit: The client's turn.
    opt_state: The optimiser's state at the beginning.
    patience: Epochs without a gain after which training ends; 0 trains for
      all epochs on all data.
    min_delta: Accuracy in [0, 1] that a gain must exceed.

  Returns:
    As `fit`; 'train_loss' is the mean over the epochs done.
  """
  loss_fn = model_loss(model, local.task)
  if not patience:
    return fit(loss_fn, local, start, data, visit, opt_state=opt_state)
  rest, held = hold_out(jax.random.fold_in(visit.key, 2), data)
  one = dataclasses.replace(local, epochs=1)

  def body(state):
    (variables, opt_state), epoch, loss, steps, best, waited = state
    turn = visit._replace(key=jax.random.fold_in(visit.key, epoch + 3))
    variables, opt_state, means, num = fit(
        loss_fn, one, variables, rest, turn, opt_state=opt_state
    )
    score = accuracy(model, variables, held)
    gained = score > best + min_delta
    return (
        (variables, opt_state),
        epoch + 1,
        loss + means['train_loss'],
        steps + num,
        jnp.where(gained, score, best),
        jnp.where(gained, 0, waited + 1),
    )

  def goes_on(state):
    _, epoch, _, _, _, waited = state
    return (epoch < local.epochs) & (waited < patience)

  # Under `vmap` over clients, those that have stopped keep their carry.
  first = (
      (start, opt_state),
      jnp.int32(0),
      jnp.float32(0.0),
      jnp.int32(0),
      jnp.float32(-jnp.inf),
      jnp.int32(0),
  )
  (end, opt_state), epochs, loss, steps, _, _ = jax.lax.while_loop(
      goes_on, body, first
  )
  return end, opt_state, {'train_loss': loss / jnp.maximum(epochs, 1)}, steps
