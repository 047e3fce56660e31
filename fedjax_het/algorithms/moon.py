"""MOON: local training with a model-contrastive loss on the features.

R(w; b) is the input of the last block, the vector that the output layer
multiplies. Client k keeps prev_k, its model after its last visit. One round:

  1. y <- x, what the client receives. For every minibatch b
       z = R(y; b),  z_g = R(x; b),  z_p = R(prev_k; b)
       g = e^(cos(z, z_g) / T),  p = e^(cos(z, z_p) / T)
       l = -log(g / (g + p)) = softplus((cos(z, z_p) - cos(z, z_g)) / T)
       y <- y - lr grad (CE(y; b) + lambda_c mean l)
     x and prev_k are constants; their norms use running statistics.
  2. prev_k <- y, with its running statistics; y - x is averaged as in FedAvg.

On its first visit a client has no prev_k, and l = 0. There the authors' code
compares with a randomly initialised net, and NIID-Bench with the initial global
model. As in FedIN v2 no projection head is added to the net; the authors' head
is an option of `simple_cnn`.

Longer than 200 lines because of its docstrings.

References:
  Li, He, Song, `Model-Contrastive Federated Learning
  <https://arxiv.org/abs/2103.16257>`_, CVPR 2021, Algorithm 1 and Eq. 3.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.server import takes_server_options
from fedjax_het.engine.local import fit, model_loss
from fedjax_het.engine.needs import requires
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.options import not_negative, positive

# Features with a smaller norm are divided by this instead, as in PyTorch.
_SHORTEST = 1e-8


class Client(NamedTuple):
  """State of a client.

  Attributes:
    own: The blocks that do not travel.
    previous: prev_k, the whole model after the last visit.
    visited: [] bool, whether there is a prev_k.
  """

  own: Variables
  previous: Variables
  visited: jax.Array


def _unit(rows):
  """Divides rows of [B, D] by their norms, in float32; rows of zeros by 1."""
  rows = rows.astype(jnp.float32)
  square = jnp.sum(rows * rows, axis=1, keepdims=True)
  norm = jnp.sqrt(jnp.where(square > 0, square, 1.0))
  return rows / jnp.maximum(norm, _SHORTEST)


def contrast(z, z_global, z_previous, temperature: float) -> jax.Array:
  """The model-contrastive loss of each example.

  Args:
    z: [B, D], features of the model that is trained.
    z_global: [B, D], those of the global model.
    z_previous: [B, D], those of the client's previous model.
    temperature: T.

  Returns:
    [B] float32, Eq. 3.
  """
  # cos(z, z_p) - cos(z, z_g); the cosine with a feature of zeros is 0.
  u, u_g, u_p = map(_unit, (z, z_global, z_previous))
  gap = jnp.sum(u * (u_p - u_g), axis=1)
  # l = softplus((cos(z, z_p) - cos(z, z_g)) / T)
  return jax.nn.softplus(gap / temperature)


def moon_loss(
    model: BlockModel,
    task: Task,
    received: Variables,
    previous: Variables,
    visited,
    contrast_weight: float,
    temperature: float,
) -> Callable[..., Any]:
  """The loss of a local step, as `fit` takes it.

  Args:
    model: The architecture.
    task: The task.
    received: x.
    previous: prev_k.
    visited: [] bool, whether there is a prev_k.
    contrast_weight: lambda_c above, the factor on the contrastive loss.
    temperature: T.

  Returns:
    The function. Its metrics 'cross_entropy' and 'contrastive_loss' are the
    means of the two terms, without the factor.
  """
  last = len(model.blocks) - 1

  def frozen(variables, batch):
    z, _ = model.apply(variables, batch.x, stop=last, mask=batch.mask)
    return z.reshape(len(z), -1)

  def loss_fn(variables, batch, key):
    pass_on = dict(train=True, mask=batch.mask, key=key)
    # z = R(y; b), and the logits W z + bias.
    z, stats = model.apply(variables, batch.x, stop=last, **pass_on)
    logits, stats = model.apply(
        variables._replace(stats=stats), z, start=last, **pass_on
    )
    loss = task.loss(logits, batch.y, batch.mask)
    others = frozen(received, batch), frozen(previous, batch)
    away = contrast(z.reshape(len(z), -1), *others, temperature)
    # 0 on the first visit, when `previous` is only a placeholder.
    away = jnp.where(visited, masked_mean(away, batch.mask), 0.0)
    # CE + lambda_c mean l
    metrics = dict(cross_entropy=loss, contrastive_loss=away)
    return loss + contrast_weight * away, (stats, metrics)

  return loss_fn


@requires()
@takes_server_options()
def moon(
    federation: Federation,
    *,
    contrast_weight: float = 1.0,
    temperature: float = 0.5,
    aggregation: str = 'layerwise',
    weights: str = 'uniform',
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """MOON over clients of one or several architectures.

  Args:
    federation: Groups and local training.
    contrast_weight: lambda_c above, the factor on the contrastive loss. The
      paper tunes it in 0.1, 1, 5, 10 and takes 5 on CIFAR-10, 1 on CIFAR-100
      and Tiny-ImageNet. 0 gives FedAvg.
    temperature: T, 0.5 in the paper.
    aggregation: As for `fedavg`.
    weights: As for `fedavg`; 'data' in the paper.
    tx: The server's optimiser, with the options of `fedavg`.

  Returns:
    The algorithm. The server is FedAvg's; clients are `Client`s.

  Raises:
    ValueError: If an option is unknown or out of range, or shared blocks differ
      in shape.
  """
  not_negative(contrast_weight=contrast_weight)
  positive(temperature=temperature)
  exchange = make_exchange(federation, aggregation, weights, tx=tx)
  local = federation.local

  def init_client(group, client_id, key):
    nothing = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        group.model.abstract_variables,
    )
    own = exchange.init_client(group, key)
    return Client(own, nothing, jnp.bool_(False))

  def client_update(group, client, sent, data, visit):
    model, previous = group.model, client.previous
    start = exchange.assemble(group, client.own, sent)
    trim = model.trim if local.drop_unused_weights else lambda whole: whole
    x, loss_fn = trim(start), model_loss(model, local.task)
    if contrast_weight > 0:
      loss_fn = moon_loss(
          model, local.task, x, trim(previous), client.visited,
          contrast_weight, temperature,
      )
    y, _, metrics, num_steps = fit(loss_fn, local, x, data, visit)
    y = model.fill(y, start)
    own, delta = exchange.upload(group, start, y, data.size, num_steps)
    # prev_k <- y; without a step prev_k stays.
    trained = num_steps > 0
    previous = jax.tree.map(
        lambda new, old: jnp.where(trained, new, old), y, previous
    )
    visited = client.visited | trained
    return Client(own, previous, visited), Uplink(delta), metrics

  return FederatedAlgorithm(
      init=exchange.init,
      init_client=init_client,
      downlink=lambda server, group, visit: exchange.download(server, group),
      client_update=client_update,
      server_update=lambda server, received, turn: (
          exchange.collect(server, received), {}
      ),
      client_model=lambda server, client, group: exchange.assemble(
          group, client.own, exchange.download(server, group)
      ),
      personal=exchange.personal,
      one_model=exchange.one_model,
  )
