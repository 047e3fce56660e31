"""FedH2L: mutual distillation on published seeds, without gradient conflicts.

No parameters travel. Once, client i publishes its seeds S_i: inputs and labels
of a part of its examples. With P_j = softmax(f_j) on all seeds, a round is

  1. Client i receives the latest P_j of all other clients j.
  2. For every minibatch of its own examples, which include S_i,
       L_loc  = CE on the minibatch
       L_glob = mean over l != i, over a minibatch of S_l, of
                CE + lambda mean_{j != i} KL(P_j || softmax f_i)
       g_l, g_g = their gradients over all parameters
       z = g_g                                     if <g_l, g_g> >= 0
           g_g - (<g_l, g_g> / ||g_l||^2) g_l      otherwise
     and the optimiser steps with g_l + z.
  3. It sends P_i on all seeds.

z is the vector closest to g_g with <z, g_l> >= 0: to first order, learning from
others does not raise the loss on the client's own data.

Seeds are published in the warm-up. A client downloads those of the others in
its first visit and keeps them, so later visits do not count them as traffic. A
visit has one exchange: P_i is sent at its end, for the next round, which begins
with the same model. The server only stores and forwards. With a sampled cohort,
the P_j of clients outside the last cohort are from an earlier round; the mean
is over the clients that have sent one. In round 1 there are none, and L_glob
is the cross-entropy.

Seeds and labels leave the device, so clients have less privacy than in methods
that send models. Seeds travel as the models' inputs, float32 for images, and
are not augmented, except in their owner's own minibatches.

The sources leave open, and are our choice:

- A step has one minibatch of the local batch size from all S_l together. A seed
  of client l has the weight 1 / |S_l|, so that all clients count equally.
- P_j teaches on all seeds. With `teachers='owner'` it teaches on S_j alone,
  and only P_j on S_j travels.
- Both losses and the KL divergence have weight 1; the temperature is 1.
- The running statistics of norms follow both minibatches, local ones first.

References:
  Li, Zhou, Wang, Mi, Hospedales, `FedH2L: Federated Learning with Model and
  Statistical Heterogeneity <https://arxiv.org/abs/2101.11296>`_, 2021.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.aggregation.uploads import gather_uploads, keep_latest
from fedjax_het.algorithms.fedh2l.seeds import (
  EMPTY,
  Seeds,
  no_seeds,
  num_slots,
  publish_seeds,
)
from fedjax_het.algorithms.fedh2l.steps import (
  UPDATES,
  Sent,
  Setting,
  log_posteriors,
  make_step,
)
from fedjax_het.engine.local import init_optimizer, train_epochs
from fedjax_het.engine.needs import requires
from fedjax_het.engine.rows import take_row
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Maybe,
  Uplink,
)
from fedjax_het.models.blocks import Variables
from fedjax_het.options import between, not_negative, one_of


class Server(NamedTuple):
  """What the server forwards, for K clients of S slots.

  Attributes:
    seeds: `Seeds` [K, S, ...].
    holds: [K] bool, which clients have received the others' seeds.
    log_p: `Maybe` of log P_j, the latest of each client: [K, K S, C], or [K, S,
      C] on each client's own seeds with `teachers='owner'`.
  """

  seeds: Seeds
  holds: jax.Array
  log_p: Maybe


class Client(NamedTuple):
  """A client's model and its optimiser's state, None if that is not kept."""

  variables: Variables
  opt_state: Any


@requires(sizes=True, keep_optimizer=True, task='classification')
def fedh2l(
    federation: Federation,
    *,
    seed_fraction: float = 0.1,
    distill_weight: float = 1.0,
    teachers: str = 'all',
    project: bool = True,
    update: str = 'sum',
) -> FederatedAlgorithm:
  """FedH2L over clients of any architectures.

  Args:
    federation: Groups, local training and the clients' sizes. Clients keep
      their optimiser's state unless `local.keep_optimizer` is False.
    seed_fraction: Share of a client's examples that it publishes, in [0, 1),
      the same share of each class. A client of few examples may publish none.
      With 0 clients only train locally.
    distill_weight: lambda, the factor on the KL divergence.
    teachers: The P_j that teach on a seed: 'all' for those of all other
      clients, 'owner' for that of the client that published it.
    project: Whether conflicting gradients are projected; if not, z = g_g.
    update: 'sum' for one step with g_l + z. 'alternate' for a step with g_l,
      then one with z, whose g_g is taken behind the first step.

  Returns:
    The algorithm; its states are a `Server` and `Client`s. Metrics: the mean
    L_loc ('train_loss'), both terms of L_glob ('seed_loss' and, before
    lambda, 'distillation_loss'), and 'conflicts', the share of local steps with
    <g_l, g_g> < 0.

  Raises:
    ValueError: If sizes are unknown, an option is unknown or out of range, or
      models differ in their number of outputs.
  """
  between(0, 1, below=True, seed_fraction=seed_fraction)
  not_negative(distill_weight=distill_weight)
  one_of('teachers', teachers, ('all', 'owner'))
  one_of('update', update, UPDATES)
  local, slots = federation.local, num_slots(federation, seed_fraction)
  num, num_classes = federation.num_clients, federation.num_classes
  keep = local.keeps_optimizer(True)
  setting = Setting(distill_weight, project, update)

  def init(key):
    del key
    rows = slots if teachers == 'owner' else num * slots
    nothing = Maybe(
        jnp.zeros((num, rows, num_classes)), jnp.zeros((num, rows), bool)
    )
    return Server(
        no_seeds(federation, slots), jnp.zeros(num, bool), nothing
    )

  def init_client(group, client_id, key):
    del client_id
    variables = group.model.init(key)
    state = init_optimizer(local, variables.params) if keep else None
    return Client(variables, state)

  def downlink(server, group, visit):
    others = (jnp.arange(num) != visit.client_id)[:, None]
    new = (server.seeds.y != EMPTY) & others & ~server.holds[visit.client_id]
    # [K, K S, C] stays; with owners [K, S, C] becomes [1, K S, C].
    log_p = jax.tree.map(
        lambda a: a.reshape((-1, num * slots, *a.shape[2:])),
        server.log_p._replace(present=server.log_p.present & others),
    )
    return Sent(Maybe(server.seeds, new), log_p)

  def warm_up(group, client, sent, data, visit):
    # Publish S_i.
    return client, Uplink((), publish_seeds(data, seed_fraction, slots)), {}

  def client_update(group, client, sent, data, visit):
    tx = local.optimizer(local.learning_rate(visit.round_num))
    state = client.opt_state if keep else tx.init(client.variables.params)
    (variables, state), metrics, _ = train_epochs(
        make_step(group.model, local, tx, sent, visit.client_id, setting),
        (client.variables, state),
        data,
        visit.key,
        epochs=local.epochs,
        batch_size=local.batch_size,
        drop_last=local.drop_last,
        steps=local.steps,
    )
    # Publish P_i.
    seeds = sent.seeds.value
    if teachers == 'owner':
      seeds = take_row(seeds, visit.client_id)
    else:
      seeds = seeds.flat()
    log_p = log_posteriors(group.model, variables, seeds)
    client = Client(variables, state if keep else None)
    return client, Uplink((), log_p), metrics

  def server_update(server, received, turn):
    del turn
    ids, sent = gather_uploads(received)
    if isinstance(sent.value, Seeds):  # From the warm-up.
      seeds = keep_latest(server.seeds, ids, sent.value)
      return server._replace(seeds=seeds), {}
    return server._replace(
        holds=server.holds.at[ids].set(True, mode='drop'),
        log_p=keep_latest(server.log_p, ids, sent),
    ), {}

  def published(sizes):
    """|S_i| of clients of so many examples, as `hold_out` counts."""
    number = sizes - np.round((1 - seed_fraction) * sizes)
    return np.minimum(number, np.maximum(sizes - 1, 0))

  def sent_shares(group, sizes):
    """Those of a later visit, which receives no seeds."""
    own, total = published(sizes), np.sum(published(federation.sizes))
    rows, inputs = num * slots, np.prod(group.model.input_shape)
    if teachers == 'owner':
      copies, up, down = 1, own / slots, total - own
    else:
      copies, up = num, np.full(len(sizes), total / rows)
      down = np.full(len(sizes), (num - 1) * total)
    numbers = rows * (inputs + 1 + copies * num_classes)
    return down * num_classes / numbers, up

  return FederatedAlgorithm(
      init=init,
      init_client=init_client,
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: client.variables,
      personal=True,
      warm_up=warm_up,
      sent_shares=sent_shares,
  )
