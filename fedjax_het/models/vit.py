"""Vision transformers: ViT-S with 8 to 12 blocks (FedIN), ViT-T/16 (FeDepth).

Pre-norm encoder, class token, learned positions, GELU, no dropout. The blocks
are `embed`, `encoder00`, ..., `token` (final norm, then the class token alone)
and `head`. For FedIN the extractor is `embed` and `encoder00`, so that s_in
is all tokens [T, D], and s_out is the classifier's input, the class token [D].

References:
  Dosovitskiy et al., `An Image is Worth 16x16 Words
  <https://arxiv.org/abs/2010.11929>`_, 2020.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.kernels.matmul_dtype import dot_general
from fedjax_het.models import layers
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.norm import LayerNorm
from fedjax_het.models.pretrained import load_vit
from fedjax_het.models.slices import Cut, Slices
from fedjax_het.options import at_least, one_of

# Initialiser of position embeddings; `init` does not affect it.
_POSITION = layers.truncated_normal(0.02)
# Attention heads of ViT-S, of ViT-T, and of a ViT for small images and CPUs.
HEADS = {'s': 6, 't': 3, 'mini': 1}
HEAD_DIM = 64  # Features of a head, in every published size.


def _dense(x, features, name, init):
  """A dense layer on the last axis of `x`, drawn by a key of `layers.INITS`."""
  scheme = layers.INITS[init]
  return nn.Dense(
      features,
      kernel_init=scheme.kernel,
      bias_init=scheme.bias(x.shape[-1]),
      name=name,
      dot_general=dot_general,
  )(x)


def _attention(q, k, v):
  """softmax(q k^T / sqrt(d)) v of [B, T, heads, d]."""
  # Heads before tokens: XLA's products are faster on contiguous matrices.
  q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
  scores = jnp.einsum('bhqd,bhkd->bhqk', q, k) / q.shape[-1] ** 0.5
  y = jnp.einsum('bhqk,bhkd->bhqd', jax.nn.softmax(scores), v)
  return y.swapaxes(1, 2)


class Embed(nn.Module):
  """A class token, then patches as tokens, plus learned positions.

  The patch projection equals a convolution whose stride is its kernel size:
  `patch/kernel` is the HWIO kernel reshaped to [P * P * C, D].

  Attributes:
    dim: D.
    patch: P, height and width of a patch.
    scheme: How kernels and biases are drawn, a key of `layers.INITS`.
  """

  slices = Slices(
      ('dim',), dict(patch=('*', 'y'), token=('*', 'y'), position=('*', 'y'))
  )

  dim: int
  patch: int
  scheme: str = 'truncated'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, H, W, C] -> [B, 1 + (H / P) * (W / P), D]."""
    del train, mask
    batch, height, width, channels = x.shape
    p, rows, cols = self.patch, height // self.patch, width // self.patch
    x = x.reshape((batch, rows, p, cols, p, channels))
    x = x.transpose((0, 1, 3, 2, 4, 5)).reshape((batch, rows * cols, -1))
    x = _dense(x, self.dim, 'patch', self.scheme)
    token = self.param('token', nn.initializers.zeros, (1, 1, self.dim))
    token = jnp.broadcast_to(token, (batch, 1, self.dim))
    x = jnp.concatenate([token, x], axis=1)
    return x + self.param('position', _POSITION, (1, *x.shape[1:]))


def _attention_sets(cut: Cut) -> dict[str, np.ndarray]:
  """Sets of the attention: the same coordinates in every head.

  Args:
    cut: An `EncoderBlock` and its narrow copy.

  Returns:
    {'heads': set of the heads' outputs, 'qkv': set of the projection's
    outputs}.
  """
  heads, size = cut.full.heads, cut.full.head_dim
  inside = cut.index_of(size, cut.small.head_dim)
  places = (np.arange(heads)[:, None] * size + inside[None]).reshape(-1)
  qkv = np.arange(3)[:, None] * heads * size + places[None]
  return dict(heads=places, qkv=qkv.reshape(-1))


class EncoderBlock(nn.Module):
  """x += attention(norm(x)); x += mlp(norm(x)).

  Attributes:
    heads: Attention heads. The MLP has 4 * D units.
    head_dim: Features of a head; None means D / heads, which must be an
      integer.
    scheme: How kernels and biases are drawn, a key of `layers.INITS`.
  """

  slices = Slices(
      ('head_dim',),
      dict(
          norm1=('x', 'x'),
          qkv=('x', 'qkv'),
          out=('heads', 'x'),
          norm2=('x', 'x'),
          mlp1=('x', 'h'),
          mlp2=('h', 'x'),
      ),
      sets=_attention_sets,
  )

  heads: int
  head_dim: int | None = None
  scheme: str = 'truncated'

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, T, D] -> [B, T, D]."""
    del train, mask
    batch, tokens, dim = x.shape
    head_dim = self.head_dim or dim // self.heads
    inner = self.heads * head_dim
    qkv = LayerNorm(name='norm1')(x)
    qkv = _dense(qkv, 3 * inner, 'qkv', self.scheme)
    qkv = qkv.reshape((batch, tokens, 3, self.heads, head_dim))
    y = _attention(*(qkv[:, :, i] for i in range(3)))
    y = y.reshape((batch, tokens, inner))
    x += _dense(y, dim, 'out', self.scheme)
    y = _dense(LayerNorm(name='norm2')(x), 4 * dim, 'mlp1', self.scheme)
    y = jax.nn.gelu(y, approximate=False)
    return x + _dense(y, dim, 'mlp2', self.scheme)


class Token(nn.Module):
  """The final norm of the class token."""

  slices = Slices((), dict(norm=('x', 'x')))

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """[B, T, D] -> [B, D]."""
    del train, mask
    return LayerNorm(name='norm')(x[:, 0])


def vit(
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    depth: int,
    variant: str,
    patch: int | None = None,
    width: float = 1.0,
    head_dim: int = HEAD_DIM,
    init: str = 'truncated',
    pretrained: str | None = None,
) -> BlockModel:
  """ViT-S (6 heads, 384 features), ViT-T (3 heads, 192) or mini (1 head, 64).

  Args:
    input_shape: (height, width, channels) of one example.
    num_classes: C.
    depth: Number of encoder blocks.
    variant: 's', 't' or 'mini'.
    patch: Height and width of a patch; None means 16 for images of at least
      64 pixels and 4 below.
    width: Multiplies the heads, rounded down, at least 1.
    head_dim: Features of an attention head.
    init: How kernels and biases are drawn, a key of `layers.INITS`; the
      default is that of published vision transformers.
    pretrained: Path of an AugReg checkpoint to start from; see `pretrained`.

  Returns:
    A `BlockModel`; a net of fewer blocks holds a subset of its leaves.

  Raises:
    ValueError: For an unknown variant or init, a depth, width or `head_dim`
      that is not positive, a patch that does not divide the image, or a
      checkpoint of another architecture.
    FileNotFoundError: If there is no checkpoint at that path.
  """
  one_of('variant', variant, HEADS)
  layers.check_init(init)
  at_least(1, depth=depth, head_dim=head_dim)
  height, width_pixels, _ = input_shape
  if patch is None:
    patch = 16 if min(height, width_pixels) >= 64 else 4
  at_least(1, patch=patch)
  if height % patch or width_pixels % patch:
    raise ValueError(
        f'patch={patch} must divide the height and width of the images, '
        f'{height}x{width_pixels}.'
    )
  heads = layers.scale_channels(HEADS[variant], width)
  blocks = [Block('embed', Embed(head_dim * heads, patch, init))]
  blocks += [
      Block(f'encoder{i:02d}', EncoderBlock(heads, head_dim, init))
      for i in range(depth)
  ]
  head = layers.Linear(num_classes, kernel_init=layers.INITS[init].head)
  blocks += [Block('token', Token()), Block('head', head)]
  cut = (2, len(blocks) - 1)
  model = BlockModel(
      f'vit_{variant}{depth}', tuple(blocks), input_shape, num_classes, cut
  )
  if pretrained is None:
    return model
  values = load_vit(
      pretrained, model.abstract_variables.params, (heads, head_dim)
  )
  return dataclasses.replace(model, pretrained=values)
