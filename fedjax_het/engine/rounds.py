"""One synchronous round of any algorithm, and what it measured."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine import mapping, placement
from fedjax_het.engine.balance import deal_groups, step_weights
from fedjax_het.engine.cohort import fetch, make_plan, store
from fedjax_het.engine.local import visit_steps
from fedjax_het.engine.traffic import Traffic, num_bytes
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Received,
  Turn,
)
from fedjax_het.engine.visits import client_key, make_visit, round_key


class State(NamedTuple):
  """All that a run carries from round to round.

  Attributes:
    round_num: [] int32, rounds done.
    server: The algorithm's server state.
    clients: {group name: client states stacked on a leading axis [K]}.
  """

  round_num: jax.Array
  server: Any
  clients: dict[str, Any]


class GroupReport(NamedTuple):
  """What a round measured in one group; leading axis = slots of the cohort.

  Attributes:
    client_id: [slots] int32, num_clients for padding slots.
    finite: [slots] bool, whether all that the client returned was finite.
    metrics: {name: [slots] float32} of the client updates.
    down: What was sent to each client.
    up: What each client sent.
  """

  client_id: jax.Array
  finite: jax.Array
  metrics: dict[str, jax.Array]
  down: Traffic
  up: Traffic


def init_state(
    algorithm: FederatedAlgorithm, federation: Federation, key, mesh=None
) -> State:
  """The state before the first round.

  Not compiled as a whole: models draw their blocks by small cached programs.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    key: A random key.
    mesh: The devices on which it is laid, each computing the clients' states
      that it holds; None for the default device.

  Returns:
    The state; all its clients are in place, whether they ever take part.
  """

  def make(group, ids):
    return jax.vmap(lambda i: algorithm.init_client(group, i, key))(ids)

  server = algorithm.init(key)
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


def state_shardings(federation: Federation, mesh) -> State:
  """Where a state lies on a mesh, a prefix of it."""
  everywhere = placement.everywhere(mesh)
  tables = placement.of_tables(federation, mesh)
  return State(everywhere, everywhere, tables)


def make_cohort_round(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    *,
    backend: str = 'auto',
    chunk: int | None = None,
    mesh=None,
    tables: bool = False,
) -> Callable[..., tuple[Any, dict[str, Any], dict[str, GroupReport]]]:
  """Builds a round between the clients' states going in and coming out.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    backend: How clients are mapped; see `mapping.map_clients`.
    chunk: Clients batched at once.
    mesh: Devices, for the backends that use several.
    tables: Whether the states that go in are those of all clients, of which
      each visit reads its row, instead of those of the shares.

  Returns:
    `run((round_num, server), shares, clients, data, key, deals=None) ->
    (server, updated, reports)` with `clients` {group: [slots, ...] or, with
    tables, [K, ...]} and `updated` {group: [slots, ...]}. With `deals`, of the
    backends of several devices, both have a row a place instead.
  """
  num_clients = federation.num_clients

  def load(shared, args):
    data = shared[1]
    return visit_steps(federation.local, data.sizes[args[0]])

  visits = {g.name: make_visit(algorithm, g) for g in federation.groups}

  def make_mapped(visit):
    def of_row(shared, arg):
      clients, shared = shared
      client_id, row = arg
      client = jax.tree.map(lambda leaf: leaf[row], clients)
      return visit(shared, (client_id, client))

    mapped = mapping.map_clients(
        jax.jit(of_row) if tables else visit,
        backend,
        chunk=chunk,
        mesh=mesh,
        load=load,
    )

    def call(shared, share, clients):
      if tables:
        return mapped(
            (clients, shared), (share.client_id, share.row), share.num_valid
        )
      return mapped(shared, (share.client_id, clients), share.num_valid)

    return call

  calls = {name: make_mapped(visit) for name, visit in visits.items()}

  def run_dealt(shared, shares, clients, deals):
    """All groups at once, each device its own clients."""
    args = {
        name: (shares[name].client_id[who.slot], clients[name])
        for name, who in deals.items()
    }
    num = {name: who.num for name, who in deals.items()}
    mapped = mapping.map_groups(visits, chunk, mesh)(shared, args, num)
    # The server's step is the same on all devices, and cut on none.
    everywhere = placement.everywhere(mesh)

    def collect(who, rest):
      return jax.lax.with_sharding_constraint(who.collect(rest), everywhere)

    return {
        name: (summed, (updated, *collect(deals[name], tuple(rest))))
        for name, (summed, (updated, *rest)) in mapped.items()
    }

  @jax.jit
  def finish(start, shares, results, data, key):
    """Lets the server do its step, and reports."""
    round_num, server = start
    received, reports, clients = {}, {}, {}
    for name, (summed, kept) in results.items():
      clients[name], kept, finite, metrics, down, up = kept
      ids, _, num_valid = shares[name]
      real = jnp.arange(len(ids)) < num_valid
      sender = jnp.where(real & finite, ids, num_clients)
      received[name] = Received(summed, kept, sender, jnp.zeros_like(sender))
      reports[name] = GroupReport(
          jnp.where(real, ids, num_clients), finite | ~real, metrics, down, up
      )
    # The server draws as a client that does not exist.
    server_key = client_key(key, round_num, num_clients)
    turn = Turn(round_num, server_key, data.of_public())
    server, _ = algorithm.server_update(server, received, turn)
    return server, clients, reports

  def run(start, shares, clients, data, key, deals=None):
    round_num, server = start
    cohort = jnp.zeros(num_clients, bool)
    for share in shares.values():
      real = jnp.arange(len(share.client_id)) < share.num_valid
      who = jnp.where(real, share.client_id, num_clients)
      cohort = cohort.at[who].set(True, mode='drop')
    shared = server, data, key, round_num, cohort
    if deals:
      results = run_dealt(shared, shares, clients, deals)
    else:
      results = {
          name: call(shared, shares[name], clients[name])
          for name, call in calls.items()
      }
    return finish(start, shares, results, data, key)

  return run


def make_round(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    *,
    cohort_size: int,
    backend: str = 'auto',
    chunk: int | None = None,
    mesh=None,
) -> Callable[..., tuple[State, dict[str, GroupReport]]]:
  """Builds the function that runs one round.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    cohort_size: Clients a round.
    backend: How clients are mapped; see `mapping.map_clients`.
    chunk: Clients batched at once.
    mesh: Devices, for the backends that use several.

  Returns:
    `run_round(state, data, key, sampling_key) -> (state, {group: report})`.
    With the traceable backends it is one compiled program whose `state` is
    donated; every group has a fixed number of slots, so it compiles once. With
    'shard_map' the state comes back as `state_shardings` says.

  Raises:
    ValueError: If the cohort is empty or larger than the population.
  """
  backend = mapping.resolve_backend(backend)
  if backend == 'shard_map':
    mesh = mapping.client_mesh() if mesh is None else mesh
    return _make_sharded_round(algorithm, federation, cohort_size, chunk, mesh)
  # One device reads a client's row when its turn comes.
  tables = backend not in mapping.ACROSS_DEVICES
  plan = jax.jit(make_plan(federation, cohort_size))
  run_cohort = make_cohort_round(
      algorithm,
      federation,
      backend=backend,
      chunk=chunk,
      mesh=mesh,
      tables=tables,
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
    server, updated, reports = run_cohort(
        state[:2], shares, clients, data, key
    )
    clients = store_all(state.clients, shares, updated)
    return State(state.round_num + 1, server, clients), reports

  if backend in mapping.TRACEABLE:
    return jax.jit(run_round, donate_argnums=0)
  return run_round


def _make_sharded_round(algorithm, federation, cohort_size, chunk, mesh):
  """`make_round` over a mesh; no device ever holds all clients' states."""
  plan = make_plan(federation, cohort_size)
  run_cohort = make_cohort_round(
      algorithm, federation, backend='shard_map', chunk=chunk, mesh=mesh
  )
  weights = step_weights(federation)

  def run_round(state: State, data: FederatedData, key, sampling_key):
    shares = plan(state.round_num, sampling_key)
    # In full on each device: one that had to ask others for its clients of a
    # group would wait until these have done theirs of the one before.
    deals = jax.lax.with_sharding_constraint(
        deal_groups(federation, weights, shares, data, mesh.devices.size),
        placement.everywhere(mesh),
    )
    rows, clients = {}, {}
    for name, who in deals.items():
      rows[name] = shares[name].row[who.slot]
      clients[name] = placement.take_rows(
          mesh, state.clients[name], rows[name], who.num
      )
    server, updated, reports = run_cohort(
        state[:2], shares, clients, data, key, deals
    )
    clients = {
        name: placement.put_rows(
            mesh, state.clients[name], rows[name], who.num, updated[name]
        )
        for name, who in deals.items()
    }
    return State(state.round_num + 1, server, clients), reports

  return jax.jit(
      run_round,
      donate_argnums=0,
      out_shardings=(
          state_shardings(federation, mesh),
          placement.everywhere(mesh),
      ),
  )


def make_rounds(run_round: Callable[..., Any], capacity: int, shardings=None):
  """Several rounds in one dispatch, so that none waits for the host.

  Args:
    run_round: What `make_round` or `make_async_round` gives, with a backend of
      `mapping.TRACEABLE`.
    capacity: The most rounds in a dispatch, R.
    shardings: Where the results of `run_round` lie, if it says so.

  Returns:
    `run_rounds(state, data, key, who, num) -> (state, reports)`: `who` is what
    `run_round` takes last, stacked for R rounds, of which the first `num` (int,
    may differ from call to call) are run; leaves of `reports` are [R, ...],
    zeros from `num` on. One compiled program; `state` is donated.
  """

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
  def run_rounds(state, data, key, who, num):
    def one(state, i):
      return run_round(state, data, key, jax.tree.map(lambda a: a[i], who))

    _, shapes = jax.eval_shape(one, state, 0)

    def body(i, carry):
      state, reports = carry
      state, now = one(state, i)
      reports = jax.tree.map(lambda a, new: a.at[i].set(new), reports, now)
      return state, reports

    reports = jax.tree.map(
        lambda s: jnp.zeros((capacity, *s.shape), s.dtype), shapes
    )
    return jax.lax.fori_loop(0, num, body, (state, reports))

  return run_rounds


def make_warm_up(
    algorithm: FederatedAlgorithm, federation: Federation, **options
) -> Callable[..., tuple[State, dict[str, GroupReport]]]:
  """Builds what all clients do before the first round.

  Args:
    algorithm: An algorithm with a `warm_up`.
    federation: The federation.
    **options: `backend`, `chunk`, `mesh` of `make_round`.

  Returns:
    `warm_up(state, data, key) -> (state, {group: report})`, to be called with
    the first state, which is donated; no round counts as done after it.
  """
  run_round = make_round(
      algorithm._replace(client_update=algorithm.warm_up),
      federation,
      cohort_size=federation.num_clients,
      **options,
  )

  def warm_up(state, data, key):
    # No round has this number, so no round draws what is drawn here.
    state, reports = run_round(state, data, round_key(key, 2**31 - 1), key)
    return state._replace(round_num=jnp.int32(0)), reports

  return warm_up


def round_bytes(report: GroupReport, num_clients: int) -> tuple[int, int]:
  """Total bytes (down, up) that one group exchanged in a round.

  Args:
    report: The group's report.
    num_clients: Size of the population, which marks padding slots.

  Returns:
    Two integers.
  """
  real = np.asarray(report.client_id) < num_clients
  down, up = num_bytes(report.down), num_bytes(report.up)
  return int(down[real].sum()), int(up[real].sum())
