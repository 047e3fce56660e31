"""Training of several models of one client on the same minibatches.

Each model has its own optimiser state. The loss sees the outputs of all of
them, so that they can teach each other.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import optax

from fedjax_het.data.federated import Batch, Examples
from fedjax_het.engine.local import fit
from fedjax_het.engine.types import LocalTraining, Visit
from fedjax_het.models.blocks import BlockModel, Variables


def fit_together(
    models: Sequence[BlockModel],
    local: LocalTraining,
    starts: Sequence[Variables],
    loss_of: Callable[
        [tuple[jax.Array, ...], Batch], tuple[jax.Array, dict[str, jax.Array]]
    ],
    data: Examples,
    visit: Visit,
    *,
    opt_states: tuple[Any, ...] | None = None,
) -> tuple[
    tuple[Variables, ...], tuple[Any, ...], dict[str, jax.Array], jax.Array
]:
  """Trains M models at once; each step has one pass of each model.

  Args:
    models: Their M architectures.
    local: Local training, the same for all.
    starts: Their M variables at the beginning.
    loss_of: `(outputs, batch) -> (loss, metrics)`, where `outputs` are those of
      the M models, [B, ...] each. A step moves each model along the gradient of
      the loss in its own parameters.
    data: The client's examples.
    visit: The visit. Its key seeds batches and dropout; the first model has the
      dropout masks that it would have alone.
    opt_states: The M optimizer states; None initialises new ones.

  Returns:
    The variables at the end and the optimizer states, M each; the metrics and
    'train_loss' as means over the steps; the number of steps ([] int32).
  """

  def loss_fn(variables, batch, key):
    outputs = [
        model.apply(
            Variables(*one), batch.x, train=True, mask=batch.mask,
            key=jax.random.fold_in(key, m) if m else key,
        )
        for m, (model, *one) in enumerate(zip(models, *variables, strict=True))
    ]  # fmt: skip
    outputs, stats = zip(*outputs, strict=True)
    loss, metrics = loss_of(outputs, batch)
    return loss, (stats, metrics)

  def optimizer(learning_rate):
    return _apart(local.optimizer(learning_rate))

  end, opt_states, metrics, num_steps = fit(
      loss_fn,
      dataclasses.replace(local, optimizer=optimizer),
      Variables(*zip(*starts, strict=True)),
      data,
      visit,
      opt_state=opt_states,
  )
  ends = tuple(Variables(*one) for one in zip(*end, strict=True))
  return ends, opt_states, metrics, num_steps


def _apart(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """Applies `tx` to each tree separately, so no norm spans several models."""

  def update(grads, states, params):
    both = [tx.update(*one) for one in zip(grads, states, params, strict=True)]
    return tuple(zip(*both, strict=True))

  return optax.GradientTransformation(
      lambda params: tuple(tx.init(one) for one in params), update
  )
