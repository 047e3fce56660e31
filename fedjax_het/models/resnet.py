"""Post-activation ResNets, nested by block name.

  resnet: ResNet10 / 14 / 18 / 22 / 26 of FedIN (journal version), with basic
    blocks, and ResNet50 / 101 / 152, with bottleneck blocks. He et al., `Deep
    Residual Learning <https://arxiv.org/abs/1512.03385>`_, 2015.
  resnet14_mnist: the CIFAR form 6n + 2 with n = 2, for FeDepth's similarity
    figure, whose paper only says "customised 14-layer".

A net is `stem`, `stage1_block0`, ..., `pool`, `head`. Among nets of basic
blocks, and among nets of bottleneck blocks, block b of stage j has the same
name and shape in every net that holds it, so these nets are ordered by
inclusion of their leaf paths. For FedIN the extractor is the stem, the
classifier is the head, and the intermediate layers end with the global mean,
so that s_out is a vector with either stem.
"""

import flax.linen as nn
import jax

from fedjax_het.kernels.pooling import max_pool
from fedjax_het.models import layers
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.norm import check_policy, norm_layer
from fedjax_het.models.slices import Slices, shortcut
from fedjax_het.options import one_of

# Depth = 2 * (number of blocks) + 2 for basic blocks, 3 * (...) + 2 for
# bottlenecks (50 and more). The FedIN paper does not print the counts; these
# are nested and reproduce its mean of 12.28 M parameters.
NUM_BLOCKS = {
    10: (1, 1, 1, 1),
    14: (1, 1, 2, 2),
    18: (2, 2, 2, 2),
    22: (2, 2, 3, 3),
    26: (3, 3, 3, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
# (kernel, stride, whether a 3x3 max-pool of stride 2 follows).
STEMS = {'imagenet': (7, 2, True), 'cifar': (3, 1, False)}
SHORTCUTS = ('A', 'B')


class Stem(nn.Module):
  """Convolution, norm, ReLU and an optional 3x3 max-pool of stride 2.

  `scheme` is how kernels and biases are drawn, a key of `layers.INITS`.
  """

  slices = Slices(('features',), dict(conv=('x', 'y'), norm=('y', 'y')))

  features: int
  kernel: int
  stride: int = 1
  pool: bool = False
  use_bias: bool = False
  norm: str = 'batch'
  scheme: str = 'he_fan_out'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> [B, H', W', features]."""
    x = layers.conv_layer(
        self.features,
        self.kernel,
        'conv',
        inputs=x.shape[3],
        init=self.scheme,
        stride=self.stride,
        use_bias=self.use_bias or self.norm == 'none',
    )(x)
    x = jax.nn.relu(norm_layer(self.norm, 'norm')(x, train, mask))
    if self.pool:
      x = max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
    return x


class BasicBlock(nn.Module):
  """relu(norm(conv(relu(norm(conv(x))))) + shortcut(x)), 3x3 kernels.

  Attributes:
    features: Output channels.
    stride: Stride of the first convolution and the shortcut.
    shortcut: Where the shape changes: 'B' is a 1x1 convolution with norm, 'A'
      subsamples and pads channels with zeros.
    norm: Norm policy.
    scheme: How kernels are drawn, a key of `layers.INITS`.
  """

  slices = Slices(
      ('features',),
      dict(
          conv1=('x', 'h'),
          norm1=('h', 'h'),
          conv2=('h', 'y'),
          norm2=('y', 'y'),
          conv_shortcut=('x', 'y'),
          norm_shortcut=('y', 'y'),
      ),
      sets=shortcut('conv2'),
  )

  features: int
  stride: int = 1
  shortcut: str = 'B'
  norm: str = 'batch'
  scheme: str = 'he_fan_out'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> [B, ceil(H / stride), ceil(W / stride), features]."""

    def unit(y, kernel, stride, suffix):
      y = layers.conv_layer(
          self.features,
          kernel,
          'conv' + suffix,
          inputs=y.shape[3],
          init=self.scheme,
          stride=stride,
          use_bias=self.norm == 'none',
      )(y)
      return norm_layer(self.norm, 'norm' + suffix)(y, train, mask)

    y = jax.nn.relu(unit(x, 3, self.stride, '1'))
    y = unit(y, 3, 1, '2')
    if self.stride > 1 or x.shape[3] != self.features:
      if self.shortcut == 'A':
        x = layers.SubsampleAndPad(self.features, self.stride)(x)
      else:
        x = unit(x, 1, self.stride, '_shortcut')
    return jax.nn.relu(x + y)


class Bottleneck(nn.Module):
  """1x1, 3x3 and 1x1 convolutions; the last has four times the channels.

  Attributes:
    features: Channels of the first two convolutions.
    stride: Stride of the 3x3 convolution and the shortcut. Where the shape
      changes, the shortcut is a 1x1 convolution with norm.
    norm: Norm policy.
    scheme: How kernels are drawn, a key of `layers.INITS`.
  """

  # A narrow copy has 4 ceil(rho w) output channels, not ceil(rho 4 w).
  slices = Slices(
      ('features',),
      dict(
          conv1=('x', 'h'),
          norm1=('h', 'h'),
          conv2=('h', 'g'),
          norm2=('g', 'g'),
          conv3=('g', 'y'),
          norm3=('y', 'y'),
          conv_shortcut=('x', 'y'),
          norm_shortcut=('y', 'y'),
      ),
      sets=shortcut('conv3'),
  )

  features: int
  stride: int = 1
  norm: str = 'batch'
  scheme: str = 'he_fan_out'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> [B, ceil(H / stride), ceil(W / stride), 4 * features]."""

    def unit(y, features, kernel, stride, suffix):
      y = layers.conv_layer(
          features,
          kernel,
          'conv' + suffix,
          inputs=y.shape[3],
          init=self.scheme,
          stride=stride,
          use_bias=self.norm == 'none',
      )(y)
      return norm_layer(self.norm, 'norm' + suffix)(y, train, mask)

    y = jax.nn.relu(unit(x, self.features, 1, 1, '1'))
    y = jax.nn.relu(unit(y, self.features, 3, self.stride, '2'))
    y = unit(y, 4 * self.features, 1, 1, '3')
    if self.stride > 1 or x.shape[3] != 4 * self.features:
      x = unit(x, 4 * self.features, 1, self.stride, '_shortcut')
    return jax.nn.relu(x + y)


def _residual_net(
    name,
    input_shape,
    num_classes,
    *,
    stem,
    channels,
    num_blocks,
    kind=BasicBlock,
    init,
    **block,
):
  """A stem, stages of blocks (the later ones with stride 2), a head."""
  blocks = [Block('stem', stem)]
  stages = zip(channels, num_blocks, strict=True)
  for stage, (features, number) in enumerate(stages, 1):
    for b in range(number):
      stride = 2 if stage > 1 and b == 0 else 1
      module = kind(features, stride, scheme=init, **block)
      blocks.append(Block(f'stage{stage}_block{b}', module))
  blocks += [
      Block('pool', layers.GlobalPool()),
      Block(
          'head',
          layers.Linear(num_classes, kernel_init=layers.INITS[init].head),
      ),
  ]
  cut = (1, len(blocks) - 1)
  return BlockModel(name, tuple(blocks), input_shape, num_classes, cut)


def resnet(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    depth: int,
    stem: str = 'imagenet',
    width: float = 1.0,
    norm: str = 'batch',
    init: str = 'he_fan_out',
) -> BlockModel:
  """ResNet10, 14, 18, 22 or 26 of FedIN, or ResNet50, 101 or 152.

  At 32x32 with the ImageNet stem the maps are 8x8 (stem, stage 1), 4x4, 2x2
  and 1x1; with basic blocks s_in is 8x8x64 and s_out 512 numbers, as in the
  paper.

  Args:
    input_shape: (height, width, channels) of one example.
    num_classes: C.
    depth: 10, 14, 18, 22, 26 (basic blocks), 50, 101 or 152 (bottlenecks).
    stem: 'imagenet' is 7x7 with stride 2 and a max-pool, also for small images
      (the paper's choice); 'cifar' is 3x3 with stride 1, which gives sixteen
      times the activations.
    width: Multiplies the 64 / 128 / 256 / 512 channels (and the stem's 64),
      rounded down, at least 1.
    norm: Norm policy, see `norm`.
    init: How kernels are drawn, a key of `layers.INITS`; the default is that
      of torchvision's ResNets.

  Returns:
    A `BlockModel`.

  Raises:
    ValueError: For an unknown depth, stem, norm or init, or a width that is not
      positive.
  """
  one_of('depth', depth, NUM_BLOCKS)
  one_of('stem', stem, STEMS)
  check_policy(norm)
  layers.check_init(init)
  channels = [layers.scale_channels(64 * 2**j, width) for j in range(4)]
  return _residual_net(
      f'resnet{depth}',
      input_shape,
      num_classes,
      stem=Stem(channels[0], *STEMS[stem], norm=norm, scheme=init),
      channels=channels,
      num_blocks=NUM_BLOCKS[depth],
      kind=Bottleneck if depth >= 50 else BasicBlock,
      norm=norm,
      init=init,
  )


def resnet14_mnist(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    shortcut: str = 'A',
    width: float = 1.0,
    norm: str = 'batch',
    init: str = 'he_fan_out',
) -> BlockModel:
  """ResNet-14 in the CIFAR form: 3x3 stem, six blocks, 16 / 32 / 64 channels.

  Args:
    input_shape: (height, width, channels) of one example.
    num_classes: C.
    shortcut: 'A' (zero padding) or 'B' (1x1 convolution with norm).
    width: Multiplies the channels, rounded down, at least 1.
    norm: Norm policy.
    init: How kernels are drawn, a key of `layers.INITS`; neither the paper nor
      its code describes this net, so the default is ours.

  Returns:
    A `BlockModel`.

  Raises:
    ValueError: For an unknown shortcut, norm or init, or a width that is
      not positive.
  """
  one_of('shortcut', shortcut, SHORTCUTS)
  check_policy(norm)
  layers.check_init(init)
  channels = [layers.scale_channels(16 * 2**j, width) for j in range(3)]
  return _residual_net(
      'resnet14_mnist',
      input_shape,
      num_classes,
      stem=Stem(channels[0], 3, norm=norm, scheme=init),
      channels=channels,
      num_blocks=(2, 2, 2),
      shortcut=shortcut,
      norm=norm,
      init=init,
  )


MINI_BLOCKS = {6: (1, 1), 8: (1, 2), 10: (2, 2)}


def mini_resnet(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    depth: int,
    width: float = 1.0,
    norm: str = 'batch',
    init: str = 'he_fan_out',
) -> BlockModel:
  """A two-stage residual net for tiny images: 3x3 stem, 32 / 64 channels.

  Not from a paper: nested by depth like the ResNets, but quick to compile and
  to train on a CPU.

  Args:
    input_shape: (height, width, channels) of one example.
    num_classes: C.
    depth: 6, 8 or 10.
    width: Multiplies the channels, rounded down, at least 1.
    norm: Norm policy.
    init: How kernels are drawn, a key of `layers.INITS`; the default is ours.

  Returns:
    A `BlockModel`.

  Raises:
    ValueError: For an unknown depth, norm or init, or a width that is not
      positive.
  """
  one_of('depth', depth, MINI_BLOCKS)
  check_policy(norm)
  layers.check_init(init)
  channels = [layers.scale_channels(32 * 2**j, width) for j in range(2)]
  return _residual_net(
      f'mini_resnet{depth}',
      input_shape,
      num_classes,
      stem=Stem(channels[0], 3, norm=norm, scheme=init),
      channels=channels,
      num_blocks=MINI_BLOCKS[depth],
      norm=norm,
      init=init,
  )
