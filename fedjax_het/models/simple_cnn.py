"""Small CNNs: simple-CNN of NIID-Bench and MOON, and the CNN with dropout.

The CNN with dropout is trained on EMNIST by adaptive federated optimisation and
on CIFAR-10 by pfl-research's comparison of simulators.

References:
  Li et al., `Federated Learning on Non-IID Data Silos
  <https://arxiv.org/abs/2102.02079>`_, 2022.
  Li et al., `Model-Contrastive Federated Learning
  <https://arxiv.org/abs/2103.16257>`_, 2021.
  Reddi et al., `Adaptive Federated Optimization
  <https://arxiv.org/abs/2003.00295>`_, ICLR 2021.
  Granqvist et al., `pfl-research: simulation framework for accelerating
  research in Private Federated Learning <https://arxiv.org/abs/2404.06430>`_,
  NeurIPS 2024.
"""

import flax.linen as nn
import jax

from fedjax_het.kernels.pooling import max_pool
from fedjax_het.models import layers
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.norm import check_policy, norm_layer
from fedjax_het.models.slices import Slices
from fedjax_het.options import between


class ConvUnit(nn.Module):
  """A convolution without padding, norm, ReLU, 2x2 max-pool, dropout.

  Attributes:
    features: Output channels.
    norm: Norm policy.
    kernel: Height and width of the kernel.
    pool: Whether to pool.
    dropout: Dropout rate in training.
    scheme: How kernel and bias are drawn, a key of `layers.INITS`.
  """

  slices = Slices(('features',), dict(conv=('x', 'y'), norm=('y', 'y')))

  features: int
  norm: str = 'none'
  kernel: int = 5
  pool: bool = True
  dropout: float = 0.0
  scheme: str = 'torch'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> [B, H', W', features], H' = (H - kernel + 1) (// 2)."""
    x = layers.conv_layer(
        self.features,
        self.kernel,
        'conv',
        inputs=x.shape[3],
        init=self.scheme,
        padding=0,
        use_bias=True,
    )(x)
    x = jax.nn.relu(norm_layer(self.norm, 'norm')(x, train, mask))
    x = max_pool(x, (2, 2), (2, 2)) if self.pool else x
    return layers.Dropout(self.dropout, deterministic=not train)(x)


class Hidden(nn.Module):
  """Flatten, linear, ReLU, dropout; for the attributes see `ConvUnit`."""

  slices = Slices(('features',), dict(linear=('x', 'y')), flattens=True)

  features: int
  dropout: float = 0.0
  scheme: str = 'torch'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, ...] -> [B, features]."""
    del mask
    x = x.reshape((x.shape[0], -1))
    linear = layers.hidden_linear(self.features, 'linear', self.scheme)
    x = jax.nn.relu(linear(x))
    return layers.Dropout(self.dropout, deterministic=not train)(x)


class Projection(nn.Module):
  """MOON's projection head: linear, ReLU, linear."""

  slices = Slices((), dict(linear1=('x', 'h'), linear2=('h', 'y')))

  features: int = 256
  scheme: str = 'torch'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, D] -> [B, features]."""
    del train, mask
    x = layers.hidden_linear(x.shape[1], 'linear1', self.scheme)(x)
    x = jax.nn.relu(x)
    return layers.hidden_linear(self.features, 'linear2', self.scheme)(x)


def simple_cnn(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    projection: bool = False,
    width: float = 1.0,
    norm: str = 'none',
    init: str = 'torch',
) -> BlockModel:
  """Two 5x5 convolutions (6, 16) and two hidden layers (120, 84).

  Args:
    input_shape: (height, width, channels) of one example, at least 16x16.
    num_classes: C.
    projection: Whether MOON's projection head 84 -> 84 -> 256 precedes the
      classifier. The representation z is the input of the last block in
      either case.
    width: Multiplies channels and hidden units (not the 256 of the
      projection), rounded down, at least 1.
    norm: Norm policy; one of NIID-Bench's variants has batch norm after the
      convolutions.
    init: How kernels and biases are drawn, a key of `layers.INITS`; the
      default is that of both papers' code.

  Returns:
    A `BlockModel`: `conv1`, `conv2`, `hidden1`, `hidden2`, (`projection`,)
    `head`.

  Raises:
    ValueError: For an unknown norm or init, a width that is not positive, or
      images that are too small.
  """
  check_policy(norm)
  layers.check_init(init)
  if min(input_shape[:2]) < 16:
    raise ValueError(
        'Model simple_cnn needs images of at least 16x16, got '
        f'{input_shape[0]}x{input_shape[1]}.'
    )
  sizes = [layers.scale_channels(n, width) for n in (6, 16, 120, 84)]
  blocks = [
      Block('conv1', ConvUnit(sizes[0], norm, scheme=init)),
      Block('conv2', ConvUnit(sizes[1], norm, scheme=init)),
      Block('hidden1', Hidden(sizes[2], scheme=init)),
      Block('hidden2', Hidden(sizes[3], scheme=init)),
  ]
  if projection:
    blocks.append(Block('projection', Projection(scheme=init)))
  head = layers.Linear(num_classes, kernel_init=layers.INITS[init].head)
  blocks.append(Block('head', head))
  cut = (1, len(blocks) - 1)
  return BlockModel('simple_cnn', tuple(blocks), input_shape, num_classes, cut)


def dropout_cnn(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    dropout: float | None = None,
    width: float = 1.0,
    norm: str = 'none',
    init: str = 'glorot',
) -> BlockModel:
  """Two 3x3 convolutions (32, 64), one pool, a hidden layer (128), dropout.

  1,626,442 parameters on 32x32x3 and ten classes.

  Args:
    input_shape: (height, width, channels) of one example, at least 6x6.
    num_classes: C.
    dropout: None means 0.25 after the convolutions and 0.5 after the hidden
      layer. Training needs a key unless it is 0.
    width: Multiplies channels and hidden units, rounded down, at least 1.
    norm: Norm policy after the convolutions.
    init: How kernels and biases are drawn, a key of `layers.INITS`; the
      default is that of Keras, in which the net was published.

  Returns:
    A `BlockModel`: `conv1`, `conv2`, `hidden`, `head`.

  Raises:
    ValueError: For an unknown norm or init, a dropout outside [0, 1), a width
      that is not positive, or images that are too small.
  """
  check_policy(norm)
  layers.check_init(init)
  if dropout is not None:
    between(0, 1, below=True, dropout=dropout)
  if min(input_shape[:2]) < 6:
    raise ValueError(
        'Model dropout_cnn needs images of at least 6x6, got '
        f'{input_shape[0]}x{input_shape[1]}.'
    )
  sizes = [layers.scale_channels(n, width) for n in (32, 64, 128)]
  early, late = (0.25, 0.5) if dropout is None else (dropout, dropout)
  head = layers.Linear(num_classes, kernel_init=layers.INITS[init].head)
  blocks = (
      Block('conv1', ConvUnit(sizes[0], norm, 3, False, 0.0, init)),
      Block('conv2', ConvUnit(sizes[1], norm, 3, True, early, init)),
      Block('hidden', Hidden(sizes[2], late, init)),
      Block('head', head),
  )
  return BlockModel('dropout_cnn', blocks, input_shape, num_classes, (1, 3))
