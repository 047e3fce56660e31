"""A model as an ordered list of named blocks, of which any span can be applied.

Parameters and norm statistics are plain dicts keyed by block name, so that
the extractor, the intermediate layers and the classifier of FedIN, a frozen
prefix of FeDepth, or the layers that two architectures share are sub-dicts.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any, NamedTuple
import zlib

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.kernels.lowering import using_conv_backend
from fedjax_het.kernels.matmul_dtype import using_matmul_dtype
from fedjax_het.models import reach


class Variables(NamedTuple):
  """What a model holds.

  Attributes:
    params: {block name: tree}, the trainable leaves, float32.
    stats: {block name: tree}, running statistics of the norm layers; only
      blocks that have any are listed.
  """

  params: dict[str, Any]
  stats: dict[str, Any]


class Block(NamedTuple):
  """One named step of a model.

  Attributes:
    name: Position-independent name, such as 'stage1_block0'. Two architectures
      share a block exactly when both list its name.
    module: A hashable linen module, called as `module(x, train, mask)`; `mask`
      is [B] bool (False for padding examples) or None, or [G, B / G] for a
      batch of G parts, which only layers that mix examples have to heed.
  """

  name: str
  module: nn.Module


@functools.partial(jax.jit, static_argnames=('module', 'shape'))
def _draw_block(module, key, shape):
  # Equal modules and shapes, of whatever architecture, share the program; the
  # forward pass, whose result is not used, is not part of it.
  return module.init(key, jnp.zeros(shape), False, None)


@functools.lru_cache(maxsize=1024)
def _output_shape(module, shape):
  def run(key):
    return module.init_with_output(key, jnp.zeros(shape), False, None)[0]

  return jax.eval_shape(run, jax.random.key(0)).shape


@dataclasses.dataclass(frozen=True)
class BlockModel:
  """An ordered list of blocks with init and apply over plain dicts.

  Attributes:
    name: Name of the architecture, for messages and tables.
    blocks: The blocks in the order in which they are applied.
    input_shape: (height, width, channels) of one example.
    num_classes: Size of the last output.
    cut: (end of the extractor, start of the classifier) as block positions;
      FedIN's e | in | c. The intermediate span is never empty.
    pretrained: {block name: parameters} that `init` takes instead of drawing
      them; None for none.
    matmul_dtype: Type of the operands of its products, see
      `kernels.matmul_dtype`.
    conv_backend: Whose it calls on a CPU, see `kernels.lowering`.
  """

  name: str
  blocks: tuple[Block, ...]
  input_shape: tuple[int, int, int]
  num_classes: int
  cut: tuple[int, int]
  pretrained: Mapping[str, Any] | None = dataclasses.field(
      default=None, compare=False, repr=False
  )
  matmul_dtype: str = 'float32'
  conv_backend: str = 'xla'

  def __post_init__(self):
    names = self.block_names
    if len(set(names)) != len(names):
      raise ValueError(f'Model {self.name!r} repeats a block name: {names}.')
    if not 0 < self.cut[0] < self.cut[1] < len(names):
      raise ValueError(
          f'Model {self.name!r}: cut {self.cut} must leave an extractor, '
          f'intermediate layers and a classifier of {len(names)} blocks.'
      )

  @property
  def block_names(self) -> tuple[str, ...]:
    """Names of the blocks, in order."""
    return tuple(block.name for block in self.blocks)

  def span(self, start=0, stop=None) -> tuple[str, ...]:
    """Names of the blocks at the positions [start, stop)."""
    return self.block_names[start:stop]

  @property
  def extractor(self) -> tuple[str, ...]:
    """Block names of FedIN's extractor e."""
    return self.span(0, self.cut[0])

  @property
  def intermediate(self) -> tuple[str, ...]:
    """Block names of FedIN's intermediate layers."""
    return self.span(*self.cut)

  @property
  def classifier(self) -> tuple[str, ...]:
    """Block names of FedIN's classifier c."""
    return self.span(self.cut[1])

  def init(self, key, names=None) -> Variables:
    """Draws the initial variables.

    A block's key is folded from its name alone: blocks of one name and shape
    start equal in every architecture.

    Compiled block by block, each kind once in a process: call it outside of
    `jax.jit`, where every block would be compiled anew.

    Args:
      key: A random key.
      names: Names of the blocks to draw; None for all.

    Returns:
      The variables of those blocks.
    """
    params, stats = {}, {}
    shape = (1, *self.input_shape)
    for name, module in self.blocks:
      if names is None or name in names:
        block_key = jax.random.fold_in(key, zlib.crc32(name.encode()) >> 1)
        variables = _draw_block(module, block_key, shape)
        params[name] = variables.get('params', {})
        if self.pretrained and name in self.pretrained:
          params[name] = jax.tree.map(jnp.asarray, self.pretrained[name])
        if 'batch_stats' in variables:
          stats[name] = variables['batch_stats']
      shape = _output_shape(module, shape)
    return Variables(params, stats)

  def apply(
      self,
      variables: Variables,
      x: jax.Array,
      *,
      start: int = 0,
      stop: int | None = None,
      train: bool = False,
      mask: jax.Array | None = None,
      key: jax.Array | None = None,
  ) -> tuple[jax.Array, dict[str, Any]]:
    """Applies the blocks [start, stop) to `x`.

    Args:
      variables: Variables holding at least the blocks of the span; leaves may
        have been cut by `trim`, for inputs of the model's own shapes.
      x: [B, ...], the input of block `start`.
      start: Position of the first block.
      stop: Position after the last block; None means to the end.
      train: Whether norms use (and update the running) batch statistics and
        dropout is active.
      mask: [B] bool, False for padding examples, which batch statistics
        ignore; None means that every example counts. [G, B / G] is a batch of
        G parts: each has batch statistics of its own, and the running ones
        follow the first.
      key: Needed when `train` and the span has dropout.

    Returns:
      The output of the span and `variables.stats` with the span's running
      statistics updated (unchanged when not `train`).
    """
    with (
        using_matmul_dtype(self.matmul_dtype),
        using_conv_backend(self.conv_backend),
    ):
      return self._apply(variables, x, start, stop, train, mask, key)

  def _apply(self, variables, x, start, stop, train, mask, key):
    stats = dict(variables.stats)
    for position in range(len(self.blocks))[start:stop]:
      name, module = self.blocks[position]
      tree = {'params': reach.whole(variables.params[name])}
      if name in stats:
        tree['batch_stats'] = stats[name]
      rngs = (
          None
          if key is None
          else {'dropout': jax.random.fold_in(key, position)}
      )
      if train and name in stats:
        x, updated = module.apply(
            tree, x, train, mask, rngs=rngs, mutable=['batch_stats']
        )
        stats[name] = updated['batch_stats']
      else:
        x = module.apply(tree, x, train, mask, rngs=rngs)
    return x, stats

  def trim(self, variables: Variables) -> Variables:
    """Leaves out the weights that no example reaches.

    Args:
      variables: Whole ones, of any blocks of the model.

    Returns:
      The same with smaller leaves, for training steps: `apply` takes them and
      gives the same, and what was cut off has no gradient. See `reach`.
    """
    params = {
        name: reach.cut(tree, self._parts.get(name, {}))
        for name, tree in variables.params.items()
    }
    return Variables(params, variables.stats)

  def fill(self, variables: Variables, whole: Variables) -> Variables:
    """Undoes `trim`.

    Args:
      variables: Trimmed ones, or whole ones, which stay as they are.
      whole: Where the rest is taken from, with the same blocks.

    Returns:
      Whole variables.
    """
    params = {
        name: reach.put_back(tree, whole.params[name])
        for name, tree in variables.params.items()
    }
    return Variables(params, variables.stats)

  @functools.cached_property
  def _parts(self) -> dict[str, dict[str, reach.Part]]:
    inputs = (self.input_shape, *self.shapes)
    found = {
        name: reach.used_parts(module, (1, *shape))
        for (name, module), shape in zip(self.blocks, inputs)
    }
    return {name: parts for name, parts in found.items() if parts}

  @functools.cached_property
  def shapes(self) -> tuple[tuple[int, ...], ...]:
    """Per-example output shape of every block, in order."""
    out = [(1, *self.input_shape)]
    for _, module in self.blocks:
      out.append(_output_shape(module, out[-1]))
    return tuple(shape[1:] for shape in out[1:])

  @functools.cached_property
  def abstract_variables(self) -> Variables:
    """Shapes and dtypes of the variables, without computing them."""
    return jax.eval_shape(self.init, jax.random.key(0))
