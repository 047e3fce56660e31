"""FedDF: averages inside each architecture, then distillation across them.

The server holds unlabelled public examples d and one model x_p for each
architecture p. In a round with the cohort S, of which S_p has the
architecture p,

  down:    x_p;
  client:  local training, x_k;
  up:      x_k;
  server:  x_p <- sum_{k in S_p} w_k x_k / sum_{k in S_p} w_k, and for all p, N
           times on a minibatch of the public examples

             t(d) = 1/|S| sum_{k in S} f(x_k; d),
             x_p <- Adam on  mean_d KL(softmax(t(d)) || softmax(f(x_p; d))),

           with w_k = 1 or client k's number of examples.

The ensemble t holds the clients of all architectures, so a small model learns
from large ones, and the reverse. Neither public examples nor logits travel: an
upload is as large as FedAvg's. The server keeps the models of the whole cohort
for one round, and computes t for all public examples before the N steps.

Teachers are in eval mode, each with its own running statistics. A student
starts from the average and is in training mode, as in the authors' code: norms
take the statistics of the minibatch, and the running ones, with which x_p is
evaluated and sent, move towards those of the public examples.

Adam is new in each round and for each p. Its rate falls from `distill_lr` to 0
by a cosine over the N steps, and gradients are clipped to a global norm of 5,
all as in the authors' code.

Choices that the sources leave open or hide:

- N is fixed. The authors stop early and keep the best student, by labelled
  validation examples on the server, which an unlabelled public set lacks.
- The paper has w_k proportional to the number of examples, the authors' code
  uniform w_k, the default here.
- An architecture without a client in the cohort is distilled from its last
  model; its average is undefined in the paper.
- Public examples are part of the training set, without labels; the paper takes
  another data set. They are never augmented.
- The minibatches of all architectures are the same.
- The code's temperature is left out: the paper has none, all scripts have 1.

References:
  Lin, Kong, Stich, Jaggi, `Ensemble Distillation for Robust Model Fusion in
  Federated Learning <https://arxiv.org/abs/2006.07242>`_, NeurIPS 2020,
  Algorithms 1 and 3. Code: `epfml/federated-learning-public-code
  <https://github.com/epfml/federated-learning-public-code>`_.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.averaging import (
  model_training,
  own_blocks,
  trained_clients,
)
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.server import (
  server_variables,
  state_of,
  takes_server_options,
  with_state,
)
from fedjax_het.aggregation.teachers import teacher_logits
from fedjax_het.aggregation.uploads import clear_padding, sum_uploads
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.local import fit
from fedjax_het.engine.needs import requires
from fedjax_het.engine.task import masked_mean
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  LocalTraining,
  Uplink,
)
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.options import at_least, not_negative

# The largest global norm of a student's gradient, from the authors' code.
CLIP_NORM = 5.0


def mean_logits(logits, took_part) -> jax.Array:
  """The ensemble's logits, the mean over the clients that took part.

  Args:
    logits: [S, P, C], f(x_k; d).
    took_part: [S] bool, whose logits count.

  Returns:
    t, [P, C]; 0 if nobody took part.
  """
  # t(d) = 1/|S| sum_{k in S} f(x_k; d).
  total = jnp.sum(jnp.where(took_part[:, None, None], logits, 0.0), axis=0)
  return total / jnp.maximum(jnp.sum(took_part), 1)


def student_loss(model: BlockModel, ensemble) -> Callable[..., Any]:
  """The loss of a student on public examples, as `fit` takes it.

  Args:
    model: The student's architecture.
    ensemble: [P, C], t.

  Returns:
    The loss function; labels are not read.
  """

  def loss_fn(variables, batch, key):
    logits, stats = model.apply(
        variables, batch.x, train=True, mask=batch.mask, key=key
    )
    # mean_d KL(softmax(t(d)) || softmax(f(x_p; d))).
    gap = distillation(logits, ensemble[batch.position])
    return masked_mean(gap, batch.mask), (stats, {})

  return loss_fn


def server_training(
    local: LocalTraining, steps: int, batch_size: int, lr: float
) -> LocalTraining:
  """N steps of a new Adam, whose rate falls to 0; gradients are clipped."""

  def optimizer(rate):
    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        # lr (1 + cos(pi j / N)) / 2 in step j = 0, ..., N - 1.
        optax.adam(optax.cosine_decay_schedule(rate, steps)),
    )

  return dataclasses.replace(
      local,
      optimizer=optimizer,
      learning_rate=lambda round_num: lr,
      batch_size=batch_size,
      steps=steps,
  )


@requires(
    public='unlabelled',
    keep_optimizer=False,
    local_stats=False,  # The server evaluates the models of clients.
    task='classification',
)
@takes_server_options()
def feddf(
    federation: Federation,
    *,
    server_steps: int = 20,
    server_batch_size: int = 128,
    distill_lr: float = 1e-3,
    weights: str = 'uniform',
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """FedDF.

  In an asynchronous run the server distils once per upload, and the ensemble
  is a single model: the server's plus the client's change.

  Args:
    federation: Groups, local training and a public set. Each group is an
      architecture.
    server_steps: N, minibatches of each architecture in a round; with 0 the
      method is FedAvg with `aggregation='architecture'`, bit for bit.
    server_batch_size: Public examples in a minibatch.
    distill_lr: Adam's learning rate in the first of these steps.
    weights: w_k above: 'uniform', or 'data' for the number of examples (the
      paper). The mean over the ensemble is uniform.
    tx: The server's optimiser, whose step makes x_p from the average before
      the distillation, with the options of `fedavg`; plain averaging in the
      paper.

  Returns:
    The algorithm. Its server state is the models of all architectures, with the
    state of `tx` if that has any. The server's metric is 'server_loss', the KL
    above in nats, a mean over steps and architectures; it is absent with
    `server_steps` of 0.

  Raises:
    ValueError: If an option is unknown or out of range, or there is no public
      set.
  """
  at_least(0, server_steps=server_steps)
  at_least(1, server_batch_size=server_batch_size)
  not_negative(distill_lr=distill_lr)
  exchange = make_exchange(federation, 'architecture', weights, tx=tx)
  training = server_training(
      federation.local,
      server_steps,
      min(server_batch_size, federation.num_public),
      distill_lr,
  )

  def send(group, start, end, size, num_steps):
    own, delta = exchange.upload(group, start, end, size, num_steps)
    return own, Uplink((), delta)

  train, keep = model_training(federation.local)
  init_client, client_update = trained_clients(exchange, train, keep, send)

  def distil(group, start, ensemble, public, turn):
    """x_p after its N steps, and their mean loss."""
    model = group.model
    end, _, metrics, _ = fit(
        student_loss(model, ensemble),
        training,
        model.trim(start) if training.drop_unused_weights else start,
        public,
        turn,
    )
    return model.fill(end, start), metrics['train_loss']

  def server_update(server, received, turn):
    received = {
        name: clear_padding(r, federation.num_clients)
        for name, r in received.items()
    }
    # x_p <- sum_{k in S_p} w_k x_k / sum_{k in S_p} w_k.
    fused = exchange.average(
        server, {name: sum_uploads(r.kept) for name, r in received.items()}
    )
    if not server_steps:
      return fused, {}
    public = turn.public.unaugmented()
    logits, took_part = teacher_logits(exchange, server, received, public)
    some = jnp.any(took_part)
    # Without a teacher there is no step.
    public = public.replace(size=jnp.where(some, public.size, 0))
    averaged, ensemble = server_variables(fused), mean_logits(logits, took_part)
    params, stats, losses = {}, {}, []
    for group in federation.groups:
      start = exchange.sharing.join(
          group, (), exchange.download(averaged, group)
      )
      end, loss = distil(group, start, ensemble, public, turn)
      shared, _ = exchange.sharing.split(group, end)
      params.update(shared.params)
      stats.update(shared.stats)
      losses.append(loss)
    opt_state = state_of(tx, fused, averaged.params)
    loss = jnp.where(some, jnp.mean(jnp.stack(losses)), jnp.nan)
    distilled = with_state(Variables(params, stats), opt_state)
    return distilled, dict(server_loss=loss)

  return FederatedAlgorithm(
      init=exchange.init,
      init_client=init_client,
      downlink=lambda server, group, visit: exchange.download(server, group),
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: exchange.assemble(
          group, own_blocks(client), exchange.download(server, group)
      ),
      one_model=exchange.one_model,
  )
