"""FedDyn: a regulariser that changes from round to round.

FedProx pulls the clients towards the server's model x, also at the optimum.
FedDyn adds a linear term, so that the minima of the clients' regularised losses
agree with the minimum of the common loss. Client k holds h_k, the gradient of
its loss L_k at the end of its last visit, and the server h, the mean of h_k
over all N clients; all begin at 0. In a round of the clients S:

  theta_k <- argmin L_k(theta) - <h_k, theta> + alpha/2 ||theta - x||^2
  h_k <- h_k - alpha (theta_k - x)
  h <- h - alpha / N sum_S (theta_k - x)
  x <- 1/|S| sum_S theta_k - h / alpha

A client approximates the minimum by local training from x, with the gradient
g - h_k + alpha (theta - x) before the optimiser. So h_k is a gradient only if
the client comes near the minimum; h is the mean of h_k in any case.

S and N count the clients that own a block; a block that no client of S owns
keeps x and h. Running statistics become their mean. Neither they nor blocks
that do not travel are regularised.

With 'data' the common loss weights L_k by the number of examples n_k. The
client then has alpha_k = alpha / w_k with w_k = N n_k / sum n, so that
theta_k - x = -(change of w_k h_k) / alpha, and h is the mean of w_k h_k. The
authors' code stores u_k = -h_k / alpha_k.

References:
  Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, `Federated Learning
  Based on Dynamic Regularization <https://arxiv.org/abs/2111.04263>`_, ICLR
  2021, Algorithm 1. The authors' code: `alpemreacar/FedDyn
  <https://github.com/alpemreacar/FedDyn>`_. The means over the owners of a
  block are those of FedIN v2.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.server import weighted_mean
from fedjax_het.engine.local import train_model
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Group,
  Uplink,
)
from fedjax_het.models.blocks import Variables
from fedjax_het.options import one_of, positive


class ServerModel(NamedTuple):
  """x, with the mean of the last cohort's models beside it.

  Attributes:
    params: Parameters of x.
    stats: Its running statistics.
    mean: `Variables` of the mean, with the same statistics.
  """

  params: Any
  stats: Any
  mean: Variables


def predict_mean(group: Group, model: ServerModel, x) -> jax.Array:
  """Logits [B, C] of the mean of the last cohort's models, a view."""
  return group.model.apply(model.mean, x)[0]


def regularised(h_k, x, alpha) -> optax.GradientTransformation:
  """Adds the gradient of -<h_k, theta> + alpha/2 ||theta - x||^2.

  Args:
    h_k: {block: tree} of the blocks that are regularised.
    x: The same for the received parameters.
    alpha: Strength, a number or [] float32.

  Returns:
    A stateless transformation of {block: tree}, with all blocks of a model.
  """

  def update(grads, params):
    # g - h_k + alpha (theta - x).
    new = {
        name: jax.tree.map(
            lambda g, h, theta, a: g - h + alpha * (theta - a),
            grads[name], h_k[name], params[name], x[name],
        )
        for name in h_k
    }  # fmt: skip
    return {**grads, **new}

  return optax.stateless(update)


@requires(sizes=True)
def feddyn(
    federation: Federation,
    *,
    alpha: float = 0.01,
    aggregation: str = 'layerwise',
    weights: str = 'uniform',
) -> FederatedAlgorithm:
  """FedDyn over clients of one or several architectures.

  Args:
    federation: Groups, local training and the clients' sizes.
    alpha: Strength of the regulariser, above 0; 0.1, 0.01 or 0.001 in the
      paper. The server divides h by it, so that a small value amplifies the
      noise of local training.
    aggregation: As for `fedavg`.
    weights: The weights of the clients' losses in the common loss: 'uniform'
      (the paper), or 'data' for the number of examples (the authors' code).
      They change `alpha` of a client; all means are plain means.

  Returns:
    The algorithm. Server: (x, h). Client: (its own blocks, h_k). The evaluated
    model is x; the view 'mean' is the mean of the last cohort's models.

  Raises:
    ValueError: If an option is unknown or out of range, the sizes are not
      known, or shared blocks differ in shape.
  """
  positive(alpha=alpha)
  one_of('weights', weights, ('uniform', 'data'))
  exchange = make_exchange(federation, aggregation)
  sharing, local = exchange.sharing, federation.local
  mean_size = float(np.mean(federation.sizes))

  def strength(size):
    """alpha_k of a client of `size` examples; any number without examples."""
    if weights == 'uniform':
      return alpha
    # alpha / w_k with w_k = N n_k / sum n.
    return alpha * mean_size / jnp.maximum(size, 1).astype(jnp.float32)

  def init(key):
    x = exchange.init(key)
    return x, optax.tree.zeros_like(x.params)

  def init_client(group, client_id, key):
    shared, _ = sharing.split(group, group.model.abstract_variables.params)
    return exchange.init_client(group, key), optax.tree.zeros_like(shared)

  def client_update(group, client, sent, data, visit):
    (own, h_k), model = client, group.model
    start, alpha_k = exchange.assemble(group, own, sent), strength(data.size)
    h = sharing.join(group, (), h_k)
    x = {name: start.params[name] for name in h}
    if local.drop_unused_weights:
      h, x = (model.trim(Variables(tree, {})).params for tree in (h, x))
    # theta_k <- argmin L_k(theta) - <h_k, theta> + alpha/2 ||theta - x||^2.
    steps = dataclasses.replace(local, optimizer=lambda lr: optax.chain(
        regularised(h, x, alpha_k), local.optimizer(lr)))  # fmt: skip
    theta, metrics, num = train_model(model, steps, start, data, visit)
    own, delta = exchange.upload(group, start, theta, data.size, num)
    # h_k <- h_k - alpha (theta_k - x).
    h_k = jax.tree.map(lambda h, d: h - alpha_k * d, h_k, delta.change)
    return (own, h_k), Uplink(delta), metrics

  def server_update(server, received, turn):
    x, h = server
    # h <- h - alpha / N sum_S (theta_k - x).
    mean, _ = weighted_mean(
        (received[group.name].summed.change, jnp.float32(group.num_clients))
        for group in federation.groups
    )
    h = jax.tree.map(lambda h, d: h - alpha * d, h, mean)

    def minus_h(mean, sent):
      return jax.tree.map(lambda d, h: d - h / alpha, mean, h)

    # x <- 1/|S| sum_S theta_k - h / alpha; a block without a sender stays.
    return (exchange.collect(x, received, revise=minus_h), h), {}

  def client_model(server, client, group):
    (x, h), (own, _) = server, client
    sent = exchange.download(x, group)
    # 1/|S| sum_S theta_k = x + h / alpha, since x was last updated.
    mean = jax.tree.map(
        lambda x, h: x + h / alpha, sent.params, sharing.pick(group, h)
    )
    return ServerModel(
        *exchange.assemble(group, own, sent),
        mean=exchange.assemble(group, own, sent._replace(params=mean)),
    )

  return FederatedAlgorithm(
      init=init,
      init_client=init_client,
      downlink=lambda server, group, visit: exchange.download(server[0], group),
      client_update=client_update,
      server_update=server_update,
      client_model=client_model,
      personal=exchange.personal,
      one_model=exchange.one_model,
      views={'mean': predict_mean},
  )
