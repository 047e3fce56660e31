"""One client's visit, from downlink to uplink, as a pure function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine.traffic import full_bytes, measure
from fedjax_het.engine.types import FederatedAlgorithm, Group, Visit


def round_key(key, round_num):
  """The key of one round."""
  return jax.random.fold_in(key, round_num)


def client_key(key, round_num, client_id):
  """A client's key: follows its identity, not its place in a cohort."""
  return jax.random.fold_in(round_key(key, round_num), client_id)


def visit_pair(key, round_num, client_id, turn=0) -> tuple[Visit, Visit]:
  """A client's turn as its downlink sees it, and as its training does."""
  keys = jax.random.split(client_key(key, round_num, client_id))
  return (
      Visit(client_id, round_num, keys[0], turn),
      Visit(client_id, round_num, keys[1], turn),
  )


def all_finite(tree) -> jax.Array:
  """[] bool: whether no floating-point leaf holds NaN or infinity."""
  checks = [
      jnp.all(jnp.isfinite(leaf))
      for leaf in jax.tree.leaves(tree)
      if jnp.issubdtype(leaf.dtype, jnp.inexact)
  ]
  return jnp.all(jnp.stack(checks)) if checks else jnp.bool_(True)


def make_training(
    algorithm: FederatedAlgorithm, group: Group
) -> Callable[..., Any]:
  """What a client does with what it was sent, as a pure function.

  Args:
    algorithm: The algorithm.
    group: The client's group.

  Returns:
    `train(client, sent, data, visit) -> (summed, (client, kept, finite,
    metrics, down, up))`, `data` being the client's own. An update that is not
    finite is replaced by zeros, in the sums and in what is kept apart, and
    leaves the client as it was.
  """

  def train(client, sent, data, visit):
    updated, uplink, metrics = algorithm.client_update(
        group, client, sent, data, visit
    )
    finite = all_finite((updated, uplink))

    def keep(new, old):
      return jnp.where(finite, new, old)

    updated = jax.tree.map(keep, updated, client)
    # In what is kept, too: zero times NaN is NaN, and an upload in flight is
    # part of the state.
    summed, kept = jax.tree.map(
        lambda s: keep(s, jnp.zeros_like(s)), (uplink.summed, uplink.kept)
    )
    return summed, (
        updated,
        kept,
        finite,
        jax.tree.map(jnp.float32, metrics),
        measure(sent),
        measure(uplink),
    )

  return train


def make_visit(
    algorithm: FederatedAlgorithm, group: Group
) -> Callable[..., Any]:
  """One client's whole visit, from downlink to uplink, as a pure function.

  Args:
    algorithm: The algorithm.
    group: The client's group.

  Returns:
    `visit((server, data, key, round_num, cohort), (client_id, client)) ->
    (summed, (client, kept, finite, metrics, down, up))`, as `make_training`;
    `cohort` is [num_clients] bool, whether it takes part in the round.
  """
  train = make_training(algorithm, group)

  def visit(shared, arg):
    server, data, key, round_num, cohort = shared
    client_id, client = arg
    before = jnp.arange(len(cohort)) < client_id
    turn = round_num * jnp.sum(cohort) + jnp.sum(cohort & before)
    down, up = visit_pair(key, round_num, client_id, turn)
    sent = algorithm.downlink(server, group, down)
    return train(client, sent, data.client(client_id), up)

  # Jitted, so that it is traced once however often the mapping calls it.
  return jax.jit(visit)


def message_bytes(
    algorithm: FederatedAlgorithm,
    group: Group,
    data: FederatedData,
) -> tuple[int, int]:
  """Bytes (down, up) of one visit, all optional parts counted in full.

  Nothing is computed.

  Args:
    algorithm: The algorithm.
    group: The client's group.
    data: All clients' examples.

  Returns:
    Two integers.
  """

  def messages(data, key):
    client_id = jnp.int32(group.client_ids[0])
    down, up = visit_pair(key, jnp.int32(0), client_id)
    sent = algorithm.downlink(algorithm.init(key), group, down)
    _, uplink, _ = algorithm.client_update(
        group,
        algorithm.init_client(group, client_id, key),
        sent,
        data.client(client_id),
        up,
    )
    return sent, uplink

  sent, uplink = jax.eval_shape(messages, data, jax.random.key(0))
  return full_bytes(sent), full_bytes(uplink)
