"""Convolutions of oneDNN, the CPU library that PyTorch uses.

jaxlib for Linux x86-64 includes oneDNN and the custom call
`__onednn$convolution`, but its XLA compiler does not emit that call. This
module emits it. On thin layers it is faster than XLA's
convolutions and matrix products, also on several threads and inside loops
(`python -m benchmarks.lowerings`).

The custom call is internal to XLA. An invalid configuration crashes the
process, and JAX's persistent compilation cache does not support the call. So it
is used only where a model says so (`kernels.lowering.using_conv_backend`), with
tested versions of jaxlib, and not while that cache is in use
(`no_compilation_cache`).

`kernels.libraries` is the only place that registers this module.
"""

from collections.abc import Iterator
import contextlib
import functools
import json
import math
import platform

import jax
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import jaxlib.version

from fedjax_het.kernels import products
from fedjax_het.kernels.materialise import apart
from fedjax_het.kernels.taps import Geometry, crop_images, sum_over_parts

# Versions of jaxlib for which `tests/kernels/test_onednn.py` passed.
TESTED = ('0.10.0', '0.10.1', '0.10.2')
_TARGET = '__onednn$convolution'
# The gradient of the kernel is computed in parts of this many bytes of images.
_PART_BYTES = 2 << 20
# The gradient of the kernel is faster from this many input channels.
_MANY_IN = 6


def why_not() -> str | None:
  """The reason why oneDNN is unavailable in this process, or None."""
  if jax.default_backend() != 'cpu':
    return f'oneDNN computes on CPUs, not on {jax.default_backend()}'
  machine = platform.system(), platform.machine()
  if machine != ('Linux', 'x86_64'):
    return f'jaxlib has oneDNN on Linux x86_64, not on {" ".join(machine)}'
  version = jaxlib.version.__version__
  if version not in TESTED:
    return (
        f'oneDNN inside jaxlib was tested with versions {", ".join(TESTED)}, '
        f'not with {version}'
    )
  return None


def check() -> None:
  """Raises ValueError if oneDNN is unavailable."""
  reason = why_not()
  if reason:
    raise ValueError(
        f"conv_backend='onednn' is not possible: {reason}. Leave it at 'xla'."
    )


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
  """A context in which compiled programs are not cached on disk."""
  folder = jax.config.jax_compilation_cache_dir

  def choose(path):
    jax.config.update('jax_compilation_cache_dir', path)
    compilation_cache.reset_cache()  # Otherwise it keeps its first folder.

  choose(None)
  try:
    yield
  finally:
    choose(folder)


def _check_cache() -> None:
  """Raises ValueError if JAX's persistent compilation cache is in use."""
  # jax_enable_compilation_cache=False is not enough: it does not stop a cache
  # that was in use before.
  folder = jax.config.jax_compilation_cache_dir
  if folder:
    raise ValueError(
        "Programs with oneDNN's convolutions cannot be stored in jax's "
        f'compilation cache, which is in use ({folder}): leave '
        'jax_compilation_cache_dir unset, or enter '
        'fedjax_het.kernels.onednn.no_compilation_cache().'
    )


def choose(
    lowering,
    patches_shape: tuple[int, int, int, int],
    strides: tuple[int, int],
    dtype,
    channels: tuple[int, int] | None,
):
  """Replaces the passes of a lowering for which oneDNN is faster.

  The thresholds are measured (`python -m benchmarks.lowerings`). oneDNN is used
  for float32 kernels of more than one tap: for the forward pass and, with
  strides of 1, the gradient of the input on maps of at least 4x4; for the
  gradient of the kernel on maps of at least 2x2, except for the few input
  channels of a stem.

  Args:
    lowering: The `Lowering` chosen without oneDNN.
    patches_shape: (B, H', W', h * w * I), all slices concatenated.
    strides: (vertical, horizontal).
    dtype: Dtype of the operands.
    channels: Input and output channels; None if unknown.

  Returns:
    The `Lowering`.
  """
  if channels is None or dtype != jnp.float32:
    return lowering
  if patches_shape[3] == channels[0]:  # A single tap.
    return lowering
  size, ways = min(patches_shape[1:3]), {}
  if size >= 4:
    ways['forward'] = 'onednn'
    if tuple(strides) == (1, 1):
      ways['d_input'] = 'onednn'
  if size >= 2 and channels[0] >= _MANY_IN:
    ways['d_weight'] = 'onednn'
  return lowering._replace(**ways)


def forward(
    x: jax.Array, w: jax.Array, geometry: Geometry, precision=None
) -> jax.Array:
  """The convolution; falls back to 'gemm' for dtypes other than float32.

  Args:
    x: [B, H, W, I].
    w: [h, w, I, O].
    geometry: Geometry of the convolution.
    precision: Precision of 'gemm'.

  Returns:
    [B, H', W', O].
  """
  if x.dtype != jnp.float32:
    return products.gemm_forward(x, w, geometry, precision)
  return _convolve(x, w, geometry.strides, geometry.padding, (1, 1))


def d_input(
    dy: jax.Array,
    w: jax.Array,
    sizes: tuple[int, int],
    geometry: Geometry,
    precision=None,
) -> jax.Array:
  """The gradient of the input: a convolution with the flipped kernel.

  Falls back to 'gemm' with strides and for dtypes other than float32.

  Args:
    dy: [B, H', W', O].
    w: [h, w, I, O].
    sizes: (H, W) of the input.
    geometry: Geometry of the convolution.
    precision: Precision of 'gemm'.

  Returns:
    [B, H, W, I].
  """
  if dy.dtype != jnp.float32 or geometry.strides != (1, 1):
    return products.gemm_d_input(dy, w, sizes, geometry, precision)
  padding = tuple(
      (k - 1 - low, n - out + low)
      for n, out, k, (low, _) in zip(
          sizes, dy.shape[1:3], geometry.kernel, geometry.padding, strict=True
      )
  )
  w = jnp.flip(w, (0, 1)).swapaxes(2, 3)
  return _convolve(dy, w, (1, 1), padding, (1, 1))


def d_weight(
    x: jax.Array, dy: jax.Array, geometry: Geometry, precision=None
) -> jax.Array:
  """The gradient of the kernel, as a three-dimensional convolution.

  Falls back to 'gemm' for dtypes other than float32.

  Args:
    x: [B, H, W, I].
    dy: [B, H', W', O].
    geometry: Geometry of the convolution.
    precision: Precision of 'gemm'.

  Returns:
    [h, w, I, O].
  """
  if x.dtype != jnp.float32:
    return products.gemm_d_weight(x, dy, geometry, precision)

  def gradient(x, dy):
    return sum_over_parts(
        lambda x, dy: _d_weight(x, dy, geometry), x, dy, _PART_BYTES
    )

  # `gradient` transposes its operands; XLA would compute them again there.
  return apart(gradient, x, dy)


def _d_weight(x, dy, geometry):
  """`d_weight` of one part of the batch.

  dw[a, b, i, o] = sum_{n, r, c} x[n, s r + a, s c + b, i] dy[n, r, c, o] is a
  convolution with output position (a, b, i): the images n are its channels, dy
  is its kernel with taps (r, c), the strides s are its dilation, and the input
  channels i are a third spatial axis.
  """
  padding = tuple(
      (low, stride * (out - 1) + k - n - low)
      for n, out, k, stride, (low, _) in zip(
          x.shape[1:3], dy.shape[1:3], *geometry, strict=True
      )
  )
  # Transposes images as a matrix, which is fast in XLA.
  images = x.reshape((len(x), -1)).T.reshape((1, *x.shape[1:], len(x)))
  kernel = dy.transpose((1, 2, 0, 3))[:, :, None]
  ones = (1, 1, 1)
  padding = (*padding, (0, 0))
  return _convolve(images, kernel, ones, padding, (*geometry.strides, 1))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _convolve(x, w, strides, padding, dilation):
  """[B, *sizes, I], [*kernel, I, O] -> [B, *sizes', O], any rank."""
  check()
  _check_cache()
  x, padding = crop_images(x, padding)
  sizes = tuple(
      (n + low + high - (k - 1) * step - 1) // stride + 1
      for n, k, stride, (low, high), step in zip(
          x.shape[1:-1], w.shape, strides, padding, dilation
      )
  )
  shape = (len(x), *sizes, w.shape[-1])
  out = jax.ShapeDtypeStruct(shape, x.dtype)
  if not math.prod(shape) or not x.size:
    return jnp.zeros(shape, x.dtype)
  call = jax.ffi.ffi_call(
      _TARGET,
      out,
      custom_call_api_version=2,
      legacy_backend_config=_message(w.shape, strides, padding, dilation),
      vmap_method='sequential',
  )
  return call(x, w)


def _convolve_fwd(x, w, strides, padding, dilation):
  return _convolve(x, w, strides, padding, dilation), (x, w)


def _convolve_bwd(strides, padding, dilation, residuals, dy):
  """For second derivatives only; `conv` defines the first ones."""
  spatial = 'XYZ'[: len(strides)]
  dims = (f'N{spatial}C', f'{spatial}IO', f'N{spatial}C')

  # Pads or crops first; see `crop_images`.
  sides = [(0, 0, 0), *((low, high, 0) for low, high in padding), (0, 0, 0)]

  def native(x, w):
    return lax.conv_general_dilated(
        lax.pad(x, jnp.zeros((), x.dtype), sides),
        w,
        strides,
        'VALID',
        rhs_dilation=dilation,
        dimension_numbers=dims,
    )

  return jax.vjp(native, *residuals)[1](dy)


_convolve.defvjp(_convolve_fwd, _convolve_bwd)


def _message(kernel, strides, padding, dilation) -> str:
  """XLA's OneDnnConvolutionConfig as JSON, with 64-bit integers as strings."""

  def texts(numbers):
    return [str(n) for n in numbers]

  rank = len(kernel)
  dims, spatial = str(rank), texts(range(1, rank - 1))
  data = {'batch_dim': '0', 'feature_dim': str(rank - 1)}
  images = {'dims': dims, 'data': data | {'spatial_dims': spatial}}
  taps = {
      'input_feature_dim': str(rank - 2),
      'output_feature_dim': str(rank - 1),
      'spatial_dims': texts(range(rank - 2)),
  }
  window = {
      'size': texts(kernel[:-2]),
      'pad_left': texts(low for low, _ in padding),
      'pad_right': texts(high for _, high in padding),
      'strides': texts(strides),
      'window_dilations': texts(dilation),
  }
  config = {
      'dims': dims,
      'input': images,
      'kernel': {'dims': dims, 'filter': taps},
      'output': images,
      'window': window,
      'feature_groups': '1',
  }
  return json.dumps({'onednn_conv_config': config})
