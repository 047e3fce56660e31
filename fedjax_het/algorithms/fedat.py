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

In synchronous rounds all tiers finish together, so that x is the plain mean of
the tiers' models. Compression of the uploads is left out.

References:
  Chai et al., `FedAT: A High-Performance and Communication-Efficient Federated
  Learning System with Asynchronous Tiers
  <https://arxiv.org/abs/2010.05958>`_, SC 2021, Eq. 3 and Algorithm 2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.averaging import (
  model_training,
  own_blocks,
  trained_clients,
)
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.server import weighted_mean
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.models.blocks import Variables


class Sent(NamedTuple):
  """The uplink of a client, or a sum of them.

  Attributes:
    w: n_k w_k, by shared key.
    weight: [] float32, n_k; 0 after a visit without a step.
  """

  w: Variables
  weight: jax.Array


class Server(NamedTuple):
  """The server's state.

  Attributes:
    x: The common model, by shared key.
    tiers: {group: x_m}, each with the keys of its group.
    pending: {group: sum of the uploads of its unfinished round}.
    counts: [M] int32, T_m, in the order of the groups.
  """

  x: Variables
  tiers: dict[str, Variables]
  pending: dict[str, Sent]
  counts: jax.Array


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


def mean_where_sent(old: Variables, terms: list[Sent]) -> Variables:
  """The weighted mean of each key; keys of weight 0 keep their values."""

  def one(old, trees):
    mean, sent = weighted_mean(
        (tree, term.weight) for tree, term in zip(trees, terms, strict=True)
    )
    return {
        key: jax.tree.map(
            lambda new, x, some=sent[key]: jnp.where(some, new, x),
            mean[key],
            old[key],
        )
        for key in mean
    }

  return Variables(
      one(old.params, [term.w.params for term in terms]),
      one(old.stats, [term.w.stats for term in terms]),
  )


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
    return own, Uplink(Sent(jax.tree.map(lambda leaf: n * leaf, w), n))

  train, keep = model_training(federation.local, mu)
  init_client, client_update = trained_clients(exchange, train, keep, send)

  def init(key):
    x = exchange.init(key)
    tiers = {group.name: exchange.download(x, group) for group in groups}
    pending = {
        name: Sent(jax.tree.map(jnp.zeros_like, tier), jnp.float32(0))
        for name, tier in tiers.items()
    }
    return Server(x, tiers, pending, jnp.zeros(len(groups), jnp.int32))

  def server_update(server, received, turn):
    del turn
    tiers, pending, finished = {}, {}, []
    for group in groups:
      name, got = group.name, received[group.name]
      total = jax.tree.map(jnp.add, server.pending[name], got.summed)
      done = got.round_ends & (total.weight > 0)
      # x_m <- sum_k n_k w_k / sum_k n_k.
      mean = mean_where_sent(server.tiers[name], [total])
      tiers[name] = jax.tree.map(
          lambda new, old, done=done: jnp.where(done, new, old),
          mean,
          server.tiers[name],
      )
      pending[name] = jax.tree.map(
          lambda leaf, ends=got.round_ends: jnp.where(ends, 0, leaf), total
      )
      finished.append(done)
    # T_m <- T_m + 1.
    counts = server.counts + jnp.stack(finished)
    # x <- sum_m (T_{M+1-m} / T) x_m.
    terms = [
        Sent(jax.tree.map(lambda leaf, w=w: w * leaf, tiers[group.name]), w)
        for group, w in zip(groups, tier_weights(counts), strict=True)
    ]
    x = mean_where_sent(server.x, terms)
    return Server(x, tiers, pending, counts), {}

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
