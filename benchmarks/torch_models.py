"""The library's models in PyTorch: the same blocks, layers and names.

`mirror` reads the blocks of a library model, so only forward passes are written
here. Tensors are [B, C, H, W], as usual in PyTorch.
"""

from collections import OrderedDict
from collections.abc import Sequence
import math

import torch
from torch import nn
from torch.nn import functional

from benchmarks import torch_fedin
from fedjax_het.models import BlockModel
from fedjax_het.models import preresnet as pre
from fedjax_het.models.fedhe_cnn import Unit
from fedjax_het.models.layers import Flatten, GlobalPool, Linear
from fedjax_het.models.mlp import Layer
from fedjax_het.models.resnet import BasicBlock, Stem
from fedjax_het.models.simple_cnn import ConvUnit, Hidden
from fedjax_het.models.vit import Embed, EncoderBlock, Token


def _conv(num_in, num_out, kernel, stride=1, padding=None, bias=False):
  padding = kernel // 2 if padding is None else padding
  return nn.Conv2d(num_in, num_out, kernel, stride, padding, bias=bias)


def _norm(policy, channels, momentum=0.1, eps=1e-5):
  if policy == 'none':
    return nn.Identity()
  if policy == 'group':
    raise ValueError('Group norm is not mirrored.')
  return nn.BatchNorm2d(
      channels, eps, momentum, track_running_stats=policy == 'batch'
  )


class PreStem(nn.Module):

  def __init__(self, block: pre.PreStem, shape):
    super().__init__()
    bias = block.use_bias or (block.use_norm and block.norm == 'none')
    self.conv = _conv(shape[-1], block.features, 3, bias=bias)
    policy = block.norm if block.use_norm else 'none'
    self.norm = _norm(policy, block.features)

  def forward(self, x):
    return self.norm(self.conv(x))


class PreactBlock(nn.Module):

  def __init__(self, block: pre.PreactBlock, shape):
    super().__init__()
    num_in, num_out, stride = shape[-1], block.features, block.stride
    if block.shortcut != 'B':
      raise ValueError('Only shortcuts of type B are mirrored.')
    bias = block.norm == 'none'
    self.norm1 = _norm(block.norm, num_in)
    self.conv1 = _conv(num_in, num_out, 3, stride, bias=bias)
    self.norm2 = _norm(block.norm, num_out)
    self.conv2 = _conv(num_out, num_out, 3, bias=bias)
    self.conv_shortcut, self.preact = None, block.preact
    if stride > 1 or num_in != num_out:
      self.conv_shortcut = _conv(num_in, num_out, 1, stride, bias=bias)

  def forward(self, x):
    u = functional.relu(self.norm1(x))
    y = self.conv2(functional.relu(self.norm2(self.conv1(u))))
    if self.conv_shortcut is not None:
      return y + self.conv_shortcut(u)
    return y + (u if self.preact else x)


class NormPool(nn.Module):

  def __init__(self, block: pre.NormPool, shape):
    super().__init__()
    self.norm = None
    if block.use_norm:
      self.norm = _norm(block.norm, shape[-1])

  def forward(self, x):
    if self.norm is not None:
      x = functional.relu(self.norm(x))
    return x.mean((2, 3))


class FedHeUnit(nn.Module):
  """A unit of FedHe's CNNs, with Keras' norm defaults."""

  def __init__(self, block: Unit, shape):
    super().__init__()
    self.conv = _conv(
        shape[-1],
        block.features,
        block.kernel,
        block.stride,
        block.padding,
        bias=True,
    )
    self.norm = _norm(block.norm, block.features, momentum=0.01, eps=1e-3)
    self.dropout, self.pool = nn.Dropout(block.dropout), block.pool

  def forward(self, x):
    x = self.dropout(functional.relu(self.norm(self.conv(x))))
    if self.pool == 'valid':
      return functional.avg_pool2d(x, 2)
    if self.pool == 'same':  # Pads only after the last row and column.
      x = functional.avg_pool2d(x, 2, 1, 1, count_include_pad=False)
      return x[:, :, 1:, 1:]
    return x


class ValidConv(nn.Module):
  """Convolution without padding, norm or none, ReLU, pool, dropout."""

  def __init__(self, block: ConvUnit, shape):
    super().__init__()
    self.conv = _conv(
        shape[-1], block.features, block.kernel, padding=0, bias=True
    )
    self.norm = _norm(block.norm, block.features)
    self.dropout, self.pool = nn.Dropout(block.dropout), block.pool

  def forward(self, x):
    x = functional.relu(self.norm(self.conv(x)))
    return self.dropout(functional.max_pool2d(x, 2) if self.pool else x)


class Dense(nn.Module):
  """Flatten, linear, norm or none, ReLU, dropout or none."""

  def __init__(self, block: Hidden | Layer, shape):
    super().__init__()
    if getattr(block, 'norm', 'none') != 'none':
      raise ValueError('Dense layers are mirrored without norms only.')
    self.linear = nn.Linear(math.prod(shape), block.features)
    self.dropout = nn.Dropout(getattr(block, 'dropout', 0.0))

  def forward(self, x):
    return self.dropout(functional.relu(self.linear(x.flatten(1))))


class ResNetStem(nn.Module):
  """Convolution, norm, ReLU and, maybe, a 3x3 max-pool of stride 2."""

  def __init__(self, block: Stem, shape):
    super().__init__()
    bias = block.use_bias or block.norm == 'none'
    self.conv = _conv(
        shape[-1], block.features, block.kernel, block.stride, bias=bias
    )
    self.norm, self.pool = _norm(block.norm, block.features), block.pool

  def forward(self, x):
    x = functional.relu(self.norm(self.conv(x)))
    return functional.max_pool2d(x, 3, 2, 1) if self.pool else x


def _basic_block(block: BasicBlock, shape):
  if block.norm != 'batch' or block.shortcut != 'B':
    raise ValueError('Only batch norm and shortcuts of type B are mirrored.')
  return torch_fedin.BasicBlock(shape[-1], block.features, block.stride)


class EmbedPatches(nn.Module):
  """Patches as tokens behind a class token, plus positions."""

  def __init__(self, block: Embed, shape):
    super().__init__()
    height, width, channels = shape
    tokens = 1 + height // block.patch * (width // block.patch)
    self.patch = nn.Conv2d(channels, block.dim, block.patch, block.patch)
    self.token = nn.Parameter(torch.zeros(1, 1, block.dim))
    self.position = nn.Parameter(0.02 * torch.randn(1, tokens, block.dim))

  def forward(self, x):
    x = self.patch(x).flatten(2).transpose(1, 2)
    token = self.token.expand(len(x), -1, -1)
    return torch.cat([token, x], 1) + self.position


class Encoder(nn.Module):
  """x += attention(norm(x)); x += mlp(norm(x)), with exact GELU."""

  def __init__(self, block: EncoderBlock, shape):
    super().__init__()
    dim = shape[-1]
    self.heads = block.heads
    inner = block.heads * (block.head_dim or dim // block.heads)
    # Flax's default epsilon.
    self.norm1, self.norm2 = (nn.LayerNorm(dim, eps=1e-6) for _ in range(2))
    self.qkv, self.out = nn.Linear(dim, 3 * inner), nn.Linear(inner, dim)
    self.mlp1, self.mlp2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

  def forward(self, x):
    batch, tokens, _ = x.shape
    qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    x = x + self.out(y.reshape(batch, tokens, -1))
    return x + self.mlp2(functional.gelu(self.mlp1(self.norm2(x))))


class ClassToken(nn.Module):
  """The final norm of the class token."""

  def __init__(self, block: Token, shape):
    super().__init__()
    del block
    self.norm = nn.LayerNorm(shape[-1], eps=1e-6)

  def forward(self, x):
    return self.norm(x[:, 0])


def _linear(block: Linear, shape):
  return nn.Linear(shape[-1], block.features, bias=block.use_bias)


_MIRRORS = {
    pre.PreStem: PreStem,
    pre.PreactBlock: PreactBlock,
    pre.NormPool: NormPool,
    Unit: FedHeUnit,
    ConvUnit: ValidConv,
    Hidden: Dense,
    Layer: Dense,
    Stem: ResNetStem,
    BasicBlock: _basic_block,
    GlobalPool: lambda block, shape: nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ),
    Embed: EmbedPatches,
    EncoderBlock: Encoder,
    Token: ClassToken,
    Flatten: lambda block, shape: nn.Flatten(),
    Linear: _linear,
}


def mirror(model: BlockModel) -> nn.Sequential:
  """Converts a library model to PyTorch, in training mode.

  Args:
    model: A model with blocks of the types in `_MIRRORS`.

  Returns:
    The blocks by name, with PyTorch's initialisation.
  """
  shapes = (model.input_shape, *model.shapes)
  blocks = OrderedDict(
      (name, _MIRRORS[type(block)](block, shapes[i]))
      for i, (name, block) in enumerate(model.blocks)
  )
  return nn.Sequential(blocks)


def adapt(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
  """FeDepth's skip to the head; see `fedjax_het.depthwise.adapt`.

  Args:
    x: [B, C, H, W] or [B, D].
    shape: Input shape of the head, (H', W', C') or (D',); H' and W' divide H
      and W.

  Returns:
    [B, C', H', W'] or [B, D'].
  """
  if (*x.shape[2:], x.shape[1]) == tuple(shape):
    return x
  sides = [(0, 0)] * len(shape)
  for axis, size in enumerate(shape[:-1], 2):
    x = x[(slice(None),) * axis + (slice(None, None, x.shape[axis] // size),)]
  extra = shape[-1] - x.shape[1]
  sides[0] = (extra // 2, extra - extra // 2)
  # `pad` expects the last axis first.
  return functional.pad(x, [n for side in sides[::-1] for n in side])
