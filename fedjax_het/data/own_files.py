"""Reads users' data sets: an .npz file, folders of images, a tfds builder.

Each reader returns `Splits` and the number of classes, or raises a one-line
error that names the file and what is wrong. Features keep their type: uint8
images are normalised by 255, floats are standardised.
"""

from collections.abc import Container, Iterable
import importlib.util
import pathlib

import numpy as np

from fedjax_het.data import arrays, raw_formats, tfds_source
from fedjax_het.names import suggest

Splits = raw_formats.Splits
NPZ, IMAGE_FOLDER, TFDS, HF = 'npz', 'image_folder', 'tfds:', 'hf'
NAMES = (NPZ, IMAGE_FOLDER, HF)
# Names to which the user adds something, such as 'tfds:NAME'.
PREFIXES = (TFDS, f'{HF}:')
_ARRAYS = ('x_train', 'y_train', 'x_test', 'y_test')


def read_npz(path: pathlib.Path) -> tuple[Splits, int]:
  """Reads arrays that `np.savez(path, x_train=..., ...)` wrote.

  Args:
    path: The file, with the arrays x_train [N, ...], y_train [N], x_test
      [M, ...] and y_test [M]. Labels are integers 0..C-1. uint8 features
      [N, H, W] are grey images and get a channel axis.

  Returns:
    The splits, and the number of classes: the largest label plus one.

  Raises:
    FileNotFoundError: If there is no such file.
    ValueError: If it is not an .npz file, or an array is missing or wrong.
  """
  found = raw_formats.read_npz(path, _ARRAYS)
  return checked([*found.values()], str(path), _ARRAYS)


def checked(found, where: str, names=_ARRAYS) -> tuple[Splits, int]:
  """Checks that four arrays fit together and makes splits of them.

  Args:
    found: Training features and labels, test features and labels.
    where: Their source, for messages.
    names: Their names, for messages.

  Returns:
    The splits, and the number of classes.

  Raises:
    ValueError: If they do not fit. The message is one line that begins with
      `where`.
  """
  try:
    train, y_train = _features_and_labels(*found[:2], *names[:2])
    test, y_test = _features_and_labels(*found[2:], *names[2:])
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
      raise ValueError(
          f'{names[0]} holds {train.shape[1:]} {train.dtype}, but {names[2]} '
          f'{test.shape[1:]} {test.dtype}; both must have one shape and dtype.'
      )
  except ValueError as e:
    raise ValueError(f'{where}: {e}') from e
  if train.dtype == np.uint8 and train.ndim == 3:
    train, test = train[..., None], test[..., None]
  num_classes = 1 + max(int(y_train.max()), int(y_test.max()))
  return Splits(train, y_train, test, y_test), num_classes


def _features_and_labels(x, y, x_name: str, y_name: str):
  """Checks a split's features, and its labels, which must be classes."""
  x = arrays.features(x, x_name)
  y = arrays.labels(y, len(x), name=y_name)
  if y.ndim != 1 or y.dtype != np.int32 or not len(y):
    raise ValueError(
        f'{y_name} must be [N] integers, at least one, got shape {y.shape} and '
        f'dtype {y.dtype}{_remedy(y)}.'
    )
  return x, y


def _remedy(y: np.ndarray) -> str:
  """How to turn labels of another common layout into classes."""
  if y.ndim == 2 and y.shape[1] == 1:
    return '; save y.ravel()'
  if y.ndim == 2 and np.all((y == 0) | (y == 1)) and np.all(y.sum(1) == 1):
    return '; save y.argmax(1)'
  if y.ndim == 1 and y.size and np.all(y == np.floor(y)):
    return '; save y.astype(int)'
  return ''


def read_image_folder(
    folder: pathlib.Path, image_size: int | None = None
) -> tuple[Splits, int]:
  """Reads `folder/train/<class>/*` and `folder/test/<class>/*`.

  Args:
    folder: The folder. Classes are numbered in the order of the sorted names
      of the class folders in `train`; those in `test` must be among them.
    image_size: Height and width to which each image is resized, bilinearly;
      None if all images have one size.

  Returns:
    The splits, with images [N, H, W, 3] uint8 ([N, H, W, 1] if all are grey)
    sorted by class and file name, and the number of classes.

  Raises:
    FileNotFoundError: If a folder is missing.
    ImportError: If Pillow is not installed.
    ValueError: If a class is empty or unknown, or holds a folder, an image is
      broken, or images have several sizes and `image_size` is None.
  """
  if importlib.util.find_spec('PIL') is None:
    raise ImportError(
        f'{folder}: reading images needs Pillow; run `pip install pillow`.'
    )
  for split in ('train', 'test'):
    if not (folder / split).is_dir():
      raise FileNotFoundError(
          f'{folder} has no folder {split}; an image folder holds '
          'train/CLASS/*.png and test/CLASS/*.png.'
      )
  classes = _class_names(folder / 'train')
  unknown = sorted(set(_class_names(folder / 'test')) - set(classes))
  if unknown:
    raise ValueError(
        f'{folder / "test" / unknown[0]}: train has no such class'
        f'{suggest(unknown[0], classes)}'
    )
  from PIL import Image  # pylint: disable=g-import-not-at-top

  suffixes = {
      suffix
      for suffix, kind in Image.registered_extensions().items()
      if kind in Image.OPEN
  }
  train, test = (
      _image_paths(folder / split, classes, suffixes)
      for split in ('train', 'test')
  )
  files = [path for path, _ in (*train, *test)]
  images = _read_images(files, image_size)
  labels = np.array([label for _, label in (*train, *test)], np.int32)
  num = len(train)
  splits = Splits(images[:num], labels[:num], images[num:], labels[num:])
  return splits, len(classes)


def _class_names(folder: pathlib.Path) -> list[str]:
  """The sorted names of the class folders; raises ValueError without any."""
  found = sorted(
      path.name
      for path in folder.iterdir()
      if path.is_dir() and not path.name.startswith('.')
  )
  if not found:
    raise ValueError(f'{folder} has no class folders.')
  return found


def _image_paths(
    folder: pathlib.Path, classes: list[str], suffixes: Container[str]
) -> list[tuple[pathlib.Path, int]]:
  """(file, label) of all images of a split."""
  found = []
  for label, name in enumerate(classes):
    place = folder / name
    inside = [
        path
        for path in sorted(place.iterdir() if place.is_dir() else ())
        if not path.name.startswith('.')
    ]
    for path in inside:
      if path.is_dir():
        raise ValueError(
            f'{path}: a folder inside a class; images lie in the folder of '
            'their class itself.'
        )
    files = [path for path in inside if path.suffix.lower() in suffixes]
    if not files and (place.is_dir() or folder.name == 'train'):
      raise ValueError(
          f'{place} has no image, a file with an ending such as .png or .jpg.'
      )
    found += [(path, label) for path in files]
  return found


def _read_images(
    paths: list[pathlib.Path], image_size: int | None
) -> np.ndarray:
  """[N, H, W, 3 or 1] uint8."""
  from PIL import Image  # pylint: disable=g-import-not-at-top

  def read(path):
    raw_formats.check_file(path)
    try:
      with Image.open(path) as image:
        return pixels(image, image_size)
    except Exception as e:  # Broken images raise exceptions of many types.
      raise ValueError(
          f'{path}: not a readable image ({" ".join(str(e).split())}).'
      ) from e

  return stacked((str(path), read(path)) for path in paths)


def pixels(image, image_size: int | None) -> np.ndarray:
  """The pixels of a Pillow image.

  Args:
    image: The image, of any mode with at most 8 bits a channel.
    image_size: Height and width to which it is resized; None keeps its size.

  Returns:
    [H, W] uint8 for a grey image, else [H, W, 3].

  Raises:
    ValueError: If a channel has more than 8 bits, which uint8 would clip.
  """
  if image.mode == 'F' or image.mode.startswith('I'):
    raise ValueError(
        f'its pixels have more than 8 bits (mode {image.mode}); convert it'
    )
  image = image.convert('L' if image.mode in ('1', 'L') else 'RGB')
  if image_size is not None:
    image = image.resize((image_size, image_size), resample=2)  # Bilinear.
  return np.asarray(image)


def stacked(named: Iterable[tuple[str, np.ndarray]]) -> np.ndarray:
  """Stacks images of one size.

  Args:
    named: (name, [H, W] or [H, W, 3] uint8) of each image.

  Returns:
    [N, H, W, 3] uint8; [N, H, W, 1] if all are grey.

  Raises:
    ValueError: If the sizes differ; the message names the first image of
      another size.
  """
  found, first = [], None
  for name, image in named:
    first = first or (name, image.shape[:2])
    if image.shape[:2] != first[1]:
      raise ValueError(
          f'{name} has {image.shape[0]} x {image.shape[1]} pixels, but '
          f'{first[0]} has {first[1][0]} x {first[1][1]}; set image_size to '
          'resize all of them.'
      )
    found.append(image)
  if any(image.ndim == 3 for image in found):
    found = [
        image if image.ndim == 3 else np.repeat(image[..., None], 3, axis=-1)
        for image in found
    ]
  images = np.stack(found)
  return images if images.ndim == 4 else images[..., None]


def read_tfds(
    name: str, data_dir: pathlib.Path, verify: bool = True
) -> tuple[Splits, int]:
  """Reads a data set that tensorflow-datasets has prepared.

  Args:
    name: The builder's name, maybe with a config: 'mnist', 'NAME/CONFIG'.
    data_dir: tensorflow-datasets' own folder.
    verify: See `tfds_source.read_prepared`.

  Returns:
    The splits, and the number of classes.

  Raises:
    FileNotFoundError: If it is not prepared there in a readable format.
    ValueError: See `tfds_source.read_prepared`.
  """
  folder, why_not = tfds_source.find_prepared(data_dir, name)
  if folder is None:
    raise FileNotFoundError(
        f'{name} is not prepared in {data_dir}'
        + (f': {why_not}' if why_not else '')
        + f'. Prepare it with `tfds build {name} --data_dir={data_dir} '
        '--file_format=array_record`; nothing is downloaded here.'
    )
  splits = tfds_source.read_prepared(folder, verify)
  names = ('train images', 'train labels', 'test images', 'test labels')
  return checked(splits, str(folder), names)
