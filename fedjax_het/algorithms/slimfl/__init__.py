"""SlimFL: all widths of a client trained in every step, over fading links.

All groups hold the full model theta. P is a set of widths; the net F_p of width
p has the first ceil(p K) of the K channels of every hidden layer. Client k
holds the widths P_k = {p in P : p <= p_k}, where p_k in P is the width of its
group; in the paper p_k = 1 and P = {1/2, 1}. One round:

  1. Client k receives its slice of theta, of width p_k.
  2. In every local step it takes one step of its optimiser on
       L = sum_{p in P_k} c_p L_p,   L_{p_k} = CE(F_{p_k}(x), y),
       L_p = (1 - alpha) CE(F_p(x), y)
             + alpha KL(softmax(F_{p_k}(x)) || softmax(F_p(x)))   for p < p_k,
     with the gradient stopped at F_{p_k} in KL. All gradients are taken at the
     same theta ("superposition training"). alpha = 1 is in-place distillation;
     alpha = 0 is a slimmable network.
  3. It uploads its slice in two parts: the thin one has the entries of the
     narrowest net, the other one the remainder. The thin part arrives with
     probability p_thin; if it does, the remainder arrives with probability
     p_rest.
  4. For every entry j, over the clients A_j of the round from which it arrived,
       theta_j <- sum_{k in A_j} n_k theta_kj / sum_{k in A_j} n_k,
     unchanged if it arrived from none.

A norm with running statistics has separate ones for each width of P, and one
scale and shift, of which F_p has the leading entries. The statistics of the
narrowest net arrive with the thin part, the others with the remainder; the
server holds their means, weighted as above.

The widest net is evaluated; every narrower one is a view.

An upload that does not arrive has been computed and sent: its work, its time
and its bytes count. Superposition coding itself (power, rates, decoding) is
left out; `p_thin` and `p_rest` are its effect.

The paper averages values; here changes from theta are averaged, which is
equivalent, and equals FedAvg bit for bit if P = {1}. Yu et al. minimise the
soft cross-entropy, which has the gradient of KL, and give each width its own
scale and shift.

References:
  Baek et al., `Joint Superposition Coding and Training for Federated Learning
  over Multi-Width Neural Networks <https://arxiv.org/abs/2112.02543>`_, INFOCOM
  2022. Yu, Yang, Xu, Yang, Huang, `Slimmable Neural Networks
  <https://arxiv.org/abs/1812.08928>`_, ICLR 2019. Yu, Huang, `Universally
  Slimmable Networks and Improved Training Techniques
  <https://arxiv.org/abs/1903.05134>`_, ICCV 2019, for in-place distillation.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.nested_widths import (
  Net,
  SliceSum,
  add_slices,
  evaluate_widths,
  init_server,
  make_nets,
  nested,
  nets_up_to,
  slice_of,
  widths_of,
)
from fedjax_het.aggregation.server import takes_server_options
from fedjax_het.aggregation.slicing import scatter_add
from fedjax_het.algorithms.slimfl.losses import factors_of, joint_loss
from fedjax_het.engine.local import fit
from fedjax_het.engine.needs import check_task, requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.options import between, group_shares, one_of


class Parts(NamedTuple):
  """A number for each part of an upload.

  Attributes:
    thin: [] float32, of the narrowest net's entries.
    rest: [] float32, of the remainder of the slice.
  """

  thin: jax.Array
  rest: jax.Array


class Sent(NamedTuple):
  """The uplink, as it arrives.

  Attributes:
    change: w_kj (theta_kj - theta_j) of the client's slice.
    stats: {width's name: w_kp times its running statistics}.
    weight: w_k of each part; 0 for a part that does not arrive.
  """

  change: Any
  stats: dict[str, Any]
  weight: Parts


@requires(one_model=True, group_options=dict(rate=None), local_stats=False)
@takes_server_options()
def slimfl(
    federation: Federation,
    *,
    widths: tuple | list = (),
    width_weights: tuple | list = (),
    distill_weight: float = 1.0,
    p_thin: float = 1.0,
    p_rest: float = 1.0,
    weights: str = 'data',
    views: bool = True,
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """SlimFL.

  Args:
    federation: Groups, all of one model, and local training. A group's option
      `rate` is p_k, the largest width of its clients, such as '1/2'. If no
      group has one, these are 1, 1/2, 1/4, ... in the order of the groups'
      names.
    widths: P, such as ('1', '1/2'); () for the groups' rates. It must contain
      them, and nothing above the largest.
    width_weights: c_p above 0, one number for each of `widths`; () for 1 each.
    distill_weight: alpha, in [0, 1].
    p_thin: Probability that the thin part of an upload arrives, in [0, 1].
    p_rest: Probability that the remainder arrives, given that the thin part
      does, in [0, 1].
    weights: 'data' for means weighted by the number of examples; 'uniform' for
      plain ones.
    views: Whether every narrower width is evaluated, too.
    tx: The server's optimiser, applied to the mean over what arrived, with the
      options of `fedavg`.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is out of range, groups hold different models, or
      the task has no classes and `distill_weight` is not 0.
  """
  groups, local = federation.groups, federation.local
  between(0, 1, distill_weight=distill_weight, p_thin=p_thin, p_rest=p_rest)
  one_of('weights', weights, ('uniform', 'data'))
  if distill_weight:
    check_task('slimfl with distill_weight', 'classification', federation)
  full = groups[0].model
  largest = group_shares('rate', {g.name: g.options for g in groups})
  rates = widths_of(largest, widths)
  nets = make_nets(full, rates)
  factors = factors_of(nets, rates, widths, width_weights)
  # P_k
  allowed = {name: nets_up_to(nets, rate) for name, rate in largest.items()}
  loss_fns = {
      name: joint_loss(own, local.task, distill_weight, factors)
      for name, own in allowed.items()
  }

  def client_update(group, client, sent, data, visit):
    end, _, metrics, num_steps = fit(
        loss_fns[group.name], local, sent, data, visit
    )
    thin, rest = arrivals(visit.key, p_thin, p_rest)
    metrics |= dict(thin_arrived=thin, rest_arrived=rest)
    # w_k = n_k, or 0 for a part that does not arrive.
    amount = data.size if weights == 'data' else 1
    weight = jnp.where(num_steps > 0, amount, 0).astype(jnp.float32)
    parts = Parts(weight * thin, weight * rest)
    w, w_stats = spread(allowed[group.name], parts)
    change = jax.tree.map(
        lambda w, y, x: w * (y - x), w, end.params, sent.params
    )
    stats = {
        name: jax.tree.map(lambda s, w=w_stats[name]: w * s, moments)
        for name, moments in end.stats.items()
    }
    return client, Uplink(Sent(change, stats, parts)), metrics

  def server_update(server, received, turn):
    del turn
    slices = []
    for group in groups:
      change, stats, parts = received[group.name].summed
      own = allowed[group.name]
      # sum_k w_kj and sum_k w_kp, since w is linear in the parts' weights.
      w, w_stats = spread(own, parts)
      slices.append(
          SliceSum(own[-1].index.params, change, w, stats, w_stats)
      )
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


def arrivals(key, p_thin: float, p_rest: float) -> Parts:
  """Which parts of an upload arrive.

  Args:
    key: The visit's key.
    p_thin: Probability that the thin part arrives.
    p_rest: Probability that the remainder arrives, given that the thin part
      does.

  Returns:
    1 for a part that arrives, else 0; the remainder never arrives alone.
  """
  draw = jax.random.uniform(jax.random.fold_in(key, 2), (2,))
  thin = (draw[0] < p_thin).astype(jnp.float32)
  return Parts(thin, thin * (draw[1] < p_rest))


def spread(own: Sequence[Net], parts: Parts) -> tuple[Any, dict[str, Any]]:
  """The weight of every entry of a slice, from those of its two parts.

  Args:
    own: The nets of P_k, ascending; the first one is the thin part.
    parts: The weights, or their sums over clients.

  Returns:
    w_kj, a tree like the slice's parameters, and {width's name: w_kp}.
  """
  thinnest, widest = nested([own[0], own[-1]])

  def full_of(net, value):
    params = net.model.abstract_variables.params
    return jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), params)

  # w_kj = w_rest + (w_thin - w_rest) [j is in the thin part]
  entries = scatter_add(
      full_of(widest, parts.rest),
      thinnest.index.params,
      full_of(thinnest, parts.thin - parts.rest),
  )
  by_width = {net.name: parts.rest for net in own}
  by_width[thinnest.name] = parts.thin
  return entries, by_width
