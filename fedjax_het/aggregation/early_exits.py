"""Prefixes of one trunk that end in early exits, one for each group.

All groups have one model. A group's option `exit` is the share of the trunk's
numbered blocks (`models.depth`) in front of its last exit; '1' ends in the
trunk's own head. A cut is such a number of blocks. The early exit at the j-th
cut is the head 'exit<j>' of the model; a method chooses its modules.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math

import flax.linen as nn

from fedjax_het.engine.types import Federation, Group
from fedjax_het.models.blocks import Block, BlockModel, Head
from fedjax_het.models.depth import head_blocks, numbered_blocks
from fedjax_het.options import share


def blocks_of(group: Group) -> tuple[str, ...]:
  """The numbered blocks of a group's model; a ValueError names the group."""
  try:
    return numbered_blocks(group.model)
  except ValueError as e:
    raise ValueError(f'groups.{group.name}: {e}') from e


def cut_of(group: Group, depth: int) -> int:
  """The number of blocks in front of a group's last exit, at least one."""
  where = f'groups.{group.name}.exit'
  exact = share(where, group.options.get('exit', '1'))
  return max(1, math.floor(exact * depth))


def early_cuts(
    group: Group, federation: Federation, more: Iterable[int] = ()
) -> list[int]:
  """How many numbered blocks precede each early exit, ascending.

  Args:
    group: The group whose model has the exits.
    federation: All groups; an option `exit` of less than the whole depth makes
      an early exit.
    more: Numbers of blocks in front of further exits.

  Returns:
    One number for each early exit.

  Raises:
    ValueError: If an option is not a share, or the model has no numbered block.
  """
  depth = len(blocks_of(group))
  cuts = {cut_of(other, depth) for other in federation.groups}
  return sorted({*cuts, *more} - {depth})


def exit_names(cuts: Sequence[int]) -> tuple[str, ...]:
  """Names of the exits at `early_cuts`: 'exit1', 'exit2', ..."""
  return tuple(f'exit{j}' for j, _ in enumerate(cuts, 1))


def exit_head(
    model: BlockModel,
    after: str,
    name: str,
    modules_of: Callable[[BlockModel, str], Mapping[str, nn.Module]],
) -> Head:
  """An early exit behind a block of the trunk.

  Args:
    model: The model.
    after: Name of a numbered block.
    name: Name of the head.
    modules_of: `(model, after) -> {name: module}`, the modules in front of the
      classifier, for a block that outputs feature maps [B, H, W, C].

  Returns:
    The head. Its classifier is like the trunk's. Behind a block that does not
    output feature maps, the exit is a copy of the trunk's own head.
  """
  modules = dict(model.blocks)
  *front, last = head_blocks(model)
  if len(model.outputs[after]) == 3:
    chain = modules_of(model, after)
  else:
    chain = {other: modules[other] for other in front}
  blocks = [Block(f'{name}/{part}', module) for part, module in chain.items()]
  return Head(after, (*blocks, Block(name, modules[last])))


def exit_heads(
    group: Group,
    cuts: Sequence[int],
    modules_of: Callable[[BlockModel, str], Mapping[str, nn.Module]],
) -> tuple[Head, ...]:
  """The exits at the given `early_cuts`, for `Needs.heads`.

  Args:
    group: The group whose model has the exits.
    cuts: See `early_cuts`.
    modules_of: As for `exit_head`.

  Returns:
    One head for each cut.
  """
  blocks = blocks_of(group)
  return tuple(
      exit_head(group.model, blocks[cut - 1], name, modules_of)
      for cut, name in zip(cuts, exit_names(cuts), strict=True)
  )


def exit_models(
    federation: Federation, cuts: Sequence[int]
) -> tuple[BlockModel, dict[str, BlockModel]]:
  """The full model with its exits, and the prefix of each group.

  Args:
    federation: Groups of one model, which has the exits at the cuts.
    cuts: See `early_cuts`.

  Returns:
    The full model without other heads, and {group name: the model up to the
    group's last exit, with all exits before}. The exits of a model, its
    `head_names`, are ordered by depth.

  Raises:
    ValueError: If an option is not a share.
  """
  model = federation.groups[0].model
  depth, last = len(numbered_blocks(model)), model.block_names[-1]
  names = exit_names(cuts)
  full = model.chain(last, keep=names)
  heads = dict(zip((*cuts, depth), (*names, last), strict=True))
  models = {}
  for group in federation.groups:
    cut = cut_of(group, depth)
    before = [heads[c] for c in cuts if c < cut]
    models[group.name] = full.chain(heads[cut], keep=before)
  return full, models
