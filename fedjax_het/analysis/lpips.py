"""LPIPS, a learned distance between images, with parameters from a file.

It is the distance of AlexNet's features, v0.1 of the authors' package `lpips`.
The library includes no pretrained parameters. The user makes a file with those
of torchvision's AlexNet and of the package's `alex.pth`, under their own names:

  import numpy as np, torch
  weights = torch.load('alexnet-owt-7be5be79.pth') | torch.load('alex.pth')
  np.savez('lpips.npz', **{k: v.numpy() for k, v in weights.items()})

References:
  Zhang, Isola, Efros, Shechtman, Wang, `The Unreasonable Effectiveness of Deep
  Features as a Perceptual Metric <https://arxiv.org/abs/1801.03924>`_, CVPR
  2018.
"""

from collections.abc import Callable
import os
import zipfile

import jax
import jax.numpy as jnp
import numpy as np

# AlexNet's convolutions: name, kernel shape, stride, padding. Max pooling of 3
# with stride 2 precedes the second and the third.
_LAYERS = (
    ('features.0', (64, 3, 11, 11), 4, 2),
    ('features.3', (192, 64, 5, 5), 1, 2),
    ('features.6', (384, 192, 3, 3), 1, 1),
    ('features.8', (256, 384, 3, 3), 1, 1),
    ('features.10', (256, 256, 3, 3), 1, 1),
)
_POOLED = ('features.3', 'features.6')
# The package's normalisation of images in [-1, 1].
_SHIFT = np.array((-0.030, -0.088, -0.188), np.float32)[None, None, None]
_SCALE = np.array((0.458, 0.448, 0.450), np.float32)[None, None, None]
_SMALLEST = 32  # Smaller images would leave no pixel after pooling.


def read_lpips(
    path: str | os.PathLike,
) -> Callable[[jax.Array, jax.Array], np.ndarray]:
  """LPIPS with the parameters of a file.

  Args:
    path: An .npz file; see the module docstring.

  Returns:
    `(images, others) -> [N] float32`, for images [N, H, W, C] in [0, 1] with
    one channel or three; 0 for equal images. Sides below 32 pixels are enlarged
    to 32. The function raises ValueError for other shapes.

  Raises:
    FileNotFoundError: If there is no such file.
    ValueError: If it is not an .npz file, or an array is missing or has a wrong
      shape.
  """
  weights = _read(path)

  @jax.jit
  def distance(images, others):
    total = 0.0
    pairs = zip(
        _features(weights, images), _features(weights, others), strict=True
    )
    for i, (one, other) in enumerate(pairs):
      # Mean over pixels of w . (y - y0)^2, where y and y0 have unit length.
      share = weights[f'lin{i}.model.1.weight'].reshape(-1)
      squares = jnp.square(_unit(one) - _unit(other))
      total += jnp.mean(squares @ share, axis=(1, 2))
    return total

  def lpips(images, others):
    shape = np.shape(images)
    if len(shape) != 4 or shape[3] not in (1, 3) or shape != np.shape(others):
      raise ValueError(
          'LPIPS needs two equal batches [N, H, W, C] of one channel or three, '
          f'got shapes {shape} and {np.shape(others)}.'
      )
    return np.asarray(distance(_as_input(images), _as_input(others)))

  return lpips


def _as_input(images):
  images = jnp.asarray(images, jnp.float32)
  size = tuple(max(side, _SMALLEST) for side in images.shape[1:3])
  if size != images.shape[1:3]:
    shape = (len(images), *size, images.shape[3])
    images = jax.image.resize(images, shape, 'bilinear')
  images = jnp.broadcast_to(images, (*images.shape[:3], 3))
  return (2 * images - 1 - _SHIFT) / _SCALE


def _features(weights, x):
  """Outputs of AlexNet's five convolutions, each after its ReLU."""
  found = []
  for name, _, stride, padding in _LAYERS:
    if name in _POOLED:
      x = jax.lax.reduce_window(
          x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), 'VALID'
      )
    around = (padding, padding)
    x = jax.lax.conv_general_dilated(
        x, weights[f'{name}.weight'], (stride, stride), (around, around),
        dimension_numbers=('NHWC', 'OIHW', 'NHWC'),
    )  # fmt: skip
    x = jax.nn.relu(x + weights[f'{name}.bias'][None, None, None])
    found.append(x)
  return found


def _unit(features):
  norm = jnp.sqrt(jnp.sum(jnp.square(features), axis=-1, keepdims=True))
  return features / (norm + 1e-10)


def _read(path) -> dict[str, np.ndarray]:
  """Reads the arrays that LPIPS needs and checks their shapes."""
  expected = {}
  for i, (name, shape, _, _) in enumerate(_LAYERS):
    expected[f'{name}.weight'] = shape
    expected[f'{name}.bias'] = shape[:1]
    expected[f'lin{i}.model.1.weight'] = (1, shape[0], 1, 1)
  try:
    with np.load(path, allow_pickle=False) as file:
      missing = [name for name in expected if name not in file.files]
      if missing:
        raise ValueError(f'{path} has no array {missing[0]!r} of LPIPS.')
      arrays = {name: np.asarray(file[name]) for name in expected}
  except (zipfile.BadZipFile, EOFError, AttributeError, TypeError) as error:
    raise ValueError(f'{path} is no .npz file of LPIPS.') from error
  except ValueError as error:
    if 'LPIPS' in str(error):
      raise
    raise ValueError(f'{path} is no .npz file of LPIPS.') from error
  for name, shape in expected.items():
    if arrays[name].shape != shape:
      raise ValueError(
          f'{path}: {name!r} must have the shape {shape}, got '
          f'{arrays[name].shape}.'
      )
  return {name: value.astype(np.float32) for name, value in arrays.items()}
