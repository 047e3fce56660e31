"""Schedules for budgets: the slack of each plan, and the figures of stages."""

import dataclasses

import pytest

from fedjax_het.depthwise import memory, schedules
from fedjax_het.depthwise.measured import StepMemory
from fedjax_het.engine.types import Federation, Group
from tests.depthwise.nets import small_preresnet
from tests.tiny import tiny_local


def federation_of(budget):
  """One group with a model of four units."""
  model = small_preresnet((2, 2, 2, 2))
  group = Group('g', model, [0, 1], options={'budget': budget})
  return Federation((group,), tiny_local())


@pytest.mark.parametrize(
    'plan, slack, want',
    [
        ('measured', 0.05, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ('paper', 0.05, [(0, 2), (2, 4)]),
        ('paper', 0.02, [(0, 1), (1, 2), (2, 3), (3, 4)]),
    ],
)
def test_only_the_papers_plan_has_slack(plan, slack, want, monkeypatch):
  """Two units take 3 % more than the budget."""
  costs = memory.Costs(4.0, lambda first, stop: 1.03 * (stop - first), 4)
  monkeypatch.setattr(schedules, 'measured_costs', lambda *args: costs)
  monkeypatch.setattr(memory, 'paper_costs', lambda *args: costs)
  made = schedules.make_schedules(
      federation_of('2MB'), plan=plan, slack=slack
  )
  assert made['g'].spans == tuple(want) and made['g'].budget == 2.0


def test_models_that_are_trained_together_take_memory_together(monkeypatch):
  mb = memory.MB
  monkeypatch.setattr(
      schedules, 'step_memory', lambda *args: StepMemory(4 * mb, mb, mb, mb)
  )
  federation = federation_of(None)
  one = schedules.make_schedules(federation)['g']
  two = dataclasses.replace(one, num_models=2)
  (single,), (double,) = (
      schedules.stage_figures(schedule, federation.local)
      for schedule in (one, two)
  )
  model = federation.groups[0].model
  full = memory.paper_costs(model, federation.local.batch_size).full
  assert (single['measured'], single['paper']) == (5.0, full)
  assert (double['measured'], double['paper']) == (10.0, 2 * full)
  assert single['blocks'] == double['blocks'] == list(model.block_names[:5])
