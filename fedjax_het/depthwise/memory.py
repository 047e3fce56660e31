"""The paper's estimate of a training step, and schedules that fit a budget.

This is FeDepth's estimate, which reproduces its Table 1. Each block takes

  2 * 4 * B * (entries in the outputs of its modules) + 4 * parameters

bytes for the forward and backward pass of B examples. A module's output counts
if the module computes it: a module without submodules (convolution, norm,
linear, padding shortcut), or a block that does not just return the output of
its last submodule (a residual sum). Activation functions, attention
probabilities and matrix products outside of modules do not count. In a
transformer block the outputs of both norms, of the four linear layers and of
the block count. The logits do not count; only then does the sum reproduce the
paper's figure for the whole net (its net has a norm neither in the stem nor in
the head: `stem_norm=False, final_norm=False`). As in the paper, the cost of a
stage excludes stem, head and optimiser.

`measured` has XLA's figures; plan with those to meet a real memory budget. One
MB is 2^20 bytes.

References:
  Zhang et al., `Memory-adaptive Depth-wise Heterogeneous Federated Learning
  <https://arxiv.org/abs/2303.04887>`_, Table 1.
"""

from collections.abc import Callable, Sequence
import fractions
import math
import re
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_het.depthwise.stages import head_start
from fedjax_het.models.blocks import BlockModel
from fedjax_het.names import shown
from fedjax_het.options import at_least, not_negative, positive

MB = 2**20


class BlockCost(NamedTuple):
  """The inputs of the paper's estimate for one block.

  Attributes:
    name: The block.
    shape: Shape of its output, for one example.
    outputs: Number of entries in the outputs of its modules, for one example.
    params: Number of parameters.
  """

  name: str
  shape: tuple[int, ...]
  outputs: int
  params: int


def _count(tree) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _module_outputs(module: nn.Module, params, stats, shape) -> int:
  """Entries in the outputs of a module and its submodules, for one example."""
  total = 0
  made = []  # Held, so that no two of them share an id.

  def count(call, args, kwargs, context):
    nonlocal total
    out = call(*args, **kwargs)
    if context.method_name == '__call__' and not any(
        out is old for old in (*made, *args)
    ):
      made.append(out)
      total += math.prod(out.shape)
    return out

  def run(params, stats, x):
    tree = {'params': params, **({'batch_stats': stats} if stats else {})}
    with nn.intercept_methods(count):
      return module.apply(tree, x, False, None)

  x = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
  jax.eval_shape(run, params, stats, x)
  return total


def block_table(model: BlockModel) -> tuple[BlockCost, ...]:
  """The blocks of a model, in order; nothing is computed."""
  params, stats = model.abstract_variables
  shapes = (model.input_shape, *model.shapes)
  return tuple(
      BlockCost(
          name,
          shapes[i + 1],
          _module_outputs(module, params[name], stats.get(name), shapes[i]),
          _count(params[name]),
      )
      for i, (name, module) in enumerate(model.blocks)
  )


def paper_mb(cost: BlockCost, batch_size: int = 32) -> float:
  """MB of one block in the paper's estimate, forward and backward."""
  return (2 * 4 * batch_size * cost.outputs + 4 * cost.params) / MB


class Costs(NamedTuple):
  """The memory costs of a model.

  Attributes:
    full: MB of training the whole model.
    span: `(first, stop) -> MB` of a stage with the units first .. stop - 1.
    num_units: Units between stem and head.
  """

  full: float
  span: Callable[[int, int], float]
  num_units: int


def paper_costs(model: BlockModel, batch_size: int = 32) -> Costs:
  """The paper's estimate, in which a stage costs the sum of its units.

  The whole model costs more: the stem and the head are counted, too.

  Args:
    model: The whole model.
    batch_size: Examples a step.

  Returns:
    The costs, in MB.

  Raises:
    ValueError: If `batch_size` is no integer of at least 1.
  """
  at_least(1, batch_size=batch_size)
  table = block_table(model)
  head = head_start(model)
  units = [paper_mb(cost, batch_size) for cost in table[1:head]]
  logits = table[-1]._replace(outputs=0)
  full = math.fsum(
      paper_mb(cost, batch_size) for cost in (*table[:-1], logits)
  )

  def span(first, stop):
    # With all units, stem and head are trained and counted, too.
    return full if stop - first == len(units) else math.fsum(units[first:stop])

  return Costs(full, span, len(units))


def pack(
    costs: Sequence[float] | Costs, budget: float, slack: float = 0.05
) -> tuple[tuple[int, int], ...]:
  """Packs units greedily, from the left, into stages that fit a budget.

  A stage grows as long as it costs at most (1 + slack) * budget. Units that do
  not fit alone are not trained. With a slack of 5 % the paper's budgets give
  the paper's schedules, with none they do not.

  Args:
    costs: The costs of the units in MB, or `Costs`.
    budget: The budget in MB.
    slack: How far a stage may exceed the budget.

  Returns:
    Half-open ranges of units, ascending.

  Raises:
    ValueError: If a number is out of its range, or the last unit does not fit;
      the message then names the smallest budget that does.
  """
  positive(budget=budget)
  not_negative(slack=slack)
  if not isinstance(costs, Costs):
    units = tuple(costs)
    for cost in units:
      not_negative(costs=cost)
    costs = Costs(sum(units), lambda a, b: math.fsum(units[a:b]), len(units))
  # The last factor lets a stage fit a budget equal to its cost, up to rounding.
  limit = budget * (1 + slack) * (1 + 1e-9)
  last = costs.span(costs.num_units - 1, costs.num_units)
  if last > limit:
    enough = _rounded_up(last / (1 + slack))
    raise ValueError(
        f'A budget of {budget:.6g} MB does not hold the last block and the '
        f'head, which take {_shown(last)} MB; the smallest that would do is '
        f'{_shown(enough)} MB (slack {slack:g}).'
    )
  spans, start = [], 0
  while start < costs.num_units:
    stop = start
    while stop < costs.num_units and costs.span(start, stop + 1) <= limit:
      stop += 1
    if stop > start:
      spans.append((start, stop))
    start = max(stop, start + 1)
  return tuple(spans)


def _shown(mb: float) -> str:
  """MB with two decimals; below 1, with three significant digits."""
  return f'{mb:.2f}' if mb >= 1 else f'{mb:.3g}'


def _rounded_up(mb: float) -> float:
  """MB, rounded up to the digits that `_shown` shows."""
  scale = 10 ** max(2, 2 - math.floor(math.log10(mb)))
  return math.ceil(scale * mb) / scale


_BUDGET = re.compile(r'(?P<number>[\d./]+([eE][+-]?\d{1,3})?)(?P<unit>MB)?')


def read_budget(name: str, budget: str | float) -> tuple[float, bool]:
  """Reads a budget from the value of an option.

  Args:
    name: The option's full name, for the message.
    budget: A share of what the whole model takes, such as '1/6' or 0.5, or an
      absolute amount, such as '19.34MB'.

  Returns:
    The number, above 0, and whether it is MB.

  Raises:
    ValueError: If it is neither.
  """
  match = _BUDGET.fullmatch(str(budget).strip())
  try:
    number = float(fractions.Fraction(match['number']))
  except (TypeError, ValueError, ZeroDivisionError, OverflowError):
    number = 0.0
  if not number > 0:
    raise ValueError(
        f'{name} must be a share of the whole model, such as 1/6, or an amount '
        f'such as 19.34MB, and above 0, got {shown(budget)}.'
    )
  return number, bool(match['unit'])


def budget_mb(budget: str | float, full: float) -> float:
  """A budget in MB.

  Args:
    budget: As for `read_budget`.
    full: MB of the whole model.

  Returns:
    MB, above 0.

  Raises:
    ValueError: If it cannot be read, or `full` is not above 0.
  """
  positive(full=full)
  number, absolute = read_budget('budget', budget)
  return number if absolute else number * full
