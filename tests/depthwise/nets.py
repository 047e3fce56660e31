"""A small PreResNet, and data for it."""

import jax.numpy as jnp
import numpy as np

from fedjax_het.data.federated import federate
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.layers import Linear
from fedjax_het.models.preresnet import NormPool, PreactBlock, PreStem


def small_preresnet(
    features=(2, 2, 4), *, size=8, channels=1, norm='batch_only', classes=3
):
  """A stem and one unit per entry of `features`; stride 2 where it changes."""
  blocks, last = [Block('stem', PreStem(features[0], norm=norm))], features[0]
  for i, width in enumerate(features):
    stride = 1 if width == last else 2
    blocks.append(Block(f'unit{i}', PreactBlock(width, stride, 'A', norm)))
    last = width
  blocks += [Block('pool', NormPool(norm=norm)), Block('head', Linear(classes))]
  shape = (size, size, channels)
  cut = (1, len(blocks) - 1)
  return BlockModel('small', tuple(blocks), shape, classes, cut)


def small_data(sizes=(6, 9, 4, 7), size=8, classes=3, seed=0):
  """Random images, brighter for higher classes, assigned to clients."""
  rng = np.random.default_rng(seed)
  labels = rng.integers(0, classes, sum(sizes))
  images = rng.integers(0, 120, (len(labels), size, size, 1))
  images = (images + 40 * labels[:, None, None, None]).astype(np.uint8)
  parts = np.split(np.arange(len(labels)), np.cumsum(sizes)[:-1])
  return federate(images, labels, parts, scale)


def scale(images, key=None):
  """Maps uint8 to [-1, 1]."""
  del key
  return images.astype(jnp.float32) / 127.5 - 1.0
