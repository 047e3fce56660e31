"""Prepared data: exact round trip, verification, atomic writing, no network."""

import errno
import io
import json
import os
import re
import socket
import sys

import numpy as np
import pytest

from fedjax_het.data import raw_formats, sources, tfds_source
from fedjax_het.data.preprocess import statistics

tfds = pytest.importorskip('tensorflow_datasets')
pytest.importorskip('array_record')


def tiny_splits(num_train=23, num_test=9, shape=(28, 28, 1)):
  rng = np.random.default_rng(0)
  return raw_formats.Splits(
      rng.integers(0, 256, (num_train, *shape), dtype=np.uint8),
      rng.integers(0, 10, num_train).astype(np.int32),
      rng.integers(0, 256, (num_test, *shape), dtype=np.uint8),
      rng.integers(0, 10, num_test).astype(np.int32),
  )


def assert_same(got, want):
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)
    assert a.dtype == b.dtype


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  """A data_dir with a small prepared `mnist`; tests must not change it."""
  data_dir = tmp_path_factory.mktemp('prepared')
  folder = tfds_source.write_prepared(tiny_splits(), 'mnist', data_dir)
  assert folder == data_dir / 'mnist' / '1.0.0'
  return data_dir


@pytest.fixture
def copied(prepared, tmp_path):
  """A copy of `prepared`'s folder that a test may break."""
  folder = tmp_path / 'mnist' / '1.0.0'
  folder.mkdir(parents=True)
  for file in (prepared / 'mnist' / '1.0.0').iterdir():
    (folder / file.name).write_bytes(file.read_bytes())
  return folder


def test_round_trip_is_exact_and_keeps_the_order(prepared):
  assert_same(
      tfds_source.read_prepared(prepared / 'mnist' / '1.0.0'), tiny_splits()
  )
  data = sources.load('mnist', prepared, verify=False)
  assert_same(data[1:5], tiny_splits())
  assert data.name == 'mnist'


def test_more_records_than_one_batch_keep_their_order(tmp_path, monkeypatch):
  monkeypatch.setattr(tfds_source, '_READ_BATCH', 7)
  splits = tiny_splits(40, 14, (2, 3, 3))
  folder = tfds_source.write_prepared(splits, 'cifar10', tmp_path)
  assert_same(tfds_source.read_prepared(folder), splits)


def test_neither_network_nor_tensorflow_is_used(tmp_path, monkeypatch):
  def refuse(*args, **kwargs):
    raise AssertionError(f'network used: {args} {kwargs}')

  class NoTensorFlow:

    def find_spec(self, name, path=None, target=None):
      if name.partition('.')[0] == 'tensorflow':
        raise ModuleNotFoundError('tensorflow is kept out of this test')

  monkeypatch.setattr(socket, 'getaddrinfo', refuse)
  monkeypatch.setattr(socket.socket, 'connect', refuse)
  monkeypatch.setattr(sys, 'meta_path', [NoTensorFlow(), *sys.meta_path])
  splits = tiny_splits(3, 2)
  folder = tfds_source.write_prepared(splits, 'mnist', tmp_path)
  assert_same(tfds_source.read_prepared(folder), splits)


def test_only_the_prepared_folder_is_left(prepared):
  assert [p.name for p in prepared.iterdir()] == ['mnist']
  assert [p.name for p in (prepared / 'mnist').iterdir()] == ['1.0.0']


def test_prepared_data_comes_before_raw_files(prepared):
  data = sources.load('mnist', prepared, verify=False)
  assert len(data.train_labels) == 23  # There are no raw files to read.
  with pytest.raises(ValueError, match='60,000 train examples, got 23'):
    sources.load('mnist', prepared)


def test_a_second_preparation_is_refused(prepared):
  with pytest.raises(FileExistsError):
    tfds_source.write_prepared(tiny_splits(), 'mnist', prepared)


@pytest.mark.parametrize('damage', ['truncated', 'flipped', 'gone', 'no json'])
def test_damage_is_refused_in_one_line(copied, damage):
  file = copied / 'mnist-train.array_record-00000-of-00001'
  data = bytearray(file.read_bytes())
  if damage == 'truncated':
    file.write_bytes(data[: len(data) // 2])
  elif damage == 'flipped':
    for i in range(0, len(data), 100):
      data[i] ^= 255
    file.write_bytes(data)
  elif damage == 'gone':
    file.unlink()
  else:
    (copied / 'dataset_info.json').write_text('{')
  with pytest.raises(ValueError, match=r'prepare (it|the data set) again') as e:
    sources.load('mnist', copied.parents[1], verify=False)
  assert str(copied) in str(e.value)
  assert '\n' not in str(e.value)


def test_content_must_have_the_stored_checksum(copied):
  (copied / 'metadata.json').write_text(json.dumps({'sha256': '00'}))
  with pytest.raises(ValueError, match='but 00 was stored'):
    tfds_source.read_prepared(copied)
  assert_same(tfds_source.read_prepared(copied, verify=False), tiny_splits())


def test_checksum_sees_order_shape_and_labels():
  splits = tiny_splits(4, 4)
  digests = {
      tfds_source.content_digest(s)
      for s in (
          splits,
          splits._replace(train_images=splits.train_images[::-1]),
          splits._replace(train_images=splits.train_images.reshape(4, 784)),
          splits._replace(test_labels=splits.test_labels + 1),
          raw_formats.Splits(*splits[2:], *splits[:2]),
      )
  }
  assert len(digests) == 5


def test_highest_version_counts_numerically(tmp_path):
  for version in ('2.0.0', '10.0.0', '9.9.9', 'incomplete.X_11.0.0'):
    folder = tmp_path / 'mnist' / version
    folder.mkdir(parents=True)
    (folder / 'dataset_info.json').write_text('{"fileFormat": "array_record"}')
  (tmp_path / 'mnist' / '12.0.0').mkdir()  # Without dataset_info.json.
  folder, why_not = tfds_source.find_prepared(tmp_path, 'mnist')
  assert folder == tmp_path / 'mnist' / '10.0.0'
  assert not why_not


def test_unreadable_format_is_named_when_nothing_else_is_there(tmp_path):
  folder = tmp_path / 'mnist' / '3.0.1'
  folder.mkdir(parents=True)
  (folder / 'dataset_info.json').write_text('{"fileFormat": "tfrecord"}')
  with pytest.raises(FileNotFoundError, match='as tfrecord, not array_record'):
    sources.load('mnist', tmp_path)


def test_missing_tfds_is_named_when_nothing_else_is_there(
    prepared, monkeypatch
):
  monkeypatch.setattr(
      tfds_source.importlib.util, 'find_spec', lambda name: None
  )
  with pytest.raises(FileNotFoundError, match='needs tensorflow-datasets'):
    sources.load('mnist', prepared)


def test_full_disk_is_refused_before_writing(tmp_path, monkeypatch):
  free = tfds_source.shutil.disk_usage(tmp_path)._replace(free=1000)
  monkeypatch.setattr(tfds_source.shutil, 'disk_usage', lambda path: free)
  with pytest.raises(OSError, match=r'MB, 0\.0 MB are free') as error:
    tfds_source.write_prepared(tiny_splits(), 'mnist', tmp_path)
  assert error.value.errno == errno.ENOSPC
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    'failure, expected',
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 'no space left'),
        (RuntimeError('write() failed: No space left on device'), 'no space'),
        (RuntimeError('another failure'), 'another failure'),
    ],
)
def test_failure_while_writing_leaves_nothing(tmp_path, failure, expected):
  target = tmp_path / 'mnist' / '1.0.0'
  with pytest.raises((OSError, RuntimeError), match=expected):
    with tfds_source.staging(target) as temporary:
      (temporary / 'mnist' / '1.0.0').mkdir(parents=True)
      raise failure
  assert not list(tmp_path.iterdir())


def test_stock_features_are_read(tmp_path):
  """PNG images, class labels and one more feature, as TFDS builders write."""
  image_module = pytest.importorskip('PIL.Image')
  splits = tiny_splits(6, 4, (32, 32, 3))

  class Stock(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version('3.0.2')
    name = 'cifar10'

    def _info(self):
      features = tfds.features.FeaturesDict({
          'id': tfds.features.Text(),
          'image': tfds.features.Image(shape=(32, 32, 3)),
          'label': tfds.features.ClassLabel(num_classes=10),
      })
      return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
      return {
          'train': self._generate_examples(*splits[:2]),
          'test': self._generate_examples(*splits[2:]),
      }

    def _generate_examples(self, images, labels):
      for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        png = io.BytesIO()
        image_module.fromarray(image).save(png, 'png')
        png.seek(0)
        yield i, {'id': str(i), 'image': png, 'label': int(label)}

  Stock(data_dir=tmp_path, file_format='array_record').download_and_prepare()
  data = sources.load('cifar10', tmp_path, verify=False)
  assert data.test_images.shape == (4, 32, 32, 3)
  assert data.test_images.dtype == np.uint8

  def examples(images, labels):  # TFDS builders shuffle.
    return sorted(
        (int(label), image.tobytes())
        for image, label in zip(images, labels, strict=True)
    )

  assert examples(*data[1:3]) == examples(*splits[:2])
  assert examples(*data[3:5]) == examples(*splits[2:])


def stock(data_dir, feature, train, test, label=None, splits=None):
  """Prepares a builder `own` with such images, all of label 0."""
  label = label or tfds.features.ClassLabel(num_classes=1)

  class Own(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version('1.0.0')
    name = 'own'

    def _info(self):
      features = tfds.features.FeaturesDict(
          {'image': feature, 'label': label}
      )
      return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
      return {
          name: self._generate_examples(images)
          for name, images in zip(
              splits or ('train', 'test'), (train, test), strict=True
          )
      }

    def _generate_examples(self, images):
      for i, image in enumerate(images):
        yield i, {'image': image, 'label': 0}

  Own(data_dir=data_dir, file_format='array_record').download_and_prepare()
  return data_dir


@pytest.mark.parametrize('dtype', ['float32', 'uint16'])
def test_images_keep_their_type(tmp_path, dtype):
  rng = np.random.default_rng(0)
  images = rng.random((3, 4, 5, 1)) * (60_000 if dtype == 'uint16' else 1)
  images = images.astype(dtype)
  feature = tfds.features.Tensor(
      shape=(4, 5, 1), dtype=np.dtype(dtype).type
  )
  data = sources.load('tfds:own', stock(tmp_path, feature, images, images[:1]))
  assert data.train_images.dtype == dtype
  np.testing.assert_array_equal(
      np.sort(data.train_images, 0), np.sort(images, 0)
  )


def test_images_of_undeclared_size(tmp_path):
  image_module = pytest.importorskip('PIL.Image')

  def png(height):
    file = io.BytesIO()
    image = np.full((height, 5, 3), 7, np.uint8)
    image_module.fromarray(image).save(file, 'png')
    file.seek(0)
    return file

  def saved(name, *heights):
    feature = tfds.features.Image()
    return stock(tmp_path / name, feature, [*map(png, heights)], [png(4)])

  data = sources.load('tfds:own', saved('a', 4, 4))
  assert data.train_images.shape == (2, 4, 5, 3)
  assert np.all(data.train_images == 7)
  folder = saved('b', 4, 4, 6)
  with pytest.raises(ValueError, match=r'0: it has images of .*size\.$') as e:
    sources.load('tfds:own', folder)
  assert 'remove it' not in str(e.value)


@pytest.mark.parametrize(
    ('options', 'reason'),
    [
        (
            dict(splits=('train', 'validation')),
            "it has no split 'test', only 'train', 'validation'.",
        ),
        (
            dict(label=tfds.features.Scalar(np.float32)),
            'its labels are not one integer each.',
        ),
    ],
)
def test_an_intact_set_of_another_kind_is_not_called_broken(
    tmp_path, options, reason
):
  images = np.zeros((3, 4, 4, 1), np.uint8)
  feature = tfds.features.Tensor(shape=(4, 4, 1), dtype=np.uint8)
  stock(tmp_path, feature, images, images, **options)
  with pytest.raises(ValueError, match=re.escape(reason)) as e:
    sources.load('tfds:own', tmp_path)
  assert 'remove it' not in str(e.value)


def test_too_large_a_set_is_not_called_broken(prepared, monkeypatch):
  monkeypatch.setattr(raw_formats, 'MAX_BYTES', 5_000)
  with pytest.raises(ValueError, match=r': 23 images .* than 5,000 bytes') as e:
    tfds_source.read_prepared(prepared / 'mnist' / '1.0.0')
  assert 'remove it' not in str(e.value)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['fashion_mnist', 'cifar10'])
def test_real_data_round_trip(real_data, tmp_path, monkeypatch, name):
  """A tenth of a data set, in as many files as all of it or more."""
  if not (real_data / sources.DATASETS[name].folders[0]).is_dir():
    pytest.skip(f'{real_data} has no {name}')
  raw = sources.load_raw(name, real_data)
  splits = raw_formats.Splits(*(a[: len(a) // 10] for a in raw[1:5]))
  config = 'tensorflow_datasets.core.utils.shard_utils.ShardConfig'
  monkeypatch.setattr(f'{config}.min_shard_size', 2**20)  # Bytes.
  folder = tfds_source.write_prepared(splits, name, tmp_path)
  assert len([*folder.glob('*-train.array_record-*')]) > 1
  sizes = dict(num_train=len(splits[1]), num_test=len(splits[3]))
  part = sources.DATASETS[name]._replace(**sizes)
  monkeypatch.setitem(sources.DATASETS, name, part)
  data = sources.load(name, tmp_path)
  assert_same(data[1:5], splits)
  assert (data.mean, data.std) == statistics(splits.train_images)
