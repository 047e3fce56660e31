"""Which blocks of a client are shared, and how its tree is reassembled.

Each block of a model has a shared key, or none. Blocks with equal keys are
averaged together, also across architectures; blocks without a key stay on their
client. Layer-wise averaging, averaging inside an architecture, averaging of the
ends or the classifier only, and no averaging differ only in this key.
"""

from collections.abc import Callable
import logging
from typing import Any, NamedTuple

import jax

from fedjax_het.engine.types import Federation, Group
from fedjax_het.models.blocks import Variables

_log = logging.getLogger(__name__)


def layerwise(group: Group, block: str) -> str:
  """Averages a block over all architectures that have it (FedIN v2 Eq. 19)."""
  del group
  return block


def per_architecture(group: Group, block: str) -> str:
  """Averages a block inside its group only (FedIN v2 Eq. 20 and 21)."""
  return f'{group.name}/{block}'


def ends_only(group: Group, block: str) -> str | None:
  """Averages extractor and classifier; FedIN v1 Eq. 4 and 5."""
  return None if block in group.model.intermediate else block


def classifier_only(group: Group, block: str) -> str | None:
  """Averages the classifier; FedGen's partial sharing."""
  return block if block in group.model.classifier else None


def nothing(group: Group, block: str) -> None:
  """Averages nothing: every client keeps its own model."""
  del group, block


SHARINGS = {
    'layerwise': layerwise,
    'architecture': per_architecture,
    'ends': ends_only,
    'classifier': classifier_only,
    'none': nothing,
}


class Sharing(NamedTuple):
  """The part of a tree that clients and server exchange.

  A tree is `{block: subtree}`: parameters, gradients, momenta, control
  variates, masks. `Variables` are two such trees, of which the running
  statistics may stay on their client. The shared part is `{key: subtree}`.

  Attributes:
    shared_key: `(group, block) -> key`, or None for a block that stays.
    local_stats: Whether running statistics stay, even those of shared blocks.
  """

  shared_key: Callable[[Group, str], str | None]
  local_stats: bool = False

  def keys(self, group: Group, stats: bool = False) -> dict[str, str]:
    """{block: key} of the group's shared blocks.

    Args:
      group: The group.
      stats: Whether to list blocks with running statistics, instead of all.

    Returns:
      The keys; {} for statistics that stay.
    """
    if stats and self.local_stats:
      return {}
    owned = group.model.abstract_variables
    keys = {
        name: self.shared_key(group, name)
        for name in (owned.stats if stats else owned.params)
    }
    return {name: key for name, key in keys.items() if key is not None}

  def split(self, group: Group, tree) -> tuple[Any, Any]:
    """Splits a client's tree into the shared part and the part that stays.

    Args:
      group: The client's group.
      tree: {block: subtree} or `Variables`. It may lack blocks; blocks that the
        group's model does not have stay.

    Returns:
      {key: subtree} and {block: subtree}, or `Variables` of them.
    """

    def shared(keys, tree):
      return {keys[name]: tree[name] for name in tree if name in keys}

    def own(keys, tree):
      return {name: tree[name] for name in tree if name not in keys}

    return self._each(group, shared, tree), self._each(group, own, tree)

  def join(self, group: Group, own, sent):
    """Puts a client's tree together; undoes `split`.

    Args:
      group: The client's group.
      own: {block: subtree} of the blocks that stay, or `Variables`; () for
        none.
      sent: {key: subtree} of the shared blocks, or `Variables`.

    Returns:
      The tree of the blocks of the group's model. A block that neither part
      has is left out.
    """

    def whole(keys, sent, own):
      travels = {n: sent[key] for n, key in keys.items() if key in sent}
      stays = {n: own[n] for n in own if n not in keys}
      owned = group.model.abstract_variables.params
      return {n: t for n, t in {**stays, **travels}.items() if n in owned}

    if not own:
      own = Variables({}, {}) if isinstance(sent, Variables) else {}
    return self._each(group, whole, sent, own)

  def pick(self, group: Group, server):
    """The part of a server's tree that belongs to a group's model.

    Args:
      group: The group.
      server: {key: subtree} or `Variables`.

    Returns:
      The same with fewer keys.
    """

    def owned(keys, server):
      return {key: server[key] for key in keys.values() if key in server}

    return self._each(group, owned, server)

  def _each(self, group: Group, fn, *trees):
    """`fn(keys, *trees)` on plain trees, or on both parts of `Variables`."""
    if not isinstance(trees[0], Variables):
      return fn(self.keys(group), *trees)
    return Variables(
        fn(self.keys(group), *(tree.params for tree in trees)),
        fn(self.keys(group, True), *(tree.stats for tree in trees)),
    )


def check_shared_shapes(federation: Federation, shared_key) -> None:
  """Raises ValueError if groups give one shared block different shapes.

  Args:
    federation: The federation.
    shared_key: See `Sharing`.

  A group that shares no block with another is named in a warning, unless the
  rule is that groups share nothing.

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
            f'{_describe(expected)}; shared blocks need one shape. Give blocks '
            'that should not be shared different names.'
        )
  if shared_key is not per_architecture:
    _warn_of_lonely_groups(federation, shared_key)


def _warn_of_lonely_groups(federation: Federation, shared_key) -> None:
  keys = {
      group.name: set(Sharing(shared_key).keys(group).values())
      for group in federation.groups
  }
  for name, own in keys.items():
    others = [theirs for other, theirs in keys.items() if other != name]
    if own and others and own.isdisjoint(set().union(*others)):
      _log.warning(
          'Group %s shares no block with another group: blocks are averaged '
          'where their names are equal, so its clients are averaged only among '
          'themselves.',
          name,
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
