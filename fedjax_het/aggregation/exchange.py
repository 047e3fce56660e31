"""Exchange of parameters between clients of different architectures.

It has three parts: a `Sharing` selects the shared blocks of a client's tree
(`sharing.py`), `weighted_mean` averages each block over the clients that sent
it, and `server_step` takes the server's optimiser step along the mean
(`server.py`). `WeightExchange` combines them for averaging; a method may also
call each alone.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.server import (
  Optimized,
  init_server_step,
  server_step,
  server_variables,
  state_of,
  takes_server_options,
  weighted_mean,
  with_state,
)
from fedjax_het.aggregation.sharing import (
  SHARINGS,
  Sharing,
  check_shared_shapes,
)
from fedjax_het.engine.types import Federation, Group, Received
from fedjax_het.models.blocks import Variables
from fedjax_het.options import one_of


class Delta(NamedTuple):
  """The summable uplink of one client, or a sum of them.

  Attributes:
    change: {shared key: tree} of trainable leaves, p (after - before).
    stats: {shared key: tree} of running statistics, p times their values after
      the visit. These are not changes, since those of stale uploads add up.
    weight: [] float32, p, the client's coefficient in the mean.
  """

  change: dict[str, Any]
  stats: dict[str, Any]
  weight: jax.Array


def end_of(before: Variables, delta: Delta) -> Variables:
  """One client's variables at the end of its visit, from its upload.

  Args:
    before: x, what the server sent it, for the shared keys of the delta. For a
      stale upload the server no longer has x: with its present tree x' the
      result is x' + y - x.
    delta: p (y - x), p s and p.

  Returns:
    y, up to rounding; x where p is 0.
  """
  safe = jnp.where(delta.weight > 0, delta.weight, 1.0)
  # y = x + p (y - x) / p, and s = p s / p.
  return Variables(
      jax.tree.map(lambda x, d: x + d / safe, before.params, delta.change),
      jax.tree.map(
          lambda x, s: jnp.where(delta.weight > 0, s / safe, x),
          before.stats,
          delta.stats,
      ),
  )


class WeightExchange(NamedTuple):
  """How the parameters of a federation are shared and averaged.

  Arguments called `server` are the server's tree: `Variables` keyed by shared
  key, or `Optimized` if the server's optimiser has a state.

  Attributes:
    federation: The federation.
    sharing: The shared blocks.
    weighting: 'uniform' for plain means over the holders of a block, 'data'
      for coefficients proportional to the number of examples.
    tx: The server's optimiser for the trainable leaves; running statistics
      become the mean of those that were sent.
  """

  federation: Federation
  sharing: Sharing
  weighting: str = 'uniform'
  tx: optax.GradientTransformation = optax.sgd(1.0)

  @property
  def personal(self) -> bool:
    """Whether some block, or its statistics, stays on its client."""
    return any(
        any(self.sharing.split(group, group.model.abstract_variables)[1])
        for group in self.federation.groups
    )

  @property
  def one_model(self) -> bool:
    """Whether all groups have one architecture and share all of its blocks."""
    distinct = {
        (group.model, frozenset(self.sharing.keys(group).items()))
        for group in self.federation.groups
    }
    return len(distinct) == 1 and not self.personal

  def init(self, key) -> Variables | Optimized:
    """Initialises the server's tree: the union of all shared blocks.

    Args:
      key: A random key.

    Returns:
      The server.
    """
    params, stats = {}, {}
    for group in self.federation.groups:
      names = self.sharing.keys(group)
      new = {n for n, shared in names.items() if shared not in params}
      sent, _ = self.sharing.split(group, group.model.init(key, new))
      params.update(sent.params)
      stats.update(sent.stats)
    opt_state = init_server_step(self.tx, params)
    return with_state(Variables(params, stats), opt_state)

  def init_client(self, group: Group, key) -> Variables:
    """The initial client state: the blocks that are not shared."""
    _, own = self.sharing.split(group, group.model.abstract_variables)
    drawn = group.model.init(key, {*own.params, *own.stats})
    return Variables(
        {n: drawn.params[n] for n in sorted(own.params)},
        {n: drawn.stats[n] for n in sorted(own.stats)},
    )

  def download(self, server: Variables | Optimized, group: Group) -> Variables:
    """The part of the server's tree that belongs to a group's model."""
    return self.sharing.pick(group, server_variables(server))

  def assemble(
      self, group: Group, client: Variables, sent: Variables
  ) -> Variables:
    """A client's whole model, from its downlink and its own blocks."""
    return self.sharing.join(group, client, sent)

  def upload(
      self,
      group: Group,
      before: Variables,
      after: Variables,
      size: jax.Array,
      num_steps: jax.Array,
  ) -> tuple[Variables, Delta]:
    """Splits a trained model into client state and uplink.

    Args:
      group: The client's group.
      before: The model at the start of the visit.
      after: The model at its end.
      size: [] int32, number of the client's examples.
      num_steps: [] int32; a client that took no step has coefficient 0.

    Returns:
      The client's own blocks, and the summable uplink.
    """
    p = self.coefficient(size, num_steps)
    before, _ = self.sharing.split(group, before)
    after, own = self.sharing.split(group, after)
    # p_k (y_k - x).
    change = jax.tree.map(lambda x, y: p * (y - x), before.params, after.params)
    # p_k s_k.
    stats = jax.tree.map(lambda s: p * s, after.stats)
    return own, Delta(change, stats, p)

  def coefficient(self, size: jax.Array, num_steps: jax.Array) -> jax.Array:
    """A client's coefficient p_k in the mean, not normalised.

    Args:
      size: [] int32, number of the client's examples.
      num_steps: [] int32, local steps that it took.

    Returns:
      [] float32: 1, or its size; 0 without a step.
    """
    amount = size if self.weighting == 'data' else 1
    return jnp.where(num_steps > 0, amount, 0).astype(jnp.float32)

  def average(
      self,
      server: Variables | Optimized,
      deltas: Mapping[str, Delta],
      revise: Callable[..., dict[str, Any]] = lambda mean, sent: mean,
  ) -> Variables | Optimized:
    """Updates every shared block by the weighted mean over its senders.

    Args:
      server: The server.
      deltas: {group name: sum of its clients' uplinks}.
      revise: `(mean, sent) -> mean`, modifies the mean change of the trainable
        leaves, {key: tree}, before the server's step; `sent` is {key: [] bool}.
        Running statistics become their mean.

    Returns:
      The new server; a block that no client sent keeps its values and
      its optimiser's state.
    """
    sums = [deltas[group.name] for group in self.federation.groups]
    params, stats = server_variables(server)
    opt_state = state_of(self.tx, server, params)
    # D <- sum_k p_k (y_k - x) / sum_k p_k, x <- x + tx(-D).
    mean, sent = weighted_mean((d.change, d.weight) for d in sums)
    mean = revise(mean, sent)
    params, opt_state = server_step(self.tx, params, opt_state, mean, sent)
    # s <- sum_k p_k s_k / sum_k p_k.
    mean, sent = weighted_mean((d.stats, d.weight) for d in sums)
    new = {
        key: jax.tree.map(
            lambda s, old, some=sent[key]: jnp.where(some, s, old),
            mean[key],
            stats[key],
        )
        for key in mean
    }
    return with_state(Variables(params, {**stats, **new}), opt_state)

  def collect(
      self,
      server: Variables | Optimized,
      received: Mapping[str, Received],
      part: Callable[..., Delta] = lambda summed: summed,
      revise: Callable[..., dict[str, Any]] = lambda mean, sent: mean,
  ) -> Variables | Optimized:
    """`average` over the uploads of a round.

    Args:
      server: The server.
      received: {group name: Received}.
      part: Picks the `Delta` out of `Received.summed`.
      revise: As for `average`.

    Returns:
      The new server.
    """
    deltas = {name: part(r.summed) for name, r in received.items()}
    return self.average(server, deltas, revise)


@takes_server_options()
def make_exchange(
    federation: Federation,
    aggregation: str,
    weights: str = 'uniform',
    *,
    tx: optax.GradientTransformation,
) -> WeightExchange:
  """The exchange that an algorithm's options describe.

  Args:
    federation: The federation.
    aggregation: A name of `SHARINGS`.
    weights: The averaging coefficients: 'uniform' or 'data'.
    tx: The server's optimiser, or the options that make it, such as
      `server_lr`: see `takes_server_options`. By default plain averaging.

  Returns:
    The exchange.

  Raises:
    ValueError: If an option is unknown, out of range or not finite, or two
      groups give different shapes to one shared block.
  """
  one_of('aggregation', aggregation, tuple(SHARINGS))
  one_of('weights', weights, ('uniform', 'data'))
  check_shared_shapes(federation, SHARINGS[aggregation])
  sharing = Sharing(SHARINGS[aggregation], federation.local_stats)
  return WeightExchange(federation, sharing, weights, tx)
