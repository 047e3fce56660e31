"""Floating-point operations of the matrix products of a model.

Counts the convolutions and `dot_general`s of the traced program, with two
operations per multiply-add. Products with padding zeros are not counted: on
small maps they are most of the computation, and useless.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from fedjax_het.kernels.lowering import conv_lowering
from fedjax_het.models.blocks import BlockModel

# Arrays with more entries are not evaluated.
_SMALL = 4096


def product_flops(fn: Callable[..., object], *args) -> int:
  """Operations of all products in `fn`.

  Args:
    fn: A traceable function with loops of known length. A condition counts as
      its branch with the most operations.
    *args: Its arguments, arrays or shapes.

  Returns:
    The number of operations.

  Raises:
    ValueError: If the length of a `while` loop is not known.
  """
  with conv_lowering('native'):
    return program_flops(jax.make_jaxpr(fn)(*args), {})


def program_flops(
    program: core.ClosedJaxpr, known: Mapping[int, int]
) -> int:
  """Operations of all products in a traced program.

  Args:
    program: The program.
    known: {position of an argument: its value}. These values and the program's
      constants determine the lengths of loops.

  Returns:
    The number of operations.

  Raises:
    ValueError: If they do not determine the length of a loop.
  """
  jaxpr = program.jaxpr
  values = dict(zip(jaxpr.constvars, map(_small, program.consts), strict=True))
  values |= {jaxpr.invars[i]: np.int32(value) for i, value in known.items()}
  values = {name: v for name, v in values.items() if v is not None}
  return _Counter().count(jaxpr, values)[0]


class _Counter:
  """Counts operations; caches subprograms that depend on no known value."""

  def __init__(self):
    self._plain: dict[int, tuple[int, list[np.ndarray | None]]] = {}

  def count(self, program, known) -> tuple[int, list[np.ndarray | None]]:
    """The number of operations, and the program's results; None if unknown."""
    values = dict(known)
    if not values and id(program) in self._plain:
      return self._plain[id(program)]

    def read(name):
      if isinstance(name, core.Literal):
        return _small(name.val)
      return values.get(name)

    total = 0
    for eqn in program.eqns:
      given = [read(name) for name in eqn.invars]
      number, made = self._equation(eqn, given)
      total += number
      values |= {
          name: value
          for name, value in zip(eqn.outvars, made, strict=False)
          if value is not None
      }
    made = total, [read(name) for name in program.outvars]
    if not known:
      self._plain[id(program)] = made
    return made

  def _equation(self, eqn, given) -> tuple[int, Sequence[np.ndarray | None]]:
    name = eqn.primitive.name
    if name == 'dot_general':
      return _dot(eqn), ()
    if name == 'conv_general_dilated':
      return _conv(eqn), ()
    inner, params = _programs(eqn.params), eqn.params
    if name == 'while':
      body = params['body_jaxpr'].jaxpr
      number = self._inner(body, given[params['cond_nconsts'] :][
          : params['body_nconsts']])  # fmt: skip
      return number and number * _length(eqn, given), ()
    if name == 'scan':
      return self._scan(params, inner[0], given), ()
    if name == 'cond':
      return max(self._inner(branch, given[1:]) for branch in inner), ()
    if len(inner) == 1 and len(inner[0].invars) == len(given):
      return self.count(inner[0], _known(inner[0], given))
    if inner:
      return sum(self.count(one, {})[0] for one in inner), ()
    return 0, _computed(eqn, given)

  def _scan(self, params, body, given) -> int:
    constant = given[: params['num_consts']]
    try:
      return params['length'] * self._inner(body, constant)
    except ValueError:
      # An inner loop's length may depend on what is scanned, such as `arange`.
      carry = [None] * params['num_carry']
      scanned = given[params['num_consts'] + params['num_carry'] :]
      return sum(
          self._inner(
              body,
              [*constant, *carry, *(x if x is None else x[i] for x in scanned)],
          )
          for i in range(params['length'])
      )

  def _inner(self, program, given) -> int:
    """Operations, if the first arguments are `given`; None if unknown."""
    return self.count(program, _known(program, given))[0]


def _known(program: core.Jaxpr, given) -> dict[Any, Any]:
  pairs = zip(program.invars, given, strict=False)
  return {name: value for name, value in pairs if value is not None}


def _programs(params: Mapping[str, Any]) -> list[core.Jaxpr]:
  """The programs inside an operation, such as the body of a loop."""
  kinds = core.Jaxpr | core.ClosedJaxpr
  leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, kinds))
  return [
      getattr(leaf, 'jaxpr', leaf) for leaf in leaves if isinstance(leaf, kinds)
  ]


def _small(value) -> np.ndarray | None:
  """A value as an array; None if it is large, or a random key."""
  dtype = getattr(value, 'dtype', np.float32)
  if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
    return None
  return np.asarray(value) if np.size(value) <= _SMALL else None


def _computed(eqn, given) -> Sequence[np.ndarray | None]:
  """The results of an operation on known values; () if one is unknown."""
  if eqn.primitive.name == 'select_n' and given[0] is None:
    # The condition is unknown: take the maximum, as for `cond`.
    cases = [case for case in given[1:] if case is not None]
    return [np.max(cases, axis=0)] if len(cases) == len(given) - 1 else ()
  if any(value is None for value in given):
    return ()
  if not given and (
      eqn.primitive.name != 'iota' or eqn.outvars[0].aval.size > _SMALL
  ):
    return ()
  args = [
      jnp.asarray(value, name.aval.dtype)
      for value, name in zip(given, eqn.invars, strict=True)
  ]
  made = eqn.primitive.bind(*args, **eqn.params)
  return [*map(_small, made if eqn.primitive.multiple_results else [made])]


def _length(eqn, given) -> int:
  """The number of iterations of a `while` loop over a range of integers.

  `fori_loop` makes such loops: the condition is i < end, and the body adds 1.
  """
  params = eqn.params
  condition = params['cond_jaxpr'].jaxpr
  skipped = params['cond_nconsts'] + params['body_nconsts']
  carry = given[skipped:]
  entries = dict(
      zip(
          condition.invars,
          [*given[: params['cond_nconsts']], *carry],
          strict=True,
      )
  )
  body = params['body_jaxpr'].jaxpr
  if [e.primitive.name for e in condition.eqns] == ['lt']:
    first, end = condition.eqns[0].invars
    place = condition.invars.index(first) - params['cond_nconsts']
    before = body.invars[params['body_nconsts'] + place]
    steps = [
        _small(e.invars[1].val)
        for e in body.eqns
        if e.outvars[0] is body.outvars[place]
        and e.primitive.name == 'add'
        and e.invars[0] is before
        and isinstance(e.invars[1], core.Literal)
    ]
    begin, stop = (
        _small(n.val) if isinstance(n, core.Literal) else entries[n]
        for n in (first, end)
    )
    if steps == [1] and begin is not None and stop is not None:
      return max(int(stop) - int(begin), 0)
  raise ValueError('The length of a while loop is not known.')


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
             params['padding'][axis - 2][0], params['lhs_dilation'][axis - 2],
             params['rhs_dilation'][axis - 2])
      for axis in range(2, len(out))
  ]  # fmt: skip
  batch, features = (out[spec.out_spec[axis]] for axis in (0, 1))
  return 2 * batch * features * rhs[spec.rhs_spec[1]] * math.prod(pairs)


def _pairs(
    size: int, kernel: int, out: int, stride: int, before: int,
    spread: int, apart: int,
) -> int:
  """(output, tap) pairs along one axis that read a pixel of the image.

  Pixels are `spread` apart, with zeros between them; taps are `apart` apart.
  """  # fmt: skip
  places = (
      o * stride + tap * apart - before
      for o in range(out)
      for tap in range(kernel)
  )
  return sum(
      0 <= place <= (size - 1) * spread and place % spread == 0
      for place in places
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
    positions: Positions of blocks of the trunk; None for all.
    heads: Names of further heads that are computed in the same pass.

  Returns:
    The number of operations.

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
