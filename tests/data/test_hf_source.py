"""Folders saved by Hugging Face `datasets`."""

import numpy as np
import pytest

from fedjax_het.data import sources
from tests.test_docs import ROOT, examples, execute

PAGE = ROOT / 'docs' / 'your_data.md'


def test_what_is_no_saved_data_set_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError, match='hf needs data_dir'):
    sources.load('hf')
  with pytest.raises(FileNotFoundError, match=r'no/where: no such folder'):
    sources.load('hf', '/no/where')
  with pytest.raises(FileNotFoundError, match='holds no DatasetDict; write'):
    sources.load('hf', tmp_path)
  with pytest.raises(ValueError, match="Unknown data set 'hf:'"):
    sources.load('hf:', tmp_path)


class TestReading:

  @pytest.fixture
  def hf(self):
    return pytest.importorskip('datasets')

  def save(self, hf, folder, kinds=None, **columns):
    whole = hf.Dataset.from_dict(columns, features=kinds)
    saved = hf.DatasetDict(train=whole, test=whole.select(range(2)))
    saved.save_to_disk(str(folder))
    return folder

  def images(self, hf, sizes=((4, 5),) * 3):
    image = pytest.importorskip('PIL.Image')
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, (*s, 3), np.uint8) for s in sizes]
    features = hf.Features(
        img=hf.Image(), fine=hf.ClassLabel(names=['a', 'b', 'c', 'd']),
        coarse=hf.ClassLabel(names=['e', 'f']),
    )  # fmt: skip
    columns = dict(
        img=[*map(image.fromarray, arrays)], fine=[1, 0, 2], coarse=[0, 1, 1]
    )
    return arrays, dict(kinds=features, **columns)

  def test_images_and_a_named_label(self, hf, tmp_path):
    arrays, columns = self.images(hf)
    self.save(hf, tmp_path, **columns)
    data = sources.load('hf:img,fine', tmp_path)
    np.testing.assert_array_equal(data.train_images, np.stack(arrays))
    assert data.train_labels.tolist() == [1, 0, 2] and data.num_classes == 4
    assert len(data.test_labels) == 2
    for name, message in (
        ('hf', 'which column holds the label.*are img, fine, coarse'),
        ('hf:img', 'must name two columns'),
        ('hf:img,fin', "Unknown column 'fin'; did you mean 'fine'"),
        ('hf:fine,img', 'img of train must be'),
    ):
      with pytest.raises(ValueError, match=message) as error:
        sources.load(name, tmp_path)
      assert str(error.value).startswith(f'{tmp_path}: ')
      assert '\n' not in str(error.value)

  def test_images_of_several_sizes_are_resized(self, hf, tmp_path):
    _, columns = self.images(hf, ((4, 5), (4, 5), (6, 5)))
    self.save(hf, tmp_path, **columns)
    with pytest.raises(ValueError, match='img 2 has 6 x 5 pixels, but img 0 h'):
      sources.load('hf:img,fine', tmp_path)
    data = sources.load('hf:img,fine', tmp_path, image_size=3)
    assert data.train_images.shape == (3, 3, 3, 3)

  def test_token_ids(self, hf, tmp_path):
    ids = [[1, 2], [3, 4], [5, 6]]
    columns = dict(input_ids=ids, label=[0, 1, 1], text=['x'] * 3)
    self.save(hf, tmp_path / 'a', **columns)
    data = sources.load('hf', tmp_path / 'a')
    assert data.train_images.dtype == np.int32 and data.num_classes == 2
    assert data.train_images.tolist() == ids
    ids[1] = [3]
    self.save(hf, tmp_path / 'b', input_ids=ids, label=[0, 1, 1])
    with pytest.raises(ValueError, match='rows of input_ids differ in length'):
      sources.load('hf', tmp_path / 'b')

  def test_numbers_keep_their_type(self, hf, tmp_path):
    images = np.arange(3 * 8, dtype=np.uint8).reshape(3, 2, 4)
    for i, kind in enumerate((
        hf.Array2D((2, 4), 'uint8'),
        hf.Sequence(hf.Sequence(hf.Value('uint8'))),
    )):
      kinds = hf.Features(image=kind, label=hf.Value('int64'))
      folder = self.save(
          hf, tmp_path / str(i), kinds=kinds, image=images.tolist(),
          label=[0, 1, 1],
      )  # fmt: skip
      data = sources.load('hf', folder)
      assert data.train_images.dtype == np.uint8
      np.testing.assert_array_equal(data.train_images[..., 0], images)

  def test_missing_numbers_are_refused(self, hf, tmp_path):
    kinds = hf.Features(
        features=hf.Sequence(hf.Value('float32')), label=hf.Value('uint8')
    )
    columns = dict(features=[[1.0]] * 3, label=[0, None, 1])
    folder = self.save(hf, tmp_path, kinds=kinds, **columns)
    with pytest.raises(ValueError, match='label of train must be finite'):
      sources.load('hf', folder)

  def test_splits_that_do_not_fit_are_refused(self, hf, tmp_path):
    def split(names, features=((1.0,), (2.0,))):
      columns = dict(features=features, label=[0] * len(features))
      kinds = hf.Features(
          features=hf.Sequence(hf.Value('float32')),
          label=hf.ClassLabel(names=names),
      )
      return hf.Dataset.from_dict(columns, features=kinds)

    train = split(['cat', 'dog'])
    for i, (test, message) in enumerate((
        (split(['dog', 'cat']), "class 0 of label is 'dog' in test, but 'cat'"),
        (train.remove_columns('label'), "Unknown column of test 'label'"),
        (split(['cat', 'dog'], ()), 'a split has no example'),
    )):
      folder = tmp_path / str(i)
      hf.DatasetDict(train=train, test=test).save_to_disk(str(folder))
      with pytest.raises(ValueError, match=message) as error:
        sources.load('hf', folder)
      assert str(error.value).startswith(f'{folder}: ')
    _, columns = self.images(hf)
    columns['img'][1] = None
    folder = self.save(hf, tmp_path / 'none', **columns)
    with pytest.raises(ValueError, match='img 1: not a readable image'):
      sources.load('hf:img,fine', folder)

  def test_missing_splits_and_damage(self, hf, tmp_path):
    whole = hf.Dataset.from_dict(dict(features=[[1.0]], label=[0]))
    hf.DatasetDict(train=whole).save_to_disk(str(tmp_path / 'a'))
    with pytest.raises(ValueError, match="Unknown split 'test'"):
      sources.load('hf', tmp_path / 'a')
    columns = dict(features=[[1.0]] * 3, label=[0, 1, 0])
    folder = self.save(hf, tmp_path / 'b', **columns)
    (file,) = (folder / 'train').glob('*.arrow')
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match='b: ') as error:
      sources.load('hf', folder)
    assert '\n' not in str(error.value)

  def test_the_example_of_the_page(self, hf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    execute(examples(PAGE)['hf'])
    assert sources.load('hf', 'saved').train_images.shape == (160, 2)
