"""FedMD: consensus on the logits of a public set, no weights.

Everybody holds the public set. Before round 1 a client trains on it, then on
its own data (`warm_up`). Subset X_t has N_a public examples, equal for all.
With z_k the raw logits of client k in inference mode,

  publish:  Z_t = mean_k z_k(X_t)
  digest:   minimise mean |z_k(x) - Z_t(x)| over X_t, in training mode
  revisit:  minimise the cross-entropy of the own data.

The server owns the number t and sends it with Z_t. A visit has one exchange:
it digests Z_t, revisits, and then publishes z_k(X_{t+1}), naming t + 1; the
warm-up publishes z_k(X_0). When a round ends, the uploads for X_{t+1} become
the consensus and t + 1 the number; without any, Z_t stays. Where all clients
take part this is the paper's round exactly, for its consensus is that of the
weights at the round's start. Where a cohort is drawn, a consensus is that of
the cohort before (the first: of all clients).

Under a clock, a round is a number of uploads, and a client that downloaded t
may find the server at a later number. Its upload for the number in force joins
that consensus, which stays the mean of all uploads for that subset; an upload
for an older subset is left out. A client that uploads twice counts twice.

Choices where the sources leave one:

- The authors' code stops both phases of pre-training early on test data. Here
  each phase holds back a tenth of its own data for that; a phase whose patience
  is 0 trains on all of them for all its epochs. The last weights are kept, not
  the best.
- The authors' code keeps two optimisers for a whole run, one that digests and
  one that trains on private data (from the transfer on). So does
  this does, unless `local.keep_optimizer` is False: both then begin anew in
  every visit.
- The L2 term that the authors' nets have on the last kernel is left to
  `local.weight_decay`.
- Without warm-up there is no consensus in round 1, which then only revisits.

References:
  Li and Wang, `FedMD: Heterogenous Federated Learning via Model Distillation
  <https://arxiv.org/abs/1910.03581>`_, 2019, Algorithm 1.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data.federated import ClientData
from fedjax_het.engine.local import (
  fit,
  init_optimizer,
  map_examples,
  model_loss,
  shuffled_positions,
)
from fedjax_het.engine.needs import requires
from fedjax_het.engine.options import at_least, not_negative
from fedjax_het.engine.task import masked_mean
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Maybe,
  Uplink,
)
from fedjax_het.models.blocks import BlockModel, Variables

# N_a of all the authors' experiments.
NUM_ALIGNMENT = 5000


class Logits(NamedTuple):
  """Uploads for one subset.

  Attributes:
    total: [N_a, C] float32, their sum.
    count: [] int32, their number.
  """

  total: jax.Array
  count: jax.Array


class Server(NamedTuple):
  """What the server keeps.

  Attributes:
    seed: The data of a random key, 8 bytes, from which all draw the subsets.
    number: [] int32, t, the number of the subset in force.
    current: The uploads for X_t; their mean is the consensus Z_t.
    coming: The uploads for X_{t+1} so far.
  """

  seed: jax.Array
  number: jax.Array
  current: Logits
  coming: Logits


class Sent(NamedTuple):
  """What a client is sent.

  Attributes:
    seed: As the server's.
    number: As the server's.
    consensus: `Maybe` of [N_a, C], mean logits on subset `number` (Z_t).
  """

  seed: jax.Array
  number: jax.Array
  consensus: Maybe


class Client(NamedTuple):
  """What a client keeps.

  Attributes:
    variables: Its model.
    digest_state: Optimiser of the digest; None if optimisers begin anew.
    private_state: Optimiser of transfer and revisits; None likewise.
  """

  variables: Variables
  digest_state: Any
  private_state: Any


def public_subset(seed, number, data: ClientData, size: int) -> ClientData:
  """The public examples of one subset, each class in its proportion.

  Every example has the same chance, size / P; a flat public set gives a flat
  subset where `size` is a multiple of the number of classes.

  Args:
    seed: Data of the key that all share.
    number: [] int32, the subset's number.
    data: Any client's data, with public examples.
    size: N_a, at most their number P.

  Returns:
    The subset as if it were a client's own data, never augmented.
  """
  num = len(data.public)
  key = jax.random.fold_in(jax.random.wrap_key_data(seed), number)
  order = jax.random.permutation(key, num)
  by_class = order[jnp.argsort(data.labels[data.public][order], stable=True)]
  # Evenly spaced places (i P + offset) // N_a, without overflow.
  whole, rest = np.divmod(np.arange(size) * num, size)
  offset = jax.random.randint(jax.random.fold_in(key, 1), (), 0, num)
  place = whole.astype(np.int32) + (rest.astype(np.int32) + offset) // size
  return data.replace(
      index=data.public[by_class[place]],
      size=jnp.int32(size),
      preprocess=_Plain(data.preprocess),
  )


class _Plain(NamedTuple):
  """Preprocessing that does not augment, whatever the key."""

  preprocess: Any

  def __call__(self, images, key=None):
    del key
    return self.preprocess(images)


def digest_loss(model: BlockModel, consensus):
  """Mean absolute difference to the consensus, as `fit` takes it."""

  def loss_fn(variables, batch, key):
    logits, stats = model.apply(
        variables, batch.x, train=True, mask=batch.mask, key=key
    )
    gap = logits - consensus[batch.position]
    # Not `jnp.abs`, whose derivative at 0 is 1: agreement is to move nothing.
    gap = jnp.mean(gap * jax.lax.stop_gradient(jnp.sign(gap)), axis=1)
    return masked_mean(gap, batch.mask), (stats, {})

  return loss_fn


def hold_out(key, data: ClientData) -> tuple[ClientData, ClientData]:
  """Splits a client's data at random, nine to one.

  Args:
    key: A random key.
    data: The data.

  Returns:
    (rest, held out); the latter a tenth, rounded down, at least one example.
  """
  order = shuffled_positions(key, data)
  longest = max(len(order) // 10, 1)
  num = jnp.minimum(jnp.maximum(data.size // 10, 1), data.size)
  held = data.replace(index=data.index[order[:longest]], size=num)
  rest = data.replace(
      index=data.index[jnp.roll(order, -num)], size=data.size - num
  )
  return rest, held


def accuracy(model: BlockModel, variables: Variables, data: ClientData):
  """[] float32: share of a client's examples that a model gets right."""
  num = len(data.index)

  def hits(batch):
    logits, _ = model.apply(variables, batch.x)
    return jnp.argmax(logits, -1) == batch.y

  hit = map_examples(hits, data, num)
  return masked_mean(hit.astype(jnp.float32), jnp.arange(num) < data.size)


def fit_until(
    model, local, start, data, visit, opt_state, *, patience, min_delta
):
  """Trains until accuracy on a tenth held out stops rising, or epochs end.

  Args:
    model: The architecture.
    local: Its `epochs` are the most that are done.
    start: Variables at the beginning.
    data: The data.
    visit: The client's turn.
    opt_state: The optimiser's state to go on with.
    patience: Epochs without a gain after which training ends; 0 trains for
      all epochs on all data.
    min_delta: What counts as a gain must be larger.

  Returns:
    As `fit`; losses are means over the epochs done.
  """
  loss_fn = model_loss(model, local.task)
  if not patience:
    return fit(loss_fn, local, start, data, visit, opt_state=opt_state)
  rest, held = hold_out(jax.random.fold_in(visit.key, 2), data)
  one = dataclasses.replace(local, epochs=1)

  def body(state):
    (variables, opt_state), epoch, loss, steps, best, waited = state
    turn = visit._replace(key=jax.random.fold_in(visit.key, epoch + 3))
    variables, opt_state, means, num = fit(
        loss_fn, one, variables, rest, turn, opt_state=opt_state
    )
    score = accuracy(model, variables, held)
    gained = score > best + min_delta
    return (
        (variables, opt_state),
        epoch + 1,
        loss + means['train_loss'],
        steps + num,
        jnp.where(gained, score, best),
        jnp.where(gained, 0, waited + 1),
    )

  def goes_on(state):
    _, epoch, _, _, _, waited = state
    return (epoch < local.epochs) & (waited < patience)

  # Batched over clients, those that have stopped keep their carry.
  first = (
      (start, opt_state),
      jnp.int32(0),
      jnp.float32(0.0),
      jnp.int32(0),
      jnp.float32(-jnp.inf),
      jnp.int32(0),
  )
  (end, opt_state), epochs, loss, steps, _, _ = jax.lax.while_loop(
      goes_on, body, first
  )
  return end, opt_state, {'train_loss': loss / jnp.maximum(epochs, 1)}, steps


@requires(public='labelled', keep_optimizer=True)
def fedmd(
    federation: Federation,
    *,
    num_alignment: int | None = None,
    digest_epochs: int = 1,
    digest_batch_size: int = 256,
    pretrain_epochs: int = 20,
    pretrain_batch_size: int = 128,
    pretrain_patience: int = 3,
    transfer_epochs: int = 25,
    transfer_batch_size: int = 32,
    transfer_patience: int = 10,
    min_delta: float = 0.001,
) -> FederatedAlgorithm:
  """FedMD.

  Up go the logits, N_a C numbers, and the subset's number; down the same and
  the 8 bytes of a seed. The one-off public set is not counted.

  Args:
    federation: Groups and local training; a revisit is its epochs and batch
      size, and all phases take its optimiser and learning rate.
    num_alignment: Public examples in a subset, N_a; None for 5,000, or all
      public examples where there are fewer.
    digest_epochs: Passes over them.
    digest_batch_size: Examples a step of the digest.
    pretrain_epochs: Most passes over the public set before round 1.
    pretrain_batch_size: Examples a step of those.
    pretrain_patience: Passes without a gain after which they end; 0 for never.
    transfer_epochs: Most passes over the own data, next.
    transfer_batch_size: Examples a step of those.
    transfer_patience: As `pretrain_patience`.
    min_delta: Accuracy in [0, 1] that a gain must exceed.

  Returns:
    The algorithm; its client state is a `Client`, its server state a `Server`.

  Raises:
    ValueError: If there is no public set, `num_alignment` exceeds it, an
      option is out of range, or models differ in their number of outputs.
  """
  num_public = federation.num_public
  if not num_public:
    raise ValueError(
        'fedmd needs a public set; set public_size to its number of examples.'
    )
  if num_alignment is None:
    num_alignment = min(NUM_ALIGNMENT, num_public)
  if not 1 <= num_alignment <= num_public:
    raise ValueError(
        f'num_alignment must be between 1 and the {num_public} public '
        f'examples, got {num_alignment}.'
    )
  sizes = dict(
      digest_batch_size=digest_batch_size,
      pretrain_batch_size=pretrain_batch_size,
      transfer_batch_size=transfer_batch_size,
  )
  at_least(1, **sizes)
  at_least(
      0,
      digest_epochs=digest_epochs,
      pretrain_epochs=pretrain_epochs,
      pretrain_patience=pretrain_patience,
      transfer_epochs=transfer_epochs,
      transfer_patience=transfer_patience,
  )
  not_negative(min_delta=min_delta)
  num_classes = federation.num_classes
  keep_optimizer = federation.local.keeps_optimizer(True)

  def phase(epochs, batch_size):
    return dataclasses.replace(
        federation.local,
        epochs=epochs,
        batch_size=batch_size,
        drop_last=False,
        steps=None,
    )

  digest = phase(digest_epochs, min(digest_batch_size, num_alignment))
  pretrain = phase(pretrain_epochs, min(pretrain_batch_size, num_public))
  transfer = phase(transfer_epochs, transfer_batch_size)

  def no_logits():
    return Logits(jnp.zeros((num_alignment, num_classes)), jnp.int32(0))

  def init(key):
    # A key of its own, apart from those of the models.
    seed = jax.random.key_data(jax.random.fold_in(key, 2))
    return Server(seed, jnp.int32(0), no_logits(), no_logits())

  def downlink(server, group, visit):
    total, count = server.current
    consensus = Maybe(total / jnp.maximum(count, 1), count > 0)  # Z_t
    return Sent(server.seed, server.number, consensus)

  def optimizer_state(params):
    return init_optimizer(federation.local, params)

  def kept(state):
    return state if keep_optimizer else None

  def init_client(group, client_id, key):
    del client_id
    variables = group.model.init(key)
    state = kept(optimizer_state(variables.params))
    return Client(variables, state, state)

  def publish(group, variables, seed, number, data):
    subset = public_subset(seed, number, data, num_alignment)

    def logits(batch):
      return group.model.apply(variables, batch.x)[0]

    return Uplink(map_examples(logits, subset, num_alignment), number)  # z_k

  def warm_up(group, client, sent, data, visit):
    def begin(number):
      return visit._replace(key=jax.random.fold_in(visit.key, number))

    variables = client.variables
    variables, _, public, _ = fit_until(
        group.model,
        pretrain,
        variables,
        data.of_public(),
        begin(2),
        optimizer_state(variables.params),
        patience=pretrain_patience,
        min_delta=min_delta,
    )
    variables, state, own, _ = fit_until(
        group.model,
        transfer,
        variables,
        data,
        begin(3),
        optimizer_state(variables.params),
        patience=transfer_patience,
        min_delta=min_delta,
    )
    metrics = dict(own, pretrain_loss=public['train_loss'])
    uplink = publish(group, variables, sent.seed, sent.number, data)
    client = client._replace(variables=variables, private_state=kept(state))
    return client, uplink, metrics

  def client_update(group, client, sent, data, visit):
    subset = public_subset(sent.seed, sent.number, data, num_alignment)
    known = sent.consensus.present
    variables, digest_state, digested, _ = fit(
        digest_loss(group.model, sent.consensus.value),
        digest,
        client.variables,
        # Without a consensus there is nothing to digest.
        subset.replace(size=jnp.where(known, subset.size, 0)),
        visit._replace(key=jax.random.fold_in(visit.key, 2)),
        opt_state=client.digest_state,
    )
    variables, private_state, metrics, _ = fit(
        model_loss(group.model, federation.task),
        federation.local,
        variables,
        data,
        visit,
        opt_state=client.private_state,
    )
    metrics['digest_loss'] = digested['train_loss']
    uplink = publish(group, variables, sent.seed, sent.number + 1, data)
    return Client(variables, kept(digest_state), kept(private_state)), (
        uplink
    ), metrics

  def server_update(server, received, turn):
    del turn
    seed, number, current, coming = server
    ends = True
    for group in received.values():
      real = group.client_id < federation.num_clients

      # All uploads of one update are for one subset: in synchronous rounds
      # all were sent one number, else there is but one upload.
      def add(logits, wanted, group=group, real=real):
        mine = real & (group.kept == wanted)
        total = jnp.where(jnp.any(mine), group.summed, 0.0)
        return Logits(logits.total + total, logits.count + jnp.sum(mine))

      current, coming = add(current, number), add(coming, number + 1)
      ends = group.round_ends
    moves = ends & (coming.count > 0)
    current, coming = jax.tree.map(
        lambda stay, move: jnp.where(moves, move, stay),
        (current, coming),
        (coming, no_logits()),
    )
    return Server(seed, number + moves, current, coming), {}

  return FederatedAlgorithm(
      init=init,
      init_client=init_client,
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: client.variables,
      personal=True,
      warm_up=warm_up,
  )
