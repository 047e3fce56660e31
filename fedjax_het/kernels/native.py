"""Passes of a convolution that XLA computes: 'native' and 'pairs'.

All functions take `x` [B, H, W, I], `w` [h, w, I, O] and `dy` [B, H', W', O].
"""

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_het.kernels import taps as taps_lib
from fedjax_het.kernels.taps import Geometry

DIMS = ('NHWC', 'HWIO', 'NHWC')


def forward(x, w, geometry: Geometry, precision) -> jax.Array:
  """'native': the convolution, [B, H', W', O]."""
  return _convolve(x, w, geometry, precision)


def d_input(dy, w, sizes, geometry: Geometry, precision) -> jax.Array:
  """'native': gradient of the input, [B, H, W, I]."""
  return _transposed(_convolve, dy, w, sizes, geometry, precision)


def d_weight(x, dy, geometry: Geometry, precision) -> jax.Array:
  """'native': gradient of the kernel, [h, w, I, O]."""
  out = lax.conv_general_dilated(
      x,
      dy,
      (1, 1),
      geometry.padding,
      rhs_dilation=geometry.strides,
      dimension_numbers=('CHWN', 'IHWO', 'HWNC'),
      precision=precision,
      preferred_element_type=_sum_dtype(x),
  )
  # Rows of the padded image that no output reads would add taps.
  return out[: geometry.kernel[0], : geometry.kernel[1]]


def pairs_forward(x, w, geometry: Geometry, precision) -> jax.Array:
  """'pairs': the convolution, [B, H', W', O]."""
  return _convolve_pairs(x, w, geometry, precision)


def pairs_d_input(dy, w, sizes, geometry: Geometry, precision) -> jax.Array:
  """'pairs': gradient of the input, [B, H, W, I]."""
  return _transposed(_convolve_pairs, dy, w, sizes, geometry, precision)


def _sum_dtype(x):
  return jnp.promote_types(x.dtype, jnp.float32)


def _convolve(x, w, geometry, precision, dilation=(1, 1)):
  """A convolution of `x`, dilated by `dilation`."""
  padding = geometry.padding
  if dilation == (1, 1):
    x, padding = taps_lib.crop_images(x, padding)
  return lax.conv_general_dilated(
      x,
      w,
      geometry.strides,
      padding,
      lhs_dilation=dilation,
      dimension_numbers=DIMS,
      precision=precision,
      preferred_element_type=_sum_dtype(x),
  )


def _convolve_pairs(x, w, geometry, precision, dilation=(1, 1)):
  """`_convolve` on half the width, with two columns' channels concatenated.

  Calls `_convolve` with strides or dilation, for odd padded widths, and for
  kernels of even width or of width 1.
  """
  height, width, num_in, num_out = w.shape
  rows, cols = geometry.padding
  wide = x.shape[2] + sum(cols)
  fits = wide >= width > 2 and (wide - width) % 2 and width % 2
  if not fits or (*geometry.strides, *dilation) != (1,) * 4:
    return _convolve(x, w, geometry, precision, dilation)
  x = taps_lib.pad_images(x, ((0, 0), cols), 0)
  x = x.reshape((*x.shape[:2], wide // 2, 2 * num_in))
  # Kernels from a pair of input columns to each output column of a pair; the
  # second output column is shifted by one tap.
  w = jnp.stack([jnp.pad(w, ((0, 0), (p, 1 - p), (0, 0), (0, 0)))
                 for p in (0, 1)], 3)  # fmt: skip
  shape = (height, (width + 1) // 2, 2 * num_in, 2 * num_out)
  y = lax.conv_general_dilated(
      x,
      w.reshape(shape),
      (1, 1),
      (rows, (0, 0)),
      dimension_numbers=DIMS,
      precision=precision,
      preferred_element_type=_sum_dtype(x),
  )
  return y.reshape((*y.shape[:2], 2 * y.shape[2], num_out))


def _transposed(convolve, dy, w, sizes, geometry, precision):
  """The gradient of the input: convolves `dy`, dilated by the strides."""
  padding = []
  for axis, (n, out) in enumerate(zip(sizes, dy.shape[1:3], strict=True)):
    stride, k = geometry.strides[axis], geometry.kernel[axis]
    before = k - 1 - geometry.padding[axis][0]
    padding.append((before, n + k - 2 - before - stride * (out - 1)))
  adjoint = Geometry(geometry.kernel, (1, 1), tuple(padding))
  w = jnp.flip(w, (0, 1)).swapaxes(2, 3)
  return convolve(dy, w, adjoint, precision, geometry.strides)
