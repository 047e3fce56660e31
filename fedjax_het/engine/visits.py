"""One client's visit and one turn of the server, as pure functions."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine.traffic import fixed_bytes, full_bytes, measure
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Group,
  Received,
  Turn,
  Visit,
)

# Largest number of entries of a leaf that `all_finite` copies.
_SMALL = 4096
# An id that no client has, above those of all clients.
NO_CLIENT = 2**31 - 1


def round_key(key, round_num):
  """The key of one round."""
  return jax.random.fold_in(key, round_num)


def client_key(key, number, client_id):
  """A client's key, derived from its id and not from its slot in a cohort."""
  return jax.random.fold_in(round_key(key, number), client_id)


def visit_pair(
    key, round_num, client_id, turn=0, number=None
) -> tuple[Visit, Visit]:
  """The `Visit` for a client's downlink, and the one for its training.

  Args:
    key: The run's key for clients.
    round_num: [] int32, the round.
    client_id: [] int32.
    turn: See `Visit`.
    number: [] int32, which tells the client's visits apart and enters the key;
      None for the round.
  """
  number = round_num if number is None else number
  keys = jax.random.split(client_key(key, number, client_id))
  return (
      Visit(client_id, round_num, keys[0], turn),
      Visit(client_id, round_num, keys[1], turn),
  )


def all_finite(tree) -> jax.Array:
  """[] bool: whether no floating-point leaf holds NaN or infinity."""
  leaves = [
      jnp.ravel(leaf)
      for leaf in jax.tree.leaves(tree)
      if jnp.issubdtype(leaf.dtype, jnp.inexact)
  ]
  # Check small leaves together: a network has many biases and scales, and each
  # check would be a kernel to compile.
  parts = [leaf for leaf in leaves if leaf.size > _SMALL]
  small = [leaf for leaf in leaves if leaf.size <= _SMALL]
  if small:
    parts.append(jnp.concatenate(small))
  checks = [jnp.all(jnp.isfinite(part)) for part in parts]
  return jnp.all(jnp.stack(checks)) if checks else jnp.bool_(True)


def check_inputs(group: Group, preprocess, features) -> None:
  """Raises ValueError for examples that a group's model does not accept.

  It looks at shapes and types only, so it may be called while a program is
  traced.

  Args:
    group: The group.
    preprocess: Maps stored features to inputs, see `ClientData`.
    features: [N, ...], stored features.
  """
  one = jax.ShapeDtypeStruct((1, *features.shape[1:]), features.dtype)
  # A lambda, since a tuple with a `__call__` cannot be traced itself.
  inputs = jax.eval_shape(lambda x: preprocess(x), one)
  shape = inputs.shape[1:]
  if shape != tuple(group.model.input_shape):
    raise ValueError(
        f'The model of group {group.name!r} takes inputs of shape '
        f'{tuple(group.model.input_shape)}, but the examples have {shape}.'
    )
  words = group.model.vocabulary
  if words is not None and not jnp.issubdtype(inputs.dtype, jnp.integer):
    raise ValueError(
        f'The model of group {group.name!r} takes token ids, integers in '
        f'0..{words - 1}, but the examples are {features.dtype}.'
    )


def check_labels(federation: Federation, data: FederatedData) -> None:
  """Raises ValueError for a class for which a model has no output.

  It looks at a static field only, so it may be called while a program is
  traced.

  Args:
    federation: The federation; a task without classes takes any labels.
    data: All clients' examples.
  """
  largest = data.largest_label
  if federation.task.predicted is None or largest is None:
    return
  for group in federation.groups:
    if largest >= group.model.num_classes:
      raise ValueError(
          f'The model of group {group.name!r} has outputs for the classes '
          f'0..{group.model.num_classes - 1}, but a label is {largest}.'
      )


def check_clients(federation: Federation, data: FederatedData) -> None:
  """Raises ValueError for data of another number of clients.

  It looks at shapes only, so it may be called while a program is traced, in
  which a client without data would get those of another.

  Args:
    federation: The federation.
    data: All clients' examples.
  """
  if data.num_clients != federation.num_clients:
    raise ValueError(
        f'The data are of {data.num_clients} clients, but the groups hold '
        f'{federation.num_clients}.'
    )


def check_data(federation: Federation, data: FederatedData) -> None:
  """Raises ValueError for training data that do not fit the federation.

  It looks at shapes and static fields only.

  Args:
    federation: The federation.
    data: All clients' examples, and the public set.
  """
  check_labels(federation, data)
  check_clients(federation, data)
  if federation.sizes is not None:
    longest = data.index.shape[1]
    if federation.max_examples > longest:
      raise ValueError(
          f'Federation(sizes=...) has a client of {federation.max_examples} '
          f'examples, but no client of the data has more than {longest}.'
      )
  wanted = federation.num_public
  found = 0 if data.public is None else len(data.public)
  if wanted and found != wanted:
    raise ValueError(
        f'The public set of the data has {found} examples, but '
        f'Federation(num_public={wanted}).'
    )


# Entries of a round's line in metrics.jsonl that are no client metrics.
_TAKEN = frozenset({
    'round', 'split', 'seconds', 'clients', 'bytes_up', 'bytes_down',
    'nonfinite', 'server', 'virtual_time', 'staleness', 'dropped', 'lost',
    'bytes_lost',
})  # fmt: skip


def check_metrics(metrics: Mapping[str, Any]) -> None:
  """Raises ValueError for client metrics that cannot be in a round's line.

  Args:
    metrics: {name: value}, scalars; 'train_loss' is called 'loss' there.

  Raises:
    ValueError: If one is no scalar, or a line has its name already.
  """
  for name, value in metrics.items():
    if jnp.shape(value):
      raise ValueError(
          f'client_update returns a metric {name!r} of shape '
          f'{jnp.shape(value)}; a metric is a scalar.'
      )
  names = {*metrics}
  both = names & {'loss'} if 'train_loss' in names else set()
  for name in sorted(names & _TAKEN | both):
    raise ValueError(
        f'client_update returns a metric {name!r}, but a line of metrics.jsonl '
        'has another entry of this name; choose another one.'
    )


def make_training(
    algorithm: FederatedAlgorithm, group: Group
) -> Callable[..., Any]:
  """Builds a client's visit after the downlink, as a pure function.

  Args:
    algorithm: The algorithm.
    group: The client's group.

  Returns:
    `train(client, sent, data, visit) -> (summed, (client, kept, finite,
    metrics, down, up))`; `data` are the client's own. If the update is not
    finite, `summed` and `kept` are zeros and the client keeps its old state.
  """

  def train(client, sent, data, visit):
    check_inputs(group, data.preprocess, data.images)
    updated, uplink, metrics = algorithm.client_update(
        group, client, sent, data, visit
    )
    check_metrics(metrics)
    finite = all_finite((updated, uplink))

    def keep(new, old):
      return jnp.where(finite, new, old)

    updated = jax.tree.map(keep, updated, client)
    # Clear `kept` too: zero times NaN is NaN, and an upload in flight is part
    # of the state.
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
  """Builds a client's whole visit, downlink to uplink, as a pure function.

  Args:
    algorithm: The algorithm.
    group: The client's group.

  Returns:
    `visit((server, data, key, round_num, cohort), (client_id, client)) ->
    (summed, (client, kept, finite, metrics, down, up))`, as `make_training`;
    `cohort` holds the ids of the round's clients in any order, and `NO_CLIENT`
    as padding.
  """
  train = make_training(algorithm, group)

  def visit(shared, arg):
    server, data, key, round_num, cohort = shared
    client_id, client = arg
    turn = round_num * jnp.sum(cohort < NO_CLIENT) + jnp.sum(cohort < client_id)
    down, up = visit_pair(key, round_num, client_id, turn)
    sent = algorithm.downlink(server, group, down)
    return train(client, sent, data.client(client_id), up)

  # Jitted, so that it is traced once even if the mapping calls it twice.
  return jax.jit(visit)


def server_turn(
    algorithm: FederatedAlgorithm,
    server: Any,
    received: dict[str, Received],
    data: FederatedData,
    key,
    *,
    round_num,
    update,
    num_clients: int,
) -> tuple[Any, dict[str, jax.Array], jax.Array | None]:
  """Updates the server's state with the received uploads.

  The state is checked for NaN and infinity only if the algorithm returns
  metrics, which means that its server trains: other servers average finite
  uploads, and the check would cost a pass over the state. Whether there are
  metrics is known at trace time.

  Args:
    algorithm: The algorithm.
    server: The server's state.
    received: {group: its uploads}.
    data: The federated data, with the public set.
    key: The key of the run's training.
    round_num: [] int32, rounds done.
    update: [] int32, the number of this update in the run.
    num_clients: Size of the population.

  Returns:
    The new state; its metrics, {name: [] float32}; and [] bool, whether the
    new state is finite, or None where it is not checked. A state that is not
    finite is replaced by the old one.

  Raises:
    TypeError: If the algorithm returns anything but a state and metrics.
  """
  # The server uses the key of an id that no client has.
  server_key = client_key(key, update, num_clients)
  turn = Turn(round_num, server_key, data.of_public())
  result = algorithm.server_update(server, received, turn)
  # A state may itself be a pair, but not a plain tuple that ends in a dict.
  if not (
      type(result) is tuple
      and len(result) == 2
      and isinstance(result[1], Mapping)
  ):
    raise TypeError(
        'server_update must return (server, metrics), with metrics {} for '
        f'none; got {type(result).__name__}.'
    )
  updated, metrics = result
  if not metrics:
    return updated, {}, None
  finite = all_finite(updated)
  updated = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old), updated, server
  )
  return updated, jax.tree.map(jnp.float32, metrics), finite


def message_bytes(
    algorithm: FederatedAlgorithm,
    group: Group,
    data: FederatedData,
) -> tuple[int, int]:
  """Bytes (down, up) of one visit, with all optional parts.

  They follow from shapes; no array is computed.

  Args:
    algorithm: The algorithm.
    group: The client's group.
    data: All clients' examples.

  Returns:
    Two integers.
  """
  down, up = _messages(algorithm, group, data)
  return full_bytes(down), full_bytes(up)


def expected_bytes(
    algorithm: FederatedAlgorithm,
    group: Group,
    data: FederatedData,
    sizes: np.ndarray,
) -> np.ndarray:
  """Bytes (down, up) of visits, with the expected shares of optional parts.

  They are those of `message_bytes` if the algorithm has no `sent_shares`.

  Args:
    algorithm: The algorithm.
    group: The clients' group.
    data: All clients' examples.
    sizes: [n] int, examples of some of the group's clients.

  Returns:
    [n, 2] int64.
  """
  shares = 1.0, 1.0
  if algorithm.sent_shares is not None:
    shares = algorithm.sent_shares(group, sizes)
  found = np.zeros((len(sizes), 2), np.int64)
  messages = _messages(algorithm, group, data)
  for i, (message, share) in enumerate(zip(messages, shares, strict=True)):
    fixed = fixed_bytes(message)
    optional = full_bytes(message) - fixed
    found[:, i] = fixed + np.rint(np.asarray(share) * optional)
  return found


def _messages(algorithm: FederatedAlgorithm, group: Group, data):
  """Shapes of the downlink and the uplink of a visit."""

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

  return jax.eval_shape(messages, data, jax.random.key(0))
