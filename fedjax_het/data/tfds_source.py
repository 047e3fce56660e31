"""Data sets in the format of tensorflow-datasets, without TensorFlow.

`write_prepared` stores arrays as array_record files with plain tensor features.
`read_prepared` reads those, and data prepared by a tensorflow-datasets builder
with `file_format='array_record'`. tensorflow-datasets is imported only inside
the functions that need it.
"""

from collections.abc import Sequence
import contextlib
import errno
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import tempfile

import numpy as np

from fedjax_het.data import raw_formats

VERSION = '1.0.0'  # Of the layout that `write_prepared` writes.
_READ_BATCH = 8192  # Records per read.
_OVERHEAD = 1.25  # Upper bound of bytes on disk per byte of pixels.


def prepared_folder(data_dir: pathlib.Path, name: str) -> pathlib.Path:
  """The folder to which `write_prepared` writes a data set."""
  return data_dir / name / VERSION


def find_prepared(
    data_dir: pathlib.Path, name: str
) -> tuple[pathlib.Path | None, str]:
  """Looks for `data_dir/<name>/<version>/dataset_info.json`.

  Args:
    data_dir: tensorflow-datasets' `data_dir`.
    name: Name of the data set.

  Returns:
    The folder of the highest readable version, or None; and the reason why an
    existing folder cannot be read, or ''.

  Raises:
    ValueError: If a `dataset_info.json` is not JSON.
  """
  versions = []
  for info in (data_dir / name).glob('*/dataset_info.json'):
    if re.fullmatch(r'\d+\.\d+\.\d+', info.parent.name):
      numbers = tuple(int(n) for n in info.parent.name.split('.'))
      versions.append((numbers, info))
  why_not = ''
  for _, info in sorted(versions, reverse=True):
    raw_formats.check_file(info)
    try:
      file_format = dict(json.loads(info.read_bytes())).get('fileFormat')
    except (ValueError, TypeError, RecursionError) as e:
      raise ValueError(
          f'{info}: not valid JSON ({e}); remove {info.parent} and prepare the'
          ' data set again.'
      ) from e
    if file_format != 'array_record':
      why_not = (
          f'{info.parent} is prepared as {file_format or "tfrecord"}, not'
          ' array_record'
      )
    elif importlib.util.find_spec('tensorflow_datasets') is None:
      why_not = (
          f'{info.parent} needs tensorflow-datasets (`pip install'
          ' tensorflow-datasets array_record importlib_resources`)'
      )
    else:
      return info.parent, ''
  return None, why_not


def content_digest(splits: raw_formats.Splits) -> str:
  """Hex sha256 of the shapes, dtypes and bytes of the four arrays."""
  digest = hashlib.sha256()
  for array in splits:
    digest.update(f'{array.shape} {array.dtype.str} '.encode())
    digest.update(np.ascontiguousarray(array))
  return digest.hexdigest()


class _Unsuited(Exception):
  """An intact data set that is not read, and why."""


def _check_parts(kind: str, wanted: Sequence[str], found) -> None:
  """Raises `_Unsuited` unless all splits or features are there."""
  for name in wanted:
    if name not in found:
      raise _Unsuited(
          f'it has no {kind} {name!r}, only {", ".join(map(repr, found))}'
      )


def _read_split(builder, split: str) -> tuple[np.ndarray, np.ndarray]:
  """[N, H, W, C] images of the stored type and [N] int32 labels of a split."""
  source = builder.as_data_source(split=split)
  num = len(source)
  if not num:
    raise _Unsuited(f'the split {split} is empty')
  # The builder may declare no height and width.
  first = np.asarray(source[0]['image'])
  if num * first.nbytes > raw_formats.MAX_BYTES:
    raise _Unsuited(
        f'{num:,} images of shape {first.shape} take more than '
        f'{raw_formats.MAX_BYTES:,} bytes'
    )
  images = np.empty((num, *first.shape), first.dtype)
  labels = np.empty(num, np.int32)
  for start in range(0, num, _READ_BATCH):
    stop = min(start + _READ_BATCH, num)
    # One call for many records: 4 times faster than one call per record.
    records = source.__getitems__(list(range(start, stop)))
    for record in records:
      if record['image'].shape != first.shape:
        raise _Unsuited(
            f'it has images of shape {first.shape} and of '
            f'{record["image"].shape}; all must have one size'
        )
    images[start:stop] = [record['image'] for record in records]
    classes = np.asarray([record['label'] for record in records])
    if classes.dtype.kind not in 'iu' or classes.ndim != 1:
      raise _Unsuited('its labels are not one integer each')
    labels[start:stop] = classes
  return images, labels


def read_prepared(
    folder: pathlib.Path, verify: bool = True
) -> raw_formats.Splits:
  """Reads a prepared data set with the features `image` and `label`.

  Args:
    folder: `.../<name>/<version>`, with array_record files.
    verify: Whether to check the sha256 that `write_prepared` stored;
      tensorflow-datasets' own builders store none.

  Returns:
    The train and test splits, in the stored order.

  Raises:
    ValueError: If the files are broken or incomplete, a split or feature is
      missing, the content does not match the stored sha256, or images differ
      in size or take too much memory.
  """
  import tensorflow_datasets as tfds  # pylint: disable=g-import-not-at-top

  for path in sorted(folder.iterdir()):
    raw_formats.check_file(path)
  try:
    builder = tfds.builder_from_directory(str(folder))
    _check_parts('split', ('train', 'test'), builder.info.splits)
    _check_parts('feature', ('image', 'label'), builder.info.features)
    splits = raw_formats.Splits(
        *_read_split(builder, 'train'), *_read_split(builder, 'test')
    )
    stored = dict(builder.info.metadata or {}).get('sha256')
  except _Unsuited as e:
    raise ValueError(f'{folder}: {e}.') from e
  except Exception as e:  # The C++ reader raises exceptions of many types.
    raise ValueError(
        f'{folder}: cannot read this prepared data set ({type(e).__name__}:'
        f' {" ".join(str(e).split())}); remove it and prepare it again.'
    ) from e
  if verify and stored and content_digest(splits) != stored:
    raise ValueError(
        f'{folder}: the content has sha256 {content_digest(splits)}, but'
        f' {stored} was stored; remove it and prepare it again.'
    )
  return splits


@contextlib.contextmanager
def staging(target: pathlib.Path, num_bytes: int = 0):
  """A context manager that creates the folder `target` atomically.

  Yields a temporary folder. The body must create `<name>/<version>` in it, the
  last two parts of `target`, which is then renamed to `target`. On an error no
  incomplete `target` is left. A killed process leaves a `.preparing-*` folder,
  which is never read and can be removed.

  Args:
    target: `<data_dir>/<name>/<version>`, must not exist.
    num_bytes: Bytes needed on disk; checked before the body runs.

  Yields:
    The temporary folder, in `<data_dir>`.

  Raises:
    OSError: If the disk is full, before or while writing.
  """
  data_dir = target.parent.parent
  data_dir.mkdir(parents=True, exist_ok=True)
  free = shutil.disk_usage(data_dir).free
  if free < num_bytes:
    raise OSError(
        errno.ENOSPC,
        f'needs {num_bytes / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free',
        str(data_dir),
    )
  temporary = pathlib.Path(tempfile.mkdtemp(prefix='.preparing-', dir=data_dir))
  try:
    yield temporary
    target.parent.mkdir(exist_ok=True)
    os.rename(temporary / target.parent.name / target.name, target)
  except Exception as e:
    full = getattr(e, 'errno', None) == errno.ENOSPC
    if full or os.strerror(errno.ENOSPC) in str(e):
      raise OSError(
          errno.ENOSPC,
          'no space left while preparing; nothing was kept',
          str(data_dir),
      ) from e
    raise
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def _builder(splits: raw_formats.Splits, name: str, data_dir: pathlib.Path):
  """A builder with plain tensor features, which needs no TensorFlow."""
  import tensorflow_datasets as tfds  # pylint: disable=g-import-not-at-top

  by_split = {'train': splits[:2], 'test': splits[2:]}

  class ArraysBuilder(
      tfds.core.GeneratorBasedBuilder, skip_registration=True
  ):
    """Writes the four arrays in order."""

    VERSION = tfds.core.Version(VERSION)

    def _info(self):
      features = tfds.features.FeaturesDict({
          'image': tfds.features.Tensor(
              shape=splits.train_images.shape[1:],
              dtype=np.uint8,
              encoding='bytes',
          ),
          'label': tfds.features.Tensor(shape=(), dtype=np.int32),
      })
      return tfds.core.DatasetInfo(
          builder=self,
          description=f'{name}, written by fedjax_het from the raw files.',
          features=features,
          disable_shuffling=True,
          metadata=tfds.core.MetadataDict(sha256=content_digest(splits)),
      )

    def _split_generators(self, dl_manager):
      del dl_manager  # Nothing is downloaded.
      return {split: self._generate_examples(split) for split in by_split}

    def _generate_examples(self, split):
      for i, (image, label) in enumerate(zip(*by_split[split], strict=True)):
        yield i, {'image': image, 'label': label}

  ArraysBuilder.name = name
  return ArraysBuilder(data_dir=str(data_dir), file_format='array_record')


def write_prepared(
    splits: raw_formats.Splits, name: str, data_dir: pathlib.Path
) -> pathlib.Path:
  """Stores a data set in tensorflow-datasets' format, without TensorFlow.

  The examples keep their order, so a partition of the prepared data equals that
  of the raw files. The files are read back and compared before they are renamed
  to the final folder.

  Args:
    splits: The arrays.
    name: Name of the data set.
    data_dir: Folder of all data sets; created if missing.

  Returns:
    `data_dir/<name>/<version>`.

  Raises:
    FileExistsError: If that folder exists.
    OSError: If the disk is full; no file is left.
  """
  import tensorflow_datasets as tfds  # pylint: disable=g-import-not-at-top

  target = prepared_folder(data_dir, name)
  if target.exists():
    raise FileExistsError(errno.EEXIST, 'already prepared', str(target))
  num_bytes = int(_OVERHEAD * sum(array.nbytes for array in splits))
  with staging(target, num_bytes) as temporary:
    config = tfds.download.DownloadConfig(
        manual_dir=str(temporary),
        compute_stats=tfds.download.ComputeStatsMode.SKIP,
        try_download_gcs=False,
    )
    # tfds prints progress bars even if nothing is downloaded.
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
      _builder(splits, name, temporary).download_and_prepare(
          download_config=config
      )
    written = prepared_folder(temporary, name)
    for got, want in zip(read_prepared(written), splits, strict=True):
      if not np.array_equal(got, want):
        raise OSError(errno.EIO, 'reads back differently', str(written))
  return target
