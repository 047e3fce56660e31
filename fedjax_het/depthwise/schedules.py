"""Schedules of stages for memory budgets."""

import dataclasses
import functools

import jax

from fedjax_het.depthwise import memory
from fedjax_het.depthwise.measured import measured_costs, step_memory
from fedjax_het.depthwise.stages import Stage, head_start, make_stages
from fedjax_het.engine.types import CLASS, Federation, Group, LocalTraining
from fedjax_het.options import at_least, not_negative, one_of, positive

PLANS = ('paper', 'measured')


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The schedule of a group's clients.

  Attributes:
    spans: Half-open ranges of units, one a stage.
    stages: The stages.
    budget: MB, as the plan counts them; None for a group without a budget.
    num_models: Whole models that are trained together (MKD); 1 without MKD.

  Raises:
    ValueError: If a number is out of its range.
  """

  spans: tuple[tuple[int, int], ...]
  stages: tuple[Stage, ...]
  budget: float | None = None
  num_models: int = 1

  def __post_init__(self):
    if self.budget is not None:
      positive(budget=self.budget)
    at_least(1, num_models=self.num_models)


def make_schedules(
    federation: Federation,
    *,
    plan: str = 'measured',
    slack: float = 0.05,
    heads: str = 'shared',
    partial: str = 'frozen',
    mkd_models: int | None = None,
) -> dict[str, Schedule]:
  """Packs the units of each group's model into stages within its budget.

  Args:
    federation: Groups with their budgets (`Group.options['budget']`), and
      local training.
    plan: The memory estimate, one of `PLANS`; see `fedepth`.
    slack: The slack of the plan 'paper', see `pack`.
    heads: See `make_stages`.
    partial: See `make_stages`.
    mkd_models: M for groups whose budget holds M models, or None.

  Returns:
    {group: schedule}.

  Raises:
    ValueError: If an option is unknown or out of range, a budget cannot be
      read or does not hold the last block, no budget holds M models, or shapes
      do not fit.
  """
  one_of('plan', plan, PLANS)
  not_negative(slack=slack)
  if plan == 'measured' and partial == 'bypass':
    raise ValueError(
        "plan='measured' compiles stages behind frozen blocks; "
        "partial='bypass' needs plan='paper'."
    )
  if mkd_models is not None:
    at_least(2, mkd_models=mkd_models)
  local = federation.local

  @functools.cache
  def costs_of(model):
    if plan == 'paper':
      return memory.paper_costs(model, local.batch_size)
    return measured_costs(model, local, heads, federation.label)

  schedules = {}
  for group in federation.groups:
    spans, budget, times = ((0, head_start(group.model) - 1),), None, 1.0
    if budget_of(group) != '':
      memory.read_budget(f'groups.{group.name}.budget', budget_of(group))
    try:
      if budget_of(group) != '':
        costs = costs_of(group.model)
        budget = memory.budget_mb(budget_of(group), costs.full)
        exceed = slack if plan == 'paper' else 0.0
        spans = memory.pack(costs, budget, exceed)
        times = budget / costs.full
      stages = make_stages(group.model, spans, heads=heads, partial=partial)
    except ValueError as e:
      raise ValueError(f'groups.{group.name}: {e}') from e
    rich = mkd_models is not None and times * (1 + 1e-9) >= mkd_models
    schedules[group.name] = Schedule(
        spans, stages, budget, mkd_models if rich else 1
    )
  if mkd_models is not None and all(
      schedule.num_models == 1 for schedule in schedules.values()
  ):
    listed = ', '.join(f'{g.name} {budget_of(g)!r}' for g in federation.groups)
    raise ValueError(
        f'mkd_models={mkd_models} needs a group whose budget holds '
        f'{mkd_models} whole models; the budgets are {listed}.'
    )
  return schedules


def budget_of(group: Group) -> str | float:
  """A group's budget, as `depthwise.budget_mb` reads it; '' for none."""
  budget = group.options.get('budget')
  return '' if budget is None else budget


def stage_figures(
    schedule: Schedule,
    local: LocalTraining,
    label: jax.ShapeDtypeStruct = CLASS,
) -> list[dict[str, object]]:
  """Both memory estimates of each stage; compiles stages that are not cached.

  Args:
    schedule: The schedule.
    local: The optimiser and the batch size.
    label: See `Federation.label`.

  Returns:
    For each stage `blocks` (names of the trained ones but the head's), and
    `paper` and `measured` in MB; M times a model's if M are trained together.
  """
  figures = []
  for span, stage in zip(schedule.spans, schedule.stages, strict=True):
    model, whole = stage.model, schedule.stages[-1].model
    paper = memory.paper_costs(whole, local.batch_size)
    figures.append(dict(
        blocks=[model.block_names[i] for i in stage.trained],
        paper=schedule.num_models * paper.span(*span),
        measured=schedule.num_models * step_memory(stage, local, label).mb,
    ))  # fmt: skip
  return figures
