"""A model as a trunk of named blocks, and heads that branch off it.

Any span of the trunk can be applied alone. A plain chain is a trunk without
further heads: its last block is its head. Parameters and norm statistics are
plain dicts keyed by block name. Parts of a model are sub-dicts, such as FedIN's
extractor, intermediate layers and classifier, FeDepth's frozen prefix, the
layers that two architectures share, or an exit that stays on its client.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
import contextlib
import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.kernels.lowering import using_conv_backend
from fedjax_het.kernels.matmul_dtype import using_matmul_dtype
from fedjax_het.models import adapt, forward, reach
from fedjax_het.models import heads as heads_lib
from fedjax_het.models.forward import Variables
from fedjax_het.models.heads import Block, Head
from fedjax_het.names import check_name
from fedjax_het.options import at_least


@dataclasses.dataclass(frozen=True)
class BlockModel:
  """A trunk of blocks and further heads, whose variables are plain dicts.

  Attributes:
    name: Name of the architecture, for messages and tables.
    blocks: The trunk's blocks in the order in which they are applied.
    input_shape: Shape of one example, (height, width, channels) of an image.
    num_classes: Size of the last output.
    cut: (end of the extractor, start of the classifier) as block positions;
      FedIN's e | in | c. The intermediate span is never empty.
    pretrained: {block name: parameters} that `init` uses instead of drawing
      them, or None.
    matmul_dtype: Dtype of the operands of matrix products, see
      `kernels.matmul_dtype`.
    conv_backend: Library for convolutions on a CPU, see `kernels.lowering`.
    heads: Side exits. Their variables are stored in the same dicts as the
      trunk's, under the names of their blocks.
    vocabulary: V if the inputs are token ids, integers in 0..V-1; None for
      other inputs.
  """

  name: str
  blocks: tuple[Block, ...]
  input_shape: tuple[int, ...]
  num_classes: int
  cut: tuple[int, int]
  pretrained: Mapping[str, Any] | None = dataclasses.field(
      default=None, compare=False, repr=False
  )
  matmul_dtype: str = 'float32'
  conv_backend: str = 'xla'
  heads: tuple[Head, ...] = ()
  vocabulary: int | None = None

  def __post_init__(self):
    at_least(1, num_classes=self.num_classes)
    heads_lib.check_blocks(self.name, self.blocks, self.heads)
    if not 0 < self.cut[0] < self.cut[1] < len(self.blocks):
      raise ValueError(
          f'Model {self.name!r}: cut {self.cut} must leave an extractor, '
          f'intermediate layers and a classifier of {len(self.blocks)} blocks.'
      )

  @classmethod
  def from_module(
      cls,
      modules: nn.Module | Mapping[str, nn.Module],
      input_shape: tuple[int, ...],
      num_classes: int,
      *,
      name: str | None = None,
      cut: tuple[int, int] | None = None,
      head: bool = True,
  ) -> 'BlockModel':
    """Makes a model from ordinary linen modules.

    Two architectures share all blocks of equal name. If they should not, give
    the models or their blocks different names.

    Args:
      modules: One module, which becomes the trunk; or {block name: module} in
        the order in which they are applied. A module is called as `module(x)`,
        with the training switches that it has, see `adapt.Adapted`.
      input_shape: Shape of one example.
      num_classes: C.
      name: Name of the architecture; None for the lower-case name of a single
        module's class, or 'net' for several modules.
      cut: See the attribute; None makes the first block the extractor and the
        last the classifier. The extractor of a single module is the identity,
        so methods that send its output send raw inputs.
      head: Whether to add a linear head on the flattened output of the last
        module; False if that module already returns [B, C].

    Returns:
      The model.

    Raises:
      ValueError: If a module is not a linen module, does not accept its input
        or cannot be hashed, or the output is not [B, C].
    """
    if name is None:
      single = isinstance(modules, nn.Module)
      name = type(modules).__name__.lower() if single else 'net'
    shape = tuple(input_shape)
    blocks = adapt.adapted_blocks(modules, num_classes, name, head)
    adapt.check_modules(blocks, shape, num_classes, name)
    cut = cut or (1, len(blocks) - 1)
    return cls(name, blocks, shape, num_classes, cut)

  @property
  def block_names(self) -> tuple[str, ...]:
    """Names of the trunk's blocks, in order."""
    return tuple(block.name for block in self.blocks)

  @property
  def all_blocks(self) -> tuple[Block, ...]:
    """The trunk's blocks, then those of the heads."""
    return heads_lib.all_blocks(self.blocks, self.heads)

  @property
  def head_names(self) -> tuple[str, ...]:
    """Names of all heads; the last is the trunk's own last block."""
    return (*(head.name for head in self.heads), self.block_names[-1])

  def span(self, start: int = 0, stop: int | None = None) -> tuple[str, ...]:
    """Names of the trunk's blocks at the positions [start, stop)."""
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

  def with_heads(self, *heads: Head) -> 'BlockModel':
    """The same trunk with further heads.

    Args:
      *heads: The new heads, such as `Head('stage1_block0', (Block('exit1/pool',
        GlobalPool()), Block('exit1', Linear(10))))`.

    Returns:
      The new model; `init` draws the same values for the old blocks.

    Raises:
      ValueError: If a name is repeated, or no block of the trunk has the name
        of a head's `after`.
    """
    return dataclasses.replace(self, heads=(*self.heads, *heads))

  def with_modules(
      self, change: Callable[[str, nn.Module], nn.Module]
  ) -> 'BlockModel':
    """Replaces the modules; the names of the blocks stay.

    Args:
      change: `(block name, module) -> module`, for trunk and heads.

    Returns:
      The new model.
    """
    return dataclasses.replace(
        self,
        blocks=heads_lib.with_modules(self.blocks, change),
        heads=tuple(
            Head(head.after, heads_lib.with_modules(head.blocks, change))
            for head in self.heads
        ),
    )

  def branch(self, head: str) -> int:
    """Number of the trunk's blocks in front of a head.

    Args:
      head: Name of a head.

    Returns:
      The position of the head's first block on its path; for the trunk's own
      head, the length of the trunk.

    Raises:
      ValueError: For an unknown head.
    """
    return self._branch_and_path(head)[0]

  def path(self, head: str | None = None) -> tuple[Block, ...]:
    """The blocks from the input to a head.

    Args:
      head: Name of a head; None for the trunk's own.

    Returns:
      The trunk's blocks in front of the head, then the head's.

    Raises:
      ValueError: For an unknown head.
    """
    if head is None:
      return self.blocks
    return self._branch_and_path(head)[1]

  def _branch_and_path(self, head: str) -> tuple[int, tuple[Block, ...]]:
    check_name('head', head, self.head_names)
    return heads_lib.path(self.blocks, self.heads, head)

  def chain(self, head: str, keep: Collection[str] = ()) -> 'BlockModel':
    """The model that ends in a head.

    Args:
      head: Name of the head.
      keep: Names of other heads to keep; they must branch off the new trunk.

    Returns:
      A model of the blocks of `path(head)`. Its variables are a subset of this
      model's, with the same values. For a further head, the first block is the
      extractor and the head's blocks are the classifier.

    Raises:
      ValueError: For an unknown head, or one that leaves no block between the
        first and the last.
    """
    for name in (head, *keep):
      check_name('head', name, self.head_names)
    heads = tuple(
        one for one in self.heads if one.name in keep and one.name != head
    )
    if head == self.block_names[-1]:
      return dataclasses.replace(self, heads=heads)
    return dataclasses.replace(
        self,
        name=f'{self.name}/{head}',
        blocks=self.path(head),
        cut=(1, max(2, self.branch(head))),
        heads=heads,
    )

  def init(
      self, key: jax.Array, names: Iterable[str] | None = None
  ) -> Variables:
    """Draws the initial variables.

    A block's key depends only on `key` and the block's name, so blocks of equal
    name and shape start with equal values in every architecture.

    Each block is compiled separately, and equal blocks once per process. Call
    this outside of `jax.jit`, which would compile every block again.

    Args:
      key: A random key.
      names: Names of the blocks to draw; None for all, heads included.

    Returns:
      The variables of those blocks.
    """
    params, stats = {}, {}
    for name, module in self.all_blocks:
      if names is None or name in names:
        variables = forward.draw_block(name, module, key, self.inputs[name])
        params[name] = variables.get('params', {})
        if self.pretrained and name in self.pretrained:
          params[name] = jax.tree.map(jnp.asarray, self.pretrained[name])
        if 'batch_stats' in variables:
          stats[name] = variables['batch_stats']
    return Variables(params, stats)

  def apply(
      self,
      variables: Variables,
      x: jax.Array,
      *,
      start: int = 0,
      stop: int | None = None,
      head: str | None = None,
      train: bool = False,
      mask: jax.Array | None = None,
      key: jax.Array | None = None,
  ) -> tuple[jax.Array, dict[str, Any]]:
    """Applies the blocks [start, stop) of the path to a head.

    Args:
      variables: Variables holding at least the blocks of the span. They may be
        trimmed by `trim` if the input has the model's own shape.
      x: [B, ...], the input of block `start`.
      start: Position of the first block; `branch(head)` applies a head alone.
      stop: Position after the last block; None means to the end.
      head: Name of the head; None means the trunk's own.
      train: Whether norms use (and update the running) batch statistics and
        dropout is active.
      mask: [B] bool, False for padding examples, which batch statistics
        ignore; None means that every example counts. [G, B / G] divides the
        batch into G parts with separate batch statistics; the first part
        updates the running statistics.
      key: Needed when `train` and the span has dropout.

    Returns:
      The output of the span and `variables.stats` with the span's running
      statistics updated (unchanged when not `train`).

    Raises:
      ValueError: For an unknown head.
    """
    blocks = self.path(head)
    positions = range(len(blocks))[start:stop]
    span = [(i, blocks[i]) for i in positions]
    with self._kernels():
      return forward.apply_blocks(span, variables, x, train, mask, key)

  def apply_heads(
      self,
      variables: Variables,
      x: jax.Array,
      heads: Iterable[str] | None = None,
      *,
      start: int = 0,
      train: bool = False,
      mask: jax.Array | None = None,
      key: jax.Array | None = None,
  ) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Applies several heads in one pass over the trunk.

    Args:
      variables: Variables holding at least the blocks of the heads' paths.
      x: [B, ...], the input of the trunk's block `start`.
      heads: Their names, None for all; the trunk is applied as far as they
        need it.
      start: Position of the first block, in front of all these heads.
      train: As for `apply`.
      mask: As for `apply`.
      key: As for `apply`. A head has the same dropout masks as in
        `chain(head)`.

    Returns:
      {head: its output}, in the order of `heads`, and the statistics, updated
      where a block was applied.

    Raises:
      ValueError: For an unknown head, or one that branches off before `start`.
    """
    names = self.head_names if heads is None else tuple(heads)
    paths = {name: self._branch_and_path(name) for name in names}
    for name, (at, _) in paths.items():
      if at < start:
        raise ValueError(
            f'The head {name!r} branches off behind {at} blocks, before '
            f'start={start}.'
        )
    with self._kernels():
      return forward.apply_paths(
          self.blocks, paths, variables, x, start, train, mask, key
      )

  @contextlib.contextmanager
  def _kernels(self):
    """A context that sets the model's kernels while it is traced."""
    with (
        using_matmul_dtype(self.matmul_dtype),
        using_conv_backend(self.conv_backend),
    ):
      yield

  def trim(self, variables: Variables) -> Variables:
    """Drops unused weights: those that no example reaches; see `reach`.

    Args:
      variables: Untrimmed variables of any blocks of the model.

    Returns:
      Variables with smaller leaves, for training steps. `apply` accepts them
      and gives the same result; the dropped weights have zero gradient.
    """
    params = {
        name: reach.cut(tree, self._parts.get(name, {}))
        for name, tree in variables.params.items()
    }
    return Variables(params, variables.stats)

  def fill(self, variables: Variables, whole: Variables) -> Variables:
    """Undoes `trim`.

    Args:
      variables: Trimmed variables; untrimmed ones are returned unchanged.
      whole: Untrimmed variables of the same blocks, from which the dropped
        weights are taken.

    Returns:
      Untrimmed variables.
    """
    params = {
        name: reach.put_back(tree, whole.params[name])
        for name, tree in variables.params.items()
    }
    return Variables(params, variables.stats)

  @functools.cached_property
  def _parts(self) -> dict[str, dict[str, reach.Part]]:
    found = {
        name: reach.used_parts(module, (1, *self.inputs[name]))
        for name, module in self.all_blocks
    }
    return {name: parts for name, parts in found.items() if parts}

  @functools.cached_property
  def inputs(self) -> dict[str, tuple[int, ...]]:
    """Per-example input shape of every block, heads included, by name."""
    return {name: before for name, (before, _) in self._shapes.items()}

  @functools.cached_property
  def outputs(self) -> dict[str, tuple[int, ...]]:
    """Per-example output shape of every block, heads included, by name."""
    return {name: after for name, (_, after) in self._shapes.items()}

  @functools.cached_property
  def shapes(self) -> tuple[tuple[int, ...], ...]:
    """Per-example output shape of every block of the trunk, in order."""
    return tuple(self.outputs[name] for name in self.block_names)

  @functools.cached_property
  def _shapes(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    return heads_lib.shapes(self.blocks, self.heads, self.input_shape)

  @functools.cached_property
  def abstract_variables(self) -> Variables:
    """Shapes and dtypes of the variables, without computing them."""
    return jax.eval_shape(self.init, jax.random.key(0))

  @property
  def num_params(self) -> int:
    """The number of parameters, heads included."""
    leaves = jax.tree.leaves(self.abstract_variables.params)
    return sum(leaf.size for leaf in leaves)
