"""Readers for the published file formats of image data sets.

Each reader checks the format (magic number, header sizes, whole records, label
range) and raises a one-line ValueError that names a broken file. `check_digest`
checks that a file is the official one.
"""

from collections.abc import Sequence
import gzip
import hashlib
import importlib.util
import math
import pathlib
import stat
from typing import NamedTuple
import zlib

import numpy as np

from fedjax_het.names import shown

_IDX_UBYTE = 0x08  # The IDX type code of unsigned bytes.
# Size limit of a file; the largest file of these data sets has 182 MB.
MAX_BYTES = 1 << 31


class Splits(NamedTuple):
  """Images and labels of the official train and test splits.

  Attributes:
    train_images: [N, H, W, C] uint8.
    train_labels: [N] int32.
    test_images: [M, H, W, C] uint8.
    test_labels: [M] int32.
  """

  train_images: np.ndarray
  train_labels: np.ndarray
  test_images: np.ndarray
  test_labels: np.ndarray


def check_file(path: pathlib.Path, most: float = MAX_BYTES) -> None:
  """Raises ValueError unless `path` is a regular file of acceptable size.

  Args:
    path: The file.
    most: The largest size in bytes.

  Raises:
    FileNotFoundError: If it does not exist.
    ValueError: If it is a folder, a device or a pipe, or larger than
      `most`.
  """
  status = path.stat()
  if not stat.S_ISREG(status.st_mode):
    raise ValueError(f'{path}: expected a file, got a folder or device.')
  if status.st_size > most:
    raise ValueError(
        f'{path}: expected at most {most:,} bytes, got'
        f' {status.st_size:,}.'
    )


def read_npz(
    path: pathlib.Path, names: Sequence[str] = ()
) -> dict[str, np.ndarray]:
  """Reads an .npz file that a user wrote with `np.savez`.

  Args:
    path: The file.
    names: Names of the arrays to read; () for all.

  Returns:
    {name: array}, in the order of `names` or of the file.

  Raises:
    FileNotFoundError: If there is no such file.
    ValueError: If it is not an .npz file, is damaged, holds objects, or lacks
      an array.
  """
  check_file(path, math.inf)  # A user's own, of any size.
  try:
    with np.load(path, allow_pickle=False) as file:
      there = file.files
      found = {name: file[name] for name in names or there if name in there}
  except MemoryError:
    raise
  except Exception as e:  # Damaged files raise exceptions of many types.
    # NumPy's own message advises to load pickled objects, which is unsafe.
    raise ValueError(
        f'{path} is no .npz file of numbers that can be read '
        f'({type(e).__name__}); write one with np.savez.'
    ) from e
  lacking = [name for name in names if name not in there]
  if lacking:
    raise ValueError(
        f'{path} lacks {", ".join(lacking)}; it holds '
        f'{", ".join(there) or "no array"}.'
    )
  return found


def check_digest(path: pathlib.Path, expected: str) -> None:
  """Raises ValueError if a file differs from the published one.

  Args:
    path: The file.
    expected: 'md5:<hex>', 'sha1:<hex>' or 'sha256:<hex>'.

  Raises:
    ValueError: If the digest differs; the message gives both digests and the
      file size.
  """
  check_file(path)
  algorithm, _, digest = expected.partition(':')
  with open(path, 'rb') as f:
    got = hashlib.file_digest(
        f, lambda: hashlib.new(algorithm, usedforsecurity=False)
    ).hexdigest()
  if got != digest:
    raise ValueError(
        f'{path}: {algorithm} is {got} ({path.stat().st_size:,} bytes), but'
        f' the official file has {digest}: truncated, changed or another file;'
        ' fetch it again, or pass verify=False to use it as it is.'
    )


def read_idx(path: pathlib.Path) -> np.ndarray:
  """Reads an IDX file of unsigned bytes; a `*.gz` file is gunzipped.

  IDX is MNIST's format: two zero bytes, a type code, the number of dimensions,
  each dimension as a big-endian uint32, then the values in row-major order.

  Args:
    path: The file.

  Returns:
    uint8 array of the shape in the header.

  Raises:
    ValueError: If the gzip stream is broken, the magic number is not that of
      unsigned bytes, or the size does not match the header. No array larger
      than `MAX_BYTES` is read.

  References:
    LeCun, Cortes, Burges, `The MNIST database of handwritten digits
    <http://yann.lecun.com/exdb/mnist>`_.
  """
  check_file(path)
  zipped = path.suffix == '.gz'
  try:
    with gzip.open(path) if zipped else open(path, 'rb') as file:
      return _read_idx(path, file)
  except (OSError, EOFError, zlib.error) as e:
    if not zipped:
      raise
    raise ValueError(
        f'{path}: expected a whole gzip file, got {path.stat().st_size:,} bytes'
        f' that do not unpack ({e}).'
    ) from e


def _read_idx(path: pathlib.Path, file) -> np.ndarray:
  """`read_idx` from an open file."""
  magic = file.read(4)
  if len(magic) < 4 or magic[:2] != b'\0\0' or magic[2] != _IDX_UBYTE:
    raise ValueError(
        f'{path}: expected an IDX file of unsigned bytes (magic 0x000008..),'
        f' got magic 0x{magic.hex()}.'
    )
  num_dims = magic[3]
  sizes = file.read(4 * num_dims)
  if len(sizes) < 4 * num_dims:
    raise ValueError(
        f'{path}: expected an IDX header of {4 + 4 * num_dims} bytes for'
        f' {num_dims} dimensions, got {4 + len(sizes)} bytes in all.'
    )
  shape = tuple(int(n) for n in np.frombuffer(sizes, '>u4'))
  size = math.prod(shape)
  data = file.read(size) if size <= MAX_BYTES else b''
  # Read to the end: gzip checks its checksum there. Count excess bytes.
  more = 0
  while more < MAX_BYTES and (chunk := file.read(1 << 20)):
    more += len(chunk)
  if len(data) + more != size:
    raise ValueError(
        f'{path}: the header says {shown(shape)}, which is {size:,} bytes, but'
        f' {len(data) + more:,} follow it.'
    )
  return np.frombuffer(data, np.uint8).reshape(shape).copy()


def read_cifar_binary(
    path: pathlib.Path, num_label_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
  """Reads a file of the binary version of CIFAR-10 or CIFAR-100.

  A record holds the label bytes, then 1,024 red, 1,024 green and 1,024 blue
  values in row-major order. Any whole number of records is accepted.

  Args:
    path: The file.
    num_label_bytes: 1 for CIFAR-10; 2 for CIFAR-100 (coarse, then fine).

  Returns:
    Images, [N, 32, 32, 3] uint8, and labels, [N, num_label_bytes] uint8.

  Raises:
    ValueError: If the file is empty or does not end with a whole record.

  References:
    Krizhevsky, `Learning Multiple Layers of Features from Tiny Images
    <https://www.cs.toronto.edu/~kriz/cifar.html>`_, 2009.
  """
  check_file(path)
  record = num_label_bytes + 3 * 32 * 32
  data = np.fromfile(path, np.uint8)
  if data.size == 0 or data.size % record:
    raise ValueError(
        f'{path}: expected a whole number of {record}-byte records, got'
        f' {data.size:,} bytes ({data.size // record} records and'
        f' {data.size % record} bytes).'
    )
  data = data.reshape(-1, record)
  images = data[:, num_label_bytes:].reshape(-1, 3, 32, 32)
  images = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
  return images, data[:, :num_label_bytes].copy()


def read_svhn_mat(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
  """Reads a cropped-digits file (`train_32x32.mat`) of SVHN.

  Args:
    path: A MATLAB file with `X`, [32, 32, 3, N] uint8, and `y`, [N, 1], in
      1..10, where 10 is the digit zero.

  Returns:
    Images, [N, 32, 32, 3] uint8, and labels, [N] int32, 0 for the digit zero.

  Raises:
    ValueError: If the file is not readable MATLAB data, or a variable is
      missing or has an unexpected shape, dtype or class.

  References:
    Netzer et al., `Reading Digits in Natural Images with Unsupervised Feature
    Learning <http://ufldl.stanford.edu/housenumbers>`_, 2011.
  """
  import scipy.io  # pylint: disable=g-import-not-at-top

  check_file(path)
  try:
    data = scipy.io.loadmat(path, variable_names=['X', 'y'])
  except Exception as e:  # Broken files raise exceptions of many types.
    raise ValueError(
        f'{path}: expected a whole MATLAB file, but reading it fails'
        f' ({type(e).__name__}: {" ".join(str(e).split())}).'
    ) from e
  if 'X' not in data or 'y' not in data:
    raise ValueError(f'{path}: expected the variables X and y.')
  images, labels = data['X'], data['y'].reshape(-1)
  if images.shape != (32, 32, 3, labels.size) or images.dtype != np.uint8:
    raise ValueError(
        f'{path}: expected X of shape (32, 32, 3, {labels.size}) and type'
        f' uint8, got {images.shape} {images.dtype}.'
    )
  if labels.size and (labels.min() < 1 or labels.max() > 10):
    raise ValueError(
        f'{path}: expected classes 1..10, got {labels.min()}..{labels.max()}.'
    )
  images = np.ascontiguousarray(images.transpose(3, 0, 1, 2))
  return images, (labels % 10).astype(np.int32)


def read_image_folders(
    folder: pathlib.Path,
    class_names: Sequence[str],
    image_size: tuple[int, int],
) -> tuple[np.ndarray, np.ndarray]:
  """Reads PNG images from one folder per class.

  Args:
    folder: Contains exactly the subfolders `class_names`.
    class_names: Subfolder of each label 0..C-1.
    image_size: (height, width) that every image must have.

  Returns:
    Images, [N, H, W, 3] uint8 (grey images become RGB), and labels, [N] int32,
    sorted by class, then by file name.

  Raises:
    ImportError: If Pillow is not installed.
    ValueError: If the subfolders differ from `class_names`, one is empty, or
      an image is broken or has another size.
  """
  if importlib.util.find_spec('PIL') is None:
    raise ImportError(
        f'{folder}: reading images needs Pillow; run `pip install pillow`.'
    )
  from PIL import Image  # pylint: disable=g-import-not-at-top

  if not folder.is_dir():
    raise ValueError(f'{folder}: expected a folder of class folders.')
  found = {p.name for p in folder.iterdir() if p.is_dir()}
  if found != set(class_names):
    raise ValueError(
        f'{folder}: expected one folder per class; missing'
        f' {sorted(set(class_names) - found)}, unknown'
        f' {sorted(found - set(class_names))}.'
    )
  paths, labels = [], []
  for label, name in enumerate(class_names):
    files = sorted((folder / name).glob('*.png'))
    if not files:
      raise ValueError(f'{folder / name}: expected *.png images, found none.')
    paths.extend(files)
    labels.extend([label] * len(files))
  height, width = image_size
  images = np.empty((len(paths), height, width, 3), np.uint8)
  for i, path in enumerate(paths):
    check_file(path)
    try:
      with Image.open(path) as image:
        if image.size != (width, height):
          raise ValueError(
              f'expected {width} x {height} pixels, got {image.size}'
          )
        images[i] = np.asarray(image.convert('RGB'))
    except Exception as e:  # Broken images raise exceptions of many types.
      raise ValueError(
          f'{path}: not a readable image ({" ".join(str(e).split())}).'
      ) from e
  return images, np.array(labels, np.int32)
