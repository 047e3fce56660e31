"""A classifier of token ids: an embedding, convolutions over tokens, a mean.

Not from a paper; for short texts and other sequences of symbols. Without
convolutions it is the linear model of fastText. Shorter texts are padded with
an id whose vector is zero. Positions with all-zero vectors are ignored, as
after Keras' `Masking`, so a prediction does not depend on the length of the
padding.

References:
  Joulin et al., `Bag of Tricks for Efficient Text Classification
  <https://arxiv.org/abs/1607.01759>`_, 2017.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.kernels.conv import conv
from fedjax_het.models import layers
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.norm import check_policy, norm_layer
from fedjax_het.models.slices import Slices
from fedjax_het.options import at_least, integer_between

# Bounds the compilation time: each layer is compiled separately.
_DEEPEST = 1000
# Initialiser of the tokens' vectors.
_EMBEDDING = layers.truncated_normal(0.1)
_FEATURES = 32


def _tokens(x):
  """Which positions hold a token: [B, T, D] -> [B, T] bool."""
  return jnp.any(x != 0, axis=2)


class Embed(nn.Module):
  """Flatten, then a vector for each token.

  Attributes:
    vocabulary: V, how many token ids there are.
    features: D, size of a vector.
    padding: The id whose vector is zero; -1 for none.
  """

  slices = Slices(('features',), dict(embedding=('*', 'y')))

  vocabulary: int
  features: int
  padding: int = 0

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, ...] ids in 0..V-1 -> [B, T, D]; NaN for an id out of range."""
    del train, mask
    x = x.reshape((x.shape[0], -1)).astype(jnp.int32)
    shape = (self.vocabulary, self.features)
    vectors = self.param('embedding', _EMBEDDING, shape)
    found = vectors.at[x].get(
        mode='fill', fill_value=jnp.nan, wrap_negative_indices=False
    )
    if self.padding < 0:
      return found
    return jnp.where((x == self.padding)[..., None], 0, found)


class Conv(nn.Module):
  """A convolution over `span` tokens, norm of each token, ReLU."""

  slices = Slices(('features',), dict(conv=('x', 'y'), norm=('y', 'y')))

  features: int
  span: int = 3
  norm: str = 'none'
  scheme: str = 'he_fan_in'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, T, I] -> [B, T, features]; texts are padded with zeros."""
    init = layers.INITS[self.scheme]
    tokens = _tokens(x)
    # As an image of one row, because `kernels.conv` is faster in loops.
    x = nn.Conv(
        self.features,
        (1, self.span),
        kernel_init=init.kernel,
        bias_init=init.bias(self.span * x.shape[2]),
        conv_general_dilated=conv,
        name='conv',
    )(x[:, None])[:, 0]
    # Batch norm treats each token as an example.
    if mask is None:
      counts = tokens.reshape(-1)
    else:
      counts = tokens & mask.reshape((-1, 1))
      counts = counts.reshape((*mask.shape[:-1], -1))
    norm = norm_layer(self.norm, 'norm')
    y = norm(x.reshape((-1, self.features)), train, counts).reshape(x.shape)
    return jnp.where(tokens[..., None], jax.nn.relu(y), 0)


class Mean(nn.Module):
  """Mean over the tokens of a text."""

  slices = Slices()

  def __call__(self, x, train=False, mask=None):
    """[B, T, D] -> [B, D]; zeros where a text has no token."""
    del train, mask
    number = jnp.sum(_tokens(x), axis=1, keepdims=True)
    return jnp.sum(x, axis=1) / jnp.maximum(number, 1)


def text(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    depth: int = 1,
    vocabulary: int = 256,
    width: float = 1.0,
    span: int = 3,
    norm: str = 'none',
    init: str = 'he_fan_in',
    padding: int = 0,
) -> BlockModel:
  """An embedding, `depth` convolutions, the mean and a linear head.

  Args:
    input_shape: (T,), token ids of one text, an array of integers. Ids of any
      other shape are flattened.
    num_classes: C.
    depth: Convolutions over tokens: `conv1`, `conv2`, ...; 0 for none.
    vocabulary: V, how many ids there are: 0..V-1. 256 holds bytes.
    width: Multiplies the 32 numbers of a token's vector, rounded down.
    span: Tokens that a convolution sees.
    norm: Norm policy of the convolutions.
    init: How kernels are drawn, a key of `layers.INITS`; the default is ours.
    padding: The id that pads texts of fewer than T tokens, at either end; -1 if
      every id is a token.

  Returns:
    A `BlockModel`; a shallower net holds a subset of its leaves. FedIN's
    extractor is the embedding, so s_in holds the vectors of a text, [T, D].

  Raises:
    ValueError: If an option is out of range, or norm or init is unknown.
  """
  check_policy(norm)
  layers.check_init(init)
  integer_between(0, _DEEPEST, depth=depth)
  at_least(1, vocabulary=vocabulary, span=span)
  integer_between(-1, vocabulary - 1, padding=padding)
  features = layers.scale_channels(_FEATURES, width)
  layer = Conv(features, span, norm, init)
  blocks = [Block('embed', Embed(vocabulary, features, padding))]
  blocks += [Block(f'conv{i}', layer) for i in range(1, depth + 1)]
  head = layers.Linear(num_classes, kernel_init=layers.INITS[init].head)
  blocks += [Block('mean', Mean()), Block('head', head)]
  return BlockModel(
      f'text{depth}',
      tuple(blocks),
      input_shape,
      num_classes,
      (1, len(blocks) - 1),
      vocabulary=vocabulary,
  )
