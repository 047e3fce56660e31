"""FCCL: cross-correlation of logits on a public set, and two distillations.

All clients hold the unlabelled public examples X; no parameters travel. Client
k has a model w_k and a frozen model f_k, both of which are its model after
training on its own data before round 1 (`warm_up`). Z_k are the raw logits of
w_k in training mode. A visit in a round of K clients:

  down:     S_k = sum_{i != k} Z_i(X), of the last uploads;
  client:   prev_k <- w_k;
            for minibatches b of X, N examples each,
              T = (S_k(b) + own) / K,  own = Z_k(b) or logits of prev_k,
              M = A^T B / N,  columns of A, B: those of Z_k(b), T standardised,
              w_k <- Adam on sum_u (M_uu - 1)^2
                             + lambda sum_{u != v} (M_uv + 1)^2;
            for minibatches of own examples, with p = softmax(w_k(x)),
              w_k <- w_k - lr grad [CE + KL(p_prev || p) + KL(p_f || p)];
  up:       Z_k(X).

T, prev_k and f_k are constants, the models in inference mode. Entries of M off
the diagonal aim at -1, not at 0 as in Barlow Twins. A client's model changes
in its visits only, so the model before the visit is that after its last one,
the paper's model of the previous round.

**The exchange differs from the paper.** There, clients exchange logits for each
minibatch b, so S_k(b) follows the others' steps. Here a visit has one exchange:
a client publishes at the end of a visit, and S_k does not change while client k
takes its public steps. Only its own part of T does. If all clients take part in
every round and the public phase is a single step on all of X, both are the
same. The server keeps the last upload of every client: with a sampled cohort or
in an asynchronous run some are older. Without an upload of another client,
K is 1. K itself is never needed: M does not depend on the scale of T.

Choices in which the sources differ, or which they leave open:

- The paper's target is the mean of all current logits, as in the authors'
  second code and by default here. Their first code has the logits of prev_k in
  place of client k's: `target='previous'`.
- Standard deviations divide by N - 1, as in both codes, so M_uu is at most
  (N - 1) / N. The paper's M is a cosine, at most 1.
- Both codes make a new Adam for each public step; the paper does not say.
- The first code leaves out the last partial minibatch of X. So does this
  module, whatever `local.drop_last`.
- Pre-training has the epochs and the constant learning rate of the first code;
  in the second the rate falls by a cosine.
- Public examples are part of the training set and are never augmented. In both
  codes they are of another data set, and augmented.

References:
  Huang, Ye, Du, "Learn from Others and Be Yourself in Heterogeneous Federated
  Learning", CVPR 2022. Code: `WenkeHuang/FCCL
  <https://github.com/WenkeHuang/FCCL>`_, folder `fccl`, and for the benchmark
  of `FCCL+ <https://arxiv.org/abs/2309.16286>`_ a second version in `fccl+`.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

import jax

from fedjax_het.algorithms.fccl.public import public_loss, publish
from fedjax_het.algorithms.fccl.server import (
    collect,
    no_logits,
    sum_of_others,
)
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.local import fit, train_model
from fedjax_het.engine.needs import requires
from fedjax_het.engine.phases import inference_logits, passes
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.options import at_least, not_negative, one_of

# Of one row no column has a variance; of two, M hardly depends on the logits.
_FEWEST_ROWS = 3


class Client(NamedTuple):
  """A client's state.

  Attributes:
    variables: w_k.
    frozen: f_k, its model after pre-training.
  """

  variables: Variables
  frozen: Variables


def private_loss(
    model: BlockModel,
    task: Task,
    teachers: Mapping[str, tuple[Variables, float]],
) -> Callable[..., Any]:
  """The loss of a step on own examples, as `fit` takes it.

  Args:
    model: The architecture.
    task: Supplies the loss on the labels.
    teachers: {name: (a model, the factor on its distillation loss)}.

  Returns:
    The function. Its metrics are 'cross_entropy' and, for each teacher, the
    mean KL in nats without its factor.
  """

  def loss_fn(variables, batch, key):
    z, stats = model.apply(
        variables, batch.x, train=True, mask=batch.mask, key=key
    )
    loss = task.loss(z, batch.y, batch.mask)
    metrics = dict(cross_entropy=loss)
    for name, (teacher, weight) in teachers.items():
      logits, _ = model.apply(teacher, batch.x, mask=batch.mask)
      # KL(p_prev || p) or KL(p_f || p).
      metrics[name] = masked_mean(distillation(z, logits), batch.mask)
      loss += weight * metrics[name]
    return loss, (stats, metrics)

  return loss_fn


@requires(public='unlabelled', task='classification')
def fccl(
    federation: Federation,
    *,
    target: str = 'current',
    off_diagonal_weight: float = 0.0051,
    inter_weight: float = 1.0,
    intra_weight: float = 1.0,
    public_epochs: int = 1,
    public_batch_size: int = 512,
    fresh_optimizer: bool = True,
    pretrain_epochs: int = 40,
) -> FederatedAlgorithm:
  """FCCL.

  A client uploads P C logits and downloads P C sums. Sending the public set
  once is not counted.

  Args:
    federation: Groups and local training, whose optimiser and learning rate all
      phases have; optimiser states are new in each visit. Pre-training also has
      its batch size.
    target: Client k's part of the target T: 'current' for its current logits,
      or 'previous' for those of prev_k.
    off_diagonal_weight: lambda above.
    inter_weight: Factor on KL(p_prev || p), which keeps what was learned from
      others.
    intra_weight: Factor on KL(p_f || p), which keeps what was learned from own
      data. A teacher of weight 0 is not evaluated.
    public_epochs: Passes over the public set in a visit. With 0, and both
      weights 0, clients train alone.
    public_batch_size: Public examples in a minibatch, at least 3; all, if there
      are fewer.
    fresh_optimizer: Whether each step on public examples begins with a
      new optimiser state, instead of each visit.
    pretrain_epochs: Passes over a client's own data before round 1.

  Returns:
    The algorithm; its client state is a `Client`, its server state `Logits`.
    Metrics: 'collaborative_loss', the loss on public examples, and
    'cross_entropy', 'inter_loss' and 'intra_loss', the terms before their
    factors of the sum 'train_loss' on own examples.

  Raises:
    ValueError: If there are fewer than three public examples, an option is
      unknown or out of range, or models differ in their number of outputs.
  """
  one_of('target', target, ('current', 'previous'))
  not_negative(
      off_diagonal_weight=off_diagonal_weight,
      inter_weight=inter_weight,
      intra_weight=intra_weight,
  )
  at_least(0, public_epochs=public_epochs, pretrain_epochs=pretrain_epochs)
  at_least(_FEWEST_ROWS, public_batch_size=public_batch_size)
  if federation.num_public < _FEWEST_ROWS:
    raise ValueError(
        f'fccl needs {_FEWEST_ROWS} public examples or more, got '
        f'{federation.num_public}.'
    )
  local, num_public = federation.local, federation.num_public
  shape = federation.num_clients, num_public, federation.num_classes
  batch_size = min(public_batch_size, num_public)
  collaborate = dataclasses.replace(
      passes(
          local, public_epochs, batch_size, fresh_optimizer=fresh_optimizer
      ),
      drop_last=True,
  )
  pretrain = passes(local, pretrain_epochs)

  def init_client(group, client_id, key):
    del client_id
    variables = group.model.init(key)
    return Client(variables, variables)

  def uplink(group, variables, public, visit):
    key = jax.random.fold_in(visit.key, 3)
    return Uplink((), publish(group.model, variables, public, batch_size, key))

  def warm_up(group, client, sent, data, visit):
    del sent
    variables, metrics, _ = train_model(
        group.model, pretrain, client.variables, data, visit
    )
    public = data.of_public().unaugmented()
    sending = uplink(group, variables, public, visit)
    return Client(variables, variables), sending, metrics

  def client_update(group, client, sent, data, visit):
    model, public = group.model, data.of_public().unaugmented()
    trim = model.trim if local.drop_unused_weights else lambda whole: whole
    # prev_k <- w_k.
    previous, frozen = trim(client.variables), trim(client.frozen)
    own = None
    if target == 'previous':
      own = inference_logits(model, previous, public)
    variables, _, collaborated, _ = fit(
        public_loss(model, sent.value, own, off_diagonal_weight),
        collaborate,
        previous,
        public,
        visit._replace(key=jax.random.fold_in(visit.key, 2)),
    )
    teachers = dict(
        inter_loss=(previous, inter_weight), intra_loss=(frozen, intra_weight)
    )
    variables, _, metrics, _ = fit(
        private_loss(
            model,
            local.task,
            {name: pair for name, pair in teachers.items() if pair[1] > 0},
        ),
        local,
        variables,
        data,
        visit,
    )
    metrics['collaborative_loss'] = collaborated['train_loss']
    variables = model.fill(variables, client.variables)
    # Publish Z_k(X).
    sending = uplink(group, variables, public, visit)
    return client._replace(variables=variables), sending, metrics

  return FederatedAlgorithm(
      init=lambda key: no_logits(*shape),
      init_client=init_client,
      downlink=lambda server, group, visit: sum_of_others(
          server, visit.client_id
      ),
      client_update=client_update,
      server_update=lambda server, received, turn: (
          collect(server, received), {}
      ),
      client_model=lambda server, client, group: client.variables,
      personal=True,
      warm_up=warm_up,
  )
