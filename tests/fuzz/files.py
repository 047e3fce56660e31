"""Data files of every published format, tiny and damaged in many ways."""

import functools
import gzip
import io
import os
import pathlib
import random
import shutil
import struct
import zlib

from hypothesis import strategies as st
import numpy as np
import scipy.io

from fedjax_het.data import catalog, raw_formats, sources, tfds_source
from fedjax_het.models.vit import vit
from tests.models import augreg

# {reader: data set}; 'npz' holds pretrained parameters, not a data set.
READERS = dict(
    idx_gz='mnist',
    idx='fashion_mnist',
    cifar10='cifar10',
    cifar100='cifar100',
    svhn='svhn_cropped',
    cinic='cinic10',
    prepared='mnist',
    npz=None,
)
_SIZES = dict(num_train=12, num_test=10)


def _arrays(name):
  """Images and labels of both splits, determined by the name."""
  source, rng = sources.DATASETS[name], np.random.default_rng(0)
  arrays = []
  for num in _SIZES.values():
    arrays.append(rng.integers(0, 256, (num, *source.image_shape), np.uint8))
    arrays.append((np.arange(num) % source.num_classes).astype(np.uint8))
  return arrays


def _idx(array):
  header = struct.pack(f'>4B{array.ndim}I', 0, 0, 8, array.ndim, *array.shape)
  return header + array.tobytes()


def _write_idx(folder, name, zipped):
  for file, array in zip(sources.DATASETS[name].files, _arrays(name)):
    data = _idx(array[..., 0] if 'idx3' in file else array)
    path = folder / (file if zipped else file.removesuffix('.gz'))
    path.write_bytes(gzip.compress(data) if zipped else data)


def _write_cifar(folder, name):
  images, labels, *_ = _arrays(name)
  columns = [labels] * (2 if name == 'cifar100' else 1)
  pixels = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
  data = np.column_stack([*columns, pixels]).astype(np.uint8).tobytes()
  for file in sources.DATASETS[name].files:
    (folder / file).write_bytes(data)


def _write_svhn(folder, name):
  images, labels, *_ = _arrays(name)
  contents = {'X': images.transpose(1, 2, 3, 0), 'y': labels[:, None] + 1}
  for i, file in enumerate(sources.DATASETS[name].files):
    scipy.io.savemat(folder / file, contents, do_compression=bool(i))


def _write_cinic(folder, name):
  from PIL import Image

  images, *_ = _arrays(name)
  for split in ('train', 'test'):
    for image, kind in zip(images, catalog._CINIC_CLASSES, strict=False):
      (folder / split / kind).mkdir(parents=True)
      Image.fromarray(image).save(folder / split / kind / '0.png')


def _write_prepared(folder, name):
  arrays = [a.astype(np.int32) if a.ndim == 1 else a for a in _arrays(name)]
  tfds_source.write_prepared(raw_formats.Splits(*arrays), name, folder)


def _write_npz(folder, name):
  del name
  augreg.save(folder / 'vit.npz', depth=2)


_WRITERS = dict(
    idx_gz=functools.partial(_write_idx, zipped=True),
    idx=functools.partial(_write_idx, zipped=False),
    cifar10=_write_cifar,
    cifar100=_write_cifar,
    svhn=_write_svhn,
    cinic=_write_cinic,
    prepared=_write_prepared,
    npz=_write_npz,
)


@functools.cache
def _originals(reader: str) -> pathlib.Path:
  """A folder with a reader's undamaged files, written once."""
  folder = pathlib.Path('originals', reader).absolute()
  folder.mkdir(parents=True)
  _WRITERS[reader](folder, READERS[reader])
  return folder


def _replace_by(make):
  def damage(path, rng):
    del rng
    path.unlink()
    make(path)

  return damage


def _on_bytes(change):
  def damage(path, rng):
    path.write_bytes(bytes(change(bytearray(path.read_bytes()), rng)))

  return damage


def _flip(number, first=None):
  def change(data, rng):
    for _ in range(number if data else 0):
      data[rng.randrange(min(first or len(data), len(data)))] ^= rng.choice(
          [1, 128, 255]
      )
    return data

  return _on_bytes(change)


def _inside(change):
  """Damages the contents of a gzip or npz file; the archive stays valid."""

  def damage(path, rng):
    data = path.read_bytes()
    if path.suffix == '.gz':
      data = gzip.decompress(data)
      path.write_bytes(gzip.compress(bytes(change(bytearray(data), rng))))
    elif path.suffix == '.npz':
      with np.load(io.BytesIO(data)) as file:
        leaves = dict(file)
      name = rng.choice(sorted(leaves))
      leaves[name] = rng.choice([
          np.array(1.0), np.full(leaves[name].shape, np.nan), np.zeros(0),
          leaves[name].reshape(-1), np.array(['text']), leaves[name][None],
          np.zeros((0, 0, 0, 0)),
      ])  # fmt: skip
      if rng.random() < 0.3:
        del leaves[name]
      np.savez(path, **leaves)
    else:
      path.write_bytes(bytes(change(bytearray(data), rng)))

  return damage


def _huge(data, rng):
  """Writes large sizes into a header; a PNG keeps a valid checksum."""
  if data[:4] == b'\x89PNG':
    size = rng.choice([20_000, 2**31 - 1, 0, 2**32 - 1])
    data[16:24] = struct.pack('>II', size, size)
    data[29:33] = struct.pack('>I', zlib.crc32(data[12:29]))
    return data
  place = rng.randrange(0, 120, 4)
  data[place : place + 4] = rng.choice([b'\xff' * 4, b'\x7f\xff\xff\xff'])
  return data


def _sparse(path, rng):
  with open(path, 'ab') as file:
    file.truncate(rng.choice([1 << 33, 1 << 40]))


@functools.cache
def _bomb_bytes():
  """A short gzip file that unpacks to a gigabyte."""
  zeros = zlib.compressobj(1, zlib.DEFLATED, 31)
  parts = [zeros.compress(struct.pack('>4B3I', 0, 0, 8, 3, 1 << 20, 32, 128))]
  parts += [zeros.compress(bytes(1 << 20)) for _ in range(1024)]
  return b''.join([*parts, zeros.flush()])


def _bomb(path, rng):
  del rng
  path.write_bytes(_bomb_bytes())


def _no_permission(path, rng):
  del rng
  path.chmod(0)


def _loop(path):
  path.symlink_to(path.name)


DAMAGES = dict(
    truncated=_on_bytes(lambda data, rng: data[: rng.randrange(len(data))]),
    cut_a_little=_on_bytes(lambda data, rng: data[: -rng.randrange(1, 9)]),
    empty=_on_bytes(lambda data, rng: b''),
    one_flipped=_flip(1),
    some_flipped=_flip(30),
    many_flipped=_flip(3000),
    header_flipped=_flip(1, 64),
    header_spoilt=_flip(12, 256),
    magic=_on_bytes(lambda data, rng: rng.randbytes(4) + data[4:]),
    zeros=_on_bytes(lambda data, rng: bytes(len(data))),
    noise=_on_bytes(lambda data, rng: rng.randbytes(len(data))),
    longer=_on_bytes(lambda data, rng: data + rng.randbytes(100)),
    doubled=_on_bytes(lambda data, rng: data + data),
    page=_on_bytes(lambda data, rng: b'<html>404 Not Found</html>\n' * 40),
    json=_on_bytes(
        lambda data, rng: rng.choice([
            b'null', b'[]', b'{}', b'[' * 100_000, b'\xff\xfe{', b'{"a": 1',
        ])
    ),
    inside=_inside(lambda data, rng: data[: rng.randrange(len(data))]),
    huge=_inside(_huge),
    sparse=_sparse,
    folder=_replace_by(pathlib.Path.mkdir),
    gone=_replace_by(lambda path: None),
    loop=_replace_by(_loop),
    dangling=_replace_by(lambda path: path.symlink_to('nowhere')),
    device=_replace_by(lambda path: path.symlink_to('/dev/zero')),
    pipe=_replace_by(os.mkfifo),
    no_permission=_no_permission,
    bomb=_bomb,
)  # fmt: skip


def cases():
  """(reader, kind of damage, seed, verify), for `try_file`."""
  return st.tuples(
      st.sampled_from([*READERS]),
      st.sampled_from([*DAMAGES]),
      st.integers(0, 2**32 - 1),
      st.sampled_from([False, False, False, True]),
  )


def try_file(reader: str, damage: str, seed: int, verify: bool):
  """Reads a data set with one damaged file."""
  folder = pathlib.Path('damaged')
  shutil.rmtree(folder, ignore_errors=True)
  shutil.copytree(_originals(reader), folder)
  rng = random.Random(seed)
  files = sorted(path for path in folder.rglob('*') if path.is_file())
  DAMAGES[damage](rng.choice(files), rng)
  if reader == 'npz':
    path = str(folder / 'vit.npz')
    vit((8, 8, 3), 5, depth=2, variant='t', patch=augreg.PATCH, width=0.34,
        pretrained=path)  # fmt: skip
  else:
    sources.load(READERS[reader], folder, verify=verify)
