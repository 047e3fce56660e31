"""Readers of published formats, on files written here byte by byte."""

import gzip
import hashlib
import os
import struct
import zlib

import numpy as np
import pytest
import scipy.io

from fedjax_het.data import raw_formats


def idx_bytes(array, type_code=8):
  header = struct.pack(
      f'>BBBB{array.ndim}I', 0, 0, type_code, array.ndim, *array.shape
  )
  return header + array.tobytes()


def random_bytes(*shape):
  return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize('shape', [(7,), (3, 5, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize('name', ['a.gz', 'a-ubyte'])
def test_idx_round_trip(tmp_path, shape, name):
  array = random_bytes(*shape)
  data = idx_bytes(array)
  path = tmp_path / name
  path.write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
  got = raw_formats.read_idx(path)
  assert got.dtype == np.uint8
  np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize(
    'change, expected',
    [
        (lambda d: d[:-1], 'header says (3, 4, 5), which is 60 bytes, but 59'),
        (lambda d: d + b'x', 'but 61 follow'),
        (lambda d: b'\x89PNG' + d[4:], 'got magic 0x89504e47'),
        (lambda d: d[:2] + b'\x0d' + d[3:], 'IDX file of unsigned bytes'),
        (lambda d: d[:9], 'IDX header of 16 bytes'),
        (lambda d: b'', 'magic'),
    ],
)
def test_idx_refuses_what_the_header_does_not_promise(
    tmp_path, change, expected
):
  path = tmp_path / 'images-idx3-ubyte'
  path.write_bytes(change(idx_bytes(random_bytes(3, 4, 5))))
  with pytest.raises(ValueError) as error:
    raw_formats.read_idx(path)
  message = str(error.value)
  assert str(path) in message
  assert expected in message
  assert '\n' not in message


def test_idx_of_overflowing_header_is_refused(tmp_path):
  path = tmp_path / 'huge'
  path.write_bytes(struct.pack('>BBBB3I', 0, 0, 8, 3, *[2**31] * 3) + b'abc')
  with pytest.raises(ValueError, match='but 3 follow'):
    raw_formats.read_idx(path)


@pytest.mark.parametrize('broken', ['truncated', 'flipped', 'not gzip'])
def test_broken_gzip_is_refused(tmp_path, broken):
  data = bytearray(gzip.compress(idx_bytes(random_bytes(30, 30))))
  if broken == 'truncated':
    del data[len(data) // 2 :]
  elif broken == 'flipped':
    data[-6] ^= 255  # In the stored CRC.
  else:
    data = bytearray(b'<html>404</html>')
  path = tmp_path / 'x.gz'
  path.write_bytes(data)
  with pytest.raises(ValueError, match=r'x\.gz: expected a whole gzip file'):
    raw_formats.read_idx(path)


@pytest.mark.parametrize('label_bytes', [1, 2])
def test_cifar_round_trip_is_channel_last(tmp_path, label_bytes):
  images = random_bytes(4, 32, 32, 3)
  labels = random_bytes(4, label_bytes)
  records = np.concatenate(
      [labels, images.transpose(0, 3, 1, 2).reshape(4, -1)], axis=1
  )
  path = tmp_path / 'train.bin'
  path.write_bytes(records.tobytes())
  got_images, got_labels = raw_formats.read_cifar_binary(path, label_bytes)
  np.testing.assert_array_equal(got_images, images)
  np.testing.assert_array_equal(got_labels, labels)
  assert got_images.flags.c_contiguous


@pytest.mark.parametrize('num_bytes', [0, 3072, 3073 * 2 - 1, 3073 + 1])
def test_cifar_refuses_broken_records(tmp_path, num_bytes):
  path = tmp_path / 'train.bin'
  path.write_bytes(bytes(num_bytes))
  with pytest.raises(ValueError, match='whole number of 3073-byte records'):
    raw_formats.read_cifar_binary(path, 1)


def write_svhn(path, images, labels):
  scipy.io.savemat(
      path,
      {'X': images.transpose(1, 2, 3, 0), 'y': labels[:, None]},
      do_compression=True,
  )


def test_svhn_round_trip_maps_class_ten_to_digit_zero(tmp_path):
  images = random_bytes(5, 32, 32, 3)
  path = tmp_path / 'train_32x32.mat'
  write_svhn(path, images, np.array([1, 10, 9, 2, 10], np.uint8))
  got, labels = raw_formats.read_svhn_mat(path)
  np.testing.assert_array_equal(got, images)
  assert labels.tolist() == [1, 0, 9, 2, 0]
  assert labels.dtype == np.int32


def test_svhn_refuses_broken_files(tmp_path):
  path = tmp_path / 'train_32x32.mat'
  images = random_bytes(5, 32, 32, 3)
  write_svhn(path, images, np.array([1, 2, 3, 4, 11], np.uint8))
  with pytest.raises(ValueError, match=r'classes 1\.\.10, got 1\.\.11'):
    raw_formats.read_svhn_mat(path)
  write_svhn(path, images, np.array([1, 2, 3], np.uint8))
  with pytest.raises(ValueError, match=r'expected X of shape \(32, 32, 3, 3\)'):
    raw_formats.read_svhn_mat(path)
  scipy.io.savemat(path, {'X': np.zeros(3)})
  with pytest.raises(ValueError, match='variables X and y'):
    raw_formats.read_svhn_mat(path)
  write_svhn(path, images, np.ones(5, np.uint8))
  whole = path.read_bytes()
  for data in (whole[: len(whole) // 2], b'', b'<html>404</html>' * 20):
    path.write_bytes(data)
    with pytest.raises(ValueError, match='expected a whole MATLAB file') as e:
      raw_formats.read_svhn_mat(path)
    assert '\n' not in str(e.value)


def write_images(folder, arrays):
  image_module = pytest.importorskip('PIL.Image')
  for name, images in arrays.items():
    (folder / name).mkdir(parents=True)
    for i, image in enumerate(images):
      image_module.fromarray(image).save(folder / name / f'{i}.png')


def test_image_folders_round_trip_orders_by_class_and_file(tmp_path):
  images = {'cat': random_bytes(3, 6, 4, 3), 'dog': random_bytes(2, 6, 4, 3)}
  write_images(tmp_path, images)
  got, labels = raw_formats.read_image_folders(
      tmp_path, ('dog', 'cat'), (6, 4)
  )
  np.testing.assert_array_equal(got[:2], images['dog'])
  np.testing.assert_array_equal(got[2:], images['cat'])
  assert labels.tolist() == [0, 0, 1, 1, 1]


def test_grey_images_get_three_equal_channels(tmp_path):
  grey = random_bytes(2, 4, 4)
  write_images(tmp_path, {'cat': grey})
  got, _ = raw_formats.read_image_folders(tmp_path, ('cat',), (4, 4))
  np.testing.assert_array_equal(got, np.repeat(grey[..., None], 3, axis=3))


def test_image_folders_refuse_what_is_not_there(tmp_path):
  write_images(tmp_path, {'cat': random_bytes(1, 4, 4, 3)})
  with pytest.raises(ValueError, match=r"missing \['dog'\], unknown \[\]"):
    raw_formats.read_image_folders(tmp_path, ('cat', 'dog'), (4, 4))
  with pytest.raises(ValueError, match=r"missing \[\], unknown \['cat'\]"):
    raw_formats.read_image_folders(tmp_path, (), (4, 4))
  with pytest.raises(ValueError, match=r'0\.png.*expected 5 x 4 pixels'):
    raw_formats.read_image_folders(tmp_path, ('cat',), (4, 5))
  file = tmp_path / 'cat' / '0.png'
  file.write_bytes(file.read_bytes()[:40])
  with pytest.raises(ValueError, match=r'0\.png: not a readable image'):
    raw_formats.read_image_folders(tmp_path, ('cat',), (4, 4))
  file.unlink()
  with pytest.raises(ValueError, match=r'expected \*\.png images, found none'):
    raw_formats.read_image_folders(tmp_path, ('cat',), (4, 4))


def test_missing_pillow_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr(
      raw_formats.importlib.util, 'find_spec', lambda name: None
  )
  with pytest.raises(ImportError, match='pip install pillow'):
    raw_formats.read_image_folders(tmp_path, ('cat',), (4, 4))


@pytest.mark.parametrize('algorithm', ['md5', 'sha1', 'sha256'])
def test_check_digest(tmp_path, algorithm):
  path = tmp_path / 'file'
  path.write_bytes(b'abc')
  digest = hashlib.new(algorithm, b'abc').hexdigest()
  raw_formats.check_digest(path, f'{algorithm}:{digest}')
  path.write_bytes(b'abd')
  with pytest.raises(ValueError, match=f'3 bytes.*official file has {digest}'):
    raw_formats.check_digest(path, f'{algorithm}:{digest}')


def test_what_is_no_file_is_refused(tmp_path):
  (tmp_path / 'folder').mkdir()
  os.mkfifo(tmp_path / 'pipe')
  (tmp_path / 'zeros').symlink_to('/dev/zero')
  for name in ('folder', 'pipe', 'zeros'):
    for read in (
        raw_formats.read_idx,
        raw_formats.read_svhn_mat,
        lambda path: raw_formats.read_cifar_binary(path, 1),
        lambda path: raw_formats.check_digest(path, 'md5:00'),
    ):
      with pytest.raises(ValueError, match=f'{name}: expected a file, got a f'):
        read(tmp_path / name)


def test_files_beyond_every_data_set_are_refused(tmp_path):
  path = tmp_path / 'sparse.bin'
  with open(path, 'wb') as file:
    file.truncate(1 << 40)
  with pytest.raises(ValueError, match='expected at most 2,147,483,648 bytes'):
    raw_formats.read_cifar_binary(path, 1)


def test_an_image_of_too_many_pixels_is_refused(tmp_path):
  write_images(tmp_path, {'cat': random_bytes(1, 4, 4, 3)})
  path = tmp_path / 'cat' / '0.png'
  data = bytearray(path.read_bytes())
  data[16:24] = struct.pack('>II', 20_000, 20_000)
  data[29:33] = struct.pack('>I', zlib.crc32(data[12:29]))
  path.write_bytes(data)
  with pytest.raises(ValueError, match=r'0\.png: not a readable image') as e:
    raw_formats.read_image_folders(tmp_path, ('cat',), (4, 4))
  assert '\n' not in str(e.value)
