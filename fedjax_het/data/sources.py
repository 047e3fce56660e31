"""Loads image data sets from local files.

`digits` is embedded in scikit-learn. All others are read from the folder
`data_dir`. Nothing is downloaded, and no missing file is replaced. `load` reads
the first of these that exists for a data set `name`:

1. `data_dir/<name>/<version>/`, written by `python -m launch.prepare_data`, or
   by tensorflow-datasets with `file_format='array_record'`. The highest version
   is used. Needs tensorflow-datasets, but not TensorFlow.
2. The official raw files, in `data_dir/<folder>` for each folder of
   `DATASETS[name].folders`, then in `data_dir`. IDX files may be gzipped.
"""

import pathlib
from typing import NamedTuple

import numpy as np

from fedjax_het import names
from fedjax_het.data import catalog, raw_formats, tfds_source

DATASETS = catalog.DATASETS


class Dataset(NamedTuple):
  """A data set in host memory.

  Attributes:
    name: Key in `DATASETS`.
    train_images: [N, H, W, C] uint8.
    train_labels: [N] int32.
    test_images: [M, H, W, C] uint8, the official test split.
    test_labels: [M] int32.
    num_classes: Number of classes.
    mean: Per-channel mean of the train images, scaled to [0, 1].
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


def check_name(name: str) -> None:
  """Raises ValueError, with the closest known name, if `name` is unknown."""
  names.check_name('data set', name, DATASETS)


def _statistics(
    images: np.ndarray,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Per-channel mean and standard deviation in [0, 1], from histograms."""
  channels = images.shape[-1]
  counts = np.zeros((channels, 256), np.int64)
  for start in range(0, len(images), 2048):
    pixels = images[start : start + 2048].reshape(-1, channels)
    for c in range(channels):
      counts[c] += np.bincount(pixels[:, c], minlength=256)
  values = np.arange(256) / 255
  share = counts / counts.sum(axis=1, keepdims=True)
  mean = share @ values
  variance = (share * (values - mean[:, None]) ** 2).sum(axis=1)
  return tuple(mean.tolist()), tuple(np.sqrt(variance).tolist())


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
          f'{where}: {name} has images of shape {source.image_shape}, got'
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
      name, *splits, source.num_classes, *_statistics(splits.train_images)
  )


def _check_data_dir(name: str, data_dir) -> pathlib.Path:
  source = DATASETS[name]
  if data_dir is None or data_dir == '':
    raise FileNotFoundError(
        f'{name} needs data_dir, a folder that holds {" ".join(source.files)}'
        f' in {source.folders[0]}/ (from {source.url}) or what'
        f' `python -m launch.prepare_data --dataset={name} --data_dir=DIR` made'
        ' of them; nothing is downloaded.'
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
      f' from {source.url}; nothing is downloaded.'
  )


def load_raw(name: str, data_dir, *, verify: bool = True) -> Dataset:
  """Like `load`, but ignores prepared data."""
  check_name(name)
  source = DATASETS[name]
  if not source.files:
    return _dataset(name, source.read(None), 'scikit-learn', verify)
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
    verify: bool = True,
) -> Dataset:
  """Loads a data set from local files; never downloads.

  Args:
    name: Key in `DATASETS`: digits, mnist, fashion_mnist, cifar10, cifar100
      (fine labels), svhn_cropped (without the extra images) or cinic10
      (without the validation images).
    data_dir: Folder of prepared or raw data; see the module docstring. Not
      used by digits.
    verify: Whether to require the official data: the published checksum of
      each raw file (CINIC-10's images have none), the checksum stored by
      `launch.prepare_data`, and the number of examples. False also accepts a
      part of a data set, such as a few thousand records of CIFAR-100; do not
      report results on a part as results on the data set.

  Returns:
    The data set. Raw files and data of `launch.prepare_data` keep the official
    order; data prepared by tensorflow-datasets' own builders are shuffled.

  Raises:
    FileNotFoundError: If `data_dir` is missing or does not contain the data.
    ImportError: If CINIC-10 is read without Pillow.
    ValueError: If `name` is unknown, or a file is unreadable, truncated,
      corrupt, not in its format, or (with `verify`) not the official one.
  """
  check_name(name)
  try:
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
        f'{data_dir}: {name} takes more memory than there is ({e}).'
    ) from e


def _load(name: str, data_dir, verify: bool) -> Dataset:
  """`load` without the translation of OSError and MemoryError."""
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
