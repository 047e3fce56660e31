"""The engine benchmark: equal work in every form, right counts and merges."""

import functools
import json
import math

import jax
import numpy as np
import pytest

from benchmarks import common, engine, engine_table, flops, programs
from benchmarks.workloads import WORKLOADS, fedepth
from fedjax_het.depthwise import head_start, make_stages
from fedjax_het.kernels import onednn
from fedjax_het.models import create

RGB = (32, 32, 3)


def test_products_are_counted_once_for_each_pixel_of_the_image():
  model = create('dropout_cnn', RGB, 10)
  conv = 30 * 30 * 27 * 32 + 28 * 28 * 288 * 64
  dense = 14 * 14 * 64 * 128 + 128 * 10
  assert flops.forward_flops(model, range(4)) == 2 * (conv + dense)
  assert flops.training_flops(model) == 6 * (conv + dense)
  count = flops.product_flops(
      lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), 'SAME'),
      np.zeros((2, 5, 1, 1), np.float32),
      np.zeros((7, 5, 3, 3), np.float32),
  )
  assert count == 2 * 2 * 5 * 7  # Eight of nine taps read padding.
  for stride, pairs in ((1, 2 + 3 + 3 + 3 + 2), (2, 2 + 3 + 2)):
    count = flops.product_flops(
        lambda x, w, stride=stride: jax.lax.conv_general_dilated(
            x, w, (stride, 1), ((1, 1), (0, 0))
        ),
        np.zeros((1, 1, 5, 1), np.float32),
        np.zeros((1, 1, 3, 1), np.float32),
    )
    assert count == 2 * pairs


def test_products_in_a_scan_count_for_every_step():
  def run(x):
    return jax.lax.scan(lambda c, _: (c @ x, None), x, None, length=6)[0]

  x = np.zeros((4, 4), np.float32)
  assert flops.product_flops(run, x) == 6 * 2 * 64
  with pytest.raises(ValueError, match='while'):
    flops.product_flops(
        lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c @ x, x),
        x,
    )


def test_a_stage_costs_a_forward_pass_of_what_is_frozen():
  model = create('preresnet20', RGB, 10, num_blocks=1)
  num_units = head_start(model) - 1
  (whole,) = make_stages(model, [(0, num_units)])
  assert flops.stage_flops(whole) == flops.training_flops(model)
  _, last = make_stages(model, [(0, 1), (1, num_units)])
  frozen = flops.forward_flops(model, last.frozen)
  assert last.frozen == (0, 1)
  assert flops.stage_flops(last) == (
      flops.training_flops(model) - 2 * frozen
  )


def test_the_stages_are_those_of_the_algorithm():
  model = create('preresnet20', RGB, 10)
  got = {
      name: [len(s.trained) for s in fedepth.stages_of(model, budget, 128)]
      for name, budget in fedepth.BUDGETS.items()
  }
  assert {name: sum(sizes) for name, sizes in got.items()} == dict.fromkeys(
      fedepth.BUDGETS, 10
  )
  numbers = [len(got[name]) for name in fedepth.BUDGETS]
  assert numbers[0] == 1 and numbers == sorted(numbers) and numbers[-1] > 4


CASES = [f'{name}/{workload.quick[0]}' for name, workload in WORKLOADS.items()]


@pytest.mark.slow
@pytest.mark.usefixtures('not_stored')
@pytest.mark.parametrize('name', CASES)
def test_every_form_runs_and_compiles_once(name, monkeypatch):
  small = functools.partial(programs.matrix_product, 64)
  monkeypatch.setattr(programs, 'matrix_product', small)
  workload, _, case = name.partition('/')
  result = engine.measure(WORKLOADS[workload].make(case, 'tiny'), 2)
  forms = result['forms']
  assert {'map', 'naive JAX'} <= set(forms)
  assert ('map, oneDNN' in forms) == (
      not onednn.why_not() and not name.startswith('many')
  )
  assert ('PyTorch vmap' in forms) == (engine.torch is not None)
  for form, row in forms.items():
    assert row['images_per_second'] > 0 and row['share_of_product_peak'] > 0
    if form in ('map', 'vmap', 'map, oneDNN'):
      assert row['compilations_after_round_2'] == 0
      assert row['images_per_call'] == result['images_per_round']
    assert (row['compile_seconds'] is None) == ('PyTorch' in form)
  assert engine_table.table({name: result}).count('\n') == len(forms) + 1


def test_compilations_are_counted():
  counter = programs.CompileCounter()
  jax.jit(lambda x: x * 3.25)(1.0)
  assert counter.number == 1


def test_choose():
  assert engine.choose('d,fedin/resnet18', False) == [
      'simulation/cifar10', 'fedin/resnet18',
  ]
  assert engine.choose('a', True) == ['fedin/resnet10']
  assert len(engine.choose(None, False)) == sum(
      len(workload.cases) for workload in WORKLOADS.values()
  )
  for wrong in ('f', 'fedin/resnet11'):
    with pytest.raises(ValueError, match=f'Unknown workload {wrong!r}.*a .fed'):
      engine.choose(wrong, False)


def _result(seconds, megabytes, share):
  row = dict(
      images_per_second=100 / seconds, seconds_per_round=seconds,
      compile_seconds=None, compilations_after_round_2=0,
      peak_megabytes=megabytes, share_of_product_peak=share,
  )  # fmt: skip
  return {'forms': {'map': row}, 'auto': 'map', 'images_per_round': 100}


def test_totals_need_all_cases_and_weigh_by_time():
  names = [f'fedin/{case}' for case in WORKLOADS['fedin'].cases]
  results = {name: _result(1.0, 7.0, 0.5) for name in names[1:]}
  assert engine_table.with_totals(results) == results
  results[names[0]] = _result(6.0, 9.0, 0.25)
  row = engine_table.with_totals(results)['fedin/all']['forms']['map']
  assert row == dict(
      images_per_second=50.0, seconds_per_round=10.0, compile_seconds=None,
      compilations_after_round_2=0, peak_megabytes=9.0,
      share_of_product_peak=0.35,
  )  # fmt: skip


def test_results_are_merged_on_one_machine_only(tmp_path, capsys):
  path = tmp_path / 'engine.json'
  assert engine.earlier(path, 'full') == {}
  common.write(path, {'cases': {'a': 1}, 'scale': 'full'})
  assert engine.earlier(path, 'full') == {'a': 1}
  assert engine.earlier(path, 'quick') == {}
  found = json.loads(path.read_text())
  found['machine']['cpus'] += 1
  path.write_text(json.dumps(found))
  assert engine.earlier(path, 'full') == {}
  assert 'begun anew' in capsys.readouterr().out


def test_matrix_product_does_what_it_says():
  call, number = programs.matrix_product(64)
  assert number == 4 * 2 * 64**3
  assert math.isclose(float(call()[0, 0]), 1 / 64, rel_tol=1e-4)
