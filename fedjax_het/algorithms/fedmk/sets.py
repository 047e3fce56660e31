"""FedMK's learned examples: what the server stores, draws and trains on."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import ClientData, unchanged
from fedjax_het.engine.types import Maybe
from fedjax_het.models.blocks import BlockModel


class Learned(NamedTuple):
  """Learned examples, P of each of C classes.

  Attributes:
    x: [..., C, P, *input] float32, the model's inputs.
    y: [..., C, P] int32, their labels.
  """

  x: jax.Array
  y: jax.Array


def labels_of(num_classes: int, per_class: int) -> jax.Array:
  """y_k, [C, P] int32: the row of class c holds c."""
  classes = jnp.arange(num_classes, dtype=jnp.int32)
  return jnp.broadcast_to(classes[:, None], (num_classes, per_class))


def empty_sets(model: BlockModel, num_clients: int, per_class: int) -> Maybe:
  """The server's table before any upload.

  Args:
    model: The model, which says the shape of an input and C.
    num_clients: K.
    per_class: P.

  Returns:
    `Maybe` of `Learned` [K, C, P, ...]; its mask is [K, C].
  """
  shape = num_clients, model.num_classes
  rows = *shape, per_class
  return Maybe(
      Learned(
          jnp.zeros((*rows, *model.input_shape)), jnp.zeros(rows, jnp.int32)
      ),
      jnp.zeros(shape, bool),
  )


def draw_from_others(sets: Maybe, client_id, key) -> Maybe:
  """What a client begins with: examples of others, of the labels it owns.

  Args:
    sets: `Maybe` of `Learned` [K, C, P, ...], the uploads of all clients.
    client_id: [] int32; its own examples are not drawn.
    key: A random key.

  Returns:
    `Maybe` of `Learned` [C, P, ...], drawn without replacement from those of
    all other clients. The mask [C] is True for labels that another client has
    uploaded, and that this one has uploaded, too. A client that has uploaded
    nothing is sent all labels, since the server does not know its own.
  """
  (x, y), present = sets
  num_clients, num_classes, per_class = y.shape
  others = present & (jnp.arange(num_clients) != client_id)[:, None]
  score = jax.random.uniform(key, (num_classes, num_clients, per_class))
  score = jnp.where(others.T[:, :, None], score, -1.0)
  _, place = jax.lax.top_k(score.reshape(num_classes, -1), per_class)
  k, p = place // per_class, place % per_class
  c = jnp.arange(num_classes)[:, None]
  mine = present[client_id]
  wanted = mine | ~jnp.any(mine)
  return Maybe(
      Learned(x[k, c, p], y[k, c, p]), jnp.any(others, axis=0) & wanted
  )


def union_of(sets: Maybe) -> ClientData:
  """All stored examples, to train on; those that are present come first."""
  (x, y), present = sets
  rows = jnp.repeat(present.ravel(), y.shape[2])
  return ClientData(
      x.reshape((-1, *x.shape[3:])),
      y.ravel(),
      jnp.argsort(~rows).astype(jnp.int32),
      jnp.sum(rows, dtype=jnp.int32),
      unchanged,
  )
