"""Convolutions of oneDNN, the library that PyTorch computes them with on CPUs.

jaxlib for Linux on x86-64 carries oneDNN and calls it when a program asks for
the custom call `__onednn$convolution`; XLA's own compiler asks for it in other
builds alone. On thin layers it is 1.5 to three times as fast as what XLA has,
on all threads, inside loops as well (`python -m benchmarks.lowerings`).

The interface is internal to XLA. A wrong message to it ends the process, and
programs that hold such a call cannot be stored: what jax's persistent cache of
compiled programs would make of one is undefined. So it is taken on request
alone (`kernels.lowering.using_conv_backend`), with versions of jaxlib that it
was tested with, and not while that cache is in use (`no_compilation_cache`).
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

from fedjax_het.kernels.taps import Geometry, crop_images

# Versions whose calls `tests/models/test_onednn.py` was run with.
TESTED = ('0.10.0', '0.10.1', '0.10.2')
_TARGET = '__onednn$convolution'


def why_not() -> str | None:
  """Why oneDNN cannot be called in this process; None if it can."""
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
  """Refuses what cannot be.

  Raises:
    ValueError: Where oneDNN cannot be called.
  """
  reason = why_not()
  if reason:
    raise ValueError(
        f"conv_backend='onednn' is not possible: {reason}. Leave it at 'xla'."
    )


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
  """Programs compiled inside are not stored, whoever has chosen a folder."""
  folder = jax.config.jax_compilation_cache_dir

  def choose(path):
    jax.config.update('jax_compilation_cache_dir', path)
    compilation_cache.reset_cache()  # It keeps the folder that it once used.

  choose(None)
  try:
    yield
  finally:
    choose(folder)


def _check_cache() -> None:
  """Raises ValueError while compiled programs would be stored."""
  # Switching the cache off by jax_enable_compilation_cache is not enough: one
  # that has been in use before goes on.
  folder = jax.config.jax_compilation_cache_dir
  if folder:
    raise ValueError(
        "Programs with oneDNN's convolutions cannot be stored in jax's "
        f'compilation cache, which is in use ({folder}): leave '
        'jax_compilation_cache_dir unset, or enter '
        'fedjax_het.kernels.onednn.no_compilation_cache().'
    )


def forward(x: jax.Array, w: jax.Array, geometry: Geometry) -> jax.Array:
  """A convolution.

  Args:
    x: [B, H, W, I], float32.
    w: [h, w, I, O], float32.
    geometry: Of the kernel.

  Returns:
    [B, H', W', O].
  """
  return _convolve(x, w, geometry.strides, geometry.padding, (1, 1))


def d_input(
    dy: jax.Array, w: jax.Array, sizes: tuple[int, int], geometry: Geometry
) -> jax.Array:
  """The gradient of the input: a convolution with the kernel turned around.

  Args:
    dy: [B, H', W', O], float32.
    w: [h, w, I, O], float32.
    sizes: (H, W) of the input.
    geometry: Of the kernel, with strides of 1.

  Returns:
    [B, H, W, I].
  """
  padding = tuple(
      (k - 1 - low, n - out + low)
      for n, out, k, (low, _) in zip(
          sizes, dy.shape[1:3], geometry.kernel, geometry.padding, strict=True
      )
  )
  w = jnp.flip(w, (0, 1)).swapaxes(2, 3)
  return _convolve(dy, w, (1, 1), padding, (1, 1))


def d_weight(x: jax.Array, dy: jax.Array, geometry: Geometry) -> jax.Array:
  """The gradient of the kernel, as a convolution in three dimensions.

  Its sum over images, rows and columns becomes one over the channels and the
  taps of another convolution: images are channels, the output's gradient is the
  kernel, and the input's channels stand side by side as a third dimension of
  the map. Steps of the kernel over the image become steps between taps.

  Args:
    x: [B, H, W, I], float32.
    dy: [B, H', W', O], float32.
    geometry: Of the kernel.

  Returns:
    [h, w, I, O].
  """
  padding = tuple(
      (low, stride * (out - 1) + k - n - low)
      for n, out, k, stride, (low, _) in zip(
          x.shape[1:3], dy.shape[1:3], *geometry, strict=True
      )
  )
  # Turned over as a matrix, which XLA does fast.
  images = x.reshape((len(x), -1)).T.reshape((1, *x.shape[1:], len(x)))
  kernel = dy.transpose((1, 2, 0, 3))[:, :, None]
  ones = (1, 1, 1)
  padding = (*padding, (0, 0))
  return _convolve(images, kernel, ones, padding, (*geometry.strides, 1))[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _convolve(x, w, strides, padding, dilation):
  """[B, *sizes, I], [*taps, I, O] -> [B, *sizes', O], in any dimensions."""
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
  """For gradients of gradients alone: `conv` has backward passes of its own."""
  spatial = 'XYZ'[: len(strides)]
  dims = (f'N{spatial}C', f'{spatial}IO', f'N{spatial}C')

  # Padded or cropped first: see `crop_images`.
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
  """XLA's OneDnnConvolutionConfig, as JSON; 64-bit integers are strings."""

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
