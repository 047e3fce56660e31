"""DepthFL's classifiers: an attention module and a chain of convolutions.

References:
  Kim, Yu, Kim, Moon, `DepthFL: Depthwise Federated Learning for Heterogeneous
  Clients <https://openreview.net/forum?id=pf8RIZTMU58>`_, ICLR 2023; its
  authors' code for the modules.
"""

import flax.linen as nn
import jax

from fedjax_het.aggregation.early_exits import blocks_of, early_cuts, exit_heads
from fedjax_het.engine.types import Federation, Group
from fedjax_het.kernels.taps import busy_taps, resolve_padding, slice_taps
from fedjax_het.models import layers
from fedjax_het.models.blocks import BlockModel, Head
from fedjax_het.models.depth import numbered_blocks, stage_ends
from fedjax_het.models.norm import norm_layer
from fedjax_het.models.slices import innermost


class DepthwiseConv(nn.Module):
  """3x3 convolution of each channel alone, padded by 1, without bias.

  `models.flops` does not count it, since it is not a matrix product.

  Attributes:
    stride: Stride in both directions.
    scheme: How the kernel is drawn, a key of `layers.INITS`.
  """

  stride: int = 1
  scheme: str = 'torch'

  @nn.compact
  def __call__(self, x):
    """[B, H, W, C] -> [B, ceil(H / stride), ceil(W / stride), C]."""
    channels, sizes = x.shape[3], x.shape[1:3]
    init = layers.INITS[self.scheme].kernel
    kernel = self.param('kernel', init, (3, 3, 1, channels))
    padding, strides = ((1, 1), (1, 1)), (self.stride, self.stride)
    geometry = resolve_padding(padding, sizes, (3, 3), strides)
    # A map of one pixel reads the centre of the kernel only.
    busy, geometry = busy_taps(geometry, sizes)
    taps = kernel[busy].reshape((-1, 1, 1, 1, channels))
    return sum(
        tap * part
        for tap, part in zip(taps, slice_taps(x, geometry), strict=True)
    )


class Separable(nn.Module):
  """Two separable convolutions, the first with stride 2.

  Each is a depthwise 3x3 convolution, a 1x1 convolution, norm and ReLU.

  Attributes:
    features: Output channels; the first convolution keeps those of the input.
    norm: Norm policy. With 'none' the 1x1 convolutions have a bias.
    scheme: How kernels are drawn, a key of `layers.INITS`.
  """

  features: int
  norm: str = 'batch'
  scheme: str = 'torch'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> [B, ceil(H / 2), ceil(W / 2), features]."""
    channels = x.shape[3]
    for i, stride, features in ((1, 2, channels), (2, 1, self.features)):
      x = DepthwiseConv(stride, self.scheme, name=f'depthwise{i}')(x)
      x = layers.conv_layer(
          features,
          1,
          f'conv{i}',
          inputs=channels,
          init=self.scheme,
          use_bias=self.norm == 'none',
      )(x)
      x = jax.nn.relu(norm_layer(self.norm, f'norm{i}')(x, train, mask))
    return x


class Attention(nn.Module):
  """x sigmoid(up(relu(norm(Separable(x))))); up resizes to the size of x.

  The paper's code doubles the size, which is the same for even sizes. The
  factor is at least 1/2. For the attributes see `Separable`.
  """

  norm: str = 'batch'
  scheme: str = 'torch'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> same shape."""
    a = Separable(x.shape[3], self.norm, self.scheme, name='separable')(
        x, train, mask
    )
    a = jax.nn.relu(norm_layer(self.norm, 'norm')(a, train, mask))
    # Bilinear, with the corners not aligned.
    return x * jax.nn.sigmoid(jax.image.resize(a, x.shape, 'bilinear'))


def side_modules(model: BlockModel, after: str) -> dict[str, nn.Module]:
  """The modules of a classifier behind feature maps, but for its linear layer.

  They are the attention module, one `Separable` for each doubling of the
  channels up to those of the trunk's last feature maps, and global average
  pooling.

  Args:
    model: The model.
    after: Name of a numbered block that outputs feature maps.

  Returns:
    {name: module}. Norms and initialisers are those of the block.
  """
  block = innermost(dict(model.blocks)[after])
  norm = getattr(block, 'norm', 'batch')
  scheme = getattr(block, 'scheme', 'torch')
  shapes = [model.outputs[name] for name in numbered_blocks(model)]
  *_, last = [shape[-1] for shape in shapes if len(shape) == 3]
  modules: dict[str, nn.Module] = dict(attention=Attention(norm, scheme))
  channels = model.outputs[after][-1]
  while channels < last:
    channels = min(2 * channels, last)
    modules[f'down{len(modules)}'] = Separable(channels, norm, scheme)
  return {**modules, 'pool': layers.GlobalPool()}


def cuts_of(group: Group, federation: Federation) -> list[int]:
  """How many numbered blocks precede each classifier, without the last one.

  There is one behind each stage, and one behind the last block of each group.

  Args:
    group: The group whose model has the classifiers.
    federation: All groups, see `aggregation.early_exits`.

  Returns:
    The numbers, ascending.

  Raises:
    ValueError: If an option is not a share, or the model has no numbered block.
  """
  return early_cuts(group, federation, stage_ends(blocks_of(group)))


def classifiers(group: Group, federation: Federation) -> tuple[Head, ...]:
  """The classifiers in front of the trunk's own head, see `Needs.heads`."""
  return exit_heads(group, cuts_of(group, federation), side_modules)
