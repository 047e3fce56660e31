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

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.averaging import (
  model_training,
  own_blocks,
  trained_clients,
)
from fedjax_het.aggregation.ensemble_distillation import (
  average_uploads,
  distil_averages,
  server_training,
)
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.server import takes_server_options
from fedjax_het.aggregation.teachers import teacher_logits
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.options import at_least, not_negative


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

  def server_update(server, received, turn):
    # x_p <- sum_{k in S_p} w_k x_k / sum_{k in S_p} w_k.
    averages, received = average_uploads(exchange, server, received)
    if not server_steps:
      return averages, {}
    public = turn.public.unaugmented()
    logits, took_part = teacher_logits(exchange, server, received, public)
    distilled, loss = distil_averages(
        exchange,
        training,
        averages,
        mean_logits(logits, took_part),
        jnp.any(took_part),
        public,
        turn,
    )
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
