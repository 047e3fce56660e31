"""FedHe: clients of any architecture exchange class means of their logits.

No parameters travel. A client keeps its model. It also keeps its optimiser
state, except with `local.keep_optimizer=False`. One visit:

  1. The server sends p_s[y] for every class y that it knows: the mean of all
     vectors that it has received for y                              (Eq. 10)
  2. For a few minibatches (`local.steps`, 3 in the paper) the client steps with
       L = CE + alpha mean_{i,c} (p_i - p_s[y_i])_c^2                 (Eq. 13)
     It adds the logits p_i of the same passes to P[y_i] and their number to
     V[y_i]                                                           (Eq. 7)
  3. It sends p_k[y] = P[y] / (V[y] + 1)                              (Eq. 8)
  4. The server adds p_k[y] to its sum for y                          (Eq. 9)

Each class takes C logits and one more number, so C (C + 1) in each direction:
110 numbers, 440 bytes, for ten classes. The paper sends the label as this
number; here it is the number of uploads behind the vector, and the vector's
position gives the class. Classes that a client has not seen, or that the server
does not know, are neither sent nor counted.

Where the paper is silent or differs from its authors' code:

- Cross-entropy takes logits. Eq. 4-6 print a one-hot of the softmax, which has
  no gradient.
- Examples of a class that the server does not know have no second term.
- Classes that a client has not seen are left out. Eq. 8 and 9 would store zeros
  (`strict=True`).
- The code divides by V instead of V + 1 (`plus_one=False`). After every 100
  uploads it reduces the weight of their mean to that of one upload
  (`store='fold'`).
- All clients of a round train at once. With a cohort of one they train one at a
  time, as in the paper. All uploads have equal weight, whatever the number of
  examples.

References:
  Chan and Ngai, `FedHe: Heterogeneous Models and Communication-Efficient
  Federated Learning <https://arxiv.org/abs/2110.09910>`_, MSN 2021.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.class_means import (
  ClassVectors,
  class_means,
  fit_and_sum,
  init_class_client,
)
from fedjax_het.aggregation.uploads import gather_uploads, keep_latest
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Maybe,
  Uplink,
)
from fedjax_het.options import at_least, not_negative, one_of


class Folded(NamedTuple):
  """The server state for `store='fold'`.

  Attributes:
    total: Sums and counts by class.
    num_uploads: [] int32, uploads so far.
  """

  total: ClassVectors
  num_uploads: jax.Array


def add_and_fold(
    server: Folded, client_id, uploads: ClassVectors, every: int, num: int
) -> Folded:
  """Adds uploads sequentially, in the order of client ids.

  After every `every`-th upload, each sum becomes its mean and each count 1.

  Args:
    server: The store.
    client_id: [S] int32; ids of `num` or more are padding.
    uploads: Vectors [S, C, C] and counts [S, C].
    every: Uploads between two folds.
    num: Number of clients.

  Returns:
    The new store.
  """
  order = jnp.argsort(client_id)

  def add(server, upload):
    real, upload = upload
    total = jax.tree.map(jnp.add, server.total, upload)
    num_uploads = server.num_uploads + 1
    fold = num_uploads % every == 0
    folded = ClassVectors(class_means(total), jnp.minimum(total.counts, 1.0))
    total = jax.tree.map(lambda f, t: jnp.where(fold, f, t), folded, total)
    new = Folded(total, num_uploads)
    return jax.tree.map(lambda a, b: jnp.where(real, a, b), new, server), None

  ordered = jax.tree.map(lambda leaf: leaf[order], (client_id < num, uploads))
  return jax.lax.scan(add, server, ordered)[0]


def class_upload(total: ClassVectors, plus_one: bool, strict: bool) -> Maybe:
  """p_k: a client's upload (Eq. 8).

  Args:
    total: P [C, C] and V [C], sums of logits and their numbers.
    plus_one: Whether to divide by V + 1, or by V.
    strict: Whether classes that were not seen are sent, as zeros.

  Returns:
    `Maybe` of vectors [C, C] and counts [C], 1 where there is a vector.
  """
  divisor = total.counts + 1.0 if plus_one else jnp.maximum(total.counts, 1.0)
  seen = total.counts > 0
  # A client without steps sends nothing in either case.
  sent = jnp.broadcast_to(jnp.any(seen), seen.shape) if strict else seen
  # p_k[y] = P[y] / (V[y] + 1).
  p_k = total.vectors / divisor[:, None]
  return Maybe(ClassVectors(p_k, sent.astype(jnp.float32)), sent)


@requires(keep_optimizer=True, task='classification')
def fedhe(
    federation: Federation,
    *,
    distill_weight: float = 1.0,
    plus_one: bool = True,
    strict: bool = False,
    store: str = 'all',
    fold_every: int = 100,
) -> FederatedAlgorithm:
  """FedHe, with the variants of the paper and of the authors' code.

  Args:
    federation: Groups and local training; the models must have the same number
      of outputs. The paper trains three minibatches per visit (`local.steps`).
    distill_weight: alpha of Eq. 13, the factor on the logit loss; 0 is local
      training bit for bit.
    plus_one: Divide by V + 1 (Eq. 8), which shrinks the mean by V / (V + 1);
      False divides by V, as the authors' code does.
    strict: Send and store zeros for classes that a client has not seen, as in
      Eq. 8 and 9; under label skew they pull the means to zero.
    store: The uploads that the server averages: 'all' so far (a running sum, so
      the order does not matter); 'fold' the same, but after every `fold_every`
      uploads the mean so far counts as one upload; 'latest' the last upload of
      every client. 'fold' adds a round's uploads by ascending client id.
    fold_every: For 'fold'; 100 in the code, ten times its number of clients.

  Returns:
    The algorithm. Metrics: 'cross_entropy' and 'logit_loss', the terms of
    Eq. 13 before `distill_weight`, and their sum 'train_loss'.

  Raises:
    ValueError: If an option is out of range, or models differ in their number
      of outputs.
  """
  not_negative(distill_weight=distill_weight)
  one_of('store', store, ('all', 'fold', 'latest'))
  at_least(1, fold_every=fold_every)
  num_classes, num = federation.num_classes, federation.num_clients

  def init(key):
    shape = (num, num_classes) if store == 'latest' else (num_classes,)
    nothing = ClassVectors(jnp.zeros((*shape, num_classes)), jnp.zeros(shape))
    return Folded(nothing, jnp.int32(0)) if store == 'fold' else nothing

  def init_client(group, client_id, key):
    return init_class_client(group.model, federation.local, key)

  def downlink(server, group, visit):
    total = server.total if store == 'fold' else server
    if store == 'latest':
      total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), total)
    # p_s[y] = sum / number of the vectors received for y (Eq. 10).
    p_s = class_means(total)
    return Maybe(ClassVectors(p_s, total.counts), total.counts > 0)

  def client_update(group, client, sent, data, visit):
    p_s, known = sent.value.vectors, sent.value.counts > 0

    def logit_loss(logits, labels):
      # mean_c (p_i - p_s[y_i])_c^2, of classes that the server knows (Eq. 13).
      error = jnp.mean(jnp.square(logits - p_s[labels]), axis=1)
      return jnp.where(known[labels], error, 0.0)

    # L = CE + alpha mean_{i,c} (p_i - p_s[y_i])_c^2 (Eq. 13).
    client, metrics, total = fit_and_sum(
        group.model,
        federation.local,
        client,
        data,
        visit,
        penalty=logit_loss,
        weight=distill_weight,
        name='logit_loss',
    )
    upload = class_upload(total, plus_one, strict)
    uplink = Uplink(upload) if store == 'all' else Uplink((), upload)
    return client, uplink, metrics

  def server_update(server, received, turn):
    del turn
    if store == 'all':
      for group in received.values():
        # p_s[y] <- p_s[y] + p_k[y], and the number of uploads (Eq. 9).
        server = jax.tree.map(jnp.add, server, group.summed.value)
      return server, {}
    client_id, uploads = gather_uploads(received)
    if store == 'latest':
      return keep_latest(server, client_id, uploads.value), {}
    return (
        add_and_fold(server, client_id, uploads.value, fold_every, num), {}
    )

  return FederatedAlgorithm(
      init=init,
      init_client=init_client,
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: client.variables,
      personal=True,
  )
