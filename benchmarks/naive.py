"""Naive local training in JAX: `vmap` over clients, `scan` over steps.

It uses the library's models with XLA's native convolutions. (`naive_fedin` has
FedIN's local epoch, with Flax modules.) The gradient of max pooling is the
library's, which is faster than XLA's.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.data.federated import Batch
from fedjax_het.depthwise import Stage, stage_loss
from fedjax_het.engine.local import model_loss
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.models import BlockModel, Variables


def _fit(loss_fn, tx, start: Variables, images, labels, key) -> Variables:
  """Trains on [S, B, ...] minibatches."""

  def step(carry, batch):
    (params, stats), opt_state = carry
    x, y, key = batch

    def objective(params):
      place = jnp.arange(len(y))
      return loss_fn(Variables(params, stats), Batch(x, y, None, place), key)

    grads, (new_stats, _) = jax.grad(objective, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return (Variables(params, new_stats), opt_state), None

  keys = jax.random.split(key, len(images))
  carry = (start, tx.init(start.params))
  return jax.lax.scan(step, carry, (images, labels, keys))[0][0]


def whole_model(model: BlockModel, tx) -> Callable[..., Variables]:
  """Trains a whole model by cross-entropy, for one client."""

  def client(start, images, labels, key):
    loss_fn = model_loss(model, CLASSIFICATION)
    return _fit(loss_fn, tx, start, images, labels, key)

  return client


def depthwise(stages: Sequence[Stage], tx) -> Callable[..., Variables]:
  """Trains FeDepth's stages in order, for one client."""

  def client(start, images, labels, key):
    end = start
    for j, stage in enumerate(stages):
      part = _fit(
          stage_loss(CLASSIFICATION, stage, end),
          tx,
          stage.pick(end),
          images,
          labels,
          jax.random.fold_in(key, j),
      )
      end = Variables(*({**a, **b} for a, b in zip(end, part, strict=True)))
    return end

  return client


def class_logits(model: BlockModel, tx, means) -> Callable[..., Variables]:
  """Trains on FedHe's loss: cross-entropy plus distance to [C, C] `means`."""

  def loss_fn(variables, batch, key):
    logits, stats = model.apply(variables, batch.x, train=True, key=key)
    error = jnp.mean(jnp.square(logits - means[batch.y]))
    return CLASSIFICATION.loss(logits, batch.y) + error, (stats, {})

  def client(start, images, labels, key):
    return _fit(loss_fn, tx, start, images, labels, key)

  return client


def arguments(model: BlockModel, num_clients: int, num_steps: int, batch: int):
  """Initial models, images, labels and keys of clients, with a client axis."""
  keys = jax.random.split(jax.random.key(0), num_clients)
  leading = (num_clients, num_steps, batch)
  start = jax.device_get(model.init(keys[0]))
  start = jax.tree.map(lambda x: np.stack([x] * num_clients), start)
  images = np.random.default_rng(0).normal(size=(*leading, *model.input_shape))
  labels = np.zeros(leading, np.int32)
  return *jax.device_put((start, images.astype(np.float32), labels)), keys
