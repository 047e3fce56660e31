"""Users' files: .npz, folders of images, and tfds builders by name."""

import numpy as np
import pytest

from fedjax_het.data import own_files, sources, tfds_source
from fedjax_het.data.raw_formats import Splits


def arrays(dtype=np.float32, shape=(3,), num=7):
  rng = np.random.default_rng(0)
  x = (200 * rng.random((num, *shape))).astype(dtype)
  return dict(
      x_train=x, y_train=np.arange(num) % 4, x_test=x[:3], y_test=[0, 1, 2]
  )


def save(path, **changes):
  np.savez(path, **{**arrays(), **changes})
  return path


def damage(path):
  """Writes a compressed file whose data cannot be decompressed."""
  np.savez_compressed(path, **arrays())
  data = bytearray(path.read_bytes())
  data[60:90] = bytes(byte ^ 0x5A for byte in data[60:90])
  path.write_bytes(data)


def test_an_npz_file_is_read_as_it_is(tmp_path):
  path = save(tmp_path / 'mine.npz')
  data = sources.load('npz', data_file=path)
  want = arrays()
  assert data.name == 'npz' and data.num_classes == 4
  np.testing.assert_array_equal(data.train_images, want['x_train'])
  assert data.train_images.dtype == np.float32
  assert data.train_labels.dtype == data.test_labels.dtype == np.int32
  np.testing.assert_array_equal(data.test_labels, want['y_test'])
  np.testing.assert_allclose(data.mean, want['x_train'].mean(0), rtol=1e-5)


def test_grey_images_get_a_channel_and_others_stay(tmp_path):
  for name, dtype, shape, want in (
      ('grey', np.uint8, (5, 6), (5, 6, 1)),
      ('colour', np.uint8, (5, 6, 3), (5, 6, 3)),
      ('series', np.float32, (5, 6), (5, 6)),
      ('words', np.int64, (9,), (9,)),
  ):
    path = save(tmp_path / f'{name}.npz', **arrays(dtype, shape))
    data = sources.load('npz', data_file=str(path))
    assert data.train_images.shape == (7, *want)
    assert data.test_images.shape == (3, *want)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(y_train=[0, 1]), 'y_train holds 2 entries for 7 examples'),
        (dict(y_test=[0, -2, 1]), 'y_test must be classes from 0 on, got -2'),
        (dict(y_test=[0.5, 1, 2]), 'y_test must be [N] integers'),
        (dict(y_train=np.zeros((7, 2), int)), 'y_train must be [N] integers'),
        (dict(y_train=np.zeros((7, 1), int)), 'int32; save y.ravel()'),
        (dict(y_train=np.eye(7, dtype=int)), 'int32; save y.argmax(1)'),
        (dict(y_train=np.zeros(7)), 'float32; save y.astype(int)'),
        (dict(x_test=np.zeros((3, 4), np.float32)), 'x_train holds (3,) float'),
        (dict(x_test=np.zeros((3, 3), np.uint8)), 'one shape and dtype'),
        (dict(x_train=np.full((7, 3), np.nan)), 'x_train must be finite'),
        (dict(x_train=np.zeros((7, 0))), 'at least one number an example'),
        (dict(x_test=np.array(['a', 'b', 'c'])), 'floats, integers or bools'),
    ],
)
def test_wrong_arrays_are_refused_by_name(tmp_path, changes, message):
  path = save(tmp_path / 'mine.npz', **changes)
  with pytest.raises(ValueError) as error:
    sources.load('npz', data_file=path)
  assert str(error.value).startswith(f'{path}: ')
  assert message in str(error.value) and '\n' not in str(error.value)


def test_wrong_files_are_refused_by_name(tmp_path):
  with pytest.raises(FileNotFoundError, match='npz needs data_file'):
    sources.load('npz')
  with pytest.raises(FileNotFoundError, match=r'none\.npz: no such file'):
    sources.load('npz', data_file=tmp_path / 'none.npz')
  np.savez(tmp_path / 'a.npz', x_train=np.zeros(3))
  with pytest.raises(ValueError, match='lacks y_train, x_test, y_test; it hol'):
    sources.load('npz', data_file=tmp_path / 'a.npz')
  (tmp_path / 'b.npz').write_bytes(b'PK\x03\x04nothing of the kind')
  np.save(tmp_path / 'c.npz.npy', np.zeros(3))
  np.savez(tmp_path / 'd.npz', **{**arrays(), 'x_train': np.array([{}] * 7)})
  damage(tmp_path / 'e.npz')
  for name in ('b.npz', 'c.npz.npy', 'd.npz', 'e.npz'):
    with pytest.raises(ValueError) as error:
      sources.load('npz', data_file=tmp_path / name)
    assert name in str(error.value) and '\n' not in str(error.value)


def write_images(folder, sizes=((4, 5),), mode='RGB', names=('cat', 'dog')):
  """`train` and `test` of two classes; returns the arrays by split."""
  image_module = pytest.importorskip('PIL.Image')
  rng = np.random.default_rng(0)
  found = {}
  for split, num in (('train', 3), ('test', 2)):
    for name in names:
      place = folder / split / name
      place.mkdir(parents=True)
      for i in range(num):
        height, width = sizes[i % len(sizes)]
        shape = (height, width, 3) if mode == 'RGB' else (height, width)
        pixels = rng.integers(0, 256, shape, np.uint8)
        image_module.fromarray(pixels).save(place / f'{i}.png')
        found.setdefault(split, []).append(pixels)
  return found


def test_folders_of_images_are_classes(tmp_path):
  found = write_images(tmp_path)
  (tmp_path / 'train' / 'cat' / 'notes.txt').write_text('no image')
  data = sources.load('image_folder', tmp_path)
  np.testing.assert_array_equal(data.train_images, np.stack(found['train']))
  np.testing.assert_array_equal(data.test_images, np.stack(found['test']))
  assert data.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
  assert data.test_labels.tolist() == [0, 0, 1, 1]
  assert data.num_classes == 2 and data.train_images.dtype == np.uint8


def test_grey_images_have_one_channel(tmp_path):
  found = write_images(tmp_path, mode='L')
  data = sources.load('image_folder', tmp_path)
  assert data.train_images.shape == (6, 4, 5, 1)
  np.testing.assert_array_equal(
      data.train_images[..., 0], np.stack(found['train'])
  )


def test_images_of_any_ending_of_pillow(tmp_path):
  image_module = pytest.importorskip('PIL.Image')
  write_images(tmp_path)
  for i, ending in enumerate(('tif', 'jfif')):
    image = image_module.fromarray(np.full((4, 5, 3), i, np.uint8))
    kind = 'TIFF' if ending == 'tif' else 'JPEG'
    image.save(tmp_path / 'train' / 'dog' / f'x.{ending}', kind)
  data = sources.load('image_folder', tmp_path)
  assert data.train_labels.tolist() == [0] * 3 + [1] * 5


def test_images_of_16_bits_are_refused(tmp_path):
  image_module = pytest.importorskip('PIL.Image')
  write_images(tmp_path, mode='L')
  deep = np.full((4, 5), 30_000, np.uint16)
  image_module.fromarray(deep).save(tmp_path / 'train' / 'dog' / '1.png')
  with pytest.raises(ValueError, match=r'1\.png: .*more than 8 bits \(mode I'):
    sources.load('image_folder', tmp_path)


def test_images_of_several_sizes_need_image_size(tmp_path):
  write_images(tmp_path, sizes=((4, 5), (7, 7)))
  with pytest.raises(ValueError, match=r'1\.png has 7 x 7 pixels.*image_size'):
    sources.load('image_folder', tmp_path)
  data = sources.load('image_folder', tmp_path, image_size=6)
  assert data.train_images.shape == (6, 6, 6, 3)


def test_images_are_resized_bilinearly():
  image_module = pytest.importorskip('PIL.Image')
  board = image_module.fromarray(np.array([[0, 200], [200, 0]], np.uint8))
  pixels = own_files.pixels(board, 4)
  assert pixels[0, 0] == 0 and pixels[0, 3] == 200
  assert {0, 200} < set(np.unique(pixels))  # Others lie between.


def test_wrong_image_folders_are_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match='image_folder needs data_dir'):
    sources.load('image_folder')
  with pytest.raises(FileNotFoundError, match='has no folder train'):
    sources.load('image_folder', tmp_path)
  write_images(tmp_path)
  (tmp_path / 'test' / 'dogs').mkdir()
  with pytest.raises(ValueError, match=r"dogs: train has no such.*mean 'dog'"):
    sources.load('image_folder', tmp_path)
  (tmp_path / 'test' / 'dogs').rmdir()
  (tmp_path / 'train' / 'dog' / '9.png').write_bytes(b'no image')
  with pytest.raises(ValueError, match=r'9\.png: not a readable image'):
    sources.load('image_folder', tmp_path)
  # A hidden file is none of the images.
  (tmp_path / 'train' / 'dog' / '9.png').rename(
      tmp_path / 'train' / 'dog' / '._9.png'
  )
  sources.load('image_folder', tmp_path)
  (tmp_path / 'train' / 'dog' / 'more').mkdir()
  with pytest.raises(ValueError, match='more: a folder inside a class'):
    sources.load('image_folder', tmp_path)
  (tmp_path / 'train' / 'dog' / 'more').rmdir()
  for path in (tmp_path / 'train' / 'dog').iterdir():
    path.unlink()
  with pytest.raises(ValueError, match='dog has no image'):
    sources.load('image_folder', tmp_path)


def test_a_prepared_builder_is_found_by_its_name(tmp_path):
  pytest.importorskip('tensorflow_datasets')
  pytest.importorskip('array_record')
  rng = np.random.default_rng(0)
  splits = Splits(
      rng.integers(0, 256, (9, 4, 6, 3), np.uint8),
      np.arange(9, dtype=np.int32) % 3,
      rng.integers(0, 256, (5, 4, 6, 3), np.uint8),
      np.arange(5, dtype=np.int32) % 3,
  )
  tfds_source.write_prepared(splits, 'my_flowers', tmp_path)
  data = sources.load('tfds:my_flowers', tmp_path)
  for got, want in zip(data[1:5], splits, strict=True):
    np.testing.assert_array_equal(got, want)
  assert data.num_classes == 3 and data.name == 'tfds:my_flowers'
  with pytest.raises(FileNotFoundError, match=r'roses is not prepared.*tfds'):
    sources.load('tfds:roses', tmp_path)
  with pytest.raises(FileNotFoundError, match='tfds:roses needs data_dir'):
    sources.load('tfds:roses')


def test_names():
  for name in (*own_files.NAMES, 'tfds:mnist', 'tfds:a/b', 'digits'):
    sources.check_name(name)
  for name in ('tfds:', 'image_folders', 'tfd:mnist', None, 3):
    with pytest.raises(ValueError, match='Unknown data set'):
      sources.check_name(name)
