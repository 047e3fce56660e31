"""One synchronous round of any algorithm, and what it measured."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine import mapping
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Group,
  Maybe,
  Received,
  Visit,
)


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
  down: 'Traffic'
  up: 'Traffic'


class Traffic(NamedTuple):
  """Bytes of one message, measured from the tree that travels.

  Attributes:
    fixed: [] uint32, bytes of all that is always sent.
    parts: [P] uint32, full bytes of each leaf inside a `Maybe`.
    share: [P] float32, the fraction of that leaf that was sent.
  """

  fixed: jax.Array
  parts: jax.Array
  share: jax.Array


def round_key(key, round_num):
  """The key of one round."""
  return jax.random.fold_in(key, round_num)


def client_key(key, round_num, client_id):
  """A client's key: follows its identity, not its place in a cohort."""
  return jax.random.fold_in(round_key(key, round_num), client_id)


def visit_pair(key, round_num, client_id) -> tuple[Visit, Visit]:
  """A client's turn as its downlink sees it, and as its training does."""
  keys = jax.random.split(client_key(key, round_num, client_id))
  return (
      Visit(client_id, round_num, keys[0]),
      Visit(client_id, round_num, keys[1]),
  )


def sample_cohort(key, round_num, num_clients: int, cohort_size: int):
  """Draws a round's clients uniformly without replacement.

  Args:
    key: The key of sampling, apart from that of training, so that methods
      see the same cohorts.
    round_num: [] int32.
    num_clients: Size of the population.
    cohort_size: Clients a round, m.

  Returns:
    [m] int32, ascending.
  """
  if cohort_size == num_clients:
    return jnp.arange(num_clients, dtype=jnp.int32)
  order = jax.random.permutation(round_key(key, round_num), num_clients)
  return jnp.sort(order[:cohort_size]).astype(jnp.int32)


def init_state(
    algorithm: FederatedAlgorithm, federation: Federation, key
) -> State:
  """The state before the first round.

  Not compiled as a whole: models draw their blocks by small cached programs.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    key: A random key.

  Returns:
    The state; all its clients are in place, whether they ever take part.
  """
  clients = {
      group.name: jax.vmap(
          lambda i, g=group: algorithm.init_client(g, i, key)
      )(jnp.asarray(group.client_ids))
      for group in federation.groups
  }
  return State(jnp.int32(0), algorithm.init(key), clients)


def measure(tree) -> Traffic:
  """Measures a downlink or uplink.

  Args:
    tree: A pytree of arrays, maybe with `Maybe` parts.

  Returns:
    Its traffic; the bytes are constants of the shapes.
  """
  parts = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Maybe))
  fixed = [part for part in parts if not isinstance(part, Maybe)]
  optional = [
      (leaf, part.present)
      for part in parts
      if isinstance(part, Maybe)
      for leaf in jax.tree.leaves(part.value)
  ]
  shares = [jnp.mean(present, dtype=jnp.float32) for _, present in optional]
  return Traffic(
      jnp.asarray(np.uint32(sum(map(_num_bytes, fixed)))),
      jnp.asarray(np.array([_num_bytes(x) for x, _ in optional], np.uint32)),
      jnp.stack(shares) if shares else jnp.zeros((0,), jnp.float32),
  )


def _num_bytes(leaf) -> int:
  return math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize


def num_bytes(traffic: Traffic) -> np.ndarray:
  """Bytes of each message, exact up to the rounding of its shares.

  Args:
    traffic: One or several messages, leaves [...] and [..., P].

  Returns:
    [...] int64.
  """
  fixed, parts, share = (np.asarray(x, np.float64) for x in traffic)
  return np.rint(fixed + np.sum(parts * share, axis=-1)).astype(np.int64)


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

  def full(tree):
    values = jax.tree.map(
        lambda part: part.value if isinstance(part, Maybe) else part,
        tree,
        is_leaf=lambda part: isinstance(part, Maybe),
    )
    return sum(map(_num_bytes, jax.tree.leaves(values)))

  sent, uplink = jax.eval_shape(messages, data, jax.random.key(0))
  return full(sent), full(uplink)


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
    metrics, down, up))`, `data` being the client's own. A result that is not
    finite is left out of the sums and leaves the client as it was.
  """

  def train(client, sent, data, visit):
    updated, uplink, metrics = algorithm.client_update(
        group, client, sent, data, visit
    )
    finite = all_finite((updated, uplink))

    def keep(new, old):
      return jnp.where(finite, new, old)

    updated = jax.tree.map(keep, updated, client)
    summed = jax.tree.map(
        lambda s: keep(s, jnp.zeros_like(s)), uplink.summed
    )
    return summed, (
        updated,
        uplink.kept,
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
    `visit((server, clients, data, key, round_num), (client_id, row)) ->
    (summed, (client, kept, finite, metrics, down, up))`, as `make_training`.
  """
  train = make_training(algorithm, group)

  def visit(shared, arg):
    server, clients, data, key, round_num = shared
    client_id, row = arg
    down, up = visit_pair(key, round_num, client_id)
    client = jax.tree.map(lambda leaf: leaf[row], clients)
    sent = algorithm.downlink(server, group, down)
    return train(client, sent, data.client(client_id), up)

  # Jitted, so that it is traced once however often the mapping calls it.
  return jax.jit(visit)


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
    donated; every group has a fixed number of slots, so it compiles once.

  Raises:
    ValueError: If the cohort is empty or larger than the population.
  """
  num_clients = federation.num_clients
  if not 1 <= cohort_size <= num_clients:
    raise ValueError(
        f'A cohort of {cohort_size} clients cannot be drawn from '
        f'{num_clients}; it must be between 1 and {num_clients}.'
    )
  backend = mapping.resolve_backend(backend)
  group_of = np.zeros(num_clients, np.int32)
  row_of = np.zeros(num_clients, np.int32)
  for i, group in enumerate(federation.groups):
    group_of[group.client_ids] = i
    row_of[group.client_ids] = np.arange(group.num_clients)
  mapped = {
      group.name: mapping.map_clients(
          make_visit(algorithm, group), backend, chunk=chunk, mesh=mesh
      )
      for group in federation.groups
  }

  def choose(cohort, i, group):
    """The group's share of the cohort: ids, rows, and how many are real."""
    mine = jnp.asarray(group_of)[cohort] == i
    slots = min(cohort_size, group.num_clients)
    (place,) = jnp.nonzero(mine, size=slots, fill_value=cohort_size)
    ids = cohort.at[place].get(mode='fill', fill_value=0)
    return ids, jnp.asarray(row_of)[ids], jnp.sum(mine)

  @jax.jit
  def plan(round_num, sampling_key):
    cohort = sample_cohort(sampling_key, round_num, num_clients, cohort_size)
    return [choose(cohort, i, g) for i, g in enumerate(federation.groups)]

  @jax.jit
  def finish(state, chosen, results, key):
    """Stores what the clients keep, and lets the server do its step."""
    received, reports, clients = {}, {}, {}
    for group, (ids, rows, num_valid), (summed, kept) in zip(
        federation.groups, chosen, results, strict=True
    ):
      updated, kept, finite, metrics, down, up = kept
      real = jnp.arange(len(ids)) < num_valid
      rows = jnp.where(real, rows, group.num_clients)
      clients[group.name] = jax.tree.map(
          lambda leaf, new, rows=rows: leaf.at[rows].set(new, mode='drop'),
          state.clients[group.name],
          updated,
      )
      sender = jnp.where(real & finite, ids, num_clients)
      received[group.name] = Received(
          summed, kept, sender, jnp.zeros_like(sender)
      )
      reports[group.name] = GroupReport(
          jnp.where(real, ids, num_clients), finite | ~real, metrics, down, up
      )
    # The server draws as a client that does not exist.
    server_key = client_key(key, state.round_num, num_clients)
    server = algorithm.server_update(state.server, received, server_key)
    return State(state.round_num + 1, server, clients), reports

  def run_round(state: State, data: FederatedData, key, sampling_key):
    chosen = plan(state.round_num, sampling_key)
    results = [
        mapped[group.name](
            (state.server, state.clients[group.name], data, key,
             state.round_num),
            (ids, rows),
            num_valid,
        )
        for group, (ids, rows, num_valid) in zip(
            federation.groups, chosen, strict=True
        )
    ]  # fmt: skip
    return finish(state, chosen, results, key)

  if backend in mapping.TRACEABLE:
    return jax.jit(run_round, donate_argnums=0)
  return run_round


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
