"""Changes that methods make to a model's layers without rewriting the model.

Each function returns a context. Within it, calls of layers are intercepted
while a model is traced.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.models import reach
from fedjax_het.models.blocks import BlockModel
from fedjax_het.models.layers import Scaler
from fedjax_het.models.norm import (
  BatchNorm,
  GroupNorm,
  Identity,
  LayerNorm,
  batch_moments,
)

NORMS = (BatchNorm, GroupNorm, Identity, LayerNorm)
# Flax's own, which cancel a factor, too.
_OTHER_NORMS = (
    nn.BatchNorm, nn.GroupNorm, nn.InstanceNorm, nn.LayerNorm, nn.RMSNorm,
)  # fmt: skip


def _bind(layer: nn.Module, args, kwargs) -> inspect.BoundArguments:
  """The arguments of a layer's call by name, with its defaults."""
  bound = inspect.signature(layer.__call__).bind(*args, **kwargs)
  bound.apply_defaults()
  return bound


def scaled_norm_inputs(
    factor: float, skip: Collection[str] = ()
) -> AbstractContextManager:
  """Multiplies the input of every norm layer, including those of 'none'.

  Args:
    factor: 1 / rate for HeteroFL's Scaler; 1 changes nothing.
    skip: Names of the norm layers whose input is not multiplied, such as
      'norm_shortcut'.

  Returns:
    A context.
  """
  if factor == 1:
    return nullcontext()

  def scale(call, args, kwargs, context):
    norm = context.module
    if isinstance(norm, NORMS) and norm.name not in skip:
      bound = _bind(norm, args, kwargs)
      bound.arguments['x'] = factor * bound.arguments['x']
      args, kwargs = bound.args, bound.kwargs
    return call(*args, **kwargs)

  return nn.intercept_methods(scale)


def scaled_outputs(factor: float) -> AbstractContextManager:
  """Multiplies the output of every convolution and of every `Scaler`.

  A convolution's output includes its bias. A norm after a convolution cancels
  the factor; if the norm's output is then added to others, a `Scaler` after the
  norm applies the factor instead.

  Args:
    factor: 1 / r for SplitMix; 1 changes nothing.

  Returns:
    A context.
  """
  if factor == 1:
    return nullcontext()

  def scale(call, args, kwargs, context):
    out = call(*args, **kwargs)
    return factor * out if _is_scaled(context.module) else out

  return nn.intercept_methods(scale)


def _is_scaled(module: nn.Module) -> bool:
  return isinstance(module, nn.Conv | Scaler)


def scaled_behind_norms(model: BlockModel) -> bool:
  """Whether `scaled_outputs` scales an output that no norm follows.

  Such a factor reaches the model's outputs. The model is traced in training,
  with two examples; nothing is computed.

  Args:
    model: The model.

  Returns:
    Whether the last of its convolutions, `Scaler`s and norms is no norm.
  """
  scaled = [False]

  def follow(call, args, kwargs, context):
    out, module = call(*args, **kwargs), context.module
    if _is_scaled(module):
      scaled[0] = True
    elif isinstance(module, (*NORMS, *_OTHER_NORMS)):
      # Identity is the norm of the policy 'none'.
      scaled[0] &= isinstance(module, Identity)
    return out

  def train(variables, x, key):
    return model.apply(variables, x, train=True, key=key)

  x = jax.ShapeDtypeStruct((2, *model.input_shape), jnp.float32)
  with nn.intercept_methods(follow):
    jax.eval_shape(train, model.abstract_variables, x, jax.random.key(0))
  return scaled[0]


@functools.cache
def scaled_layers(model: BlockModel) -> frozenset[tuple[str, ...]]:
  """Paths of the layers whose outputs `scaled_outputs` multiplies.

  Args:
    model: The model; its blocks are traced, nothing is computed.

  Returns:
    (block name, names of modules in the block).
  """
  found = set()
  for name, module in model.blocks:

    def follow(call, args, kwargs, context, name=name):
      if _is_scaled(context.module):
        found.add((name, *context.module.path))
      return call(*args, **kwargs)

    def init(key, x, module=module):
      return module.init(key, x, False, None)

    x = jax.ShapeDtypeStruct((1, *model.inputs[name]), jnp.float32)
    with nn.intercept_methods(follow):
      jax.eval_shape(init, jax.random.key(0), x)
  return frozenset(found)


def batch_moments_as_stats(
    mask: jax.Array | None = None, found: set | None = None
) -> AbstractContextManager:
  """Training passes return the batch's own moments as running statistics.

  These are the mean and the unbiased variance over the examples that are not
  masked; the norm's momentum is ignored. If a norm is applied several times,
  the last time counts. Dropout is disabled.

  Args:
    mask: [B] bool, the mask for Flax's own norms, whose modules may not pass it
      on.
    found: Gets the path of each norm in its block.

  Returns:
    A context, for `BlockModel.apply(..., train=True)`.
  """

  def record(call, args, kwargs, context):
    norm = context.module
    if isinstance(norm, nn.Dropout):
      return next(iter(_bind(norm, args, kwargs).arguments.values()))
    out = call(*args, **kwargs)
    taken = _taken_by_norm(norm, args, kwargs, mask)
    if taken is not None:
      x, counted = taken
      mean, var = batch_moments(x, counted)
      count = x.shape[0] if counted is None else jnp.sum(counted)
      count *= x[0, ..., 0].size
      norm.put_variable('batch_stats', 'mean', mean)
      norm.put_variable(
          'batch_stats', 'var', var * count / jnp.maximum(count - 1, 1)
      )
      if found is not None:
        found.add(norm.path)
    return out

  return nn.intercept_methods(record)


def _taken_by_norm(norm: nn.Module, args, kwargs, mask):
  """The examples whose moments a norm keeps, and their mask.

  None for other layers, and for norms that keep no moments in training.
  """
  if isinstance(norm, BatchNorm) and norm.momentum is not None:
    given = _bind(norm, args, kwargs).arguments
    return given['x'], given['mask']
  if isinstance(norm, nn.BatchNorm) and norm.axis == -1:
    given = _bind(norm, args, kwargs).arguments
    frozen = given['use_running_average']
    frozen = norm.use_running_average if frozen is None else frozen
    x = given['x']
    # A module may have moved other axes into the first one.
    fits = mask is not None and len(x) == len(mask)
    return None if frozen else (x, mask if fits else None)
  return None


def keeps_moments_of_batches(model: BlockModel) -> bool:
  """Whether `batch_moments_as_stats` sets all of a model's statistics.

  It does not set those of nnx modules, and of other layers than batch norms.
  Blocks are traced in training, with two examples; nothing is computed.

  Args:
    model: The model.

  Returns:
    Whether each leaf of its statistics is a mean or variance of such a norm.
  """
  params, stats = model.abstract_variables
  for name, module in model.all_blocks:
    if name not in stats:
      continue

    def train(params, stats, x, key, module=module):
      return module.apply(
          dict(params=reach.whole(params), batch_stats=stats), x, True, None,
          rngs=dict(dropout=key), mutable=['batch_stats'],
      )  # fmt: skip

    found: set[tuple[str, ...]] = set()
    x = jax.ShapeDtypeStruct((2, *model.inputs[name]), jnp.float32)
    with batch_moments_as_stats(found=found):
      jax.eval_shape(train, params[name], stats[name], x, jax.random.key(0))
    if len(jax.tree.leaves(stats[name])) != 2 * len(found):
      return False
  return True
