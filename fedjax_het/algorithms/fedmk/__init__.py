"""FedMK: clients upload learned examples; the server trains on all of them.

w is the server's model, phi_i a weight of example i, sg the stop-gradient. In
a round, client k, whose examples have the labels Y_k, and the server do

  down:    w, and examples of the labels Y_k that other clients have uploaded;
  client:  X_k <- the received examples; normal noise for a label without any
           y_k: `per_class` examples of each label of Y_k, fixed
           for every local step, with a minibatch (x, y) of its own examples:
             w' = w - eta_in grad_w CE(X_k, y_k; w)
             phi_i = sg(sigmoid(tau CE(x_i, y_i; w'))), divided by their mean
             X_k <- step along -grad_X_k mean_i phi_i CE(x_i, y_i; w')
             X_k <- clip to the range of the inputs
  up:      X_k, y_k;
  server:  stores (X_k, y_k), then w <- epochs of CE on all that is stored.

The gradient of X_k is taken through w': it has second derivatives of the
inner loss. No parameters travel up. The examples are learned, but what they
show of a client's data is not bounded.

All clients hold the architecture of the server, since X_k is learned for its
w. Evaluated is w, the same for all clients.

The sources leave open, or we had no text of them:

- Local steps are those of the federation's local training. X_k and w have its
  optimiser, renewed in every visit and round; w has its learning rate.
- phi_i is of the loss at w', without another pass, and has mean 1.
- The server trains on the latest upload of every client that has ever sent
  one. It knows Y_k from them; a client in its first visit is sent examples of
  all labels.
- Received examples are drawn without replacement from all other clients.
- Norms take the statistics of the batch, the inner loss those of X_k. The
  running statistics are those of the server's minibatches.
- The paper's server also samples from a generator fitted to the uploads. It is
  left out.

References:
  Liu, Yu, Zhou, `Meta Knowledge Condensation for Federated Learning
  <https://arxiv.org/abs/2209.14851>`_, ICLR 2023.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.label_masks import owned_labels
from fedjax_het.aggregation.uploads import gather_uploads, keep_latest
from fedjax_het.algorithms.fedmk.condense import Setting, condense
from fedjax_het.algorithms.fedmk.sets import (
  draw_from_others,
  empty_sets,
  labels_of,
  union_of,
)
from fedjax_het.engine.local import train_model
from fedjax_het.engine.needs import requires
from fedjax_het.engine.phases import passes
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Maybe,
  Uplink,
)
from fedjax_het.models.blocks import Variables
from fedjax_het.options import at_least, check_type, not_negative, positive

# A fold of the visit's key for each further draw.
_DRAW, _NOISE = 2, 3


class Server(NamedTuple):
  """The server state, for K clients, C classes and P examples of each.

  Attributes:
    model: w.
    sets: `Maybe` of the latest `Learned` [K, C, P, ...] of every client; its
      mask [K, C] is Y_k, False before a client's first upload.
  """

  model: Variables
  sets: Maybe


class Sent(NamedTuple):
  """The downlink.

  Attributes:
    model: w.
    start: `Maybe` of `Learned` [C, P, ...] of other clients; its mask is [C].
  """

  model: Variables
  start: Maybe


@requires(one_model=True, local_stats=False, task='classification')
def fedmk(
    federation: Federation,
    *,
    per_class: int = 4,
    inner_lr: float = 0.1,
    condense_lr: float = 0.1,
    tau: float = 5.0,
    server_epochs: int = 10,
    server_batch_size: int | None = None,
) -> FederatedAlgorithm:
  """FedMK.

  In an asynchronous run the server trains once per upload.

  Args:
    federation: Groups of one model, and local training: its epochs or steps are
      those of the condensation, its learning rate is the server's.
    per_class: Examples that a client learns of each of its labels.
    inner_lr: eta_in, the learning rate of the inner step.
    condense_lr: The learning rate of the learned examples.
    tau: How much an example's weight depends on its loss; 0 for equal weights.
      Below 0, examples of a small loss count more.
    server_epochs: Passes of the server over all uploads in a round.
    server_batch_size: Batch size of these passes; None for that of the clients.

  Returns:
    The algorithm, whose server state is a `Server`; clients keep nothing.
    Metrics: the weighted loss of the own examples at w' ('train_loss') and the
    loss of the learned ones at w ('learned_loss'). The server's metric is
    'server_loss'.

  Raises:
    ValueError: If an option is out of range, or inputs are token ids.
  """
  at_least(1, per_class=per_class, server_epochs=server_epochs)
  not_negative(inner_lr=inner_lr)
  positive(condense_lr=condense_lr)
  check_type('tau', tau, float)
  local, model = federation.local, federation.groups[0].model
  if server_batch_size is not None:
    at_least(1, server_batch_size=server_batch_size)
  if model.vocabulary is not None:
    raise ValueError(
        f'fedmk learns inputs by gradient steps; those of {model.name!r} are '
        'token ids.'
    )
  num_classes = federation.num_classes
  training = passes(local, server_epochs, server_batch_size)
  setting = Setting(inner_lr, condense_lr, tau)

  def init(key):
    sets = empty_sets(model, federation.num_clients, per_class)
    return Server(model.init(key), sets)

  def downlink(server, group, visit):
    key = jax.random.fold_in(visit.key, _DRAW)
    return Sent(
        server.model, draw_from_others(server.sets, visit.client_id, key)
    )

  def client_update(group, client, sent, data, visit):
    # X_k <- the received examples, or noise.
    start, y_k = sent.start, labels_of(num_classes, per_class)
    key = jax.random.fold_in(visit.key, _NOISE)
    noise = jax.random.normal(key, start.value.x.shape)
    received = jnp.expand_dims(start.present, range(1, noise.ndim))
    x_k = jnp.where(received, start.value.x, noise)
    owned = owned_labels(data, num_classes)
    learned, metrics = condense(
        group.model, local, setting, sent.model, x_k, y_k, owned, data, visit
    )
    return client, Uplink((), Maybe(learned, owned)), metrics

  def server_update(server, received, turn):
    sets = keep_latest(server.sets, *gather_uploads(received))
    # w <- epochs of CE on all that is stored.
    end, metrics, num_steps = train_model(
        model, training, server.model, union_of(sets), turn
    )
    loss = jnp.where(num_steps > 0, metrics['train_loss'], jnp.nan)
    return Server(end, sets), dict(server_loss=loss)

  return FederatedAlgorithm(
      init=init,
      init_client=lambda group, client_id, key: (),
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: server.model,
      one_model=True,
  )
