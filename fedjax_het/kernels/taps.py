"""Shifted slices of images, one per tap of a kernel, and their adjoint.

A tap is one position of the kernel; a 3x3 kernel has nine.
"""

from collections.abc import Callable, Sequence
import itertools
import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp


class Geometry(NamedTuple):
  """Kernel size, strides and padding; (vertical, horizontal) each.

  Attributes:
    kernel: Kernel size.
    strides: Strides.
    padding: ((low, high), (low, high)); negative values crop.
  """

  kernel: tuple[int, int]
  strides: tuple[int, int]
  padding: tuple[tuple[int, int], tuple[int, int]]

  def out_sizes(self, sizes: tuple[int, int]) -> tuple[int, int]:
    """Output size for an image of `sizes`."""
    return tuple(
        (size + sum(padding) - kernel) // stride + 1
        for size, kernel, stride, padding in zip(sizes, *self, strict=True)
    )


def resolve_padding(padding, sizes, kernel, strides) -> Geometry:
  """The `Geometry` of a convolution; padding may be 'SAME' or 'VALID'.

  Raises:
    ValueError: If the kernel is larger than the padded image.
  """
  strides = tuple(strides)
  if isinstance(padding, str):
    padding = lax.padtype_to_pads(sizes, kernel, strides, padding)
  padding = tuple((int(low), int(high)) for low, high in padding)
  geometry = Geometry(tuple(kernel), strides, padding)
  if min(geometry.out_sizes(sizes)) < 1:
    raise ValueError(
        f'A kernel of {kernel[0]} x {kernel[1]} does not fit on an image of '
        f'{sizes[0]} x {sizes[1]} with the padding {padding}.'
    )
  return geometry


def busy_taps(
    geometry: Geometry, sizes: tuple[int, int]
) -> tuple[tuple[slice, slice], Geometry]:
  """Drops the outer taps that read only padding.

  A 3x3 'SAME' kernel on a 1x1 map uses its centre only, for example in the last
  stage of an ImageNet ResNet on 32x32 images.

  Args:
    geometry: Geometry of the whole kernel.
    sizes: (height, width) of the image.

  Returns:
    Slices of the kernel that keep the used taps, and the geometry of the
    sliced kernel.
  """
  kept, padding = [], []
  outs = geometry.out_sizes(sizes)
  for n, out, k, s, (low, high) in zip(sizes, outs, *geometry, strict=True):
    first = min(max(low - s * (out - 1), 0), k - 1)
    stop = max(min(n + low, k), first + 1)
    kept.append(slice(first, stop))
    padding.append((low - first, high - (k - stop)))
  kernel = tuple(part.stop - part.start for part in kept)
  return tuple(kept), Geometry(kernel, geometry.strides, tuple(padding))


Window = tuple[slice, slice]  # Rows and columns.


def tap_windows(
    geometry: Geometry, sizes: tuple[int, int]
) -> list[tuple[Window, Window]]:
  """The windows of input and output in which each tap does not read padding.

  Args:
    geometry: Geometry of the convolution.
    sizes: (height, width) of the image.

  Returns:
    (window of outputs, window of the inputs read for them) for each tap, in
    row-major order; empty windows for a tap that reads only padding.
  """
  axes = []
  outs = geometry.out_sizes(sizes)
  for n, out, k, s, (low, _) in zip(sizes, outs, *geometry, strict=True):
    pairs = []
    for tap in range(k):
      first = min(max(-(-(low - tap) // s), 0), out)
      stop = max(min((n - 1 + low - tap) // s + 1, out), first)
      begin = s * first + tap - low
      end = begin + s * (stop - first - 1) + 1 if stop > first else begin
      step = s if s > 1 else None
      pairs.append((slice(first, stop), slice(begin, end, step)))
    axes.append(pairs)
  return [
      ((rows[0], cols[0]), (rows[1], cols[1]))
      for rows, cols in itertools.product(*axes)
  ]


def padding_share(geometry: Geometry, sizes: tuple[int, int]) -> float:
  """The fraction of values read by all taps that is padding."""
  seen = sum(
      math.prod(part.stop - part.start for part in outs)
      for outs, _ in tap_windows(geometry, sizes)
  )
  total = math.prod(geometry.kernel) * math.prod(geometry.out_sizes(sizes))
  return 1 - seen / total if total else 0.0


def add_windows(
    parts: Sequence[tuple[Window, jax.Array]], sizes: tuple[int, int]
) -> jax.Array:
  """Sums arrays, each placed in a window of the result.

  Args:
    parts: (window without strides, [B, rows, columns, C]).
    sizes: (height, width) of the result.

  Returns:
    [B, H, W, C]; zero outside all windows.
  """
  whole = (slice(0, sizes[0]), slice(0, sizes[1]))
  parts = sorted(parts, key=lambda part: part[0] != whole)
  total, rest = parts[0][1], parts[1:]
  if parts[0][0] != whole:
    shape = (total.shape[0], *sizes, total.shape[3])
    total, rest = jnp.zeros(shape, total.dtype), parts
  for (rows, cols), part in rest:
    if part.size:
      old = total[:, rows, cols]
      begin = (0, rows.start, cols.start, 0)
      total = lax.dynamic_update_slice(total, old + part, begin)
  return total


def slice_taps(
    x: jax.Array, geometry: Geometry, pad_value=0
) -> list[jax.Array]:
  """The inputs that each tap reads.

  Args:
    x: [B, H, W, C].
    geometry: Geometry of the convolution.
    pad_value: Padding value.

  Returns:
    An array [B, H', W', C] for each tap, in row-major order.
  """
  rows = _shifts(pad_images(x, geometry.padding, pad_value), geometry, 0)
  return [tap for row in rows for tap in _shifts(row, geometry, 1)]


def row_taps(
    x: jax.Array, dy: jax.Array, geometry: Geometry
) -> tuple[list[jax.Array], jax.Array]:
  """The inputs that each tap reads, as contiguous slices of pixels.

  Flattens the padded images to one array of pixels. If the outputs are padded
  with zeros to the size of the padded images, the inputs of a tap are one
  contiguous slice of that array. Strides must be 1.

  Args:
    x: [B, H, W, C].
    dy: [B, H', W', O].
    geometry: Geometry of the convolution.

  Returns:
    An array [P, C] for each tap, in row-major order, and `dy` as [P, O], with
    P = B (H' + h - 1) (W' + w - 1).
  """
  height, width = geometry.kernel
  x = pad_images(x, geometry.padding, 0)
  stride = x.shape[2]
  reach = (height - 1) * stride + width - 1
  pixels = jnp.pad(x.reshape((-1, x.shape[3])), ((0, reach), (0, 0)))
  dy = pad_images(dy, ((0, height - 1), (0, width - 1)), 0)
  dy = dy.reshape((-1, dy.shape[3]))
  return [
      pixels[i * stride + j : i * stride + j + len(dy)]
      for i, j in itertools.product(range(height), range(width))
  ], dy


def join_taps(
    x: jax.Array, geometry: Geometry, after: jax.Array | None = None
) -> jax.Array:
  """The inputs that all taps read, concatenated (im2col).

  Slices and concatenates along one axis, then along the other. The copies are
  longer, and a 7x7 kernel needs 14 of them instead of 49.

  Args:
    x: [B, H, W, C].
    geometry: Geometry of the convolution.
    after: Dummy scalar dependency, or None. It prevents XLA from reusing an
      equal result computed earlier, which would stay in memory (on a CPU XLA
      ignores `optimization_barrier`). The result does not depend on its value,
      but NaN may propagate.

  Returns:
    [B, H', W', h * w * C].
  """
  (top, bottom), sides = geometry.padding
  spare = 0 if after is None else 1  # A row of padding that no tap reads.
  zero = 0 if after is None else jnp.minimum(jnp.abs(after), 0)
  x = pad_images(x, ((top, bottom + spare), sides), zero)
  for axis in (1, 0):
    parts = _shifts(x, geometry, axis, spare)
    x = jnp.concatenate(parts, axis=3) if len(parts) > 1 else parts[0]
  return x


def pad_images(x, padding, value):
  """Pads [B, H, W, C] by ((low, high), (low, high)) rows and columns."""
  if not any(itertools.chain(*padding)):
    return x
  config = ((0, 0, 0), *((low, high, 0) for low, high in padding), (0, 0, 0))
  return lax.pad(x, jnp.asarray(value, x.dtype), config)


def crop_images(
    x: jax.Array, padding: Sequence[tuple[int, int]]
) -> tuple[jax.Array, tuple[tuple[int, int], ...]]:
  """Applies negative padding by cropping the images.

  XLA's CPU convolution reads out of bounds if one side of an axis is cropped
  and the other side is padded.

  Args:
    x: [B, *sizes, C].
    padding: (low, high) for each spatial axis.

  Returns:
    The cropped images, and the padding with negative values set to 0.
  """
  crops = [(min(low, 0), min(high, 0), 0) for low, high in padding]
  if any(map(any, crops)):
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *crops, (0, 0, 0)])
  return x, tuple((max(low, 0), max(high, 0)) for low, high in padding)


def _shifts(x, geometry, axis, spare=0):
  """The shifted slices along one spatial axis, one per tap of that axis."""
  kernel, stride = geometry.kernel[axis], geometry.strides[axis]
  size = x.shape[1 + axis] - (0 if axis else spare)
  span = size - kernel - (size - kernel) % stride + 1
  return [
      lax.slice_in_dim(x, tap, tap + span, stride, 1 + axis)
      for tap in range(kernel)
  ]


def add_taps(
    pick: Callable[..., jax.Array],
    arrays: Sequence[jax.Array],
    geometry: Geometry,
    sizes: tuple[int, int],
) -> jax.Array:
  """The adjoint of `slice_taps` with zero padding: sums over taps.

  Only the taps i = r + stride * t read position q = stride * m + r of the
  padded image, for the outputs m - t. So the positions of one r (a phase) are a
  sum over taps of arrays shifted by whole outputs. The phases are interleaved
  at the end. This needs no dilation and no scatter. Shifts are slices of arrays
  that are padded once, because on a CPU padding each tap inside the sum is much
  slower.

  Args:
    pick: `(tap, *shifted arrays) -> [B, M, M', C]`, the contribution of a tap
      (its index in row-major order); zero for arrays of zeros.
    arrays: [B, H', W', ...].
    geometry: Geometry of the convolution.
    sizes: (height, width) of the image.

  Returns:
    [B, H, W, C].
  """
  kernel, strides, padding = geometry
  outs = geometry.out_sizes(sizes)
  # Along each axis: the first m and the number of m whose phases cover the
  # image, and the padding needed to slice the arrays for every tap.
  firsts, lengths, pads = [], [], []
  for n, out, k, s, (low, _) in zip(sizes, outs, *geometry, strict=True):
    firsts.append(low // s)
    lengths.append(-(-(low + n) // s) - firsts[-1])
    pads.append(((k - 1) // s - firsts[-1], firsts[-1] + lengths[-1] - out))
  padded = [
      lax.pad(
          a,
          jnp.zeros((), a.dtype),
          [(0, 0, 0), *((*pad, 0) for pad in pads), (0, 0, 0)],
      )
      for a in arrays
  ]

  def contribution(i, j):
    rows, cols = (
        slice((k - 1) // s - tap // s, (k - 1) // s - tap // s + length)
        for k, s, tap, length in zip(
            kernel, strides, (i, j), lengths, strict=True
        )
    )
    return pick(i * kernel[1] + j, *(a[:, rows, cols] for a in padded))

  phases = []
  for r, c in itertools.product(*map(range, strides)):
    meets = itertools.product(
        range(r, kernel[0], strides[0]), range(c, kernel[1], strides[1])
    )
    phases.append(sum(contribution(i, j) for i, j in meets))
  shape = (padded[0].shape[0], *lengths, phases[0].shape[3])
  x = phases[0]
  if len(phases) > 1:
    # A phase that no tap reads is the integer 0, the empty sum.
    phases = [jnp.broadcast_to(phase, shape) for phase in phases]
    x = jnp.stack([phase.astype(x.dtype) for phase in phases])
    x = x.reshape((*strides, *shape)).transpose((2, 3, 0, 4, 1, 5))
    x = x.reshape((shape[0], lengths[0] * strides[0], -1, shape[3]))
  top, left = (
      low - s * first
      for (low, _), s, first in zip(padding, strides, firsts, strict=True)
  )
  return x[:, top : top + sizes[0], left : left + sizes[1]]


def sum_over_parts(
    fn: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,
    dy: jax.Array,
    num_bytes: int,
) -> jax.Array:
  """Computes `fn(x, dy)`, a sum over examples, in parts of the batch.

  Args:
    fn: `(x, dy) -> array`, additive over examples.
    x: [B, H, W, C].
    dy: [B, H', W', O].
    num_bytes: Size limit of a part. A part has the largest divisor of B
      examples within it, but at least one.

  Returns:
    The sum over all parts.
  """
  batch = len(x)
  one = 4 * math.prod(x.shape[1:3]) * max(x.shape[3], dy.shape[3])
  size = max(
      n for n in range(1, batch + 1)
      if batch % n == 0 and (n == 1 or n * one <= num_bytes)
  )  # fmt: skip
  if size == batch:
    return fn(x, dy)

  def part(i):
    return fn(*(lax.dynamic_slice_in_dim(a, i * size, size) for a in (x, dy)))

  return lax.fori_loop(1, batch // size, lambda i, t: t + part(i), part(0))
