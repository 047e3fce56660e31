"""Early exits of a trunk, as heads of its model.

References:
  Ilhan, Su, Liu, ScaleFL: Resource-Adaptive Federated Learning With
  Heterogeneous Clients, CVPR 2023, pp. 24532-24541.
"""

import flax.linen as nn
import jax

from fedjax_het.aggregation.early_exits import early_cuts, exit_heads
from fedjax_het.engine.types import Federation, Group
from fedjax_het.models import layers
from fedjax_het.models.blocks import BlockModel, Head
from fedjax_het.models.norm import norm_layer
from fedjax_het.models.slices import Slices, innermost


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


def exit_convs(model: BlockModel, after: str) -> dict[str, nn.Module]:
  """The modules of an early exit of ScaleFL behind feature maps.

  They are three convolutions with norm and ReLU, as wide as those of the block
  (a quarter of the channels behind a bottleneck), and global average pooling.

  Args:
    model: The model.
    after: Name of a numbered block that outputs feature maps.

  Returns:
    {name: module}. Norms and initialisers are those of the block.
  """
  block = innermost(dict(model.blocks)[after])
  conv = ExitConv(
      getattr(block, 'features', model.outputs[after][-1]),
      getattr(block, 'norm', 'batch'),
      getattr(block, 'scheme', 'torch'),
  )
  convs = {f'conv{i}': conv for i in (1, 2, 3)}
  return {**convs, 'pool': layers.GlobalPool()}


def exits(group: Group, federation: Federation) -> tuple[Head, ...]:
  """The early exits that a group's model must have, see `Needs.heads`."""
  return exit_heads(group, early_cuts(group, federation), exit_convs)
