"""The memory planner's command: tables, schedules, refusals."""

import pathlib
import re

import numpy as np
import pytest

from configs import common, fedepth
from launch import plan_memory
from tests.fuzz import forks

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'command_line.md'


def lines(config, *args, **kwargs):
  text = '\n'.join(plan_memory.report(config, *args, **kwargs))
  return text.splitlines()


def paper(method='fedavg', batch_size=32):
  """The net of the paper's Table 1."""
  config = common.get_config(method, 'fedepth')
  config.local.batch_size = batch_size
  config.model.update(shortcut='A', stem_norm=False, final_norm=False)
  return config


def test_table_1_and_the_schedules_of_any_config():
  out = lines(paper(), measure=False)
  cells = [line.split() for line in out]
  by_name = {c[0]: c for c in cells if len(c) == 5}
  assert by_name['stage1_block0'][2:] == ['81,920', '4,672', '20.02']
  assert by_name['stage2_block0'][4] == '14.05'
  assert by_name['stage3_block2'][4] == '5.28'
  assert 'The whole model: 116.04 MB by the paper.' in out
  start = out.index('Budget 1/6: 19.34 MB, plan paper, slack 0.05')
  assert [' '.join(line.split()) for line in out[start + 3 : start + 9]] == [
      '1: stem to stage1_block0 19.34 20.02',
      '2: stage1_block1 19.34 20.02',
      '3: stage1_block2 19.34 20.02',
      '4: stage2_block0 19.34 14.05',
      '5: stage2_block1 to stage2_block2 19.34 20.14',
      '6: stage3_block0 to stage3_block2 19.34 17.78',
  ]


def test_budgets_in_mb_and_what_is_not_trained():
  out = lines(paper(), ['14.51', '39'], measure=False)
  start = out.index('Budget 14.51MB: 14.51 MB, plan paper, slack 0.05')
  assert ' '.join(out[start + 3].split()) == '1: stage2_block0 14.51 14.05'
  assert out[start + 8] == 'Not trained: stage1_block0 to stage1_block2'
  config = paper('fedepth')
  config.algorithm.update(partial='bypass', plan='paper')
  config.groups = dict(
      x1_8=dict(config.groups.x1_6.to_dict(), budget='14.51MB')
  )
  out = lines(config, measure=False)
  (row,) = (line for line in out if line.startswith('1: '))
  assert ' '.join(row.split()) == '1: stem, stage2_block0 14.51 14.05'
  assert not any(line.startswith('Budget 1/6') for line in out)


def test_the_stages_that_the_page_of_commands_counts():
  config = fedepth.get_config('fedepth')
  out = lines(config, ['100', '200', '464'], measure=False)
  stages = {}
  for line in out:
    if line.startswith('Budget '):
      budget = line.split()[1].rstrip(':')
    elif re.match(r'\d: ', line):
      stages[budget] = stages.get(budget, 0) + 1
  assert stages == {'100MB': 6, '200MB': 3, '464MB': 1}
  claim = 'in six stages for 100 MB, in three for 200 MB, and whole for 464 MB'
  assert claim in PAGE.read_text()


def test_a_budget_that_holds_nothing_is_refused_after_the_table():
  report = plan_memory.report(paper(), ['2'], measure=False)
  with pytest.raises(ValueError, match=r'would do is 5\.04 MB'):
    for line in report:
      last = line
  assert last == 'The whole model: 116.04 MB by the paper.'


@pytest.mark.parametrize('text', ['x', '-1', 'nan', '', '1MB'])
def test_a_wrong_budget_is_refused_before_anything_is_computed(text):
  report = plan_memory.report(paper(), ['19', text], measure=False)
  with pytest.raises(ValueError) as error:
    next(report)
  assert str(error.value) == (
      f'--budget_mb must be MB above 0, such as 100,19.34, got {text!r}.'
  )


def test_a_model_of_dense_layers_with_what_xla_plans():
  config = common.get_config('fedavg', 'quick')
  config.groups = dict(mlp=2)
  config.model = dict(hidden=8, depth=3)
  out = lines(config, ['1'])
  assert out[0] == 'Model mlp3 (mlp), input 8x8x1, batches of 16'
  header = next(line for line in out if line.startswith('stage'))
  assert header.split()[1:4] == ['budget', 'MB', '(paper)']
  assert header.split()[4:] == [
      'MB', '(XLA)', 'arguments', 'outputs', 'temporary'
  ]
  row = next(line.split() for line in out if line.startswith('1: '))
  total, arguments, outputs, temporary = map(float, row[-4:])
  assert row[-6] == '1.00'
  assert row[1:4] == ['stem', 'to', 'layer2']
  assert 0 < arguments and 0 < total <= arguments + outputs + temporary + 0.02


def test_a_measured_plan_shows_both_estimates_and_keeps_the_budget():
  config = paper('fedepth', 2)
  config.algorithm.plan = 'measured'
  config.dataset = 'digits'
  config.groups = dict(x1_2=dict(
      model='preresnet20', clients=2, num_blocks=1, budget='2/3'
  ))  # fmt: skip
  config.model.update(width=0.25)
  out = lines(config)
  (start,) = (i for i, line in enumerate(out) if line.startswith('Budget 2/3'))
  assert 'plan measured, slack 0' in out[start]
  rows = [line.split() for line in out[start + 3 :] if re.match(r'\d: ', line)]
  for *_, budget, estimate, xla, _, _, _ in rows:
    assert float(xla) <= float(budget) and float(estimate) > 0
  assert len(rows) > 1


@pytest.mark.slow
def test_table_1_beside_the_papers_figures():
  """The estimates equal the paper's to all printed digits."""
  out = [line.split() for line in plan_memory.paper_table(measure=False)
         for line in line.splitlines()]  # fmt: skip
  blocks = [row for row in out if row and row[0][:-1].isdigit()]
  assert len(blocks) == 9 + 12
  for _, _, printed, estimate in blocks[:9]:
    assert printed == estimate
  assert len({row[-1] for row in blocks[9:]}) == 1  # Equal encoder blocks.
  widths = [row for row in out if row[:1] == ['x']]
  assert [row[1] for row in widths] == 2 * ['1/8', '1/6', '1/3', '1/2', '1']
  for _, _, printed, part, _ in widths[:5]:
    assert printed == part
  assert widths[4][3] == widths[4][4]
  # Without embeddings and head, two encoder blocks are 1/6 of ViT-T/16.
  pair, share = 2 * float(blocks[9][-1]), float(widths[6][3])
  np.testing.assert_allclose(pair, share, rtol=0.02)


@pytest.mark.slow
def test_the_command(tmp_path):
  def command(*args):
    return forks.run('plan_memory', args, tmp_path)

  config = '--config=configs/fedepth.py:fedepth'
  done = command(config, '--nomeasure', '--budget_mb=500')
  assert done.code == 0, done.err
  assert '1: stem to stage3_block2' in done.out
  assert 'plan paper' in done.out
  done = command('--paper_table', '--nomeasure')
  assert 'Table 1, PreResNet-20, 32x32x3' in done.out
  for args, message in (
      ((config, '--nomeasure', '--budget_mb=1'), 'Error: A budget of 1 MB '),
      ((config, '--nomeasure', '--budget_mb=x'), 'Error: --budget_mb must be'),
      (
          ('--paper_table', '--budget_mb=5'),
          'Error: --paper_table has no budget; leave out --budget_mb.',
      ),
      ((config, '--budgets=1'), "Error: Unknown command line flag 'budgets'"),
      (
          (config, '--picture=a.png'),
          'Error: --picture draws the table of --paper_table; give both.',
      ),
      (
          ('--paper_table', '--picture=a.jpg'),
          "Error: Cannot draw to 'a.jpg': the name must end in one of ",
      ),
      (
          ('--config=configs/fedavg.py', '--plan=measured'),
          'Error: --plan is for fedepth, not for fedavg.',
      ),
  ):
    done = command(*args)
    assert done.code == 2
    assert done.err.startswith(message) and done.err.count('\n') == 1
