"""Damaged workdirs and results: a whole run or one error, and no data lost."""

import pathlib
import random
import shutil

import pytest

from fedjax_het.analysis import pictures
from fedjax_het.reporting import table_pictures
from tests.experiment.tiny_runs import compiled_once, without_seconds
from tests.fuzz import damages
from tests.fuzz.programs import call, contents

CONFIG = (
    f'--config={pathlib.Path(__file__).with_name("driver_config.py")}'
    ':synchronous,4'
)
SLOW = pytest.mark.slow
# An exception that Python only prints, as in a finaliser, fails a test, too.
pytestmark = pytest.mark.filterwarnings(
    'error::pytest.PytestUnraisableExceptionWarning'
)
# Each seed is one damage, tried four times: to a finished run and to one that
# lacks its last checkpoint, each of which is resumed and reported.
FAST = range(6)
LONG = range(6, 106)


@pytest.fixture(scope='module')
def workdirs(tmp_path_factory):
  """A finished run, and the same killed before its last checkpoint."""
  with compiled_once():  # All runs here have one config.
    folder = tmp_path_factory.mktemp('workdirs')
    outcome = call('train', [CONFIG, f'--workdir={folder / "whole"}'])
    assert outcome.code == 0, outcome.err
    shutil.copytree(folder / 'whole', folder / 'killed')
    shutil.rmtree(folder / 'killed' / 'checkpoints' / '4')
    yield folder


def _without_pictures(monkeypatch):
  """Omits pictures, which take most of a report's time."""

  def missing(*args, **kwargs):
    raise ImportError

  monkeypatch.setattr(pictures, 'draw_partition', missing)


def assert_refused(outcome, folder, before):
  """Exit status 2, one line that names a file of `folder`; nothing changed."""
  errors = [x for x in outcome.err.splitlines() if x.startswith('Error: ')]
  assert outcome.code == 2 and len(errors) == 1, outcome
  assert outcome.err.splitlines()[-1] == errors[0], outcome
  assert str(folder) in errors[0]
  after = contents(folder)
  for held in (before, after):
    held.pop('.lock', None)  # It holds the last process's id.
  assert after == before, outcome


def _try_all(seed, workdirs, folder):
  """Tries one damage four times; returns how often it was refused."""
  want = without_seconds(workdirs / 'whole' / 'metrics.jsonl')
  refused = 0
  for name in ('whole', 'killed'):
    for program in ('report', 'train'):
      shutil.rmtree(folder, ignore_errors=True)
      shutil.copytree(workdirs / name, folder)
      damages.damage(folder, seed)
      before = contents(folder)
      args = [CONFIG, f'--workdir={folder}']
      outcome = call(program, args if program == 'train' else [folder])
      assert 'Traceback' not in outcome.err, outcome
      if outcome.code:
        assert_refused(outcome, folder, before)
        refused += 1
      elif program == 'train':
        assert without_seconds(folder / 'metrics.jsonl') == want, outcome
      else:
        assert (folder / 'report.md').is_file()
  return refused


def test_damaged_workdirs(workdirs, tmp_path, monkeypatch):
  _without_pictures(monkeypatch)
  refused = [_try_all(seed, workdirs, tmp_path / 'w') for seed in FAST]
  assert 0 < sum(refused) < 4 * len(FAST)


@SLOW
def test_many_damaged_workdirs(workdirs, tmp_path, monkeypatch):
  _without_pictures(monkeypatch)
  refused = [_try_all(seed, workdirs, tmp_path / 'w') for seed in LONG]
  print(
      f'{len(LONG)} damages, {4 * len(LONG)} trials, {sum(refused)} refused'
  )


@SLOW
def test_damaged_workdirs_with_pictures(workdirs, tmp_path):
  """Reports draw pictures from damaged facts, metrics and configs."""
  refused = 0
  for seed in range(1000, 1060):
    shutil.rmtree(tmp_path / 'w', ignore_errors=True)
    shutil.copytree(workdirs / 'whole', tmp_path / 'w')
    rng = random.Random(seed)
    name = rng.choice(['facts.json', 'metrics.jsonl', 'config.json'])
    damages.damage_file(tmp_path / 'w' / name, rng)
    before = contents(tmp_path / 'w')
    outcome = call('report', [tmp_path / 'w'])
    assert 'Traceback' not in outcome.err, outcome
    if outcome.code:
      assert_refused(outcome, tmp_path / 'w', before)
      refused += 1
  print(f'60 damaged workdirs with pictures, {refused} refused')
  assert 0 < refused < 60


TABLE = '''
from fedjax_het.experiment.sweep_table import Table
from tests.fuzz.driver_config import get_config

def get_table():
  rows = {'Private': get_config(), 'Host': get_config('host')}
  return Table('Title', 'Setting.', rows, {}, (0, 1))
'''


@pytest.fixture(scope='module')
def results(workdirs):
  """The results of a table with one cell; the table's file is beside them."""
  (workdirs / 'table.py').write_text(TABLE)
  from fedjax_het.experiment import sweep, sweep_table
  from launch import table_files

  table = table_files.find_table(str(workdirs / 'table.py')).table
  table = table._replace(rows={'Private': table.rows['Private']}, seeds=(0,))
  out = workdirs / 'results'
  sweep.run_cells(table, out, workdirs / 'runs')
  assert sweep_table.read_cells(table, out)
  return out


def _damage_a_cell(seed, results, folder):
  """Renders a table with a damaged cell; returns whether it was refused."""
  table = results.parent / 'table.py'
  shutil.rmtree(folder, ignore_errors=True)
  shutil.copytree(results, folder)
  damages.damage_file(folder / 'cells' / 'private-0.json', random.Random(seed))
  before = contents(folder)
  outcome = call('report', [f'--table={table}', f'--out={folder}'])
  assert 'Traceback' not in outcome.err, outcome
  if outcome.code:
    assert_refused(outcome, folder, before)
  return outcome.code > 0


def test_damaged_cells(results, tmp_path, monkeypatch):
  monkeypatch.setattr(table_pictures, 'draw', lambda *args, **kwargs: '')
  refused = [_damage_a_cell(s, results, tmp_path / 'r') for s in range(6)]
  assert 0 < sum(refused) < 6


@SLOW
def test_many_damaged_cells(results, tmp_path):
  refused = [_damage_a_cell(s, results, tmp_path / 'r') for s in range(6, 106)]
  print(f'100 damaged cells, {sum(refused)} refused')
