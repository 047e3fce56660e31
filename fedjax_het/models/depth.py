"""The depth of a trunk.

The depth is counted in numbered blocks: those with parameters whose names end
in a number, such as 'stage4_block1'. A deeper model of the same family has more
of them. The blocks after the last numbered one are the trunk's head.
"""

from collections.abc import Sequence

import jax

from fedjax_het.models.blocks import BlockModel


def numbered_blocks(model: BlockModel) -> tuple[str, ...]:
  """Names of a trunk's numbered blocks, in order.

  Args:
    model: The model; its last block does not count.

  Returns:
    The names of the blocks with parameters whose names end in a digit.

  Raises:
    ValueError: If there is none.
  """
  params = model.abstract_variables.params
  blocks = tuple(
      name
      for name in model.block_names[:-1]
      if name[-1].isdigit() and jax.tree.leaves(params[name])
  )
  if not blocks:
    raise ValueError(
        f"Model {model.name!r} has no numbered block, such as 'layer1', by "
        'which its depth is counted.'
    )
  return blocks


def head_blocks(model: BlockModel) -> tuple[str, ...]:
  """Names of the trunk's blocks after its last numbered one."""
  last = numbered_blocks(model)[-1]
  return model.block_names[model.block_names.index(last) + 1 :]


def stage_of(block: str) -> str:
  """The stage of a block: 'stage4_block' of 'stage4_block1'."""
  return block.rstrip('0123456789')


def stage_ends(blocks: Sequence[str]) -> tuple[int, ...]:
  """How many blocks there are up to the end of each stage.

  Args:
    blocks: Names of numbered blocks, in order.

  Returns:
    The numbers, ascending; the last one is that of all blocks.
  """
  last = {stage_of(block): i for i, block in enumerate(blocks, 1)}
  return tuple(last.values())
