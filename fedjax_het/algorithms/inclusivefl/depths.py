"""InclusiveFL's depths: their private blocks, and the sources for these.

The numbered blocks of a trunk are its depth, see `models.depth`.
"""

import itertools
from typing import NamedTuple

from fedjax_het.aggregation.sharing import Sharing, check_shared_shapes
from fedjax_het.engine.types import Federation, Group
from fedjax_het.models.blocks import BlockModel
from fedjax_het.models.depth import head_blocks, numbered_blocks, stage_of

# Private blocks of a depth: its last one, the last of every stage, or none.
PRIVATE = ('top', 'stage', 'none')


class Depth(NamedTuple):
  """The clients of one depth.

  Attributes:
    name: Name of one of its groups.
    groups: Its groups, which have the same model.
    private: Names of the blocks that it shares with no other depth.
    sources: {top block: blocks of the next depth whose mean update is blended
      into it}; {} for the largest depth.
  """

  name: str
  groups: tuple[Group, ...]
  private: frozenset[str]
  sources: dict[str, tuple[str, ...]]

  @property
  def model(self) -> BlockModel:
    """The model of all its clients."""
    return self.groups[0].model


def top_blocks(model: BlockModel, private: str) -> tuple[str, ...]:
  """The blocks that a depth keeps to itself, without its head.

  Args:
    model: The depth's model.
    private: 'top' for its last block; 'stage' for the last block of every
      stage with more than one block; 'none'.

  Returns:
    Names of blocks.
  """
  blocks = numbered_blocks(model)
  if private != 'stage':
    return blocks[-1:] if private == 'top' else ()
  first = {stage_of(block): block for block in reversed(blocks)}
  last = {stage_of(block): block for block in blocks}
  return tuple(block for s, block in last.items() if block != first[s])


def source_blocks(
    top: str, larger: BlockModel, private: str
) -> tuple[str, ...]:
  """The next depth's blocks from `top` on; with 'stage', in its stage only."""
  blocks = numbered_blocks(larger)
  above = blocks[blocks.index(top) :]
  if private == 'stage':
    above = tuple(block for block in above if stage_of(block) == stage_of(top))
  return above


def find_depths(
    federation: Federation, private: str, private_heads: bool
) -> tuple[Depth, ...]:
  """The depths of a federation, the smallest first.

  Args:
    federation: The federation; groups with the same model have the same depth.
    private: A name of `PRIVATE`.
    private_heads: Whether each depth has a head of its own.

  Returns:
    The depths.

  Raises:
    ValueError: If a model lacks a block of the next smaller one, or has no
      numbered block.
  """
  holders: dict[tuple[str, ...], list[Group]] = {}
  for group in sorted(federation.groups, key=lambda group: group.name):
    holders.setdefault(group.model.block_names, []).append(group)
  ordered = [tuple(holders[names]) for names in sorted(holders, key=len)]
  for (small, *_), (large, *_) in itertools.pairwise(ordered):
    for block in small.model.block_names:
      if block not in large.model.block_names:
        raise ValueError(
            'InclusiveFL needs models that extend each other, but '
            f'{large.name!r} ({large.model.name}) lacks the block {block!r} of '
            f'{small.name!r} ({small.model.name}).'
        )
  depths = []
  for groups, larger in zip(ordered, [*ordered[1:], ()], strict=True):
    model = groups[0].model
    tops = top_blocks(model, private)
    heads = head_blocks(model) if private_heads else ()
    sources = {
        top: source_blocks(top, group.model, private)
        for group in larger[:1]
        for top in tops
    }
    private_blocks = frozenset((*tops, *heads))
    depths.append(Depth(groups[0].name, groups, private_blocks, sources))
  return tuple(depths)


def depth_sharing(
    federation: Federation, depths: tuple[Depth, ...], aggregation: str
) -> Sharing:
  """Which blocks the server averages under one key.

  Args:
    federation: The federation.
    depths: Its depths.
    aggregation: 'layerwise', or 'architecture' for depths that share no block.

  Returns:
    The sharing. The private blocks of a depth have keys of their own.

  Raises:
    ValueError: If blocks of one name differ in shape, except heads that no two
      depths share.
  """
  depth_of = {g.name: depth for depth in depths for g in depth.groups}

  def shared_key(group, block):
    depth = depth_of[group.name]
    alone = aggregation == 'architecture' or block in depth.private
    return f'{depth.name}/{block}' if alone else block

  def shape_key(group, block):
    # Private blocks must agree, too: updates of other depths are blended in.
    heads = head_blocks(group.model)
    return shared_key(group, block) if block in heads else block

  check_shared_shapes(federation, shape_key)
  return Sharing(shared_key, federation.local_stats)
