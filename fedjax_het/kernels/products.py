"""Passes of a convolution as matrix products: gemm, cropped, rows.

All functions take `x` [B, H, W, I], `w` [h, w, I, O] and `dy` [B, H', W', O].
"""

import math

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_het.kernels import taps as taps_lib
from fedjax_het.kernels.matmul_dtype import dot
from fedjax_het.kernels.taps import Geometry

# Concatenated slices above this size do not fit into a CPU's cache.
LARGE_BYTES = 8 << 20
# 'rows' processes as many images at once as fit into a core's cache.
_CACHED_BYTES = 256 << 10


def gemm_forward(x, w, geometry: Geometry, precision) -> jax.Array:
  """'gemm': the convolution, [B, H', W', O]."""
  kernel = w.reshape((-1, w.shape[3]))
  return dot(taps_lib.join_taps(x, geometry), kernel, (3,), (0,), precision)


def cropped_forward(x, w, geometry: Geometry, precision) -> jax.Array:
  """'cropped': the convolution, [B, H', W', O]."""
  sizes = x.shape[1:3]
  outs, ins = zip(*taps_lib.tap_windows(geometry, sizes), strict=True)
  return _cropped(x, w, ins, outs, 0, geometry.out_sizes(sizes), precision)


# The gradients of the input contract the last axis of the kernel to avoid a
# transpose. On small maps a transpose moves more bytes than everything else.


def gemm_d_input(dy, w, sizes, geometry: Geometry, precision) -> jax.Array:
  """'gemm': gradient of the input, [B, H, W, I]."""
  num_in = w.shape[2]
  grads = dot(dy, w.reshape((-1, w.shape[3])), (3,), (1,), precision)

  def pick(i, grads):
    return grads[..., i * num_in : (i + 1) * num_in]

  return taps_lib.add_taps(pick, [grads], geometry, sizes)


def cropped_d_input(dy, w, sizes, geometry: Geometry, precision) -> jax.Array:
  """'cropped': gradient of the input, [B, H, W, I]; with strides 'gemm'."""
  if geometry.strides != (1, 1):
    return gemm_d_input(dy, w, sizes, geometry, precision)
  outs, ins = zip(*taps_lib.tap_windows(geometry, sizes), strict=True)
  return _cropped(dy, w, outs, ins, 1, sizes, precision)


def gemm_d_weight(x, dy, geometry: Geometry, precision) -> jax.Array:
  """'gemm': gradient of the kernel, [h, w, I, O]."""
  num_features = math.prod(geometry.kernel) * x.shape[3]
  num_bytes = math.prod(dy.shape[:3]) * num_features * x.dtype.itemsize
  # Large slices depend on `dy`, so that the forward pass does not store them.
  after = None if num_bytes <= LARGE_BYTES else dy[0, 0, 0, 0]
  patches = taps_lib.join_taps(x, geometry, after)
  dw = dot(patches, dy, (0, 1, 2), (0, 1, 2), precision)
  return dw.reshape((*geometry.kernel, x.shape[3], dy.shape[3]))


def cropped_d_weight(x, dy, geometry: Geometry, precision) -> jax.Array:
  """'cropped': gradient of the kernel, [h, w, I, O]."""
  dw = jnp.stack([
      dot(x[:, *ins], dy[:, *outs], (0, 1, 2), (0, 1, 2), precision)
      for outs, ins in taps_lib.tap_windows(geometry, x.shape[1:3])
  ])
  return dw.reshape((*geometry.kernel, x.shape[3], dy.shape[3]))


def rows_d_weight(x, dy, geometry: Geometry, precision) -> jax.Array:
  """'rows': gradient of the kernel, [h, w, I, O]; with strides 'gemm'."""
  if geometry.strides != (1, 1):
    return gemm_d_weight(x, dy, geometry, precision)

  def part(x, dy):
    rows, grads = taps_lib.row_taps(x, dy, geometry)
    # Transposes the gradients once instead of the rows of every tap.
    grads = lax.optimization_barrier(grads.T)
    return jnp.stack([dot(grads, r, (1,), (0,), precision) for r in rows])

  dw = taps_lib.sum_over_parts(part, x, dy, _CACHED_BYTES)
  dw = dw.reshape((*geometry.kernel, dy.shape[3], x.shape[3]))
  return dw.swapaxes(2, 3)


def _cropped(a, w, sources, targets, axis, sizes, precision):
  """Multiplies the source window of each tap by the kernel's `axis`.

  Each product is added to the target window of the result, [B, *sizes, C].
  """
  kernels = w.reshape((len(sources), *w.shape[2:]))
  parts = [
      (target, dot(a[:, *source], kernel, (3,), (axis,), precision))
      for source, target, kernel in zip(sources, targets, kernels, strict=True)
  ]
  return taps_lib.add_windows(parts, sizes)
