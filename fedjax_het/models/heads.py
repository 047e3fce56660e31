"""Blocks, and heads that branch off a trunk of blocks.

The functions take a trunk and its heads, as a `BlockModel` holds them.
"""

from collections.abc import Callable, Iterable
import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.names import check_name


class Block(NamedTuple):
  """One named step of a model.

  Attributes:
    name: Position-independent name, such as 'stage1_block0'. Two architectures
      share a block exactly when both list its name.
    module: A hashable linen module, called as `module(x, train, mask)`; `mask`
      is [B] bool (False for padding examples) or None, or [G, B / G] for a
      batch of G parts; only layers that mix examples depend on it.
  """

  name: str
  module: nn.Module


class Head(NamedTuple):
  """A side exit: a chain of one or more blocks after a block of the trunk.

  Attributes:
    after: Name of the trunk's block whose output the head takes.
    blocks: The head's blocks, in order. The last one's name is the head's.
  """

  after: str
  blocks: tuple[Block, ...]

  @property
  def name(self) -> str:
    """Name of the head."""
    return self.blocks[-1].name


def check_blocks(
    model: str, trunk: tuple[Block, ...], heads: tuple[Head, ...]
) -> None:
  """Checks the names in a trunk and its heads.

  Args:
    model: The model's name, for messages.
    trunk: The trunk's blocks.
    heads: The further heads.

  Raises:
    ValueError: If a head has no block or branches off an unknown one, or two
      blocks have one name.
  """
  known = [block.name for block in trunk]
  for head in heads:
    if not head.blocks:
      raise ValueError(
          f'Model {model!r}: the head after {head.after!r} has no block.'
      )
    check_name(f'trunk block of the head {head.name!r}', head.after, known)
  names = tuple(block.name for block in all_blocks(trunk, heads))
  if len(set(names)) != len(names):
    raise ValueError(f'Model {model!r} repeats a block name: {names}.')


def all_blocks(
    trunk: tuple[Block, ...], heads: Iterable[Head]
) -> tuple[Block, ...]:
  """The trunk's blocks, then those of the heads."""
  return sum((head.blocks for head in heads), trunk)


def path(
    trunk: tuple[Block, ...], heads: Iterable[Head], name: str
) -> tuple[int, tuple[Block, ...]]:
  """The blocks from the input to a head.

  Args:
    trunk: The trunk's blocks.
    heads: The further heads.
    name: Name of one of them; any other name is the trunk's own head.

  Returns:
    The number of the trunk's blocks before the head, and these blocks followed
    by the head's.
  """
  for head in heads:
    if head.name == name:
      at = [block.name for block in trunk].index(head.after) + 1
      return at, trunk[:at] + head.blocks
  return len(trunk), trunk


def with_modules(
    blocks: Iterable[Block], change: Callable[[str, nn.Module], nn.Module]
) -> tuple[Block, ...]:
  """Replaces the module of each block by `change(name, module)`."""
  return tuple(Block(name, change(name, module)) for name, module in blocks)


def shapes(
    trunk: tuple[Block, ...],
    heads: Iterable[Head],
    input_shape: tuple[int, ...],
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
  """Per-example shapes of all blocks, without computing anything.

  Args:
    trunk: The trunk's blocks.
    heads: The further heads.
    input_shape: Shape of one example.

  Returns:
    {block name: (input shape, output shape)}.
  """
  found = {}

  def walk(blocks, shape):
    for name, module in blocks:
      after = _output_shape(module, (1, *shape))[1:]
      found[name] = (shape, after)
      shape = after

  walk(trunk, tuple(input_shape))
  for head in heads:
    walk(head.blocks, found[head.after][1])
  return found


@functools.lru_cache(maxsize=1024)
def _output_shape(module, shape):
  def run(key):
    return module.init_with_output(key, jnp.zeros(shape), False, None)[0]

  return jax.eval_shape(run, jax.random.key(0)).shape
