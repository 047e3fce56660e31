"""ScaleFL: sub-models of one net, cut in width and in depth at early exits.

The server holds theta, the full net with an exit at the depth of every level. A
client of level l has the first floor(s_l K) of a layer's K channels and the
trunk up to the level's last exit, with all earlier exits. In round t, from 0:

  1. Client k receives theta_k, the entries of theta that its level has.
  2. It trains its exits j = 1 .. n together, with logits z_j, on
       L = 2 / (n (n + 1)) [ sum_{j<n} j (CE(z_j) + g_t KD_j) + n CE(z_n) ],
       KD_j = T^2 / C KL(softmax(z_n / T) || softmax(z_j / T)),
     with the gradient stopped at z_n in KD_j; g_t = 0 for t <= 0.25 R of R
     rounds, then gamma.
  3. For every entry i, over the clients H_i of the round that hold it,
       theta_i <- theta_i + (1 / |H_i|) sum_{k in H_i} (theta_ki - theta_i),
     unchanged without holders.

Scaler: inputs of norms, except in shortcuts, are divided by s_l in training and
in testing. In both, norms use the statistics of the batch, whatever their
policy. So a net is the same function in both, and a prediction depends on its
test batch. Each level is evaluated at its own last exit.

Differences from the paper's code:

- There the gradient of KD also flows into z_n: `detach=False`. Its gamma is 0
  by default.
- It computes masks as gradients of a copy with zeroed channels. They keep the
  first channels, as here.

Longer than 200 lines because of its docstrings; some 130 lines are code.

References:
  Ilhan, Su, Liu, ScaleFL: Resource-Adaptive Federated Learning With
  Heterogeneous Clients, CVPR 2023, pp. 24532-24541.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.server import (
  init_server_step,
  server_step,
  server_variables,
  state_of,
  takes_server_options,
  with_state,
)
from fedjax_het.aggregation.slicing import (
  Level,
  extract,
  mean_over_holders,
  scatter_add,
)
from fedjax_het.algorithms.scalefl.exits import exits
from fedjax_het.algorithms.scalefl.levels import make_levels, scaler
from fedjax_het.data.federated import Batch
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.local import fit
from fedjax_het.engine.needs import requires
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.models.blocks import Variables
from fedjax_het.options import between, not_negative, one_of, positive


class Sent(NamedTuple):
  """The uplink: w_k (theta_k - theta) of the client's entries, and w_k."""

  change: Any
  weight: jax.Array


def exits_loss(
    logits: Mapping[str, jax.Array],
    batch: Batch,
    task: Task,
    gain: jax.Array | float,
    temperature: float,
    detach: bool = True,
) -> jax.Array:
  """The loss L of all exits of a client.

  Args:
    logits: {exit: [B, C]}, z_1 .. z_n in this order.
    batch: The minibatch.
    task: The loss of one exit.
    gain: g_t, [] float32.
    temperature: T.
    detach: Whether the gradient is stopped at z_n in KD_j.

  Returns:
    A float32 scalar.
  """
  *early, last = logits.values()
  n, classes = len(logits), last.shape[-1]
  # n CE(z_n) + sum_{j<n} j (CE(z_j) + g_t KD_j).
  total = n * task.loss(last, batch.y, batch.mask)
  for j, z in enumerate(early, 1):
    # KD_j = T^2 / C KL(softmax(z_n / T) || softmax(z_j / T)).
    gap = distillation(z, last, temperature, detach=detach)
    kd = masked_mean(gap, batch.mask) / classes
    total += j * (task.loss(z, batch.y, batch.mask) + gain * kd)
  # L = 2 / (n (n + 1)) [ sum_{j<n} j (CE(z_j) + g_t KD_j) + n CE(z_n) ].
  return 2 / (n * (n + 1)) * total


def train_level(level: Level, local, loss_fn, start, data, visit):
  """Local training of a sub-model.

  Args:
    level: The client's level.
    local: Local training.
    loss_fn: `({exit: logits}, batch) -> loss`.
    start: Parameters of the level's model.
    data: The client's examples.
    visit: The visit.

  Returns:
    The parameters at the end, metrics, the number of steps ([] int32).
  """
  model, whole = level.model, Variables(start, {})

  def objective(variables, batch, key):
    with scaler(level):
      logits, stats = model.apply_heads(
          variables, batch.x, train=True, mask=batch.mask, key=key
      )
    return loss_fn(logits, batch), (stats, {})

  begin = model.trim(whole) if local.drop_unused_weights else whole
  end, _, metrics, num_steps = fit(objective, local, begin, data, visit)
  return model.fill(end, whole).params, metrics, num_steps


def take(tree, index):
  """Extracts a level's entries from a tree of full leaves, see `extract`."""
  return extract({name: tree[name] for name in index}, index)


def add(tree, index, part):
  """Adds a level's entries, `part`, to a tree of full leaves."""
  held = {name: tree[name] for name in index}
  return {**tree, **scatter_add(held, index, part)}


@requires(
    one_model=True,
    group_options=dict(rate='1', exit='1'),
    heads=exits,
    local_stats=False,
    task='classification',
    num_rounds=True,
)
@takes_server_options()
def scalefl(
    federation: Federation,
    *,
    distill_weight: float = 0.05,
    temperature: float = 3.0,
    distil_after: float = 0.25,
    detach: bool = True,
    weights: str = 'uniform',
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """ScaleFL with one level for each group.

  Args:
    federation: Groups, all of one model with the early exits of all levels
      (`engine.needs.with_heads`), and local training. A group's options are
      `rate`, its share of the channels, such as '0.7', and `exit`, the share
      of the trunk's numbered blocks in front of its last exit, such as '1/3'.
      Both are '1' by default; `exit='1'` ends in the trunk's own head.
    distill_weight: gamma above, the factor on self-distillation; 0 for none.
    temperature: T.
    distil_after: The share of all rounds after which distillation begins. It
      begins at once if `federation.num_rounds` is None.
    detach: Whether the gradient of KD is stopped at the last exit.
    weights: 'uniform' for the paper's mean over holders, 'data' for one
      weighted by the number of examples.
    tx: The server's optimiser, applied to the mean over holders, with the
      options of `fedavg`.

  Returns:
    The algorithm. Server: the parameters of the full net, with the state of
    the server's optimiser, if it has one.

  Raises:
    ValueError: If an option is out of range, or groups hold different models.
  """
  not_negative(distill_weight=distill_weight)
  positive(temperature=temperature)
  between(0, 1, distil_after=distil_after)
  one_of('weights', weights, ('uniform', 'data'))
  (full, levels), local = make_levels(federation), federation.local
  num_rounds = federation.num_rounds
  last_without = -1.0 if num_rounds is None else distil_after * num_rounds

  def init(key):
    params = full.init(key).params
    return with_state(params, init_server_step(tx, params))

  def receive(server, group):
    # theta_k.
    return take(server_variables(server), levels[group.name].index)

  def client_update(group, client, sent, data, visit):
    # g_t = 0 for t <= 0.25 R, then gamma.
    gain = jnp.where(visit.round_num > last_without, distill_weight, 0.0)

    def loss_fn(logits, batch):
      return exits_loss(logits, batch, local.task, gain, temperature, detach)

    end, metrics, num_steps = train_level(
        levels[group.name], local, loss_fn, sent, data, visit
    )
    amount = data.size if weights == 'data' else 1
    weight = jnp.where(num_steps > 0, amount, 0).astype(jnp.float32)
    # w_k (theta_k - theta).
    change = jax.tree.map(lambda y, x: weight * (y - x), end, sent)
    return client, Uplink(Sent(change, weight)), metrics

  def server_update(server, received, turn):
    del turn
    params = server_variables(server)
    total = count = jax.tree.map(jnp.zeros_like, params)
    for group in federation.groups:
      index = levels[group.name].index
      change, weight = received[group.name].summed
      # total_i = sum_{H_i} w_k (theta_ki - theta_i), count_i = sum_{H_i} w_k.
      total = add(total, index, change)
      held = jax.tree.map(lambda x, w=weight: jnp.full_like(x, w), change)
      count = add(count, index, held)
    # D_i = total_i / count_i.
    mean, some = mean_over_holders(total, count)
    # theta_i <- theta_i + D_i, or another step of the server.
    opt_state = state_of(tx, server, params)
    return with_state(*server_step(tx, params, opt_state, mean, some)), {}

  def predict(group, variables, x):
    level = levels[group.name]
    with scaler(level):
      return level.model.apply(variables, x)[0]

  return FederatedAlgorithm(
      init=init,
      init_client=lambda group, client_id, key: (),
      downlink=lambda server, group, visit: receive(server, group),
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: Variables(
          receive(server, group), {}
      ),
      predict=predict,
      trained_models=lambda group: (levels[group.name].model,),
  )
