"""Declares which channels of a module a narrow copy holds.

A module that can be narrowed has a class attribute `slices`:

    class Unit(nn.Module):
      slices = Slices(('features',), dict(conv=('x', 'y'), norm=('y', 'y')))
      features: int

Width-slicing methods read nothing else of a module, see `aggregation.slicing`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np


class Cut(NamedTuple):
  """One block and its narrow copy, for `Slices.sets`.

  Attributes:
    full: The module.
    small: Its narrow copy.
    params: Shapes of the parameters of `full`.
    small_params: Those of `small`.
    shape: Per-example input shape of `full`.
    x: [k] int, the channels of the input that reach `small`; None for all.
    index_of: `(size, kept) -> [kept] int`, which of `size` channels are kept.
  """

  full: nn.Module
  small: nn.Module
  params: Mapping[str, Any]
  small_params: Mapping[str, Any]
  shape: tuple[int, ...]
  x: Any
  index_of: Callable[[int, int], Any]


class Slices(NamedTuple):
  """How the modules of one class are narrowed.

  A set is an array of channel numbers. 'x' is the set of the input, 'y' that of
  the output, '*' means all channels; other names can be chosen freely.

  Attributes:
    fields: Names of the module's fields that count channels.
    layers: {parameter or submodule: (set of its inputs, set of its outputs)}. A
      leaf 'kernel' has the axes [..., inputs, outputs]; all other leaves and
      running statistics have [..., outputs]. Entries that a module lacks are
      ignored. Without a set 'y' the output has the set of the input.
    flattens: Whether the module flattens its input first.
    sets: `(Cut) -> {name: [k] int}` for sets that do not follow from the sizes
      of the layers alone, or None.
    inner: For a module that only calls another one: the name of the field with
      that module, whose `slices` are used. '' for other modules.
    unflattened: For a module with `inner` that flattens its output: `(input
      shape) -> output shape before flattening`, both of one example. None for
      other modules.
  """

  fields: tuple[str, ...] = ()
  layers: Mapping[str, tuple[str, str]] = {}
  flattens: bool = False
  sets: Callable[[Cut], Mapping[str, Any]] | None = None
  inner: str = ''
  unflattened: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None


def innermost(module: nn.Module) -> nn.Module:
  """The module that is reached by following `Slices.inner`."""
  field = _inner_field(module)
  return innermost(getattr(module, field)) if field else module


def change_innermost(
    module: nn.Module, change: Callable[[nn.Module], nn.Module]
) -> nn.Module:
  """A copy of the module with `change(innermost(module))` inside."""
  field = _inner_field(module)
  if not field:
    return change(module)
  inner = change_innermost(getattr(module, field), change)
  return module.clone(**{field: inner})


def change_modules(
    model, change: Callable[[str, nn.Module], nn.Module]
) -> Any:
  """A `BlockModel` with other innermost modules in its blocks.

  Args:
    model: The model.
    change: Maps a block's name and its innermost module to another module.

  Returns:
    The new model.
  """
  return model.with_modules(
      lambda name, module: change_innermost(
          module, lambda inner: change(name, inner)
      )
  )


def _inner_field(module):
  declared = getattr(module, 'slices', None)
  return declared.inner if isinstance(declared, Slices) else ''


def shortcut(last_conv: str) -> Callable[[Cut], Mapping[str, Any]]:
  """`Slices.sets` of a residual block whose shortcut may lack parameters.

  Without parameters in the shortcut, the output has the set of the input. If
  the shortcut pads channels with zeros, half of them on each side ('A'), the
  set also holds the channels of the full block's padding that the narrow copy
  keeps.

  Args:
    last_conv: Name of the block's last convolution. The shortcut's, if it has
      one, is called 'conv_shortcut'.

  Returns:
    The function.
  """

  def sets(cut: Cut):
    if 'conv_shortcut' in cut.params:
      return {}
    size, kept = (
        params[last_conv]['kernel'].shape[-1]
        for params in (cut.params, cut.small_params)
    )
    channels = cut.shape[-1]
    current = np.arange(channels) if cut.x is None else cut.x
    extra, more = size - channels, kept - len(current)
    # Zeros go before and after the old channels, half of them each.
    before, front = extra // 2, more // 2
    first = cut.index_of(before, front)
    last = cut.index_of(extra - before, more - front)
    if extra:
      current = current + before
    parts = [first, current, last + channels + before]
    join = np if isinstance(current, np.ndarray) else jnp
    return dict(y=join.concatenate(parts))

  return sets
