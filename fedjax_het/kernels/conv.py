"""Convolution whose backward passes are fast in a loop.

On XLA's CPU backend the gradient of a native convolution with respect to its
kernel runs 20 to 40 times slower inside `scan`, `fori_loop` or `lax.map` than
outside (jax issue 12868), and a native convolution mapped over kernels
becomes a grouped one, which is slow too. `conv` has the signature of
`lax.conv_general_dilated` and a VJP of its own, so that each of its three
passes (forward, gradient of the input, gradient of the kernel) can be lowered
in one of these ways:

  'native': a convolution of XLA.
  'pairs': the same on half as wide a map, two neighbours' channels side by
    side: a third more work, but thin layers fill the vector units. It is
    'native' with strides other than 1 and where the width is odd.
  'slices': one matrix product per tap of the kernel, on a shifted slice of
    the input.
  'gemm': the shifted slices side by side, and one matrix product.
  'cropped': one matrix product per tap on those pixels that it does not take
    from the padding: on a 2x2 map a 3x3 kernel has 16 of 36 left. Its gradient
    of the input is that of 'slices' with strides other than 1.

  'onednn': a convolution of oneDNN (`onednn` says where there is one). Its
    gradient of the input is that of 'gemm' with strides other than 1.

and the gradient of the kernel in one more:

  'rows': one matrix product per tap on a run of pixels that is copied at once,
    a few images after the other, which stay in the cache; with strides other
    than 1 it is 'slices'.

The backward pass needs the input and the kernel only. XLA may recognise the
slices of the forward pass in those of the kernel's gradient and keep them in
between: that saves up to a quarter of the time of thin layers, and is allowed
up to 8 MB a layer.

A model uses it as `nn.Conv(..., conv_general_dilated=conv)`. Forward-mode
differentiation is not supported, reverse over reverse is.
"""

import functools
import math

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_het.kernels import onednn
from fedjax_het.kernels import taps as taps_lib
from fedjax_het.kernels.lowering import (
  LARGE_BYTES,
  Lowering,
  as_lowering,
  choose_lowering,
  forced_lowering,
)
from fedjax_het.kernels.matmul_dtype import dot, operand_dtype
from fedjax_het.kernels.taps import Geometry

_DIMS = ('NHWC', 'HWIO', 'NHWC')
# Images of which 'rows' takes as many at once as stay in a core's cache.
_CACHED_BYTES = 256 << 10
# Images whose kernel gradient 'onednn' takes at once.
_PART_BYTES = 2 << 20


def conv(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides=(1, 1),
    padding='SAME',
    lhs_dilation=None,
    rhs_dilation=None,
    dimension_numbers=None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type=None,
    *,
    lowering=None,
) -> jax.Array:
  """Convolves NHWC images with an HWIO kernel, like lax.conv_general_dilated.

  Dilated, grouped and other than two-dimensional NHWC / HWIO convolutions are
  handed to `lax.conv_general_dilated` as they are.

  Args:
    lhs: [B, H, W, I], floating.
    rhs: [h, w, I, O], of the same dtype.
    window_strides: (vertical, horizontal).
    padding: 'SAME', 'VALID' or ((low, high), (low, high)).
    lhs_dilation: As in `lax.conv_general_dilated`.
    rhs_dilation: As in `lax.conv_general_dilated`.
    dimension_numbers: As in `lax.conv_general_dilated`, but for images None
      means NHWC and HWIO.
    feature_group_count: As in `lax.conv_general_dilated`.
    batch_group_count: As in `lax.conv_general_dilated`.
    precision: Of the products.
    preferred_element_type: As in `lax.conv_general_dilated`.
    lowering: Overrides `conv_lowering` and `choose_lowering`.

  Returns:
    [B, H', W', O] of the dtype of the operands. Sums are float32 at least. In
    a context of `using_matmul_dtype` operands are rounded first, but on a CPU
    only those of layers whose passes are matrix products.

  Raises:
    ValueError: If the shapes do not fit or the lowering is unknown.
  """
  if lhs.ndim != rhs.ndim:
    raise ValueError(
        f'conv needs images and kernel of one rank, got {lhs.shape} and '
        f'{rhs.shape}.'
    )
  if dimension_numbers is None and lhs.ndim == 4:
    dimension_numbers = _DIMS
  if not (
      lhs.ndim == 4
      and lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
      == lax.conv_dimension_numbers(lhs.shape, rhs.shape, _DIMS)
      and feature_group_count == batch_group_count == 1
      and all(d == 1 for d in (*(lhs_dilation or ()), *(rhs_dilation or ())))
      and lhs.dtype == rhs.dtype
      and jnp.issubdtype(lhs.dtype, jnp.floating)
      and preferred_element_type in (None, lhs.dtype)
  ):
    return lax.conv_general_dilated(
        lhs,
        rhs,
        window_strides,
        padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
  if lhs.shape[3] != rhs.shape[2]:
    raise ValueError(
        f'conv: images {lhs.shape} have {lhs.shape[3]} channels, the kernel '
        f'{rhs.shape} wants {rhs.shape[2]}.'
    )
  sizes = lhs.shape[1:3]
  geometry = taps_lib.resolve_padding(
      padding, sizes, rhs.shape[:2], window_strides
  )
  busy, geometry = taps_lib.busy_taps(geometry, sizes)
  num_features = math.prod(geometry.kernel) * lhs.shape[3]
  lowering = as_lowering(
      lowering
      or forced_lowering()
      or choose_lowering(
          (lhs.shape[0], *geometry.out_sizes(sizes), num_features),
          geometry.strides,
          lhs.dtype,
          channels=rhs.shape[2:],
          padding_share=taps_lib.padding_share(geometry, sizes),
      )
  )
  if lhs.dtype != jnp.float32:
    lowering = Lowering(*('gemm' if w == 'onednn' else w for w in lowering))
  operands = operand_dtype(lhs.dtype)
  if jax.default_backend() == 'cpu' and not lowering.is_products:
    operands = lhs.dtype  # XLA's own convolutions would widen them again.
  return _conv(lhs, rhs[busy], geometry, lowering, precision, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _conv(x, w, geometry, lowering, precision, operands):
  return _conv_fwd(x, w, geometry, lowering, precision, operands)[0]


def _conv_fwd(x, w, geometry, lowering, precision, operands):
  dtype = x.dtype
  x, w = x.astype(operands), w.astype(operands)
  y = _forward(x, w, geometry, lowering.forward, precision)
  return y.astype(dtype), (x, w)


def _conv_bwd(geometry, lowering, precision, operands, residuals, dy):
  x, w = residuals
  sizes, dtype, dy = x.shape[1:3], dy.dtype, dy.astype(operands)
  d_x = _d_input(dy, w, sizes, geometry, lowering.d_input, precision)
  d_w = _d_weight(x, dy, geometry, lowering.d_weight, precision)
  return d_x.astype(dtype), d_w.astype(dtype)


_conv.defvjp(_conv_fwd, _conv_bwd)


def _sums(x):
  """What products of `x` are added up in."""
  return jnp.promote_types(x.dtype, jnp.float32)


def _patches(x, geometry, way, after=None):
  """The slices of all taps: apart for 'slices', side by side for 'gemm'."""
  if way != 'gemm':
    return taps_lib.slice_taps(x, geometry)
  return [taps_lib.join_taps(x, geometry, after)]


def _forward(x, w, geometry, way, precision):
  """[B, H, W, I], [h, w, I, O] -> [B, H', W', O]."""
  if way in ('native', 'pairs'):
    return _native(x, w, geometry, way, precision)
  if way == 'onednn':
    return onednn.forward(x, w, geometry)
  if way == 'cropped':
    sizes = x.shape[1:3]
    outs, ins = zip(*taps_lib.tap_windows(geometry, sizes), strict=True)
    return _cropped(x, w, ins, outs, 0, geometry.out_sizes(sizes), precision)
  patches = _patches(x, geometry, way)
  kernels = w.reshape((len(patches), -1, w.shape[3]))
  return sum(
      dot(patch, kernel, (3,), (0,), precision)
      for patch, kernel in zip(patches, kernels, strict=True)
  )


def _d_input(dy, w, sizes, geometry, way, precision):
  """Gradient of the input, [B, H, W, I]."""
  if way in ('native', 'pairs'):
    return _native_d_input(dy, w, sizes, geometry, way, precision)
  if way == 'onednn' and geometry.strides == (1, 1):
    return onednn.d_input(dy, w, sizes, geometry)
  # The kernel is contracted over its last axis, as it lies in memory:
  # turning it around would move more bytes than the rest where maps are small.
  num_in = w.shape[2]
  if way == 'cropped' and geometry.strides == (1, 1):
    outs, ins = zip(*taps_lib.tap_windows(geometry, sizes), strict=True)
    return _cropped(dy, w, outs, ins, 1, sizes, precision)
  if way in ('gemm', 'onednn'):
    arrays = [dot(dy, w.reshape((-1, w.shape[3])), (3,), (1,), precision)]

    def pick(i, grads):
      return grads[..., i * num_in : (i + 1) * num_in]

  else:
    arrays, kernels = [dy], w.reshape((-1, num_in, w.shape[3]))

    def pick(i, dy):
      return dot(dy, kernels[i], (3,), (1,), precision)

  return taps_lib.add_taps(pick, arrays, geometry, sizes)


def _cropped(a, w, sources, targets, axis, sizes, precision):
  """Each tap's part of `a` by its kernel's `axis`, added where it belongs."""
  kernels = w.reshape((len(sources), *w.shape[2:]))
  parts = [
      (target, dot(a[:, *source], kernel, (3,), (axis,), precision))
      for source, target, kernel in zip(sources, targets, kernels, strict=True)
  ]
  return taps_lib.add_windows(parts, sizes)


def _native(x, w, geometry, way, precision, dilation=(1, 1)):
  """A convolution of XLA; 'pairs' where the geometry allows it."""
  height, width, num_in, num_out = w.shape
  rows, cols = geometry.padding
  wide = x.shape[2] + sum(cols)
  fits = wide >= width > 2 and (wide - width) % 2 and width % 2
  if way == 'native' or not fits or (*geometry.strides, *dilation) != (1,) * 4:
    padding = geometry.padding
    if dilation == (1, 1):
      x, padding = taps_lib.crop_images(x, padding)
    return lax.conv_general_dilated(
        x,
        w,
        geometry.strides,
        padding,
        lhs_dilation=dilation,
        dimension_numbers=_DIMS,
        precision=precision,
        preferred_element_type=_sums(x),
    )
  x = taps_lib.pad_images(x, ((0, 0), cols), 0)
  x = x.reshape((*x.shape[:2], wide // 2, 2 * num_in))
  # From a pair of columns in to one out; the second one is a tap further.
  w = jnp.stack([jnp.pad(w, ((0, 0), (p, 1 - p), (0, 0), (0, 0)))
                 for p in (0, 1)], 3)  # fmt: skip
  shape = (height, (width + 1) // 2, 2 * num_in, 2 * num_out)
  y = lax.conv_general_dilated(
      x,
      w.reshape(shape),
      (1, 1),
      (rows, (0, 0)),
      dimension_numbers=_DIMS,
      precision=precision,
      preferred_element_type=_sums(x),
  )
  return y.reshape((*y.shape[:2], 2 * y.shape[2], num_out))


def _native_d_input(dy, w, sizes, geometry, way, precision):
  """One convolution of the output's gradient, dilated by the strides."""
  padding = []
  for axis, (n, out) in enumerate(zip(sizes, dy.shape[1:3], strict=True)):
    stride, k = geometry.strides[axis], geometry.kernel[axis]
    before = k - 1 - geometry.padding[axis][0]
    padding.append((before, n + k - 2 - before - stride * (out - 1)))
  adjoint = Geometry(geometry.kernel, (1, 1), tuple(padding))
  w = jnp.flip(w, (0, 1)).swapaxes(2, 3)
  return _native(dy, w, adjoint, way, precision, geometry.strides)


def _d_weight(x, dy, geometry, way, precision):
  """Gradient of the kernel, [h, w, I, O]."""
  if way == 'onednn':
    return _sum_of_parts(
        lambda x, dy: onednn.d_weight(x, dy, geometry), x, dy, _PART_BYTES
    )
  if way == 'rows' and geometry.strides == (1, 1):
    return _d_weight_by_rows(x, dy, geometry, precision)
  if way == 'native':
    out = lax.conv_general_dilated(
        x,
        dy,
        (1, 1),
        geometry.padding,
        rhs_dilation=geometry.strides,
        dimension_numbers=('CHWN', 'IHWO', 'HWNC'),
        precision=precision,
        preferred_element_type=_sums(x),
    )
    # Rows of the padded image that no output reaches would add taps.
    return out[: geometry.kernel[0], : geometry.kernel[1]]
  shape = (*geometry.kernel, x.shape[3], dy.shape[3])
  if way == 'cropped':
    dw = jnp.stack([
        dot(x[:, *ins], dy[:, *outs], (0, 1, 2), (0, 1, 2), precision)
        for outs, ins in taps_lib.tap_windows(geometry, x.shape[1:3])
    ])
    return dw.reshape(shape)
  num_features = math.prod(geometry.kernel) * x.shape[3]
  num_bytes = math.prod(dy.shape[:3]) * num_features * x.dtype.itemsize
  after = None if num_bytes <= LARGE_BYTES else dy[0, 0, 0, 0]
  dw = jnp.stack([
      dot(patch, dy, (0, 1, 2), (0, 1, 2), precision)
      for patch in _patches(x, geometry, way, after)
  ])
  return dw.reshape(shape)


def _d_weight_by_rows(x, dy, geometry, precision):
  """Of parts of the batch that stay in the cache while all taps are taken."""

  def part(x, dy):
    rows, grads = taps_lib.row_taps(x, dy, geometry)
    # The gradients are turned around once, not the rows of every tap.
    grads = lax.optimization_barrier(grads.T)
    return jnp.stack([dot(grads, r, (1,), (0,), precision) for r in rows])

  dw = _sum_of_parts(part, x, dy, _CACHED_BYTES)
  dw = dw.reshape((*geometry.kernel, dy.shape[3], x.shape[3]))
  return dw.swapaxes(2, 3)


def _sum_of_parts(fn, x, dy, num_bytes):
  """`fn(x, dy)`, a sum over examples, a part of the batch after the other."""
  batch = len(x)
  one = 4 * math.prod(x.shape[1:3]) * max(x.shape[3], dy.shape[3])
  # The largest divisor of the batch that fits; one image if none does.
  size = max(
      n for n in range(1, batch + 1)
      if batch % n == 0 and (n == 1 or n * one <= num_bytes)
  )  # fmt: skip
  if size == batch:
    return fn(x, dy)

  def part(i):
    return fn(*(lax.dynamic_slice_in_dim(a, i * size, size) for a in (x, dy)))

  return lax.fori_loop(1, batch // size, lambda i, t: t + part(i), part(0))
