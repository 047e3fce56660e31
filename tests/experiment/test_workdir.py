"""Names of workdirs, atomic files, the cache folder, progress."""

import io
import json
import os

import jax
import numpy as np
import pytest

from fedjax_het.experiment import Progress, new_workdir
from fedjax_het.experiment.cache import enable_compilation_cache
from fedjax_het.experiment.workdir import settle_config
from fedjax_het.files import write_atomically
from tests.experiment.tiny_runs import tiny_config


def test_new_workdirs_have_readable_names_of_their_own(tmp_path):
  names = []
  for _ in range(3):
    path = new_workdir(tiny_config(), tmp_path)
    assert path.name.startswith('fedavg-digits-dirichlet-20')
    path.mkdir()
    names.append(path.name)
  assert len(set(names)) == 3


def test_numpys_numbers_are_stored_as_pythons(tmp_path):
  config = tiny_config()
  config.groups.a = np.int64(3)
  assert settle_config(tmp_path, config)
  stored = json.loads((tmp_path / 'config.json').read_text())
  assert stored['groups']['a'] == 3
  assert not settle_config(tmp_path, config)
  config.groups.b = np.array([3])
  with pytest.raises(TypeError, match='A config cannot hold array'):
    settle_config(tmp_path, config)


@pytest.mark.parametrize('name', ['report.md', 'curves.png', 'best'])
def test_what_others_have_written_is_not_replaced(name, tmp_path):
  path = tmp_path / name
  path.mkdir() if name == 'best' else path.write_text('mine')
  with pytest.raises(ValueError, match=f'holds no run, but {name}, which'):
    settle_config(tmp_path, tiny_config())
  assert [*tmp_path.iterdir()] == [path]
  # Other files do not matter.
  path.rename(tmp_path / 'notes')
  assert settle_config(tmp_path, tiny_config())


def test_a_file_is_the_old_or_the_new_one(tmp_path, monkeypatch):
  path = tmp_path / 'file'
  write_atomically(path, 'old')

  def full(fd):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(OSError, match='No space left on device while writing'):
    write_atomically(path, 'new')
  assert path.read_text() == 'old'
  assert [p.name for p in tmp_path.iterdir()] == ['file']


@pytest.fixture
def no_cache():
  """JAX without a compilation cache, as in a new process."""
  old = jax.config.jax_compilation_cache_dir
  seconds = jax.config.jax_persistent_cache_min_compile_time_secs
  jax.config.update('jax_compilation_cache_dir', None)
  yield
  jax.config.update('jax_compilation_cache_dir', old)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', seconds)


def test_the_cache_lies_in_the_users_cache_folder(
    tmp_path, monkeypatch, no_cache
):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  assert enable_compilation_cache() == tmp_path / 'fedjax_het' / 'xla'
  assert jax.config.jax_compilation_cache_dir == str(
      tmp_path / 'fedjax_het' / 'xla'
  )


def test_a_folder_that_was_chosen_stays(tmp_path, monkeypatch, no_cache):
  jax.config.update('jax_compilation_cache_dir', str(tmp_path / 'mine'))
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  assert enable_compilation_cache() == tmp_path / 'mine'


def test_a_cache_that_cannot_be_written_stops_nothing(
    tmp_path, monkeypatch, no_cache
):
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  assert enable_compilation_cache() is None
  assert jax.config.jax_compilation_cache_dir is None


def rows(num_rounds, every=1, begin=0):
  if not begin:
    yield dict(round=0, split='test', accuracy=0.1)
  for done in range(begin + 1, num_rounds + 1):
    yield dict(round=done, split='train')
    if done % every == 0 or done == num_rounds:
      yield dict(round=done, split='test', accuracy=done / 1000)


@pytest.mark.parametrize(('every', 'begin'), [(1, 0), (7, 0), (1, 55)])
def test_progress_is_quiet_where_there_is_no_terminal(every, begin):
  stream = io.StringIO()
  progress = Progress(100, stream)
  for row in rows(100, every, begin):
    progress(row)
  progress.close()
  lines = stream.getvalue().splitlines()
  assert len(lines) <= 11
  assert lines[-1] == 'Round 100/100: accuracy 0.100'
  assert ' s left' in lines[-2]


def test_the_time_left_is_that_of_rounds_without_the_compilation(monkeypatch):
  """Compilation takes 100 s, a round 1 s."""
  now = [0.0]
  monkeypatch.setattr('time.perf_counter', lambda: now[0])
  stream = io.StringIO()
  progress = Progress(10, stream)
  for row in rows(10):
    if row['split'] == 'train':
      now[0] += 101 if row['round'] == 1 else 1
    progress(row)
  lines = stream.getvalue().splitlines()
  assert 'left' not in lines[1] and lines[2].endswith(', 8 s left')
  assert lines[9].endswith(', 1 s left')


class Terminal(io.StringIO):

  def isatty(self):
    return True


def test_progress_on_a_terminal_is_one_bar():
  stream = Terminal()
  progress = Progress(4, stream)
  for row in rows(4, begin=2):
    progress(row)
  progress.close()
  last = stream.getvalue().rstrip().split('\r')[-1]
  assert last.startswith('Round 4/4 |') and 'accuracy 0.004' in last
  assert 'left]' in last


@pytest.mark.parametrize(
    ('name', 'schedule', 'reason'),
    [
        ('scalefl', 'constant', 'scalefl'),
        ('fedavg', 'cosine', 'local.schedule'),
        ('fedavg', 'constant', None),
    ],
)
def test_rounds_may_be_added_if_nothing_depends_on_their_number(
    name, schedule, reason, tmp_path
):
  config = tiny_config(name, num_rounds=4, local__schedule=schedule)
  assert settle_config(tmp_path, config)
  config.num_rounds = 6
  if reason is None:
    assert not settle_config(tmp_path, config)
    return
  with pytest.raises(ValueError) as error:
    settle_config(tmp_path, config)
  assert str(error.value) == (
      f'The workdir {tmp_path} holds a run of another config: num_rounds is 4 '
      f'there and 6 here, on which {reason} depends. Choose another workdir, '
      'or the config of that run.'
  )


def test_a_workdir_of_an_older_version_keeps_its_cut_outs(tmp_path):
  """It lacks `local.cutout`, which has no effect without a cut-out."""
  for augment, fits in (('none', True), ('crop_flip_cutout', False)):
    config = tiny_config(local__augment=augment)
    folder = tmp_path / augment
    folder.mkdir()
    old = config.to_dict()
    del old['local']['cutout']
    (folder / 'config.json').write_text(json.dumps(old))
    if not fits:
      with pytest.raises(ValueError, match=r'absent there and .after. here'):
        settle_config(folder, config)
      config.local.cutout = 'before'
    settle_config(folder, config)
