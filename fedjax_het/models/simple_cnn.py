"""Small CNNs: simple-CNN of NIID-Bench and MOON, and the CNN with dropout.

The latter is what adaptive federated optimisation trains on EMNIST, and on
CIFAR-10 the net of pfl-research's comparison of simulators.

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

from collections.abc import Callable
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.models import layers
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.norm import check_policy, norm_layer
from fedjax_het.models.pooling import max_pool


def glorot_uniform(key, shape, dtype=jnp.float32):
  """Uniform of variance 2 / (fan-in + fan-out), Keras' default."""
  fan_in, fan_out = (math.prod(shape) // n for n in (shape[-1], shape[-2]))
  return layers.uniform_fan_in((fan_in + fan_out) / 6)(key, shape, dtype)


class ConvUnit(nn.Module):
  """A convolution without padding, norm, ReLU, 2x2 max-pool, dropout.

  Attributes:
    features: Output channels.
    norm: Norm policy.
    kernel: Height and width of the kernel.
    pool: Whether to pool.
    dropout: Probability of dropping a number in training.
    kernel_init: None means uniform as in PyTorch, for the bias too; the bias
      starts at zero with any other initialiser.
  """

  features: int
  norm: str = 'none'
  kernel: int = 5
  pool: bool = True
  dropout: float = 0.0
  kernel_init: Callable[..., jax.Array] | None = None

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> [B, H', W', features], H' = (H - kernel + 1) (// 2)."""
    uniform = layers.uniform_fan_in(self.kernel**2 * x.shape[3])
    x = layers.conv_layer(
        self.features,
        self.kernel,
        'conv',
        padding=0,
        use_bias=True,
        kernel_init=self.kernel_init or uniform,
        bias_init=nn.initializers.zeros if self.kernel_init else uniform,
    )(x)
    x = jax.nn.relu(norm_layer(self.norm, 'norm')(x, train, mask))
    x = max_pool(x, (2, 2), (2, 2)) if self.pool else x
    return nn.Dropout(self.dropout, deterministic=not train)(x)


class Hidden(nn.Module):
  """Flatten, linear, ReLU, dropout; attributes as those of `ConvUnit`."""

  features: int
  dropout: float = 0.0
  kernel_init: Callable[..., jax.Array] | None = None

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, ...] -> [B, features]."""
    del mask
    x = x.reshape((x.shape[0], -1))
    linear = layers.Linear(
        self.features, kernel_init=self.kernel_init, name='linear'
    )
    x = jax.nn.relu(linear(x))
    return nn.Dropout(self.dropout, deterministic=not train)(x)


class Projection(nn.Module):
  """MOON's projection head: linear, ReLU, linear."""

  features: int = 256

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, D] -> [B, features]."""
    del train, mask
    x = jax.nn.relu(layers.Linear(x.shape[1], name='linear1')(x))
    return layers.Linear(self.features, name='linear2')(x)


def simple_cnn(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    projection: bool = False,
    width: float = 1.0,
    norm: str = 'none',
) -> BlockModel:
  """Two 5x5 convolutions (6, 16) and two hidden layers (120, 84).

  Args:
    input_shape: (height, width, channels) of one example, at least 16x16.
    num_classes: C.
    projection: Whether MOON's head 84 -> 84 -> 256 precedes the classifier;
      the representation z is then the input of the last block, as without.
    width: Multiplies channels and hidden units (not the 256 of the
      projection), rounded down, at least 1.
    norm: Norm policy; one of NIID-Bench's variants puts batch norm behind
      the convolutions.

  Returns:
    A `BlockModel`: `conv1`, `conv2`, `hidden1`, `hidden2`, (`projection`,)
    `head`.

  Raises:
    ValueError: For an unknown norm, a width that is not positive, or images
      that are too small.
  """
  check_policy(norm)
  if min(input_shape[:2]) < 16:
    raise ValueError(
        'Model simple_cnn needs images of at least 16x16, got '
        f'{input_shape[0]}x{input_shape[1]}.'
    )
  sizes = [layers.scale_channels(n, width) for n in (6, 16, 120, 84)]
  blocks = [
      Block('conv1', ConvUnit(sizes[0], norm)),
      Block('conv2', ConvUnit(sizes[1], norm)),
      Block('hidden1', Hidden(sizes[2])),
      Block('hidden2', Hidden(sizes[3])),
  ]
  if projection:
    blocks.append(Block('projection', Projection()))
  blocks.append(Block('head', layers.Linear(num_classes)))
  cut = (1, len(blocks) - 1)
  return BlockModel('simple_cnn', tuple(blocks), input_shape, num_classes, cut)


def dropout_cnn(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    dropout: float | None = None,
    width: float = 1.0,
    norm: str = 'none',
) -> BlockModel:
  """Two 3x3 convolutions (32, 64), one pool, a hidden layer (128), dropout.

  1,626,442 parameters on 32x32x3 and ten classes.

  Args:
    input_shape: (height, width, channels) of one example, at least 6x6.
    num_classes: C.
    dropout: None means 0.25 behind the convolutions and 0.5 behind the hidden
      layer. Training needs a key unless it is 0.
    width: Multiplies channels and hidden units, rounded down, at least 1.
    norm: Norm policy behind the convolutions.

  Returns:
    A `BlockModel`: `conv1`, `conv2`, `hidden`, `head`.

  Raises:
    ValueError: For an unknown norm, a dropout outside [0, 1), a width that is
      not positive, or images that are too small.
  """
  check_policy(norm)
  if dropout is not None and not 0 <= dropout < 1:
    raise ValueError(f'dropout={dropout} must lie in [0, 1).')
  if min(input_shape[:2]) < 6:
    raise ValueError(
        'Model dropout_cnn needs images of at least 6x6, got '
        f'{input_shape[0]}x{input_shape[1]}.'
    )
  sizes = [layers.scale_channels(n, width) for n in (32, 64, 128)]
  early, late = (0.25, 0.5) if dropout is None else (dropout, dropout)
  init = glorot_uniform
  blocks = (
      Block('conv1', ConvUnit(sizes[0], norm, 3, False, 0.0, init)),
      Block('conv2', ConvUnit(sizes[1], norm, 3, True, early, init)),
      Block('hidden', Hidden(sizes[2], late, init)),
      Block('head', layers.Linear(num_classes, kernel_init=init)),
  )
  return BlockModel('dropout_cnn', blocks, input_shape, num_classes, (1, 3))
