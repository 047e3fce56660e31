"""Width slicing: narrow copies of a model, and which numbers they hold.

`narrow` makes the narrow architecture, `width_index` says for every leaf, axis
by axis, which coordinates of the full leaf the narrow one holds, `extract`
cuts them out and `scatter_add` adds them back in their place.

The blocks are walked in order with the set of channels that reaches each:

- A layer's input set is what the layer before it puts out, its output set the
  first k of the channels in `order(K)`: for HeteroFL 0..K-1, for FedRolex
  shifted by the round. Bias and norm have the set of the channels they act on.
- A shortcut without parameters hands its input set on; where it pads channels
  with zeros on both sides ('A'), the set is what the narrow pad corresponds to.
- Flattening is channel-minor: position p, channel c is row p * C + c.
- Attention keeps, inside each of H heads of size m, the same first k
  coordinates of q, k and v; the output projection reads those of v.
- Classes and image channels are never cut.

With norms that act on each channel alone the narrow model is the full one with
the other channels set to zero; group and layer norm see fewer channels.

References:
  Diao et al., `HeteroFL <https://arxiv.org/abs/2010.01264>`_, ICLR 2021.
  Alam et al., `FedRolex <https://arxiv.org/abs/2212.01548>`_, NeurIPS 2022.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.models.blocks import Block, BlockModel, Variables
from fedjax_het.models.fedhe_cnn import Unit
from fedjax_het.models.fedin_v1 import PointwiseBlock
from fedjax_het.models.layers import Flatten, GlobalPool, Linear
from fedjax_het.models.mlp import Layer
from fedjax_het.models.preresnet import NormPool, PreactBlock, PreStem
from fedjax_het.models.resnet import BasicBlock, Bottleneck, Stem
from fedjax_het.models.simple_cnn import ConvUnit, Hidden, Projection
from fedjax_het.models.vit import Embed, EncoderBlock, Token


class Rule(NamedTuple):
  """How the modules of one class are cut.

  Attributes:
    fields: Those of its fields that are widths.
    layers: 'name input output, ...' of its layers, with names of channel sets:
      x is what reaches the block, y what leaves it (x if there is no y), * is
      everything. A layer that a module lacks is passed over.
  """

  fields: tuple[str, ...] = ()
  layers: str = ''


_UNIT = Rule(('features',), 'conv x y, norm y y')
_SHORTCUT = 'conv_shortcut x y, norm_shortcut y y'
_POST = f'conv1 x h, norm1 h h, conv2 h y, norm2 y y, {_SHORTCUT}'
_NECK = (
    'conv1 x h, norm1 h h, conv2 h g, norm2 g g, conv3 g y, norm3 y y, '
    + _SHORTCUT
)
_PRE = f'norm1 x x, conv1 x h, norm2 h h, conv2 h y, {_SHORTCUT}'
_ENCODER = 'norm1 x x, qkv x qkv, out heads x, norm2 x x, mlp1 x h, mlp2 h x'
RULES: dict[type, Rule] = {
    Stem: _UNIT,
    PreStem: _UNIT,
    ConvUnit: _UNIT,
    Unit: _UNIT,
    BasicBlock: Rule(('features',), _POST),
    # Four times its features: 4 ceil(rho w) channels, not ceil(rho 4 w).
    Bottleneck: Rule(('features',), _NECK),
    PointwiseBlock: Rule(('inner', 'features'), _POST),
    PreactBlock: Rule(('features',), _PRE),
    NormPool: Rule((), 'norm x x'),
    GlobalPool: Rule(),
    Flatten: Rule(),
    Linear: Rule((), '. x *'),
    Hidden: Rule(('features',), 'linear x y'),
    Projection: Rule((), 'linear1 x h, linear2 h y'),
    Layer: Rule(('features',), 'linear x y, norm y y'),
    Embed: Rule(('dim',), 'patch * y, token * y, position * y'),
    EncoderBlock: Rule(('head_dim',), _ENCODER),
    Token: Rule((), 'norm x x'),
}
_FLATTENING = (Flatten, Hidden, Layer)


def narrow(model: BlockModel, size: Callable[[int], int]) -> BlockModel:
  """The same architecture with fewer channels.

  Args:
    model: The full model.
    size: Maps the channels K of a layer, or the size of an attention head, to
      those that are kept, such as `lambda k: math.ceil(k / 2)`.

  Returns:
    A model of the same block names.

  Raises:
    ValueError: If a block has no rule, or is left without a channel.
  """
  blocks = []
  for i, (name, module) in enumerate(model.blocks):
    changes = {}
    for field in _rule(name, module).fields:
      full = getattr(module, field)
      if field == 'head_dim':
        full = full or model.shapes[i][-1] // module.heads
      kept = size(full)
      if not 1 <= kept <= full:
        raise ValueError(
            f'Block {name!r} of {model.name!r} would keep {kept} of its '
            f'{full} channels; at least 1 and at most all can be kept.'
        )
      changes[field] = kept
    blocks.append(Block(name, module.clone(**changes)))
  return dataclasses.replace(model, blocks=tuple(blocks))


def without_running_stats(model: BlockModel) -> BlockModel:
  """The model with every 'batch' norm turned into 'batch_only'.

  Args:
    model: A model.

  Returns:
    One with the same parameters that never keeps running statistics.
  """

  def plain(module):
    if getattr(module, 'norm', None) == 'batch':
      return module.clone(norm='batch_only')
    return module

  return dataclasses.replace(
      model, blocks=tuple(Block(n, plain(module)) for n, module in model.blocks)
  )


def width_index(
    full: BlockModel,
    small: BlockModel,
    order: Callable[[int], Any] = np.arange,
) -> Variables:
  """Which coordinates of the full model's leaves a narrow model holds.

  Args:
    full: The full model.
    small: What `narrow` made of it.
    order: Maps the number of channels K of a layer to a permutation of
      0..K-1, [K] int, maybe traced: the narrow layer holds the first k of it.

  Returns:
    `Variables` of the full model's structure. In place of a leaf stands a
    tuple with one entry per axis: an [k] int array, in the narrow leaf's
    order, or None for the whole axis.

  Raises:
    ValueError: If a block has no rule.
  """
  params, stats = {}, {}
  shapes = (full.input_shape, *full.shapes)
  wide, thin = full.abstract_variables, small.abstract_variables
  current = None  # All channels of the image.
  for i, (name, module) in enumerate(full.blocks):
    if isinstance(module, _FLATTENING):
      current = _flatten(current, shapes[i])
    sets = {'*': None, 'x': current}
    if 'conv2' in wide.params[name]:
      _pass_on(sets, wide.params[name], thin.params[name], shapes[i][-1])
    if isinstance(module, EncoderBlock):
      _heads(sets, module, small.blocks[i].module, shapes[i][-1], order)
    params[name], moments = {}, {}
    rows = _rule(name, module).layers.split(',')
    for layer, source, target in (row.split() for row in rows if row):
      mine, kept = (
          tree.params[name] if layer == '.' else tree.params[name].get(layer)
          for tree in (wide, thin)
      )
      if mine is None:
        continue
      if target not in sets:
        size, k = (jax.tree.leaves(t)[-1].shape[-1] for t in (mine, kept))
        sets[target] = order(size)[:k]
      index = jax.tree.map_with_path(
          lambda path, leaf, s=sets[source], t=sets[target]: _axes(
              path, leaf, s, t
          ),
          mine,
      )
      if layer == '.':
        params[name] = index
        continue
      params[name][layer] = index
      if layer in wide.stats.get(name, {}):
        moments[layer] = {'mean': (sets[target],), 'var': (sets[target],)}
    if moments:
      stats[name] = moments
    current = sets.get('y', current)
  return Variables(params, stats)


def _rule(name: str, module: Any) -> Rule:
  if type(module) not in RULES:
    raise ValueError(
        f'Block {name!r} is a {type(module).__name__}, for which there is no '
        'rule of width slicing; add one to RULES.'
    )
  return RULES[type(module)]


def _axes(path, leaf, source, target):
  """Index of one leaf: [..., inputs, outputs] for kernels, else [..., C]."""
  free = (None,) * (leaf.ndim - 1)
  if path and path[-1].key == 'kernel':
    return (*free[1:], source, target)
  return (*free, target)


def _flatten(channels, shape):
  """Rows that come from the given channels of a flattened [H, W, C]."""
  if channels is None or len(shape) == 1:
    return channels
  places = np.arange(np.prod(shape[:-1]))[:, None] * shape[-1]
  return (places + channels[None]).reshape(-1)


def _pass_on(sets, wide, thin, channels):
  """The output set of a residual block whose shortcut has no parameters."""
  if 'conv_shortcut' in wide:
    return
  last_conv = 'conv3' if 'conv3' in wide else 'conv2'
  extra = wide[last_conv]['kernel'].shape[-1] - channels
  current = sets['x']
  more = thin[last_conv]['kernel'].shape[-1] - len(current)
  front = more // 2
  first, last = np.arange(front), np.arange(more - front)
  if extra:
    current = current + extra // 2
  # Zeros go before and after the old channels, half of them each.
  parts = [first, current, last + channels + extra // 2]
  join = np if isinstance(current, np.ndarray) else jnp
  sets['y'] = join.concatenate(parts)


def _heads(sets, module, small, dim, order):
  """Sets of the attention: the same coordinates in every head."""
  size = module.head_dim or dim // module.heads
  total = module.heads * size
  places = order(total).reshape(module.heads, size)[:, : small.head_dim]
  sets['heads'] = places.reshape(-1)
  qkv = np.arange(3)[:, None] * total + sets['heads'][None]
  sets['qkv'] = qkv.reshape(-1)


def _is_axes(x) -> bool:
  return type(x) is tuple


def _place(axes, shape):
  """What indexes the leaf: slices where all sets are prefixes."""

  def prefix(axis):
    return axis is None or (
        isinstance(axis, np.ndarray)
        and np.array_equal(axis, np.arange(len(axis)))
    )

  if all(map(prefix, axes)):
    return tuple(slice(None if a is None else len(a)) for a in axes)
  mesh = (jnp.arange(n) if a is None else a for a, n in zip(axes, shape))
  return jnp.ix_(*mesh)


def extract(tree, index):
  """Cuts a narrow model's leaves out of the full model's.

  Args:
    tree: {block name: tree} of full leaves.
    index: That part of `width_index`, same structure.

  Returns:
    The narrow leaves.
  """
  return jax.tree.map(
      lambda axes, leaf: leaf[_place(axes, leaf.shape)],
      index,
      tree,
      is_leaf=_is_axes,
  )


def scatter_add(tree, index, part):
  """Adds narrow leaves in their place.

  Args:
    tree: {block name: tree} of full leaves.
    index: As for `extract`.
    part: Narrow leaves, same structure.

  Returns:
    The full leaves with `part` added to the entries that it holds.
  """
  return jax.tree.map(
      lambda axes, leaf, new: leaf.at[_place(axes, leaf.shape)].add(new),
      index,
      tree,
      part,
      is_leaf=_is_axes,
  )


def mean_change(tree, total, count):
  """Moves every number by the mean change of those who held it.

  x_j + (sum over holders of (y_kj - x_j)) / (number of holders), which is the
  holders' mean of y_kj; a number that nobody held keeps its value.

  Args:
    tree: The server's leaves.
    total: Sums of (weighted) changes, same shapes.
    count: Sums of the weights, same shapes.

  Returns:
    The new leaves.
  """

  def move(x, change, weight):
    # The barrier keeps the division one: where XLA sees that all weights are
    # the same number it takes the reciprocal, and the last bits would not be
    # those of FedAvg.
    safe = jax.lax.optimization_barrier(jnp.where(weight > 0, weight, 1.0))
    return jnp.where(weight > 0, x + change / safe, x)

  return jax.tree.map(move, tree, total, count)
