"""Uploads that the server needs from each client separately."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.engine.types import Received


def gather_uploads(
    received: Mapping[str, Received],
) -> tuple[jax.Array, Any]:
  """The `kept` uplinks of all groups on one axis.

  Args:
    received: {group name: Received}.

  Returns:
    The client ids, [S] int32 (num_clients for padding), and the uplinks, leaves
    [S, ...].
  """
  groups = list(received.values())
  ids = jnp.concatenate([group.client_id for group in groups])
  return ids, jax.tree.map(
      lambda *parts: jnp.concatenate(parts), *(group.kept for group in groups)
  )


def clear_padding(received: Received, num_clients: int) -> Received:
  """Sets `kept` of a group's padding slots to zero.

  Args:
    received: The group's uploads.
    num_clients: The id that padding slots hold.

  Returns:
    The uploads, whose `kept` can be summed over the slots.
  """
  real = received.client_id < num_clients

  def clear(leaf):
    mask = jnp.expand_dims(real, range(1, leaf.ndim))
    return jnp.where(mask, leaf, jnp.zeros_like(leaf))

  return received._replace(kept=jax.tree.map(clear, received.kept))


def sum_uploads(uploads):
  """Sums leaves [S, ...] over their slots, see `clear_padding`."""
  return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), uploads)


def keep_latest(store, client_id, uploads):
  """Replaces the senders' earlier uploads by new ones.

  Args:
    store: A tree of leaves [N, ...].
    client_id: [S] int32; ids outside 0..N-1 are ignored.
    uploads: The same tree, leaves [S, ...].

  Returns:
    The new store.
  """
  return jax.tree.map(
      lambda old, new: old.at[client_id].set(new, mode='drop'), store, uploads
  )
