"""Runs: the files of the workdir, exact resuming, and damage."""

import errno
import functools
import itertools
import json
import logging
import os
import pathlib
import shutil
import time
import types

import jax
import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine import drivers, rounds
from fedjax_het.experiment import checkpoints as checkpoints_lib
from fedjax_het.experiment import metrics_file, programs, runner, training
from fedjax_het.experiment.workdir import lock
from fedjax_het.reporting.run_files import read_rows
from tests.experiment.tiny_runs import (
    compiled_once,
    tiny_config,
    without_seconds,
)
from tests.fuzz import forks

pytestmark = pytest.mark.usefixtures('undrawn')


class Killed(BaseException):
  """Ends a run as a kill would: the library does not catch it."""


def killed_at(row_number):
  """An observer that ends the run after `row_number` rows."""
  seen = []

  def observe(row):
    seen.append(row)
    if len(seen) == row_number:
      raise Killed

  return observe


@pytest.fixture(scope='module', autouse=True)
def _programs():
  with compiled_once():
    yield


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """The result of a whole run."""
  folder = tmp_path_factory.mktemp('runs') / 'whole'
  return experiment.run(tiny_config(), folder)


def test_the_workdir_holds_what_it_should(finished):
  names = {path.name for path in finished.workdir.iterdir()}
  assert names >= {
      'config.json',
      'metrics.jsonl',
      'facts.json',
      'checkpoints',
      'report.md',
  }
  assert finished.finished
  assert int(finished.state.round_num) == 4
  assert finished.summary.rounds == 4
  stored = json.loads((finished.workdir / 'config.json').read_text())
  assert stored == json.loads(json.dumps(tiny_config().to_dict()))


def test_metrics_schema(finished):
  lines = (finished.workdir / 'metrics.jsonl').read_text().splitlines()
  rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
  assert rows == finished.rows
  assert [(r['round'], r['split']) for r in rows] == [
      (0, 'test'),
      *((r, s) for r in (1, 2, 3, 4) for s in ('train', 'test')),
  ]
  groups = ('small', 'large')
  for row in rows:
    assert isinstance(row['round'], int) and row['seconds'] > 0
    if row['split'] == 'test':
      means = [row[f'accuracy/{g}'] for g in groups]
      assert row['accuracy'] == pytest.approx(np.mean(means))
      assert row['loss'] == pytest.approx(
          np.mean([row[f'loss/{g}'] for g in groups])
      )
      # One model serves a group, so the worst client is that model.
      assert row['accuracy/worst'] == min(means)
      assert [row[f'models/{g}'] for g in groups] == [1, 1]
      assert [row[f'accuracy/{g}/worst'] for g in groups] == means
    else:
      assert row['clients'] == 4 and row['nonfinite'] == []
      for name in ('clients', 'bytes_up', 'bytes_down'):
        assert isinstance(row[name], int)
        assert row[name] == sum(row[f'{name}/{g}'] for g in groups)
      some = [g for g in groups if row[f'clients/{g}']]
      assert row['loss'] == pytest.approx(
          np.mean([row[f'loss/{g}'] for g in some])
      )


def test_bytes_are_those_of_the_arrays(tmp_path):
  # FedAvg sends parameters and statistics, and one more number up, of 4 bytes
  # each. Every client of the cohort does so in every round.
  result = experiment.run(
      tiny_config(cohort_size=5, num_rounds=1), tmp_path / 'w'
  )
  (row,) = [row for row in result.rows if row['split'] == 'train']
  numbers = sum(
      g['clients'] * (g['parameters'] + g['statistics'])
      for g in result.facts['groups'].values()
  )
  assert row['bytes_down'] == 4 * numbers
  assert row['bytes_up'] == 4 * (numbers + 5)
  # By hand: 64 -> 8 -> 8 -> 10 with batch norm after the hidden layers.
  small = result.facts['groups']['small']
  layers = (64 * 8 + 8 + 16) + (8 * 8 + 8 + 16)
  assert small['parameters'] == layers + 8 * 10 + 10
  assert small['statistics'] == 2 * 16


@pytest.mark.parametrize('row', [1, 2, 4, 6, 8])
def test_resumes_exactly(finished, tmp_path, row):
  folder = tmp_path / 'w'
  with pytest.raises(Killed):
    experiment.run(tiny_config(), folder, observe=killed_at(row))
  with open(folder / 'metrics.jsonl', 'a') as file:
    file.write('{"round": 9, "spl')  # A line that a kill has torn.
  result = experiment.run(tiny_config(), folder)
  same = without_seconds(finished.workdir / 'metrics.jsonl')
  assert without_seconds(folder / 'metrics.jsonl') == same
  for a, b in zip(
      jax.tree.leaves(result.state),
      jax.tree.leaves(finished.state),
      strict=True,
  ):
    np.testing.assert_array_equal(a, b)


def test_the_first_checkpoint_is_written_before_anything(tmp_path, monkeypatch):
  """A run with lines but no checkpoint could not be resumed."""
  save, seen = checkpoints_lib.ocp.CheckpointManager.save, []

  def slow(self, *args, **kwargs):
    time.sleep(0.5)
    return save(self, *args, **kwargs)

  def compile_programs(*args):
    seen.append((tmp_path / 'w' / 'checkpoints' / '0').is_dir())
    raise Killed

  monkeypatch.setattr(checkpoints_lib.ocp.CheckpointManager, 'save', slow)
  monkeypatch.setattr(runner, 'compile_programs', compile_programs)
  with pytest.raises(Killed):
    experiment.run(tiny_config(), tmp_path / 'w')
  assert seen == [True]


def assert_rows_agree(path, want_path):
  got, want = without_seconds(path), without_seconds(want_path)
  assert len(got) == len(want)
  for row, other in zip(got, want):
    assert row.keys() == other.keys()
    for key, value in row.items():
      if isinstance(value, float):
        value, other[key] = np.float32(value), pytest.approx(other[key], 1e-4)
      assert value == other[key], (row['round'], row['split'], key)


def test_several_rounds_in_a_dispatch(tmp_path, monkeypatch):
  """A dispatch ends at the next evaluation or checkpoint at the latest."""
  clock = types.SimpleNamespace(
      perf_counter=functools.partial(next, itertools.count(0.0))
  )
  monkeypatch.setattr(training, 'time', clock)
  config = tiny_config(num_rounds=7, eval_every=4, checkpoint_every=5)
  config.groups.large.depth = 2  # One shape: less to compile.
  experiment.run(config, tmp_path / 'one')
  config.rounds_per_dispatch = 3
  assert [programs.rounds_to_run(config, done) for done in range(7)] == [
      3, 3, 2, 1, 1, 2, 1
  ]  # fmt: skip
  with pytest.raises(Killed):
    experiment.run(config, tmp_path / 'three', observe=killed_at(8))
  experiment.run(config, tmp_path / 'three')
  with open(tmp_path / 'three' / 'metrics.jsonl') as lines:
    rows = [json.loads(line) for line in lines]
  # Each round has a third of the seconds, which are whole in this test.
  seconds = {row['seconds'] for row in rows if 'train' in row.values()
             and row['round'] <= 3}  # fmt: skip
  assert len(seconds) == 1 and seconds < {1 / 3, 2 / 3, 4 / 3}
  assert_rows_agree(
      tmp_path / 'three' / 'metrics.jsonl', tmp_path / 'one' / 'metrics.jsonl'
  )


def test_a_dispatch_is_no_longer_than_it_can_be():
  config = tiny_config(rounds_per_dispatch=10**6)
  names = ('num_rounds', 'eval_every', 'checkpoint_every')
  for name, number in itertools.product(names, (1, 7)):
    config.update(dict.fromkeys(names, 10**9) | {name: number})
    assert programs.dispatch_size(config) == number
  config.update(dict.fromkeys(names, 10**9))
  assert programs.dispatch_size(config) == 1000
  assert programs.rounds_to_run(config, 10**9 - 3) == 3


def test_client_states_in_host_memory(tmp_path):
  """The rows are those of states on the device, also after resuming."""
  config = tiny_config('private', eval_every=2)
  config.model.norm = 'none'  # Biases before a norm learn from rounding.
  config.groups.large.depth = 2  # One shape: less to compile.
  experiment.run(config, tmp_path / 'device')
  config.client_store = 'host'
  with pytest.raises(Killed):
    experiment.run(config, tmp_path / 'host', observe=killed_at(5))
  result = experiment.run(config, tmp_path / 'host')
  leaves = jax.tree.leaves(result.state.clients)
  assert leaves and all(isinstance(leaf, np.ndarray) for leaf in leaves)
  assert_rows_agree(
      tmp_path / 'host' / 'metrics.jsonl', tmp_path / 'device' / 'metrics.jsonl'
  )


@pytest.mark.slow
@pytest.mark.parametrize('name', ALGORITHMS)
def test_every_algorithm_stops_and_resumes_exactly(name, tmp_path):
  changes = dict(num_rounds=3, nonfinite='drop')
  experiment.run(tiny_config(name, **changes), tmp_path / 'whole')
  # Stops after round 1, which is not a multiple of `checkpoint_every`.
  stopped = experiment.run(
      tiny_config(name, **changes), tmp_path / 'parts', stop=lambda: True
  )
  assert not stopped.finished and stopped.summary.rounds == 1
  assert 'report.md' in os.listdir(tmp_path / 'parts')
  resumed = experiment.run(tiny_config(name, **changes), tmp_path / 'parts')
  assert resumed.finished
  assert without_seconds(tmp_path / 'parts' / 'metrics.jsonl') == (
      without_seconds(tmp_path / 'whole' / 'metrics.jsonl')
  )


def test_a_finished_run_is_left_alone(finished, tmp_path):
  folder = tmp_path / 'w'
  shutil.copytree(finished.workdir, folder)
  (folder / 'report.md').unlink()
  before = (folder / 'metrics.jsonl').read_bytes()
  rows = []
  again = experiment.run(tiny_config(), folder, observe=rows.append)
  assert not rows and again.rows == finished.rows
  assert (folder / 'metrics.jsonl').read_bytes() == before
  assert (folder / 'report.md').exists()


def test_more_rounds_go_on(finished, tmp_path):
  folder = tmp_path / 'w'
  shutil.copytree(finished.workdir, folder)
  longer = experiment.run(tiny_config(num_rounds=6), folder)
  assert longer.rows[: len(finished.rows)] == finished.rows
  assert longer.summary.rounds == 6
  experiment.run(tiny_config(num_rounds=6), tmp_path / 'whole')
  assert without_seconds(folder / 'metrics.jsonl') == without_seconds(
      tmp_path / 'whole' / 'metrics.jsonl'
  )
  with pytest.raises(ValueError, match='has done 6 rounds, more than num_rou'):
    experiment.run(tiny_config(num_rounds=5), folder)


def test_a_damaged_checkpoint_changes_nothing(finished, tmp_path, caplog):
  folder = tmp_path / 'w'
  with pytest.raises(Killed):
    experiment.run(tiny_config(), folder, observe=killed_at(8))
  files = [p for p in (folder / 'checkpoints' / '2').rglob('*') if p.is_file()]
  os.truncate(max(files, key=lambda path: path.stat().st_size), 10)
  experiment.run(tiny_config(), folder)
  assert 'going back to that of round 0' in caplog.text
  assert without_seconds(folder / 'metrics.jsonl') == without_seconds(
      finished.workdir / 'metrics.jsonl'
  )


def refused(folder, config=None):
  before = {
      path: path.read_bytes()
      for path in folder.rglob('*')
      if path.is_file() and path.name != '.lock'
  }
  with pytest.raises(ValueError) as error:
    experiment.run(config or tiny_config(), folder)
  for path, contents in before.items():
    assert path.read_bytes() == contents
  assert '\n' not in str(error.value)
  return str(error.value)


def test_refuses_the_workdir_of_another_config(finished):
  config = tiny_config(
      seed=3, local__epochs=2, algorithm__server_lr=0.5, chunk=2
  )
  text = refused(finished.workdir, config)
  assert text == (
      f'The workdir {finished.workdir} holds a run of another config: '
      'algorithm.server_lr is 1.0 there and 0.5 here; chunk is None there and '
      '2 here; local.epochs is 1 there and 2 here; and 1 more. Choose another '
      'workdir, or the config of that run.'
  )


def test_refuses_groups_that_differ(finished):
  config = tiny_config()
  with config.unlocked():
    config.groups.other = config.groups.large
    del config.groups['large']
  assert 'groups.large.clients is 2 there and absent here' in refused(
      finished.workdir, config
  )


def test_a_schedule_over_the_rounds_fixes_their_number(tmp_path):
  folder = tmp_path / 'w'
  cosine = dict(local__schedule='cosine', num_rounds=1)
  experiment.run(tiny_config(**cosine), folder)
  cosine['num_rounds'] = 2
  assert 'num_rounds is 1 there and 2 here' in refused(
      folder, tiny_config(**cosine)
  )


def test_refuses_metrics_without_their_checkpoints(finished, tmp_path):
  folder = tmp_path / 'w'
  shutil.copytree(finished.workdir, folder)
  shutil.rmtree(folder / 'checkpoints')
  assert 'holds the metrics of a run whose checkpoints are gone' in refused(
      folder
  )
  assert not (folder / 'checkpoints').exists()


def lose_a_line(path):
  lines = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(b''.join(lines[:3] + lines[4:]))


def double_a_line(path):
  lines = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(b''.join(lines[:3] + lines[2:]))


def swap_two_lines(path):
  lines = path.read_bytes().splitlines(keepends=True)
  path.write_bytes(b''.join([*lines[:2], lines[3], lines[2], *lines[4:]]))


def change_a_digit(path):
  old = path.read_bytes()
  path.write_bytes(old.replace(b'"accuracy": 0.', b'"accuracy": 1.', 1))


def a_folder_instead(path):
  path.unlink()
  path.mkdir()


DAMAGES = {
    'partial last line': lambda path: path.write_bytes(path.read_bytes()[:-9]),
    'double': double_a_line,
    'swapped': swap_two_lines,
    'lost': lose_a_line,
    'digit': change_a_digit,
    'mark': lambda path: path.write_bytes(b'\xef\xbb\xbf' + path.read_bytes()),
    'crlf': lambda path: path.write_bytes(
        path.read_bytes().replace(b'\n', b'\r\n')
    ),
    'zeros': lambda path: path.write_bytes(bytes(500)),
    'not utf-8': lambda path: path.write_bytes(b'\xff' + path.read_bytes()),
    'empty': lambda path: path.write_bytes(b''),
    'absent': lambda path: path.unlink(),
    'folder': a_folder_instead,
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_metrics_are_restored(finished, tmp_path, damage, caplog):
  folder = tmp_path / 'w'
  shutil.copytree(finished.workdir, folder)
  DAMAGES[damage](folder / 'metrics.jsonl')
  result = experiment.run(tiny_config(), folder)
  assert result.rows == finished.rows
  assert (folder / 'metrics.jsonl').read_bytes() == (
      finished.workdir / 'metrics.jsonl'
  ).read_bytes()
  assert 'metrics.jsonl is damaged; restored as of round 4 from ' in caplog.text
  # A damaged file is kept, if there was one.
  kept = (folder / 'damaged-metrics.jsonl').exists()
  assert kept == (damage != 'absent')


def test_a_killed_run_with_damaged_metrics_ends_alike(finished, tmp_path):
  folder = tmp_path / 'w'
  with pytest.raises(Killed):
    experiment.run(tiny_config(), folder, observe=killed_at(8))
  lose_a_line(folder / 'metrics.jsonl')
  experiment.run(tiny_config(), folder)
  same = without_seconds(finished.workdir / 'metrics.jsonl')
  assert without_seconds(folder / 'metrics.jsonl') == same
  copy = folder / 'checkpoints' / 'metrics.jsonl'
  assert copy.read_bytes() == (folder / 'metrics.jsonl').read_bytes()


def test_refuses_metrics_that_cannot_be_restored(finished, tmp_path):
  folder = tmp_path / 'w'
  shutil.copytree(finished.workdir, folder)
  lose_a_line(folder / 'metrics.jsonl')
  (folder / 'checkpoints' / 'metrics.jsonl').unlink()
  assert refused(folder) == (
      f'{folder}/metrics.jsonl and its copy {folder.absolute()}/checkpoints/'
      'metrics.jsonl are both damaged or missing; restore one of them or '
      'choose another workdir.'
  )


def test_a_run_of_a_version_without_the_copy_goes_on(finished, tmp_path):
  folder = tmp_path / 'w'
  shutil.copytree(finished.workdir, folder)
  (folder / 'checkpoints' / 'metrics.jsonl').unlink()
  for step in (0, 2, 4):
    path = folder / 'checkpoints' / str(step) / 'notes' / 'metadata'
    notes = json.loads(path.read_text())
    notes.pop('metrics', None)  # The first has no mark.
    del notes['notes']
    path.write_text(json.dumps(notes))
  damaged = tmp_path / 'damaged'
  shutil.copytree(folder, damaged)
  lose_a_line(damaged / 'metrics.jsonl')
  assert 'lacks or repeats round 2, but the checkpoint has done 4' in refused(
      damaged
  )
  longer = experiment.run(tiny_config(num_rounds=6), folder)
  assert longer.rows[: len(finished.rows)] == finished.rows
  copy = folder / 'checkpoints' / 'metrics.jsonl'
  assert copy.read_bytes() == (folder / 'metrics.jsonl').read_bytes()


@pytest.mark.parametrize(
    'contents', [b'', b'{}', b'[]', b'{"groups": 3}', b'\xff', b'{' * 9999]
)
def test_damaged_facts_are_measured_again(finished, tmp_path, contents, caplog):
  folder = tmp_path / 'w'
  shutil.copytree(finished.workdir, folder)
  (folder / 'facts.json').write_bytes(contents)
  again = experiment.run(tiny_config(), folder)
  assert again.facts.items() <= finished.facts.items()
  stored = json.loads((folder / 'facts.json').read_text())
  assert stored == again.facts
  assert contents == b'{}' or 'measured again' in caplog.text


def test_facts_of_an_older_version_get_what_is_new(finished, tmp_path, caplog):
  folder = tmp_path / 'w'
  shutil.copytree(finished.workdir, folder)
  old = json.loads(json.dumps(finished.facts))
  old['versions']['jax'] = '0.1'
  assert old.pop('personal') is False
  data = old.pop('data')
  (folder / 'facts.json').write_text(json.dumps(old))
  again = experiment.run(tiny_config(), folder)
  assert again.facts == dict(old, personal=False, data=data)
  assert 'measured again' not in caplog.text


@pytest.mark.parametrize(
    ('contents', 'reason'),
    [
        (b'{"seed": ', 'Expecting value: line 1'),
        (b'\xff{}', 'byte 0 is not UTF-8'),
        (b'[]', 'it holds no JSON object'),
        (b'null', 'it holds no JSON object'),
        (b'[' * 5000 + b']' * 5000, 'it is nested too deep'),
        (b'9' * 5000, 'Exceeds the limit'),
    ],
)
def test_refuses_a_damaged_config(finished, tmp_path, contents, reason):
  folder = tmp_path / 'w'
  shutil.copytree(finished.workdir, folder)
  (folder / 'config.json').write_bytes(contents)
  text = refused(folder)
  assert text.startswith(f'{folder}/config.json is damaged ({reason}')
  with pytest.raises(ValueError, match=r'config\.json is damaged'):
    experiment.write_report(folder)


@pytest.mark.parametrize('name', ['config.json', 'facts.json', 'report.md'])
def test_refuses_what_lies_where_the_run_writes(finished, tmp_path, name):
  folder = tmp_path / 'w'
  shutil.copytree(finished.workdir, folder)
  (folder / name).unlink()
  os.mkfifo(folder / name)
  assert refused(folder) == f'{folder / name} is not a file; move it away.'


def test_a_refused_run_keeps_its_config(finished, tmp_path):
  folder = tmp_path / 'w'
  shutil.copytree(finished.workdir, folder)
  assert 'has done 4 rounds' in refused(folder, tiny_config(num_rounds=3))


def test_refuses_a_workdir_without_config(finished, tmp_path):
  folder = tmp_path / 'w'
  shutil.copytree(finished.workdir, folder)
  (folder / 'config.json').unlink()
  assert 'holds metrics.jsonl but no config.json' in refused(folder)
  (folder / 'config.json').write_text('{"seed": ')
  assert 'config.json is damaged' in refused(folder)


def test_refuses_other_data(finished, tmp_path, monkeypatch):
  folder = tmp_path / 'w'
  shutil.copytree(finished.workdir, folder)
  monkeypatch.setattr(runner.facts_lib, 'fingerprint', lambda _: dict(data=1))
  assert 'are not those with which the run' in refused(folder)


def test_the_border_between_two_clients_is_part_of_the_data(finished):
  built = experiment.build(tiny_config())
  first, second, *others = built.parts
  moved = built._replace(parts=[first[:-1], np.append(first[-1], second),
                                *others])  # fmt: skip
  found, changed = map(runner.facts_lib.fingerprint, (built, moved))
  assert found['data'] == changed['data']
  assert not runner.facts_lib.is_of(found, changed)
  # Checkpoints of older versions do not know the sizes.
  assert runner.facts_lib.is_of(dict(data=found['data']), found)
  assert not runner.facts_lib.is_of(dict(data=found['data'] + 1), found)


def test_the_clients_test_examples_are_part_of_the_data():
  built = experiment.build(tiny_config(personal_test=True))
  first, second, *others = built.own_tests
  moved = built._replace(own_tests=[second, first, *others])
  without = built._replace(own_tests=None)
  found, changed, none = map(
      runner.facts_lib.fingerprint, (built, moved, without)
  )
  assert not runner.facts_lib.is_of(found, changed)
  # Runs without such tests, and of older versions, can have them later.
  assert runner.facts_lib.is_of(none, found)
  assert runner.facts_lib.is_of(found, none)


def test_refuses_a_file_as_workdir(tmp_path):
  (tmp_path / 'file').write_text('x')
  with pytest.raises(ValueError, match='is a file, not a folder'):
    experiment.run(tiny_config(), tmp_path / 'file')


def test_a_wrong_config_makes_no_workdir(tmp_path):
  with pytest.raises(ValueError):
    experiment.run(tiny_config(local__batch_size=1000), tmp_path / 'w')
  assert not (tmp_path / 'w').exists()


def _hold(folder, ready, done):
  with lock(pathlib.Path(folder)):
    ready.set()
    done.wait(60)


def test_refuses_a_workdir_in_use(tmp_path):
  ready, done = forks.context().Event(), forks.context().Event()
  other = forks.start(_hold, str(tmp_path), ready, done)
  try:
    assert ready.wait(60)
    assert refused(tmp_path) == (
        f'The workdir {tmp_path} is in use by process {other.pid}; wait for '
        'it or choose another one.'
    )
  finally:
    done.set()
    other.join()


class _BadClient:
  """Makes the update of one client NaN in one round."""

  def __init__(self, monkeypatch, client_id, round_num):
    self.client_id, self.round_num = client_id, round_num
    self.make_round = rounds.make_round
    monkeypatch.setattr(drivers, 'make_round', self)
    # It must not share compiled programs.
    monkeypatch.setattr(runner, 'compile_programs', programs.compile_programs)

  def __call__(self, algorithm, federation, **kwargs):
    update = algorithm.client_update

    def client_update(group, client, sent, data, visit):
      own, uplink, values = update(group, client, sent, data, visit)
      bad = (visit.client_id == self.client_id) & (
          visit.round_num == self.round_num - 1
      )

      def poison(x):
        return jax.numpy.where(bad, jax.numpy.nan, x)

      summed = jax.tree.map(poison, uplink.summed)
      return own, uplink._replace(summed=summed), jax.tree.map(poison, values)

    return self.make_round(
        algorithm._replace(client_update=client_update), federation, **kwargs
    )


def _slow_copies(monkeypatch):
  """Checkpoints are written long after `save` has returned."""
  mark = metrics_file.MetricsFile.mark

  def slow(self):
    lines, keep = mark(self)
    return lines, lambda: (time.sleep(0.5), keep())

  monkeypatch.setattr(metrics_file.MetricsFile, 'mark', slow)


def test_a_client_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
  _slow_copies(monkeypatch)
  config = tiny_config(cohort_size=5)
  groups = experiment.build(config).federation.groups
  group = groups[-1]
  bad = _BadClient(monkeypatch, int(group.client_ids[0]), 3)
  with pytest.raises(FloatingPointError) as error:
    experiment.run(config, tmp_path / 'w')
  assert str(error.value).startswith(
      f'Round 3: the update of client {bad.client_id} (group {group.name}) '
      'holds NaN or infinity. '
  )
  rows = read_rows(tmp_path / 'w' / 'metrics.jsonl')
  assert rows[-1]['round'] == 2
  paths = (tmp_path / 'w' / 'checkpoints').iterdir()
  assert {p.name for p in paths if p.is_dir()} == {'0', '2'}


def test_a_client_that_is_not_finite_can_be_left_out(
    tmp_path, monkeypatch, caplog
):
  caplog.set_level(logging.WARNING)
  bad = _BadClient(monkeypatch, 2, 3)
  config = tiny_config(cohort_size=5)
  with pytest.raises(FloatingPointError):
    experiment.run(config, tmp_path / 'w')
  # The same run continues, with the other policy.
  config.nonfinite = 'drop'
  result = experiment.run(config, tmp_path / 'w')
  assert result.finished and result.summary.dropped == 1
  train = [row for row in result.rows if row['split'] == 'train']
  assert [row['nonfinite'] for row in train] == [[], [], [bad.client_id], []]
  assert all(np.isfinite(row['loss']) for row in train)
  assert f'client {bad.client_id} (group ' in caplog.text
  lines = (tmp_path / 'w' / 'metrics.jsonl').read_text()
  assert 'NaN' not in lines and 'Infinity' not in lines


def test_a_full_disk_loses_nothing(finished, tmp_path, monkeypatch):
  folder = tmp_path / 'w'
  write = metrics_file.MetricsFile.append

  def full(self, row):
    if row['round'] == 3:
      self._file.write(b'{"round": 3, "sp')
      raise OSError(errno.ENOSPC, 'No space left on device')
    write(self, row)

  with monkeypatch.context() as patch:
    patch.setattr(metrics_file.MetricsFile, 'append', full)
    with pytest.raises(OSError, match='No space left'):
      experiment.run(tiny_config(), folder)
  save = checkpoints_lib.ocp.CheckpointManager.save

  def no_save(self, step, *args, **kwargs):
    if step == 4:
      raise ValueError('RESOURCE_EXHAUSTED: ... No space left on device [..]')
    return save(self, step, *args, **kwargs)

  with monkeypatch.context() as patch:
    patch.setattr(checkpoints_lib.ocp.CheckpointManager, 'save', no_save)
    with pytest.raises(OSError, match='while writing the checkpoint of round'):
      experiment.run(tiny_config(), folder)
  experiment.run(tiny_config(), folder)
  assert without_seconds(folder / 'metrics.jsonl') == without_seconds(
      finished.workdir / 'metrics.jsonl'
  )


@pytest.mark.slow
@pytest.mark.usefixtures('users_generator')
@pytest.mark.parametrize('backend', ['loop', 'shard_map'])
def test_other_backends_resume_too(backend, tmp_path):
  # Not Adam, which amplifies rounding near zero to a whole step.
  config = tiny_config(
      num_rounds=2, checkpoint_every=1, local__optimizer='sgd'
  )
  config.cohort_size = 2
  with config.unlocked():
    del config.groups['large']
  whole = experiment.run(config, tmp_path / 'map')
  config.backend = backend
  with pytest.raises(Killed):
    experiment.run(config, tmp_path / 'w', observe=killed_at(4))
  result = experiment.run(config, tmp_path / 'w')
  assert len(result.rows) == len(whole.rows)
  for row, want in zip(result.rows, whole.rows, strict=True):
    assert row['loss'] == pytest.approx(want['loss'], rel=1e-4)


def test_tensorboard_writes_event_files(tmp_path):
  pytest.importorskip('tensorboardX')
  experiment.run(
      tiny_config(num_rounds=1, tensorboard=True), tmp_path / 'w'
  )
  (events,) = (tmp_path / 'w' / 'tensorboard').iterdir()
  contents = events.read_bytes()
  for tag in (b'test/accuracy/small', b'train/bytes_up', b'train/loss'):
    assert tag in contents


def test_tensorboard_missing_is_refused_before_training(tmp_path, monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(ValueError, match='needs the extra tensorboard: pip inst'):
    experiment.run(tiny_config(tensorboard=True), tmp_path / 'w')
  assert not (tmp_path / 'w').exists()
