"""Clients' states in the host's memory, brought to the device for a round.

What clients keep between their visits then needs no device memory but for the
cohort's rows, twice: those of the next cohort are brought while a round runs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine import mapping
from fedjax_het.engine.cohort import make_plan
from fedjax_het.engine.rounds import GroupReport, State, make_cohort_round
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Group

# Clients whose first states are made at once.
_CHUNK = 256


def init_streamed_state(
    algorithm: FederatedAlgorithm, federation: Federation, key
) -> State:
  """The state before the first round, with the clients' part as numpy arrays.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    key: A random key.

  Returns:
    The numbers of `rounds.init_state`.
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
      algorithm.init(key),
      {group.name: table(group) for group in federation.groups},
  )


def _write(table: np.ndarray, rows, new) -> None:
  table[rows] = new


def take(clients, rows: np.ndarray):
  """Rows of a group's table of numpy arrays, on the device."""
  return jax.device_put(jax.tree.map(lambda table: table[rows], clients))


def _overlap(before, after) -> np.ndarray:
  """Slots of clients that are in two shares, [slots of `after`] int32.

  For each slot of `after` the slot of `before` with the same client, or the
  number of slots of `before`, which is none.
  """
  none = len(before.row)
  slot_of = dict(zip(before.row[: before.num_valid].tolist(), range(none)))
  real = after.row[: after.num_valid].tolist()
  slots = [slot_of.get(row, none) for row in real]
  return np.array(slots + [none] * (len(after.row) - len(real)), np.int32)


@jax.jit
def _patch(rows, slots, updated):
  """`rows` with those replaced that a round has updated since."""

  def one(old, new):
    found = (slots < len(new)).reshape((-1,) + (1,) * (new.ndim - 1))
    return jnp.where(found, new.at[slots].get(mode='clip'), old)

  return jax.tree.map(one, rows, updated)


def make_streamed_round(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    *,
    cohort_size: int,
    backend: str = 'auto',
    chunk: int | None = None,
    mesh=None,
) -> Callable[..., tuple[State, dict[str, GroupReport]]]:
  """Builds a round whose clients' states lie in the host's memory.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    cohort_size: Clients a round.
    backend: How clients are mapped; see `mapping.map_clients`.
    chunk: Clients batched at once.
    mesh: Devices, for the backends that use several.

  Returns:
    `run_round(state, data, key, sampling_key) -> (state, {group: report})`
    for states of `init_streamed_state`. The tables are written in place and
    the server's state is donated; the results are those of `make_round`.

  Raises:
    ValueError: If the cohort is empty or larger than the population.
  """
  backend = mapping.resolve_backend(backend)
  plan = jax.jit(make_plan(federation, cohort_size))
  run_cohort = make_cohort_round(
      algorithm, federation, backend=backend, chunk=chunk, mesh=mesh
  )

  def run(server, clients, round_num, shares, data, key):
    return run_cohort((round_num, server), shares, clients, data, key)

  if backend in mapping.TRACEABLE:
    run = jax.jit(run, donate_argnums=(0, 1))

  def bring(tables, round_num: int, sampling_key):
    shares = jax.device_get(plan(jnp.int32(round_num), sampling_key))
    return shares, {
        name: take(tables[name], share.row) for name, share in shares.items()
    }

  # The tables and number of the next round, its shares and its rows.
  ahead: list[Any] = [None, None, None]

  def run_round(state: State, data: FederatedData, key, sampling_key):
    tables, number = state.clients, int(state.round_num)
    if ahead[0] is tables and ahead[1] == number:
      shares, rows = ahead[2]
    else:
      shares, rows = bring(tables, number, sampling_key)
    server, updated, reports = run(
        state.server,
        rows,
        jnp.int32(number),
        jax.device_put(shares),
        data,
        key,
    )
    # While the device works: what the next round will need.
    coming, rows = bring(tables, number + 1, sampling_key)
    for name, share in shares.items():
      slots = jnp.asarray(_overlap(share, coming[name]))
      rows[name] = _patch(rows[name], slots, updated[name])
    for name, share in shares.items():
      real = slice(int(share.num_valid))
      jax.tree.map(
          lambda table, new, rows=share.row[real], real=real: _write(
              table, rows, np.asarray(new)[real]
          ),
          tables[name],
          updated[name],
      )
    ahead[:] = tables, number + 1, (coming, rows)
    return State(np.int32(number + 1), server, tables), reports

  return run_round
