"""Synchronous rounds of any algorithm."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine import placement
from fedjax_het.engine.balance import assign_cohort, step_costs
from fedjax_het.engine.cohort import fetch, make_plan, store
from fedjax_het.engine.cohort_round import make_cohort_round
from fedjax_het.engine.mapping import ACROSS_DEVICES, Backend
from fedjax_het.engine.reports import GroupReport, RoundReport
from fedjax_het.engine.rows import put_row
from fedjax_het.engine.traffic import num_bytes
from fedjax_het.engine.types import FederatedAlgorithm, Federation
from fedjax_het.engine.visits import round_key
from fedjax_het.options import at_least


class State(NamedTuple):
  """State of a run.

  Attributes:
    round_num: [] int32, rounds done.
    server: The algorithm's server state.
    clients: {group name: client states stacked on a leading axis [K]}.
  """

  round_num: jax.Array
  server: Any
  clients: dict[str, Any]


def init_state(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    key: jax.Array,
    mesh: jax.sharding.Mesh | None = None,
) -> State:
  """The state before the first round.

  It is not compiled as a whole, because models initialise their blocks by small
  cached programs.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    key: A random key.
    mesh: Devices over which the state is sharded, see `state_shardings`;
      each computes its own clients' states. None for the default device.

  Returns:
    The state, with all clients of the federation.
  """

  def make(group, ids):
    init = jax.vmap(lambda i: algorithm.init_client(group, i, key))
    return unshared(init(ids))

  server = unshared(algorithm.init(key))
  if mesh is None:
    clients = {
        group.name: make(group, jnp.asarray(group.client_ids))
        for group in federation.groups
    }
    return State(jnp.int32(0), server, clients)
  tables = placement.of_tables(federation, mesh)
  start = np.int32(0), server
  return State(
      *placement.put(start, placement.everywhere(mesh)),
      {
          group.name: placement.build(
              lambda ids, group=group: make(group, jnp.asarray(ids)),
              group.client_ids,
              tables[group.name],
          )
          for group in federation.groups
      },
  )


def unshared(tree: Any) -> Any:
  """The tree with a copy of every array that was in it before.

  A round donates its state, and no buffer can be donated twice.

  Args:
    tree: A tree of arrays, such as one that names an array of zeros twice.

  Returns:
    A tree of the same values.
  """
  seen = set()

  def own(leaf):
    if id(leaf) in seen:
      return jnp.copy(leaf)
    seen.add(id(leaf))
    return leaf

  return jax.tree.map(own, tree)


def state_shardings(federation: Federation, mesh) -> State:
  """Shardings of a state over a mesh, as a prefix of it."""
  everywhere = placement.everywhere(mesh)
  tables = placement.of_tables(federation, mesh)
  return State(everywhere, everywhere, tables)


def make_round(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    *,
    cohort_size: int,
    backend: str | Backend = 'auto',
) -> Callable[..., tuple[State, RoundReport]]:
  """Builds the function that runs one round.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    cohort_size: Clients a round.
    backend: How clients are mapped: a `Backend`, or the name of one.

  Returns:
    `run_round(state, data, key, sampling_key) -> (state, report)`, where the
    report maps each group to its `GroupReport`. With the traceable backends it
    is one compiled program, which donates `state`; every group has a fixed
    number of slots, so that it compiles once. With 'shard_map' the new state
    is sharded as by `state_shardings`.

  Raises:
    ValueError: If the cohort is empty or larger than the population.
  """
  backend = Backend.of(backend)
  if backend.kind == 'shard_map':
    return _make_sharded_round(algorithm, federation, cohort_size, backend)
  # On one device each visit reads its row of the tables.
  tables = backend.kind not in ACROSS_DEVICES
  plan = jax.jit(make_plan(federation, cohort_size))
  run_cohort = make_cohort_round(
      algorithm, federation, backend=backend, tables=tables
  )

  @jax.jit
  def fetch_all(clients, shares):
    return {name: fetch(clients[name], shares[name]) for name in clients}

  @jax.jit
  def store_all(clients, shares, updated):
    return {
        name: store(clients[name], shares[name], updated[name])
        for name in clients
    }

  def run_round(state: State, data: FederatedData, key, sampling_key):
    shares = plan(state.round_num, sampling_key)
    clients = state.clients if tables else fetch_all(state.clients, shares)
    server, updated, report = run_cohort(state[:2], shares, clients, data, key)
    clients = store_all(state.clients, shares, updated)
    return State(state.round_num + 1, server, clients), report

  if backend.traceable:
    return jax.jit(run_round, donate_argnums=0)
  return run_round


def _make_sharded_round(algorithm, federation, cohort_size, backend: Backend):
  """`make_round` over a mesh, with client states as `placement` shards them."""
  mesh = backend.mesh
  plan = make_plan(federation, cohort_size)
  run_cohort = make_cohort_round(algorithm, federation, backend=backend)
  costs = step_costs(federation)

  def run_round(state: State, data: FederatedData, key, sampling_key):
    shares = plan(state.round_num, sampling_key)
    # Replicate the assignment; otherwise a device blocks on the previous group.
    assigned = jax.lax.with_sharding_constraint(
        assign_cohort(federation, costs, shares, data, mesh.devices.size),
        placement.everywhere(mesh),
    )
    rows, clients = {}, {}
    for name, who in assigned.items():
      rows[name] = shares[name].row[who.slot]
      clients[name] = placement.take_rows(
          mesh, state.clients[name], rows[name]
      )
    server, updated, report = run_cohort(
        state[:2], shares, clients, data, key, assigned
    )
    clients = {
        name: placement.put_rows(
            mesh, state.clients[name], rows[name], who.num, updated[name]
        )
        for name, who in assigned.items()
    }
    return State(state.round_num + 1, server, clients), report

  return jax.jit(
      run_round,
      donate_argnums=0,
      out_shardings=(
          state_shardings(federation, mesh),
          placement.everywhere(mesh),
      ),
  )


def make_rounds(
    run_round: Callable[..., Any], capacity: int, shardings: Any = None
) -> Callable[..., Any]:
  """Runs several rounds in one dispatch, without waiting for the host.

  Args:
    run_round: From `make_round` or `make_async_round`, with a traceable
      backend.
    capacity: The most rounds in a dispatch, R.
    shardings: Shardings of the results of `run_round`; None for the default.

  Returns:
    `run_rounds(state, data, key, who, num) -> (state, reports)`. `who` holds
    the last argument of `run_round` for R rounds, stacked; the first `num`
    (int, may differ from call to call) of these are run. Leaves of `reports`
    are [R, ...], zeros from `num` on. It is one compiled program, which donates
    `state`.

  Raises:
    ValueError: If `capacity` is not a positive integer.
  """
  at_least(1, capacity=capacity)

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
  def run_rounds(state, data, key, who, num):
    def one(state, i):
      return run_round(state, data, key, jax.tree.map(lambda a: a[i], who))

    _, shapes = jax.eval_shape(one, state, 0)

    def body(i, carry):
      state, reports = carry
      state, now = one(state, i)
      reports = put_row(reports, i, now)
      return state, reports

    reports = jax.tree.map(
        lambda s: jnp.zeros((capacity, *s.shape), s.dtype), shapes
    )
    return jax.lax.fori_loop(0, num, body, (state, reports))

  return run_rounds


def make_warm_up(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    *,
    backend: str | Backend = 'auto',
) -> Callable[..., tuple[State, RoundReport]]:
  """Builds the warm-up of all clients before the first round.

  Args:
    algorithm: An algorithm with a `warm_up`.
    federation: The federation.
    backend: How clients are mapped: a `Backend`, or the name of one.

  Returns:
    `warm_up(state, data, key) -> (state, report)` for the first state, which
    is donated. The new state's `round_num` is 0.
  """
  run_round = make_round(
      algorithm._replace(client_update=algorithm.warm_up),
      federation,
      cohort_size=federation.num_clients,
      backend=backend,
  )

  def warm_up(state, data, key):
    # No round has this number, so that no round draws from the same key.
    state, report = run_round(state, data, round_key(key, 2**31 - 1), key)
    return state._replace(round_num=jnp.int32(0)), report

  return warm_up


def round_bytes(report: GroupReport, num_clients: int) -> tuple[int, int]:
  """Total bytes (down, up) of one group's messages in a round.

  Args:
    report: The group's report.
    num_clients: Size of the population, which marks padding slots.

  Returns:
    Two integers.
  """
  real = np.asarray(report.client_id) < num_clients
  down, up = num_bytes(report.down), num_bytes(report.up)
  return int(down[real].sum()), int(up[real].sum())
