"""Table 1 of FeDepth, the packing of blocks, and the memory that XLA plans."""

import dataclasses
import json
import math
import re

import hypothesis
from hypothesis import strategies as st
import jax
import numpy as np
import optax
import pytest

from fedjax_het.depthwise import measured as measured_lib
from fedjax_het.depthwise import memory, stages
from fedjax_het.engine.types import LocalTraining
from fedjax_het.kernels.lowering import conv_lowering
from fedjax_het.models import create
from tests.depthwise.nets import small_preresnet

pytestmark = pytest.mark.usefixtures('optimised')


@pytest.fixture(scope='module')
def preresnet():
  """The net of the paper's Table 1."""
  return create(
      'preresnet20', (32, 32, 3), 10, shortcut='A', stem_norm=False,
      final_norm=False,
  )  # fmt: skip


TABLE = [20.02] * 3 + [14.05] + [10.07] * 2 + [7.21] + [5.28] * 2
PARAMS = [4672] * 3 + [13920] + [18560] * 2 + [55488] + [73984] * 2


def test_table_1_depth(preresnet):
  units = memory.block_table(preresnet)[1:10]
  assert [cost.params for cost in units] == PARAMS
  got = [memory.paper_mb(cost, 32) for cost in units]
  np.testing.assert_allclose(got, TABLE, atol=0.005)
  np.testing.assert_allclose(sum(got), 112.02, atol=0.005)


def test_table_1_width(preresnet):
  full = memory.paper_costs(preresnet, 32).full
  got = [full * r for r in (1 / 8, 1 / 6, 1 / 3, 1 / 2, 1)]
  np.testing.assert_allclose(
      got, [14.51, 19.34, 38.68, 58.02, 116.04], atol=0.005
  )


@pytest.mark.parametrize('shortcut', 'AB')
@pytest.mark.parametrize(
    ('budget', 'groups'),
    [
        (14.51, '4 5 6 78 9'),
        (19.34, '1 2 3 4 56 789'),
        (38.68, '12 34 56789'),
        (58.02, '123 456789'),
        (116.04, '123456789'),
    ],
)
def test_the_papers_schedules(shortcut, budget, groups):
  model = create('preresnet20', (32, 32, 3), 10, shortcut=shortcut)
  spans = memory.pack(memory.paper_costs(model, 32), budget)
  text = ' '.join(''.join(str(u + 1) for u in range(*span)) for span in spans)
  assert text == groups


@pytest.mark.parametrize('name', ['vit_t16', 'vit_s12'])
def test_a_transformers_equal_blocks_are_assigned_evenly(name):
  """Twelve blocks: pairs, fours and sixes, with or without slack."""
  costs = memory.paper_costs(create(name, (224, 224, 3), 10), 128)
  for share, size in ((1 / 6, 2), (1 / 3, 4), (1 / 2, 6), (1, 12)):
    want = tuple((a, a + size) for a in range(0, 12, size))
    for slack in (0.0, 0.05):
      assert memory.pack(costs, share * costs.full, slack) == want


def test_all_units_cost_the_whole_model_with_stem_and_head(preresnet):
  costs = memory.paper_costs(preresnet)
  assert costs.span(0, costs.num_units) == costs.full
  budget = 0.97 * costs.full
  assert costs.span(1, costs.num_units) < budget
  spans = memory.pack(costs, budget, 0.0)
  assert len(spans) > 1 and all(costs.span(*s) <= budget for s in spans)


def test_without_slack_the_budgets_do_not_give_them(preresnet):
  spans = memory.pack(memory.paper_costs(preresnet), 19.34, 0.0)
  assert spans[0] == (3, 4)


@pytest.mark.parametrize(
    ('budget', 'want'),
    [
        (3, [(0, 1), (1, 3), (3, 6)]),
        (5, [(0, 2), (2, 6)]),
        (0.5, [(3, 4), (4, 5), (5, 6)]),
        (100, [(0, 6)]),
    ],
)
def test_packing(budget, want):
  got = memory.pack([3, 2, 1, 0.5, 0.5, 0.5], budget, slack=0)
  assert got == tuple(want)


@hypothesis.given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=12),
    st.floats(0.01, 300),
    st.floats(0, 0.5, width=32, allow_subnormal=False),
)
@hypothesis.settings(deadline=None, max_examples=200)
def test_packing_is_greedy_and_within_the_budget(costs, budget, slack):
  limit = budget * (1 + slack) * (1 + 1e-9)
  try:
    spans = memory.pack(costs, budget, slack)
  except ValueError as e:
    assert costs[-1] > limit
    enough = float(re.search(r'would do is ([\d.]+) MB', str(e))[1])
    assert memory.pack(costs, enough, slack)[-1][1] == len(costs)
    assert enough >= budget
    return
  assert spans[-1][1] == len(costs)
  units = [u for span in spans for u in range(*span)]
  assert units == sorted(set(units))
  for start, stop in spans:
    assert math.fsum(costs[start:stop]) <= limit
    # The next unit would not have fit.
    assert stop == len(costs) or math.fsum(costs[start : stop + 1]) > limit
  for u in set(range(len(costs))) - set(units):
    assert costs[u] > limit


def test_a_budget_below_the_last_block_is_refused_with_the_smallest():
  with pytest.raises(ValueError) as error:
    memory.pack(TABLE, 3.0)
  assert str(error.value) == (
      'A budget of 3 MB does not hold the last block and the head, which '
      'take 5.28 MB; the smallest that would do is 5.03 MB (slack 0.05).'
  )
  assert memory.pack(TABLE, 5.03) == ((7, 8), (8, 9))


@pytest.mark.parametrize(
    ('last', 'budget', 'shown'),
    [
        (40.614, 38.675, ('38.675', '40.61', '38.68')),
        (0.9999, 0.5, ('0.5', '1', '0.953')),
        (0.0145049, 0.001, ('0.001', '0.0145', '0.0139')),
        (0.00012345, 1e-7, ('1e-07', '0.000123', '0.000118')),
    ],
)
def test_sizes_of_small_nets_differ_in_the_message(last, budget, shown):
  with pytest.raises(ValueError) as error:
    memory.pack([last], budget)
  assert tuple(re.findall(r'([\d.e-]+) MB', str(error.value))) == shown
  assert memory.pack([last], float(shown[-1])) == ((0, 1),)


def test_budgets_are_shares_or_megabytes():
  wanted = {'1/6': 20, '0.5': 60, ' 2 ': 240, '19.34MB': 19.34, 0.5: 60, 2: 240,
            1e-5: 1.2e-3, '1e-05': 1.2e-3, '2.5E+1MB': 25}  # fmt: skip
  for budget, want in wanted.items():
    np.testing.assert_allclose(memory.budget_mb(budget, 120.0), want)
  wrong = ('', '0', '1/0', '-1', 'MB', '3 GB', '1/2/3', '1.2.3', '0MB',
           '1e', 'e5', '1e999', '1e-999', '1e5/2', '1e99999999')  # fmt: skip
  for budget in (*wrong, 0, -0.5, math.nan, math.inf, True, None):
    with pytest.raises(ValueError, match='budget must be a share of'):
      memory.budget_mb(budget, 120.0)


def test_what_counts_in_other_families():
  """A module's output counts once, and modules that pass it on do not count."""
  vit = create('vit_t16', (32, 32, 3), 10, patch=8)
  table = {cost.name: cost for cost in memory.block_table(vit)}
  tokens = 17 * 192
  # Two norms, q k v, the projection, 4 and 1 of the MLP, the block.
  assert table['encoder00'].outputs == (2 + 3 + 1 + 4 + 1 + 1) * tokens
  assert table['encoder00'].params == 12 * 192**2 + (3 + 1 + 4 + 1 + 4) * 192
  assert table['head'].outputs == 10
  mlp = create('mlp', (8, 8, 1), 10, hidden=32, norm='none')
  assert [c.outputs for c in memory.block_table(mlp)] == [64, 64, 10]
  resnet = create('mini_resnet6', (8, 8, 1), 10)
  block = memory.block_table(resnet)[1]
  # Two convolutions, two norms, the block; its input needs no shortcut.
  assert block.name == 'stage1_block0' and block.outputs == 5 * 64 * 32


def local_training():
  return LocalTraining(lambda rate: optax.sgd(rate, 0.9), lambda r: 0.1, 1, 32)


@pytest.fixture(scope='module')
def measured():
  """Costs by native convolutions; matrix products need memory for slices."""
  model = small_preresnet((4, 4, 4, 4, 8), size=16)
  costs = measured_lib.measured_costs(model, local_training())

  def span(first, stop):
    with conv_lowering('native'):
      return costs.span(first, stop)

  return model, memory.Costs(costs.full, span, costs.num_units)


def temporary(model, span):
  (stage,) = stages.make_stages(model, [span])
  with conv_lowering('native'):
    return measured_lib.step_memory(stage, local_training()).temporary


@pytest.mark.slow
def test_frozen_blocks_keep_nothing_for_a_backward_pass():
  model = small_preresnet((4, 4, 4, 4, 8), size=16)
  behind_one, behind_three, all_four = (
      temporary(model, span) for span in ((1, 2), (3, 4), (0, 4))
  )
  # The number of frozen blocks before a stage does not matter, ...
  np.testing.assert_allclose(behind_three, behind_one, rtol=0.02)
  # ... and each trained block adds to the memory.
  one_image = 4 * 32 * 16 * 16 * 4
  assert all_four > behind_three + 6 * one_image


@pytest.mark.slow
def test_a_schedule_by_xla_keeps_what_the_budget_promises(measured):
  model, costs = measured
  with conv_lowering('native'):
    (whole,) = stages.make_stages(model, [(0, costs.num_units)])
    full = measured_lib.step_memory(whole, local_training()).mb
  for share in (1 / 2, 2 / 3):
    spans = memory.pack(costs, full * share, slack=0.0)
    assert len(spans) > 1
    assert max(costs.span(*span) for span in spans) <= full * share


def test_step_memory_counts_arguments():
  """Variables with momentum, a batch of images, labels and its mask."""
  model = small_preresnet()
  (stage,) = stages.make_stages(model, [(2, 3)])
  plan = measured_lib.step_memory(stage, local_training())
  params = {c.name: c.params for c in memory.block_table(model)}
  trained = sum(params[n] for n in ('unit2', 'pool', 'head'))
  frozen = sum(params[n] for n in ('stem', 'unit0', 'unit1'))
  batch = 32 * (8 * 8 + 1) * 4 + 32
  total = 4 * (2 * trained + frozen) + batch
  assert total <= plan.arguments <= total + 64
  assert plan.reused >= 4 * 2 * trained
  assert jax.default_backend() != 'cpu' or plan.temporary > 0


def test_figures_are_kept_on_disk(tmp_path, monkeypatch):
  monkeypatch.setattr(
      measured_lib, '_path', lambda program: tmp_path / 'a' / 'b.json'
  )
  (stage,) = stages.make_stages(small_preresnet(), [(2, 3)])
  first = measured_lib.step_memory(stage, local_training())
  path = tmp_path / 'a' / 'b.json'
  assert measured_lib.StepMemory(*json.loads(path.read_text())) == first
  path.write_text('[1, 2, 3, 4]')
  again = measured_lib.step_memory(stage, local_training())
  assert again == measured_lib.StepMemory(1, 2, 3, 4)
  path.write_text('[1, 2')  # A damaged file is measured again.
  assert measured_lib.step_memory(stage, local_training()) == first


def test_a_schedule_is_the_same_with_every_library_of_convolutions():
  model = small_preresnet()
  other = dataclasses.replace(model, conv_backend='onednn')
  one, same = (
      measured_lib.measured_costs(of, local_training()).full
      for of in (model, other)
  )
  assert one == same


def test_figures_are_kept_by_program_and_only_with_a_folder():
  one, other = (measured_lib._path(text) for text in ('one', 'other'))
  assert one != other and one == measured_lib._path('one')
  folder = jax.config.jax_compilation_cache_dir
  jax.config.update('jax_compilation_cache_dir', None)
  try:
    assert measured_lib._path('one') is None
  finally:
    jax.config.update('jax_compilation_cache_dir', folder)


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != 'cpu', reason="a CPU's figures")
def test_the_papers_schedule_exceeds_a_devices_budget():
  """By XLA's plan blocks 7 to 9 take twice the budget of 1/6."""
  model = create('preresnet20', (32, 32, 3), 10, norm='batch_only')
  costs = measured_lib.measured_costs(model, local_training())
  paper = memory.paper_costs(model, 32)
  spans = memory.pack(paper, paper.full / 6)
  assert spans[-1] == (6, 9)
  np.testing.assert_allclose(paper.span(6, 9), 17.78, atol=0.01)
  assert 1.8 < costs.span(6, 9) / (costs.full / 6) < 2.3
