"""FedRolex: narrow copies of one model, cut by rolling windows of channels.

All groups hold the full model theta; client k has the rate rho_k of its group.
In round t, from 0, a layer of K channels has the window

  I_k(t) = {(t + m) mod K : 0 <= m < ceil(rho_k K)},

with one t for all clients and layers. One round:

  1. Client k receives t and theta_k, the entries of theta in its windows.
  2. It trains theta_k as in HeteroFL: inputs of norms are multiplied by
     1 / rho_k (Scaler, in training only), norms keep no running statistics
     (static batch norm), and logits of labels that the client does not have
     are set to 0 and stay in the softmax (masked loss).
  3. For every entry j, over the clients H_j of the round that hold it,
       theta_j <- theta_j + (1 / |H_j|) sum_{k in H_j} Delta_kj,
     unchanged without holders. Only owners of a label hold its head row.
  4. t <- t + 1.

The full-width model is evaluated. With the norm policy 'batch' its statistics
are collected before every evaluation by a pass over all training data. With
'batch_only' each test batch is normalised by its own statistics, as in the
authors' code.

The paper rounds rho K down; here, as in its code, it is rounded up. That code
moves windows downwards, and has one window over all heads of an attention
layer; here each head has its own window. Clients that draw a new rate in every
round, and the "local" evaluation on the clients' own test data, are left out.

The module exceeds 200 lines with its docstrings; its code has about 100.

References:
  Alam, Liu, Yan, Zhang, `FedRolex: Model-Heterogeneous Federated Learning with
  Rolling Sub-Model Extraction <https://arxiv.org/abs/2212.01548>`_, NeurIPS
  2022, Algorithm 1.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.label_masks import MASKS
from fedjax_het.aggregation.narrow_training import (
  check_head_rows,
  holders,
  mark_rows,
  train_narrow,
  weighted_change,
)
from fedjax_het.aggregation.server import (
  init_server_step,
  server_step,
  takes_server_options,
)
from fedjax_het.aggregation.slicing import (
  class_leaves,
  extract,
  leading,
  mean_over_holders,
  narrow,
  scatter_add,
  width_index,
)
from fedjax_het.engine.needs import requires
from fedjax_het.engine.static_norm import static_statistics
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Uplink,
  values_of,
)
from fedjax_het.models.blocks import Variables
from fedjax_het.options import at_least, group_shares, one_of


class Server(NamedTuple):
  """The server's state.

  Attributes:
    params: Full-width parameters.
    stats: Statistics for evaluation.
    t: [] int32, the next round.
    opt_state: {block: the server optimiser's state}; no array by default.
  """

  params: dict[str, Any]
  stats: dict[str, Any]
  t: jax.Array
  opt_state: dict[str, Any]


class Sent(NamedTuple):
  """The uplink: weighted changes, and who holds what.

  Attributes:
    change: The narrow tree of w_k Delta_k, of `Maybe`.
    weight: [] float32, w_k.
    row_weight: [C] float32, w_k in the head rows that the client trains.
  """

  change: Any
  weight: jax.Array
  row_weight: jax.Array


def window(t, size: int, kept: int, direction: int = 1):
  """The channels of a layer in round t, [kept] int32.

  Args:
    t: [] int32, the round.
    size: K, the layer's channels.
    kept: Length of the window; a full one is 0..K-1 in every round.
    direction: 1 or -1, the channels by which the window moves in a round.

  Returns:
    The channels, in the order of the narrow layer.
  """
  if kept == size:
    return leading(size, kept)
  # I(t) = {(t + m) mod K : 0 <= m < kept}
  return (direction * t + jnp.arange(kept)) % size


@requires(
    one_model=True,
    group_options=dict(rate=None),
    local_stats=False,
    task='classification',
)
@takes_server_options()
def fedrolex(
    federation: Federation,
    *,
    direction: int = 1,
    scaler: bool = True,
    mask: str = 'client',
    weights: str = 'uniform',
    calibrate_batches: int | None = None,
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """FedRolex with one width for each group.

  Args:
    federation: Groups, all of one model, and local training. A group's option
      `rate` is its width, such as '1/2'. If no group has one, widths are 1,
      1/2, 1/4, ... in the order of the groups' names. The authors' code clips
      gradients at a global norm of 1: `local.clip_norm`.
    direction: 1 moves the windows up by one channel per round, -1 down.
    scaler: Whether inputs of norms are multiplied by 1 / rate in training.
    mask: 'client' for the masked loss and head rows of owned labels, 'batch'
      for a loss masked by the labels of the minibatch, 'none'.
    weights: 'uniform' for the mean over holders, 'data' for one weighted by the
      number of examples.
    calibrate_batches: Maximum number of batches for static batch norm; None for
      all training data.
    tx: The server's optimiser, applied to the mean over holders, with the
      options of `fedavg`.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is out of range, or groups hold different models.
  """
  one_of('direction', direction, (1, -1))
  one_of('mask', mask, MASKS)
  one_of('weights', weights, ('uniform', 'data'))
  if calibrate_batches is not None:
    at_least(1, calibrate_batches=calibrate_batches)
  full, local = federation.groups[0].model, federation.local
  exact = group_shares('rate', {g.name: g.options for g in federation.groups})
  rates = {name: float(rate) for name, rate in exact.items()}
  small = {}
  for group in federation.groups:
    rate = exact[group.name]
    # ceil(rho K) of the K channels of every layer.
    small[group.name] = narrow(full, lambda k, rate=rate: math.ceil(rate * k))
  check_head_rows(full, mask)
  of_classes = class_leaves(full)

  def index(group, t):
    """I_k(t) of every axis of every leaf."""
    rule = functools.partial(window, t, direction=direction)
    return width_index(full, small[group.name], rule).params

  def init(key):
    variables = full.init(key)
    opt_state = init_server_step(tx, variables.params)
    return Server(variables.params, variables.stats, jnp.int32(0), opt_state)

  def downlink(server, group, visit):
    del visit
    # theta_k = theta[I_k(t)]
    return server.t, extract(server.params, index(group, server.t))

  def client_update(group, client, sent, data, visit):
    (t, start), model = sent, small[group.name]
    end, rows, metrics, num_steps = train_narrow(
        model, rates[group.name], local, start, data, visit,
        scaler=scaler, mask=mask,
    )  # fmt: skip
    amount = data.size if weights == 'data' else 1
    weight = jnp.where(num_steps > 0, amount, 0).astype(jnp.float32)
    # w_k Delta_k, Delta_k = theta_k after training - before; of the head, only
    # the rows of labels in Y_k.
    change = weighted_change(model, start, end, weight, rows)
    change = mark_rows(change, of_classes, rows & (weight > 0))
    return client, Uplink(Sent(change, weight, weight * rows), t), metrics

  def server_update(server, received, turn):
    total = count = jax.tree.map(jnp.zeros_like, server.params)
    for group in federation.groups:
      got, model = received[group.name], small[group.name]
      # All uploads have one t: they are from one round, or there is only one.
      real = got.client_id < federation.num_clients
      held = index(group, jnp.max(jnp.where(real, got.kept, 0)))
      # total_j = sum_{H_j} w_k Delta_kj, count_j = sum_{H_j} w_k
      change, weight, row_weight = got.summed
      total = scatter_add(total, held, values_of(change))
      count = scatter_add(count, held, holders(model, weight, row_weight))
      round_ends = got.round_ends
    # D_j = total_j / count_j
    mean, some = mean_over_holders(total, count)
    # theta_j <- theta_j + D_j, or another step of the server.
    params, opt_state = server_step(
        tx, server.params, server.opt_state, mean, some
    )
    # t <- t + 1
    t = turn.round_num + round_ends
    return Server(params, server.stats, t, opt_state), {}

  def calibrate(server, data):
    stats = static_statistics(
        full,
        server.params,
        data,
        batch_size=local.batch_size,
        num_batches=calibrate_batches,
    )
    return server._replace(stats=stats)

  return FederatedAlgorithm(
      init=init,
      init_client=lambda group, client_id, key: (),
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: Variables(
          server.params, server.stats
      ),
      one_model=True,
      trained_models=lambda group: (small[group.name],),
      calibrate=calibrate if full.abstract_variables.stats else None,
  )
