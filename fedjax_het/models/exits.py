"""Early exits of a trunk, as heads of its model.

References:
  Ilhan, Su, Liu, ScaleFL: Resource-Adaptive Federated Learning With
  Heterogeneous Clients, CVPR 2023, pp. 24532-24541.
"""

from collections.abc import Iterable

import flax.linen as nn
import jax

from fedjax_het.models import layers
from fedjax_het.models.blocks import Block, BlockModel, Head
from fedjax_het.models.depth import head_blocks, numbered_blocks
from fedjax_het.models.norm import norm_layer
from fedjax_het.models.slices import Slices


class ExitConv(nn.Module):
  """3x3 convolution, norm, ReLU; attributes as those of a residual block."""

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

  Behind a block of maps: three convolutions with norm and ReLU, as wide as
  those of the block (a quarter of the channels behind a bottleneck), a global
  mean, and a classifier like the trunk's. Behind any other block: the trunk's
  own head again.

  Args:
    model: The model.
    after: Name of a numbered block.
    name: Of the head.

  Returns:
    The head. Norms and initialisers are those of the block.
  """
  modules = dict(model.blocks)
  shape, block = model.outputs[after], modules[after]
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


def with_exits(model: BlockModel, cuts: Iterable[int]) -> BlockModel:
  """The model with an early exit 'exit1', 'exit2', ... behind each cut.

  Args:
    model: The model.
    cuts: Numbers of numbered blocks in front of the exits.

  Returns:
    A model whose other variables are drawn as before.
  """
  blocks = numbered_blocks(model)
  return model.with_heads(*(
      exit_head(model, blocks[cut - 1], f'exit{j}')
      for j, cut in enumerate(sorted(cuts), 1)
  ))  # fmt: skip
