"""Chooses how each pass of a convolution is lowered; see `conv`."""

import contextlib
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.kernels.auto import auto_choice
from fedjax_het.kernels.libraries import LIBRARIES
from fedjax_het.kernels.products import LARGE_BYTES
from fedjax_het.names import check_name

_D_INPUT_WAYS = ('native', 'gemm', 'cropped', *LIBRARIES)
_FORWARD_WAYS = (*_D_INPUT_WAYS, 'strips')
_D_WEIGHT_WAYS = (*_FORWARD_WAYS, 'rows')
# 'cropped' is faster from this share of padding, this many features of the
# concatenated slices and this many multiplications per tap. Its products are
# smaller, which is slower for thin layers, small batches and several threads.
_MUCH_PADDING = 0.5
_WIDE = 512
_LARGE_PRODUCT = 1 << 21
# Up to these input and output channels, forward passes on large enough maps
# use 'strips' (the stem).
_THIN = (4, 16)
# Up to these input channels, gradients of the kernel use 'strips'. Alone they
# are faster for up to 16, but 'gemm' shares its slices with the forward pass.
_THIN_IN = 6
# With fewer bytes of concatenated slices, 'strips' is not faster.
_LEAST_STRIPS = 900 << 10
# With strides, forward passes with fewer input channels are native.
_MANY = 64


class Lowering(NamedTuple):
  """How each pass of a convolution is lowered."""

  forward: str
  d_input: str
  d_weight: str

  @property
  def is_products(self) -> bool:
    """Whether all passes are matrix products."""
    return all(way in ('gemm', 'strips', 'cropped') for way in self)


_forced = jax.make_user_context(default_value=None)


def as_lowering(lowering) -> Lowering:
  """Converts 'gemm' to ('gemm', 'gemm', 'gemm') and checks the names.

  Raises:
    ValueError: If a name is unknown, or there are not one or three names.
  """
  ways = (lowering,) * 3 if isinstance(lowering, str) else tuple(lowering)
  if len(ways) != 3:
    raise ValueError(
        'A lowering must be one name or three (forward, d_input, d_weight), '
        f'got {lowering!r}.'
    )
  known = (_FORWARD_WAYS, _D_INPUT_WAYS, _D_WEIGHT_WAYS)
  for name, way, ways_of_pass in zip(Lowering._fields, ways, known):
    check_name(f'lowering of {name}', way, ways_of_pass)
  return Lowering(*ways)


def conv_lowering(lowering) -> contextlib.AbstractContextManager:
  """A context that sets the lowering of every `conv` traced inside.

  It is local to the thread and part of the cache key of `jax.jit`, so a
  function is compiled again for another lowering. It can be entered inside or
  outside a jitted function. The engine enters it with 'gemm' to map clients
  with `vmap` on a CPU.

  Args:
    lowering: One of 'native', 'gemm', 'cropped', 'onednn'; a triple (forward,
      d_input, d_weight) of these, 'strips' (not in the middle) and 'rows'
      (third); or None for `choose_lowering`.

  Returns:
    A context manager.
  """
  return _forced(None if lowering is None else as_lowering(lowering))


def forced_lowering() -> Lowering | None:
  """The lowering of this thread's innermost `conv_lowering`, or None."""
  return _forced.value


_conv_backend = jax.make_user_context(default_value=None)


def using_conv_backend(library: str) -> contextlib.AbstractContextManager:
  """A context in which layers may call another library's convolutions.

  It is local to the thread and part of the cache key of `jax.jit`.

  Args:
    library: One of `libraries.CONV_BACKENDS`. 'onednn' uses oneDNN for the
      passes for which it is faster; 'xla' has no effect, so an outer context
      still holds.

  Returns:
    A context manager.
  """
  if library == 'xla':
    return contextlib.nullcontext()
  return _conv_backend(library)


def choose_lowering(
    patches_shape: tuple[int, int, int, int],
    strides: tuple[int, int] = (1, 1),
    dtype=jnp.float32,
    platform: str | None = None,
    *,
    channels: tuple[int, int] | None = None,
    padding_share: float = 0.0,
    conv_backend: str | None = None,
) -> Lowering:
  """The lowering of `conv` unless `conv_lowering` sets one.

  Accelerators use one way for all layers, see `kernels.auto`. A CPU uses:
  - 'gemm' in general. Native passes on maps below 8x8 can be much slower.
  - 'cropped' in wide layers in which most multiplications would be with
    padding, as on 2x2 maps.
  - For float32, maps of at least 8x8 and large slices: 'native' for the forward
    pass and the gradient of the input, and 'rows' for the gradient of the
    kernel. With strides only the forward pass of thin layers is native.
  - 'strips' in the forward pass of the stem and in the gradient of the kernel
    of thin layers, on maps of at least 8x8 with strides of 1.
  - Another library's passes, as its `choose` says, if `conv_backend` names one.

  Args:
    patches_shape: (B, H', W', h * w * I), all slices concatenated.
    strides: (vertical, horizontal).
    dtype: Dtype of the operands.
    platform: 'cpu', or another kind of device; None for the default device.
    channels: Input and output channels; None for many.
    padding_share: Fraction of all slices that is padding, 0 to 1.
    conv_backend: One of `libraries.CONV_BACKENDS`; None means the one of
      `using_conv_backend`.

  Returns:
    A `Lowering`.
  """
  way = auto_choice(platform).lowering
  if way != 'by_layer':
    return as_lowering(way)
  chosen = _choose_for_xla(
      patches_shape, tuple(strides) == (1, 1), dtype, channels, padding_share
  )
  library = LIBRARIES.get(conv_backend or _conv_backend.value)
  if library is None:
    return chosen
  return library.choose(chosen, patches_shape, strides, dtype, channels)


def _choose_for_xla(patches_shape, unit, dtype, channels, padding_share):
  """`choose_lowering` on a CPU without another library."""
  itemsize = jnp.dtype(dtype).itemsize
  size = math.prod(patches_shape) * itemsize
  wide_map = min(patches_shape[1:3]) >= 8
  num_in, num_out = channels or (math.inf, math.inf)
  # A kernel of one tap has nothing to share between neighbouring outputs.
  shared_taps = unit and patches_shape[3] > num_in
  strips = shared_taps and wide_map and size >= _LEAST_STRIPS
  stem = strips and num_in <= _THIN[0] and num_out <= _THIN[1]
  thin = strips and num_in <= _THIN_IN
  if size <= LARGE_BYTES or itemsize < 4 or not wide_map:
    pixels, wide = math.prod(patches_shape[:3]), patches_shape[3] >= _WIDE
    large = pixels * num_in * num_out >= _LARGE_PRODUCT
    if unit and wide and large and padding_share >= _MUCH_PADDING:
      return as_lowering('cropped')
    return Lowering(
        'strips' if stem else 'gemm',
        'gemm',
        'strips' if thin else 'gemm',
    )
  if unit:
    return Lowering(
        'strips' if stem else 'native', 'native', 'strips' if thin else 'rows'
    )
  return Lowering('native' if num_in < _MANY else 'gemm', 'gemm', 'gemm')
