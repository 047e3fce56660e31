"""The accelerator command: verdicts, the library's table, and whole runs."""

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks.accelerator import __main__ as command
from benchmarks.accelerator import agreement, apply, plan, report, tasks
from fedjax_het.kernels import auto

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROW = auto.Choice('vmap', 8, 'native', 'gemm', 'a test')


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


@pytest.mark.slow
def test_a_cell_of_the_table_is_ended_and_goes_on(tmp_path, monkeypatch):
  monkeypatch.setattr(tasks, '_GRACE', 0.0)
  cell = dict(table=plan.TABLE, scale='quick', column='fashion_mnist_iid',
              data_dir=None, folder=str(tmp_path))  # fmt: skip
  first = tasks.table_cell(**cell, row='FedAvg', seconds=2.0)
  assert (first['status'], first['rounds']) == ('partial', 0)
  whole = tasks.table_cell(**cell, row='FedAvg', seconds=200.0)
  assert whole['rounds'] == 2 and 0 < whole['accuracy'] < 1
  assert whole['round_seconds'] > 0 and 'status' not in whole
  with pytest.raises(RuntimeError, match="Unknown row 'FedAv'"):
    tasks.table_cell(**cell, row='FedAv', seconds=200.0)


@pytest.mark.slow
def test_a_quick_run_on_a_cpu_and_its_continuation(
    tmp_path, monkeypatch, capsys
):
  """The second and later commands run in this process."""
  monkeypatch.chdir(ROOT)
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  monkeypatch.setattr(command.signal, 'signal', lambda *_: None)
  arguments = ['--quick', f'--out={tmp_path}']
  begun = subprocess.run(
      [sys.executable, '-m', 'benchmarks.accelerator', *arguments,
       '--reference'],
      capture_output=True, text=True, timeout=500,
  )  # fmt: skip
  assert begun.returncode == 0, begun.stderr

  def bench(*more):
    monkeypatch.setattr(sys, 'argv', ['accelerator', *more])
    command.main()
    return capsys.readouterr().out

  first = bench(*arguments, '--minutes=8')
  found = json.loads((tmp_path / 'results.json').read_text())
  results = found['results']
  want = {step.name for step in plan.plan(results, quick=True, kind='cpu')}
  assert set(results) == want
  bad = {k: r for k, r in results.items() if r['status'] == 'failed'}
  assert not bad, first
  assert {r['status'] for r in results.values()} <= {'ok', 'skipped'}
  assert found['device']['kind'] == 'cpu' and found['choice'] is not None
  for section in plan.SECTIONS:
    assert any(name.startswith(f'{section}/') for name in results)
  assert first.count('| agrees |') == 2
  assert results['table/FedAvg/fashion_mnist_iid']['rounds'] == 2
  empty, warm = (results[f'start/{c} cache'] for c in ('empty', 'warm'))
  assert 0 < warm['first_round'] < empty['first_round']
  # Only the check of the device is left.
  again = [line for line in bench(*arguments).splitlines() if ' s  ' in line]
  assert again == [line for line in again if ' s  device ok' in line]
  with pytest.raises(SystemExit) as end:
    bench(f'--out={tmp_path}')
  assert end.value.code == 2
  assert 'holds a quick run on cpu' in capsys.readouterr().err
