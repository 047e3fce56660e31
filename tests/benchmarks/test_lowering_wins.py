"""The survey of lowerings finds all layers, resumes, and counts wins."""

import json
import os
import subprocess
import sys

import jax
import pytest

from benchmarks import lowering_wins, lowerings, nets
from fedjax_het.models import create

WAYS = dict.fromkeys(lowerings.WAYS, ('native', 'gemm'))
LAYER = lowering_wins._QUICK_LAYER


@pytest.fixture
def few_ways(monkeypatch):
  monkeypatch.setattr(lowerings, 'WAYS', WAYS)
  monkeypatch.setattr(lowerings, 'CALL_SECONDS', 0.0)


def run_quick(path):
  command = [sys.executable, '-m', 'benchmarks.lowering_wins', '--quick']
  done = subprocess.run(
      [*command, f'--output={path}'], check=True, capture_output=True, text=True
  )
  return done.stdout


class Here:
  """A worker in this process that records what it measures."""

  made, measured, closed = [], [], []

  def __init__(self, threads):
    self.made.append(threads)

  def measure(self, *job):
    self.measured.append(job)
    return lowerings.measure(*job)[0]

  def close(self):
    self.closed.append(self)


@pytest.mark.usefixtures('few_ways')
def test_a_survey_continues_where_it_stopped(tmp_path, monkeypatch):
  for name in ('made', 'measured', 'closed'):
    monkeypatch.setattr(Here, name, [])
  monkeypatch.setattr(lowering_wins, 'Worker', Here)
  monkeypatch.setattr(lowering_wins, 'THREADS', (1,))
  path = tmp_path / 'wins.json'
  rows = lowering_wins.survey([LAYER], [1], 1, path)
  assert [row['pass'] for row in rows] == [*WAYS]
  assert all(set(row['milliseconds']) == {'native', 'gemm'} for row in rows)
  rows = lowering_wins.survey([LAYER], [1, 2], 1, path)
  assert [job[1] for job in Here.measured] == [1, 2]
  assert [row['batch'] for row in rows] == [1] * 3 + [2] * 3
  assert json.loads(path.read_text())['rows'] == rows
  assert lowering_wins.survey([LAYER], [1, 2], 1, path) == rows
  assert len(Here.made) == len(Here.closed) == 2
  text = path.read_text().replace('"jax": "', '"jax": "another ')
  path.write_text(text)
  assert lowering_wins.stored_rows(path) == []


@pytest.mark.usefixtures('few_ways')
def test_a_worker_answers_each_line_with_the_cpus_it_may_use(capsys):
  cpus, cache = os.sched_getaffinity(0), jax.config.jax_compilation_cache_dir
  try:
    lowering_wins.serve(1, [json.dumps([LAYER, 2, 1])])
    assert len(os.sched_getaffinity(0)) == 1
  finally:
    os.sched_setaffinity(0, cpus)
    jax.config.update('jax_compilation_cache_dir', cache)
  found = json.loads(capsys.readouterr().out)
  assert {kind: tuple(times) for kind, times in found.items()} == WAYS


@pytest.mark.slow
def test_quick_measures_all_ways_once_and_continues(tmp_path):
  path = tmp_path / 'wins.json'
  assert ': 4x4, 3x3, 3 to 4, batch 10, 1 threads' in run_quick(path)
  rows = json.loads(path.read_text())['rows']
  threads = {row['threads'] for row in rows}
  assert threads <= {1, 2} and 1 in threads
  assert len(rows) == 3 * len(threads)
  for row in rows:
    ways = set(lowerings.WAYS[row['pass']]) - {'onednn'}
    assert set(row['milliseconds']) - {'onednn'} == ways
    assert min(row['milliseconds'].values()) > 0
  again = run_quick(path)
  assert 'batch 10, 1 threads' not in again and 'never fastest' in again
  assert json.loads(path.read_text())['rows'] == rows


def test_layers_are_those_of_the_configs_and_of_the_benchmarks(monkeypatch):
  monkeypatch.setattr(lowering_wins, '_SETTINGS', ('', 'fedhe'))
  monkeypatch.setattr(lowering_wins, '_SIZES', ('',))
  monkeypatch.setattr(nets, 'NETS', {'dropout_cnn': ()})
  layers = lowering_wins.distinct_layers(('cifar10',))
  assert len(set(layers)) == len(layers)
  kernels = {layer.kernel for layer in layers}
  for name in ('mini_resnet6', 'fedhe_cnn0', 'fedhe_cnn9', 'dropout_cnn'):
    variables = create(name, nets.INPUT_SHAPE, 10).abstract_variables
    leaves = jax.tree.leaves(variables.params)
    assert {leaf.shape for leaf in leaves if leaf.ndim == 4} <= kernels
  assert (3, 3, 1, 128) not in kernels  # FedHe's on Fashion-MNIST.


def test_a_way_wins_by_more_than_the_margin():
  assert lowering_wins.winner({'a': 1.0, 'b': 1.2, 'c': 3.0}) == ('a', 1.2)
  assert lowering_wins.winner({'a': 1.02, 'b': 1.0})[0] is None


def test_wins_are_counted_with_and_without_onednn():
  times = dict(native=4.0, strips=5.0, gemm=2.0, cropped=3.0, onednn=1.0)
  row = dict(layer='x', batch=10, threads=1, milliseconds=times)
  table = lowering_wins.wins([{**row, 'pass': 'forward'}])
  found = {
      (way, among): (won, gain)
      for kind, way, _, among, won, _, gain, _ in table
      if kind == 'forward' and won
  }
  assert found == {
      ('onednn', 'all'): (1, 2.0),
      ('gemm', 'without oneDNN'): (1, 1.5),
  }
  report = lowering_wins.report(table)
  assert 'forward: never fastest: native, strips, cropped' in report
