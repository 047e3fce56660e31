"""simple-CNN, the LeNet form of NIID-Bench and MOON.

References:
  Li et al., `Federated Learning on Non-IID Data Silos
  <https://arxiv.org/abs/2102.02079>`_, 2022.
  Li et al., `Model-Contrastive Federated Learning
  <https://arxiv.org/abs/2103.16257>`_, 2021.
"""

import flax.linen as nn
import jax

from fedjax_het.models import layers
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.conv import max_pool
from fedjax_het.models.norm import check_policy, norm_layer


class ConvUnit(nn.Module):
  """A 5x5 convolution without padding, norm, ReLU, 2x2 max-pool."""

  features: int
  norm: str = 'none'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> [B, (H - 4) // 2, (W - 4) // 2, features]."""
    uniform = layers.uniform_fan_in(25 * x.shape[3])
    x = layers.conv_layer(
        self.features,
        5,
        'conv',
        padding=0,
        use_bias=True,
        kernel_init=uniform,
        bias_init=uniform,
    )(x)
    x = jax.nn.relu(norm_layer(self.norm, 'norm')(x, train, mask))
    return max_pool(x, (2, 2), (2, 2))


class Hidden(nn.Module):
  """Flatten, linear, ReLU."""

  features: int

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, ...] -> [B, features]."""
    del train, mask
    x = x.reshape((x.shape[0], -1))
    return jax.nn.relu(layers.Linear(self.features, name='linear')(x))


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
