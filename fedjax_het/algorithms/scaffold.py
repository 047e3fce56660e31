"""SCAFFOLD: control variates against the drift of local training.

Client k holds c_k, an estimate of its gradient, and the server c, the mean of
c_k over all N clients; all begin at 0. In a round of the clients S:

  y <- x, then K times  y <- y - lr (g(y) + c - c_k)
  c_k+ <- c_k - c + (x - y) / (K lr)                          (option II)
  send y - x and c_k+ - c_k;  c_k <- c_k+
  x <- x + server_lr / |S| sum_S (y - x)
  c <- c + 1 / N sum_S (c_k+ - c_k)

With SGD c_k+ is the mean of the K gradients g. This module computes that mean,
so that c_k is a gradient with any optimiser. The correction is added before the
optimiser; c_k excludes weight decay. S and N count the clients that own a
block. Running statistics and blocks that do not travel are not corrected.

References:
  Karimireddy et al., `SCAFFOLD <https://arxiv.org/abs/1910.06378>`_, ICML 2020.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation import server as server_lib
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.engine.local import fit_model
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.models.blocks import Variables


def corrected(shift) -> optax.GradientTransformation:
  """Adds `shift` to the gradients; the state sums the uncorrected gradients."""

  def update(grads, total, params=None):
    total = jax.tree.map(jnp.add, total, grads)
    return jax.tree.map(jnp.add, grads, shift), total

  return optax.GradientTransformation(optax.tree.zeros_like, update)


@requires()
@server_lib.takes_server_options()
def scaffold(
    federation: Federation,
    *,
    aggregation: str = 'layerwise',
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """SCAFFOLD, option II, over clients of one or several architectures.

  Args:
    federation: Groups and local training.
    aggregation: As for `fedavg`.
    tx: The server's optimiser of x, with the options of `fedavg`.

  Returns:
    The algorithm. Server: (x, c). Client: (its own blocks, c_k).
  """
  exchange = make_exchange(federation, aggregation, tx=tx)
  sharing, local = exchange.sharing, federation.local

  def init(key):
    x = exchange.init(key)
    return x, optax.tree.zeros_like(server_lib.server_variables(x).params)

  def init_client(group, client_id, key):
    shared, _ = sharing.split(group, group.model.abstract_variables.params)
    return exchange.init_client(group, key), optax.tree.zeros_like(shared)

  def client_update(group, client, sent, data, visit):
    (own, c_k), (x, c), model = client, sent, group.model
    start = exchange.assemble(group, own, x)
    none = optax.tree.zeros_like(start.params)
    # c - c_k; 0 for blocks that do not travel.
    shift = sharing.join(group, none, jax.tree.map(jnp.subtract, c, c_k))
    if local.drop_unused_weights:
      shift = model.trim(Variables(shift, {})).params
    # y <- y - lr (g(y) + c - c_k).
    steps = dataclasses.replace(local, optimizer=lambda lr: optax.chain(
        corrected(shift), local.optimizer(lr)))  # fmt: skip
    y, (total, _), metrics, num = fit_model(model, steps, start, data, visit)
    # c_k+ <- 1/K sum_j g_j; without a step c_k stays.
    total = model.fill(Variables(total, {}), Variables(none, {})).params
    total, _ = sharing.split(group, total)
    new = jax.tree.map(
        lambda t, old: jnp.where(num > 0, t / jnp.maximum(num, 1), old),
        total, c_k)  # fmt: skip
    # Send y - x and c_k+ - c_k.
    own, delta = exchange.upload(group, start, y, data.size, num)
    change = jax.tree.map(jnp.subtract, new, c_k)
    return (own, new), Uplink((delta, change)), metrics

  def server_update(server, received, turn):
    x, c = server
    # x <- x + server_lr / |S| sum_S (y - x).
    x = exchange.collect(x, received, lambda summed: summed[0])
    # c <- c + 1/N sum_S (c_k+ - c_k).
    mean, _ = server_lib.weighted_mean(
        (received[group.name].summed[1], jnp.float32(group.num_clients))
        for group in federation.groups
    )
    return (x, jax.tree.map(jnp.add, c, mean)), {}

  return FederatedAlgorithm(
      init=init,
      init_client=init_client,
      downlink=lambda server, group, visit: (
          exchange.download(server[0], group), sharing.pick(group, server[1])
      ),
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: exchange.assemble(
          group, client[0], exchange.download(server[0], group)
      ),
      personal=exchange.personal,
      one_model=exchange.one_model,
  )
