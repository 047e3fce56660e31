"""Exchange of weights between clients of different architectures.

Each block of a model has a shared key, or none: blocks with equal keys are
averaged together whatever architecture they stand in, blocks without a key
stay on their client. Layer-wise averaging, averaging inside an architecture,
averaging of the ends only, and no averaging differ in nothing but this key.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.engine.options import one_of, positive
from fedjax_het.engine.types import Federation, Group, Received
from fedjax_het.models.blocks import Variables


def layerwise(group: Group, block: str) -> str:
  """Averages a block over all architectures that own it (FedIN v2 Eq. 19)."""
  del group
  return block


def per_architecture(group: Group, block: str) -> str:
  """Averages a block inside its group only (FedIN v2 Eq. 20 and 21)."""
  return f'{group.name}/{block}'


def ends_only(group: Group, block: str) -> str | None:
  """Averages extractor and classifier; FedIN v1 Eq. 4 and 5."""
  return None if block in group.model.intermediate else block


def nothing(group: Group, block: str) -> None:
  """Averages nothing: every client keeps its own model."""
  del group, block


SHARINGS = {
    'layerwise': layerwise,
    'architecture': per_architecture,
    'ends': ends_only,
    'none': nothing,
}


class Delta(NamedTuple):
  """The summable uplink of one client, or a sum of them.

  Attributes:
    change: `Variables` keyed by shared key, weight * (after - before).
    weight: [] float32, the client's weight in the mean.
  """

  change: Variables
  weight: jax.Array


class WeightExchange(NamedTuple):
  """How the weights of a federation travel and are averaged.

  Attributes:
    federation: The federation.
    shared_key: `(group, block name) -> key` in the server's tree, or None for
      a block that stays on its client.
    weights: 'uniform' for plain means over the holders of a block, 'data' for
      means weighted by the number of examples.
    server_lr: Factor on the mean change of the trainable leaves; running
      statistics always move by their mean change.
  """

  federation: Federation
  shared_key: Callable[[Group, str], str | None]
  weights: str = 'uniform'
  server_lr: float = 1.0

  @property
  def personal(self) -> bool:
    """Whether some block, or its statistics, stays on its client."""
    groups = self.federation.groups
    owned = [group.model.abstract_variables for group in groups]
    return any(
        len(self._keys(group, False)) < len(variables.params)
        or len(self._keys(group, True)) < len(variables.stats)
        for group, variables in zip(groups, owned, strict=True)
    )

  def _keys(self, group: Group, stats: bool) -> dict[str, str]:
    """{block name: shared key} of the blocks that travel."""
    if stats and self.federation.local_stats:
      return {}
    owned = group.model.abstract_variables
    names = owned.stats if stats else owned.params
    keys = {name: self.shared_key(group, name) for name in names}
    return {name: key for name, key in keys.items() if key is not None}

  def init(self, key) -> Variables:
    """Draws the server's tree: the union of all that is shared.

    Args:
      key: A random key.

    Returns:
      `Variables` keyed by shared key.
    """
    params, stats = {}, {}
    for group in self.federation.groups:
      names = self._keys(group, False)
      new = {n for n, shared in names.items() if shared not in params}
      drawn = group.model.init(key, new)
      params.update({names[n]: drawn.params[n] for n in new})
      names = self._keys(group, True)
      stats.update({s: drawn.stats[n] for n, s in names.items() if n in new})
    return Variables(params, stats)

  def init_client(self, group: Group, key) -> Variables:
    """What a client holds for itself: the blocks that do not travel."""
    params = self._keys(group, False)
    stats = self._keys(group, True)
    owned = group.model.abstract_variables
    mine = {n for n in owned.params if n not in params}
    mine_stats = {n for n in owned.stats if n not in stats}
    drawn = group.model.init(key, mine | mine_stats)
    return Variables(
        {n: drawn.params[n] for n in sorted(mine)},
        {n: drawn.stats[n] for n in sorted(mine_stats)},
    )

  def download(self, server: Variables, group: Group) -> Variables:
    """The part of the server's tree that a group's clients own."""
    return Variables(
        {s: server.params[s] for s in self._keys(group, False).values()},
        {s: server.stats[s] for s in self._keys(group, True).values()},
    )

  def assemble(
      self, group: Group, client: Variables, sent: Variables
  ) -> Variables:
    """A client's whole model: what it was sent and what it holds itself."""
    params = self._keys(group, False)
    stats = self._keys(group, True)
    owned = group.model.abstract_variables
    return Variables(
        {
            n: sent.params[params[n]] if n in params else client.params[n]
            for n in owned.params
        },
        {
            n: sent.stats[stats[n]] if n in stats else client.stats[n]
            for n in owned.stats
        },
    )

  def upload(
      self,
      group: Group,
      before: Variables,
      after: Variables,
      size: jax.Array,
      num_steps: jax.Array,
  ) -> tuple[Variables, Delta]:
    """Splits a trained model into what stays and what is sent.

    Args:
      group: The client's group.
      before: The model at the start of the visit.
      after: The model at its end.
      size: [] int32, number of the client's examples.
      num_steps: [] int32; a client that took no step has weight 0.

    Returns:
      The client's own blocks, and the summable uplink.
    """
    amount = size if self.weights == 'data' else 1
    weight = jnp.where(num_steps > 0, amount, 0).astype(jnp.float32)

    def split(old, new, keys):
      change = {
          keys[n]: jax.tree.map(lambda b, a: weight * (a - b), old[n], new[n])
          for n in new
          if n in keys
      }
      return {n: new[n] for n in new if n not in keys}, change

    params, d_params = split(
        before.params, after.params, self._keys(group, False)
    )
    stats, d_stats = split(before.stats, after.stats, self._keys(group, True))
    return Variables(params, stats), Delta(Variables(d_params, d_stats), weight)

  def average(
      self, server: Variables, deltas: Mapping[str, Delta]
  ) -> Variables:
    """Moves every shared leaf by the weighted mean change of its senders.

    Args:
      server: The server's tree.
      deltas: {group name: sum of its clients' uplinks}.

    Returns:
      The new tree; a leaf that nobody sent keeps its value, and variances
      stay non-negative.
    """

    def move(tree, stats):
      total = {}
      for group in self.federation.groups:
        delta = deltas[group.name]
        change = delta.change.stats if stats else delta.change.params
        for key, leaves in change.items():
          term = (leaves, delta.weight)
          total[key] = (
              jax.tree.map(jnp.add, total[key], term) if key in total else term
          )
      rate = 1.0 if stats else self.server_lr

      def moved(key, leaves):
        change, weight = total[key]
        safe = jnp.where(weight > 0, weight, 1.0)
        return jax.tree.map(
            lambda x, s: jnp.where(weight > 0, x + rate * (s / safe), x),
            leaves,
            change,
        )

      return {
          key: moved(key, leaves) if key in total else leaves
          for key, leaves in tree.items()
      }

    return Variables(
        move(server.params, False), _clip_variances(move(server.stats, True))
    )

  def collect(
      self, server: Variables, received: Mapping[str, Received], part=None
  ) -> Variables:
    """`average` over what a round delivered.

    Args:
      server: The server's tree.
      received: {group name: Received}.
      part: Picks the `Delta` out of `Received.summed`; None if it is one.

    Returns:
      The new tree.
    """
    part = part or (lambda summed: summed)
    return self.average(
        server, {name: part(r.summed) for name, r in received.items()}
    )


def make_exchange(
    federation: Federation,
    aggregation: str,
    weights: str = 'uniform',
    server_lr: float = 1.0,
) -> WeightExchange:
  """The exchange that an algorithm's options describe.

  Args:
    federation: The federation.
    aggregation: A name of `SHARINGS`.
    weights: 'uniform' or 'data'.
    server_lr: Factor on the mean change.

  Returns:
    The exchange.

  Raises:
    ValueError: If an option is unknown, or two groups give different shapes
      to one shared block.
  """
  one_of('aggregation', aggregation, tuple(SHARINGS))
  one_of('weights', weights, ('uniform', 'data'))
  positive(server_lr=server_lr)
  check_shared_shapes(federation, SHARINGS[aggregation])
  return WeightExchange(federation, SHARINGS[aggregation], weights, server_lr)


def check_shared_shapes(federation: Federation, shared_key) -> None:
  """Refuses groups that give one shared block different shapes.

  Args:
    federation: The federation.
    shared_key: See `WeightExchange`.

  Raises:
    ValueError: Naming the block and both groups.
  """
  seen: dict[str, tuple[Group, Any]] = {}
  for group in federation.groups:
    params = group.model.abstract_variables.params
    for name, tree in params.items():
      key = shared_key(group, name)
      if key is None:
        continue
      shape = jax.tree.map(lambda leaf: leaf.shape, tree)
      first, expected = seen.setdefault(key, (group, shape))
      if shape != expected:
        raise ValueError(
            f'Block {name!r} is shared, but group {group.name!r} has '
            f'{_describe(shape)} and group {first.name!r} '
            f'{_describe(expected)}; shared blocks need one shape.'
        )


def _describe(shapes) -> str:
  leaves = jax.tree_util.tree_leaves_with_path(
      shapes, is_leaf=lambda x: isinstance(x, tuple)
  )
  return ', '.join(
      f'{jax.tree_util.keystr(path, simple=True, separator="/")} '
      f'{"x".join(map(str, shape))}'
      for path, shape in leaves
  )


def _clip_variances(stats):
  """Keeps leaves named 'var' at or above 0."""

  def clip(path, leaf):
    return jnp.maximum(leaf, 0.0) if path[-1].key == 'var' else leaf

  return jax.tree_util.tree_map_with_path(clip, stats)
