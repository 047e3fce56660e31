"""Asynchronous rounds: the server takes every upload as it arrives.

A round is a fixed number of accepted uploads. Its events come from a schedule
(`engine.clock`); this module carries them out in one compiled program. For
each upload, in order:

  every client that downloads before it   keeps downlink(server)
  if its sender has not trained yet       all who have downloaded train, in
                                          one batch a group (a wave)
  the upload                              server_update with this uplink alone

A client trains from what it was sent, so it may train at any time between its
download and its upload; what it has done shows only with its upload.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine import mapping, placement
from fedjax_het.engine.clock import Schedule
from fedjax_het.engine.local import visit_steps
from fedjax_het.engine.rounds import GroupReport, State
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Group,
  Received,
  Turn,
)
from fedjax_het.engine.visits import client_key, make_training, visit_pair


class Flight(NamedTuple):
  """What a group's clients are about; every leaf is [K, ...].

  Attributes:
    sent: What each client was sent last.
    result: What it returned, as `make_training` gives it; its upload may be
      still to come.
  """

  sent: Any
  result: Any


class AsyncState(NamedTuple):
  """All that an asynchronous run carries from round to round.

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


class Turns(NamedTuple):
  """The downloads, or the training, of a group in a round of m uploads.

  Attributes:
    row: [T] int32, rows of the group's clients, in order.
    visit: [T] int32, which of the client's visits it is.
    bounds: [m + 1] int32: what stands in [bounds[i], bounds[i + 1]) comes
      before upload i.
  """

  row: np.ndarray
  visit: np.ndarray
  bounds: np.ndarray


class Events(NamedTuple):
  """A round of m uploads as arrays of fixed shapes.

  Attributes:
    client: [m] int32, the senders in order.
    staleness: [m] int32, server updates since their downloads.
    wave: [m] int32, 1 where training comes before the upload, else 0.
    downloads: {group name: Turns}.
    training: {group name: Turns}.
  """

  client: np.ndarray
  staleness: np.ndarray
  wave: np.ndarray
  downloads: dict[str, Turns]
  training: dict[str, Turns]


class RoundPlan(NamedTuple):
  """A round of m uploads, before it is laid out as arrays.

  Attributes:
    client: m senders in order.
    staleness: m server updates since their downloads.
    wave: m times 1 where training comes before the upload, else 0.
    downloads: m lists of (client, visit).
    training: m lists of (client, visit).
    time: Seconds of the last upload's arrival.
    lost: Senders of the uploads that were lost meanwhile.
  """

  client: list[int]
  staleness: list[int]
  wave: list[int]
  downloads: list[list[tuple[int, int]]]
  training: list[list[tuple[int, int]]]
  time: float
  lost: list[int]


def plan_rounds(
    events: Iterable[tuple[str, tuple]], cohort_size: int
) -> Iterator[RoundPlan]:
  """Cuts a stream of events into rounds, as far as it is asked for.

  Args:
    events: What `clock.stream` gives.
    cohort_size: Uploads a round, m.

  Yields:
    Whole rounds; so much memory as one of them and the clients need.
  """
  waiting, downloads = {}, []
  done = RoundPlan([], [], [], [], [], 0.0, [])
  for kind, event in events:
    if kind == 'd':
      client, visit, _ = event
      downloads.append((client, visit))
      waiting[client] = visit
    elif kind == 'l':
      done.lost.append(event[0])
    else:
      client, _, _, time, staleness = event
      wave = client in waiting
      done.client.append(client)
      done.staleness.append(staleness)
      done.wave.append(int(wave))
      done.downloads.append(downloads)
      done.training.append([*waiting.items()] if wave else [])
      if wave:
        waiting = {}
      downloads = []
      if len(done.client) == cohort_size:
        yield done._replace(time=time)
        done = RoundPlan([], [], [], [], [], 0.0, [])


def lay_out(plan: RoundPlan, federation: Federation) -> Events:
  """A planned round as arrays of fixed shapes."""
  places = federation.places()
  return Events(
      np.array(plan.client, np.int32),
      np.array(plan.staleness, np.int32),
      np.array(plan.wave, np.int32),
      _turns(federation, places, plan.downloads),
      _turns(federation, places, plan.training),
  )


def round_events(
    schedule: Schedule, federation: Federation, cohort_size: int
) -> list[Events]:
  """Cuts a schedule into rounds.

  Args:
    schedule: Of at least one round.
    federation: The federation.
    cohort_size: Uploads a round, m.

  Returns:
    The events of each whole round.
  """
  rounds = plan_rounds(schedule.events(), cohort_size)
  return [lay_out(plan, federation) for plan in rounds]


def _turns(federation: Federation, places, per_upload) -> dict[str, Turns]:
  """Lists [upload][turn] of (client, visit) as arrays of fixed shapes."""
  group_of, row_of = places
  result = {}
  for number, group in enumerate(federation.groups):
    # A client has one turn more than it has uploads at most; a wave reads as
    # many turns as the group has clients, wherever it begins.
    flat = np.zeros((len(per_upload) + 2 * group.num_clients, 2), np.int32)
    mine = [
        [(row_of[k], visit) for k, visit in turns if group_of[k] == number]
        for turns in per_upload
    ]
    turns = [turn for turns in mine for turn in turns]
    if turns:
      flat[: len(turns)] = turns
    ends = np.cumsum([len(turns) for turns in mine])
    bounds = np.concatenate([[0], ends]).astype(np.int32)
    result[group.name] = Turns(flat[:, 0].copy(), flat[:, 1].copy(), bounds)
  return result


def init_async_state(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    state: State,
    data: FederatedData,
) -> AsyncState:
  """The state before the first round; nobody has downloaded yet.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    state: What `init_state` gives, maybe warmed up.
    data: All clients' examples; only their shapes matter.

  Returns:
    The state.
  """

  def one(group: Group, server, clients, data):
    """The `Flight` of one client."""
    client_id = jnp.int32(group.client_ids[0])
    down, up = visit_pair(jax.random.key(0), jnp.int32(0), client_id)
    sent = algorithm.downlink(server, group, down)
    client = jax.tree.map(lambda leaf: leaf[0], clients)
    train = make_training(algorithm, group)
    return Flight(sent, train(client, sent, data.client(client_id), up))

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
    backend: str = 'auto',
    chunk: int | None = None,
    mesh=None,
) -> Callable[..., tuple[AsyncState, dict[str, GroupReport]]]:
  """Builds the function that runs one asynchronous round.

  In a client's `Visit`, `round_num` counts its own visits, and the key follows
  from that number and its id. `Received` has one slot a group: the sender's,
  and padding in the other groups.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    cohort_size: Uploads a round, m.
    backend: How the clients of a wave are mapped, one of
      `mapping.TRACEABLE`. 'vmap' computes whole chunks, however small a wave.
    chunk: As for `make_round`.
    mesh: As for `make_round`. The state lies on each device as a whole; only
      the training of a wave is divided.

  Returns:
    `run_round(state, data, key, events) -> (state, {group: report})`, one
    compiled program whose `state` is donated. `events` are those of the
    state's round out of `round_events`; they stand where `make_round` takes a
    sampling key. Upload i is in slot i of its sender's report.

  Raises:
    ValueError: If no upload makes a round, or the backend runs from Python.
  """
  if cohort_size < 1:
    raise ValueError(f'A round needs at least 1 upload, got {cohort_size}.')
  check_backend(backend)
  shardings = None
  if mapping.resolve_backend(backend) == 'shard_map':
    mesh = mapping.client_mesh() if mesh is None else mesh
    shardings = placement.everywhere(mesh)
  num_clients, groups = federation.num_clients, federation.groups
  group_of, row_of = federation.places()

  def make_train(group):
    train = make_training(algorithm, group)
    ids = jnp.asarray(group.client_ids)

    @jax.jit
    def one(shared, turn):
      clients, sent, data, key = shared
      row, visit = turn
      client, sent = jax.tree.map(lambda leaf: leaf[row], (clients, sent))
      turn = visit * num_clients + ids[row]
      _, up = visit_pair(key, visit, ids[row], turn)
      return (), train(client, sent, data.client(ids[row]), up)

    def load(shared, turns):
      return visit_steps(federation.local, shared[2].sizes[ids[turns[0]]])

    mapped = mapping.map_clients(
        one, backend, chunk=chunk, mesh=mesh, load=load
    )

    def wave(clients, flight, turns, i, data, key):
      begin, end = turns.bounds[i], turns.bounds[i + 1]
      args = tuple(
          jax.lax.dynamic_slice_in_dim(a, begin, group.num_clients)
          for a in (turns.row, turns.visit)
      )
      _, result = mapped((clients, flight.sent, data, key), args, end - begin)
      real = jnp.arange(group.num_clients) < end - begin
      rows = jnp.where(real, args[0], group.num_clients)
      return flight._replace(
          result=jax.tree.map(
              lambda leaf, new: leaf.at[rows].set(new, mode='drop'),
              flight.result,
              result,
          )
      )

    return wave

  waves = {group.name: make_train(group) for group in groups}

  def download(group, server, flight, turns, i, key):
    ids = jnp.asarray(group.client_ids)

    def one(j, sent):
      row = turns.row[j]
      turn = turns.visit[j] * num_clients + ids[row]
      down, _ = visit_pair(key, turns.visit[j], ids[row], turn)
      return jax.tree.map(
          lambda leaf, new: leaf.at[row].set(new),
          sent,
          algorithm.downlink(server, group, down),
      )

    bounds = turns.bounds[i], turns.bounds[i + 1]
    return flight._replace(sent=jax.lax.fori_loop(*bounds, one, flight.sent))

  def deliver(i, number, clients, flight, events):
    """What one upload changes in a group, which may be the sender's or not."""
    sender, staleness = events.client[i], events.staleness[i]
    mine = number == jnp.asarray(group_of)[sender]
    row = jnp.where(mine, jnp.asarray(row_of)[sender], 0)
    summed, (updated, kept, finite, metrics, down, up) = jax.tree.map(
        lambda leaf: leaf[row], flight.result
    )
    clients = jax.tree.map(
        lambda leaf, new: leaf.at[row].set(jnp.where(mine, new, leaf[row])),
        clients,
        updated,
    )
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

  def run_round(state: AsyncState, data: FederatedData, key, events: Events):
    events = jax.tree.map(jnp.asarray, events)

    def train(_, flight, clients, i):
      return {
          name: wave(
              clients[name], flight[name], events.training[name], i, data, key
          )
          for name, wave in waves.items()
      }

    def step(i, carry):
      (round_num, server, clients, flight), reports = carry
      flight = {
          group.name: download(
              group,
              server,
              flight[group.name],
              events.downloads[group.name],
              i,
              key,
          )
          for group in groups
      }
      # A loop that runs once or not at all: unlike a conditional it changes
      # its arrays in place.
      flight = jax.lax.fori_loop(
          0, events.wave[i], lambda j, f: train(j, f, clients, i), flight
      )
      clients, received, now = dict(clients), {}, {}
      for number, group in enumerate(groups):
        name = group.name
        clients[name], received[name], now[name] = deliver(
            i, number, clients[name], flight[name], events
        )
      # The server draws as a client that does not exist, once an upload.
      update = round_num * cohort_size + i
      server_key = client_key(key, update, num_clients)
      turn = Turn(round_num, server_key, data.of_public())
      server, _ = algorithm.server_update(server, received, turn)
      reports = jax.tree.map(lambda all_, r: all_.at[i].set(r), reports, now)
      return AsyncState(round_num, server, clients, flight), reports

    reports = {
        group.name: _empty_report(state.flight[group.name], cohort_size)
        for group in groups
    }
    state, reports = jax.lax.fori_loop(0, cohort_size, step, (state, reports))
    return state._replace(round_num=state.round_num + 1), reports

  return jax.jit(run_round, donate_argnums=0, out_shardings=shardings)


def _empty_report(flight: Flight, slots: int) -> GroupReport:
  """A group's report of zeros."""
  _, (_, _, *measured) = flight.result
  return GroupReport(
      jnp.zeros(slots, jnp.int32),
      *jax.tree.map(
          lambda leaf: jnp.zeros((slots, *leaf.shape[1:]), leaf.dtype), measured
      ),
  )


def check_backend(backend: str) -> None:
  """Raises ValueError for a backend that cannot stand in a program."""
  if mapping.resolve_backend(backend) not in mapping.TRACEABLE:
    raise ValueError(
        f'backend={backend!r} cannot run asynchronous rounds; use auto or one '
        f'of {", ".join(mapping.TRACEABLE)}.'
    )
