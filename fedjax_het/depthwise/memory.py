"""How much memory a training step takes, and schedules that fit a budget.

Two estimates:

  'paper': FeDepth's own, which reproduces its Table 1. Of each block,
      2 * 4 * B * (numbers in the outputs of its modules) + 4 * parameters
    bytes, forward and backward, B examples. A module's output counts if the
    module makes it: that of a module with no parts (convolution, norm, linear,
    padding shortcut), and that of a block which does more than hand on the
    output of its last part (a residual sum). Activation functions, attention
    probabilities and matrix products outside of modules are no modules. In a
    transformer these are the outputs of both norms, of the four linear layers
    and of the block. The last block's outputs, the logits, are left out, which
    is what fits the paper's 116.04 MB of the whole net (its net has neither
    a norm in the stem nor one in the head: `stem_norm=False,
    final_norm=False`). Stem, head and the optimiser are not counted in the
    cost of a stage, as in the paper.
  'xla': what the compiler plans for the training step of a stage on the
    present backend: arguments, outputs and temporary buffers, stem, head,
    frozen blocks and optimiser included.

They differ. PreResNet-20 in batches of 32 takes 219 MB of temporaries on a CPU,
most of it slices of convolutions, and the stages of the 1/6 budget at most 52:
a factor of 4.2, not 6, since the first holds the stem, too. A schedule that
shall keep a real budget is planned with 'xla'.

One MB is 2^20 bytes.

References:
  Zhang et al., `Memory-adaptive Depth-wise Heterogeneous Federated Learning
  <https://arxiv.org/abs/2303.04887>`_, Table 1.
"""

from collections.abc import Callable, Sequence
import fractions
import functools
import math
import re
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_het.data.federated import Batch
from fedjax_het.depthwise.stages import (
  Stage,
  head_start,
  make_stages,
  stage_loss,
)
from fedjax_het.engine.types import LocalTraining
from fedjax_het.models.blocks import BlockModel, Variables

MB = 2**20
PLANNERS = ('paper', 'xla')


class BlockCost(NamedTuple):
  """What the paper's estimate needs of one block.

  Attributes:
    name: The block.
    shape: Of its output, for one example.
    outputs: Numbers in the outputs of its modules, for one example.
    params: Number of parameters.
  """

  name: str
  shape: tuple[int, ...]
  outputs: int
  params: int


def _count(tree) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _module_outputs(module: nn.Module, params, stats, shape) -> int:
  """Numbers in the outputs that a module and its parts make of one example."""
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
  """What a planner knows of a model.

  Attributes:
    full: MB of training the whole model.
    span: `(first, stop) -> MB` of a stage of these units.
    num_units: Units between stem and head.
  """

  full: float
  span: Callable[[int, int], float]
  num_units: int


def paper_costs(model: BlockModel, batch_size: int = 32) -> Costs:
  """The paper's estimate, in which a stage costs the sum of its units."""
  table = block_table(model)
  head = head_start(model)
  units = [paper_mb(cost, batch_size) for cost in table[1:head]]
  logits = table[-1]._replace(outputs=0)
  full = math.fsum(
      paper_mb(cost, batch_size) for cost in (*table[:-1], logits)
  )
  return Costs(full, lambda a, b: math.fsum(units[a:b]), len(units))


class StepMemory(NamedTuple):
  """What XLA plans for one training step, in bytes.

  Attributes:
    arguments: Variables, optimiser state and one batch.
    outputs: What the step returns.
    reused: Outputs that take the place of arguments.
    temporary: All that lives within the step.
  """

  arguments: int
  outputs: int
  reused: int
  temporary: int

  @property
  def mb(self) -> float:
    """All together in MB."""
    total = self.arguments + self.outputs - self.reused + self.temporary
    return total / MB


def step_memory(stage: Stage, local: LocalTraining) -> StepMemory:
  """Compiles the training step of a stage and asks what it takes.

  Args:
    stage: The stage.
    local: The optimiser and the batch size.

  Returns:
    XLA's plan on the present backend.
  """
  whole = stage.model.abstract_variables
  part = stage.pick(whole)
  names = [stage.model.block_names[i] for i in stage.frozen]
  frozen = Variables(*({n: t[n] for n in names if n in t} for t in whole))

  def tx():
    return local.optimizer(local.learning_rate(jnp.int32(0)))

  def step(part, opt_state, frozen, batch, key):
    loss_fn = stage_loss(stage, frozen)
    (loss, (stats, _)), grads = jax.value_and_grad(
        lambda p: loss_fn(Variables(p, part.stats), batch, key), has_aux=True
    )(part.params)
    updates, opt_state = tx().update(grads, opt_state, part.params)
    params = optax.apply_updates(part.params, updates)
    return Variables(params, stats), opt_state, loss

  def batch(key):
    size = local.batch_size
    place = jnp.zeros(size, jnp.int32)
    mask = None if local.drop_last else jnp.ones(size, bool)
    x = jnp.zeros((size, *stage.model.input_shape))
    return Batch(x, place, mask, place), key

  stats = (
      jax.jit(step, donate_argnums=(0, 1))
      .lower(
          part,
          jax.eval_shape(lambda p: tx().init(p), part.params),
          frozen,
          *jax.eval_shape(batch, jax.random.key(0)),
      )
      .compile()
      .memory_analysis()
  )
  return StepMemory(
      int(stats.argument_size_in_bytes),
      int(stats.output_size_in_bytes),
      int(stats.alias_size_in_bytes),
      int(stats.temp_size_in_bytes),
  )


def measured_costs(
    model: BlockModel, local: LocalTraining, heads: str = 'shared'
) -> Costs:
  """XLA's plan of candidate stages; each is compiled when it is asked for."""
  num_units = head_start(model) - 1

  @functools.cache
  def span(first, stop):
    (stage,) = make_stages(model, [(first, stop)], heads=heads)
    return step_memory(stage, local).mb

  return Costs(span(0, num_units), span, num_units)


def pack(
    costs: Sequence[float] | Costs, budget: float, slack: float = 0.05
) -> tuple[tuple[int, int], ...]:
  """Packs units greedily, from the left, into stages that fit a budget.

  A stage grows as long as it costs at most (1 + slack) * budget. Units that
  fit nowhere alone are left out: they are not trained. With a slack of 5 %
  the paper's budgets give the paper's schedules, with none they do not.

  Args:
    costs: Of the units, or `Costs`.
    budget: In MB.
    slack: How far a stage may exceed the budget.

  Returns:
    Half-open ranges of units, ascending.

  Raises:
    ValueError: If the last unit does not fit; names the smallest budget that
      would do.
  """
  if not isinstance(costs, Costs):
    units = tuple(costs)
    costs = Costs(sum(units), lambda a, b: math.fsum(units[a:b]), len(units))
  # A budget of exactly a stage's cost holds it, whatever the rounding.
  limit = budget * (1 + slack) * (1 + 1e-9)
  last = costs.span(costs.num_units - 1, costs.num_units)
  if last > limit:
    enough = math.ceil(100 * last / (1 + slack)) / 100
    raise ValueError(
        f'A budget of {budget:.2f} MB does not hold the last block and the '
        f'head, which take {last:.2f} MB; the smallest that would do is '
        f'{enough:.2f} MB (slack {slack:g}).'
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


_BUDGET = re.compile(r'(?P<number>[\d./]+)(?P<unit>MB)?')


def budget_mb(text: str, full: float) -> float:
  """A budget in MB.

  Args:
    text: A share of what the whole model takes, such as '1/6' or '0.5', or an
      absolute amount, such as '19.34MB'.
    full: MB of the whole model.

  Returns:
    MB, above 0.

  Raises:
    ValueError: If it is neither.
  """
  match = _BUDGET.fullmatch(text.strip())
  try:
    number = float(fractions.Fraction(match['number']))
  except (TypeError, ValueError, ZeroDivisionError, OverflowError):
    number = 0.0
  if not number > 0:
    raise ValueError(
        f'A budget is a share of the whole model, such as 1/6, or an amount '
        f'such as 19.34MB, and above 0; got {text!r}.'
    )
  return number if match['unit'] else number * full
