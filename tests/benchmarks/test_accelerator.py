"""The accelerator command: order of steps, faults, and the chosen form."""

import json
import pathlib
import time

import pytest

from benchmarks.accelerator import forms, plan, report
from benchmarks.accelerator.forms import Form
from benchmarks.accelerator.worker import Worker
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.kernels import auto

ROOT = pathlib.Path(__file__).resolve().parents[2]


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
    'vgg': {'map/native': 1.0, 'map/gemm': 2.0, 'vmap16/native': 10.0,
            'vmap16/gemm': 4.0},
    'cnn': {'map/native': 3.0, 'map/gemm': 1.0, 'vmap16/native': 1.0,
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


def chosen(results, source=''):
  found = forms.rates(results)
  return forms.choose(found, found, source)


def test_the_choice_is_the_best_form_of_all_families():
  def choose(table):
    return chosen(cells(table), 'here')

  assert choose(TWO_FAMILIES) == auto.Choice(
      'vmap', 16, 'native', 'gemm', 'here'
  )
  # A form counts only if every family has it; near ties prefer a small chunk.
  half = {**TWO_FAMILIES, 'vgg': {**TWO_FAMILIES['vgg'], 'vmap4/gemm': 1e3}}
  assert choose(half).chunk == 16
  for rate, chunk in ((3.95, 4), (3.0, 16)):
    more = {k: {**v, 'vmap4/gemm': rate} for k, v in TWO_FAMILIES.items()}
    assert choose(more).chunk == chunk
  slow = {k: {**v, 'map/gemm': 20.0} for k, v in TWO_FAMILIES.items()}
  assert choose(slow)[:4] == ('map', 16, 'gemm', 'gemm')


def test_a_family_without_convolutions_counts_for_both_lowerings():
  mlp = {'map/native': 8.0, 'vmap16/native': 2.0}
  both = {k: {'map/native': 1.0, 'map/gemm': 2.0, 'vmap16/native': 2.0,
              'vmap16/gemm': 1.0} for k in ('vgg',)}  # fmt: skip
  got = forms.scores(forms.rates(cells(both | {'mlp': mlp})))
  assert {'/'.join(form[:2]): score for form, score in got.items()} == (
      pytest.approx({'map/native': 0.5**0.5, 'map/gemm': 1.0,
                     'vmap16/native': 0.5, 'vmap16/gemm': 0.125**0.5})
  )  # fmt: skip
  results = cells(both | {'mlp': mlp})
  choice = chosen(results)
  assert choice == auto.Choice('map', 16, 'gemm', 'native', '')
  assert report.advice(results, choice)[-1].startswith('- mlp: 100%')


def test_there_is_no_choice_before_all_of_it_was_measured():
  assert forms.choose({}, TWO_FAMILIES, '') is None
  for family in TWO_FAMILIES:
    found = forms.rates(cells({family: TWO_FAMILIES[family]}))
    assert forms.choose(found, found, '') is not None
    assert forms.choose(found, TWO_FAMILIES, '') is None
  for family in TWO_FAMILIES:
    for form in TWO_FAMILIES[family]:
      table = {k: dict(v) for k, v in TWO_FAMILIES.items()}
      del table[family][form]
      assert chosen(cells(table)) is None
      # A form that fails in a family counts as measured, and is not chosen.
      table[family][form] = 0.0
      found = chosen(cells(table))
      ways = dict(map=found.lowering, vmap16=found.batched_lowering)
      mapping, way = form.split('/')
      assert ways[mapping] != way


def test_other_types_of_products_do_not_decide():
  results = cells(TWO_FAMILIES) | cells(
      {k: {'vmap16/native': 1e6} for k in TWO_FAMILIES}, 'bfloat16'
  )
  choice = chosen(results)
  assert choice.batched_lowering == 'gemm'
  text = report.as_markdown(results, None, choice)
  assert 'chunk 16' in text and '| 250000 |' in text
  assert '- vgg: 40% of its best form (vmap16, native)' in text


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
  assert len(grid) == (5 * 2 + 2) * 8 * 3  # Two have no convolutions.
  begin = {}
  for i, name in enumerate(first):
    begin.setdefault(name.split('/')[0], i)
  sections = ('grid', 'workloads', 'memory', 'start')
  assert sorted(sections, key=begin.get) == list(sections)
  assert 'table/FedIN/fashion_mnist_iid' in names({}, data_dir='data')
  assert 'table' not in begin  # It needs data.
  # Once a family's best form is known, its other dtypes come early.
  best = {'resnet18': {'map/gemm': 1.0, 'vmap4/gemm': 2.0}}
  later = names(cells(best))
  early = 'grid/resnet18/vmap4/gemm/bfloat16'
  assert later.index(early) < later.index('grid/mlp/vmap2/native/default')
  assert first.index(early) > first.index('grid/mlp/vmap2/native/default')


def test_a_choice_adds_the_key_cases_with_it():
  results = cells({family: TWO_FAMILIES['vgg'] for family in forms.FAMILIES})
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
