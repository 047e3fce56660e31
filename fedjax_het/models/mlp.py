"""A multi-layer perceptron, nested by depth and quick to compile.

Not from a paper; for small images, examples and tests.
"""

import flax.linen as nn
import jax

from fedjax_het.models import layers
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.norm import check_policy, norm_layer
from fedjax_het.models.slices import Slices
from fedjax_het.options import at_least, integer_between

# Bounds the compilation time: each layer is compiled separately.
_DEEPEST = 1000


class Layer(nn.Module):
  """Flatten, linear, norm, ReLU."""

  slices = Slices(
      ('features',), dict(linear=('x', 'y'), norm=('y', 'y')), flattens=True
  )

  features: int
  norm: str = 'none'
  scheme: str = 'he_fan_in'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, ...] -> [B, features]."""
    x = x.reshape((x.shape[0], -1))
    x = layers.hidden_linear(self.features, 'linear', self.scheme)(x)
    return jax.nn.relu(norm_layer(self.norm, 'norm')(x, train, mask))


def mlp(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    depth: int = 2,
    hidden: int = 64,
    norm: str = 'none',
    init: str = 'he_fan_in',
) -> BlockModel:
  """`depth` hidden layers of `hidden` ReLU units and a linear head.

  Args:
    input_shape: Shape of one example, of any rank; it is flattened.
    num_classes: C.
    depth: Hidden layers, at least 2: `stem`, `layer1`, `layer2`, ...
    hidden: Units in each.
    norm: Norm policy.
    init: How kernels are drawn, a key of `layers.INITS`; the default is ours.

  Returns:
    A `BlockModel`; a shallower net holds a subset of its leaves.

  Raises:
    ValueError: If depth or hidden are too small, or norm or init is unknown.
  """
  check_policy(norm)
  layers.check_init(init)
  integer_between(2, _DEEPEST, depth=depth)
  at_least(1, hidden=hidden)
  names = ['stem', *(f'layer{i}' for i in range(1, depth))]
  blocks = [Block(name, Layer(hidden, norm, init)) for name in names]
  head = layers.Linear(num_classes, kernel_init=layers.INITS[init].head)
  blocks.append(Block('head', head))
  name, cut = f'mlp{depth}', (1, depth)
  return BlockModel(name, tuple(blocks), input_shape, num_classes, cut)
