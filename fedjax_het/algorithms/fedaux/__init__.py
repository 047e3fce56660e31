"""FedAUX: FedDF whose ensemble trusts a client where it has seen such data.

The server holds unlabelled public examples, of which a part D^- is for the
scores and the rest, D_distill, for the distillation, and one model x_p for each
architecture p, whose features are the frozen h_p of the first x_p. Before round
1, client k of architecture p, with examples D_k (`warm_up`):

  h(x) = h_p(x) / max over D_k and D^- of ||h_p(x)||,
  w, b <- argmin 1/n sum_{x in D_k, D^-} log(1 + exp(-t (w h(x) + b)))
                 + l2/2 ||w||^2,  t = 1 on D_k, -1 on D^-, n = |D_k| + |D^-|,
  w, b <- w + N(0, sigma^2 I), b + N(0, sigma^2),
          sigma^2 = 2 ln(1.25 / delta) Delta^2 / epsilon^2, Delta = 2 / (n l2),
  up:     s_k(d) = 1 / (1 + exp(-w h(d) - b)) + 1e-8 for all d in D_distill.

In a round with the cohort S, of which S_p has the architecture p,

  down:    x_p;
  client:  local training, x_k;
  up:      x_k;
  server:  x_p <- sum_{k in S_p} w_k x_k / sum_{k in S_p} w_k, and for all p, N
           times on a minibatch of D_distill

             z(d) = sum_{k in S} s_k(d) f(x_k; d) / sum_{k in S} s_k(d),
             x_p <- Adam on  mean_d KL(softmax(z(d)) || softmax(f(x_p; d))).

The step of the server is FedDF's (`aggregation.ensemble_distillation`), with
teachers in eval mode, a new Adam in each round and a rate that falls to 0. Only
the ensemble and its examples differ.

Choices in which the sources differ, or which they leave open:

- There is no contrastive pre-training ('+P' in the authors' code). h_p are the
  features of the initial models, which are random unless a model is pretrained.
- Each architecture has its own h_p, as in the authors' code.
- The losses are averaged. In the authors' code they are added up, for which
  Delta = 2 / (n l2) does not hold: it is 2 / l2 there.
- Delta holds for w if b is absent (`intercept=False`) and the largest norm
  counts as public. An intercept without penalty, the default and the authors'
  code, has noise but no guarantee. Other noise is not in the method: models are
  uploaded as in FedDF.
- D^- and D_distill are disjoint. In the authors' code they are two independent
  draws, which overlap.
- The authors' code evaluates models and teachers in training mode.
- The authors' server has an Adam with a constant rate of 5e-5 that it keeps.

References:
  Sattler, Korjakow, Rischke, Samek, `FedAUX: Leveraging Unlabeled Auxiliary
  Data in Federated Learning <https://arxiv.org/abs/2102.02514>`_, IEEE TNNLS
  2021. Code: `fedl-repo/fedaux <https://github.com/fedl-repo/fedaux>`_.
"""

from typing import Any, NamedTuple

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
from fedjax_het.aggregation.uploads import gather_uploads, keep_latest
from fedjax_het.algorithms.fedaux.scores import (
  add_noise,
  extract_features,
  fit_scorer,
  noise_scale,
  score,
  split_public,
  subset,
)
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.options import at_least, between, not_negative, positive


class Scores(NamedTuple):
  """What a client uploads in its warm-up.

  Attributes:
    values: [D] float32, s_k on D_distill.
  """

  values: jax.Array


class Server(NamedTuple):
  """FedAUX's server state.

  Attributes:
    model: The models x_p, with the state of the server's optimiser.
    scores: [num_clients, D] float32, s_k on D_distill; 1 until they come.
  """

  model: Any
  scores: jax.Array


def weighted_logits(logits, scores, took_part) -> jax.Array:
  """The ensemble's logits, a mean weighted by certainty.

  Args:
    logits: [S, P, C], f(x_k; d).
    scores: [S, P], s_k(d), above 0.
    took_part: [S] bool, whose logits count.

  Returns:
    z, [P, C]; 0 if nobody took part.
  """
  # z(d) = sum_k s_k(d) f(x_k; d) / sum_k s_k(d).
  some = took_part[:, None]
  weights = jnp.where(some, scores, 0.0)
  total = jnp.sum(weights, axis=0)
  shares = weights / jnp.where(total > 0, total, 1.0)[None]
  parts = shares[..., None] * jnp.where(some[..., None], logits, 0.0)
  return jnp.sum(parts, axis=0)


@requires(
    public='unlabelled',
    keep_optimizer=False,
    local_stats=False,  # The server evaluates the models of clients.
    task='classification',
)
@takes_server_options()
def fedaux(
    federation: Federation,
    *,
    distill_share: float = 0.8,
    l2: float = 0.01,
    intercept: bool = True,
    epsilon: float | None = None,
    delta: float = 1e-5,
    server_steps: int = 20,
    server_batch_size: int = 128,
    distill_lr: float = 1e-3,
    weights: str = 'uniform',
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """FedAUX, without its contrastive pre-training.

  A client uploads |D_distill| scores once. Sending the public set once is not
  counted. In an asynchronous run the ensemble is a single model, whose score
  cancels: FedAUX is then FedDF on D_distill.

  Args:
    federation: Groups, local training and a public set of two examples or more.
      Each group is an architecture.
    distill_share: The share of D_distill in the public set, in (0, 1).
    l2: lambda, strength of the penalty on the coefficients of the scores, above
      0. Scores of a smaller one are closer to 0 and 1.
    intercept: Whether the regression has an intercept, which is not penalised.
      Without one, and with noise, w is differentially private.
    epsilon: Privacy loss of the noise on the regression, in (0, 1); None for no
      noise.
    delta: Probability of that guarantee, in (0, 1).
    server_steps: N, minibatches of each architecture in a round; with 0 the
      method is FedAvg with `aggregation='architecture'`, up to rounding.
    server_batch_size: Public examples in a minibatch.
    distill_lr: Adam's learning rate in the first of these steps.
    weights: w_k above: 'uniform' (the authors' code), or 'data' for the number
      of examples.
    tx: The server's optimiser, whose step makes x_p from the average before
      the distillation, with the options of `fedavg`.

  Returns:
    The algorithm; its server state is a `Server`. The metric of the warm-up is
    'mean_score', the mean of s_k over D_distill. The server's metric is
    'server_loss', the KL above in nats, a mean over steps and architectures; it
    is absent with `server_steps` of 0.

  Raises:
    ValueError: If an option is unknown or out of range, or there are fewer than
      two public examples.
  """
  between(0, 1, above=True, below=True, distill_share=distill_share)
  positive(l2=l2)
  # The bound of the Gaussian mechanism holds below 1.
  if epsilon is not None:
    between(0, 1, above=True, below=True, epsilon=epsilon)
  between(0, 1, above=True, below=True, delta=delta)
  at_least(0, server_steps=server_steps)
  at_least(1, server_batch_size=server_batch_size)
  not_negative(distill_lr=distill_lr)
  num_public, num_clients = federation.num_public, federation.num_clients
  if num_public < 2:
    raise ValueError(
        f'fedaux needs two public examples or more, got {num_public}.'
    )
  negatives, distilled = split_public(num_public, distill_share)
  exchange = make_exchange(federation, 'architecture', weights, tx=tx)
  training = server_training(
      federation.local,
      server_steps,
      min(server_batch_size, len(distilled)),
      distill_lr,
  )

  def send(group, start, end, size, num_steps):
    own, delta = exchange.upload(group, start, end, size, num_steps)
    return own, Uplink((), delta)

  train, keep = model_training(federation.local)
  init_client, client_update = trained_clients(exchange, train, keep, send)

  def warm_up(group, client, sent, data, visit):
    start = exchange.assemble(group, own_blocks(client), sent)
    public = data.of_public()
    own, minus, rest = (
        extract_features(group.model, start, examples)
        for examples in (
            data, subset(public, negatives), subset(public, distilled)
        )
    )  # fmt: skip
    place = jnp.arange(len(own) + len(minus))
    is_own, real = place < len(own), (place < data.size) | (place >= len(own))
    # h(x) = h_p(x) / max ||h_p(x)||, over D_k and D^-.
    x = jnp.concatenate([own, minus])
    norm = jnp.max(jnp.where(real, jnp.linalg.norm(x, axis=1), 0.0))
    norm = jnp.where(norm > 0, norm, 1.0)
    scorer = fit_scorer(x / norm, is_own, real, l2, intercept)
    if epsilon is not None:
      sigma = noise_scale(jnp.sum(real), l2, epsilon, delta)
      key = jax.random.fold_in(visit.key, 2)
      scorer = add_noise(key, scorer, sigma, intercept)
    values = score(scorer, rest / norm)
    metrics = dict(mean_score=jnp.mean(values))
    return client, Uplink((), Scores(values)), metrics

  def init(key):
    ones = jnp.ones((num_clients, len(distilled)))
    return Server(exchange.init(key), ones)

  def server_update(server, received, turn):
    if all(isinstance(r.kept, Scores) for r in received.values()):
      # From the warm-up.
      ids, uploads = gather_uploads(received)
      scores = keep_latest(server.scores, ids, uploads.values)
      return server._replace(scores=scores), {}
    # x_p <- sum_{k in S_p} w_k x_k / sum_{k in S_p} w_k.
    averages, received = average_uploads(exchange, server.model, received)
    if not server_steps:
      return server._replace(model=averages), {}
    public = subset(turn.public, distilled)
    logits, took_part = teacher_logits(
        exchange, server.model, received, public
    )
    # In the order of `teacher_logits`. Ids of padding slots are outside of the
    # array; these slots do not count.
    ids = jnp.concatenate([
        received[group.name].client_id for group in federation.groups
    ])
    scores = server.scores.at[ids].get(mode='fill', fill_value=1.0)
    model, loss = distil_averages(
        exchange,
        training,
        averages,
        weighted_logits(logits, scores, took_part),
        jnp.any(took_part),
        public,
        turn,
    )
    return server._replace(model=model), dict(server_loss=loss)

  def download(server, group):
    return exchange.download(server.model, group)

  return FederatedAlgorithm(
      init=init,
      init_client=init_client,
      downlink=lambda server, group, visit: download(server, group),
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: exchange.assemble(
          group, own_blocks(client), download(server, group)
      ),
      one_model=exchange.one_model,
      warm_up=warm_up,
  )
