"""Felo's and Velo's server: its state, its store, and Velo's turn."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.class_means import ClassVectors, class_means
from fedjax_het.aggregation.uploads import gather_uploads
from fedjax_het.algorithms.felo.cvae import CVAE, generate, train_cvae
from fedjax_het.algorithms.felo.rings import Rings, push
from fedjax_het.engine.types import LocalTraining, Maybe, Received, Turn
from fedjax_het.models.blocks import Variables


class Generator(NamedTuple):
  """Velo's part of the server state.

  Attributes:
    variables: Those of the CVAE.
    features: `Maybe` of f_bar [C, d] of the next clients; its mask is [C].
  """

  variables: Variables
  features: Maybe


class Server(NamedTuple):
  """The server state.

  Attributes:
    logits: The sums of all uploaded mean logits [C, C], and their numbers [C].
    store: The last features of each class, C rings: for Felo `ClassVectors`
      [C, L, d] and [C, L] of one upload each, for Velo single ones [C, L, d].
    generator: A `Generator`; () for Felo.
  """

  logits: ClassVectors
  store: Rings
  generator: Any


def add_logits(
    total: ClassVectors, received: Mapping[str, Received]
) -> ClassVectors:
  """Adds the mean logits of a round's uploads, and the number of uploads."""
  for group in received.values():
    total = jax.tree.map(jnp.add, total, ClassVectors(*group.summed))
  return total


def store_uploads(
    store: Rings, received: Mapping[str, Received], num_clients: int
) -> Rings:
  """Appends the features of a round's uploads, by ascending client id.

  Args:
    store: The server's store.
    received: {group name: Received}.
    num_clients: The id that padding slots hold.

  Returns:
    The new store.
  """
  client_id, uploads = gather_uploads(received)
  order = jnp.argsort(client_id)
  client_id, (rows, present) = jax.tree.map(
      lambda leaf: leaf[order], (client_id, uploads)
  )
  present &= (client_id < num_clients)[:, None]
  if isinstance(rows, ClassVectors):
    labels = jnp.arange(present.shape[1])[None]
    labels = jnp.broadcast_to(labels, present.shape)
  else:
    rows, labels = rows
  rows, labels, present = jax.tree.map(
      lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (rows, labels, present)
  )
  return push(store, rows, labels, present)


def mean_features(store: Rings) -> Maybe:
  """Felo's f_bar: the means of the stored features.

  Args:
    store: Mean features [C, L, d] of each upload, and their numbers [C, L].

  Returns:
    `Maybe` of [C, d]; its mask is [C].
  """
  # n_k[y] f_k[y] is the sum of the features behind a mean.
  number = jnp.where(store.filled, store.rows.counts, 0.0)
  total = ClassVectors(
      jnp.sum(number[..., None] * store.rows.vectors, axis=1),
      jnp.sum(number, axis=1),
  )
  return Maybe(class_means(total), total.counts > 0)


def training_is_due(
    received: Mapping[str, Received], turn: Turn, first: int, every: int
) -> jax.Array:
  """[] bool: whether a round ends from which Velo's server trains.

  Args:
    received: The uploads.
    turn: The server's turn.
    first: The first round, from 0, in which clients are sent features.
    every: Rounds from one training to the next.
  """
  ends = jnp.array([group.round_ends for group in received.values()])
  later = turn.round_num + 1 - first
  return jnp.all(ends) & (later >= 0) & (later % every == 0)


def train_and_generate(
    server: Server,
    net: CVAE,
    due,
    training: LocalTraining,
    reduction: str,
    turn: Turn,
) -> tuple[Generator, dict[str, jax.Array]]:
  """Velo's f_bar[y] = decoder(eps_y, y), after the CVAE's training if due.

  Args:
    server: The server, whose store has the new features.
    net: The CVAE.
    due: [] bool.
    training: See `cvae.cvae_training`.
    reduction: See `cvae.kl_loss`.
    turn: The server's turn.

  Returns:
    The new generator, whose features are those of classes in the store, or of
    none before the first training; and the metrics of `train_cvae`.
  """
  variables, old = server.generator
  stored = server.store.size > 0
  due &= jnp.any(stored)
  variables, metrics = train_cvae(
      net, variables, server.store, due, training, reduction, turn
  )
  trained = due | jnp.any(old.present)
  f_bar = generate(net, variables, turn.key)
  return Generator(variables, Maybe(f_bar, stored & trained)), metrics
