"""Draws the variables of blocks and applies blocks."""

from collections.abc import Iterable, Mapping
import functools
from typing import Any, NamedTuple
import zlib

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.models import reach
from fedjax_het.models.heads import Block


class Variables(NamedTuple):
  """Parameters and running statistics of a model.

  Attributes:
    params: {block name: tree}, the trainable leaves, float32.
    stats: {block name: tree}, running statistics of the norm layers; only
      blocks that have any are listed.
  """

  params: dict[str, Any]
  stats: dict[str, Any]


@functools.partial(jax.jit, static_argnames=('module', 'shape'))
def _draw_block(module, key, shape):
  # Equal modules and shapes share the compiled program in all architectures.
  # The unused result of the forward pass is not computed.
  return module.init(key, jnp.zeros(shape), False, None)


def draw_block(
    name: str, module: nn.Module, key: jax.Array, shape: tuple[int, ...]
) -> dict[str, Any]:
  """Draws the variables of a block.

  Args:
    name: The block's name, from which its key is folded.
    module: Its module.
    key: The model's random key.
    shape: Shape of one example of its input.

  Returns:
    The module's collections, such as 'params' and 'batch_stats'.
  """
  block_key = jax.random.fold_in(key, zlib.crc32(name.encode()) >> 1)
  return _draw_block(module, block_key, (1, *shape))


def apply_blocks(
    span: Iterable[tuple[int, Block]],
    variables: Variables,
    x: jax.Array,
    train: bool,
    mask: jax.Array | None,
    key: jax.Array | None,
) -> tuple[jax.Array, dict[str, Any]]:
  """Applies blocks one after the other.

  Args:
    span: (position, block) pairs; the dropout key depends on the position.
    variables: Variables holding at least these blocks.
    x: [B, ...], the input of the first block.
    train: As for `BlockModel.apply`.
    mask: As for `BlockModel.apply`.
    key: As for `BlockModel.apply`.

  Returns:
    The last block's output, and the statistics.
  """
  stats = dict(variables.stats)
  for position, (name, module) in span:
    tree = {'params': reach.whole(variables.params[name])}
    if name in stats:
      tree['batch_stats'] = stats[name]
    rngs = (
        None if key is None else {'dropout': jax.random.fold_in(key, position)}
    )
    # The cache key of `jit` does not include intercepted methods.
    changed = bool(nn.module._global_interceptor_stack)
    apply = _apply_block if changed else _apply_traced_block
    x, updated = apply(module, train, tree, x, mask, rngs)
    if updated is not None:
      stats[name] = updated
  return x, stats


def _apply_block(module, train, tree, x, mask, rngs):
  """A block's output, and its new statistics or None."""
  if train and 'batch_stats' in tree:
    x, updated = module.apply(
        tree, x, train, mask, rngs=rngs, mutable=['batch_stats']
    )
    return x, updated['batch_stats']
  return module.apply(tree, x, train, mask, rngs=rngs), None


# With `jit`, equal modules on equal shapes are traced, differentiated and
# lowered once per process, for all positions, architectures and passes. XLA's
# programs do not change.
_apply_traced_block = jax.jit(_apply_block, static_argnums=(0, 1))


def apply_paths(
    trunk: tuple[Block, ...],
    paths: Mapping[str, tuple[int, tuple[Block, ...]]],
    variables: Variables,
    x: jax.Array,
    start: int,
    train: bool,
    mask: jax.Array | None,
    key: jax.Array | None,
) -> tuple[dict[str, jax.Array], dict[str, Any]]:
  """Applies several heads in one pass over the trunk.

  Args:
    trunk: The trunk's blocks.
    paths: {head: (number of the trunk's blocks in front of it, the blocks from
      the input to it)}.
    variables: Variables holding at least the blocks of the paths.
    x: [B, ...], the input of the trunk's block `start`.
    start: Position of the first block, in front of all these heads.
    train: As for `BlockModel.apply`.
    mask: As for `BlockModel.apply`.
    key: As for `BlockModel.apply`.

  Returns:
    {head: its output}, in the order of `paths`, and the statistics.
  """
  outputs, stats, done = {}, variables.stats, start
  for at in sorted({at for at, _ in paths.values()}):
    span = [(i, trunk[i]) for i in range(done, at)]
    x, stats = apply_blocks(
        span, Variables(variables.params, stats), x, train, mask, key
    )
    done = at
    for name, (branch, blocks) in paths.items():
      if branch == at:
        own = list(enumerate(blocks))[at:]
        outputs[name], stats = apply_blocks(
            own, Variables(variables.params, stats), x, train, mask, key
        )
  return {name: outputs[name] for name in paths}, stats
