"""Passes of a convolution as XLA convolutions: 'native'.

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
  return _transposed(dy, w, sizes, geometry, precision)


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
  # Padded rows and columns that no output reads give extra taps; drop these.
  return out[: geometry.kernel[0], : geometry.kernel[1]]


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


def _transposed(dy, w, sizes, geometry, precision):
  """The gradient of the input: convolves `dy`, dilated by the strides."""
  padding = []
  for axis, (n, out) in enumerate(zip(sizes, dy.shape[1:3], strict=True)):
    stride, k = geometry.strides[axis], geometry.kernel[axis]
    before = k - 1 - geometry.padding[axis][0]
    padding.append((before, n + k - 2 - before - stride * (out - 1)))
  adjoint = Geometry(geometry.kernel, (1, 1), tuple(padding))
  w = jnp.flip(w, (0, 1)).swapaxes(2, 3)
  return _convolve(dy, w, adjoint, precision, geometry.strides)
