"""Pretrained vision transformers from the published AugReg checkpoints.

The files are `.npz` archives with one array for each leaf of the authors'
Flax model. Files with a whole training state also hold the optimiser's leaves;
the model's names then follow a prefix such as 'opt/target/'. The head is not
loaded, because the clients' classes differ. The authors scale images to
[-1, 1], with mean and standard deviation 0.5.

References:
  Steiner et al., `How to train your ViT? Data, Augmentation, and
  Regularization in Vision Transformers <https://arxiv.org/abs/2106.10270>`_,
  2021; checkpoints by google-research/vision_transformer.
"""

from collections.abc import Mapping
import math
import os
from typing import Any

import jax
import numpy as np

from fedjax_het.names import shown

_NUMBER = 'Transformer/encoderblock_{}/'
_FIRST = 'embedding/kernel'  # The patch embedding, which every file has.
_PREFIXES = ('', 'opt/target/', 'target/', 'params/')


def load_vit(
    path: str | os.PathLike, shapes: Mapping[str, Any], heads: tuple[int, int]
) -> dict[str, Any]:
  """Reads the blocks of a vision transformer, all but its head.

  If the file has more encoder blocks than the model, the first ones are taken.
  Position embeddings for another number of patches are resized bilinearly,
  except for the class token's. A model of one channel gets the sum over the
  file's three channels.

  Args:
    path: An `.npz` file in the AugReg layout.
    shapes: {block name: tree of shapes}, the model's parameters.
    heads: The number of attention heads, and the features of each; parameters
      have the same shapes if they are divided into heads otherwise.

  Returns:
    {block name: parameters}, float32 arrays of those shapes.

  Raises:
    FileNotFoundError: If there is no such file.
    ValueError: If the file cannot be read or is of another architecture; the
      message names the first leaf that does not fit.
  """
  if os.path.exists(path) and not os.path.isfile(path):
    raise ValueError(f'{path} is no readable .npz file (no file at all).')
  try:
    with np.load(path, allow_pickle=False) as file:
      prefix = next((p for p in _PREFIXES if p + _FIRST in file), '')
      leaves = {
          name.removeprefix(prefix): np.asarray(file[name], np.float32)
          for name in file
          if name.startswith(prefix)
      }
  except FileNotFoundError:
    raise FileNotFoundError(
        f'No pretrained weights at {shown(str(path))}.'
    ) from None
  except Exception as e:  # Damaged files raise exceptions of many types.
    raise ValueError(
        f'{path} is no readable .npz file ({type(e).__name__}: '
        f'{" ".join(str(e).split())}).'
    ) from e
  for name, leaf in leaves.items():
    if not np.all(np.isfinite(leaf)):
      raise ValueError(f'{path}: {name} holds NaN or infinity.')
  blocks = {}
  for name in (name for name in shapes if name != 'head'):
    try:
      blocks[name] = _block(path, leaves, name, shapes[name], heads)
    except (IndexError, ValueError) as e:
      if str(path) in str(e):
        raise
      raise ValueError(
          f'{path} is of another architecture: {name} cannot be read ({e}).'
      ) from e
    _check(path, name, blocks[name], shapes[name])
  return blocks


def _block(path, leaves, name, shapes, heads):
  """The parameters of one block."""
  if name == 'embed':
    return _embed(path, leaves, shapes)
  if name == 'token':
    return {'norm': _norm(path, leaves, 'Transformer/encoder_norm')}
  number = int(name.removeprefix('encoder'))
  return _encoder_block(path, leaves, _NUMBER.format(number), heads)


def _take(path, leaves, name):
  if name not in leaves:
    raise ValueError(
        f'{path} lacks {name!r}: it is no vision transformer in the AugReg '
        'layout, or one of fewer blocks than the model.'
    )
  return leaves[name]


def _norm(path, leaves, name):
  return {leaf: _take(path, leaves, f'{name}/{leaf}')
          for leaf in ('scale', 'bias')}  # fmt: skip


def _dense(path, leaves, name, num_in):
  """A dense layer; the first `num_in` axes of its kernel are inputs."""
  kernel = _take(path, leaves, f'{name}/kernel')
  rows = math.prod(kernel.shape[:num_in])
  bias = _take(path, leaves, f'{name}/bias').reshape(-1)
  return {'kernel': kernel.reshape(rows, -1), 'bias': bias}


def _encoder_block(path, leaves, prefix, heads):
  attention = f'{prefix}MultiHeadDotProductAttention_1/'
  there = _take(path, leaves, f'{attention}query/kernel').shape[1:]
  if there != heads:
    raise ValueError(
        f'{path} is of another architecture: its attention has (heads, '
        f'features) {there}, and the model {heads}.'
    )
  qkv = [
      _dense(path, leaves, attention + name, 1)
      for name in ('query', 'key', 'value')
  ]
  return {
      'norm1': _norm(path, leaves, prefix + 'LayerNorm_0'),
      'qkv': {
          leaf: np.concatenate([part[leaf] for part in qkv], axis=-1)
          for leaf in ('kernel', 'bias')
      },
      'out': _dense(path, leaves, attention + 'out', 2),
      'norm2': _norm(path, leaves, prefix + 'LayerNorm_2'),
      'mlp1': _dense(path, leaves, prefix + 'MlpBlock_3/Dense_0', 1),
      'mlp2': _dense(path, leaves, prefix + 'MlpBlock_3/Dense_1', 1),
  }


def _embed(path, leaves, shapes):
  kernel = _take(path, leaves, _FIRST)  # [P, P, 3, D]
  if kernel.ndim == 4 and shapes['patch']['kernel'].shape[0] == math.prod(
      kernel.shape[:2]
  ):
    kernel = kernel.sum(axis=2, keepdims=True)
  name = 'Transformer/posembed_input/pos_embedding'
  position = _resize(_take(path, leaves, name), shapes['position'].shape[1])
  return {
      'patch': {
          'kernel': kernel.reshape(-1, kernel.shape[-1]),
          'bias': _take(path, leaves, 'embedding/bias'),
      },
      'token': _take(path, leaves, 'cls'),
      'position': position,
  }


def _resize(position, num_tokens):
  """Resizes [1, 1 + N, D] positions of a square grid to `num_tokens`."""
  if position.shape[1] == num_tokens:
    return position
  token, grid = position[:, :1], position[:, 1:]
  old, new = (math.isqrt(n - 1) for n in (position.shape[1], num_tokens))
  if old**2 + 1 != position.shape[1] or new**2 + 1 != num_tokens:
    raise ValueError(
        f'Positions of {position.shape[1] - 1} patches cannot be resized to '
        f'{num_tokens - 1}: both must be squares.'
    )
  grid = grid.reshape(1, old, old, -1)
  shape = (1, new, new, grid.shape[-1])
  grid = np.asarray(jax.image.resize(grid, shape, 'bilinear'))
  return np.concatenate([token, grid.reshape(1, new**2, -1)], axis=1)


def _check(path, block, got, want):
  """Raises ValueError if a block's shapes differ from the model's."""
  got = dict(jax.tree_util.tree_leaves_with_path(got))
  for place, leaf in jax.tree_util.tree_leaves_with_path(want):
    if got[place].shape != leaf.shape:
      name = block + jax.tree_util.keystr(place)
      raise ValueError(
          f'{path} is of another architecture: {name} is '
          f'{got[place].shape} there and {leaf.shape} in the model.'
      )
