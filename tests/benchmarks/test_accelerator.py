"""The accelerator's command: order of steps, faults, verdicts, the choice."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from benchmarks.accelerator import agreement, apply, forms, plan, report
from benchmarks.accelerator.forms import Form
from benchmarks.accelerator.worker import Worker
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.kernels import auto

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROW = auto.Choice('vmap', 8, 'native', 'gemm', 'a test')


def cells(table, matmul='default'):
  """Results of the grid from {family: {'mapping/lowering': images a second}}.

  A rate of 0 stands for a form that failed.
  """
  results = {}
  for family, row in table.items():
    for form, rate in row.items():
      name = forms.cell_name(family, Form(*form.split('/'), matmul))
      results[name] = (
          dict(status='ok', images_per_second=rate, tflops=1.0, seconds=1.0,
               compile_seconds=1.0, megabytes=1.0)
          if rate else dict(status='failed', error='no memory', seconds=1.0)
      )  # fmt: skip
  return results


TWO_FAMILIES = {
    'mlp': {'map/native': 1.0, 'map/gemm': 2.0, 'vmap16/native': 10.0,
            'vmap16/gemm': 4.0},
    'vit_t16': {'map/native': 3.0, 'map/gemm': 1.0, 'vmap16/native': 1.0,
                'vmap16/gemm': 4.0},
}  # fmt: skip


def test_scores_are_geometric_means_over_families():
  got = forms.scores(forms.rates(cells(TWO_FAMILIES)))
  want = {
      'map/native': (1 / 10 * 3 / 4) ** 0.5, 'map/gemm': (2 / 10 / 4) ** 0.5,
      'vmap16/native': (1 / 4) ** 0.5, 'vmap16/gemm': (4 / 10) ** 0.5,
  }  # fmt: skip
  assert {'/'.join(form[:2]): score for form, score in got.items()} == (
      pytest.approx(want)
  )


def test_the_choice_is_the_best_form_of_all_families():
  def choose(table):
    return forms.choose(forms.rates(cells(table)), 'here')

  assert choose(TWO_FAMILIES) == auto.Choice(
      'vmap', 16, 'native', 'gemm', 'here'
  )
  # Another form counts once every family has it; equal ones prefer a small one.
  half = {**TWO_FAMILIES, 'mlp': {**TWO_FAMILIES['mlp'], 'vmap4/gemm': 1e3}}
  assert choose(half).chunk == 16
  for rate, chunk in ((3.95, 4), (3.0, 16)):
    more = {k: {**v, 'vmap4/gemm': rate} for k, v in TWO_FAMILIES.items()}
    assert choose(more).chunk == chunk
  slow = {k: {**v, 'map/gemm': 20.0} for k, v in TWO_FAMILIES.items()}
  assert choose(slow)[:4] == ('map', 16, 'gemm', 'gemm')


def test_there_is_no_choice_before_all_of_it_was_measured():
  assert forms.choose({}, '') is None
  for family in TWO_FAMILIES:
    for form in TWO_FAMILIES[family]:
      table = {k: dict(v) for k, v in TWO_FAMILIES.items()}
      del table[family][form]
      assert forms.choose(forms.rates(cells(table)), '') is None
      # What fails in a family is measured, and is not chosen.
      table[family][form] = 0.0
      found = forms.choose(forms.rates(cells(table)), '')
      ways = dict(map=found.lowering, vmap16=found.batched_lowering)
      mapping, way = form.split('/')
      assert ways[mapping] != way


def test_other_types_of_products_do_not_decide():
  results = cells(TWO_FAMILIES) | cells(
      {k: {'vmap16/native': 1e6} for k in TWO_FAMILIES}, 'bfloat16'
  )
  choice = forms.choose(forms.rates(results), '')
  assert choice.batched_lowering == 'gemm'
  text = report.as_markdown(results, None, choice)
  assert 'chunk 16' in text and '| 250000 |' in text
  assert '- mlp: 40% of its best form (vmap16, native)' in text


def names(results, **options):
  options = dict(quick=False, kind='A chip') | options
  return [step.name for step in plan.plan(results, **options)]


def test_the_order_of_steps():
  first = names({})
  assert len(set(first)) == len(first)
  number = 2 * len(ALGORITHMS)
  assert {name.split('/')[0] for name in first[:number]} == {
      'agreement', 'reference'
  }
  assert first[number] == 'grid/resnet18/map/native/default'
  grid = [name for name in first if name.startswith('grid/')]
  assert len(grid) == len(forms.FAMILIES) * 8 * 2 * 3
  begin = {}
  for i, name in enumerate(first):
    begin.setdefault(name.split('/')[0], i)
  sections = ('grid', 'workloads', 'memory', 'start')
  assert sorted(sections, key=begin.get) == list(sections)
  assert 'table/FedIN/fashion_mnist_iid' in names({}, data_dir='data')
  assert 'table' not in begin  # It needs data.
  # Once a family's best form is known, its other types come early.
  best = {'vit_t16': {'map/gemm': 1.0, 'vmap4/gemm': 2.0}}
  later = names(cells(best))
  early = 'grid/vit_t16/vmap4/gemm/bfloat16'
  assert later.index(early) < later.index('grid/mlp/vmap2/gemm/default')
  assert first.index(early) > first.index('grid/mlp/vmap2/gemm/default')


def test_a_choice_adds_the_key_cases_with_it():
  results = cells({family: TWO_FAMILIES['mlp'] for family in forms.FAMILIES})
  found = {step.name: step for step in plan.plan(
      results, quick=False, kind='A chip')}  # fmt: skip
  step = found['workloads/fedin/resnet18/vmap16, gemm, native']
  assert step.args['choice'][:4] == ['vmap', 16, 'gemm', 'native']
  assert names({}, sections=('memory',)) == [
      'memory/fedavg/10', 'memory/fedavg/1000',
      'memory/fedin/10', 'memory/fedin/1000',
  ]  # fmt: skip


@pytest.fixture
def worker(tmp_path):
  worker = Worker(tmp_path / 'log.txt', 'tests.benchmarks.faulty_tasks')
  yield worker
  worker.close()


def test_a_fault_costs_one_step(worker, tmp_path, monkeypatch):
  monkeypatch.chdir(ROOT)
  monkeypatch.setenv('JAX_PLATFORMS', 'here')
  numbers = iter(range(100))

  def run(task, limit=60.0, **options):
    path = tmp_path / f'{next(numbers)}.json'
    args = dict(number=7) if task == 'works' else {}
    done = worker.run(task, args, path, limit, **options)
    assert done == path.exists()
    return json.loads(path.read_text()) if done else None

  first, second = run('works'), run('works')
  assert first['status'] == 'ok' and first['number'] == 7
  assert first['pid'] == second['pid'] and first['jax'] == 'here'
  assert run('skips')['status'] == 'skipped'
  assert run('raises')['error'] == 'MemoryError: no room at all'
  third = run('works', on_cpu=True)
  assert third['pid'] != first['pid'] and third['jax'] == 'cpu'
  crash = run('crashes', on_cpu=True)
  assert crash['status'] == 'crashed' and '-6' in crash['error']
  begin = time.monotonic()
  assert run('hangs', limit=1.0) is None
  assert time.monotonic() - begin < 10
  assert run('works', fresh=True)['number'] == 7


def lines(loss=1.0, accuracy=0.5, num_bytes=100, **more):
  return [
      dict(round=1, split='train', seconds=2.0, loss=loss, bytes_up=num_bytes),
      dict(round=1, split='test', seconds=1.0, accuracy=accuracy, **more),
  ]  # fmt: skip


@pytest.mark.parametrize('change, agrees, where', [
    (dict(), True, ''),
    (dict(loss=1.01), True, 'train 1/loss'),
    (dict(loss=1.04), False, 'train 1/loss'),
    (dict(accuracy=0.51), True, 'test 1/accuracy'),
    (dict(accuracy=0.46), False, 'test 1/accuracy'),
    (dict(num_bytes=101), False, 'train 1/bytes_up'),
    (dict(accuracy=None), False, 'test 1/accuracy'),
    (dict(worst=[0.5, 0.4]), False, 'test 1/worst/0 is not in both'),
])  # fmt: skip
def test_runs_agree_up_to_rounding(change, agrees, where):
  found = agreement.compare(lines(**change), lines())
  assert found.agrees == agrees and found.where == where
  results = {
      'agreement/fedavg': dict(
          status='ok', rows=lines(**change), jax='2', seconds=1.0
      ),
      'reference/fedavg': dict(status='ok', rows=lines(), jax='1'),
  }
  (row,) = report.agreement_rows(results)
  assert row[-1].split()[0] == ('agrees' if agrees else 'DIFFERS')
  assert 'reference of jax 1' in row[-1]


def test_an_algorithm_that_fails_is_shown():
  failed = dict(status='failed', error='E: no', seconds=1.0)
  here = dict(status='ok', rows=lines(), jax='1', seconds=1.0)

  def verdict(**results):
    named = {f'{section}/fedavg': r for section, r in results.items()}
    return report.agreement_rows(named)[0][-1]

  assert verdict(agreement=failed) == 'failed: E: no'
  assert verdict(agreement=here) == 'runs; no reference yet'
  assert verdict(agreement=here, reference=failed) == (
      'reference failed: E: no'
  )


def table_of(text):
  names = {}
  exec(compile(text, '<table>', 'exec', dont_inherit=True), names)
  return {kind: tuple(row) for kind, row in names['CHOICES'].items()}


def test_a_row_is_added_and_replaced():
  text = pathlib.Path(auto.__file__).read_text()
  before = table_of(text)
  once = apply.with_row(text, 'A chip', ROW)
  assert table_of(once) == {**before, 'A chip': tuple(ROW)}
  other = ROW._replace(chunk=64)
  twice = apply.with_row(apply.with_row(once, 'B', other), 'A chip', other)
  assert list(table_of(twice).items()) == [
      *before.items(), ('A chip', tuple(other)), ('B', tuple(other))
  ]  # fmt: skip
  assert twice.replace('\n'.join(apply.row_text('B', other)) + '\n', '') == (
      once.replace('chunk=8', 'chunk=64')
  )
  with pytest.raises(ValueError, match='no table'):
    apply.with_row('x = {}', 'A', ROW)


def test_the_second_command_writes_the_library_table(
    tmp_path, monkeypatch, capsys
):
  table = tmp_path / 'auto.py'
  text = pathlib.Path(auto.__file__).read_text()
  table.write_text(text)

  def command(**results):
    (tmp_path / 'results.json').write_text(json.dumps(results))
    argv = ['apply', f'--out={tmp_path}', f'--table={table}']
    monkeypatch.setattr(sys, 'argv', argv)
    apply.main()

  good = dict(
      quick=False, device=dict(kind='A chip'), choice=ROW._asdict()
  )
  for wrong in (
      dict(quick=True), dict(choice=None), dict(device=dict(kind='cpu'))
  ):  # fmt: skip
    with pytest.raises(SystemExit):
      command(**{**good, **wrong})
    assert table.read_text() == text
  command(**good)
  assert table_of(table.read_text())['A chip'] == tuple(ROW)
  assert 'vmap, chunk 8' in capsys.readouterr().out


def bench(*args):
  return subprocess.run(
      [sys.executable, '-m', 'benchmarks.accelerator', *args],
      cwd=ROOT, env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
      capture_output=True, text=True, timeout=500,
  )  # fmt: skip


@pytest.mark.slow
def test_a_quick_run_on_a_cpu_and_its_continuation(tmp_path):
  begun = bench('--quick', f'--out={tmp_path}', '--reference')
  assert begun.returncode == 0, begun.stderr
  first = bench('--quick', f'--out={tmp_path}', '--minutes=8')
  assert first.returncode == 0, first.stderr
  found = json.loads((tmp_path / 'results.json').read_text())
  results = found['results']
  want = {step.name for step in plan.plan(results, quick=True, kind='cpu')}
  assert set(results) == want
  bad = {k: r for k, r in results.items() if r['status'] == 'failed'}
  assert not bad, first.stdout
  assert {r['status'] for r in results.values()} <= {'ok', 'skipped'}
  assert found['device']['kind'] == 'cpu' and found['choice'] is not None
  for section in plan.SECTIONS:
    assert any(name.startswith(f'{section}/') for name in results)
  assert first.stdout.count('| agrees |') == 2
  assert results['table/FedIN/fashion_mnist_iid']['rounds'] == 2
  empty, warm = (results[f'start/{c} cache'] for c in ('empty', 'warm'))
  assert 0 < warm['first_round'] < empty['first_round']
  again = bench('--quick', f'--out={tmp_path}')
  assert again.returncode == 0
  # Nothing is left but to look at the device.
  assert [line for line in again.stdout.splitlines() if ' s  ' in line] == [
      line for line in again.stdout.splitlines() if ' s  device ok' in line
  ]
  other = bench(f'--out={tmp_path}')
  assert other.returncode == 2 and 'holds a quick run on cpu' in other.stderr
