"""Which way each pass of a convolution is computed; `conv` says how."""

import contextlib
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Whose convolutions models may call on a CPU.
CONV_BACKENDS = ('xla', 'onednn')
_D_WEIGHT_WAYS = ('native', 'slices', 'gemm', 'cropped', 'onednn', 'rows')
_WAYS = ('native', 'pairs', 'slices', 'gemm', 'cropped', 'onednn')
# Slices larger than this do not fit into a CPU's cache.
LARGE_BYTES = 8 << 20
# 'cropped' pays from this share of padding, this many features of all slices,
# and as many multiplications a tap: its products are smaller, which costs thin
# layers, small batches, and several threads more than it saves.
_MUCH_PADDING = 0.5
_WIDE = 512
_LARGE_PRODUCT = 1 << 21
# Forward passes with as many channels in and out, or less, take 'pairs': those
# of the stem. With more, 'pairs' is faster on one thread, but not on two.
_THIN = (4, 16)
# With strides, forward passes of fewer channels in than this are native.
_MANY = 64
# oneDNN's gradient of the kernel pays from this many channels in.
_MANY_IN = 16


class Lowering(NamedTuple):
  """How each pass of a convolution is computed."""

  forward: str
  d_input: str
  d_weight: str

  @property
  def is_products(self) -> bool:
    """Whether all passes are matrix products of patches."""
    return all(way in ('slices', 'gemm', 'cropped') for way in self)


_forced = jax.make_user_context(default_value=None)


def as_lowering(lowering) -> Lowering:
  """Reads 'gemm' as ('gemm', 'gemm', 'gemm') and checks the names.

  Raises:
    ValueError: For a name that is not known.
  """
  out = (lowering,) * 3 if isinstance(lowering, str) else tuple(lowering)
  known = (_WAYS, _WAYS, _D_WEIGHT_WAYS)
  if len(out) != 3 or any(w not in ways for w, ways in zip(out, known)):
    raise ValueError(
        f'Unknown convolution lowering {lowering!r}; it must be one of '
        f'{_D_WEIGHT_WAYS[:5]} or three ways (forward, d_input, d_weight).'
    )
  return Lowering(*out)


def conv_lowering(lowering) -> contextlib.AbstractContextManager:
  """A context that forces how every `conv` traced inside is lowered.

  It belongs to the thread that enters it, may be entered inside or outside a
  jitted function, and is part of the key of `jax.jit`'s cache: a function
  that was compiled with another choice is compiled anew. An engine that maps
  clients with `vmap` on a CPU enters it with 'gemm'.

  Args:
    lowering: One of 'native', 'slices', 'gemm', 'cropped', 'onednn', a triple
      of these for (forward, d_input, d_weight) with 'pairs' and 'rows' where
      `conv` has them, or None for `choose_lowering`.

  Returns:
    A context manager.
  """
  return _forced(None if lowering is None else as_lowering(lowering))


def forced_lowering() -> Lowering | None:
  """What the innermost `conv_lowering` of this thread says."""
  return _forced.value


_conv_backend = jax.make_user_context(default_value=None)


def using_conv_backend(library: str) -> contextlib.AbstractContextManager:
  """A context in which layers may call another library's convolutions.

  It belongs to the thread that enters it and is part of the key of `jax.jit`'s
  cache.

  Args:
    library: One of `CONV_BACKENDS`. 'onednn' takes those of oneDNN where they
      are faster than XLA's and than matrix products; 'xla' wishes nothing: it
      leaves the wish of an outer context.

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
  """The lowering that `conv` takes when none is forced.

  On CPU these are matrix products: cropped ones in wide layers that would
  multiply padding most of the time, as on 2x2 maps, where they are 1.3 times
  faster on two threads and 1.9 on one; but for float32 convolutions with large
  maps and many slices, whose native forward pass and gradient of the input are
  some 1.3 times faster (with strides: the forward pass of thin layers alone),
  and the stem's forward pass twice in pairs of columns.
  Native passes on maps below 8x8 can be 20 times slower. GPU and TPU take
  native passes throughout, which is not measured.

  Where oneDNN may be taken, float32 kernels of several taps take it for the
  forward pass and, with strides of 1, the gradient of the input on maps from
  4x4, and for the gradient of the kernel from 2x2, unless few channels come in
  and slices are small (`python -m benchmarks.lowerings`).

  Args:
    patches_shape: (B, H', W', h * w * I), all slices side by side.
    strides: (vertical, horizontal).
    dtype: Of the operands.
    platform: 'cpu', 'gpu' or 'tpu'; None means `jax.default_backend()`.
    channels: In and out; None for many.
    padding_share: How much of all slices is padding, 0 to 1.
    conv_backend: Whose may be taken; None means what `using_conv_backend` says.

  Returns:
    A `Lowering`.
  """
  if (platform or jax.default_backend()) != 'cpu':
    return as_lowering('native')
  chosen = _choose_for_xla(
      patches_shape, tuple(strides) == (1, 1), dtype, channels, padding_share
  )
  conv_backend = conv_backend or _conv_backend.value
  if conv_backend != 'onednn' or channels is None or dtype != jnp.float32:
    return chosen
  if patches_shape[3] == channels[0]:  # A single tap.
    return chosen
  size, ways = min(patches_shape[1:3]), {}
  if size >= 4:
    ways['forward'] = 'onednn'
    if tuple(strides) == (1, 1):
      ways['d_input'] = 'onednn'
  large = math.prod(patches_shape) * 4 > LARGE_BYTES
  if size >= 2 and (channels[0] >= _MANY_IN or large):
    ways['d_weight'] = 'onednn'
  return chosen._replace(**ways)


def _choose_for_xla(patches_shape, unit, dtype, channels, padding_share):
  """`choose_lowering` on a CPU, where oneDNN is not asked for."""
  itemsize = jnp.dtype(dtype).itemsize
  size = math.prod(patches_shape) * itemsize
  if size <= LARGE_BYTES or itemsize < 4 or min(patches_shape[1:3]) < 8:
    pixels, wide = math.prod(patches_shape[:3]), patches_shape[3] >= _WIDE
    large = channels is None or pixels * math.prod(channels) >= _LARGE_PRODUCT
    much = unit and wide and large and padding_share >= _MUCH_PADDING
    return as_lowering('cropped' if much else 'gemm')
  if unit:
    thin = channels and all(n <= most for n, most in zip(channels, _THIN))
    return Lowering('pairs' if thin else 'native', 'native', 'rows')
  thin = channels is not None and channels[0] < _MANY
  return Lowering('native' if thin else 'gemm', 'gemm', 'gemm')
