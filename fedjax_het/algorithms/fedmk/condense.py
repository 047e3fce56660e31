"""FedMK's clients: they learn examples on which a step of w lowers their loss.

w' is a step of w on the learned examples; see `fedmk` for the equations.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.fedmk.sets import Learned
from fedjax_het.data.federated import Batch, ClientData
from fedjax_het.engine.local import train_epochs
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.types import LocalTraining, Visit
from fedjax_het.models.blocks import BlockModel, Variables


class Setting(NamedTuple):
  """The options of `fedmk` that the condensation depends on."""

  inner_lr: float
  condense_lr: float
  tau: float


def dynamic_weights(losses, mask, tau: float) -> jax.Array:
  """phi_i = sigmoid(tau l_i), divided by their mean over the real rows.

  Args:
    losses: [B] float32, l_i.
    mask: [B] bool, the real rows, or None for all.
    tau: Factor on the loss.

  Returns:
    [B] float32, constant for derivatives; 0 for padding.
  """
  real = jnp.ones(losses.shape, bool) if mask is None else mask
  log_phi = jnp.where(real, jax.nn.log_sigmoid(tau * losses), -jnp.inf)
  # Division by the mean removes every common factor: with the largest phi at 1
  # not all of them underflow.
  top = jnp.max(log_phi)
  phi = jnp.exp(log_phi - jnp.where(jnp.isfinite(top), top, 0.0))
  mean = masked_mean(phi, real)
  return jax.lax.stop_gradient(phi / jnp.where(mean > 0, mean, 1.0))


def outer_loss(
    model: BlockModel, task: Task, setting: Setting, start: Variables
) -> Callable[..., Any]:
  """The loss of learned examples: that of real ones after a step on them.

  Args:
    model: The model.
    task: The task.
    setting: The options.
    start: w.

  Returns:
    `(x [M, ...], y [M], mask [M], batch, key) -> (loss, metrics)`, with the
    learned examples and a `Batch` of real ones. Both losses have norms and
    dropout in training mode.
  """

  def logits_of(params, x, mask, key):
    return model.apply(
        Variables(params, start.stats), x, train=True, mask=mask, key=key
    )[0]

  def loss_fn(x, y, mask, batch: Batch, key):
    keys = jax.random.split(key)

    def inner(params):
      return task.loss(logits_of(params, x, mask, keys[0]), y, mask)

    # w' = w - eta_in grad_w CE(X_k, y_k; w).
    loss, grads = jax.value_and_grad(inner)(start.params)
    moved = jax.tree.map(
        lambda w, g: w - setting.inner_lr * g, start.params, grads
    )
    losses = task.example_losses(
        logits_of(moved, batch.x, batch.mask, keys[1]), batch.y, batch.mask
    )
    # mean_i phi_i CE(x_i, y_i; w').
    phi = dynamic_weights(losses, batch.mask, setting.tau)
    outer = masked_mean(phi * losses, batch.mask)
    return outer, dict(train_loss=outer, learned_loss=loss)

  return loss_fn


def clip_to_inputs(x, data: ClientData) -> jax.Array:
  """Clips to what pixels from 0 to 255 are for the model.

  Args:
    x: [C, P, *input].
    data: The client's examples.

  Returns:
    [C, P, *input]; features of another type than uint8 have no known range and
    stay.
  """
  if data.images.dtype != jnp.uint8:
    return x
  pixels = jnp.zeros((1, *data.images.shape[1:]), jnp.uint8)
  low, high = (data.preprocess(pixels + jnp.uint8(v)) for v in (0, 255))
  return jnp.clip(x, low[None], high[None])


def condense(
    model: BlockModel,
    local: LocalTraining,
    setting: Setting,
    start: Variables,
    x,
    y,
    owned,
    data: ClientData,
    visit: Visit,
) -> tuple[Learned, dict[str, jax.Array]]:
  """Learns X_k in the local steps of a visit.

  Args:
    model: The model.
    local: Local training; its optimiser steps X_k.
    setting: The options.
    start: w.
    x: [C, P, *input], X_k at first.
    y: [C, P] int32, y_k.
    owned: [C] bool, the classes whose examples are learned.
    data: The client's examples.
    visit: The visit.

  Returns:
    The learned examples, of which those of other classes are without meaning,
    and the metrics 'train_loss' and 'learned_loss', means over the steps.
  """
  # oneDNN's convolutions have no second derivatives.
  model = dataclasses.replace(model, conv_backend='xla')
  start = model.trim(start) if local.drop_unused_weights else start
  loss_fn = outer_loss(model, local.task, setting, start)
  tx, num = local.optimizer(setting.condense_lr), y.size
  labels, mask = y.ravel(), jnp.repeat(owned, y.shape[1])

  def step(carry, batch, step_num, key):
    del step_num
    x, opt_state = carry

    def of_examples(x):
      return loss_fn(
          x.reshape((num, *x.shape[2:])), labels, mask, batch, key
      )

    # X_k <- step along -grad_X_k, then clip.
    grads, metrics = jax.grad(of_examples, has_aux=True)(x)
    updates, opt_state = tx.update(grads, opt_state, x)
    x = clip_to_inputs(optax.apply_updates(x, updates), data)
    return (x, opt_state), metrics

  x = clip_to_inputs(x, data)
  (x, _), metrics, _ = train_epochs(
      step,
      (x, tx.init(x)),
      data,
      visit.key,
      epochs=local.epochs,
      batch_size=local.batch_size,
      drop_last=local.drop_last,
      steps=local.steps,
  )
  return Learned(x, y), metrics
