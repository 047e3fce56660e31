"""FedAT: tiers train in rounds of their own; slow tiers weigh as fast ones.

A tier is a group of clients, of like speed. Each runs rounds of FedAvg with a
proximal term, and tiers do not wait for each other (`clock.mode='tiers'`). When
tier m has finished a round, in which its clients started from x:

  1. x_m <- sum_k n_k w_k / sum_k n_k over its clients, where w_k is the end of
     local training on L_k(w) + (lambda/2) ||w - x||^2, and T_m <- T_m + 1.
  2. With the tiers sorted by T, from the largest, and T = sum_m T_m,
       x <- sum_m (T_{M+1-m} / T) x_m,
     so that the tier with the fewest rounds has the weight of that with the
     most.
  3. Tier m begins its next round from x.

All x_m begin as x. As printed, a tier without a round counts with its first
model: until all tiers have finished one, the slowest weighs most.

With several architectures each key of 2. is over the tiers that have it, with
weights that sum to 1; where these are all 0, x stays. Running norm statistics
are averaged in the same way.

In synchronous rounds all tiers with clients in the cohort finish together;
while all have finished equally many, x is the plain mean of the tiers' models.
With other asynchronous clocks a round of all tiers ends after the uploads of
the run's round. Compression of the uploads is left out.

References:
  Chai et al., `FedAT: A High-Performance and Communication-Efficient Federated
  Learning System with Asynchronous Tiers
  <https://arxiv.org/abs/2010.05958>`_, SC 2021, Eq. 3 and Algorithm 2.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.averaging import (
  model_training,
  own_blocks,
  trained_clients,
)
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.models.blocks import Variables


class Ends(NamedTuple):
  """The summable uplink of one client, or a sum of them.

  Attributes:
    model: n_k w_k, the shared blocks. Not their change, since clients of a
      tier may have downloaded at different times.
    weight: [] float32, n_k; 0 without a step.
  """

  model: Variables
  weight: jax.Array


class Tier(NamedTuple):
  """What the server holds of a tier, with the keys of its group.

  Attributes:
    model: x_m.
    pending: Sum of the uploads of its unfinished round.
    count: [] int32, T_m.
  """

  model: Variables
  pending: Ends
  count: jax.Array


class Server(NamedTuple):
  """The server's state.

  Attributes:
    x: The common model, by shared key.
    tiers: {group: its `Tier`}.
  """

  x: Variables
  tiers: dict[str, Tier]


def tier_weights(counts: jax.Array) -> jax.Array:
  """The weights of the tiers' models in the common one.

  Args:
    counts: [M] int32, the rounds that each tier has finished.

  Returns:
    [M] float32, T_{M+1-m} / T for the m-th largest count (of equal ones, the
    first); 0 before the first round.
  """
  order = jnp.argsort(-counts, stable=True)
  mirrored = jnp.zeros_like(counts).at[order].set(counts[order[::-1]])
  return mirrored / jnp.maximum(jnp.sum(counts), 1)


def combine(
    old: Mapping[str, Any], models: Iterable[Mapping[str, Any]], weights
) -> dict[str, Any]:
  """The weighted mean of each key over the models that have it.

  Args:
    old: {key: tree}, taken where the weights are all 0.
    models: {key: tree} for some of the keys.
    weights: [] float32 for each model.

  Returns:
    {key: tree}; models that agree in a key are taken bit for bit.
  """
  models, result = [*models], {}
  for key, previous in old.items():
    first, *others = (
        (w, model[key])
        for w, model in zip(weights, models, strict=True)
        if key in model
    )
    total = first[0] + sum(w for w, _ in others)
    safe = jnp.where(total > 0, total, 1.0)
    # x_1 + sum_m w_m (x_m - x_1) / sum_m w_m.
    mean = first[1]
    for w, tree in others:
      mean = jax.tree.map(
          lambda x, x_m, x_1, share=w / safe: x + share * (x_m - x_1),
          mean, tree, first[1],
      )  # fmt: skip
    result[key] = jax.tree.map(
        lambda new, x, some=total > 0: jnp.where(some, new, x), mean, previous
    )
  return result


def where(condition: jax.Array, new, old):
  """`new` or `old`, two trees of one structure."""
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


@requires(keep_optimizer=False)
def fedat(
    federation: Federation,
    *,
    mu: float = 0.4,
    weights: str = 'data',
    aggregation: str = 'layerwise',
) -> FederatedAlgorithm:
  """FedAT; every group is a tier.

  Args:
    federation: Groups and local training.
    mu: lambda of the paper, strength of the proximal term around the downloaded
      model, the factor in the gradient.
    weights: The coefficients of clients in the mean of their tier: 'data' for
      their numbers of examples, or 'uniform'.
    aggregation: The blocks that are shared, as for `fedavg`.

  Returns:
    The algorithm. The server holds 2 M + 1 models for M tiers.

  Raises:
    ValueError: If an option is out of range, or shared blocks differ in shape.
  """
  groups = federation.groups
  exchange = make_exchange(federation, aggregation, weights)

  def send(group, start, end, size, num_steps):
    del start
    w, own = exchange.sharing.split(group, end)
    n = exchange.coefficient(size, num_steps)
    return own, Uplink(Ends(jax.tree.map(lambda leaf: n * leaf, w), n))

  train, keep = model_training(federation.local, mu)
  init_client, client_update = trained_clients(exchange, train, keep, send)

  def init(key):
    x, tiers = exchange.init(key), {}
    for group in groups:
      model = exchange.download(x, group)
      pending = Ends(jax.tree.map(jnp.zeros_like, model), jnp.float32(0))
      tiers[group.name] = Tier(model, pending, jnp.int32(0))
    return Server(x, tiers)

  def server_update(server, received, turn):
    del turn
    tiers = {}
    for name, got in received.items():
      tier = server.tiers[name]
      total = jax.tree.map(jnp.add, tier.pending, got.summed)
      done = got.round_ends & (total.weight > 0)
      # x_m <- sum_k n_k w_k / sum_k n_k, T_m <- T_m + 1.
      safe = jnp.where(done, total.weight, 1.0)
      mean = jax.tree.map(lambda leaf, n=safe: leaf / n, total.model)
      tiers[name] = Tier(
          where(done, mean, tier.model),
          where(got.round_ends, jax.tree.map(jnp.zeros_like, total), total),
          tier.count + done,
      )
    # x <- sum_m (T_{M+1-m} / T) x_m.
    order = [tiers[group.name] for group in groups]
    shares = tier_weights(jnp.stack([tier.count for tier in order]))
    x = Variables(
        combine(server.x.params, (t.model.params for t in order), shares),
        combine(server.x.stats, (t.model.stats for t in order), shares),
    )
    return Server(x, tiers), {}

  return FederatedAlgorithm(
      init=init,
      init_client=init_client,
      downlink=lambda server, group, visit: exchange.download(server.x, group),
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: exchange.assemble(
          group, own_blocks(client), exchange.download(server.x, group)
      ),
      personal=exchange.personal,
      one_model=exchange.one_model,
  )
