"""Rounds whose client states are stored in host memory.

The device holds only the rows of two cohorts: that of the running round, and
that of the next one, which is copied to the device meanwhile.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine import placement
from fedjax_het.engine.cohort import make_plan
from fedjax_het.engine.cohort_round import make_cohort_round
from fedjax_het.engine.mapping import Backend
from fedjax_het.engine.reports import RoundReport
from fedjax_het.engine.rounds import State, unshared
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Group

# Clients whose first states are computed at once.
_CHUNK = 256
# Rows in one call of the function in `run_rows`, for tables in host memory.
_CALL = 64


def init_streamed_state(
    algorithm: FederatedAlgorithm, federation: Federation, key: jax.Array
) -> State:
  """The state before the first round, with client states as numpy arrays.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    key: A random key.

  Returns:
    The state, with the same values as that of `rounds.init_state`.
  """

  def table(group: Group):
    make = jax.vmap(lambda i: algorithm.init_client(group, i, key))
    ids = group.client_ids
    shapes = jax.eval_shape(make, jnp.asarray(ids))
    out = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)
    for begin in range(0, len(ids), _CHUNK):
      rows = slice(begin, begin + _CHUNK)
      part = jax.device_get(make(jnp.asarray(ids[rows])))
      jax.tree.map(lambda all_, new, r=rows: _write(all_, r, new), out, part)
    return out

  return State(
      np.int32(0),
      unshared(algorithm.init(key)),
      {group.name: table(group) for group in federation.groups},
  )


def _write(table: np.ndarray, rows, new) -> None:
  table[rows] = new


def take(clients, rows: np.ndarray):
  """Copies rows of a group's numpy tables to the device."""
  return jax.device_put(jax.tree.map(lambda table: table[rows], clients))


def run_rows(run, clients, rows: np.ndarray, *others: np.ndarray):
  """Calls a function on rows of client states, in device or host memory.

  Args:
    run: `(clients, rows [n], *others [n]) -> tree` of [n, ...].
    clients: A group's table of states: jax arrays, or numpy arrays in host
      memory, which are copied to the device some rows at a time.
    rows: [E] int, rows of the table.
    *others: [E], further arguments of the function, one for each row.

  Returns:
    The tree of [E, ...].
  """
  if not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(clients)):
    return run(clients, *map(jnp.asarray, (rows, *others)))
  size = min(_CALL, len(rows))
  parts = []
  for begin in range(0, len(rows), size):
    # The last chunk is padded to avoid another compilation.
    mine, *more = (
        np.resize(a[begin : begin + size], size) for a in (rows, *others)
    )
    part = run(take(clients, mine), jnp.arange(size), *map(jnp.asarray, more))
    parts.append(jax.tree.map(np.asarray, part))
  return jax.tree.map(lambda *a: np.concatenate(a)[: len(rows)], *parts)


def _overlap(before, after) -> np.ndarray:
  """The slots of one share's clients in an earlier share.

  [slots of `after`] int32: the slot of `before` that holds the same client, or
  the number of slots of `before` if none does.
  """
  none = len(before.row)
  slot_of = dict(zip(before.row[: before.num_valid].tolist(), range(none)))
  real = after.row[: after.num_valid].tolist()
  slots = [slot_of.get(row, none) for row in real]
  return np.array(slots + [none] * (len(after.row) - len(real)), np.int32)


@jax.jit
def _patch(rows, slots, updated):
  """Replaces those of `rows` that the last round has updated."""

  def one(old, new):
    found = (slots < len(new)).reshape((-1,) + (1,) * (new.ndim - 1))
    return jnp.where(found, new.at[slots].get(mode='clip'), old)

  return jax.tree.map(one, rows, updated)


def make_streamed_round(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    *,
    cohort_size: int,
    backend: str | Backend = 'auto',
) -> Callable[..., tuple[State, RoundReport]]:
  """Builds a round whose client states are stored in host memory.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    cohort_size: Clients a round.
    backend: How clients are mapped: a `Backend`, or the name of one.

  Returns:
    `run_round(state, data, key, sampling_key) -> (state, report)` for states
    of `init_streamed_state`. The client states are written in place and the
    server's state is donated; the results are those of `make_round`. The next
    round's states are copied meanwhile if it gets the same key object.

  Raises:
    ValueError: If the cohort is empty or larger than the population.
  """
  backend = Backend.of(backend)
  plan = jax.jit(make_plan(federation, cohort_size))
  run_cohort = make_cohort_round(algorithm, federation, backend=backend)

  def run(server, clients, round_num, shares, data, key):
    return run_cohort((round_num, server), shares, clients, data, key)

  if backend.traceable:
    run = jax.jit(run, donate_argnums=(0, 1))

  def place(tree):
    """Puts values where the results of a round are, so it compiles once."""
    if backend.state_mesh is None:
      return tree
    return placement.put(tree, placement.everywhere(backend.state_mesh))

  def load(tables, shares):
    """The rows of a cohort's clients, on the device."""
    return {
        name: place(take(tables[name], share.row))
        for name, share in shares.items()
    }

  # (tables, sampling key, number of the next round, its shares and rows),
  # prefetched by the last call.
  ahead: list[Any] = [None, None, None, None]

  def run_round(state: State, data: FederatedData, key, sampling_key):
    tables, number = state.clients, int(state.round_num)
    if (
        ahead[0] is tables
        and ahead[1] is sampling_key
        and ahead[2] == number
    ):
      shares, rows = ahead[3]
    else:
      shares = jax.device_get(plan(jnp.int32(number), sampling_key))
      rows = load(tables, shares)
    # Called before the round: programs run in the order of their calls.
    coming = plan(jnp.int32(number + 1), sampling_key)
    server, updated, report = run(
        place(state.server),
        rows,
        jnp.int32(number),
        jax.device_put(shares),
        data,
        key,
    )
    # Prefetch the next round's rows while the device computes.
    coming = jax.device_get(coming)
    rows = load(tables, coming)
    for name, share in shares.items():
      slots = jnp.asarray(_overlap(share, coming[name]))
      rows[name] = _patch(rows[name], slots, updated[name])
    for name, share in shares.items():
      _write_back(tables[name], share, updated[name])
    ahead[:] = tables, sampling_key, number + 1, (coming, rows)
    return State(np.int32(number + 1), server, tables), report

  return run_round


def _write_back(tables, share, updated) -> None:
  """Writes a share's updated rows into its group's tables."""
  real = slice(int(share.num_valid))
  jax.tree.map(
      lambda table, new: _write(table, share.row[real], np.asarray(new)[real]),
      tables,
      updated,
  )
