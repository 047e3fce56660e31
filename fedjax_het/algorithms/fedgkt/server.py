"""FedGKT's server: its net, and its training on the clients' uploads."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.uploads import gather_uploads
from fedjax_het.data.federated import InMemory
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.local import fit_and_record, map_examples
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.types import (
  Federation,
  LocalTraining,
  Maybe,
  Received,
  Turn,
)
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.options import one_of


class Server(NamedTuple):
  """FedGKT's server state.

  Attributes:
    net: Variables of its net (W_s).
    opt_state: Its optimiser's state.
    logits: `Maybe` of [num_clients, M, C], z_s by client and by the example's
      position in the client's table.
  """

  net: Variables
  opt_state: Any
  logits: Maybe


class Uploads(NamedTuple):
  """The uploads of a round, in S slots of M examples.

  Attributes:
    client_id: [S] int32; padding slots hold the number of clients.
    h: [S, M, ...] features.
    z_c: [S, M, C] logits.
    y: [S, M] labels.
    sizes: [S] int32, examples of each client; 0 in padding slots.
  """

  client_id: jax.Array
  h: jax.Array
  z_c: jax.Array
  y: jax.Array
  sizes: jax.Array


class Tail(NamedTuple):
  """The server's net: the blocks of a model from position `begin` on."""

  model: BlockModel
  begin: int

  def init(self, key) -> Variables:
    """Draws its variables."""
    return self.model.init(key, self.model.span(self.begin))

  def apply(self, variables, h, **kwargs):
    """Maps features to logits; see `BlockModel.apply`."""
    return self.model.apply(variables, h, start=self.begin, **kwargs)


def choose_server(
    federation: Federation, name: str | None, shape: tuple[int, ...]
) -> Tail:
  """The server's net.

  Args:
    federation: The federation.
    name: Name of the group whose model is used; None for
      `federation.server_model`, or without one for the groups' model with the
      most blocks (if several, the first by group name).
    shape: Shape of one example's features.

  Returns:
    The blocks of that model behind its cut.

  Raises:
    ValueError: If no group has that name, both a name and a server model are
      given, or the net does not fit the features or the clients' number of
      outputs.
  """
  groups = {group.name: group.model for group in federation.groups}
  model = federation.server_model
  if name is not None:
    one_of('server_group', name, tuple(groups))
    if model is not None:
      raise ValueError(
          f'server_group={name!r} and server_model={model.name!r} both name '
          "the server's net; give one of them."
      )
    model = groups[name]
  elif model is None:
    deepest = min(groups, key=lambda n: (-len(groups[n].blocks), n))
    model = groups[deepest]
  takes, outputs = model.shapes[model.cut[0] - 1], model.num_classes
  if (takes, outputs) != (shape, federation.num_classes):
    raise ValueError(
        f'server_model={model.name!r} takes features of shape {takes} and has '
        f'{outputs} outputs; the clients have {shape} and '
        f'{federation.num_classes}.'
    )
  return Tail(model, model.cut[0])


def server_loss(
    net: Tail, task: Task, z_c, temperature: float, alpha: float | None
) -> Callable[..., Any]:
  """The loss of the server on one client, as `fit_and_record` takes it.

  Args:
    net: The server's net.
    task: The task.
    z_c: [M, C] logits of the client's examples.
    temperature: T.
    alpha: Weight of the cross-entropy; None for the cross-entropy alone.

  Returns:
    The loss function, whose outputs are z_s [B, C].
  """

  def loss_fn(variables, batch, key):
    z_s, stats = net.apply(
        variables, batch.x, train=True, mask=batch.mask, key=key
    )
    loss = task.loss(z_s, batch.y, batch.mask)
    if alpha is not None:
      # alpha CE(z_s, y) + T^2 KL(softmax(z_c/T) || softmax(z_s/T)).
      gap = distillation(z_s, z_c[batch.position], temperature)
      loss = alpha * loss + masked_mean(gap, batch.mask)
    return loss, (stats, {}, z_s)

  return loss_fn


def gather(received: Mapping[str, Received], num_clients: int) -> Uploads:
  """Concatenates the uploads of all groups.

  Args:
    received: {group: Received}.
    num_clients: The id that padding slots hold.

  Returns:
    The uploads.
  """
  ids, messages = gather_uploads(received)
  sizes = jnp.sum(messages.present, axis=1)
  return Uploads(ids, *messages.value, jnp.where(ids < num_clients, sizes, 0))


def write_rows(rows: Maybe, z_s, batch) -> Maybe:
  """Writes z_s [B, C] of a batch's examples into their rows of [M, C]."""
  place = jnp.where(batch.mask, batch.position, len(rows.present))
  return Maybe(
      rows.value.at[place].set(z_s, mode='drop'),
      rows.present.at[place].set(True, mode='drop'),
  )


def train_server(
    server: Server,
    uploads: Uploads,
    local: LocalTraining,
    epochs: int,
    turn: Turn,
    loss_fn: Callable[[jax.Array], Callable[..., Any]],
) -> tuple[Server, Maybe, jax.Array]:
  """Trains the server's net on one client after another, for some epochs.

  Clients are visited in the order of their ids; each has its own batches.

  Args:
    server: The server's state.
    uploads: The examples.
    local: Settings of one pass over the examples of one client.
    epochs: E_s.
    turn: The server's turn.
    loss_fn: Maps z_c [M, C] of a client to its `server_loss`.

  Returns:
    The server with its new net and optimiser state, z_s of all slots
    [S, M, C] as the last epoch that took the example computed them (none has if
    `local.drop_last` left it out each time), and the mean loss over all steps.
  """
  order = jnp.argsort(uploads.client_id)  # Padding slots come last.
  num_real = jnp.sum(uploads.client_id < len(server.logits.present))

  def visit_client(i, state, key):
    net, opt_state, logits, loss, steps = state
    slot = order[i]
    client_id, h, z_c, y, size = jax.tree.map(lambda a: a[slot], uploads)
    # W_s <- W_s - lr grad (alpha CE(z_s, y) + T^2 KL(softmax(z_c/T) ||
    # softmax(z_s/T))) on each of the client's batches, by the optimiser.
    net, opt_state, means, num_steps, rows = fit_and_record(
        loss_fn(z_c),
        local,
        net,
        InMemory(h, y, size),
        turn._replace(key=jax.random.fold_in(key, client_id)),
        record=jax.tree.map(lambda a: a[slot], logits),
        add=write_rows,
        opt_state=opt_state,
    )
    loss += means['train_loss'] * num_steps
    logits = jax.tree.map(lambda a, row: a.at[slot].set(row), logits, rows)
    return net, opt_state, logits, loss, steps + num_steps

  def epoch(e, state):
    key = jax.random.fold_in(turn.key, e)
    return jax.lax.fori_loop(
        0, num_real, lambda i, state: visit_client(i, state, key), state
    )

  net, opt_state, logits, loss, steps = jax.lax.fori_loop(
      0,
      epochs,
      epoch,
      (
          server.net,
          server.opt_state,
          Maybe(
              jnp.zeros_like(uploads.z_c), jnp.zeros(uploads.y.shape, bool)
          ),
          jnp.float32(0.0),
          jnp.int32(0),
      ),
  )
  trained = server._replace(net=net, opt_state=opt_state)
  # NaN if no upload was trained on.
  mean = jnp.where(steps > 0, loss / jnp.maximum(steps, 1), jnp.nan)
  return trained, logits, mean


def eval_logits(net: Tail, variables: Variables, uploads: Uploads) -> Maybe:
  """[S, M, C]: z_s of all examples in eval mode."""

  def one(examples):
    return map_examples(
        lambda batch: net.apply(variables, batch.x, mask=batch.mask)[0],
        InMemory(*examples),
    )

  z_s = jax.lax.map(one, (uploads.h, uploads.y, uploads.sizes))
  return Maybe(z_s, jnp.arange(z_s.shape[1])[None] < uploads.sizes[:, None])
