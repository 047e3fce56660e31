"""The ten CNNs that FedHe took from FedMD, two or three convolutions each.

Batch norm is Keras' (momentum 0.99, epsilon 1e-3). In FedHe nothing of the
model is exchanged, so its statistics stay on the client. The paper prints 198
filters for the last layer of model 9, but its numbers of communicated
parameters (324,672 on MNIST, 326,976 on CIFAR-10) imply 192, as in FedMD, with
20 outputs (FedMD's public and private labels) and running statistics counted.

References:
  Chan and Ngai, `FedHe: Heterogeneous Models and Communication-Efficient
  Federated Learning <https://arxiv.org/abs/2110.09910>`_, 2021.
  Li and Wang, `FedMD <https://arxiv.org/abs/1910.03581>`_, 2019.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.models import layers
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.norm import check_policy, norm_layer
from fedjax_het.models.slices import Slices
from fedjax_het.options import between, one_of

# (filters of each convolution, dropout rate).
VARIANTS = (
    ((128, 256), 0.2),
    ((128, 384), 0.2),
    ((128, 512), 0.2),
    ((256, 256), 0.3),
    ((256, 512), 0.4),
    ((64, 128, 256), 0.2),
    ((64, 128, 192), 0.2),
    ((128, 192, 256), 0.2),
    ((128, 128, 128), 0.3),
    ((128, 128, 192), 0.3),
)


def _pool_same(x):
  """2x2 average pool with stride 1; border windows average fewer pixels."""
  for axis in (1, 2):
    last = jax.lax.slice_in_dim(x, x.shape[axis] - 1, None, axis=axis)
    follower = jax.lax.slice_in_dim(x, 1, None, axis=axis)
    x = (x + jnp.concatenate([follower, last], axis)) / 2
  return x


def _pool_valid(x):
  """2x2 average pool with stride 2; drops an odd last row or column."""
  batch, height, width, channels = x.shape
  x = x[:, : height // 2 * 2, : width // 2 * 2]
  x = x.reshape((batch, height // 2, 2, width // 2, 2, channels))
  return jnp.mean(x, axis=(2, 4))


_POOLS = {'same': _pool_same, 'valid': _pool_valid, None: lambda x: x}


class Unit(nn.Module):
  """Convolution, norm, ReLU, dropout and an optional 2x2 average pool.

  Attributes:
    features: Output channels.
    kernel: Height and width of the kernel.
    stride: Stride of the convolution.
    padding: Zeros on each side.
    pool: 'same' (stride 1), 'valid' (stride 2) or None.
    dropout: Dropout rate in training.
    norm: Norm policy.
    scheme: How kernel and bias are drawn, a key of `layers.INITS`.
  """

  slices = Slices(('features',), dict(conv=('x', 'y'), norm=('y', 'y')))

  features: int
  kernel: int
  stride: int
  padding: int
  pool: str | None
  dropout: float
  norm: str
  scheme: str = 'lecun'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> [B, H', W', features]."""
    x = layers.conv_layer(
        self.features,
        self.kernel,
        'conv',
        stride=self.stride,
        inputs=x.shape[3],
        init=self.scheme,
        padding=self.padding,
        use_bias=True,
    )(x)
    norm = norm_layer(self.norm, 'norm', momentum=0.99, epsilon=1e-3)
    x = jax.nn.relu(norm(x, train, mask))
    x = layers.Dropout(self.dropout, deterministic=not train)(x)
    return _POOLS[self.pool](x)


def fedhe_cnn(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    variant: int,
    dropout: float | None = None,
    width: float = 1.0,
    norm: str = 'batch',
    init: str = 'lecun',
) -> BlockModel:
  """Model 0 to 9 of FedHe.

  Args:
    input_shape: (height, width, channels) of one example; at least 3x3 for
      two convolutions, 12x12 for three.
    num_classes: C.
    variant: 0 to 9.
    dropout: None means the model's own rate. Training needs a key unless it
      is 0.
    width: Multiplies the filters, rounded down, at least 1.
    norm: Norm policy.
    init: How kernels and biases are drawn, a key of `layers.INITS`; the
      default is that of FedMD's code.

  Returns:
    A `BlockModel`: `unit1`, `unit2`, (`unit3`,) `flatten`, `head`.

  Raises:
    ValueError: For an unknown variant, norm or init, a dropout outside
      [0, 1), a width that is not positive, or images that are too small.
  """
  one_of('variant', variant, range(len(VARIANTS)))
  check_policy(norm)
  layers.check_init(init)
  filters, rate = VARIANTS[variant]
  rate = rate if dropout is None else dropout
  between(0, 1, below=True, dropout=rate)
  smallest = 3 if len(filters) == 2 else 12
  if min(input_shape[:2]) < smallest:
    raise ValueError(
        f'Model fedhe_cnn{variant} needs images of at least '
        f'{smallest}x{smallest}, got {input_shape[0]}x{input_shape[1]}.'
    )
  # (kernel, stride, padding, pool) of each unit.
  shapes = [(3, 1, 1, 'same'), (3, 2, 0, None)]
  if len(filters) == 3:
    shapes.insert(1, (2, 2, 0, 'valid'))
  blocks = []
  for features, shape in zip(filters, shapes, strict=True):
    features = layers.scale_channels(features, width)
    unit = Unit(features, *shape, rate, norm, init)
    blocks.append(Block(f'unit{len(blocks) + 1}', unit))
  head = layers.Linear(
      num_classes, use_bias=False, kernel_init=layers.INITS[init].head
  )
  blocks += [Block('flatten', layers.Flatten()), Block('head', head)]
  cut = (1, len(blocks) - 1)
  name = f'fedhe_cnn{variant}'
  return BlockModel(name, tuple(blocks), input_shape, num_classes, cut)
