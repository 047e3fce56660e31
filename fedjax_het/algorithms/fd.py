"""FD: federated distillation by class means of outputs.

No parameters travel. A client keeps its model and, unless
`local.keep_optimizer` is False, its optimiser's state. One round:

  1. Client k receives for every class y the mean of the *other* clients' last
     vectors, over the clients K_y that have sent one,
       F^_k[y] = (sum_{j in K_y} F_j[y] - F_k[y]) / (|K_y| - 1)
  2. It takes minibatch steps on
       L = CE(F(x), y) + gamma psi(F(x), F^_k[y])
     and adds up the outputs F(x) of the same passes by class. psi is the
     cross-entropy, or the KL divergence, from the target distribution to the
     softmax of the logits. A class without a target has no psi.
  3. It sends F_k[y], their mean, for the classes that it has seen.
  4. The server keeps the last upload of every client.

C * C numbers travel in each direction, 400 bytes for ten classes. Missing
classes are not sent, and the C mask bits are not counted.

The papers exchange softmax outputs (`space='prob'`, the default).
Re-implementations exchange logits, and the receiver takes the softmax of their
mean ('logit'), which is another target. Two variants of published code are not
implemented: logits as a target distribution, and counts that begin at 1 and are
never reset. A client that has sent nothing for y is not subtracted. The two
forms of psi differ by the entropy of the target and have the same gradient.

References:
  Jeong et al., `Communication-Efficient On-Device Machine Learning: Federated
  Distillation and Augmentation under Non-IID Private Data
  <https://arxiv.org/abs/1811.11479>`_, 2018 (without its augmentation).
  Seo et al., `Federated Knowledge Distillation
  <https://arxiv.org/abs/2011.02367>`_, 2020.
"""

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
from fedjax_het.options import not_negative, one_of


def targets(store: Maybe, client_id=None) -> Maybe:
  """F^: means of the clients' vectors per class.

  Args:
    store: `Maybe` of vectors [N, C, D]; its mask is [N, C].
    client_id: [] int32, the client to exclude, or None.

  Returns:
    `Maybe` of means [C, D]; its mask [C] is False for classes without a vector.
  """
  present = store.present
  if client_id is not None:
    others = jnp.arange(present.shape[0]) != client_id
    present = present & others[:, None]
  # F^_k[y] = sum_{j in K_y, j != k} F_j[y] / (|K_y| - 1). Summing the others
  # avoids the rounding error of the papers' subtraction.
  total = jnp.sum(jnp.where(present[..., None], store.value, 0.0), axis=0)
  number = jnp.sum(present, axis=0)
  mean = class_means(ClassVectors(total, number.astype(jnp.float32)))
  return Maybe(mean, number > 0)


def divergence(logits, target, regulariser: str):
  """psi: loss between the softmax of logits and target distributions.

  Args:
    logits: [B, C], whose softmax is p.
    target: [B, C] distributions q, rows that sum to 1.
    regulariser: 'cross_entropy', or 'kl', the cross-entropy minus the target's
      entropy.

  Returns:
    [B] float32 in nats.
  """
  # H(q, p) = -sum_c q_c log p_c
  loss = -jnp.sum(target * jax.nn.log_softmax(logits), axis=1)
  if regulariser == 'kl':
    # KL(q || p) = H(q, p) - H(q)
    loss -= jnp.sum(jax.scipy.special.entr(target), axis=1)
  return loss


@requires(keep_optimizer=True, task='classification')
def fd(
    federation: Federation,
    *,
    distill_weight: float = 1.0,
    space: str = 'prob',
    regulariser: str = 'cross_entropy',
    mean: str = 'leave_one_out',
) -> FederatedAlgorithm:
  """Federated distillation.

  Args:
    federation: Groups and local training; the models must have the same number
      of outputs.
    distill_weight: gamma of the loss above, the factor on psi; 0 is local
      training bit for bit.
    space: What is averaged: 'prob' for softmax outputs (papers), or 'logit'.
    regulariser: 'cross_entropy' (papers) or 'kl'.
    mean: 'leave_one_out' leaves the receiver's own vector out (papers), 'all'
      does not.

  Returns:
    The algorithm. Metrics: 'cross_entropy' and 'distillation_loss', the terms
    before `distill_weight`, and their sum 'train_loss'.

  Raises:
    ValueError: If an option is out of range, or models differ in their number
      of outputs.
  """
  not_negative(distill_weight=distill_weight)
  one_of('space', space, ('logit', 'prob'))
  one_of('regulariser', regulariser, ('cross_entropy', 'kl'))
  one_of('mean', mean, ('leave_one_out', 'all'))
  shape = (federation.num_clients, federation.num_classes)

  def init_client(group, client_id, key):
    return init_class_client(group.model, federation.local, key)

  def downlink(server, group, visit):
    return targets(server, visit.client_id if mean != 'all' else None)

  def client_update(group, client, sent, data, visit):
    goal, known = sent  # F^_k
    goal = jax.nn.softmax(goal) if space == 'logit' else goal

    def psi(logits, labels):
      loss = divergence(logits, goal[labels], regulariser)
      return jnp.where(known[labels], loss, 0.0)

    # L = CE(F(x), y) + gamma psi(F(x), F^_k[y]).
    client, metrics, total = fit_and_sum(
        group.model,
        federation.local,
        client,
        data,
        visit,
        penalty=psi,
        weight=distill_weight,
        name='distillation_loss',
        output=jax.nn.softmax if space == 'prob' else lambda logits: logits,
    )
    # F_k[y], the mean of the outputs for the classes that were seen.
    upload = Maybe(class_means(total), total.counts > 0)
    return client, Uplink((), upload), metrics

  def server_update(server, received, turn):
    del turn
    return keep_latest(server, *gather_uploads(received)), {}

  return FederatedAlgorithm(
      init=lambda key: Maybe(
          jnp.zeros((*shape, federation.num_classes)), jnp.zeros(shape, bool)
      ),
      init_client=init_client,
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: client.variables,
      personal=True,
  )
