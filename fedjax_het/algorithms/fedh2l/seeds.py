"""FedH2L's seeds: the examples that every client publishes once."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import ClientData
from fedjax_het.engine.held_out import hold_out
from fedjax_het.engine.types import Federation, Maybe

# Label of a slot without a seed. A masked loss needs a label that it can index.
EMPTY = -1


class Seeds(NamedTuple):
  """Seeds, with S slots per client.

  Attributes:
    x: [..., S, *input], the models' inputs: float32, or int32 for token ids; 0
      in a slot without a seed.
    y: [..., S] int32 labels; `EMPTY` in a slot without a seed.
  """

  x: jax.Array
  y: jax.Array

  def flat(self) -> 'Seeds':
    """Seeds of several clients on one axis, [K S, ...]."""
    return Seeds(
        self.x.reshape((-1, *self.x.shape[self.y.ndim :])), self.y.ravel()
    )


def num_slots(federation: Federation, fraction: float) -> int:
  """S, enough for the seeds of the largest client."""
  largest = federation.max_examples
  return min(math.ceil(fraction * largest) + 1, largest)


def no_seeds(federation: Federation, slots: int) -> Seeds:
  """The server's table before any client has published, [K, S, ...]."""
  model, shape = federation.groups[0].model, (federation.num_clients, slots)
  dtype = jnp.float32 if model.vocabulary is None else jnp.int32
  return Seeds(
      jnp.zeros((*shape, *model.input_shape), dtype),
      jnp.full(shape, EMPTY, jnp.int32),
  )


def publish_seeds(data: ClientData, fraction: float, slots: int) -> Maybe:
  """`Maybe` of a client's `Seeds`, [S, ...].

  Args:
    data: The client's examples.
    fraction: Share of the examples that become seeds; see `hold_out`, which
      chooses them.
    slots: S.

  Returns:
    The seeds, not augmented; they are the first ones of the slots.
  """
  _, mine = hold_out(data, fraction)
  place = jnp.arange(slots)
  real = place < mine.size
  batch = mine.batch(place)
  x = jnp.where(jnp.expand_dims(real, range(1, batch.x.ndim)), batch.x, 0)
  return Maybe(Seeds(x, jnp.where(real, batch.y, EMPTY)), real)


def draw_seeds(key, y, client_id, num: int) -> tuple[jax.Array, jax.Array]:
  """Draws a minibatch of other clients' seeds, without replacement.

  Args:
    key: A random key.
    y: [K, S], the labels of `Seeds`.
    client_id: [] int32, the client that draws; its own seeds are left out.
    num: Seeds to draw, B, at most K S.

  Returns:
    index: [B] int32, places in the K S slots.
    weight: [B] float32, 1 / |S_j| for a seed of client j, so that every other
      client has the same weight in the mean of all seeds; 0 for padding, which
      comes last.
  """
  real = y != EMPTY
  others = real & (jnp.arange(len(y)) != client_id)[:, None]
  number = jnp.sum(real, axis=1, keepdims=True)
  weight = jnp.where(others, 1.0 / jnp.maximum(number, 1), 0.0).ravel()
  score = jax.random.uniform(key, weight.shape)
  _, index = jax.lax.top_k(jnp.where(weight > 0, score, -1.0), num)
  return index, weight[index]
