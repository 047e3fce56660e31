"""Converts users' linen and nnx modules to named blocks."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import inspect
from typing import Any

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.models.heads import Block, shapes
from fedjax_het.models.layers import Linear
from fedjax_het.models.slices import Slices

# {argument that switches a module to training mode: its value in training}.
_SWITCHES = dict(
    train=True,
    training=True,
    is_training=True,
    deterministic=False,
    use_running_average=False,
)
_COLLECTIONS = {'params', 'batch_stats'}


class Identity(nn.Module):
  """The identity, as the extractor or the classifier of a single module."""

  slices = Slices()

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    """Returns x."""
    del train, mask
    return x


class Adapted(nn.Module):
  """Wraps a module so that it can be called like a block.

  Attributes:
    module: Called as `module(x, train, mask)` if it has these parameters,
      otherwise as `module(x)` with each training switch that it has (`train`,
      `training`, `is_training`, `deterministic`, `use_running_average`). If it
      is a `nnx.bridge.ToLinen`, its nnx module is called in this way, after
      `train()` or `eval()`.
    flatten: Whether the output is flattened to [B, D].
  """

  module: nn.Module
  flatten: bool = False

  @property
  def slices(self) -> Slices:
    """The slices of the wrapped module."""
    maps = functools.partial(_output_shape, self.clone(flatten=False))
    return Slices(inner='module', unflattened=maps if self.flatten else None)

  def __call__(self, x, train=False, mask=None):
    """[B, ...] -> [B, ...]; dropout and batch norm follow `train`."""
    if isinstance(self.module, nnx.bridge.ToLinen):
      call = functools.partial(_call_nnx, train=train, mask=mask)
      y = self.module(x, nnx_method=call)
    else:
      y = _call(self.module, x, train, mask)
    return y.reshape((y.shape[0], -1)) if self.flatten else y


def _call(module: nn.Module | nnx.Module, x, train: bool, mask):
  """Calls the module on `x`, with the training switches that it has."""
  names = [*inspect.signature(type(module).__call__).parameters]
  # In other signatures `mask` may be another mask, such as one of attention.
  if names[2:] == ['train', 'mask']:
    return module(x, train, mask)
  switches = {
      name: train == value
      for name, value in _SWITCHES.items()
      if name in names
  }
  return module(x, **switches)


def _call_nnx(module: nnx.Module, x, *, train: bool, mask):
  """Sets the module to training or evaluation mode, then calls it."""
  if train:
    module.train()
  else:
    module.eval()
  return _call(module, x, train, mask)


@dataclasses.dataclass(frozen=True)
class _WithStreams:
  """Makes an nnx module, with a random key for every stream that it uses.

  Attributes:
    make: The module's class.
  """

  make: Callable[..., nnx.Module]

  def __call__(self, *args: Any, rngs: nnx.Rngs, **kwargs: Any) -> nnx.Module:
    # Linen initialises without a dropout stream, but an nnx module needs it
    # when it is constructed.
    if 'default' not in rngs:
      rngs = nnx.Rngs(0, **{name: rngs[name]() for name in rngs})
    return self.make(*args, rngs=rngs, **kwargs)


def _plain(module: nn.Module) -> nn.Module:
  """The module; an nnx module is changed to have plain arrays as variables."""
  if not isinstance(module, nnx.bridge.ToLinen):
    return module
  if module.skip_rng:
    return module.clone(metadata_fn=None)
  make = _WithStreams(module.nnx_class)
  return module.clone(nnx_class=make, metadata_fn=None)


def _output_shape(module, shape):
  """Per-example output shape of a block's module."""
  return shapes((Block('', module),), (), shape)[''][1]


def how_to_wrap(module: Any) -> str:
  """Advice to wrap an nnx module; '' for any other object."""
  of_nnx = module if inspect.isclass(module) else type(module)
  if not issubclass(of_nnx, nnx.Module):
    return ''
  return (
      f' Wrap the class, as nnx.bridge.to_linen({of_nnx.__name__}, ...), with '
      'its arguments but rngs.'
  )


def adapted_blocks(
    modules: nn.Module | Mapping[str, nn.Module],
    num_classes: int,
    name: str,
    head: bool,
) -> tuple[Block, ...]:
  """The blocks of `BlockModel.from_module`, from a module or from several.

  Args:
    modules: One module, or {block name: module} in the order in which they are
      applied.
    num_classes: C.
    name: Name of the architecture.
    head: Whether to add a linear head on the flattened output of the last
      module.

  Returns:
    The blocks. A single module gets an identity extractor before it and, if
    `head` is False, an identity classifier after it.

  Raises:
    ValueError: If a module is not a linen module.
  """
  if isinstance(modules, Mapping):
    named = dict(modules)
  else:
    named = {f'{name}_trunk': modules}
  blocks = []
  for key, module in named.items():
    if not isinstance(module, nn.Module):
      raise ValueError(
          f'Model {name!r}: {key!r} must be a flax.linen module, got '
          f'{type(module).__name__}.' + how_to_wrap(module)
      )
    last = key == [*named][-1]
    blocks.append(Block(key, Adapted(_plain(module), flatten=head and last)))
  if not isinstance(modules, Mapping):
    blocks.insert(0, Block(f'{name}_input', Identity()))
  if head:
    blocks.append(Block(f'{name}_head', Linear(num_classes)))
  elif not isinstance(modules, Mapping):
    blocks.append(Block(f'{name}_output', Identity()))
  return tuple(blocks)


def check_modules(
    blocks: tuple[Block, ...],
    input_shape: tuple[int, ...],
    num_classes: int,
    name: str,
) -> None:
  """Raises ValueError for modules that cannot be the blocks of a model.

  Args:
    blocks: What `adapted_blocks` made.
    input_shape: Shape of one example.
    num_classes: C.
    name: Name of the architecture, for messages.

  Raises:
    ValueError: If a module cannot be hashed, does not accept its input or has
      variables other than parameters and batch statistics, or the last output
      is not [B, C].
  """
  x = jax.ShapeDtypeStruct((1, *input_shape), jnp.float32)
  for key, module in blocks:
    try:
      hash(module)
    except TypeError as e:
      raise ValueError(
          f'Model {name!r}: the fields of {key!r} must be hashable, such as '
          f'tuples instead of arrays ({e}).'
      ) from e
    try:
      x, variables = jax.eval_shape(
          lambda key, x, module=module: module.init_with_output(
              key, x, False, None
          ),
          jax.random.key(0),
          x,
      )
    except Exception as e:  # A user's module may raise any exception.
      text = ' '.join(str(e).split())
      raise ValueError(
          f'Model {name!r}: {key!r} does not take an input of shape '
          f'{x.shape} ({type(e).__name__}: {text:.200}).'
      ) from e
    others = sorted({*variables} - _COLLECTIONS)
    if others:
      raise ValueError(
          f'Model {name!r}: {key!r} keeps {", ".join(others)}; a model has '
          'parameters and batch statistics alone.'
      )
  if x.shape != (1, num_classes):
    raise ValueError(
        f'Model {name!r}: the output of an example has shape {x.shape[1:]}, '
        f'expected ({num_classes},); head=True adds a linear head.'
    )
