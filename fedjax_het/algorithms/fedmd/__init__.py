"""FedMD: distils a consensus of logits on a public set; no parameters travel.

All clients and the server hold the public set. Before round 1 a client trains
on it, then on its own data (`warm_up`). Subset X_t has N_a public examples, the
same for all clients. With z_k the raw logits of client k in inference mode,

  publish:  Z_t = mean_k z_k(X_t)
  digest:   minimise mean |z_k(x) - Z_t(x)| over X_t, in training mode
  revisit:  minimise the cross-entropy on the client's own data.

The server stores the number t and sends it with Z_t. A visit has one exchange:
the client digests Z_t, revisits, and then publishes z_k(X_{t+1}) with the
number t + 1; the warm-up publishes z_k(X_0). At the end of a round the server
averages the uploads for X_{t+1} into the next consensus and increments t.
Without uploads it keeps Z_t. If all clients take part, this is exactly the
paper's round, because the consensus is that of the models at the start of the
round. With a sampled cohort, a consensus is that of the previous cohort; the
first one is that of all clients.

In an asynchronous run a round is a number of uploads. A client may have
downloaded t although the server has incremented its number since. If it uploads
logits for the server's current subset, they join that consensus, which is the
mean of all uploads for the subset. Uploads for older subsets are discarded. A
client that uploads twice counts twice.

Choices that the sources leave open:

- The authors' code stops both phases of pre-training early on test data. Here
  each phase holds out a tenth of its own data for early stopping. A phase with
  patience 0 trains on all of its data for all epochs. The last parameters are
  kept, not the best ones.
- The authors' code keeps two optimisers during a whole run: one for digesting,
  one for training on private data (from the transfer phase on). This module
  does the same. With `local.keep_optimizer=False` both are reset in every
  visit.
- The authors' nets have an L2 term on the last kernel. Use `local.weight_decay`
  instead.
- Without warm-up there is no consensus in round 1, and clients only revisit.

References:
  Li and Wang, `FedMD: Heterogenous Federated Learning via Model Distillation
  <https://arxiv.org/abs/1910.03581>`_, 2019, Algorithm 1.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.fedmd.server import Server, collect, no_logits
from fedjax_het.algorithms.fedmd.subsets import public_subset, subset_size
from fedjax_het.algorithms.fedmd.warm_up import Phase, pretrain_and_transfer
from fedjax_het.engine.local import fit, init_optimizer, model_loss
from fedjax_het.engine.needs import requires
from fedjax_het.engine.phases import inference_logits, passes
from fedjax_het.engine.task import masked_mean
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Maybe,
  Uplink,
)
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.options import at_least, not_negative


class Sent(NamedTuple):
  """The downlink of a client.

  Attributes:
    seed: As in `Server`.
    number: As in `Server`.
    consensus: `Maybe` of [N_a, C], mean logits on subset `number` (Z_t).
  """

  seed: jax.Array
  number: jax.Array
  consensus: Maybe


class Client(NamedTuple):
  """FedMD's client state.

  Attributes:
    variables: Its model.
    digest_state: The optimiser's state of the digest; None if it is reset.
    private_state: The optimiser's state of transfer and revisits; None if it is
      reset.
  """

  variables: Variables
  digest_state: Any
  private_state: Any


def digest_loss(model: BlockModel, consensus):
  """Mean |z_k(x) - Z_t(x)|, as `fit` takes it; `consensus` is Z_t [N_a, C]."""

  def loss_fn(variables, batch, key):
    logits, stats = model.apply(
        variables, batch.x, train=True, mask=batch.mask, key=key
    )
    gap = logits - consensus[batch.position]
    # mean |z_k(x) - Z_t(x)|. Not `jnp.abs`, whose derivative at 0 is 1: equal
    # logits need gradient 0.
    gap = jnp.mean(gap * jax.lax.stop_gradient(jnp.sign(gap)), axis=1)
    return masked_mean(gap, batch.mask), (stats, {})

  return loss_fn


@requires(public='labelled', keep_optimizer=True, task='classification')
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

  A client uploads N_a C logits and the subset's number. It downloads the same
  and a seed of 8 bytes. Sending the public set once is not counted.

  Args:
    federation: Groups and local training. A revisit has its epochs and batch
      size; all phases have its optimiser and learning rate.
    num_alignment: Public examples in a subset, N_a; None for 5,000, or all
      public examples if there are fewer.
    digest_epochs: Passes over the subset in a digest.
    digest_batch_size: Batch size of a digest.
    pretrain_epochs: Maximum number of passes over the public set before round
      1.
    pretrain_batch_size: Batch size of these passes.
    pretrain_patience: Passes without a gain after which they end; 0 for never.
    transfer_epochs: Maximum number of passes over the client's own data after
      pre-training.
    transfer_batch_size: Batch size of these passes.
    transfer_patience: As `pretrain_patience`, for these passes.
    min_delta: Accuracy in [0, 1] that a gain must exceed.

  Returns:
    The algorithm; its client state is a `Client`, its server state a `Server`.

  Raises:
    ValueError: If there is no public set, `num_alignment` exceeds it, an
      option is out of range, or models differ in their number of outputs.
  """
  at_least(
      1,
      digest_batch_size=digest_batch_size,
      pretrain_batch_size=pretrain_batch_size,
      transfer_batch_size=transfer_batch_size,
  )
  at_least(
      0,
      digest_epochs=digest_epochs,
      pretrain_epochs=pretrain_epochs,
      pretrain_patience=pretrain_patience,
      transfer_epochs=transfer_epochs,
      transfer_patience=transfer_patience,
  )
  not_negative(min_delta=min_delta)
  local, num_public = federation.local, federation.num_public
  num_alignment = subset_size(num_alignment, num_public)
  nothing = functools.partial(
      no_logits, num_alignment, federation.num_classes
  )
  keep_optimizer = local.keeps_optimizer(True)
  digest = passes(local, digest_epochs, min(digest_batch_size, num_alignment))
  pretrain = Phase(
      passes(local, pretrain_epochs, min(pretrain_batch_size, num_public)),
      pretrain_patience,
      min_delta,
  )
  transfer = Phase(
      passes(local, transfer_epochs, transfer_batch_size),
      transfer_patience,
      min_delta,
  )

  def init(key):
    # A key that differs from those of the models.
    seed = jax.random.key_data(jax.random.fold_in(key, 2))
    return Server(seed, jnp.int32(0), nothing(), nothing())

  def kept(state):
    return state if keep_optimizer else None

  def init_client(group, client_id, key):
    del client_id
    variables = group.model.init(key)
    state = kept(init_optimizer(local, variables.params))
    return Client(variables, state, state)

  def downlink(server, group, visit):
    total, count = server.current
    # Z_t = mean_k z_k(X_t).
    consensus = Maybe(total / jnp.maximum(count, 1), count > 0)
    return Sent(server.seed, server.number, consensus)

  def uplink(group, variables, sent, number, data):
    subset = public_subset(sent.seed, number, data, num_alignment)
    # z_k(X_t).
    logits = inference_logits(group.model, variables, subset)
    return Uplink(logits, number)

  def warm_up(group, client, sent, data, visit):
    variables, state, metrics = pretrain_and_transfer(
        group.model, client.variables, data, visit, pretrain, transfer
    )
    client = client._replace(variables=variables, private_state=kept(state))
    sending = uplink(group, variables, sent, sent.number, data)
    return client, sending, metrics

  def client_update(group, client, sent, data, visit):
    subset = public_subset(sent.seed, sent.number, data, num_alignment)
    z_t, known = sent.consensus
    # Digest: minimise mean |z_k(x) - Z_t(x)| over X_t, if there is a Z_t.
    variables, digest_state, digested, _ = fit(
        digest_loss(group.model, z_t),
        digest,
        client.variables,
        subset.replace(size=jnp.where(known, subset.size, 0)),
        visit._replace(key=jax.random.fold_in(visit.key, 2)),
        opt_state=client.digest_state,
    )
    # Revisit: minimise the cross-entropy on the client's own data.
    variables, private_state, metrics, _ = fit(
        model_loss(group.model, local.task),
        local,
        variables,
        data,
        visit,
        opt_state=client.private_state,
    )
    metrics['digest_loss'] = digested['train_loss']
    client = Client(variables, kept(digest_state), kept(private_state))
    # Publish z_k(X_{t+1}).
    sending = uplink(group, variables, sent, sent.number + 1, data)
    return client, sending, metrics

  def server_update(server, received, turn):
    del turn
    return collect(server, received, federation.num_clients), {}

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
