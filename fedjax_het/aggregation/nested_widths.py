"""Several widths of one model on each client, and the mean of their slices.

P is a set of widths; the net F_p of width p has the first ceil(p K) of the K
channels of every hidden layer. Client k holds its slice, the net of its largest
width p_k, and may train all nets of P_k = {p in P : p <= p_k} in it. A norm
with running statistics has separate ones for each width of P, and one scale and
shift, of which F_p has the leading entries. The slice travels with the
statistics of all of P_k.

FjORD and SlimFL differ in how they train these nets, and in the weights of
their uploads. `slicing` defines which entries a narrow model holds.

References:
  Horvath et al., `FjORD <https://arxiv.org/abs/2102.13451>`_, NeurIPS 2021.
"""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.server import (
  init_server_step,
  server_step,
  weighted_mean,
)
from fedjax_het.aggregation.slicing import (
  extract,
  mean_over_holders,
  narrow,
  scatter_add,
  width_index,
)
from fedjax_het.data.federated import Batch
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.options import share


class Net(NamedTuple):
  """F_p, the net of one width.

  Attributes:
    name: Its name, such as 'rate_0.5'.
    rate: p, exact.
    model: The narrow model.
    index: Its entries in wider `Variables`, see `width_index`.
  """

  name: str
  rate: Fraction
  model: BlockModel
  index: Variables


class Server(NamedTuple):
  """The server's state.

  Attributes:
    params: The full-width parameters.
    stats: {width's name: running statistics of its norms}.
    opt_state: {block: the server optimiser's state}; no array by default.
  """

  params: dict[str, Any]
  stats: dict[str, Any]
  opt_state: dict[str, Any]


class SliceSum(NamedTuple):
  """The uploads of clients that hold one slice, summed.

  Attributes:
    index: The slice's entries in the full parameters, see `width_index`.
    change: sum_k w_kj (theta_kj - theta_j) for every entry j of the slice.
    weight: sum_k w_kj, a tree like `change`.
    stats: {width's name: sum_k w_kp s_kp}.
    stats_weight: sum_k w_kp, [] float32 for all widths or {width's name: []
      float32}.
  """

  index: Any
  change: Any
  weight: Any
  stats: dict[str, Any]
  stats_weight: Any


def widths_of(
    largest: Mapping[str, Fraction], widths: Sequence[Any]
) -> list[Fraction]:
  """P, from a method's option `widths`.

  Args:
    largest: {group name: p_k}.
    widths: Shares such as ('1', '1/2'); () for the groups' own. They must
      contain these, and nothing above the largest.

  Returns:
    The widths, exact, in the order of `widths`.

  Raises:
    ValueError: If a width cannot be read or is there twice, a group's is
      missing, or one is larger than all of the groups'.
  """
  if not widths:
    return list(largest.values())
  found = [share(f'widths[{i}]', width) for i, width in enumerate(widths)]
  if len(set(found)) < len(found):
    raise ValueError(f'widths must differ, got {tuple(widths)}.')
  for name, rate in largest.items():
    if rate not in found:
      raise ValueError(
          f'groups.{name}.rate={rate} must be one of widths, got '
          f'{tuple(widths)}.'
      )
  if max(found) > max(largest.values()):
    raise ValueError(
        f'widths must be at most the largest rate of a group, '
        f'{max(largest.values())}, got {tuple(widths)}.'
    )
  return found


def make_nets(full: BlockModel, rates: Iterable[Fraction]) -> list[Net]:
  """The nets of the widths P, ascending.

  Args:
    full: The full model.
    rates: P.

  Returns:
    The nets, with their indices in the full model.

  Raises:
    ValueError: If two widths have one name, or a module cannot be narrowed.
  """
  nets, found = {}, sorted(set(rates))
  for rate in found:
    # ceil(p K) of the K channels of every layer.
    small = narrow(full, lambda k, rate=rate: math.ceil(rate * k))
    net = Net(f'rate_{float(rate):.4g}', rate, small, width_index(full, small))
    nets[net.name] = net
  if len(nets) < len(found):
    raise ValueError(
        f'The widths {[str(rate) for rate in found]} must differ in their '
        'first four digits.'
    )
  return list(nets.values())


def nets_up_to(nets: Sequence[Net], rate: Fraction) -> list[Net]:
  """The nets of P_k, ascending; the last one is the client's own."""
  return [net for net in nets if net.rate <= rate]


def nested(nets: Sequence[Net]) -> list[Net]:
  """The same nets, with their indices in the last of them."""
  widest = nets[-1].model
  return [net._replace(index=width_index(widest, net.model)) for net in nets]


def apply_net(net: Net, variables: Variables, batch: Batch, key):
  """F_p on a minibatch, in training mode.

  Args:
    net: The net, with its index in the parameters.
    variables: Parameters that hold the net, and {width's name: statistics}.
    batch: The minibatch.
    key: A random key.

  Returns:
    Logits [B, C], and the net's new running statistics.
  """
  own = Variables(
      extract(variables.params, net.index.params), variables.stats[net.name]
  )
  return net.model.apply(own, batch.x, train=True, mask=batch.mask, key=key)


def init_server(
    full: BlockModel,
    nets: Sequence[Net],
    tx: optax.GradientTransformation,
    key,
) -> Server:
  """The server's initial state.

  Args:
    full: The full model.
    nets: The nets of P.
    tx: The server's optimiser.
    key: A random key.

  Returns:
    The state; a net's statistics are its slice of the full model's.
  """
  params, stats = full.init(key)
  by_width = {net.name: extract(stats, net.index.stats) for net in nets}
  return Server(params, by_width, init_server_step(tx, params))


def slice_of(server: Server, own: Sequence[Net]) -> Variables:
  """What a client with the nets P_k receives."""
  return Variables(
      extract(server.params, own[-1].index.params),
      {net.name: server.stats[net.name] for net in own},
  )


def add_slices(
    tx: optax.GradientTransformation,
    server: Server,
    slices: Iterable[SliceSum],
) -> Server:
  """The server after a step along the mean of every entry over its senders.

  With the default optimiser,

    theta_j <- sum_k w_kj theta_kj / sum_k w_kj,
    s_p <- sum_k w_kp s_kp / sum_k w_kp,

  where an entry or a width of weight 0 keeps its value.

  Args:
    tx: The server's optimiser.
    server: The state before.
    slices: Sums of the uploads of each group.

  Returns:
    The state after.
  """
  total = count = jax.tree.map(jnp.zeros_like, server.params)
  moments = []
  for index, change, weight, stats, stats_weight in slices:
    # total_j = sum_k w_kj (theta_kj - theta_j), count_j = sum_k w_kj
    total = scatter_add(total, index, change)
    count = scatter_add(count, index, weight)
    moments.append((stats, stats_weight))
  # theta_j <- theta_j + total_j / count_j, or another step of the server.
  mean, held = mean_over_holders(total, count)
  params, opt_state = server_step(
      tx, server.params, server.opt_state, mean, held
  )
  # s_p <- sum_k w_kp s_kp / sum_k w_kp
  mean, held = weighted_mean(moments)
  stats = {
      name: jax.tree.map(
          lambda new, old, some=held[name]: jnp.where(some, new, old),
          mean[name],
          old,
      )
      for name, old in server.stats.items()
  }
  return Server(params, stats, opt_state)


def evaluate_widths(nets: Sequence[Net], views: bool) -> dict[str, Any]:
  """The fields of `FederatedAlgorithm` that evaluate the server's nets.

  Args:
    nets: The nets of P, ascending.
    views: Whether narrower nets than the last are evaluated, too.

  Returns:
    The fields by name; `predict` is the widest net, `views` are the others.
  """
  *narrower, widest = nets
  return dict(
      client_model=lambda server, client, group: server,
      one_model=True,
      predict=functools.partial(_predict, widest),
      views={
          net.name: functools.partial(_predict, net)
          for net in (narrower if views else ())
      },
  )


def _predict(net, group, server, x):
  """Logits of one width of the server's model."""
  del group
  params = extract(server.params, net.index.params)
  return net.model.apply(Variables(params, server.stats[net.name]), x)[0]
