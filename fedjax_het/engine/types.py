"""The contract between an algorithm and the engine that runs it.

An algorithm is a few pure functions for ONE client and one server; the engine
maps them over a cohort.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fedjax_het.data.federated import ClientData
from fedjax_het.engine.task import CLASSIFICATION, Task
from fedjax_het.models.blocks import BlockModel
from fedjax_het.options import (
    at_least,
    booleans,
    check_type,
    counts,
    function_of,
)


@dataclasses.dataclass(frozen=True)
class Group:
  """Clients of one architecture, so all shapes in a group are equal.

  Attributes:
    name: Name of the group, unique in the federation.
    model: Their architecture.
    client_ids: [K] int32, global and ascending.
    partner: The architecture of a second model that each client holds, for
      methods that need one; None for none.
    options: {name: value}, the method's options of this group, such as a memory
      budget; see `Needs.group_options`.

  Raises:
    ValueError: If a model is not a `BlockModel`, or `client_ids` is not a 1-D
      array of one or more nonnegative integers.
  """

  name: str
  model: BlockModel
  client_ids: np.ndarray
  partner: BlockModel | None = None
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    check_type('model', self.model, BlockModel)
    check_type('partner', self.partner, BlockModel | None)
    counts(client_ids=self.client_ids)
    if not len(self.client_ids):
      raise ValueError(f'Group {self.name!r} has no client.')

  @property
  def num_clients(self) -> int:
    """K."""
    return len(self.client_ids)


@dataclasses.dataclass(frozen=True)
class LocalTraining:
  """Settings of local training.

  Attributes:
    optimizer: Maps a learning rate (maybe traced) to an optax transformation.
    learning_rate: Maps the round (int32, traced) to the learning rate.
    epochs: Passes over the client's data in one visit.
    batch_size: Examples a step.
    drop_last: Whether the last partial batch of an epoch is dropped instead of
      padded and masked, in the passes of a server or over a public set, too. A
      client with fewer examples than a batch takes one padded batch, so every
      client takes a step.
    steps: Minibatches per visit, for clients of any size, instead of `epochs`;
      None for `epochs`.
    drop_unused_weights: Whether to drop parameters without gradient, such as
      the outer taps of kernels on 1x1 maps, from local steps; see
      `BlockModel.trim`. Results are the same if the optimizer neither updates
      nor reads parameters with zero gradient: true for SGD and Adam, false with
      weight decay or trust ratios.
    keep_optimizer: Whether a client keeps its optimiser's state between its
      visits, which is never sent; None for the method's default. Only methods
      that declare it (`Needs.keep_optimizer`) use it.
    task: The loss that is minimised, and the metrics that are reported.

  Raises:
    ValueError: If a number is out of its range, `optimizer` or `learning_rate`
      is not a function, or `task` is not a `Task`.
  """

  optimizer: Callable[[Any], optax.GradientTransformation]
  learning_rate: Callable[[Any], Any]
  epochs: int
  batch_size: int
  drop_last: bool = False
  steps: int | None = None
  drop_unused_weights: bool = False
  keep_optimizer: bool | None = None
  task: Task = CLASSIFICATION

  def __post_init__(self):
    if isinstance(self.optimizer, optax.GradientTransformation):
      raise ValueError(
          'optimizer must be a function of the learning rate, such as '
          'optax.lion or lambda rate: optax.chain(optax.clip(1.0), '
          'optax.sgd(rate)), got a transformation.'
      )
    function_of(
        'the learning rate', 'optax.adam', optimizer=self.optimizer
    )
    function_of(
        'the round', 'lambda round_num: 0.1', learning_rate=self.learning_rate
    )
    check_type('task', self.task, Task)
    at_least(0, epochs=self.epochs)
    at_least(1, batch_size=self.batch_size)
    if self.steps is not None:
      at_least(0, steps=self.steps)
    booleans(
        drop_last=self.drop_last, drop_unused_weights=self.drop_unused_weights
    )
    if self.keep_optimizer is not None:
      booleans(keep_optimizer=self.keep_optimizer)

  def keeps_optimizer(self, default: bool) -> bool:
    """Whether the optimizer state is kept; `default` is the method's."""
    return default if self.keep_optimizer is None else self.keep_optimizer


def _check_sizes(sizes, num_clients: int) -> None:
  """Raises ValueError unless there is one count for each client."""
  if np.shape(sizes) != (num_clients,):
    raise ValueError(
        f'sizes must be {num_clients} integers, one for each client, got the '
        f'shape {np.shape(sizes)}.'
    )
  counts(sizes=sizes)


# The label of one example in classification.
CLASS = jax.ShapeDtypeStruct((), np.int32)


@dataclasses.dataclass(frozen=True)
class Federation:
  """The static description of a run, given to every algorithm.

  Attributes:
    groups: The groups, whose client ids partition 0 .. num_clients - 1.
    local: The clients' local training.
    local_stats: Whether running norm statistics stay on the client instead of
      being averaged (FedBN-like).
    sizes: [num_clients] int32, examples of each client, for methods whose state
      depends on it; None if unknown.
    num_public: Size of the public set; see `FederatedData.public`.
    num_rounds: Rounds of the whole run; None where it is not known.
    server_model: The architecture of the server's own model, or None.
    label: Shape and dtype of the label of one example, for methods that compile
      a step before there are data; by default a class.

  Raises:
    ValueError: If there is no group, groups do not fit together, or a value is
      of the wrong type or out of its range.
  """

  groups: tuple[Group, ...]
  local: LocalTraining
  local_stats: bool = False
  sizes: np.ndarray | None = None
  num_public: int = 0
  num_rounds: int | None = None
  server_model: BlockModel | None = None
  label: jax.ShapeDtypeStruct = CLASS

  def __post_init__(self):
    check_type('local', self.local, LocalTraining)
    check_type('label', self.label, jax.ShapeDtypeStruct)
    check_type('server_model', self.server_model, BlockModel | None)
    check_type('groups', self.groups, tuple | list)
    if not self.groups:
      raise ValueError('groups must hold at least one Group, got none.')
    for group in self.groups:
      check_type('groups', group, Group)
    names = [group.name for group in self.groups]
    if len(set(names)) != len(names):
      raise ValueError(f'Group names must differ, got {names}.')
    ids = np.concatenate([group.client_ids for group in self.groups])
    if not np.array_equal(np.sort(ids), np.arange(len(ids))):
      raise ValueError(
          f'The groups must hold each client of 0..{len(ids) - 1} once.'
      )
    booleans(local_stats=self.local_stats)
    at_least(0, num_public=self.num_public)
    if self.num_rounds is not None:
      at_least(1, num_rounds=self.num_rounds)
    if self.sizes is not None:
      _check_sizes(self.sizes, len(ids))

  @property
  def task(self) -> Task:
    """The task of all models."""
    return self.local.task

  @property
  def num_clients(self) -> int:
    """Number of clients in all groups."""
    return sum(group.num_clients for group in self.groups)

  def places(self) -> tuple[np.ndarray, np.ndarray]:
    """Each client's group and row in it, both [num_clients] int32."""
    group_of = np.zeros(self.num_clients, np.int32)
    row_of = np.zeros(self.num_clients, np.int32)
    for i, group in enumerate(self.groups):
      group_of[group.client_ids] = i
      row_of[group.client_ids] = np.arange(group.num_clients)
    return group_of, row_of

  @property
  def num_classes(self) -> int:
    """Outputs of every model, C; raises ValueError if models differ."""
    outputs = {g.name: g.model.num_classes for g in self.groups}
    if len(set(outputs.values())) != 1:
      listed = ', '.join(f'{name} {c}' for name, c in outputs.items())
      raise ValueError(
          f'All models must have one number of outputs, got {listed}.'
      )
    return next(iter(outputs.values()))

  @property
  def max_examples(self) -> int:
    """Examples of the largest client, for methods that need `sizes`."""
    return int(np.max(self.sizes))


class Visit(NamedTuple):
  """One visit of a client.

  Attributes:
    client_id: [] int32, global.
    round_num: [] int32, from 0; in asynchronous runs, the round in which the
      client downloads.
    key: A random key that depends only on (seed, round, client id), in
      asynchronous runs on (seed, number of the client's earlier visits, id).
    turn: [] int32, number of earlier visits in the run. Visits of a round are
      ordered by client id; asynchronous visits are numbered as if every client
      took part in every round.
  """

  client_id: jax.Array
  round_num: jax.Array
  key: jax.Array
  turn: jax.Array | int = 0


class Turn(NamedTuple):
  """The inputs of a server update other than uploads.

  It has the fields of a `Visit` that training reads, so that
  `fit(loss_fn, local, start, turn.public, turn)` trains a model of the server.

  Attributes:
    round_num: [] int32, from 0; in asynchronous runs, the round to which the
      upload counts.
    key: A random key that depends only on the seed and the update.
    public: All examples of the public set, or None.
  """

  round_num: jax.Array
  key: jax.Array
  public: ClientData | None = None


class Maybe(NamedTuple):
  """An optional part of a downlink or uplink.

  Attributes:
    value: A pytree whose leaves begin with the axes of `present`.
    present: Boolean array; entries that are False are not sent and not counted
      as bytes.
  """

  value: Any
  present: jax.Array


def values_of(tree: Any) -> Any:
  """The tree with each `Maybe` replaced by its value."""
  return jax.tree.map(
      lambda part: part.value if isinstance(part, Maybe) else part,
      tree,
      is_leaf=lambda part: isinstance(part, Maybe),
  )


class Uplink(NamedTuple):
  """One client's upload.

  Attributes:
    summed: A pytree of which the server only needs the sum over clients, such
      as weighted deltas and their coefficients. It is accumulated while clients
      run, so memory does not grow with the cohort.
    kept: A pytree that the server needs per client, such as features; None for
      nothing.
  """

  summed: Any
  kept: Any = None


class Received(NamedTuple):
  """One group's uploads of a round.

  Attributes:
    summed: Sum of `Uplink.summed` over the group's clients of the cohort.
    kept: `Uplink.kept`, stacked on a leading axis of slots.
    client_id: [slots] int32, ascending except for slots without an upload
      (padding, or an update that is not finite). These hold num_clients, which
      a scatter with `mode='drop'` ignores.
    staleness: [slots] int32, server updates since the client's download; 0 in
      synchronous rounds.
    round_ends: [] bool, whether this is the last server update of the round;
      always true in synchronous rounds.
  """

  summed: Any
  kept: Any
  client_id: jax.Array
  staleness: jax.Array | None = None
  round_ends: jax.Array | bool = True


def _predict(group, variables, x):
  return group.model.apply(variables, x)[0]


def _model_of(group):
  return (group.model,)


class FederatedAlgorithm(NamedTuple):
  """A federated algorithm; every function is pure and traceable.

  Attributes:
    init: `(key) -> server`, the server's initial state.
    init_client: `(group, client_id, key) -> client`, the client state between
      visits; () for none.
    downlink: `(server, group, visit) -> downlink`, the pytree sent to one
      client. Parts that do not depend on the client are never copied per
      client: batching leaves them shared.
    client_update: `(group, client, downlink, data, visit) ->
      (client, uplink, metrics)`; `metrics` maps names to scalars.
    server_update: `(server, {group name: Received}, turn) -> (server,
      metrics)`, with a `Turn`; `metrics` maps names to scalars, NaN for what
      this update did not measure. A server that trains must return some, since
      only then is its new state checked for NaN and infinity; see
      `visits.server_turn`.
    client_model: `(server, client, group) -> variables` to evaluate.
    personal: Whether `client_model` depends on the client; if not, one model
      per group is evaluated.
    one_model: Whether `client_model` and the predictions are the same for all
      groups, so that one evaluation serves them all.
    predict: `(group, variables, x) -> logits [B, C]`.
    views: {name: predict}, additional predictions to evaluate.
    warm_up: Like `client_update`, run once by every client before the first
      round, such as pre-training. `server_update` receives its uplinks. None
      for no warm-up.
    calibrate: `(server, data) -> server`: the server state used in evaluation,
      such as norm statistics over all clients' data. None for the server state
      itself.
    max_staleness: `server_update` drops uploads with a larger staleness, and
      the clock does not count them as updates; None for no limit.
    sent_shares: `(group, sizes [n] int) -> (down, up)`, numbers or [n]: the
      expected shares of optional parts (`Maybe`) that visits of clients with so
      many examples send, for the clock. None for 1, 1.
    trained_models: `(group) -> (model, ...)`: the models that a client of the
      group trains, and of nets within one another the widest; its parameters
      and its work are taken as their sums. By default `group.model`; a method
      whose clients train a part of it, or further models, says which, for
      reports and estimates.
    facts: `() -> {name: value}`, JSON values about the run that the report
      shows, computed before the first round; it may compile programs. None for
      none.
  """

  init: Callable[..., Any]
  init_client: Callable[..., Any]
  downlink: Callable[..., Any]
  client_update: Callable[..., tuple[Any, Uplink, dict[str, jax.Array]]]
  server_update: Callable[..., tuple[Any, dict[str, jax.Array]]]
  client_model: Callable[..., Any]
  personal: bool = False
  one_model: bool = False
  predict: Callable[..., jax.Array] = _predict
  views: Mapping[str, Callable[..., jax.Array]] = {}
  warm_up: Callable[..., tuple[Any, Uplink, dict[str, jax.Array]]] | None = None
  calibrate: Callable[..., Any] | None = None
  max_staleness: int | None = None
  sent_shares: Callable[..., tuple[Any, Any]] | None = None
  trained_models: Callable[[Group], tuple[BlockModel, ...]] = _model_of
  facts: Callable[[], Mapping[str, Any]] | None = None
