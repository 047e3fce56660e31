"""Floating-point operations of the matrix products of a model.

Counted from the traced program, convolutions and `dot_general` alone, two for
each multiplication with its addition. Products with the zeros of a padding are
not counted: where maps are small they are most of what is computed, and none of
it is useful.
"""

from collections.abc import Callable, Iterable, Sequence
import math

import jax
import jax.numpy as jnp

from fedjax_het.kernels.lowering import conv_lowering
from fedjax_het.models.blocks import BlockModel


def product_flops(fn: Callable[..., object], *args) -> int:
  """Operations of all products in `fn`.

  Args:
    fn: A traceable function, its loops of known length.
    *args: Its arguments, arrays or shapes.

  Returns:
    Their number.

  Raises:
    ValueError: If there is a `while` loop, whose length is not known.
  """
  with conv_lowering('native'):
    return _count(jax.make_jaxpr(fn)(*args).jaxpr)


def _count(jaxpr) -> int:
  total = 0
  for eqn in jaxpr.eqns:
    name, times = eqn.primitive.name, 1
    if name == 'while':
      raise ValueError('The length of a while loop is not known.')
    if name == 'scan':
      times = eqn.params['length']
    if name == 'dot_general':
      total += _dot(eqn)
    elif name == 'conv_general_dilated':
      total += _conv(eqn)
    else:
      for value in eqn.params.values():
        inner = getattr(value, 'jaxpr', value)
        if hasattr(inner, 'eqns'):
          total += times * _count(inner)
  return total


def _dot(eqn) -> int:
  lhs = eqn.invars[0].aval.shape
  (contracted, _), _ = eqn.params['dimension_numbers']
  summed = math.prod(lhs[axis] for axis in contracted)
  return 2 * math.prod(eqn.outvars[0].aval.shape) * summed


def _conv(eqn) -> int:
  lhs, rhs = (var.aval.shape for var in eqn.invars)
  out, params = eqn.outvars[0].aval.shape, eqn.params
  spec = params['dimension_numbers']
  pairs = [
      _pairs(lhs[spec.lhs_spec[axis]], rhs[spec.rhs_spec[axis]],
             out[spec.out_spec[axis]], params['window_strides'][axis - 2],
             params['padding'][axis - 2][0])
      for axis in range(2, len(out))
  ]  # fmt: skip
  batch, features = (out[spec.out_spec[axis]] for axis in (0, 1))
  return 2 * batch * features * rhs[spec.rhs_spec[1]] * math.prod(pairs)


def _pairs(size: int, kernel: int, out: int, stride: int, before: int) -> int:
  """(output, tap) pairs along one axis that read a pixel of the image."""
  return sum(
      0 <= o * stride + tap - before < size
      for o in range(out)
      for tap in range(kernel)
  )


def forward_flops(
    model: BlockModel,
    positions: Sequence[int] | None = None,
    *,
    heads: Iterable[str] = (),
) -> int:
  """Operations of one example's forward pass through some blocks.

  Args:
    model: The model.
    positions: Of blocks of the trunk; None for all.
    heads: Names of further heads that are computed in the same pass.

  Returns:
    Their number.

  Raises:
    ValueError: For an unknown head.
  """

  def one(head, i):
    shape = model.inputs[model.path(head)[i].name]
    return product_flops(
        lambda variables, x: model.apply(
            variables, x, start=i, stop=i + 1, head=head
        ),
        model.abstract_variables,
        jax.ShapeDtypeStruct((1, *shape), jnp.float32),
    )

  if positions is None:
    positions = range(len(model.blocks))
  places = [(None, i) for i in positions]
  for head in heads:
    own = range(model.branch(head), len(model.path(head)))
    places += [(head, i) for i in own]
  return sum(one(head, i) for head, i in places)
