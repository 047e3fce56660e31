"""Asynchronous rounds: the server updates its state with every upload.

A round is a fixed number of accepted uploads. Its events come from a schedule
(`engine.clock`, `engine.events`); this module runs them in one compiled
program. For each upload, in order:

  every client that downloads before it   stores downlink(server)
  if its sender has not trained yet       all clients that have downloaded
                                          train, in one batch a group (a wave)
  the upload                              server_update with this uplink alone

A client trains on what it has downloaded, so it may train at any time between
its download and its upload; its results take effect at the upload.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine import mapping, placement
from fedjax_het.engine.events import Events
from fedjax_het.engine.local import visit_steps
from fedjax_het.engine.mapping import Backend
from fedjax_het.engine.reports import GroupReport, RoundReport
from fedjax_het.engine.rounds import State
from fedjax_het.engine.rows import put_row, put_rows, take_row
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Group,
  Received,
)
from fedjax_het.engine.visits import (
  check_data,
  make_training,
  server_turn,
  visit_pair,
)
from fedjax_het.options import at_least


class Flight(NamedTuple):
  """Messages in flight between a group's clients and the server.

  Every leaf is [K, ...].

  Attributes:
    sent: The last downlink of each client.
    round_num: int32, the round of that downlink.
    result: The result of its training, see `make_training`; its upload may
      still be pending.
  """

  sent: Any
  round_num: jax.Array
  result: Any


class AsyncState(NamedTuple):
  """State of an asynchronous run.

  Attributes:
    round_num: [] int32, rounds done.
    server: The algorithm's server state.
    clients: {group name: client states stacked on a leading axis [K]}, as of
      each client's last upload.
    flight: {group name: Flight}.
  """

  round_num: jax.Array
  server: Any
  clients: dict[str, Any]
  flight: dict[str, Flight]


def init_async_state(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    state: State,
    data: FederatedData,
) -> AsyncState:
  """The initial state, before any download.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    state: From `init_state`, maybe after the warm-up.
    data: All clients' examples; only their shapes are used.

  Returns:
    The state.
  """

  def one(group: Group, server, clients, data):
    """The `Flight` of one client."""
    client_id = jnp.int32(group.client_ids[0])
    zero = jnp.int32(0)
    down, up = visit_pair(jax.random.key(0), zero, client_id, zero)
    sent = algorithm.downlink(server, group, down)
    client = jax.tree.map(lambda leaf: leaf[0], clients)
    train = make_training(algorithm, group)
    result = train(client, sent, data.client(client_id), up)
    return Flight(sent, up.round_num, result)

  flight = {}
  for group in federation.groups:
    shapes = jax.eval_shape(
        lambda *args, group=group: one(group, *args),
        state.server,
        state.clients[group.name],
        data,
    )
    flight[group.name] = jax.tree.map(
        lambda s, k=group.num_clients: jnp.zeros((k, *s.shape), s.dtype), shapes
    )
  return AsyncState(state.round_num, state.server, state.clients, flight)


def make_async_round(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    *,
    cohort_size: int,
    backend: str | Backend = 'auto',
) -> Callable[..., tuple[AsyncState, RoundReport]]:
  """Builds the function that runs one asynchronous round.

  In a client's `Visit`, `round_num` is the round of its download; the key is
  derived from the number of its earlier visits and its id. `Received` has one
  slot for each group, which is padding in all groups but the sender's.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    cohort_size: Uploads a round, m.
    backend: How the clients of a wave are mapped: a traceable `Backend`, or the
      name of one. 'vmap' computes whole chunks, even for a small wave. With
      'shard_map' the state is replicated, and only the training of a wave is
      divided over the devices.

  Returns:
    `run_round(state, data, key, events) -> (state, report)`, one compiled
    program, which donates `state`. `events` are those of the state's round,
    from `lay_out` or `round_events`. Upload i is in slot i of the report of its
    sender's group.

  Raises:
    ValueError: If m is below 1, or the backend is not traceable.
  """
  at_least(1, cohort_size=cohort_size)
  check_backend(backend)
  backend = Backend.of(backend)
  downloads, waves = {}, {}
  for group in federation.groups:
    downloads[group.name] = _make_download(algorithm, federation, group)
    waves[group.name] = _make_wave(algorithm, federation, group, backend)
  deliver = _make_deliver(algorithm, federation, cohort_size)

  def run_round(state: AsyncState, data: FederatedData, key, events: Events):
    check_data(federation, data)
    events = jax.tree.map(jnp.asarray, events)

    def one_upload(state, i):
      flight = {
          name: download(
              state, state.flight[name], events.downloads[name], i, key
          )
          for name, download in downloads.items()
      }

      def train(_, flight):
        return {
            name: wave(
                state.clients[name],
                flight[name],
                events.training[name],
                i,
                data,
                key,
            )
            for name, wave in waves.items()
        }

      # A loop of zero or one iterations: unlike `cond`, it updates in place.
      flight = jax.lax.fori_loop(0, events.wave[i], train, flight)
      return deliver(state._replace(flight=flight), data, key, events, i)

    state, reports = jax.lax.scan(one_upload, state, jnp.arange(cohort_size))
    state = state._replace(round_num=state.round_num + 1)
    return state, _of_round(reports)

  shardings = None
  if backend.state_mesh is not None:
    shardings = placement.everywhere(backend.mesh)
  return jax.jit(run_round, donate_argnums=0, out_shardings=shardings)


def _of_round(reports: RoundReport) -> RoundReport:
  """Combines the reports of a round's uploads, leaves [m, ...]."""
  finite = reports.server_finite
  return RoundReport(
      reports.groups,
      {name: jnp.nanmean(values) for name, values in reports.server.items()},
      None if finite is None else jnp.all(finite),
  )


def _make_download(
    algorithm: FederatedAlgorithm, federation: Federation, group: Group
):
  """Builds the function that runs a group's downloads before an upload."""
  ids, num_clients = jnp.asarray(group.client_ids), federation.num_clients

  def download(state: AsyncState, flight: Flight, turns, i, key) -> Flight:
    def one(j, stored):
      row, visit = turns.row[j], turns.visit[j]
      turn = visit * num_clients + ids[row]
      down, _ = visit_pair(key, state.round_num, ids[row], turn, visit)
      sent = algorithm.downlink(state.server, group, down)
      return put_row(stored, row, (sent, down.round_num))

    bounds = turns.bounds[i], turns.bounds[i + 1]
    stored = flight.sent, flight.round_num
    sent, round_num = jax.lax.fori_loop(*bounds, one, stored)
    return flight._replace(sent=sent, round_num=round_num)

  return download


def _make_wave(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    group: Group,
    backend: Backend,
):
  """Builds the function that trains a group's clients in a wave."""
  train = make_training(algorithm, group)
  ids, num_clients = jnp.asarray(group.client_ids), federation.num_clients

  @jax.jit
  def one(shared, turn):
    clients, sent, data, key = shared
    row, visit = turn
    client, (sent, round_num) = take_row((clients, sent), row)
    turn = visit * num_clients + ids[row]
    _, up = visit_pair(key, round_num, ids[row], turn, visit)
    return (), train(client, sent, data.client(ids[row]), up)

  def load(shared, turns):
    return visit_steps(federation.local, shared[2].sizes[ids[turns[0]]])

  mapped = mapping.map_clients(one, backend, load=load)

  def wave(clients, flight: Flight, turns, i, data, key) -> Flight:
    begin, end = turns.bounds[i], turns.bounds[i + 1]
    args = tuple(
        jax.lax.dynamic_slice_in_dim(a, begin, group.num_clients)
        for a in (turns.row, turns.visit)
    )
    num = end - begin
    sent = flight.sent, flight.round_num
    _, result = mapped((clients, sent, data, key), args, num)
    return flight._replace(
        result=put_rows(flight.result, args[0], num, result)
    )

  return wave


def _make_deliver(
    algorithm: FederatedAlgorithm, federation: Federation, cohort_size: int
):
  """Builds the function that delivers an upload and updates the server."""
  num_clients = federation.num_clients
  group_of, row_of = federation.places()

  def to_group(i, number: int, clients, flight: Flight, events: Events):
    """Applies upload i to one group, the sender's or another."""
    sender, staleness = events.client[i], events.staleness[i]
    mine = number == jnp.asarray(group_of)[sender]
    row = jnp.where(mine, jnp.asarray(row_of)[sender], 0)
    summed, (updated, kept, finite, metrics, down, up) = take_row(
        flight.result, row
    )
    updated = jax.tree.map(
        lambda new, old: jnp.where(mine, new, old),
        updated,
        take_row(clients, row),
    )
    clients = put_row(clients, row, updated)
    good = mine & finite
    summed, kept, metrics, down, up = jax.tree.map(
        lambda leaf: jnp.where(mine, leaf, jnp.zeros_like(leaf)),
        (summed, kept, metrics, down, up),
    )
    received = Received(
        summed,
        jax.tree.map(lambda leaf: leaf[None], kept),
        jnp.where(good, sender, num_clients)[None],
        jnp.where(good, staleness, 0)[None],
        i == cohort_size - 1,
    )
    report = GroupReport(
        jnp.where(mine, sender, num_clients), good | ~mine, metrics, down, up
    )
    return clients, received, report

  def deliver(state: AsyncState, data, key, events: Events, i):
    clients, received, reports = {}, {}, {}
    for number, group in enumerate(federation.groups):
      name = group.name
      clients[name], received[name], reports[name] = to_group(
          i, number, state.clients[name], state.flight[name], events
      )
    server, metrics, finite = server_turn(
        algorithm,
        state.server,
        received,
        data,
        key,
        round_num=state.round_num,
        update=state.round_num * cohort_size + i,
        num_clients=num_clients,
    )
    state = state._replace(server=server, clients=clients)
    return state, RoundReport(reports, metrics, finite)

  return deliver


def check_backend(backend: str | Backend) -> None:
  """Raises ValueError for a backend that is not traceable."""
  if not isinstance(backend, Backend):
    backend = Backend(backend)
  if not Backend.of(backend).traceable:
    raise ValueError(
        f'backend={backend.kind!r} cannot run asynchronous rounds; use auto or '
        f'one of {", ".join(mapping.TRACEABLE)}.'
    )
