"""FML: on each client a private model and a small shared one teach each other.

Client k keeps a private model w_k of any architecture. The server has a model
g, the meme, which is averaged. A visit:

  g_k <- g, with a new optimiser state; then in every local step, with logits
  z = w_k(x), u = g_k(x) and probabilities p = softmax(z), q = softmax(u),

    L_w = alpha CE(z, y) + (1 - alpha) KL(q || p),
    L_g = beta CE(u, y) + (1 - beta) KL(p || q),

  the first argument of each KL being constant. Both models step at once.

The server moves g by the mean of the changes g_k - g. The meme has the
architecture of the server's model, `Federation.server_model`, or without one
that of the smallest model of all groups.

Evaluation is of the private models. The view 'meme' evaluates g.

Choices that the sources leave open or hide:

- The authors' code leaves running statistics out of what it resets before it
  averages, so that they become (old + sum) / n. Here they become their mean.
- HtFLlib's version does not stop the gradient in the teacher, divides the KL by
  the number of classes and clips gradients. Its defaults of alpha and beta, 1,
  switch the KL off.

FedHe and FedIN call this method 'FedML'; it is not the framework of that name.

References:
  Shen et al., `Federated Mutual Learning <https://arxiv.org/abs/2006.16765>`_,
  2020, Algorithm 1.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import optax

from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.server import takes_server_options
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.local import init_optimizer
from fedjax_het.engine.needs import requires
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.together import fit_together
from fedjax_het.engine.types import (
    FederatedAlgorithm,
    Federation,
    LocalTraining,
    Uplink,
)
from fedjax_het.models.blocks import Variables
from fedjax_het.options import between


class Client(NamedTuple):
  """A client's state.

  Attributes:
    private: w_k.
    opt_state: Its optimiser's state; None if that is not kept.
    meme: The part of the meme that stays on the client: with
      `Federation.local_stats` its running statistics, else nothing.
  """

  private: Variables
  opt_state: Any
  meme: Variables


def mutual_losses(
    task: Task, z, u, labels, mask, alpha: float, beta: float
) -> tuple[jax.Array, jax.Array]:
  """The losses of a client's two models on a minibatch.

  Args:
    task: Supplies the loss on the labels.
    z: [B, C] logits of the private model.
    u: [B, C] logits of the meme.
    labels: [B] int32.
    mask: [B] bool, False for padding; None for no padding.
    alpha: Weight of the private model's loss on the labels.
    beta: Weight of the meme's loss on the labels.

  Returns:
    L_w and L_g, scalars in nats; each has a gradient in its own logits alone.
  """
  # L_w = alpha CE(z, y) + (1 - alpha) KL(q || p), q detached.
  from_meme = masked_mean(distillation(z, u), mask)
  private = alpha * task.loss(z, labels, mask) + (1 - alpha) * from_meme
  # L_g = beta CE(u, y) + (1 - beta) KL(p || q), p detached.
  from_private = masked_mean(distillation(u, z), mask)
  meme = beta * task.loss(u, labels, mask) + (1 - beta) * from_private
  return private, meme


def memes_of(federation: Federation) -> Federation:
  """The federation of the memes: all clients hold g.

  Args:
    federation: The federation. Without a server's model the meme is the model
      with the fewest parameters of all groups, the first of equal ones.

  Returns:
    The same groups and clients with the second models.

  Raises:
    ValueError: If the meme has other inputs or another number of outputs than a
      group's model; the message names the group.
  """
  models = [group.model for group in federation.groups]
  smallest = min(models, key=lambda model: model.num_params)
  meme = federation.server_model or smallest
  for group in federation.groups:
    for what in ('input_shape', 'num_classes'):
      own, shared = getattr(group.model, what), getattr(meme, what)
      if own != shared:
        raise ValueError(
            f'fml: {what} of the shared model {meme.name!r} is {shared}, of '
            f'the model of {group.name!r} {own}; they must be equal.'
        )
  groups = (
      dataclasses.replace(group, model=meme) for group in federation.groups
  )
  return dataclasses.replace(federation, groups=tuple(groups))


def visit_fn(
    local: LocalTraining, alpha: float, beta: float
) -> Callable[..., Any]:
  """The local training of one client's two models.

  Args:
    local: How to train.
    alpha: As for `mutual_losses`.
    beta: As for `mutual_losses`.

  Returns:
    `(models, private, meme, opt_state, data, visit) -> (private, meme,
    opt_state, metrics, num_steps)`, where `models` are the two architectures;
    an `opt_state` of None begins anew.
  """

  def loss_of(logits, batch):
    private, meme = mutual_losses(
        local.task, *logits, batch.y, batch.mask, alpha, beta
    )
    # L_w + L_g: each model gets the gradient of its own loss.
    return private + meme, dict(private_loss=private, meme_loss=meme)

  def train(models, private, meme, opt_state, data, visit):
    if opt_state is None:
      opt_state = init_optimizer(local, private.params)
    (private, meme), (opt_state, _), metrics, num_steps = fit_together(
        models,
        local,
        (private, meme),
        loss_of,
        data,
        visit,
        opt_states=(opt_state, init_optimizer(local, meme.params)),
    )
    return private, meme, opt_state, metrics, num_steps

  return train


@requires(server_model=None, keep_optimizer=True, task='classification')
@takes_server_options()
def fml(
    federation: Federation,
    *,
    alpha: float = 0.5,
    beta: float = 0.5,
    weights: str = 'uniform',
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """FML over clients of any architectures.

  Args:
    federation: Groups and local training. Clients keep the optimiser's state
      of their private models unless `local.keep_optimizer` is False; that of
      the meme is new in each visit.
    alpha: Weight of the private model's loss on the labels, in [0, 1]. With 1
      it trains alone.
    beta: Weight of the meme's loss on the labels, in [0, 1]. With 1 the memes
      are FedAvg's.
    weights: As for `fedavg`.
    tx: The server's optimiser, with the options of `fedavg`.

  Returns:
    The algorithm. The server is FedAvg's, over the memes; clients are
    `Client`s.

  Raises:
    ValueError: If an option is unknown or out of range, or the meme does not
      fit a group's model.
  """
  between(0, 1, alpha=alpha, beta=beta)
  memes = memes_of(federation)
  exchange = make_exchange(memes, 'layerwise', weights, tx=tx)
  small = {group.name: group for group in memes.groups}
  local, train = federation.local, visit_fn(federation.local, alpha, beta)
  keep = local.keeps_optimizer(True)

  def init_client(group, client_id, key):
    del client_id
    private = group.model.init(key)
    opt_state = init_optimizer(local, private.params) if keep else None
    return Client(private, opt_state, exchange.init_client(
        small[group.name], key
    ))  # fmt: skip

  def client_update(group, client, sent, data, visit):
    # g_k <- g.
    other = small[group.name]
    start = exchange.assemble(other, client.meme, sent)
    private, meme, opt_state, metrics, num_steps = train(
        (group.model, other.model), client.private, start, client.opt_state,
        data, visit,
    )  # fmt: skip
    own, delta = exchange.upload(other, start, meme, data.size, num_steps)
    client = Client(private, opt_state if keep else None, own)
    return client, Uplink(delta), metrics

  def client_model(server, client, group):
    sent = exchange.download(server, small[group.name])
    meme = exchange.assemble(small[group.name], client.meme, sent)
    return client.private, meme

  def predict_meme(group, pair, x):
    return small[group.name].model.apply(pair[1], x)[0]

  return FederatedAlgorithm(
      # Another key, so that a meme never equals a private model of its kind.
      init=lambda key: exchange.init(jax.random.fold_in(key, 1)),
      init_client=init_client,
      downlink=lambda server, group, visit: exchange.download(
          server, small[group.name]
      ),
      client_update=client_update,
      server_update=lambda server, received, turn: (
          exchange.collect(server, received), {}
      ),
      client_model=client_model,
      personal=True,
      predict=lambda group, pair, x: group.model.apply(pair[0], x)[0],
      views={'meme': predict_meme},
      trained_models=lambda group: (group.model, small[group.name].model),
  )
