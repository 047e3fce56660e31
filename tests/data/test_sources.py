"""`load`: look-up, verification and contents, on tiny and on real data."""

import gzip
import importlib.util
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest
import scipy.io
import sklearn.datasets

from fedjax_het.data import sources


def tiny_images(num, shape, seed=0):
  rng = np.random.default_rng(seed)
  return rng.integers(0, 256, (num, *shape), dtype=np.uint8)


def write_idx_set(folder, seed=0, num_train=6, num_test=4, zipped=True):
  """A set in MNIST's layout; returns the arrays that `load` should give."""
  folder.mkdir(parents=True, exist_ok=True)
  arrays = []
  for prefix, num in (('train', num_train), ('t10k', num_test)):
    images = tiny_images(num, (28, 28), seed)
    labels = (np.arange(num) % 10).astype(np.uint8)
    for kind, array in (('images-idx3', images), ('labels-idx1', labels)):
      header = struct.pack(
          f'>4B{array.ndim}I', 0, 0, 8, array.ndim, *array.shape
      )
      data = header + array.tobytes()
      name = f'{prefix}-{kind}-ubyte' + ('.gz' if zipped else '')
      (folder / name).write_bytes(gzip.compress(data) if zipped else data)
    arrays += [images[..., None], labels]
  return arrays


def cifar_bytes(images, labels):
  pixels = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
  return np.concatenate([labels, pixels], axis=1).tobytes()


def assert_splits_equal(data, arrays):
  for got, want in zip(data[1:5], arrays, strict=True):
    np.testing.assert_array_equal(got, want)


class TestDigits:

  def test_facts(self):
    data = sources.load('digits')
    assert data.train_images.shape == (1442, 8, 8, 1)
    assert data.test_images.shape == (355, 8, 8, 1)
    assert data.train_images.dtype == np.uint8
    assert data.train_labels.dtype == data.test_labels.dtype == np.int32
    assert data.num_classes == 10

  def test_scaling_loses_nothing_and_every_image_is_in_one_split(self):
    data = sources.load('digits')
    original = sklearn.datasets.load_digits()
    images = np.concatenate([data.train_images, data.test_images])
    labels = np.concatenate([data.train_labels, data.test_labels])
    restored = np.column_stack([labels, (images / 15).reshape(1797, 64)])
    expected = np.column_stack([original.target, original.data])
    np.testing.assert_array_equal(
        restored[np.lexsort(restored.T)], expected[np.lexsort(expected.T)]
    )

  def test_scikit_learn_is_imported_only_where_its_file_is_missing(
      self, monkeypatch
  ):
    with monkeypatch.context() as patch:
      patch.setitem(sys.modules, 'sklearn.datasets', None)
      read = sources.load_raw('digits', None)
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    assert_splits_equal(read, sources.load_raw('digits', None)[1:5])

  def test_class_histogram_is_stratified(self):
    data = sources.load('digits')
    total = np.array([178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    np.testing.assert_array_equal(np.bincount(data.test_labels), total // 5)
    np.testing.assert_array_equal(
        np.bincount(data.train_labels), total - total // 5
    )

  def test_split_is_every_fifth_of_a_class(self):
    data = sources.load('digits')
    original = sklearn.datasets.load_digits()
    fifth = original.images[np.flatnonzero(original.target == 7)[4]]
    first_test = data.test_images[data.test_labels == 7][0, ..., 0]
    np.testing.assert_array_equal(first_test, 15 * fifth)

  def test_is_deterministic_and_ignores_the_data_dir(self):
    first, second = sources.load('digits'), sources.load('digits', '/no/where')
    assert_splits_equal(first, second[1:5])

  def test_statistics_are_those_of_the_train_images(self):
    data = sources.load('digits')
    scaled = data.train_images.astype(np.float64) / 255
    np.testing.assert_allclose(data.mean, [scaled.mean()], rtol=1e-12)
    np.testing.assert_allclose(data.std, [scaled.std()], rtol=1e-12)

  @pytest.mark.slow
  def test_trains_where_neither_tfds_nor_tensorflow_can_be_imported(
      self, tmp_path
  ):
    code = (
        'import sys\n'
        'for name in ("tensorflow", "tensorflow_datasets", "matplotlib"):\n'
        '  sys.modules[name] = None  # Importing it raises ImportError.\n'
        'import fedjax_het\n'
        'from configs import fedin\n'
        'config = fedin.get_config("quick")\n'
        f'result = fedjax_het.run(config, {str(tmp_path / "run")!r})\n'
        'assert result.finished and result.summary.rounds == 2\n'
    )
    root = pathlib.Path(sources.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


class TestLookUp:

  @pytest.mark.parametrize('name', ['mnist', 'fashion_mnist'])
  @pytest.mark.parametrize('zipped', [True, False])
  def test_idx_in_every_folder(self, tmp_path, name, zipped):
    for i, folder in enumerate((*sources.DATASETS[name].folders, '.')):
      root = tmp_path / str(i)
      arrays = write_idx_set(root / folder, seed=i, zipped=zipped)
      data = sources.load(name, root, verify=False)
      assert_splits_equal(data, arrays)
      assert data.train_labels.dtype == np.int32

  def test_named_folder_comes_before_the_data_dir_itself(self, tmp_path):
    write_idx_set(tmp_path, seed=1)
    arrays = write_idx_set(tmp_path / 'mnist', seed=2)
    data = sources.load('mnist', str(tmp_path), verify=False)
    assert_splits_equal(data, arrays)

  def test_cifar10_joins_its_five_batches_in_order(self, tmp_path):
    images = tiny_images(12, (32, 32, 3))
    labels = (np.arange(12) % 10).astype(np.uint8)[:, None]
    folder = tmp_path / 'cifar-10-batches-bin'
    folder.mkdir()
    for i in range(6):
      name = f'data_batch_{i + 1}.bin' if i < 5 else 'test_batch.bin'
      part = slice(2 * i, 2 * i + 2)
      (folder / name).write_bytes(cifar_bytes(images[part], labels[part]))
    data = sources.load('cifar10', tmp_path, verify=False)
    labels = labels[:, 0]
    assert_splits_equal(data, [images[:10], labels[:10], images[10:],
                               labels[10:]])
    scaled = images[:10] / 255.0
    np.testing.assert_allclose(data.mean, scaled.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(data.std, scaled.std((0, 1, 2)), rtol=1e-12)

  def test_cifar100_takes_the_fine_label(self, tmp_path):
    images = tiny_images(3, (32, 32, 3))
    labels = np.array([[4, 99], [1, 0], [19, 57]], np.uint8)
    for name in ('train.bin', 'test.bin'):
      (tmp_path / name).write_bytes(cifar_bytes(images, labels))
    data = sources.load('cifar100', tmp_path, verify=False)
    assert data.train_labels.tolist() == [99, 0, 57]
    assert data.num_classes == 100

  def test_svhn(self, tmp_path):
    images = tiny_images(4, (32, 32, 3))
    for name, part in (('train', slice(3)), ('test', slice(3, 4))):
      scipy.io.savemat(
          tmp_path / f'{name}_32x32.mat',
          {
              'X': images[part].transpose(1, 2, 3, 0),
              'y': np.array([[10], [3], [9], [1]], np.uint8)[part],
          },
      )
    data = sources.load('svhn_cropped', tmp_path, verify=False)
    assert_splits_equal(data, [images[:3], [0, 3, 9], images[3:], [1]])

  def test_cinic10_leaves_the_validation_images_out(self, tmp_path):
    image_module = pytest.importorskip('PIL.Image')
    classes = 'airplane automobile bird cat deer dog frog horse ship truck'
    images = tiny_images(30, (32, 32, 3)).reshape(3, 10, 32, 32, 3)
    for split, part in zip(('train', 'valid', 'test'), images, strict=True):
      for name, image in zip(classes.split(), part, strict=True):
        folder = tmp_path / 'CINIC-10' / split / name
        folder.mkdir(parents=True)
        image_module.fromarray(image).save(folder / 'cifar10-train-1.png')
    data = sources.load('cinic10', tmp_path, verify=False)
    assert_splits_equal(data, [images[0], range(10), images[2], range(10)])
    with pytest.raises(ValueError, match='90,000 train examples, got 10'):
      sources.load('cinic10', tmp_path)


class TestRefusals:

  def test_unknown_name_suggests(self):
    with pytest.raises(ValueError, match="'fashion_mist'; did you mean 'fas"):
      sources.load('fashion_mist')
    with pytest.raises(ValueError, match='nown are digits, mnist'):
      sources.load('zzz')

  @pytest.mark.parametrize(
      'name', [name for name, s in sources.DATASETS.items() if s.files]
  )
  def test_no_data_dir_says_which_files_and_which_command(self, name):
    with pytest.raises(FileNotFoundError) as error:
      sources.load(name)
    message = str(error.value)
    assert '\n' not in message
    assert sources.DATASETS[name].files[-1] in message
    assert f'fedjax-het prepare-data --dataset={name}' in message
    with pytest.raises(FileNotFoundError, match='needs data_dir'):
      sources.load(name, '')

  def test_missing_folder_and_missing_file_are_named(self, tmp_path):
    with pytest.raises(FileNotFoundError, match=r'nowhere: no such folder'):
      sources.load('mnist', tmp_path / 'nowhere')
    write_idx_set(tmp_path / 'mnist')
    (tmp_path / 'mnist' / 't10k-labels-idx1-ubyte.gz').unlink()
    with pytest.raises(
        FileNotFoundError, match=r'mnist: t10k-labels-idx1-ubyte\.gz not found'
    ):
      sources.load('mnist', tmp_path)

  def test_a_file_that_is_not_official_is_refused(self, tmp_path):
    write_idx_set(tmp_path)
    with pytest.raises(ValueError, match=r'md5 is .* file has f68b3c2dcb'):
      sources.load('mnist', tmp_path)

  def test_images_and_labels_must_be_as_many(self, tmp_path):
    write_idx_set(tmp_path)
    write_idx_set(tmp_path / 'other', num_train=5)
    name = 'train-labels-idx1-ubyte.gz'
    (tmp_path / name).write_bytes((tmp_path / 'other' / name).read_bytes())
    with pytest.raises(ValueError, match='6 images and 5 labels'):
      sources.load('mnist', tmp_path, verify=False)

  def test_swapped_image_and_label_files_are_refused(self, tmp_path):
    write_idx_set(tmp_path)
    images, labels = (
        tmp_path / f'train-{kind}-ubyte.gz'
        for kind in ('images-idx3', 'labels-idx1')
    )
    images.write_bytes(labels.read_bytes())
    with pytest.raises(ValueError, match='expected 3 dimensions, got 1'):
      sources.load('mnist', tmp_path, verify=False)

  def test_labels_out_of_range_are_refused(self, tmp_path):
    images = tiny_images(2, (32, 32, 3))
    labels = np.array([[0, 100], [0, 1]], np.uint8)
    for name in ('train.bin', 'test.bin'):
      (tmp_path / name).write_bytes(cifar_bytes(images, labels))
    with pytest.raises(ValueError, match=r'labels 0\.\.99, got 1\.\.100'):
      sources.load('cifar100', tmp_path, verify=False)

  def test_wrong_image_size_is_refused(self, tmp_path):
    write_idx_set(tmp_path)
    path = tmp_path / 'train-images-idx3-ubyte.gz'
    path.write_bytes(
        gzip.compress(struct.pack('>4B3I', 0, 0, 8, 3, 6, 2, 2) + bytes(24))
    )
    with pytest.raises(ValueError, match=r'\(28, 28, 1\), got \(2, 2, 1\)'):
      sources.load('mnist', tmp_path, verify=False)


class TestRealData:
  """Reads the published files; skipped with a reason if they are absent."""

  def load(self, real_data, name, **kwargs):
    folder = sources.DATASETS[name].folders[0]
    if not (real_data / folder).is_dir():
      pytest.skip(f'{real_data} has no {folder}')
    return sources.load(name, real_data, **kwargs)

  @pytest.mark.parametrize(
      'name, mean, std',
      [
          ('mnist', [0.1307], [0.3081]),
          ('fashion_mnist', [0.2860], [0.3530]),
          (
              'cifar10',
              [0.4914, 0.4822, 0.4465],
              [0.2470, 0.2435, 0.2616],
          ),
      ],
  )
  def test_official_files(self, real_data, name, mean, std):
    data = self.load(real_data, name)
    facts = sources.DATASETS[name]
    assert data.train_images.shape == (facts.num_train, *facts.image_shape)
    assert data.test_images.shape == (facts.num_test, *facts.image_shape)
    # The commonly used constants, which have four digits.
    np.testing.assert_allclose(data.mean, mean, atol=5e-5)
    np.testing.assert_allclose(data.std, std, atol=5e-5)

  def test_class_histograms(self, real_data):
    mnist = self.load(real_data, 'mnist')
    assert np.bincount(mnist.train_labels).tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949
    ]
    assert np.bincount(mnist.test_labels).tolist() == [
        980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009
    ]
    fashion = self.load(real_data, 'fashion_mnist')
    assert np.bincount(fashion.train_labels).tolist() == [6000] * 10
    assert np.bincount(fashion.test_labels).tolist() == [1000] * 10

  @pytest.mark.parametrize(
      'name',
      ['mnist', pytest.param('fashion_mnist', marks=pytest.mark.slow)],
  )
  def test_unzipped_idx_files_have_their_own_checksums(
      self, name, real_data, tmp_path
  ):
    zipped = self.load(real_data, name)
    folder = tmp_path / name
    folder.mkdir()
    for file in sources.DATASETS[name].files:
      data = gzip.decompress((real_data / name / file).read_bytes())
      (folder / file.removesuffix('.gz')).write_bytes(data)
    assert_splits_equal(sources.load(name, tmp_path), zipped[1:5])

  def test_part_of_cifar100_needs_verify_false(self, real_data):
    data = self.load(real_data, 'cifar100', verify=False)
    counts = np.bincount(data.train_labels, minlength=100)
    assert counts.min() == counts.max() == len(data.train_labels) // 100
    if len(data.train_labels) < 50_000:
      with pytest.raises(ValueError, match='pass verify=False'):
        self.load(real_data, 'cifar100')

  def test_truncated_official_file_is_refused(self, real_data, tmp_path):
    self.load(real_data, 'fashion_mnist')
    for file in sources.DATASETS['fashion_mnist'].files:
      data = (real_data / 'fashion_mnist' / file).read_bytes()
      cut = len(data) // 2 if file.startswith('t10k-images') else None
      (tmp_path / file).write_bytes(data[:cut])
    with pytest.raises(ValueError, match=r't10k-images.*2,211,051 bytes'):
      sources.load('fashion_mnist', tmp_path)
    with pytest.raises(ValueError, match=r't10k-images.*whole gzip file'):
      sources.load('fashion_mnist', tmp_path, verify=False)

  def test_the_other_sets_files_are_refused(self, real_data):
    self.load(real_data, 'mnist')
    with pytest.raises(ValueError, match='another file'):
      sources.load('fashion_mnist', real_data / 'mnist')
