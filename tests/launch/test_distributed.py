"""Runs of two processes: they equal one process, and never hang."""

import json
import os
import pathlib
import shutil
import signal
import socket
import time

import pytest

from launch import train
from tests.fuzz import forks

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = ('--config=tests/launch/tiny_config.py',)


SETTINGS = dict(
    jax_persistent_cache_min_compile_time_secs=0.0,
    jax_default_prng_impl='threefry2x32',  # For several devices.
)


@pytest.fixture(scope='module', autouse=True)
def _programs(tmp_path_factory):
  """All runs share one cache; otherwise they would mostly compile."""
  folder = tmp_path_factory.mktemp('programs')
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(SETTINGS, 'jax_compilation_cache_dir', str(folder))
    yield


def begin(*args, devices=1, cwd=ROOT):
  return forks.Begun(
      'train', args, cwd, False, jax_num_cpu_devices=devices, **SETTINGS
  )


def begin_two(*args, cwds=(ROOT, ROOT), more=((), ())):
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{s.getsockname()[1]}'
  return [
      begin(
          *args,
          *more[i],
          '--distributed',
          f'--coordinator={address}',
          '--num_processes=2',
          f'--process_id={i}',
          cwd=cwds[i],
      )
      for i in (0, 1)
  ]


def end(processes, timeout=240):
  """[(exit code, stdout, stderr)]."""
  return [process.end(timeout) for process in processes]


def rows_of(workdir):
  rows = [
      json.loads(line)
      for line in (workdir / 'metrics.jsonl').read_text().splitlines()
  ]
  for row in rows:
    del row['seconds']
  return rows


def one_process(folder, *args, devices=2):
  ((code, out, err),) = end(
      [begin(*CONFIG, f'--workdir={folder}', *args, devices=devices)]
  )
  assert code == 0, err
  return out


# Of the run with which all others of its config are compared.
ROUNDS = 40


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """The workdir of one process with two devices."""
  folder = tmp_path_factory.mktemp('distributed') / 'whole'
  one_process(folder, f'--config.num_rounds={ROUNDS}')
  return folder


def first_rows(whole, num_rounds):
  """What one process with two devices writes of so many rounds."""
  if num_rounds > ROUNDS:  # A run that was ended late.
    whole = whole.with_name(f'rounds_{num_rounds}')
    one_process(whole, f'--config.num_rounds={num_rounds}')
  return [row for row in rows_of(whole) if row['round'] <= num_rounds]


@pytest.fixture(scope='module')
def two(tmp_path_factory):
  """The workdir of two processes, four rounds, and how each ended."""
  workdir = tmp_path_factory.mktemp('distributed') / 'two'
  return workdir, end(begin_two(*CONFIG, f'--workdir={workdir}'))


@pytest.mark.parametrize(
    'flag', ['--coordinator=localhost:1', '--num_processes=2', '--process_id=0']
)
def test_flags_of_a_cluster_need_distributed(flag, capsys):
  name = flag[2:].split('=')[0]
  try:
    with pytest.raises(SystemExit) as error:
      train.parse_flags(['train', flag])
  finally:
    train.flags.FLAGS[name].value = None  # Flags outlive a test.
  assert error.value.code == 2
  assert capsys.readouterr().err == f'Error: --{name} needs --distributed.\n'


@pytest.mark.slow
def test_a_wrong_address_is_one_line():
  ((code, _, err),) = end(
      [begin('--distributed', '--coordinator=host', '--num_processes=2')]
  )
  assert code == 2
  assert err == "Error: --coordinator must be HOST:PORT, got 'host'.\n"
  ((code, _, err),) = end([begin('--distributed')])
  assert code == 2 and err.startswith('Error: --distributed found no cluster')
  assert err.count('\n') == 1


@pytest.mark.slow
def test_two_processes_equal_one_of_two_devices(whole, two, tmp_path):
  workdir, (first, second) = two
  assert (first[0], second[0]) == (0, 0), first[2] + second[2]
  want = first_rows(whole, 4)
  assert rows_of(workdir) == want
  # Only the first process prints.
  assert f'Report: {workdir}' in first[1] and 'Workdir: ' in first[2]
  assert 'Report' not in second[1] and not second[2]
  assert (workdir / 'report.md').exists()
  assert not (workdir / '.processes').exists()
  # The losses of one device are close.
  one_process(tmp_path / 'one', devices=1)
  for row, other in zip(rows_of(tmp_path / 'one'), want, strict=True):
    assert row['loss'] == pytest.approx(other['loss'], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('variant', ['async', 'warm_up'])
def test_other_rounds_equal_one_process_too(variant, tmp_path):
  args = (f'{CONFIG[0]}:{variant}', '--config.num_rounds=2')
  ends = end(begin_two(*args, f'--workdir={tmp_path / "two"}'))
  assert [e[0] for e in ends] == [0, 0], ends
  ((code, _, err),) = end(
      [begin(*args, f'--workdir={tmp_path / "one"}', devices=2)]
  )
  assert code == 0, err
  assert rows_of(tmp_path / 'two') == rows_of(tmp_path / 'one')


def wait_for(workdir, lines, processes):
  path = workdir / 'metrics.jsonl'
  for _ in range(12_000):
    if path.exists() and path.read_bytes().count(b'\n') >= lines:
      return
    assert all(p.poll() is None for p in processes), end(processes)
    time.sleep(0.01)
  raise AssertionError('The run has written nothing for two minutes.')


LONG = '--config.num_rounds=100000'


@pytest.mark.slow
@pytest.mark.parametrize('victim', [0, 1])
def test_one_is_killed_and_the_run_goes_on(whole, tmp_path, victim):
  workdir = tmp_path / 'w'
  processes = begin_two(*CONFIG, LONG, f'--workdir={workdir}')
  wait_for(workdir, 4, processes)
  processes[victim].send_signal(signal.SIGKILL)
  begin_waiting = time.monotonic()
  code, _, err = end(processes, timeout=60)[1 - victim]
  assert time.monotonic() - begin_waiting < 60
  assert code == 1
  last = err.strip().splitlines()[-1]
  assert last.startswith('Error: Another process of this run was lost')
  # Resuming from the last checkpoint gives the metrics of a whole run.
  steps = [
      int(p.name)
      for p in (workdir / 'checkpoints').iterdir()
      if p.name.isdigit()
  ]
  last = max(steps) + 2
  more = f'--config.num_rounds={last}'
  ends = end(begin_two(*CONFIG, more, f'--workdir={workdir}'))
  assert [e[0] for e in ends] == [0, 0], ends
  assert rows_of(workdir) == first_rows(whole, last)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_left_by_all(whole, two, tmp_path):
  workdir, more = tmp_path / 'w', '--config.num_rounds=5'
  shutil.copytree(two[0], workdir)
  files = [p for p in (workdir / 'checkpoints' / '4').rglob('*') if p.is_file()]
  os.truncate(max(files, key=lambda path: path.stat().st_size), 10)
  ends = end(begin_two(*CONFIG, more, f'--workdir={workdir}'))
  assert [e[0] for e in ends] == [0, 0], ends
  # Only the first process says so; the C++ reader may print errors in both.
  assert 'going back to that of round 2' in ends[0][2]
  assert 'Warning: ' not in ends[1][2]
  assert (workdir / 'checkpoints' / 'damaged-4').is_dir()
  assert rows_of(workdir) == first_rows(whole, 5)


@pytest.mark.slow
def test_stops_together_and_goes_on_in_one_process(whole, tmp_path):
  workdir = tmp_path / 'w'
  processes = begin_two(*CONFIG, LONG, f'--workdir={workdir}')
  wait_for(workdir, 4, processes)
  processes[1].send_signal(signal.SIGTERM)
  first, second = end(processes, timeout=60)
  assert (first[0], second[0]) == (130, 130), first[2] + second[2]
  done = rows_of(workdir)[-1]['round']
  assert f'Stopped after round {done} of 100000.' in first[1]
  assert 'Stopping after this round' in second[2]
  one_process(workdir, f'--config.num_rounds={done + 1}')
  assert rows_of(workdir) == first_rows(whole, done + 1)


@pytest.mark.slow
def test_what_one_refuses_all_refuse(tmp_path):
  """Each in one line, and none hangs."""
  cases = [
      (['--config.backend=map'], {}, 'of 2 processes needs auto or shard'),
      ([], dict(more=((), ('--config.seed=1',))), 'must have the same config'),
      (
          ['--config.clock.mode=async', '--config.client_store=host'],
          {},
          "client_store='host' is for",
      ),
      ([], dict(cwds=(tmp_path, ROOT / 'tests')), 'on a file system that all'),
  ]
  for args, options, expected in cases:
    ends = end(begin_two(*CONFIG, '--workdir=w', *args, **options), 120)
    for code, _, err in ends:
      assert code == 2, err
      assert err.startswith('Error: ') and err.count('\n') == 1, err
    assert expected in ends[0][2] or expected in ends[1][2]
