"""Checkpoints: exact and verified, with a fallback if the last is damaged."""

import errno
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.experiment import checkpoints
from fedjax_het.experiment.checkpoints import Checkpoints


def state(seed):
  rng = np.random.default_rng(seed)
  return dict(
      weights={'a/b': jnp.asarray(rng.normal(size=(300, 7)), jnp.float32)},
      round_num=jnp.int32(seed),
      filled=jnp.asarray([True, False]),
      nothing=(jnp.zeros((0, 3)), ()),
      half=jnp.asarray([1.5, -0.0], jnp.bfloat16),
  )


LIKE = jax.eval_shape(lambda: state(0))


def same(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """A folder with the states 5, 10 and 15."""
  folder = tmp_path_factory.mktemp('written') / 'checkpoints'
  checkpoints = Checkpoints(folder)
  for step in (5, 10, 15):
    checkpoints.save(step, state(step), dict(data=step))
  checkpoints.wait()
  checkpoints.close()
  return folder


@pytest.fixture
def saved(written, tmp_path):
  """A copy of that folder, which a test may change."""
  return shutil.copytree(written, tmp_path / 'checkpoints')


def restore(folder):
  checkpoints = Checkpoints(folder)
  try:
    return checkpoints.restore(LIKE)
  finally:
    checkpoints.close()


def largest_file(folder):
  files = [path for path in folder.rglob('*') if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def test_restores_the_last_bit_for_bit(saved):
  restored = restore(saved)
  assert restored.step == 15 and restored.notes == dict(data=15)
  same(restored.state, state(15))


def test_restores_to_the_devices_of_the_state(tmp_path):
  mesh = jax.make_mesh((2,), ('p',), devices=jax.devices()[:2])
  rows = jax.NamedSharding(mesh, jax.P('p'))
  all_ = jax.NamedSharding(mesh, jax.P())
  table = jnp.arange(8.0).reshape(4, 2)
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, dict(table=table, round=jnp.int32(1)), {})
  checkpoints.wait()
  like = dict(
      table=jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=rows),
      round=jax.ShapeDtypeStruct((), jnp.int32, sharding=all_),
  )
  got = checkpoints.restore(like).state
  assert got['table'].sharding == rows and got['round'].sharding == all_
  np.testing.assert_array_equal(got['table'], table)
  checkpoints.close()


def test_an_empty_folder_holds_none(tmp_path):
  assert restore(tmp_path / 'none') is None


def test_keeps_the_last_few(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=2)
  for step in range(4):
    checkpoints.save(step, state(step), {})
  checkpoints.wait()
  assert {p.name for p in tmp_path.iterdir() if p.name.isdigit()} == {'2', '3'}


def truncate(folder):
  path = largest_file(folder)
  os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(folder):
  path = largest_file(folder)
  contents = bytearray(path.read_bytes())
  contents[len(contents) // 2] ^= 4
  path.write_bytes(contents)


def delete_a_file(folder):
  largest_file(folder).unlink()


def empty(folder):
  for path in folder.rglob('*'):
    if path.is_file():
      path.unlink()


def garble_the_notes(folder):
  (folder / 'notes' / 'metadata').write_text('{"data": 1')


def change_a_note(folder):
  path = folder / 'notes' / 'metadata'
  path.write_text(path.read_text().replace('"data": 15', '"data": 16'))


@pytest.mark.parametrize(
    'damage',
    [
        truncate,
        flip_a_bit,
        delete_a_file,
        empty,
        garble_the_notes,
        change_a_note,
    ],
)
def test_falls_back_to_the_one_before(saved, damage, caplog):
  damage(saved / '15')
  restored = restore(saved)
  assert restored.step == 10
  same(restored.state, state(10))
  warnings = [r.getMessage() for r in caplog.records if r.levelname == 'WARNING'
              and 'damaged' in r.getMessage()]  # fmt: skip
  assert len(warnings) == 1 and '\n' not in warnings[0]
  assert warnings[0].startswith('The checkpoint of round 15 in ')
  assert warnings[0].endswith('going back to that of round 10.')
  # The damaged one is set aside, and its step can be written again.
  assert (saved / 'damaged-15').is_dir()
  checkpoints = Checkpoints(saved)
  checkpoints.save(15, state(16), {})
  checkpoints.wait()
  same(checkpoints.restore(LIKE).state, state(16))


def test_a_lost_marker_does_not_matter(saved):
  (saved / '15' / '_CHECKPOINT_METADATA').unlink()
  (saved / '15' / 'commit_success.txt').unlink()
  restored = restore(saved)
  assert restored.step == 15
  same(restored.state, state(15))


def test_reads_that_end_late_print_no_traceback(monkeypatch):
  reported = []
  monkeypatch.setattr(sys, 'unraisablehook', reported.append)
  checkpoints._drop_late_reads.__wrapped__()
  for text in ('Event loop is closed', 'Another'):
    sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(text)))
  assert [str(one.exc_value) for one in reported] == ['Another']


def test_falls_back_twice(saved):
  truncate(saved / '15')
  flip_a_bit(saved / '10')
  assert restore(saved).step == 5


def test_a_checksum_finds_what_the_format_does_not(saved, monkeypatch):
  # Readable data that differ in one bit from what was stored.
  checkpoints = Checkpoints(saved)
  read = checkpoints._manager.restore

  def flipped(step, **kwargs):
    restored = read(step, **kwargs)
    if step == 15:
      restored.state['weights/a/b'] = np.array(restored.state['weights/a/b'])
      restored.state['weights/a/b'].view(np.uint32)[3, 3] ^= 1
    return restored

  monkeypatch.setattr(checkpoints._manager, 'restore', flipped)
  assert checkpoints.restore(LIKE).step == 10


def test_a_folder_under_another_name_is_not_believed(saved):
  (saved / '15').rename(saved / '20')
  assert restore(saved).step == 10


@pytest.mark.parametrize('name', ['²', '٣', '007', '9' * 30, 'x', '-1'])
def test_other_folders_are_no_checkpoints(saved, name):
  shutil.copytree(saved / '15', saved / name)
  assert restore(saved).step == 15
  assert (saved / name).is_dir()


def test_a_pipe_is_not_waited_for(saved):
  (saved / '10' / '_CHECKPOINT_METADATA').unlink()
  os.mkfifo(saved / '10' / '_CHECKPOINT_METADATA')
  with pytest.raises(ValueError, match='is a pipe, not a file'):
    restore(saved)


def test_none_left_is_a_clear_error(saved):
  for step in (5, 10, 15):
    truncate(saved / str(step))
  with pytest.raises(ValueError) as error:
    restore(saved)
  text = str(error.value)
  assert '\n' not in text
  assert text.startswith(
      f'None of the checkpoints in {saved} (rounds 5, 10, 15) can be read; '
  )
  # They are not moved, so that the user can restore them from a backup.
  assert {p.name for p in saved.iterdir()} >= {'5', '10', '15'}


def test_another_shape_is_not_accepted(saved):
  checkpoints = Checkpoints(saved)
  like = dict(LIKE, weights={'a/b': jax.ShapeDtypeStruct((7, 7), jnp.float32)})
  with pytest.raises(ValueError, match='None of the checkpoints'):
    checkpoints.restore(like)


def test_a_state_of_other_arrays_is_named(saved):
  name = min(LIKE)
  less = {key: value for key, value in LIKE.items() if key != name}
  more = dict(LIKE, another=jax.ShapeDtypeStruct((2,), jnp.float32))
  for like, message in ((more, 'lacks another'), (less, f'has {name}')):
    with pytest.raises(ValueError, match=f'version: it {message}') as error:
      Checkpoints(saved).restore(like)
    assert '\n' not in str(error.value)


def test_a_failed_write_leaves_the_others(saved, monkeypatch):
  checkpoints = Checkpoints(saved)

  def full(*args, **kwargs):
    (saved / '20.orbax-checkpoint-tmp').mkdir()
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(checkpoints._manager, 'save', full)
  with pytest.raises(OSError) as error:
    checkpoints.save(20, state(20), {})
    checkpoints.wait()
  assert error.value.errno == errno.ENOSPC
  assert error.value.strerror == (
      'No space left on device while writing the checkpoint of round 20 to '
      f'{saved}'
  )
  assert not (saved / '20.orbax-checkpoint-tmp').exists()
  assert restore(saved).step == 15


def test_a_failed_write_behind_another_error_is_logged(
    tmp_path, monkeypatch, caplog
):
  """After another error nobody waits for the write, so `close` logs it."""

  def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, 'No space left on device')

  checkpoints = Checkpoints(tmp_path / 'c')
  monkeypatch.setattr(checkpoints._manager, 'save', full)
  checkpoints.save(10, state(0), {})
  checkpoints.close()
  assert 'while writing the checkpoint of round 10' in caplog.text


def test_writing_takes_a_copy_and_does_not_wait(tmp_path, monkeypatch):
  """`save` returns before writing; later changes of the state do not count."""
  checkpoints = Checkpoints(tmp_path)
  may_write, save = threading.Event(), checkpoints._manager.save

  def slow(*args, **kwargs):
    assert may_write.wait(60)
    return save(*args, **kwargs)

  monkeypatch.setattr(checkpoints._manager, 'save', slow)
  mine, order = state(1), []
  mine['table'] = np.arange(4, dtype=np.float32)
  checkpoints.save(1, mine, {}, before=lambda: order.append('before'))
  mine['table'][:] = -1.0
  assert not (tmp_path / '1').exists()
  may_write.set()
  like = jax.eval_shape(lambda: mine)
  restored = checkpoints.restore(like, on_host='table')
  assert order == ['before']
  np.testing.assert_array_equal(restored.state['table'], np.arange(4.0))
  assert isinstance(restored.state['table'], np.ndarray)
  checkpoints.close()


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 2 MB; skips if this process may not mount one."""
  folder = tmp_path / 'small'
  folder.mkdir()
  command = ['mount', '-t', 'tmpfs', '-o', 'size=2m', 'tmpfs', str(folder)]
  try:
    done = subprocess.run(command, capture_output=True, check=False)
  except FileNotFoundError:
    pytest.skip('there is no mount command')
  if done.returncode:
    pytest.skip('mounting a small file system needs more rights')
  yield folder
  subprocess.run(['umount', str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk: pathlib.Path):
  checkpoints = Checkpoints(small_disk / 'checkpoints')
  rng = np.random.default_rng(0)
  big = jnp.asarray(rng.normal(size=300_000), jnp.float32)
  like = jax.eval_shape(lambda: big)
  checkpoints.save(1, dict(x=big), {})
  with pytest.raises(OSError) as error:
    checkpoints.save(2, dict(x=big + 1), {})
    checkpoints.wait()
  assert error.value.errno == errno.ENOSPC
  restored = Checkpoints(small_disk / 'checkpoints').restore(dict(x=like))
  assert restored.step == 1
  same(restored.state, dict(x=big))
