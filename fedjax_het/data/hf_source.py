"""Reads a folder that Hugging Face `datasets` saved with `save_to_disk`.

Needs that package (extra `hf`); nothing is downloaded.
"""

import importlib.util
import itertools
import pathlib

import numpy as np

from fedjax_het.data import own_files, raw_formats
from fedjax_het.names import check_name

Splits = raw_formats.Splits
_SPLITS = ('train', 'test')
# Usual column names, tried if the column types are ambiguous.
_FEATURES = ('image', 'img', 'input_ids', 'features')
_LABELS = ('label', 'labels')


def read_hf(
    folder: pathlib.Path, columns: str = '', image_size: int | None = None
) -> tuple[Splits, int]:
  """Reads the splits `train` and `test` of a saved `DatasetDict`.

  Args:
    folder: What `save_to_disk` wrote.
    columns: 'FEATURES,LABEL', the columns to read. '' takes the only column of
      images and the only class label, or else the only usual name of each.
    image_size: Height and width to which images are resized; None if all have
      one size.

  Returns:
    The splits: images [N, H, W, 3 or 1] uint8, or a column of numbers in its
    own type, such as token ids [N, T] int32; and the number of classes.

  Raises:
    FileNotFoundError: If the folder holds no saved `DatasetDict`.
    ImportError: If `datasets`, or Pillow for images, is not installed.
    ValueError: If a split or a column is missing, the splits number their
      classes differently, or data are wrong. The message is one line.
  """
  if not (folder / 'dataset_dict.json').is_file():
    raise FileNotFoundError(
        f'{folder} holds no DatasetDict; write one with '
        'datasets.DatasetDict(train=..., test=...).save_to_disk(FOLDER).'
    )
  if importlib.util.find_spec('datasets') is None:
    raise ImportError(
        f'{folder}: reading it needs Hugging Face datasets; run '
        "`pip install 'fedjax_het[hf]'`."
    )
  import datasets  # pylint: disable=g-import-not-at-top

  try:
    found = datasets.load_from_disk(str(folder))
    for split in _SPLITS:
      check_name('split', split, found)
  except IndexError as e:  # `datasets` writes no file for an empty split.
    raise ValueError(
        f'{folder}: a split has no example, or its files are missing.'
    ) from e
  except Exception as e:  # Damaged files raise exceptions of many types.
    raise _refused(folder, e) from e
  kinds = found['train'].features
  try:
    names = _columns(datasets, kinds, columns)
    arrays = []
    for split in _SPLITS:
      _check_split(split, found[split], kinds, names)
      x = _features(datasets, found[split], names[0], image_size)
      arrays += [x, _numbers(found[split], names[1])]
  except (ValueError, KeyError, OSError) as e:
    raise _refused(folder, e) from e
  words = [f'{name} of {split}' for split in _SPLITS for name in names]
  splits, num_classes = own_files.checked(arrays, str(folder), words)
  label = kinds[names[1]]
  if isinstance(label, datasets.ClassLabel):
    num_classes = max(num_classes, label.num_classes)
  return splits, num_classes


def _refused(folder, error: Exception) -> ValueError:
  """An error with a one-line message that begins with the folder."""
  return ValueError(f'{folder}: {" ".join(str(error).split()):.300}')


def _columns(datasets, kinds, columns: str) -> tuple[str, str]:
  """The names of the feature column and of the label column."""
  if columns:
    names = [name.strip() for name in columns.split(',')]
    if len(names) != 2:
      raise ValueError(
          f'dataset=hf:{columns} must name two columns, hf:FEATURES,LABEL.'
      )
    for name in names:
      check_name('column', name, kinds)
    return names[0], names[1]
  image = _only(kinds, datasets.Image, _FEATURES, 'features')
  return image, _only(kinds, datasets.ClassLabel, _LABELS, 'label')


def _only(kinds, type_: type, usual: tuple[str, ...], what: str) -> str:
  """The only column of a type, else the only one with a usual name."""
  of_type = [name for name, kind in kinds.items() if isinstance(kind, type_)]
  by_name = [name for name in usual if name in kinds]
  for found in (of_type, by_name):
    if len(found) == 1:
      return found[0]
  raise ValueError(
      f'which column holds the {what}? Name both columns, as '
      f'dataset=hf:FEATURES,LABEL; there are {", ".join(kinds)}.'
  )


def _check_split(name: str, split, kinds, columns: tuple[str, str]) -> None:
  """Raises ValueError if a split is empty, or unlike the training split."""
  if not len(split):
    raise ValueError(f'the split {name} has no example.')
  for column in columns:
    check_name(f'column of {name}', column, split.features)
  mine, first = (
      getattr(of[columns[1]], 'names', None) for of in (split.features, kinds)
  )
  if mine and first and mine != first:
    place, (one, other) = next(
        (i, pair)
        for i, pair in enumerate(itertools.zip_longest(mine, first))
        if len(set(pair)) > 1
    )
    raise ValueError(
        f'the class {place} of {columns[1]} is {one!r} in {name}, but '
        f'{other!r} in {_SPLITS[0]}; the classes of both must be equal.'
    )


def _features(datasets, split, name: str, image_size: int | None):
  """A column as an array with one row per example."""
  if not isinstance(split.features[name], datasets.Image):
    return _numbers(split, name)

  def read(i, image):
    try:
      return own_files.pixels(image, image_size)
    except Exception as e:  # None, or an image that Pillow cannot read.
      raise ValueError(f'{name} {i}: not a readable image ({e}).') from e

  images = enumerate(split[name])
  return own_files.stacked((f'{name} {i}', read(i, x)) for i, x in images)


def _numbers(split, name: str) -> np.ndarray:
  """A column of numbers; `datasets` would make all integers 64 bits long."""
  values = split.select_columns([name]).with_format('numpy')[:][name]
  if isinstance(values, list) or values.dtype == np.object_:
    raise ValueError(
        f'the rows of {name} differ in length; pad them to one length.'
    )
  kind = split.features[name]
  while hasattr(kind, 'feature'):  # Lists of lists of numbers.
    kind = kind.feature
  if getattr(kind, 'dtype', None) in np.sctypeDict:
    kind = np.dtype(kind.dtype)
    # Integers with missing values come as floats, with NaN.
    if {values.dtype.kind, kind.kind} <= set('iu') or kind.kind == 'f':
      return values.astype(kind)
  return values
