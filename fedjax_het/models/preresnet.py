"""PreResNet-20, the net of FeDepth: nine pre-activation blocks.

  u = relu(norm(x));  out = conv(relu(norm(conv(u)))) + shortcut(u)

As in the code of FeDepth, the shortcut takes u in every block; in the net of He
et al., and in that code's baselines, it is x where the shape does not change
(`preact_shortcut=False`). By default each batch is normalised by its own
statistics, in training and test, and parameters are initialised as in PyTorch,
except for the classifier's bias, which is zero. These defaults follow the code
of FeDepth; the table `fedepth_nets` has the nets of its baselines.

References:
  He et al., `Identity Mappings in Deep Residual Networks
  <https://arxiv.org/abs/1603.05027>`_, 2016.
  Zhang et al., `Memory-adaptive Depth-wise Heterogeneous Federated Learning
  <https://arxiv.org/abs/2303.04887>`_.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.models import layers
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.norm import check_policy, norm_layer
from fedjax_het.models.resnet import SHORTCUTS
from fedjax_het.models.slices import Slices, shortcut
from fedjax_het.options import integer_between, one_of


class PreStem(nn.Module):
  """A 3x3 convolution and an optional norm; no ReLU."""

  slices = Slices(('features',), dict(conv=('x', 'y'), norm=('y', 'y')))

  features: int
  use_norm: bool = True
  use_bias: bool = False
  norm: str = 'batch_only'
  scheme: str = 'torch'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> [B, H, W, features]."""
    use_bias = self.use_bias or (self.use_norm and self.norm == 'none')
    x = layers.conv_layer(
        self.features,
        3,
        'conv',
        inputs=x.shape[3],
        init=self.scheme,
        use_bias=use_bias,
    )(x)
    if not self.use_norm:
      return x
    x = norm_layer(self.norm, 'norm')(x, train, mask)
    # The blocks add the outputs of their convolutions to this.
    return x if self.norm == 'none' else layers.Scaler()(x)


class PreactBlock(nn.Module):
  """A pre-activation block of two 3x3 convolutions.

  Attributes:
    features: Output channels.
    stride: Stride of the first convolution and the shortcut.
    shortcut: Where the shape changes: 'A' subsamples and pads channels with
      zeros, 'B' is a 1x1 convolution without norm.
    norm: Norm policy.
    preact: Whether the shortcut takes u, not x, where the shape does not
      change.
    scheme: How kernels and biases are drawn, a key of `layers.INITS`.
  """

  slices = Slices(
      ('features',),
      dict(
          norm1=('x', 'x'),
          conv1=('x', 'h'),
          norm2=('h', 'h'),
          conv2=('h', 'y'),
          conv_shortcut=('x', 'y'),
      ),
      sets=shortcut('conv2'),
  )

  features: int
  stride: int = 1
  shortcut: str = 'B'
  norm: str = 'batch_only'
  preact: bool = True
  scheme: str = 'torch'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> [B, ceil(H / stride), ceil(W / stride), features]."""
    use_bias = self.norm == 'none'

    def conv(y, kernel, stride, suffix):
      return layers.conv_layer(
          self.features,
          kernel,
          'conv' + suffix,
          inputs=y.shape[3],
          init=self.scheme,
          stride=stride,
          use_bias=use_bias,
      )(y)

    u = jax.nn.relu(norm_layer(self.norm, 'norm1')(x, train, mask))
    y = conv(u, 3, self.stride, '1')
    y = jax.nn.relu(norm_layer(self.norm, 'norm2')(y, train, mask))
    y = conv(y, 3, 1, '2')
    if self.stride > 1 or x.shape[3] != self.features:
      if self.shortcut == 'A':
        x = layers.SubsampleAndPad(self.features, self.stride)(u)
        x = layers.Scaler()(x)
      else:
        x = conv(u, 1, self.stride, '_shortcut')
    elif self.preact:
      x = layers.Scaler()(u)
    return x + y


class NormPool(nn.Module):
  """mean(relu(norm(x))) over the positions, or the mean alone.

  Attributes:
    use_norm: Whether norm and ReLU precede the mean.
    norm: Norm policy.
    use_relu: False omits only the ReLU.
  """

  slices = Slices((), dict(norm=('x', 'x')))

  use_norm: bool = True
  norm: str = 'batch_only'
  use_relu: bool = True

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> [B, C]."""
    if self.use_norm:
      x = norm_layer(self.norm, 'norm')(x, train, mask)
      x = jax.nn.relu(x) if self.use_relu else x
    return jnp.mean(x, axis=(1, 2))


def preresnet20(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    shortcut: str = 'B',
    stem_norm: bool = True,
    stem_bias: bool = False,
    final_norm: bool = True,
    head_relu: bool = True,
    preact_shortcut: bool = True,
    num_blocks: int = 3,
    width: float = 1.0,
    norm: str = 'batch_only',
    init: str = 'torch',
) -> BlockModel:
  """PreResNet-20: 16, 32, 64 channels, three blocks each.

  FeDepth's blocks B1 to B9 are `stage1_block0` to `stage3_block2`; its head
  is the last two blocks, `pool` (norm, ReLU, mean) and `head` (linear).

  Args:
    input_shape: (height, width, channels) of one example.
    num_classes: C.
    shortcut: 'A' (zero padding) or 'B' (1x1 convolution, without norm).
    stem_norm: Whether a norm follows the first convolution.
    stem_bias: Whether the first convolution has a bias.
    final_norm: Whether norm and ReLU precede the mean. `stem_bias=True`,
      `final_norm=False` and `preact_shortcut=False` give the net of FedAvg and
      SplitMix in the code of FeDepth.
    head_relu: Whether a ReLU follows the final norm, as in the code of FeDepth;
      no head in the code of m-FeDepth has one.
    preact_shortcut: Whether the shortcut takes u in every block, as in the
      code of FeDepth, or only where the shape changes, as in the net that the
      paper names.
    num_blocks: Blocks per stage, n; the net has 6 n + 2 layers.
    width: Multiplies the channels, rounded down, at least 1.
    norm: Norm policy.
    init: How kernels and biases are drawn, a key of `layers.INITS`; the
      default is that of the code of FeDepth, HeteroFL and SplitMix.

  Returns:
    A `BlockModel`.

  Raises:
    ValueError: For an unknown shortcut, norm or init, or a number of blocks
      or a width that is not positive.
  """
  one_of('shortcut', shortcut, SHORTCUTS)
  check_policy(norm)
  layers.check_init(init)
  # At most 1,202 layers: each block is compiled separately.
  integer_between(1, 200, num_blocks=num_blocks)
  # With an explicit kernel initialiser, the bias of `Linear` starts at zero.
  head = layers.INITS[init].head or layers.torch_uniform
  channels = [layers.scale_channels(16 * 2**j, width) for j in range(3)]
  stem = PreStem(channels[0], stem_norm, stem_bias, norm, init)
  blocks = [Block('stem', stem)]
  for stage, features in enumerate(channels, 1):
    for b in range(num_blocks):
      stride = 2 if stage > 1 and b == 0 else 1
      module = PreactBlock(
          features, stride, shortcut, norm, preact_shortcut, init
      )
      blocks.append(Block(f'stage{stage}_block{b}', module))
  blocks += [
      Block('pool', NormPool(final_norm, norm, head_relu)),
      Block('head', layers.Linear(num_classes, kernel_init=head)),
  ]
  cut = (1, len(blocks) - 1)
  name = f'preresnet{6 * num_blocks + 2}'
  return BlockModel(name, tuple(blocks), input_shape, num_classes, cut)
