"""Changes that methods make to a model's layers without rewriting the model.

Each function returns a context. Within it, calls of layers are intercepted
while a model is traced.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp

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


def batch_moments_as_stats() -> AbstractContextManager:
  """Training passes return the batch's own moments as running statistics.

  These are the mean and the unbiased variance over the examples that are not
  masked; the norm's momentum is ignored. If a norm is applied several times,
  the last time counts. Dropout is disabled.

  Returns:
    A context, for `BlockModel.apply(..., train=True)`.
  """

  def record(call, args, kwargs, context):
    norm = context.module
    if isinstance(norm, nn.Dropout):
      return next(iter(_bind(norm, args, kwargs).arguments.values()))
    out = call(*args, **kwargs)
    if isinstance(norm, BatchNorm) and norm.momentum is not None:
      given = _bind(norm, args, kwargs).arguments
      x, mask = given['x'], given['mask']
      mean, var = batch_moments(x, mask)
      count = x.shape[0] if mask is None else jnp.sum(mask)
      count *= x[0, ..., 0].size
      norm.put_variable('batch_stats', 'mean', mean)
      norm.put_variable(
          'batch_stats', 'var', var * count / jnp.maximum(count - 1, 1)
      )
    return out

  return nn.intercept_methods(record)
