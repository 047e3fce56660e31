"""RHFL: robust to wrong labels; clients teach each other on a public set.

No parameters travel. All clients hold the public set, whose labels are not
read. With p_k the probabilities of client k, K clients, and SCE the symmetric
cross-entropy, a CE + b RCE, of a client's own examples, a round is

  confidence:  l_k = mean SCE of client k on its own examples,
               F_k = (l_k of the round before - l_k) / l_k,
               W = softmax_k(1/(K-1) + eta F_k / sum_j F_j);
  collaborate: minimise sum_{i != k} W_i KL(p_i || p_k) on the public set;
  train:       minimise SCE on the client's own examples.

In the first round W_k is 1/(K-1). Before it, every client trains alone with SCE
(`warm_up`). Every phase has a new optimiser state.

A visit has one exchange. So a client collaborates, trains, and then sends l_k
and p_k of the whole public set, which belong to the next round; the warm-up
sends the first ones. The server keeps the last upload of every client and sends
client k the mixture of the others,

  p'_k = sum_{i != k} W_i p_i / s_k,    s_k = sum_{i != k} W_i,

since s_k KL(p'_k || p_k) has the same gradient. W sums to 1 over all K
clients, so that s_k is 1 - W_k, except in the first round, where it is 1.

Deviations from the paper and choices:

- In the paper all clients exchange p_k for each public minibatch, before each
  step. Here teachers stay fixed during the passes of a round. With a public set
  of one minibatch and all clients in every round this is the paper's round.
- The authors' code computes p_k of teachers and l_k in training mode, where
  norms use the statistics of a minibatch and move their running ones. Here
  they are computed in inference mode.
- The code makes a new Adam for every public minibatch, which then takes steps
  of nearly lr * sign(gradient). `fresh_optimizer=True` does the same.
- With a sampled cohort, all other clients count with their last upload: its
  p_k, l_k and F_k. A client that has sent only one l_k has F_k = 0.
- If |sum_j F_j| is below 1e-12, all F_k count as 0. A negative sum, when losses
  rise, favours the clients whose losses rise most. `confidence_sum` is its
  value.

References:
  Fang and Ye, `Robust Federated Learning with Noisy and Heterogeneous Clients
  <https://openaccess.thecvf.com/content/CVPR2022/html/Fang_Robust_Federated_Learning_With_Noisy_and_Heterogeneous_Clients_CVPR_2022_paper.html>`_,
  CVPR 2022, Algorithm 1.
  Wang et al., `Symmetric Cross Entropy for Robust Learning with Noisy Labels
  <https://arxiv.org/abs/1908.06112>`_, ICCV 2019.
"""  # fmt: skip

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.aggregation.uploads import gather_uploads, keep_latest
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.local import fit, map_examples, train_model
from fedjax_het.engine.needs import requires
from fedjax_het.engine.phases import inference_logits, passes
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.types import (
    FederatedAlgorithm,
    Federation,
    Maybe,
    Uplink,
)
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.options import at_least, not_negative, positive

# The bounds of the authors' code on a probability and on a one-hot label.
LEAST_P, LEAST_LABEL = 1e-7, 1e-4
# Smaller losses and sums of F_k do not divide.
LEAST = 1e-12


class Upload(NamedTuple):
  """The uplink of a client.

  Attributes:
    outputs: [P, C] float32, p_k, its probabilities on the public set.
    loss: [] float32, l_k, its mean SCE on its own examples.
  """

  outputs: jax.Array
  loss: jax.Array


class Teacher(NamedTuple):
  """The downlink of a client.

  Attributes:
    outputs: [P, C] float32, p'_k, the mixture of the others' probabilities.
    weight: [] float32, s_k, the sum of the others' weights.
  """

  outputs: jax.Array
  weight: jax.Array


class Server(NamedTuple):
  """RHFL's server state; N clients.

  Attributes:
    last: The last `Upload` of each client, leaves [N, ...].
    loss_before: [N] float32, l_k of the upload before the last one.
    num_uploads: [N] int32, uploads of each client; 2 stands for more, too.
  """

  last: Upload
  loss_before: jax.Array
  num_uploads: jax.Array


def symmetric(task: Task, ce_weight: float, rce_weight: float) -> Task:
  """The task with the symmetric cross-entropy of Wang et al. as its loss.

  Args:
    task: A classification task, whose losses are CE.
    ce_weight: a, the coefficient of CE.
    rce_weight: b, the coefficient of RCE.

  Returns:
    The task.
  """

  def losses(logits, labels):
    # RCE = -sum_c p_c log y_c, with the one-hot label y clipped.
    p = jnp.clip(jax.nn.softmax(logits.astype(jnp.float32)), LEAST_P, 1.0)
    wrong = 1.0 - jax.nn.one_hot(labels, logits.shape[-1])
    rce = -np.log(LEAST_LABEL) * jnp.sum(p * wrong, axis=-1)
    # SCE = a CE + b RCE.
    return ce_weight * task.losses(logits, labels) + rce_weight * rce

  return task._replace(losses=losses)


def client_weights(server: Server, eta: float) -> tuple[jax.Array, jax.Array]:
  """W, how much each client counts as a teacher.

  Args:
    server: The server's state.
    eta: Strength of the confidence.

  Returns:
    W, [N] float32, 0 for clients that have sent nothing, and sum_j F_j, 0 while
    no client has sent two losses.
  """
  before, now = server.loss_before, server.last.loss
  known, measured = server.num_uploads > 0, server.num_uploads > 1
  # F_k = (l_k(t-1) - l_k(t)) / l_k(t).
  gain = (before - now) / jnp.maximum(now, LEAST)
  gain = jnp.where(measured, gain, 0.0)
  total = jnp.sum(gain)
  divides = jnp.abs(total) >= LEAST
  share = jnp.where(divides, gain / jnp.where(divides, total, 1.0), 0.0)
  # W = softmax_k(1/(K-1) + eta F_k / sum_j F_j), or 1/(K-1) at first.
  first = 1.0 / jnp.maximum(jnp.sum(known) - 1, 1)
  lowest = jnp.finfo(jnp.float32).min  # Not -inf, for which nobody is NaN.
  later = jax.nn.softmax(jnp.where(known, first + eta * share, lowest))
  weights = jnp.where(jnp.any(measured), later, first)
  return jnp.where(known, weights, 0.0), total


def teacher_of(client_id, outputs, weights) -> Maybe:
  """What the other clients teach one client.

  Args:
    client_id: [] int32.
    outputs: [N, P, C], the last probabilities of all clients.
    weights: [N], W.

  Returns:
    `Maybe` of a `Teacher`; absent if no other client counts.
  """
  # p'_k = sum_{i != k} W_i p_i / s_k, s_k = sum_{i != k} W_i.
  others = jnp.where(jnp.arange(len(weights)) != client_id, weights, 0.0)
  weight = jnp.sum(others)
  known = weight > 0
  mixture = jnp.tensordot(others / jnp.where(known, weight, 1.0), outputs, 1)
  return Maybe(Teacher(mixture, weight), known)


def public_loss(model: BlockModel, teacher: Teacher):
  """s_k KL(p'_k || p_k), a mean over the batch, as `fit` takes it."""

  def loss_fn(variables, batch, key):
    logits, stats = model.apply(
        variables, batch.x, train=True, mask=batch.mask, key=key
    )
    # The logarithm of 0 would make 0 log 0 NaN.
    smallest = jnp.finfo(jnp.float32).tiny
    target = jnp.log(jnp.maximum(teacher.outputs[batch.position], smallest))
    divergence = masked_mean(distillation(logits, target), batch.mask)
    return teacher.weight * divergence, (stats, {})

  return loss_fn


def publish(
    model: BlockModel, task: Task, variables: Variables, data, public
) -> Upload:
  """p_k on the public set and l_k on the client's data, in inference mode."""

  def losses_of(batch):
    logits, _ = model.apply(variables, batch.x, mask=batch.mask)
    return task.losses(logits, batch.y)

  outputs = jax.nn.softmax(inference_logits(model, variables, public))
  losses = map_examples(losses_of, data)
  real = jnp.arange(data.length) < data.size
  return Upload(outputs, masked_mean(losses, real))


@requires(public='unlabelled', task='classification')
def rhfl(
    federation: Federation,
    *,
    eta: float = 0.5,
    ce_weight: float = 0.1,
    rce_weight: float = 1.0,
    pretrain_epochs: int = 40,
    public_batch_size: int | None = None,
    fresh_optimizer: bool = False,
) -> FederatedAlgorithm:
  """RHFL over clients of any architectures.

  A client uploads P C probabilities and its loss. It downloads P C
  probabilities and the sum of their weights. Sending the public set once is not
  counted.

  Args:
    federation: Groups and local training. All phases have its optimiser and
      learning rate, the training on own examples has its batch size, too.
    eta: Strength of the confidence in the weights. With 0, all other clients
      count equally.
    ce_weight: a, the coefficient of the cross-entropy in SCE.
    rce_weight: b, the coefficient of the reverse cross-entropy.
    pretrain_epochs: Passes over a client's own examples before round 1.
    public_batch_size: Batch size of the one pass over the public set; None for
      that of the local training, as in the paper.
    fresh_optimizer: Whether each public minibatch has a new optimiser state,
      instead of each visit.

  Returns:
    The algorithm; its client state are the client's `Variables`, its server
    state is a `Server`.

  Raises:
    ValueError: If there is no public set, an option is out of range, or models
      differ in their number of outputs.
  """
  not_negative(eta=eta, ce_weight=ce_weight, rce_weight=rce_weight)
  positive(**{'ce_weight + rce_weight': ce_weight + rce_weight})
  at_least(0, pretrain_epochs=pretrain_epochs)
  if public_batch_size is None:
    public_batch_size = federation.local.batch_size
  at_least(1, public_batch_size=public_batch_size)
  num_clients, num_public = federation.num_clients, federation.num_public
  num_classes = federation.num_classes
  task = symmetric(federation.task, ce_weight, rce_weight)
  local = dataclasses.replace(federation.local, task=task)
  pretrain = passes(local, pretrain_epochs)
  collaborate = passes(
      local,
      1,
      min(public_batch_size, num_public),
      fresh_optimizer=fresh_optimizer,
  )

  def init(key):
    del key
    outputs = jnp.zeros((num_clients, num_public, num_classes))
    return Server(
        Upload(outputs, jnp.zeros(num_clients)),
        jnp.zeros(num_clients),
        jnp.zeros(num_clients, jnp.int32),
    )

  def downlink(server, group, visit):
    del group
    weights, _ = client_weights(server, eta)
    return teacher_of(visit.client_id, server.last.outputs, weights)

  def train_and_publish(group, local, variables, data, visit):
    # Minimise SCE on the client's own examples.
    variables, metrics, _ = train_model(
        group.model, local, variables, data, visit
    )
    public = data.of_public()
    upload = publish(group.model, task, variables, data, public)
    return variables, Uplink((), upload), metrics

  def warm_up(group, variables, sent, data, visit):
    del sent
    return train_and_publish(group, pretrain, variables, data, visit)

  def client_update(group, variables, sent, data, visit):
    teacher, known = sent
    public = data.of_public().unaugmented()
    # Minimise sum_{i != k} W_i KL(p_i || p_k), if there is another client.
    variables, _, met, _ = fit(
        public_loss(group.model, teacher),
        collaborate,
        variables,
        public.replace(size=jnp.where(known, public.size, 0)),
        visit._replace(key=jax.random.fold_in(visit.key, 2)),
    )
    variables, uplink, metrics = train_and_publish(
        group, local, variables, data, visit
    )
    metrics['public_loss'] = met['train_loss']
    return variables, uplink, metrics

  def server_update(server, received, turn):
    del turn
    ids, uploads = gather_uploads(received)
    num_uploads = jnp.minimum(server.num_uploads[ids] + 1, 2)
    server = keep_latest(
        server, ids, Server(uploads, server.last.loss[ids], num_uploads)
    )
    _, total = client_weights(server, eta)
    return server, dict(confidence_sum=total)

  return FederatedAlgorithm(
      init=init,
      init_client=lambda group, client_id, key: group.model.init(key),
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: client,
      personal=True,
      warm_up=warm_up,
  )
