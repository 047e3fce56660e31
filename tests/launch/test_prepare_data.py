"""The prepare_data command: what it prints, writes, refuses and returns."""

import gzip
import importlib.util
import pathlib
import struct
import subprocess
import sys

from absl import flags
from absl.testing import flagsaver
import numpy as np
import pytest

from fedjax_het.data import raw_formats, sources
from launch import prepare_data
from tests.fuzz import forks

_ROOT = pathlib.Path(prepare_data.__file__).parents[1]


def command(*args):
  """Runs the command in a forked process, which has imported JAX already."""
  ended = forks.run('prepare_data', args, _ROOT)
  return subprocess.CompletedProcess(args, *ended)


def write_raw(folder, num_train=12, num_test=7):
  """A small set in Fashion-MNIST's layout."""
  folder.mkdir(parents=True)
  rng = np.random.default_rng(0)
  for prefix, num in (('train', num_train), ('t10k', num_test)):
    for kind, *shape in (('images-idx3', num, 28, 28), ('labels-idx1', num)):
      values = rng.integers(0, 10, shape, dtype=np.uint8)
      header = struct.pack(f'>4B{len(shape)}I', 0, 0, 8, len(shape), *shape)
      (folder / f'{prefix}-{kind}-ubyte.gz').write_bytes(
          gzip.compress(header + values.tobytes())
      )


def assert_refused(done, *expected):
  """Exit code 2, no traceback, and a last line written by the command."""
  assert done.returncode == 2, done.stderr
  assert 'Traceback' not in done.stderr
  line = done.stderr.strip().splitlines()[-1]
  assert line.startswith('Error: ')
  for text in expected:
    assert text in line


def test_list_names_every_data_set_with_its_facts():
  lines = prepare_data.list_datasets().splitlines()
  assert [line.split()[0] for line in lines] == list(sources.DATASETS)
  by_name = dict(zip(sources.DATASETS, lines, strict=True))
  assert 'embedded' in by_name['digits']
  assert '73,257 train  26,032 test' in by_name['svhn_cropped']
  assert 'no checksum known' in by_name['cinic10']
  assert 'train.bin,test.bin}, checksums known' in by_name['cifar100']


def test_command_prepares_then_checks_what_is_there(tmp_path):
  pytest.importorskip('tensorflow_datasets')
  write_raw(tmp_path / 'raw' / 'fashion_mnist')
  args = ('--dataset=fashion_mnist', f'--data_dir={tmp_path / "out"}')
  done = command(*args, f'--raw_dir={tmp_path / "raw"}', '--noverify')
  assert done.returncode == 0, done.stderr
  assert '1.0.0: prepared; read back, not verified' in done.stdout
  assert 'train: 12 examples' in done.stdout
  again = command(*args, '--noverify')  # The raw files are not needed now.
  assert again.returncode == 0, again.stderr
  assert 'prepared already' in again.stdout
  summary = done.stdout.splitlines()[1:]
  assert again.stdout.splitlines()[1:] == summary
  assert any('sha256' in line for line in summary)
  raw = sources.load('fashion_mnist', tmp_path / 'raw', verify=False)
  data = sources.load('fashion_mnist', tmp_path / 'out', verify=False)
  for got, want in zip(data[1:5], raw[1:5], strict=True):
    np.testing.assert_array_equal(got, want)
  # By default the command requires the whole data set.
  assert_refused(command(*args), '60,000 train examples, got 12', '--noverify')


def test_command_lists_and_refuses():
  done = subprocess.run(
      [sys.executable, '-m', 'launch.prepare_data', '--list'],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      timeout=120,
  )
  assert done.returncode == 0
  assert done.stdout.strip() == prepare_data.list_datasets()
  assert_refused(
      command('--dataset=cifar11', '--data_dir=x'), "did you mean 'cifar10'?"
  )


@pytest.mark.parametrize(
    ('args', 'expected'),
    [
        (['--foo'], "Unknown command line flag 'foo'"),
        (['--verify=maybe'], 'flag --verify=maybe: '),
        (['--data_dir='], '--data_dir is empty; give it a value, or leave'),
        (['--flagfile=missing'], 'Unable to open flagfile: '),
        (['--dataset=mnist', '--dataset=digits'], '--dataset is given twice.'),
    ],
)
def test_wrong_flags_are_refused(args, expected, capsys):
  with pytest.raises(SystemExit) as end:
    prepare_data.parse_flags(['prepare_data', *args])
  err = capsys.readouterr().err
  assert end.value.code == 2 and err.count('\n') == 1
  assert err.startswith(f'Error: {expected}')


@pytest.fixture
def main(capsys):
  """Runs `main` in this process with flags given by keyword."""
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()

  def run(**values):
    with flagsaver.flagsaver(**values):
      try:
        prepare_data.main(['prepare_data'])
        code = 0
      except SystemExit as e:
        code = e.code
    captured = capsys.readouterr()
    return subprocess.CompletedProcess([], code, captured.out, captured.err)

  return run


def test_missing_flags_are_named(main):
  assert_refused(main(), '--dataset is missing')
  assert_refused(main(dataset='mnist'), '--data_dir is missing')


def test_digits_need_nothing(main):
  done = main(dataset='digits')
  assert done.returncode == 0
  assert 'nothing to prepare' in done.stdout
  assert 'train: 1,442 examples, 140 to 147 in each of 10' in done.stdout
  assert 'mean of train: 0.287187' in done.stdout


def test_missing_truncated_and_unofficial_files_are_refused(main, tmp_path):
  pytest.importorskip('tensorflow_datasets')
  raw, out = tmp_path / 'raw', tmp_path / 'out'
  args = dict(dataset='fashion_mnist', data_dir=str(out), raw_dir=str(raw))
  assert_refused(main(**args), f'{raw}: no such folder')
  write_raw(raw / 'fashion_mnist')
  assert_refused(main(**args), 'official file has', 'pass --noverify')
  file = raw / 'fashion_mnist' / 't10k-images-idx3-ubyte.gz'
  file.write_bytes(file.read_bytes()[:-20])
  assert_refused(
      main(**args, verify=False), str(file), 'expected a whole gzip file'
  )
  file.unlink()
  assert_refused(main(**args), f'{file.name} not found')
  assert not out.exists()


def test_full_disk_is_one_line_and_leaves_nothing(main, tmp_path, monkeypatch):
  pytest.importorskip('tensorflow_datasets')
  write_raw(tmp_path / 'raw' / 'fashion_mnist')
  out = tmp_path / 'out'
  out.mkdir()
  free = prepare_data.tfds_source.shutil.disk_usage(out)._replace(free=10)
  monkeypatch.setattr(
      prepare_data.tfds_source.shutil, 'disk_usage', lambda path: free
  )
  done = main(
      dataset='fashion_mnist',
      data_dir=str(out),
      raw_dir=str(tmp_path / 'raw'),
      verify=False,
  )
  assert_refused(done, f'{out}: needs', 'MB are free')
  assert not list(out.iterdir())


def test_download_without_tensorflow_says_so(main, tmp_path, monkeypatch):
  pytest.importorskip('tensorflow_datasets')
  find_spec = importlib.util.find_spec
  monkeypatch.setattr(
      prepare_data.importlib.util,
      'find_spec',
      lambda name: None if name == 'tensorflow' else find_spec(name),
  )
  done = main(dataset='mnist', data_dir=str(tmp_path), download=True)
  assert_refused(done, '--download needs TensorFlow')
  assert not list(tmp_path.iterdir())


def test_missing_tfds_says_what_to_install(main, tmp_path, monkeypatch):
  monkeypatch.setattr(
      prepare_data.importlib.util, 'find_spec', lambda name: None
  )
  done = main(dataset='mnist', data_dir=str(tmp_path))
  assert_refused(done, 'pip install tensorflow-datasets')


def test_summary_counts_and_checksum_follow_the_data():
  data = sources.load('digits')
  first = prepare_data.summarize(data)
  changed = data._replace(train_images=data.train_images[::-1])
  assert prepare_data.summarize(changed) != first
  splits = raw_formats.Splits(*data[1:5])
  assert prepare_data.tfds_source.content_digest(splits) in first
