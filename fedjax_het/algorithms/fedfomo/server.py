"""FedFomo's server state, and the choice of the models that it sends."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.aggregation.sharing import Sharing
from fedjax_het.engine.types import Federation, Maybe
from fedjax_het.models.blocks import Variables


class Server(NamedTuple):
  """The server's state, for N clients.

  Attributes:
    models: theta_n, `Variables` by shared key. A leaf has one row for each
      client that owns the block, in the order of their ids.
    sent: [N] bool, who has sent a model.
    affinity: [N, N] float32, P; row i belongs to the receiver i.
    donors: [N, M] int32, the clients whose models each client receives next; N
      for padding.
    data: All clients' examples during evaluation; else None.
  """

  models: Variables
  sent: jax.Array
  affinity: jax.Array
  donors: jax.Array
  data: Any = None


class Tables(NamedTuple):
  """The row of each client id in `Server.models`: {key: [N + 1] int32}.

  A client without the block, and the id N, map to the row after the last.
  """

  params: Mapping[str, np.ndarray]
  stats: Mapping[str, np.ndarray]


def make_tables(federation: Federation, sharing: Sharing) -> Tables:
  """The tables of all blocks that travel by `sharing`."""

  def rows(stats):
    owners = {}
    for group in federation.groups:
      for key in sharing.keys(group, stats).values():
        owners.setdefault(key, []).extend(group.client_ids.tolist())
    found = {}
    for key, ids in owners.items():
      found[key] = np.full(federation.num_clients + 1, len(ids), np.int32)
      found[key][np.sort(ids)] = np.arange(len(ids))
    return found

  return Tables(rows(False), rows(True))


def empty_models(federation: Federation, sharing: Sharing, tables: Tables):
  """`Server.models` before the first upload: zeros."""
  found = Variables({}, {})
  for group in federation.groups:
    shared, _ = sharing.split(group, group.model.abstract_variables)
    for mine, part, rows in zip(found, shared, tables, strict=True):
      for key, tree in part.items():
        num = rows[key][-1]
        mine[key] = jax.tree.map(
            lambda s, num=num: jnp.zeros((num, *s.shape), s.dtype), tree
        )
  return found


def take(part, rows, ids):
  """{key: Maybe}: the models of the clients `ids`, [M] int32.

  Args:
    part: {key: tree}, the parameters or the statistics of `Server.models`.
    rows: The same part of the tables.
    ids: The clients; one that does not own a block is not present there.
  """

  def one(key, tree):
    row = jnp.asarray(rows[key])[ids]
    value = jax.tree.map(lambda a: a.at[row].get(mode='clip'), tree)
    return Maybe(value, row < rows[key][-1])

  return {key: one(key, tree) for key, tree in part.items()}


def put(part, rows, ids, new):
  """`part` with the rows of `ids` set to `new`, leaves [slots, ...]."""

  def one(key, tree):
    row = jnp.asarray(rows[key])[ids]
    return jax.tree.map(
        lambda a, b: a.at[row].set(b, mode='drop'), part[key], tree
    )

  return {**part, **{key: one(key, tree) for key, tree in new.items()}}


def partners(tables: Tables, num_clients: int) -> np.ndarray:
  """[N, N] bool: whether two different clients share a block."""
  together = np.zeros((num_clients, num_clients), bool)
  for rows in tables.params.values():
    owns = rows[:-1] < rows[-1]
    together |= owns[:, None] & owns
  return together & ~np.eye(num_clients, dtype=bool)


def draw_donors(key, free, affinity, epsilon, num: int) -> jax.Array:
  """Draws the clients whose models each client receives.

  Args:
    key: A random key.
    free: [N, N] bool, whether client n (column) has a model for client i.
    affinity: [N, N], P.
    epsilon: [] float32, probability that a donor is a random client.
    num: M.

  Returns:
    [N, M] int32, distinct client ids; N for padding.
  """
  total = len(free)

  def of_one(i, free, row):
    keys = jax.random.split(jax.random.fold_in(key, i), 3)
    random = jax.random.permutation(keys[0], total)
    # Rank by P[i], ties in random order.
    order = jnp.lexsort((jax.random.uniform(keys[1], (total,)), row))
    greedy = jnp.zeros_like(random).at[order].set(jnp.arange(total))

    def place(free, explores):
      score = jnp.where(free, jnp.where(explores, random, greedy), -1)
      best = jnp.argmax(score)
      donor = jnp.where(free[best], best, total)
      return free.at[best].set(False), donor.astype(jnp.int32)

    explores = jax.random.uniform(keys[2], (num,)) < epsilon
    return jax.lax.scan(place, free, explores)[1]

  return jax.vmap(of_one)(jnp.arange(total), free, affinity)
