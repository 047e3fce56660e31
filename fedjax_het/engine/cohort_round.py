"""A round of one cohort, from given client states to updated ones."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.engine import placement
from fedjax_het.engine.local import visit_steps
from fedjax_het.engine.mapping import Backend, map_clients, map_groups
from fedjax_het.engine.reports import GroupReport, RoundReport
from fedjax_het.engine.rows import take_row
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Received
from fedjax_het.engine.visits import (
  NO_CLIENT,
  check_data,
  make_visit,
  server_turn,
)


def make_cohort_round(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    *,
    backend: str | Backend = 'auto',
    tables: bool = False,
) -> Callable[..., tuple[Any, dict[str, Any], RoundReport]]:
  """Builds the function that runs a round of a given cohort.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    backend: How clients are mapped: a `Backend`, or the name of one.
    tables: Whether the input states are those of all clients, from which each
      visit reads its row. Otherwise they are those of the cohort's slots.

  Returns:
    `run((round_num, server), shares, clients, data, key, assigned=None) ->
    (server, updated, report)` with `clients` {group: [slots, ...] or, with
    tables, [K, ...]} and `updated` {group: [slots, ...]}. With `assigned`
    {group: Assignment}, for the backend 'shard_map', the rows of `clients` and
    `updated` are places on devices instead of slots.
  """
  backend = Backend.of(backend)
  visits = {g.name: make_visit(algorithm, g) for g in federation.groups}
  map_group = _map_tables if tables else _map_shares
  mapped = {
      name: map_group(visit, federation, backend)
      for name, visit in visits.items()
  }
  finish = jax.jit(_make_finish(algorithm, federation))

  def run(start, shares, clients, data, key, assigned=None):
    check_data(federation, data)
    round_num, server = start
    cohort = _cohort_ids(shares)
    shared = server, data, key, round_num, cohort
    if assigned:
      results = _run_assigned(
          visits, backend, shared, shares, clients, assigned
      )
    else:
      results = {
          name: call(shared, shares[name], clients[name])
          for name, call in mapped.items()
      }
    return finish(start, shares, results, data, key)

  return run


def _cohort_ids(shares):
  """[slots of all groups] int32, the cohort's ids; NO_CLIENT for padding."""
  ids = [
      jnp.where(
          jnp.arange(len(share.client_id)) < share.num_valid,
          share.client_id,
          NO_CLIENT,
      )
      for share in shares.values()
  ]
  return jnp.concatenate(ids)


def _map_shares(visit, federation: Federation, backend: Backend):
  """Maps a group's visits, given the states of the cohort's slots."""

  def load(shared, args):
    data = shared[1]
    return visit_steps(federation.local, data.sizes[args[0]])

  mapped = map_clients(visit, backend, load=load)

  def call(shared, share, clients):
    return mapped(shared, (share.client_id, clients), share.num_valid)

  return call


def _map_tables(visit, federation: Federation, backend: Backend):
  """Maps a group's visits, given all clients' states; for one device."""
  del federation  # Nothing is assigned to devices.

  @jax.jit
  def of_row(shared, arg):
    clients, shared = shared
    client_id, row = arg
    return visit(shared, (client_id, take_row(clients, row)))

  mapped = map_clients(of_row, backend)

  def call(shared, share, clients):
    return mapped(
        (clients, shared), (share.client_id, share.row), share.num_valid
    )

  return call


def _run_assigned(visits, backend: Backend, shared, shares, clients, assigned):
  """Runs the visits of all groups at once, each device its own clients."""
  args = {
      name: (shares[name].client_id[who.slot], clients[name])
      for name, who in assigned.items()
  }
  num = {name: who.num for name, who in assigned.items()}
  mapped = map_groups(visits, backend)(shared, args, num)
  # Every device runs the whole server step, so it needs all results.
  everywhere = placement.everywhere(backend.mesh)

  def collect(who, rest):
    return jax.lax.with_sharding_constraint(who.collect(rest), everywhere)

  return {
      name: (summed, (updated, *collect(assigned[name], tuple(rest))))
      for name, (summed, (updated, *rest)) in mapped.items()
  }


def _make_finish(algorithm: FederatedAlgorithm, federation: Federation):
  """Builds the function that updates the server and reports the round."""
  num_clients = federation.num_clients

  def finish(start, shares, results, data, key):
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
    server, metrics, finite = server_turn(
        algorithm,
        server,
        received,
        data,
        key,
        round_num=round_num,
        update=round_num,
        num_clients=num_clients,
    )
    return server, clients, RoundReport(reports, metrics, finite)

  return finish
