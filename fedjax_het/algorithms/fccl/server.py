"""FCCL's server: the last logits of every client on the public set."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.uploads import gather_uploads, keep_latest
from fedjax_het.engine.types import Maybe, Received


class Logits(NamedTuple):
  """FCCL's server state.

  Attributes:
    values: [num_clients, P, C] float32, Z_i(X) of each client's last upload.
    known: [num_clients] bool, whose upload has come.
  """

  values: jax.Array
  known: jax.Array


def no_logits(num_clients: int, num_public: int, num_classes: int) -> Logits:
  """No upload yet."""
  return Logits(
      jnp.zeros((num_clients, num_public, num_classes)),
      jnp.zeros(num_clients, bool),
  )


def sum_of_others(server: Logits, client_id) -> Maybe:
  """S_k for client k.

  Args:
    server: The server's state.
    client_id: [] int32, k.

  Returns:
    `Maybe` of [P, C] float32; not present if no other client has sent anything,
    when it is 0.
  """
  others = server.known & (jnp.arange(len(server.known)) != client_id)
  # S_k = sum_{i != k} Z_i(X). The sum of all minus Z_k would lose precision.
  total = jnp.sum(jnp.where(others[:, None, None], server.values, 0.0), axis=0)
  return Maybe(total, jnp.any(others))


def collect(server: Logits, received: Mapping[str, Received]) -> Logits:
  """Replaces the senders' logits by those received.

  Args:
    server: The server's state.
    received: {group: Received}; `kept` are logits [slots, P, C].

  Returns:
    The new state.
  """
  ids, values = gather_uploads(received)
  # Ids of padding slots are outside of the arrays.
  return keep_latest(server, ids, Logits(values, jnp.ones(len(ids), bool)))
