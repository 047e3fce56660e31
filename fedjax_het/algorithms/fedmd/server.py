"""FedMD's server: the uploads for the subsets of two rounds."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.engine.types import Received


class Logits(NamedTuple):
  """Uploads for one subset.

  Attributes:
    total: [N_a, C] float32, their sum.
    count: [] int32, their number.
  """

  total: jax.Array
  count: jax.Array


class Server(NamedTuple):
  """FedMD's server state.

  Attributes:
    seed: Data of a random key, 8 bytes, with which all clients draw subsets.
    number: [] int32, t, the number of the current subset.
    current: The uploads for X_t; their mean is the consensus Z_t.
    coming: The uploads for X_{t+1} so far.
  """

  seed: jax.Array
  number: jax.Array
  current: Logits
  coming: Logits


def no_logits(size: int, num_classes: int) -> Logits:
  """No upload yet."""
  return Logits(jnp.zeros((size, num_classes)), jnp.int32(0))


def collect(
    server: Server, received: Mapping[str, Received], num_clients: int
) -> Server:
  """Adds uploads to the sums of their subsets; increments t as a round ends.

  Uploads for a subset older than the current one are discarded.

  Args:
    server: The server's state.
    received: {group: Received}; `summed` are logits [N_a, C], `kept` the
      number of the subset.
    num_clients: The id that padding slots hold.

  Returns:
    The new state.
  """
  seed, number, current, coming = server
  ends = True
  for group in received.values():
    real = group.client_id < num_clients

    # All uploads of one update are for one subset: in a synchronous round all
    # clients received one number; an asynchronous update has one upload.
    def add(logits, wanted, group=group, real=real):
      mine = real & (group.kept == wanted)
      total = jnp.where(jnp.any(mine), group.summed, 0.0)
      return Logits(logits.total + total, logits.count + jnp.sum(mine))

    current, coming = add(current, number), add(coming, number + 1)
    ends = group.round_ends
  moves = ends & (coming.count > 0)
  current, coming = jax.tree.map(
      lambda stay, move: jnp.where(moves, move, stay),
      (current, coming),
      (coming, no_logits(*coming.total.shape)),
  )
  return Server(seed, number + moves, current, coming)
