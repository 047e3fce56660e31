"""The data sets of `sources.load`: shapes, official files, checksums."""

from collections.abc import Callable
import functools
import importlib.util
import pathlib
from typing import NamedTuple

import numpy as np

from fedjax_het.data import raw_formats

Splits = raw_formats.Splits


class Source(NamedTuple):
  """Static description of a data set.

  Attributes:
    image_shape: Shape of one example: (height, width, channels) of an image,
      (columns,) of a table.
    num_classes: Number of classes.
    num_train: Examples of the official train split.
    num_test: Examples of the official test split.
    read: Reads the raw files in a folder (None for embedded data).
    files: File names that the folder must contain; empty for embedded data.
    folders: Subfolders of `data_dir` to search for the files.
    digests: {file name: 'md5:...' or 'sha1:...'} of the published files; an
      unlisted file has no known official checksum.
    url: The authors' page.
  """

  image_shape: tuple[int, ...]
  num_classes: int
  num_train: int
  num_test: int
  read: Callable[[pathlib.Path | None], Splits]
  files: tuple[str, ...] = ()
  folders: tuple[str, ...] = ()
  digests: dict[str, str] = {}
  url: str = ''


def locate(folder: pathlib.Path, file: str) -> pathlib.Path:
  """`file` in `folder`, or its unzipped version if only that exists."""
  path = folder / file
  if file.endswith('.gz') and not path.exists():
    path = path.with_suffix('')
  return path


def _read_digits(folder: None) -> Splits:
  """scikit-learn's digits, scaled by 15 from 0..16 to 0..240 (lossless).

  There is no official split. Here every fifth example of each class, in
  scikit-learn's order, is a test example: 1,442 to train, 355 to test.
  """
  del folder
  # Found and read without importing scikit-learn, which takes over a second.
  package = importlib.util.find_spec('sklearn')
  file = package and (
      pathlib.Path(package.origin).parent / 'datasets/data/digits.csv.gz'
  )
  if file and file.exists():
    table = np.loadtxt(file, np.uint8, delimiter=',')
  else:
    import sklearn.datasets  # pylint: disable=g-import-not-at-top

    data = sklearn.datasets.load_digits()
    table = np.column_stack([data.data, data.target]).astype(np.uint8)
  return _without_official_split(
      15 * table[:, :-1].reshape(-1, 8, 8, 1), table[:, -1]
  )


def _read_table(folder: None, name: str) -> Splits:
  """Reads all columns of a scikit-learn table, unchanged, as float32.

  There is no official split; the table is split in the same way as the digits.
  """
  del folder
  import sklearn.datasets  # pylint: disable=g-import-not-at-top

  data = getattr(sklearn.datasets, f'load_{name}')()
  return _without_official_split(data.data.astype(np.float32), data.target)


def _without_official_split(features, classes) -> Splits:
  """Makes every fifth example of each class, in order, a test example."""
  labels = classes.astype(np.int32)
  test = np.zeros(len(labels), bool)
  for label in range(labels.max() + 1):
    test[np.flatnonzero(labels == label)[4::5]] = True
  return Splits(features[~test], labels[~test], features[test], labels[test])


def _table(name: str, columns: int, classes: int, train: int, test: int):
  """The `Source` of a scikit-learn table."""
  read = functools.partial(_read_table, name=name)
  return Source((columns,), classes, train, test, read)


def _read_idx(folder: pathlib.Path) -> Splits:
  arrays = []
  for file in _IDX_FILES:
    path = locate(folder, file)
    array, num_dims = raw_formats.read_idx(path), 3 if 'idx3' in file else 1
    if array.ndim != num_dims:
      raise ValueError(
          f'{path}: expected {num_dims} dimensions, got {array.ndim}.'
      )
    arrays.append(array[..., None] if num_dims == 3 else array.astype(np.int32))
  return Splits(*arrays)


def _read_cifar(
    folder: pathlib.Path, train: tuple[str, ...], test: str, label_bytes: int
) -> Splits:
  """Reads CIFAR; the label is the last label byte (CIFAR-100: fine)."""
  arrays = []
  for files in (train, (test,)):
    parts = [
        raw_formats.read_cifar_binary(folder / file, label_bytes)
        for file in files
    ]
    images, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    arrays += [images, labels[:, -1].astype(np.int32)]
  return Splits(*arrays)


def _read_svhn(folder: pathlib.Path) -> Splits:
  train, test = (raw_formats.read_svhn_mat(folder / f) for f in _SVHN_FILES)
  return Splits(*train, *test)


def _read_cinic(folder: pathlib.Path) -> Splits:
  """Reads the train and test images; ignores the validation images."""
  train, test = (
      raw_formats.read_image_folders(folder / split, _CINIC_CLASSES, (32, 32))
      for split in ('train', 'test')
  )
  return Splits(*train, *test)


_IDX_FILES = (
    'train-images-idx3-ubyte.gz',
    'train-labels-idx1-ubyte.gz',
    't10k-images-idx3-ubyte.gz',
    't10k-labels-idx1-ubyte.gz',
)
_CIFAR10_TRAIN = tuple(f'data_batch_{i}.bin' for i in range(1, 6))
_SVHN_FILES = ('train_32x32.mat', 'test_32x32.mat')
_CINIC_CLASSES = tuple(
    'airplane automobile bird cat deer dog frog horse ship truck'.split()
)


def _idx_digests(zipped: str, unzipped: str) -> dict[str, str]:
  """md5 sums of the gzipped and the unzipped files of `_IDX_FILES`."""
  names = (*_IDX_FILES, *(file.removesuffix('.gz') for file in _IDX_FILES))
  sums = (zipped + ' ' + unzipped).split()
  return {n: f'md5:{s}' for n, s in zip(names, sums, strict=True)}


# Sources of the checksums. IDX (.gz) and SVHN: md5 listed by the authors and by
# common loaders; unzipped IDX: computed from those files. CIFAR: sha1 listed by
# MXNet Gluon's loader. CINIC-10 publishes none for its images; only the numbers
# of images and classes are checked.
DATASETS: dict[str, Source] = dict(
    digits=Source((8, 8, 1), 10, 1442, 355, _read_digits),
    mnist=Source(
        (28, 28, 1), 10, 60_000, 10_000, _read_idx, _IDX_FILES,
        folders=('mnist', 'MNIST/raw'),
        digests=_idx_digests(
            'f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432'
            ' 9fb629c4189551a2d022fa330f9573f3'
            ' ec29112dd5afa0611ce80d1b7f02629c',
            '6bbc9ace898e44ae57da46a324031adb a25bea736e30d166cdddb491f175f624'
            ' 2646ac647ad5339dbf082846283269ea'
            ' 27ae3e4e09519cfbb04c329615203637',
        ),
        url='http://yann.lecun.com/exdb/mnist',
    ),
    fashion_mnist=Source(
        (28, 28, 1), 10, 60_000, 10_000, _read_idx, _IDX_FILES,
        folders=('fashion_mnist', 'fashion-mnist', 'FashionMNIST/raw'),
        digests=_idx_digests(
            '8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe'
            ' bef4ecab320f06d8554ea6380940ec79'
            ' bb300cfdad3c16e7a12a480ee83cd310',
            'f4a8712d7a061bf5bd6d2ca38dc4d50a 9018921c3c673c538a1fc5bad174d6f9'
            ' 8181f5470baa50b63fa0f6fddb340f0a'
            ' 15d484375f8d13e6eb1aabb0c3f46965',
        ),
        url='https://github.com/zalandoresearch/fashion-mnist',
    ),
    cifar10=Source(
        (32, 32, 3), 10, 50_000, 10_000,
        functools.partial(
            _read_cifar,
            train=_CIFAR10_TRAIN, test='test_batch.bin', label_bytes=1,
        ),
        files=(*_CIFAR10_TRAIN, 'test_batch.bin'),
        folders=('cifar-10-batches-bin', 'cifar10'),
        digests={
            'data_batch_1.bin': 'sha1:aadd24acce27caa71bf4b10992e9e7b2d74c2540',
            'data_batch_2.bin': 'sha1:c0ba65cce70568cd57b4e03e9ac8d2a5367c1795',
            'data_batch_3.bin': 'sha1:1dd00a74ab1d17a6e7d73e185b69dbf31242f295',
            'data_batch_4.bin': 'sha1:aab85764eb3584312d3c7f65fd2fd016e36a258e',
            'data_batch_5.bin': 'sha1:26e2849e66a845b7f1e4614ae70f4889ae604628',
            'test_batch.bin': 'sha1:67eb016db431130d61cd03c7ad570b013799c88c',
        },
        url='https://www.cs.toronto.edu/~kriz/cifar.html (binary version)',
    ),
    cifar100=Source(
        (32, 32, 3), 100, 50_000, 10_000,
        functools.partial(
            _read_cifar, train=('train.bin',), test='test.bin', label_bytes=2,
        ),
        files=('train.bin', 'test.bin'),
        folders=('cifar-100-binary', 'cifar100'),
        digests={
            'train.bin': 'sha1:e207cd2e05b73b1393c74c7f5e7bea451d63e08e',
            'test.bin': 'sha1:8fb6623e830365ff53cf14adec797474f5478006',
        },
        url='https://www.cs.toronto.edu/~kriz/cifar.html (binary version)',
    ),
    svhn_cropped=Source(
        (32, 32, 3), 10, 73_257, 26_032, _read_svhn, _SVHN_FILES,
        folders=('svhn_cropped', 'svhn', 'SVHN'),
        digests={
            'train_32x32.mat': 'md5:e26dedcc434d2e4c54c9b2d4a06d8373',
            'test_32x32.mat': 'md5:eb5a983be6a315427106f1b164d9cef3',
        },
        url='http://ufldl.stanford.edu/housenumbers',
    ),
    cinic10=Source(
        (32, 32, 3), 10, 90_000, 90_000, _read_cinic, ('train', 'test'),
        folders=('CINIC-10', 'cinic-10', 'cinic10'),
        url='https://datashare.ed.ac.uk/handle/10283/3192',
    ),
    breast_cancer=_table('breast_cancer', 30, 2, 456, 113),
    wine=_table('wine', 13, 3, 144, 34),
    iris=_table('iris', 4, 3, 120, 30),
)
