"""The five nets A-E of FedIN's conference version.

A block is conv1x1 - norm - ReLU - conv3x3 - norm, plus a shortcut, ReLU: two
convolutions, not a three-convolution bottleneck. Three stages named 2, 3, 4
as in the paper's Table I. The first block of a stage changes the shape; the
five nets differ in the number of identity blocks after it.

Where the table's text is uncertain (r2 of B and C, r4), the counts are those
of the five variants in the authors' related code. There, the identity blocks
of a stage are one module applied several times: `tied=True`; all five nets
then have the same parameters. The paper's 4x4 average pool equals a global mean
at 28x28 and 32x32, so a global mean is used.
"""

import flax.linen as nn
import jax

from fedjax_het.models import layers
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.norm import check_policy, norm_layer
from fedjax_het.models.resnet import Stem
from fedjax_het.models.slices import Slices, shortcut
from fedjax_het.options import one_of

# Identity blocks after the first block of stages 2, 3 and 4.
NUM_IDENTITY = {
    'a': (2, 3, 5),
    'b': (1, 1, 2),
    'c': (2, 2, 2),
    'd': (1, 3, 3),
    'e': (1, 1, 1),
}


class PointwiseBlock(nn.Module):
  """relu(norm(conv3x3(relu(norm(conv1x1(x))))) + shortcut(x)).

  Attributes:
    inner: Channels between the two convolutions.
    features: Output channels.
    stride: Stride of the 1x1 convolution and the shortcut.
    down: Whether the shortcut is a 1x1 convolution with norm; else it is x.
    repeats: Number of times the block is applied, with the same parameters.
    use_bias: Whether the convolutions have a bias.
    norm: Norm policy.
    scheme: How kernels and biases are drawn, a key of `layers.INITS`.
  """

  slices = Slices(
      ('inner', 'features'),
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

  inner: int
  features: int
  stride: int = 1
  down: bool = False
  repeats: int = 1
  use_bias: bool = True
  norm: str = 'batch'
  scheme: str = 'torch'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> [B, H / stride, W / stride, features], rounded up."""

    def unit(inputs, features, kernel, stride, suffix):
      conv = layers.conv_layer(
          features,
          kernel,
          'conv' + suffix,
          inputs=inputs,
          init=self.scheme,
          stride=stride,
          use_bias=self.use_bias or self.norm == 'none',
      )
      norm = norm_layer(self.norm, 'norm' + suffix)
      return lambda y: norm(conv(y), train, mask)

    channels = x.shape[3]
    unit1 = unit(channels, self.inner, 1, self.stride, '1')
    unit2 = unit(self.inner, self.features, 3, 1, '2')
    for _ in range(self.repeats):
      y = unit2(jax.nn.relu(unit1(x)))
      if self.down:
        x = unit(channels, self.features, 1, self.stride, '_shortcut')(x)
      x = jax.nn.relu(x + y)
    return x


def fedin_v1(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    variant: str,
    tied: bool = False,
    conv_bias: bool = True,
    width: float = 1.0,
    norm: str = 'batch',
    init: str = 'torch',
) -> BlockModel:
  """Model A, B, C, D or E of FedIN's conference version.

  At 32x32 the maps are 16x16 after the stem (s_in, 64 channels) and in stage
  2, then 8x8 and 4x4; s_out is [B, 1024].

  Args:
    input_shape: (height, width, channels) of one example.
    num_classes: C.
    variant: 'a' to 'e'.
    tied: Whether the identity blocks of a stage share their parameters: one
      block, applied several times.
    conv_bias: Whether convolutions have a bias, as in the authors' code.
    width: Multiplies all channels, rounded down, at least 1.
    norm: Norm policy.
    init: How kernels and biases are drawn, a key of `layers.INITS`; the
      default is that of the authors' related code.

  Returns:
    A `BlockModel`.

  Raises:
    ValueError: For an unknown variant, norm or init, or a width that is not
      positive.

  References:
    Chan et al., `FedIN: Federated Intermediate Layers Learning for Model
    Heterogeneity <https://arxiv.org/abs/2304.00759>`_, 2023.
  """
  one_of('variant', variant, NUM_IDENTITY)
  check_policy(norm)
  layers.check_init(init)
  common = dict(use_bias=conv_bias, norm=norm, scheme=init)
  stem = Stem(layers.scale_channels(64, width), 3, pool=True, **common)
  blocks = [Block('stem', stem)]
  for stage, number in enumerate(NUM_IDENTITY[variant], 2):
    inner = layers.scale_channels(16 * 2**stage, width)
    features = layers.scale_channels(64 * 2**stage, width)
    down = PointwiseBlock(
        inner, features, 1 if stage == 2 else 2, down=True, **common
    )
    modules = [down]
    if tied:
      modules += [PointwiseBlock(inner, features, repeats=number, **common)]
    else:
      modules += [PointwiseBlock(inner, features, **common)] * number
    blocks += [
        Block(f'stage{stage}_block{b}', module)
        for b, module in enumerate(modules)
    ]
  blocks += [
      Block('pool', layers.GlobalPool()),
      Block(
          'head',
          layers.Linear(num_classes, kernel_init=layers.INITS[init].head),
      ),
  ]
  cut = (1, len(blocks) - 1)
  name = f'fedin_{variant}'
  return BlockModel(name, tuple(blocks), input_shape, num_classes, cut)
