"""Loads data sets from local files.

`digits` and the tables `breast_cancer`, `wine` and `iris` are embedded in
scikit-learn. The other data sets of `DATASETS` are read from the folder
`data_dir`. Users' data sets (see `own_files` and `hf_source`) are read from
`data_file` (`npz`) or `data_dir` (`image_folder`, `hf` and `tfds:NAME`).
Nothing is downloaded, and no missing file is replaced. For a `name` of
`DATASETS`, `load` reads the first of these that exists:

1. `data_dir/<name>/<version>/`, written by `fedjax-het prepare-data`, or
   by tensorflow-datasets with `file_format='array_record'`. The highest version
   is used. Needs tensorflow-datasets, but not TensorFlow.
2. The official raw files, in `data_dir/<folder>` for each folder of
   `DATASETS[name].folders`, then in `data_dir`. IDX files may be gzipped.
"""

import pathlib
from typing import NamedTuple

import numpy as np

from fedjax_het import names
from fedjax_het.data import (
    catalog,
    hf_source,
    own_files,
    raw_formats,
    tfds_source,
)
from fedjax_het.data.preprocess import statistics

DATASETS = catalog.DATASETS


class Dataset(NamedTuple):
  """A data set in host memory.

  Attributes:
    name: Key in `DATASETS`, or a name of `own_files`.
    train_images: [N, H, W, C] uint8; [N, columns] float32 for tables, [N, ...]
      features for users' data.
    train_labels: [N] int32.
    test_images: The official test split, or a user's; [M, ...] of the same type
      as `train_images`.
    test_labels: [M] int32.
    num_classes: Number of classes.
    mean: Per-channel mean of the train images, scaled to [0, 1]; for other
      features see `preprocess.statistics`.
    std: Per-channel standard deviation of the train images, same scale.
  """

  name: str
  train_images: np.ndarray
  train_labels: np.ndarray
  test_images: np.ndarray
  test_labels: np.ndarray
  num_classes: int
  mean: tuple[float, ...]
  std: tuple[float, ...]


def check_name(name: str, what: str = 'data set') -> None:
  """Raises ValueError, with the closest known name, if `name` is unknown."""
  prefixes = own_files.PREFIXES
  if not (isinstance(name, str) and name.startswith(prefixes)) or (
      name in prefixes
  ):
    known = (*DATASETS, *own_files.NAMES, f'{own_files.TFDS}NAME')
    names.check_name(what, name, known)


def _dataset(
    name: str, splits: raw_formats.Splits, where: str, verify: bool
) -> Dataset:
  """Checks shapes, labels and (if `verify`) counts; computes mean and std."""
  source = DATASETS[name]
  for split, images, labels, num in (
      ('train', *splits[:2], source.num_train),
      ('test', *splits[2:], source.num_test),
  ):
    if images.shape[1:] != source.image_shape:
      raise ValueError(
          f'{where}: {name} has examples of shape {source.image_shape}, got'
          f' {images.shape[1:]} in {split}.'
      )
    if len(images) != len(labels) or not len(labels):
      raise ValueError(
          f'{where}: {split} has {len(images)} images and {len(labels)} labels;'
          ' expected as many of both, and at least one.'
      )
    if labels.min() < 0 or labels.max() >= source.num_classes:
      raise ValueError(
          f'{where}: {name} has labels 0..{source.num_classes - 1}, got'
          f' {labels.min()}..{labels.max()} in {split}.'
      )
    if verify and len(labels) != num:
      raise ValueError(
          f'{where}: {name} has {num:,} {split} examples, got {len(labels):,};'
          ' pass verify=False to use a part of it.'
      )
  return Dataset(
      name, *splits, source.num_classes, *statistics(splits.train_images)
  )


def _check_data_dir(name: str, data_dir) -> pathlib.Path:
  if not data_dir and name not in DATASETS:
    raise FileNotFoundError(
        f'{name} needs data_dir, the folder that holds it: '
        '--config.data_dir=DIR.'
    )
  if not data_dir:
    source = DATASETS[name]
    raise FileNotFoundError(
        f'{name} needs data_dir, a folder that holds {" ".join(source.files)}'
        f' in {source.folders[0]}/ (from {source.url}) or what'
        f' `fedjax-het prepare-data --dataset={name} --data_dir=DIR` made'
        ' of them; --download lets it fetch them. Then set'
        ' --config.data_dir=DIR.'
    )
  data_dir = pathlib.Path(data_dir).expanduser()
  if not data_dir.is_dir():
    raise FileNotFoundError(f'{data_dir}: no such folder to find {name} in.')
  return data_dir


def _find_raw(name: str, data_dir) -> pathlib.Path:
  """Finds the folder under `data_dir` with the raw files of a data set.

  Args:
    name: Key in `DATASETS`.
    data_dir: See `load`.

  Returns:
    The first of `data_dir/<folder>` and `data_dir` that contains all files.

  Raises:
    FileNotFoundError: If there is none; the message names the missing files.
  """
  source, data_dir = DATASETS[name], _check_data_dir(name, data_dir)
  candidates = [data_dir / folder for folder in source.folders] + [data_dir]

  def absent(folder):
    return [f for f in source.files if not catalog.locate(folder, f).exists()]

  folder = min(candidates, key=lambda folder: len(absent(folder)))
  if not absent(folder):
    return folder
  raise FileNotFoundError(
      f'{name}: {" ".join(absent(folder))} not found in {folder}; looked in'
      f' {{{",".join((*source.folders, "."))}}} of {data_dir}. Get the files'
      f' from {source.url}, or run `fedjax-het prepare-data --download'
      f' --dataset={name} --data_dir=DIR`.'
  )


def load_raw(name: str, data_dir, *, verify: bool = True) -> Dataset:
  """Like `load` for a name of `DATASETS`, but ignores prepared data."""
  names.check_name('data set', name, DATASETS)
  source = DATASETS[name]
  if not source.files:
    return _dataset(name, source.read(None), f'the reader of {name}', verify)
  folder = _find_raw(name, data_dir)
  if verify:
    for file in source.files:
      path = catalog.locate(folder, file)
      if path.name in source.digests:
        raw_formats.check_digest(path, source.digests[path.name])
  return _dataset(name, source.read(folder), str(folder), verify)


def load(
    name: str,
    data_dir: str | pathlib.Path | None = None,
    *,
    data_file: str | pathlib.Path | None = None,
    image_size: int | None = None,
    verify: bool = True,
) -> Dataset:
  """Loads a data set from local files; never downloads.

  Args:
    name: Key in `DATASETS`: digits, mnist, fashion_mnist, cifar10, cifar100
      (fine labels), svhn_cropped (without the extra images) or cinic10
      (without the validation images); the tables breast_cancer, wine and iris;
      or npz, image_folder or tfds:NAME, see `own_files`, or hf or
      hf:FEATURES,LABEL, see `hf_source`.
    data_dir: Folder of prepared or raw data; see the module docstring. Not
      used for embedded data sets and npz.
    data_file: The .npz file; used for npz only.
    image_size: Height and width to which images are resized while they are
      read; used for image_folder and hf only.
    verify: Whether to require the official data: the published checksum of
      each raw file (CINIC-10's images have none), the checksum stored by
      `fedjax-het prepare-data`, and the number of examples. False also
      accepts a part of a data set, such as a few thousand records of
      CIFAR-100; do not report results on a part as results on the data set.

  Returns:
    The data set. Raw files and data of `fedjax-het prepare-data` keep the
    official order; data prepared by tensorflow-datasets' own builders are
    shuffled.

  Raises:
    FileNotFoundError: If `data_dir` or `data_file` is missing or does not
      contain the data.
    ImportError: If Pillow is not installed for images, or the package datasets
      for hf.
    ValueError: If `name` is unknown, or a file is unreadable, truncated,
      corrupt, not in its format, or (with `verify`) not the official one.
  """
  check_name(name)
  try:
    if name not in DATASETS:
      splits, num_classes = _read_own(
          name, data_dir, data_file, image_size, verify
      )
      return Dataset(
          name, *splits, num_classes, *statistics(splits.train_images)
      )
    return _load(name, data_dir, verify)
  except FileNotFoundError as e:
    if e.filename is None:
      raise
    raise FileNotFoundError(f'{e.filename}: no such file.') from e
  except OSError as e:
    raise ValueError(
        f'{e.filename or data_dir}: cannot be read ({e.strerror or e}).'
    ) from e
  except MemoryError as e:
    raise ValueError(
        f'{data_file or data_dir}: {name} takes more memory than there is '
        f'({e}).'
    ) from e


def _read_own(
    name: str, data_dir, data_file, image_size: int | None, verify: bool
) -> tuple[raw_formats.Splits, int]:
  """The splits and number of classes of a user's data set."""
  if name == own_files.NPZ:
    if not data_file:
      raise FileNotFoundError(
          'npz needs data_file, an .npz file of x_train, y_train, x_test and '
          'y_test: --config.data_file=FILE.'
      )
    return own_files.read_npz(pathlib.Path(data_file).expanduser())
  folder = _check_data_dir(name, data_dir)
  if name == own_files.IMAGE_FOLDER:
    return own_files.read_image_folder(folder, image_size)
  source, _, columns = name.partition(':')
  if source == own_files.HF:
    return hf_source.read_hf(folder, columns, image_size)
  return own_files.read_tfds(
      name.removeprefix(own_files.TFDS), folder, verify
  )


# Config entries that select the data, in the order of `load_entries`.
ENTRIES = ('dataset', 'data_dir', 'data_file', 'image_size', 'verify')


def load_entries(
    dataset: str,
    data_dir: str | None,
    data_file: str | None,
    image_size: int | None,
    verify: bool,
) -> Dataset:
  """`load` by the entries of a config, in the order of `ENTRIES`."""
  return load(
      dataset,
      data_dir,
      data_file=data_file,
      image_size=image_size,
      verify=verify,
  )


def shape_of(config) -> tuple[tuple[int, ...], int]:
  """Shape of one example, and the number of classes, of a config's data set.

  Args:
    config: A config; its `ENTRIES` are used.

  Returns:
    The shape after resizing, and the number of classes. Only users' own data
    are read from disk.

  Raises:
    FileNotFoundError: See `load`.
    ValueError: See `load`.
  """
  if config.dataset in DATASETS:
    source = DATASETS[config.dataset]
    shape, num_classes = source.image_shape, source.num_classes
  else:
    dataset = load_entries(*(config[entry] for entry in ENTRIES))
    shape, num_classes = dataset.train_images.shape[1:], dataset.num_classes
  if config.image_size is not None:
    shape = (config.image_size, config.image_size, *shape[2:])
  return shape, num_classes


def _load(name: str, data_dir, verify: bool) -> Dataset:
  """`load` for a name of `DATASETS`, without translating errors."""
  if not DATASETS[name].files:
    return load_raw(name, data_dir, verify=verify)
  folder, why_not = tfds_source.find_prepared(
      _check_data_dir(name, data_dir), name
  )
  if folder is not None:
    splits = tfds_source.read_prepared(folder, verify)
    return _dataset(name, splits, str(folder), verify)
  try:
    return load_raw(name, data_dir, verify=verify)
  except FileNotFoundError as e:
    if why_not:
      raise FileNotFoundError(f'{e} And {why_not}.') from e
    raise
