"""Width slicing: narrow copies of a model, and which entries they hold.

`narrow` makes the narrow architecture. `width_index` gives for every leaf, axis
by axis, the coordinates of the full leaf that the narrow one holds. `extract`
gathers them, and `scatter_add` adds narrow leaves back at these coordinates.
`mean_over_holders` averages the sums; `server.server_step` updates the server.

Blocks are visited in order, each with its input set, the set of kept channels
of its input. A module declares what it does with the set (`models.slices`):

- A layer's input set is the output set of the layer before it. Its output set
  is `index_of(K, k)`, k of its K channels: for HeteroFL the leading ones, for
  FedRolex a window that is shifted every round. Bias and norm have the set of
  the channels they act on.
- A shortcut without parameters keeps its input set. If it pads channels with
  zeros on both sides ('A'), it has the set to which the narrow pad corresponds.
- Flattening is channel-minor: position p, channel c is row p * C + c.
- Attention keeps, inside each of H heads of size m, the same k coordinates of
  q, k and v; the output projection reads those of v.
- Classes and image channels are never cut.
- A head's input set is the output set of the block after which it branches off.

If norms act on each channel alone, the narrow model is the full one with the
other channels set to zero; group and layer norm see fewer channels.

References:
  Diao et al., `HeteroFL <https://arxiv.org/abs/2010.01264>`_, ICLR 2021.
  Alam et al., `FedRolex <https://arxiv.org/abs/2212.01548>`_, NeurIPS 2022.
"""

from collections.abc import Callable
import dataclasses
from fractions import Fraction
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.aggregation.server import weighted_mean
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.models.slices import Cut, Slices, change_modules
from fedjax_het.options import between

# `(size, kept) -> [kept] int`: which of a layer's channels are kept.
IndexOf = Callable[[int, int], Any]


class Level(NamedTuple):
  """One width of a model.

  Attributes:
    rate: The share of the channels.
    model: The narrow model.
    index: Which entries of the full parameters it holds, see `width_index`.
  """

  rate: float
  model: BlockModel
  index: Any


def leading(size: int, kept: int) -> np.ndarray:
  """The first `kept` of `size` channels, as in HeteroFL."""
  del size
  return np.arange(kept)


def make_level(
    model: BlockModel, rate: Fraction, index_of: IndexOf = leading
) -> Level:
  """The width `rate` of a model, ceil(rate * K) of K channels.

  Args:
    model: The full model.
    rate: The share of the channels, exact.
    index_of: Which channels of a layer are kept.

  Returns:
    The level.

  Raises:
    ValueError: If the rate is not in (0, 1], or a module cannot be narrowed.
  """
  between(0, 1, above=True, rate=rate)
  small = narrow(model, lambda k: math.ceil(rate * k))
  index = width_index(model, small, index_of).params
  return Level(float(rate), small, index)


def narrow(model: BlockModel, size: Callable[[int], int]) -> BlockModel:
  """The same architecture with fewer channels.

  Args:
    model: The full model.
    size: Maps the channels K of a layer, or the size of an attention head, to
      the number that is kept, such as `lambda k: math.ceil(k / 2)`.

  Returns:
    A model with the same block names; without pretrained parameters, which
    have the full width.

  Raises:
    ValueError: If a module cannot be narrowed, or is left without a channel.
  """

  def smaller(name, module):
    changes = {}
    for field in _slices(name, module).fields:
      if not hasattr(module, field):
        raise ValueError(
            f'Block {name!r}: the slices of {type(module).__name__} name the '
            f'field {field!r}, which it does not have.'
        )
      full = getattr(module, field)
      if full is None:
        raise ValueError(
            f'Block {name!r} of {model.name!r} cannot be narrowed with '
            f'{field}=None; give it a number.'
        )
      kept = size(full)
      if not 1 <= kept <= full:
        raise ValueError(
            f'Block {name!r} of {model.name!r} would keep {kept} of its '
            f'{full} channels; at least 1 and at most all can be kept.'
        )
      changes[field] = kept
    return module.clone(**changes)

  return dataclasses.replace(change_modules(model, smaller), pretrained=None)


def width_index(
    full: BlockModel, small: BlockModel, index_of: IndexOf = leading
) -> Variables:
  """Which coordinates of the full model's leaves a narrow model holds.

  Args:
    full: The full model.
    small: Its narrow model, from `narrow`.
    index_of: `(size, kept) -> [kept] int`, maybe traced: which of the channels
      0..size-1 of a layer the narrow layer holds, in its order. It is called
      for each layer; layers with equal sizes should get the same result.

  Returns:
    `Variables` of the full model's structure. Each leaf is replaced by a
    tuple with one entry per axis: an [k] int array, in the narrow leaf's
    order, or None for the whole axis.

  Raises:
    ValueError: If a module cannot be narrowed, or what it declares does not
      fit its parameters.
  """
  params, stats = {}, {}
  narrow_modules = {block.name: block.module for block in small.all_blocks}
  wide, thin = full.abstract_variables, small.abstract_variables

  def walk(blocks, current):
    """Follows the channels through a chain; returns each block's output set."""
    behind = {}
    for name, module in blocks:
      cut = Cut(
          module,
          narrow_modules[name],
          wide.params[name],
          thin.params[name],
          full.inputs[name],
          current,
          index_of,
      )
      params[name], moments, current = _block_index(
          name, cut, wide.stats.get(name, {})
      )
      if moments:
        stats[name] = moments
      behind[name] = current
    return behind

  behind = walk(full.blocks, None)  # All channels of the image.
  for head in full.heads:
    walk(head.blocks, behind[head.after])
  return Variables(params, stats)


def class_leaves(model: BlockModel) -> dict[str, Any]:
  """Which leaves of the classifier have one entry for each class.

  They are in the trunk's last block with parameters: the layers whose outputs
  are the set '*', of as many entries as the model has classes.

  Args:
    model: A model that can be narrowed.

  Returns:
    {block name: tree of bool} of the parameters' structure; the last axis of a
    leaf with True counts classes.

  Raises:
    ValueError: If that block does not say how it is narrowed.
  """
  params = model.abstract_variables.params
  found = jax.tree.map(lambda leaf: False, params)
  with_params = [b for b in model.blocks if jax.tree.leaves(params[b.name])]
  if with_params:
    name, module = with_params[-1]
    found[name] = _of_classes(name, module, params[name], model.num_classes)
  return found


def _of_classes(name: str, module, params, num_classes: int):
  """`class_leaves` of one block."""
  declared = _slices(name, module)
  if declared.inner:
    inner = getattr(module, declared.inner)
    return {
        key: _of_classes(name, inner, tree, num_classes)
        for key, tree in params.items()
    }

  def all_classes(layer, tree):
    whole = declared.layers.get(layer, ('', ''))[1] == '*'
    return jax.tree.map(
        lambda leaf: whole and leaf.shape[-1:] == (num_classes,), tree
    )

  return {layer: all_classes(layer, tree) for layer, tree in params.items()}


def _slices(name: str, module: Any) -> Slices:
  """The `slices` of a module; raises ValueError if it has none."""
  declared = getattr(module, 'slices', None)
  if not isinstance(declared, Slices):
    raise ValueError(
        f'Block {name!r} is a {type(module).__name__}, which does not say how '
        'it is narrowed; give the class (of a library, a subclass) an '
        'attribute slices=Slices(...), see docs/adding_a_model.md.'
    )
  return declared


def _block_index(name: str, cut: Cut, stats):
  """One block's index of parameters and statistics, and its output set."""
  declared = _slices(name, cut.full)
  if declared.inner:
    return _inner_index(name, declared, cut, stats)
  if declared.flattens:
    cut = cut._replace(x=_flatten(cut.x, cut.shape))
  sets = {'*': None, 'x': cut.x}
  if declared.sets is not None:
    sets.update(declared.sets(cut))
  missing = sorted(set(cut.params) - set(declared.layers))
  if missing:
    raise ValueError(
        f'Block {name!r}: the slices of {type(cut.full).__name__} do not name '
        f'its parameters {", ".join(missing)}.'
    )
  index, moments = {}, {}
  for layer, (source, target) in declared.layers.items():
    if layer not in cut.params:
      continue
    if source not in sets:
      raise ValueError(
          f'Block {name!r}: the slices of {type(cut.full).__name__} give '
          f'{layer!r} the inputs {source!r}, which is the set of no layer '
          f'before it; there are {", ".join(sorted(sets))}.'
      )
    mine, kept = cut.params[layer], cut.small_params[layer]
    if target not in sets:
      size, k = (jax.tree.leaves(t)[-1].shape[-1] for t in (mine, kept))
      sets[target] = cut.index_of(size, k)

    def axes(path, leaf, s=sets[source], t=sets[target], layer=layer):
      return _axes(path[-1].key if path else layer, leaf, s, t)

    index[layer] = jax.tree.map_with_path(axes, mine)
    _check_fit(name, cut, layer, index[layer], kept)
    if layer in stats:
      moments[layer] = jax.tree.map(
          lambda leaf, t=sets[target]: _axes('', leaf, None, t), stats[layer]
      )
  return index, moments, sets.get('y', cut.x)


def _inner_index(name: str, declared: Slices, cut: Cut, stats):
  """`_block_index` of a module that wraps the one with the parameters."""
  full, small = (getattr(m, declared.inner) for m in (cut.full, cut.small))
  key = next(iter(cut.params), declared.inner)
  inner = cut._replace(
      full=full,
      small=small,
      params=cut.params.get(key, {}),
      small_params=cut.small_params.get(key, {}),
  )
  index, moments, current = _block_index(name, inner, stats.get(key, {}))
  if declared.unflattened is not None:
    current = _flatten(current, declared.unflattened(cut.shape))
  return (
      {key: index} if key in cut.params else {},
      {key: moments} if moments else {},
      current,
  )


def _axes(leaf_name: str, leaf, source, target):
  """Index of one leaf: [..., inputs, outputs] for kernels, else [..., C]."""
  free = (None,) * (leaf.ndim - 1)
  if leaf_name == 'kernel':
    return (*free[1:], source, target)
  return (*free, target)


def _check_fit(name: str, cut: Cut, layer: str, index, kept) -> None:
  """Raises ValueError if the index does not give the narrow shapes."""
  full = jax.tree.leaves(cut.params[layer])
  held = jax.tree.leaves(index, is_leaf=_is_axes)
  for axes, leaf, small in zip(held, full, jax.tree.leaves(kept), strict=True):
    sizes = zip(axes, leaf.shape, strict=True)
    got = tuple(size if axis is None else len(axis) for axis, size in sizes)
    if got != small.shape:
      raise ValueError(
          f'Block {name!r}: by the slices of {type(cut.full).__name__} a leaf '
          f'of {layer!r} has the shape {got}, but the narrow module has '
          f'{small.shape}.'
      )


def _flatten(channels, shape):
  """Rows that come from the given channels of a flattened [H, W, C]."""
  if channels is None or len(shape) == 1:
    return channels
  places = np.arange(np.prod(shape[:-1]))[:, None] * shape[-1]
  return (places + channels[None]).reshape(-1)


def _is_axes(x) -> bool:
  return type(x) is tuple


def _place(axes, shape):
  """The index into the leaf: slices where all sets are prefixes."""

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
  """Adds narrow leaves to their entries of the full leaves.

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


def mean_over_holders(total, count):
  """The weighted mean of every entry over the clients that held it.

  With `server.server_step` and its default optimiser the new value of an entry
  is x_j + (sum over holders of (y_kj - x_j)) / (number of holders), the
  holders' mean of y_kj.

  Args:
    total: {block: tree}, sums of (weighted) changes.
    count: Sums of the weights, same shapes.

  Returns:
    What `server.weighted_mean` returns: {block: tree} of the means, 0 where no
    client held an entry, and whether any client did, bool of the same shapes.
  """
  # The barrier keeps this a division: if XLA sees that all weights are the same
  # number, it multiplies by the reciprocal, and the last bits differ from
  # FedAvg's.
  return weighted_mean([(total, jax.lax.optimization_barrier(count))])
