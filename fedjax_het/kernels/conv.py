"""Convolution whose backward passes are fast in a loop.

On XLA's CPU backend the gradient of a native convolution with respect to its
kernel runs many times slower inside `scan`, `fori_loop` or `lax.map` than
outside (jax issue 12868). Under `vmap` over kernels, a native convolution
becomes a grouped convolution, which is also slow. `conv` has the signature of
`lax.conv_general_dilated` and a custom VJP. Each of its three passes (forward,
gradient of the input, gradient of the kernel) is lowered in one of these ways:

  'native': an XLA convolution.
  'gemm': one matrix product on the concatenated inputs of all taps (im2col).
  'strips' (not for the gradient of the input): one matrix product on strips
    of neighbouring outputs. A stem has so few channels that im2col copies
    more than it multiplies. Falls back to 'gemm' with strides.
  'cropped': one matrix product per tap, on the pixels for which the tap does
    not read padding. On a 2x2 map a 3x3 kernel reads 16 pixels of 36. With
    strides its gradient of the input falls back to 'gemm'.
  'rows' (gradient of the kernel only): one matrix product per tap, on
    contiguous rows of a few images that fit into the cache. Falls back to
    'gemm' with strides.
  'onednn': a oneDNN convolution (`kernels.onednn`). Falls back to 'gemm' for
    dtypes other than float32 and, for the gradient of the input, with strides.

The backward pass stores the input and the kernel only. XLA may reuse the slices
of the forward pass for the gradient of the kernel and store them in between.
That saves up to a quarter of the time of thin layers; it is prevented above
8 MB per layer.

A model uses it as `nn.Conv(..., conv_general_dilated=conv)`. Forward-mode
differentiation is not supported; reverse over reverse is, but for 'onednn'.
"""

import functools
import math

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_het.kernels import native, products, strips
from fedjax_het.kernels import taps as taps_lib
from fedjax_het.kernels.libraries import LIBRARIES
from fedjax_het.kernels.lowering import (
  as_lowering,
  choose_lowering,
  forced_lowering,
)
from fedjax_het.kernels.materialise import materialise
from fedjax_het.kernels.matmul_dtype import operand_dtype

# Forward passes: (x, w, geometry, precision) -> [B, H', W', O].
FORWARD = {
    'native': native.forward,
    'gemm': products.gemm_forward,
    'strips': strips.forward,
    'cropped': products.cropped_forward,
} | {name: library.forward for name, library in LIBRARIES.items()}
# Gradients of the input: (dy, w, sizes, geometry, precision) -> [B, H, W, I].
D_INPUT = {
    'native': native.d_input,
    'gemm': products.gemm_d_input,
    'cropped': products.cropped_d_input,
} | {name: library.d_input for name, library in LIBRARIES.items()}
# Gradients of the kernel: (x, dy, geometry, precision) -> [h, w, I, O].
D_WEIGHT = {
    'native': native.d_weight,
    'gemm': products.gemm_d_weight,
    'strips': strips.d_weight,
    'cropped': products.cropped_d_weight,
    'rows': products.rows_d_weight,
} | {name: library.d_weight for name, library in LIBRARIES.items()}
# Lowerings that XLA sees as reading each operand once; the others slice their
# operands tap by tap.
_READ_ONCE = frozenset(('native', *LIBRARIES))
# For kernels of more taps, operands are materialised before they are sliced. Up
# to nine taps, computing them again for each tap is not slower.
_FEW_TAPS = 9


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

  Calls `lax.conv_general_dilated` for dilated and grouped convolutions and for
  all that are not two-dimensional NHWC / HWIO convolutions.

  Args:
    lhs: [B, H, W, I], floating.
    rhs: [h, w, I, O], of the same dtype.
    window_strides: (vertical, horizontal).
    padding: 'SAME', 'VALID' or ((low, high), (low, high)).
    lhs_dilation: As in `lax.conv_general_dilated`.
    rhs_dilation: As in `lax.conv_general_dilated`.
    dimension_numbers: As in `lax.conv_general_dilated`, but None means NHWC and
      HWIO for images.
    feature_group_count: As in `lax.conv_general_dilated`.
    batch_group_count: As in `lax.conv_general_dilated`.
    precision: As in `lax.conv_general_dilated`.
    preferred_element_type: As in `lax.conv_general_dilated`.
    lowering: Overrides `conv_lowering` and `choose_lowering`.

  Returns:
    [B, H', W', O] of the dtype of the operands. Sums are in float32 or wider.
    Inside `using_matmul_dtype` operands are rounded first; on a CPU only if all
    passes of the layer are matrix products.

  Raises:
    ValueError: If the shapes do not match or the lowering is unknown.
  """
  if lhs.ndim != rhs.ndim:
    raise ValueError(
        f'conv needs images and kernel of one rank, got {lhs.shape} and '
        f'{rhs.shape}.'
    )
  if dimension_numbers is None and lhs.ndim == 4:
    dimension_numbers = native.DIMS
  if not (
      lhs.ndim == 4
      and lhs.shape[0]  # An empty batch has no parts to divide.
      and lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
      == lax.conv_dimension_numbers(lhs.shape, rhs.shape, native.DIMS)
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
  operands = operand_dtype(lhs.dtype)
  if jax.default_backend() == 'cpu' and not lowering.is_products:
    operands = lhs.dtype  # XLA's CPU convolutions would cast them back.
  return _conv(lhs, rhs[busy], geometry, lowering, precision, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _conv(x, w, geometry, lowering, precision, operands):
  return _conv_fwd(x, w, geometry, lowering, precision, operands)[0]


def _slices_often(geometry, *ways):
  """Whether one of these lowerings slices an operand for each of many taps."""
  many = math.prod(geometry.kernel) > _FEW_TAPS
  return many and not _READ_ONCE.issuperset(ways)


def _conv_fwd(x, w, geometry, lowering, precision, operands):
  dtype = x.dtype
  x, w = x.astype(operands), w.astype(operands)
  if _slices_often(geometry, lowering.forward, lowering.d_weight):
    x = materialise(x)
  y = FORWARD[lowering.forward](x, w, geometry, precision)
  return y.astype(dtype), (x, w)


def _conv_bwd(geometry, lowering, precision, operands, residuals, dy):
  x, w = residuals
  sizes, dtype, dy = x.shape[1:3], dy.dtype, dy.astype(operands)
  if _slices_often(geometry, lowering.d_input, lowering.d_weight):
    dy = materialise(dy)
  d_x = D_INPUT[lowering.d_input](dy, w, sizes, geometry, precision)
  if _slices_often(geometry, lowering.d_input):
    d_x = materialise(d_x)  # Else each tap of earlier pooling sums all taps.
  d_w = D_WEIGHT[lowering.d_weight](x, dy, geometry, precision)
  return d_x.astype(dtype), d_w.astype(dtype)


_conv.defvjp(_conv_fwd, _conv_bwd)
