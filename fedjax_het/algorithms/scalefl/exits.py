"""Early exits of a trunk, as heads of its model.

References:
  Ilhan, Su, Liu, ScaleFL: Resource-Adaptive Federated Learning With
  Heterogeneous Clients, CVPR 2023, pp. 24532-24541.
"""

from collections.abc import Sequence
import math

import flax.linen as nn
import jax

from fedjax_het.engine.types import Federation, Group
from fedjax_het.models import layers
from fedjax_het.models.blocks import Block, BlockModel, Head
from fedjax_het.models.depth import head_blocks, numbered_blocks
from fedjax_het.models.norm import norm_layer
from fedjax_het.models.slices import Slices, innermost
from fedjax_het.options import share


class ExitConv(nn.Module):
  """3x3 convolution, norm, ReLU; attributes as in a residual block."""

  slices = Slices(('features',), dict(conv=('x', 'y'), norm=('y', 'y')))

  features: int
  norm: str = 'batch'
  scheme: str = 'torch'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> [B, H, W, features]."""
    x = layers.conv_layer(
        self.features,
        3,
        'conv',
        inputs=x.shape[3],
        init=self.scheme,
        use_bias=self.norm == 'none',
    )(x)
    return jax.nn.relu(norm_layer(self.norm, 'norm')(x, train, mask))


def exit_head(model: BlockModel, after: str, name: str) -> Head:
  """An early exit of ScaleFL behind a block of the trunk.

  Behind a block that outputs feature maps, the exit is three convolutions with
  norm and ReLU, as wide as those of the block (a quarter of the channels behind
  a bottleneck), global average pooling, and a classifier like the trunk's.
  Behind any other block, the exit is a copy of the trunk's own head.

  Args:
    model: The model.
    after: Name of a numbered block.
    name: Name of the head.

  Returns:
    The head. Norms and initialisers are those of the block.
  """
  modules = dict(model.blocks)
  shape, block = model.outputs[after], innermost(modules[after])
  *front, last = head_blocks(model)
  if len(shape) == 3:
    conv = ExitConv(
        getattr(block, 'features', shape[-1]),
        getattr(block, 'norm', 'batch'),
        getattr(block, 'scheme', 'torch'),
    )
    chain = {f'conv{i}': conv for i in (1, 2, 3)}
    chain['pool'] = layers.GlobalPool()
  else:
    chain = {other: modules[other] for other in front}
  blocks = [Block(f'{name}/{part}', module) for part, module in chain.items()]
  return Head(after, (*blocks, Block(name, modules[last])))


def early_cuts(group: Group, federation: Federation) -> list[int]:
  """How many numbered blocks precede each early exit, ascending.

  Args:
    group: The group whose model has the exits.
    federation: All groups; an option `exit` of less than the whole depth makes
      an early exit.

  Returns:
    One number for each early exit.

  Raises:
    ValueError: If an option is not a share, or the model has no numbered block.
  """
  depth = len(_blocks(group))
  cuts = {cut_of(other, depth) for other in federation.groups}
  return sorted(cuts - {depth})


def cut_of(group: Group, depth: int) -> int:
  """The number of blocks in front of a group's last exit, at least one."""
  where = f'groups.{group.name}.exit'
  exact = share(where, group.options.get('exit', '1'))
  return max(1, math.floor(exact * depth))


def exit_names(cuts: Sequence[int]) -> tuple[str, ...]:
  """Names of the exits at `early_cuts`: 'exit1', 'exit2', ..."""
  return tuple(f'exit{j}' for j, _ in enumerate(cuts, 1))


def exits(group: Group, federation: Federation) -> tuple[Head, ...]:
  """The early exits that a group's model must have, see `Needs.heads`."""
  blocks, cuts = _blocks(group), early_cuts(group, federation)
  return tuple(
      exit_head(group.model, blocks[cut - 1], name)
      for cut, name in zip(cuts, exit_names(cuts), strict=True)
  )


def _blocks(group: Group) -> tuple[str, ...]:
  """The numbered blocks of a group's model; a ValueError names the group."""
  try:
    return numbered_blocks(group.model)
  except ValueError as e:
    raise ValueError(f'groups.{group.name}: {e}') from e
