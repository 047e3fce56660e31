"""FedProto: clients of any architecture exchange class means of embeddings.

No parameters travel. f(x), the embedding, is the input of a model's last block,
the vector that the output layer multiplies; its width d must be equal for all
clients. One round, with C_k[j] the prototype of class j on client k:

  1. The server sends C[j] for every class j that it knows.
  2. Client k takes minibatch steps on
       L = CE(F_k(x), y) + lambda R
       R = mean over the batch of |f_k(x) - C[y]|^2 / d            (Eq. 7, 8)
     An example of a class that the server does not know adds 0 to R.
  3. It sends C_k[j], the mean of the embeddings f_k(x) of its class j, for the
     classes that it has                                           (Eq. 3)
     These are the embeddings of the training passes of the last epoch.
  4. The server keeps the last upload of every client, and
       C[j] = mean of C_k[j] over the clients N_j that have class j   (Eq. 6)

Client k predicts the class of the nearest prototype (Eq. 4),

  argmin_j |f_k(x) - C[j]|^2,

or by its output layer (view 'head'). Before the server knows a prototype, both
are the output layer's.

Up, each class takes d + 1 numbers: the paper sends the label with its vector;
here the number is that of the embeddings behind the vector, whose position
gives the class. Down, it takes d numbers.

Where the paper and its authors' code differ, or are silent:

- Eq. 6 as printed weights by |D_kj| / N_j and divides by |N_j|, too; the more
  clients, the shorter its result. Here the mean is plain, as in the code, or
  weighted by examples (`weights='data'`), which minimises the paper's objective
  (Eq. 5).
- R of Eq. 8 sums the distances between the means by class, C_k[j] and C[j].
  Here, as in the code, it is the mean squared error of single embeddings.
- The code collects embeddings in the last epoch, each before its step.
  `recompute` computes them after training, as Eq. 3 can be read.
- With a part of the clients in a round, C is the mean over all clients that
  have ever sent a prototype. In the paper all clients take part.

References:
  Tan et al., `FedProto: Federated Prototype Learning across Heterogeneous
  Clients <https://arxiv.org/abs/2105.00243>`_, AAAI 2022.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.class_means import (
  ClassVectors,
  class_means,
  init_class_client,
)
from fedjax_het.aggregation.embeddings import embed, embedding_width
from fedjax_het.aggregation.uploads import gather_uploads, keep_latest
from fedjax_het.algorithms.fedproto.prediction import (
  Evaluated,
  predict_head,
  predict_nearest,
)
from fedjax_het.algorithms.fedproto.prototypes import (
  global_prototypes,
  sums_of_all,
  sums_of_last_epoch,
)
from fedjax_het.engine.local import fit_and_record
from fedjax_het.engine.needs import requires
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Maybe,
  Uplink,
)
from fedjax_het.models.blocks import BlockModel
from fedjax_het.options import not_negative, one_of


def prototype_loss(z, labels, prototypes: Maybe) -> jax.Array:
  """R of each example.

  Args:
    z: [B, d], embeddings.
    labels: [B] int32.
    prototypes: `Maybe` of C [C, d]; its mask is [C].

  Returns:
    [B] float32, 0 for an example whose class has no prototype.
  """
  # |f(x) - C[y]|^2 / d.
  error = jnp.mean(jnp.square(z - prototypes.value[labels]), axis=1)
  return jnp.where(prototypes.present[labels], error, 0.0)


def client_loss(
    model: BlockModel, task: Task, prototypes: Maybe, weight: float
) -> Callable[..., Any]:
  """The loss of a local step, as `fit_and_record` takes it; it outputs f(x)."""

  def loss_fn(variables, batch, key):
    z, logits, stats = embed(
        model, variables, batch.x, train=True, mask=batch.mask, key=key
    )
    loss = task.loss(logits, batch.y, batch.mask)
    away = masked_mean(prototype_loss(z, batch.y, prototypes), batch.mask)
    metrics = dict(cross_entropy=loss, prototype_loss=away)
    # L = CE + lambda R.
    return loss + weight * away if weight else loss, (stats, metrics, z)

  return loss_fn


@requires(keep_optimizer=False, task='classification')
def fedproto(
    federation: Federation,
    *,
    prototype_weight: float = 1.0,
    weights: str = 'uniform',
    recompute: bool = False,
) -> FederatedAlgorithm:
  """FedProto over clients of one or several architectures.

  Args:
    federation: Groups and local training; the models must have the same number
      of outputs and embeddings of one width.
    prototype_weight: lambda of Eq. 7, the factor on the mean over d of the
      squared error. The authors' commands have 1, and 0.1 on CIFAR-10. 0 is
      local training bit for bit.
    weights: A client's weight in the mean of a class: 'uniform' for 1 (the
      authors' code), 'data' for its number of embeddings of the class.
    recompute: Whether clients compute their prototypes after training, in one
      more pass over all examples in eval mode, instead of during the last epoch
      (the authors' code).

  Returns:
    The algorithm, which evaluates `Evaluated`. Its server state is the last
    upload of every client, `ClassVectors` of [N, C, d] and [N, C]. Metrics:
    'cross_entropy' and 'prototype_loss', the terms of Eq. 7 before
    `prototype_weight`, and their sum 'train_loss'.

  Raises:
    ValueError: If an option is unknown or out of range, or models differ in
      their number of outputs or the width of their embeddings.
  """
  not_negative(prototype_weight=prototype_weight)
  one_of('weights', weights, ('uniform', 'data'))
  local, num_classes = federation.local, federation.num_classes
  width = embedding_width(federation, 'fedproto')

  def nothing(*shape):
    """`ClassVectors` of zeros: `shape` is () for one, [N] for a store."""
    shape = (*shape, num_classes)
    return ClassVectors(jnp.zeros((*shape, width)), jnp.zeros(shape))

  def init_client(group, client_id, key):
    return init_class_client(group.model, local, key, keep=False)

  def client_update(group, client, sent, data, visit):
    model, start = group.model, client.variables
    trim = local.drop_unused_weights and client.opt_state is None
    end, opt_state, metrics, _, (total, _) = fit_and_record(
        client_loss(model, local.task, sent, prototype_weight),
        local,
        model.trim(start) if trim else start,
        data,
        visit,
        record=(nothing(), jnp.int32(0)),
        add=sums_of_last_epoch(num_classes, local, data.size),
        opt_state=client.opt_state,
    )
    end = model.fill(end, start)
    if recompute:
      total = sums_of_all(model, end, data)
    # C_k[j], the mean of f_k(x) over the examples of class j (Eq. 3).
    mine = ClassVectors(class_means(total), total.counts)
    if client.opt_state is None:
      opt_state = None
    client = client._replace(variables=end, opt_state=opt_state)
    return client, Uplink((), Maybe(mine, mine.counts > 0)), metrics

  def server_update(server, received, turn):
    del turn
    client_id, uploads = gather_uploads(received)
    return keep_latest(server, client_id, uploads.value), {}

  return FederatedAlgorithm(
      init=lambda key: nothing(federation.num_clients),
      init_client=init_client,
      downlink=lambda server, group, visit: global_prototypes(server, weights),
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: Evaluated(
          *client.variables, global_prototypes(server, weights)
      ),
      personal=True,
      predict=predict_nearest,
      views={'head': predict_head},
  )
