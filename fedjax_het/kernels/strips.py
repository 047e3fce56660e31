"""Passes of a convolution as one product on strips of columns.

im2col copies h * w * I numbers for one output pixel. With few output channels
the product is small, and most of the time is spent on copies. Here a row of the
product is a strip: `s` neighbouring outputs of one row, computed from the
s + w - 1 columns that they read. The kernel becomes a banded matrix,

  [h * (s + w - 1) * I, s * O].

Compared with im2col, (s + w - 1) / w times as many numbers are multiplied, and
a factor of s w / (s + w - 1) fewer are copied. `python -m benchmarks.lowerings`
compares the two for the layers of a net.

All functions take `x` [B, H, W, I], `w` [h, w, I, O] and `dy` [B, H', W', O].
With strides other than 1 they fall back to 'gemm'.
"""

import math

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_het.kernels import products
from fedjax_het.kernels import taps as taps_lib
from fedjax_het.kernels.materialise import apart
from fedjax_het.kernels.matmul_dtype import dot
from fedjax_het.kernels.taps import Geometry

# Enough columns of the product for a CPU's vector units, and the maximum number
# of outputs of a strip.
_COLUMNS, _LONGEST = 24, 8


def forward(x, w, geometry: Geometry, precision) -> jax.Array:
  """'strips': the convolution, [B, H', W', O]."""
  if geometry.strides != (1, 1):
    return products.gemm_forward(x, w, geometry, precision)
  height, width = geometry.out_sizes(x.shape[1:3])
  length = _length(w.shape[3], width)
  strips = _strips(x, geometry, length)
  y = dot(strips, _banded(w, length), (3,), (0,), precision)
  return y.reshape((len(x), height, -1, w.shape[3]))[:, :, :width]


def d_weight(x, dy, geometry: Geometry, precision) -> jax.Array:
  """'strips': gradient of the kernel, [h, w, I, O]."""
  if geometry.strides != (1, 1):
    return products.gemm_d_weight(x, dy, geometry, precision)
  height, taps = geometry.kernel
  num_out, width = dy.shape[3], dy.shape[2]
  length = _length(num_out, width, least=2)
  num_strips = math.prod(dy.shape[:2]) * -(-width // length)
  num_features = height * (length + taps - 1) * x.shape[3]
  # As in 'gemm', large strips depend on `dy`, so that the forward pass does not
  # store them.
  small = num_strips * num_features * x.dtype.itemsize <= products.LARGE_BYTES
  after = None if small else dy[0, 0, 0, 0]
  strips = _strips(x, geometry, length, after)
  dy = taps_lib.pad_images(dy, ((0, 0), (0, -width % length)), 0)
  # Strips come second: a product that sums over rows transposes its first
  # operand.
  grads = apart(lambda dy: dy.reshape((num_strips, length * num_out)).T, dy)
  strips = strips.reshape((num_strips, num_features))
  dw = dot(grads, strips, (1,), (0,), precision)
  dw = dw.reshape((length, num_out, height, length + taps - 1, x.shape[3]))
  # Output t of a strip reads its columns t to t + w - 1.
  dw = sum(dw[t, :, :, t : t + taps] for t in range(length))
  return dw.transpose((1, 2, 3, 0))


def _length(num_out: int, width: int, least: int = 1) -> int:
  """Outputs of a strip, s: enough columns, and little padding beyond W'."""
  wanted = max(least, -(-_COLUMNS // max(num_out, 1)))
  wanted = max(1, min(wanted, _LONGEST, width))
  return -(-width // -(-width // wanted))


def _strips(x, geometry: Geometry, length: int, after=None) -> jax.Array:
  """The inputs of each strip, [B, H', ceil(W' / s), h * (s + w - 1) * I].

  See `taps.join_taps` for `after`.
  """
  height, taps = geometry.kernel
  rows, width = geometry.out_sizes(x.shape[1:3])
  num = -(-width // length)  # Strips in a row.
  span = length + taps - 1
  # Whole blocks of `length` columns, so that a strip consists of blocks.
  blocks = num - 1 + -(-span // length)
  low = geometry.padding[1][0]
  sides = low, blocks * length - x.shape[2] - low
  top, bottom = geometry.padding[0]
  spare = 0 if after is None else 1  # A row of padding that no strip reads.
  zero = 0 if after is None else jnp.minimum(jnp.abs(after), 0)
  x = taps_lib.pad_images(x, ((top, bottom + spare), sides), zero)
  x = x.reshape((*x.shape[:2], blocks, length * x.shape[3]))
  channels = x.shape[3] // length
  parts = [
      x[:, :, i : i + num, : min(length, span - i * length) * channels]
      for i in range(-(-span // length))
  ]
  x = jnp.concatenate(parts, axis=3)
  return jnp.concatenate([x[:, i : i + rows] for i in range(height)], axis=3)


def _banded(w, length: int) -> jax.Array:
  """[h * (s + w - 1) * I, s * O]; block t is `w` shifted by t image columns."""
  shifted = [
      lax.pad(
          w,
          jnp.zeros((), w.dtype),
          ((0, 0, 0), (t, length - 1 - t, 0), (0, 0, 0), (0, 0, 0)),
      )
      for t in range(length)
  ]
  return jnp.stack(shifted, 3).reshape((-1, length * w.shape[3]))
