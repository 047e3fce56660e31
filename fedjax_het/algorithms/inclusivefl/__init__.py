"""InclusiveFL: models of several depths, each with a top block of its own.

Clients with the same model have the same depth i = 1 .. M. The model of depth
i + 1 has all blocks of depth i, and more. Blocks that depths share are averaged
together; each depth keeps its top block and its head to itself. The server
blends the update of the top block of depth i with the mean update of the blocks
of depth i + 1 at or above it ("momentum distillation"). One round:

  1. Clients k of S_i, which have depth i, receive W_i and train it to y_k.
  2. D_i <- sum_{k in S_i} a_k (y_k - W_i) / A_i,  A_i = sum_{k in S_i} a_k.
  3. u_i <- D_i, except in the top block of i < M once m_i is known:
       u_i[top] <- beta m_i + (1 - beta) D_i[top].
  4. For a leaf that the depths T share:
       W <- W + sum_{i in T} A_i u_i / sum_{i in T} A_i.
     For a leaf of depth i alone: W_i <- W_i + u_i. Unchanged where A = 0.
  5. m_i <- the mean of D_{i+1}[j] over the blocks j of depth i + 1 from
     top(i) to top(i + 1), if A_{i+1} > 0. The next round uses it.

The mean in 5 is taken leaf by leaf, over the blocks that have the leaf with the
same shape: a downsampling block has other input channels, and a shortcut.
Running statistics are averaged, but neither blended nor part of m_i.

Differences from the paper or its code:

- The paper takes one gradient step per round, with AdamW on the server. Here
  clients train for local epochs and the server averages, as in comparisons on
  images. D is then minus the paper's gradient G.
- The authors' code blends only while m_i has its initial value 0: it multiplies
  the gradient of the top block by 1 - beta and never uses m_i. There a leaf
  that no client sent becomes NaN.

Longer than 200 lines because of its docstrings; some 110 lines are code.

References:
  Liu, Wu, Wu, Wang, Lyu, Chen, Xie, `No One Left Behind: Inclusive Federated
  Learning over Heterogeneous Devices <https://arxiv.org/abs/2202.08036>`_,
  KDD 2022.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.averaging import average_weights, model_training
from fedjax_het.aggregation.exchange import Delta, WeightExchange
from fedjax_het.aggregation.server import (
  Optimized,
  takes_server_options,
  weighted_mean,
)
from fedjax_het.algorithms.inclusivefl.depths import (
  PRIVATE,
  depth_sharing,
  find_depths,
)
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation
from fedjax_het.models.blocks import Variables
from fedjax_het.options import between, one_of


class Server(NamedTuple):
  """The server's state.

  Attributes:
    model: Shared blocks, and the private blocks of all depths, by shared key;
      with the state of the server's optimiser, if it has one.
    momentum: {depth: {top block: tree}}, m_i.
    known: {depth: [] bool}, whether m_i was ever set.
  """

  model: Variables | Optimized
  momentum: dict[str, Any]
  known: dict[str, jax.Array]


def blend(delta: Delta, keys, momentum, known, beta: float) -> Delta:
  """Blends m_i into a group's sum of changes.

  Args:
    delta: A D and A, the sums over the group's clients.
    keys: {block: shared key} of the group.
    momentum: {top block: tree}, m_i.
    known: [] bool, whether there is an m_i.
    beta: The coefficient of m_i.

  Returns:
    A u and A.
  """
  change = dict(delta.change)

  def mix(m, total):
    # A u[top] = A beta m + (1 - beta) A D[top].
    mixed = delta.weight * beta * m + (1 - beta) * total
    return jnp.where(known, mixed, total)

  for top, m in momentum.items():
    change[keys[top]] = jax.tree.map(mix, m, change[keys[top]])
  return delta._replace(change=change)


def block_mean(trees):
  """Averages each leaf over the blocks that have it with the same shape.

  Args:
    trees: The blocks' trees. The result has the leaves of the first tree.

  Returns:
    The mean.
  """
  leaves = [dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in trees]

  def mean(path, first):
    found = [block[path] for block in leaves if path in block]
    alike = [leaf for leaf in found if leaf.shape == first.shape]
    return sum(alike) / len(alike)

  return jax.tree_util.tree_map_with_path(mean, trees[0])


def distil(small, large, sharing, deltas, momentum, known):
  """Updates m_i from the changes of the next depth's clients of a round.

  Args:
    small: `Depth` i.
    large: `Depth` i + 1.
    sharing: Which blocks travel.
    deltas: {group: Delta}, before `blend`.
    momentum: {top block of i: tree}, the previous m_i.
    known: [] bool, whether there was one.

  Returns:
    The new `momentum` and `known`.
  """
  blocks = {name for names in small.sources.values() for name in names}

  def of_blocks(group):
    keys = sharing.keys(group)
    params = deltas[group.name].change
    return {name: params[keys[name]] for name in blocks}

  weights = [deltas[group.name].weight for group in large.groups]
  # D_{i+1} = sum_k a_k (y_k - W_{i+1}) / A_{i+1}.
  update, _ = weighted_mean(zip(map(of_blocks, large.groups), weights))
  # m_i <- the mean of D_{i+1}[j] for j from top(i) to top(i + 1).
  new = {
      top: block_mean([update[name] for name in names])
      for top, names in small.sources.items()
  }
  some = sum(weights) > 0
  momentum = jax.tree.map(lambda m, old: jnp.where(some, m, old), new, momentum)
  return momentum, known | some


@requires(keep_optimizer=False)
@takes_server_options()
def inclusivefl(
    federation: Federation,
    *,
    beta: float = 0.2,
    private: str = 'top',
    private_heads: bool = True,
    aggregation: str = 'layerwise',
    weights: str = 'uniform',
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """InclusiveFL over models that each extend the next smaller one.

  Args:
    federation: Groups and local training; groups with the same model have the
      same depth.
    beta: The share of the larger model's update in a top block, in [0, 1].
    private: Which blocks a depth keeps to itself: 'top' for the last one,
      'stage' for the last one of every stage with more than one block, 'none'.
    private_heads: Whether each depth has a head of its own.
    aggregation: 'layerwise' averages the other blocks over all depths,
      'architecture' averages all blocks inside a depth.
    weights: The averaging coefficients a_k: 'uniform', or 'data' for the number
      of examples (the paper).
    tx: The server's optimiser, with the options of `fedavg`.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is unknown or out of range, a model lacks a block
      of the next smaller one or has no numbered block, or blocks of one name
      differ in shape.
  """
  between(0, 1, beta=beta)
  one_of('private', private, PRIVATE)
  one_of('aggregation', aggregation, ('layerwise', 'architecture'))
  one_of('weights', weights, ('uniform', 'data'))
  depths = find_depths(federation, private, private_heads)
  sharing = depth_sharing(federation, depths, aggregation)
  exchange = WeightExchange(federation, sharing, weights, tx)
  averaged = average_weights(exchange, *model_training(federation.local))

  def init(key):
    momentum = {}
    for depth in depths[:-1]:
      params = depth.model.abstract_variables.params
      tops = {top: params[top] for top in depth.sources}
      momentum[depth.name] = jax.tree.map(
          lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tops
      )
    known = {name: jnp.zeros((), bool) for name in momentum}
    return Server(exchange.init(key), momentum, known)

  def server_update(server, received, turn):
    del turn
    deltas = {name: got.summed for name, got in received.items()}
    momentum, known = dict(server.momentum), dict(server.known)
    updates = dict(deltas)
    for small, large in itertools.pairwise(depths):
      name = small.name
      for group in small.groups:
        updates[group.name] = blend(
            deltas[group.name], sharing.keys(group), momentum[name],
            known[name], beta,
        )  # fmt: skip
      momentum[name], known[name] = distil(
          small, large, sharing, deltas, momentum[name], known[name]
      )
    # W <- W + sum_{i in T} A_i u_i / sum_{i in T} A_i.
    return Server(exchange.average(server.model, updates), momentum, known), {}

  return averaged._replace(
      init=init,
      downlink=lambda server, group, visit: averaged.downlink(
          server.model, group, visit
      ),
      server_update=server_update,
      client_model=lambda server, client, group: averaged.client_model(
          server.model, client, group
      ),
  )
