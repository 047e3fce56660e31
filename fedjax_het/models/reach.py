"""Finds and drops unused weights: those that no example reaches.

On a 1x1 map, as in the last stage of an ImageNet ResNet on 32x32 images, a 3x3
kernel uses only its centre: `conv` takes that slice, and the rest never gets a
gradient. The unused weights are three fifths of a ResNet18. A training step
without them gives the same result with less memory traffic.
"""

import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp


class Part(NamedTuple):
  """The used box of a leaf; weights outside the box are unused.

  Attributes:
    begin: First index along each axis.
    sizes: Length along each axis.
    whole: Shape of the leaf.
  """

  begin: tuple[int, ...]
  sizes: tuple[int, ...]
  whole: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def used_parts(module: nn.Module, shape: tuple[int, ...]) -> dict[str, Part]:
  """Finds the leaves that have unused weights.

  A leaf has unused weights if the module uses only slices of it, in testing and
  in training, and these do not cover it.

  Args:
    module: Called as `module(x, train, mask)`, see `Block`.
    shape: Shape of `x`.

  Returns:
    {path of a leaf: the smallest box around all its slices}, for the
    parameters that have unused weights. {} if training cannot be traced with
    this `x`, such as one example where it needs several.
  """
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  variables = jax.eval_shape(
      lambda key, x: module.init(key, x, False, None), jax.random.key(0), x
  )
  params = variables.get('params', {})
  others = {k: v for k, v in variables.items() if k != 'params'}

  def tested(params, others, x):
    return module.apply({**others, 'params': params}, x, False, None)

  def both(params, others, x):
    trained = module.apply(
        {**others, 'params': params}, x, True, None,
        rngs={'dropout': jax.random.key(0)}, mutable=list(others),
    )  # fmt: skip
    return trained, tested(params, others, x)

  parts = _parts(tested, params, others, x)
  if not parts:
    return {}
  try:
    return _parts(both, params, others, x)
  except Exception:  # A user's module may raise anything.
    return {}


def _parts(run, params, *inputs) -> dict[str, Part]:
  """`used_parts` of a function of parameters and other inputs."""
  jaxpr = jax.make_jaxpr(run)(params, *inputs).jaxpr
  parts = {}
  paths = jax.tree_util.tree_leaves_with_path(params)
  for (path, leaf), var in zip(paths, jaxpr.invars):
    uses = [e for e in jaxpr.eqns if any(v is var for v in e.invars)]
    uses += [v for v in jaxpr.outvars if v is var]
    part = _hull(uses, leaf.shape)
    if part is not None and math.prod(part.sizes) < math.prod(leaf.shape):
      parts[jax.tree_util.keystr(path)] = part
  return parts


def _hull(uses, shape) -> Part | None:
  """The box around all slices; None if the leaf has other uses."""
  boxes = []
  for use in uses:
    if getattr(use, 'primitive', None) is not jax.lax.slice_p:
      return None
    boxes.append((use.params['start_indices'], use.params['limit_indices']))
  if not boxes:
    return None
  begin = tuple(map(min, zip(*(first for first, _ in boxes))))
  end = tuple(map(max, zip(*(stop for _, stop in boxes))))
  sizes = tuple(b - a for a, b in zip(begin, end, strict=True))
  return Part(begin, sizes, tuple(shape))


@flax.struct.dataclass
class Trimmed:
  """A block's parameters without their unused weights.

  Attributes:
    params: The tree, with smaller leaves.
    parts: ((path of a leaf, its box), ...); static.
  """

  params: Any
  parts: tuple[tuple[str, Part], ...] = flax.struct.field(pytree_node=False)


def cut(params: Any, parts: dict[str, Part]) -> Any:
  """Drops a block's unused weights; without any, returns the tree itself."""

  def one(leaf, part):
    end = tuple(map(sum, zip(part.begin, part.sizes)))
    return jax.lax.slice(leaf, part.begin, end)

  if not parts:
    return params
  return Trimmed(_map(one, params, parts), tuple(sorted(parts.items())))


def whole(params: Any) -> Any:
  """Puts zeros around the boxes of `Trimmed` parameters.

  XLA reads slices of the result from the box and does not compute the zeros.
  """

  def one(leaf, part):
    config = [
        (first, full - first - size, 0)
        for first, size, full in zip(*part, strict=True)
    ]
    return jax.lax.pad(leaf, jnp.zeros((), leaf.dtype), config)

  if not isinstance(params, Trimmed):
    return params
  return _map(one, params.params, dict(params.parts))


def put_back(params: Any, old: Any) -> Any:
  """Writes the boxes of `Trimmed` parameters into the whole old ones."""

  def one(leaf, part, old):
    return jax.lax.dynamic_update_slice(old, leaf, part.begin)

  if not isinstance(params, Trimmed):
    return params
  return _map(one, params.params, dict(params.parts), old)


def _map(fn, params, parts, *others):
  def one(path, leaf, *rest):
    part = parts.get(jax.tree_util.keystr(path))
    return leaf if part is None else fn(leaf, part, *rest)

  return jax.tree_util.tree_map_with_path(one, params, *others)
