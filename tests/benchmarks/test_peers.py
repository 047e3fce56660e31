"""The benchmark of published programs: equal work, counts and tables."""

import copy
import json
import os
import sys
import time
import types

import numpy as np
import pytest

from benchmarks import peak
from benchmarks.peers import __main__ as command
from benchmarks.peers import (
    environments,
    library,
    meter,
    nets,
    rows,
    table,
    tasks,
)
from fedjax_het import experiment
from fedjax_het.models import create


@pytest.mark.parametrize(
    ('name', 'numbers'),
    [
        ('a', [1_626_442]),
        ('b', [878_538]),
        ('c-fd', [878_538, 11_181_642]),
        ('d', [61_440_114]),
    ],
)
def test_the_models_have_the_published_numbers_of_parameters(name, numbers):
  assert tasks.num_parameters(tasks.WORKS[name]) == sum(numbers)


@pytest.mark.parametrize(
    ('name', 'images'),
    [('a', 2500), ('b', 4500), ('c-local', 2000), ('d', 2560), ('e', 500_000)],
)
def test_a_round_has_the_published_number_of_images(name, images):
  assert tasks.WORKS[name].images_per_round == images


def test_a_limit_of_epochs_and_small_sizes_leave_the_works_alone():
  before = copy.deepcopy(tasks.WORKS)
  assert tasks.work('e', most_epochs=3).images_per_round == 150_000
  assert tasks.work('a', most_epochs=3) == tasks.WORKS['a']
  assert tasks.work('e', quick=True).images_per_round == 2 * 4 * 40
  assert tasks.WORKS == before


def test_layers_of_the_library_have_the_shapes_of_plain_ones():
  model = create(nets.FEDAVG_CNN, tasks.SHAPE, 10)
  assert model.shapes == ((14, 14, 32), (5, 5, 64), (512,), (10,))
  kernel = model.abstract_variables.params['hidden']['linear']['kernel']
  assert kernel.shape == (1600, 512)


def test_data_of_a_task(tmp_path):
  work = tasks.work('e', quick=True)
  entries = tasks.write_data(work, tmp_path, None)
  path = tasks.write_task(entries, tmp_path, seconds=1, max_rounds=2)
  task = meter.read(str(path))
  parts = meter.examples(task.data, task.parts)
  sizes = [len(labels) for _, labels in parts]
  assert sum(sizes) == 160 and min(sizes) >= 10 and len(set(sizes)) > 1
  x = np.concatenate([meter.normalised(task, images) for images, _ in parts])
  np.testing.assert_allclose(x.mean((0, 1, 2)), 0, atol=1e-4)
  np.testing.assert_allclose(x.std((0, 1, 2)), 1, atol=1e-4)
  assert (task.path, task.clients) == (str(path), 4)


@pytest.mark.parametrize('name', tasks.WORKS)
def test_the_config_of_a_task_is_valid(name, tmp_path):
  work = tasks.work(name, quick=True)
  task = types.SimpleNamespace(
      **work._asdict(), data='data.npz', parts='parts.json', max_rounds=3,
      overrides={},
  )  # fmt: skip
  config = library.config_of(task)
  experiment.check(config)
  assert config.algorithm.name == work.algorithm
  plain = library.default_config(work.algorithm)
  for entry in ('backend', 'conv_backend', 'matmul_dtype'):
    assert config[entry] == plain[entry]


def _meter(tmp_path, monkeypatch, **task):
  monkeypatch.setenv(meter.STARTED, str(time.time()))
  task = types.SimpleNamespace(out=str(tmp_path / 'out.json'), **task)
  return meter.Meter(task, 7)


def test_the_meter_stops_after_the_time_or_the_rounds(tmp_path, monkeypatch):
  clock = _meter(tmp_path, monkeypatch, seconds=0.05, max_rounds=9)
  assert not clock.round(10)
  time.sleep(0.06)
  assert clock.round(11)
  found = json.loads((tmp_path / 'out.json').read_text())
  assert found['images'] == [10, 11] and found['parameters'] == 7
  assert found['round_seconds'][1] >= 0.06 and found['peak_megabytes'] > 10
  clock = _meter(tmp_path, monkeypatch, seconds=9, max_rounds=2)
  assert [clock.round(1) for _ in range(2)] == [False, True]


def test_programs_that_do_other_work_are_refused():
  result = dict(parameters=5, images=[100, 103])
  rows.check(result, 5, 100, 103)
  with pytest.raises(rows.Failed, match='5 parameters instead of 6'):
    rows.check(result, 6, 100, 103)
  for images, most in ((101, 103), (100, 102)):
    with pytest.raises(rows.Failed, match='images a round instead'):
      rows.check(result, 5, images, most)


def _child(tmp_path, monkeypatch, code, limit=60.0):
  (tmp_path / 'program.py').write_text(code)
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  task = tmp_path / 'task.json'
  out = str(tmp_path / 'result.json')
  task.write_text(json.dumps(dict(out=out, seconds=0, max_rounds=2)))
  cache = str(tmp_path / 'cache')
  return rows.run_child(sys.executable, 'program', task, cache, limit)


_PROGRAM = """
import subprocess, sys, time
from benchmarks.peers import meter
clock = meter.Meter(meter.this_task(), 3)
"""


def test_a_child_reports_its_rounds_and_the_memory_of_its_children(
    tmp_path, monkeypatch
):
  own = _child(tmp_path, monkeypatch, _PROGRAM + 'while not clock.round(4): 0')
  assert own['images'] == [4, 4] and own['parameters'] == 3
  code = 'b = bytearray(200 << 20); import time; time.sleep(1.2)'
  more = f'subprocess.run([sys.executable, "-c", {code!r}])\n'
  found = _child(
      tmp_path, monkeypatch, _PROGRAM + more + 'while not clock.round(4): 0'
  )
  if peak.descendants(1) or os.path.isdir('/proc/self'):
    assert found['peak_megabytes'] > own['peak_megabytes'] + 150


def test_a_child_that_fails_or_hangs(tmp_path, monkeypatch):
  with pytest.raises(rows.Failed, match='failed: ValueError: no such net'):
    _child(tmp_path, monkeypatch, 'raise ValueError("no such net")')
  with pytest.raises(rows.Failed, match='stopped after 0 s, before'):
    _child(tmp_path, monkeypatch, 'import time; time.sleep(60)', limit=0.1)


def test_a_row_of_one_round_has_no_speed():
  row = dict(round_seconds=[3.0], peak_megabytes=1.0)
  row = rows.summarise(row, 4)
  assert row['first_round'] == 3 and row['images_per_second'] is None
  assert '| a | eager PyTorch | - | - | - | 3 |' in table.details(
      {('a', 'torch'): row}
  )


def test_a_quick_run_installs_nothing(tmp_path):
  with pytest.raises(rows.Failed, match='not installed'):
    rows.find_python(rows.programs('cpu')['flwr'], tmp_path, install=False)
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_peer_that_cannot_be_installed_says_what_pip_printed(tmp_path):
  with pytest.raises(environments.CannotInstall, match='No matching distr'):
    environments.make('flwr', tmp_path, ('--no-index', '--find-links='))
  assert environments.find('flwr', tmp_path) is None


def test_choose():
  known = command.all_rows('cpu')
  assert command.choose(None, known) == known
  assert command.choose('e/torch,a/flwr', known) == [
      ('a', 'flwr'), ('e', 'torch'),
  ]  # fmt: skip
  assert len(command.choose('torch', known)) == len(tasks.WORKS)
  assert {work for work, _ in command.choose('c-*', known)} == {
      'c-local', 'c-fd',
  }  # fmt: skip
  assert ('d', 'flwr') not in known and ('e', 'fedjax') in known
  for wrong in ('f', 'd/flwr', 'a/'):
    with pytest.raises(ValueError, match=f'{wrong!r} selects no row'):
      command.choose(wrong, known)


def _row(speed, **more):
  row = dict(
      images_per_second=speed, seconds_per_round=1.0, first_round=2.0,
      peak_megabytes=10.0, round_seconds=[2.0, 1.0], versions={},
  )  # fmt: skip
  return row | more


def test_tables():
  found = {
      ('a', 'torch'): _row(100.0),
      ('a', 'flwr'): _row(50.0, versions={'flwr': '1.2'}),
      ('a', 'pfl'): dict(error='cannot be installed: no'),
      ('a', 'default'): _row(200.0, first_round_warm=1.0),
      ('a', 'tuned'): _row(250.0),
      ('a', 'onednn'): _row(300.0),
      ('d', 'torch'): _row(10.0),
      ('d', 'default'): _row(20.0),
  }
  lines = table.summary(found, 'cpu').splitlines()[2:]
  assert lines == [
      '| a | 100 | 50 | - | - | - | 200 (4.00) | 250 (5.00) | 300 (6.00) | '
      'onednn | 2.0 / 1.0 |',
      '| d | 10 | - | - | - | - | 20 (2.00) | - | - | - | '
      '2.0 / - |',
  ]
  text = table.report(found, 'cpu', 1)
  assert 'At most 1 local epochs.' in text
  assert '| a | flwr 1.2 | 50 | 1 | 0.5 |' in text
  assert '| a | pfl | cannot be installed: no |' in text
  assert '| a | ours, onednn | 300 |' in text


@pytest.mark.slow
def test_a_quick_run_measures_every_kind_of_row(tmp_path, monkeypatch, capsys):
  pytest.importorskip('torch', reason='PyTorch is an optional extra')
  argv = [
      'peers', '--quick', '--rows=a/torch,a/default,a/flwr,c-fd/torch,d/torch',
      f'--output={tmp_path}/out', f'--environments={tmp_path}/none',
  ]  # fmt: skip
  monkeypatch.setattr(sys, 'argv', argv)
  command.main()
  found = {
      path.stem: json.loads(path.read_text())
      for path in (tmp_path / 'out').glob('*.json')
  }
  assert 'not installed' in found.pop('a-flwr')['error']
  for name, row in found.items():
    assert row.get('error') is None, name
    assert row['images_per_second'] > 0 and row['peak_megabytes'] > 50
    assert len(row['round_seconds']) == 2 or name == 'a-default'
  row = found['a-default']
  assert row['first_round_warm'] < row['first_round']
  assert row['xla_seconds_warm'] < row['xla_seconds']
  assert '| a | ours by default |' in (tmp_path / 'out/table.md').read_text()
  capsys.readouterr()
  command.main()  # Only the row with an error is measured again.
  printed = capsys.readouterr().out
  assert printed.count('done before') == 4
