"""FjORD: ordered dropout over the widths of one model, with self-distillation.

All groups hold the full model theta. P is a set of widths; the net F_p of width
p has the first ceil(p K) of the K channels of every hidden layer. Client k may
use the widths P_k = {p in P : p <= p_k}, where p_k in P is the width of its
group. One round:

  1. Client k receives its slice of theta, of width p_k.
  2. In every local step it draws p from P_k, uniformly, one p for all layers,
     and takes one step of its optimiser on
       L = CE(F_{p_k}(x), y) + (1 - alpha) CE(F_p(x), y)
           + alpha T^2 KL(softmax(F_{p_k}(x) / T) || softmax(F_p(x) / T)),
     with the gradient stopped at F_{p_k} in KL; without distillation on
       L = CE(F_p(x), y).
  3. For every entry j, over the clients H_j of the round that hold it,
       theta_j <- sum_{k in H_j} n_k theta_kj / sum_{k in H_j} n_k,
     unchanged if no client holds it. A client holds its whole slice, even if it
     happened to draw none of the widths with entry j.

A norm with running statistics has separate ones for each width of P, and one
scale and shift, of which F_p has the leading entries. The statistics of all
p <= p_k travel with the slice; the server holds their means over the clients
with p <= p_k, weighted as above.

The widest net is evaluated; every narrower one is a view.

The optimiser acts on the whole slice. Outside of F_p the gradient is zero, but
weight decay, momentum and Adam's moments still move these entries, as in the
authors' code.

Every client draws its own widths. On the backend 'map' a step runs the drawn
net only. Clients batched by 'vmap' compute all nets of P_k in every step.

The paper averages values; here changes from theta are averaged, which is
equivalent, and equals FedAvg bit for bit if P = {1}. The paper's KL has no
factor T^2; at its T = 1 both agree. If p = p_k, the second pass has the
teacher's logits and is left out; the authors' code repeats it, which only moves
the running statistics twice.

References:
  Horvath, Laskaridis, Almeida, Leontiadis, Venieris, Lane, `FjORD: Fair and
  Accurate Federated Learning under heterogeneous targets with Ordered Dropout
  <https://arxiv.org/abs/2102.13451>`_, NeurIPS 2021, Algorithm 1. The authors'
  code is the baseline `fjord` of Flower.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.nested_widths import (
  SliceSum,
  add_slices,
  evaluate_widths,
  init_server,
  make_nets,
  nets_up_to,
  slice_of,
  widths_of,
)
from fedjax_het.aggregation.server import takes_server_options
from fedjax_het.algorithms.fjord.steps import step_loss
from fedjax_het.engine.local import fit
from fedjax_het.engine.needs import check_task, requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.options import between, group_shares, one_of, positive


class Sent(NamedTuple):
  """The uplink.

  Attributes:
    change: w_k (theta_k - theta) of the client's slice.
    stats: {width's name: w_k times its running statistics}.
    weight: [] float32, w_k.
  """

  change: Any
  stats: dict[str, Any]
  weight: jax.Array


@requires(one_model=True, group_options=dict(rate=None), local_stats=False)
@takes_server_options()
def fjord(
    federation: Federation,
    *,
    widths: tuple | list = (),
    distill_weight: float = 1.0,
    temperature: float = 1.0,
    weights: str = 'data',
    views: bool = True,
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """FjORD.

  Args:
    federation: Groups, all of one model, and local training. A group's option
      `rate` is p_k, the largest width of its clients, such as '1/2'. If no
      group has one, these are 1, 1/2, 1/4, ... in the order of the groups'
      names.
    widths: P, such as ('1', '1/2'); () for the groups' rates. It must contain
      them, and nothing above the largest.
    distill_weight: alpha, in [0, 1]. With 0 there is no teacher, so its own
      loss is missing, too.
    temperature: T.
    weights: 'data' for the paper's mean over holders, weighted by the number of
      examples; 'uniform' for a plain one.
    views: Whether every narrower width is evaluated, too.
    tx: The server's optimiser, applied to the mean over holders, with the
      options of `fedavg`.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is out of range, groups hold different models, or
      the task has no classes and `distill_weight` is not 0.
  """
  groups, local = federation.groups, federation.local
  between(0, 1, distill_weight=distill_weight)
  positive(temperature=temperature)
  one_of('weights', weights, ('uniform', 'data'))
  if distill_weight:
    check_task('fjord with distill_weight', 'classification', federation)
  full = groups[0].model
  largest = group_shares('rate', {g.name: g.options for g in groups})
  nets = make_nets(full, widths_of(largest, widths))
  # P_k
  allowed = {name: nets_up_to(nets, rate) for name, rate in largest.items()}
  loss_fns = {
      name: step_loss(own, local.task, distill_weight, temperature)
      for name, own in allowed.items()
  }

  def client_update(group, client, sent, data, visit):
    end, _, metrics, num_steps = fit(
        loss_fns[group.name], local, sent, data, visit
    )
    # w_k = n_k
    amount = data.size if weights == 'data' else 1
    weight = jnp.where(num_steps > 0, amount, 0).astype(jnp.float32)
    change = jax.tree.map(
        lambda y, x: weight * (y - x), end.params, sent.params
    )
    stats = jax.tree.map(lambda s: weight * s, end.stats)
    return client, Uplink(Sent(change, stats, weight)), metrics

  def server_update(server, received, turn):
    del turn
    slices = []
    for group in groups:
      change, stats, weight = received[group.name].summed
      index = allowed[group.name][-1].index.params
      # w_kj = w_k for all entries j of the slice.
      held = jax.tree.map(lambda x, w=weight: jnp.full_like(x, w), change)
      slices.append(SliceSum(index, change, held, stats, weight))
    return add_slices(tx, server, slices), {}

  return FederatedAlgorithm(
      init=lambda key: init_server(full, nets, tx, key),
      init_client=lambda group, client_id, key: (),
      downlink=lambda server, group, visit: slice_of(
          server, allowed[group.name]
      ),
      client_update=client_update,
      server_update=server_update,
      **evaluate_widths(nets, views),
      trained_models=lambda group: (allowed[group.name][-1].model,),
  )
