"""Partitions by file are read as written, or refused in one line."""

import json

import numpy as np
import pytest

from fedjax_het.data import partition_file
from fedjax_het.data.partition import partition

LABELS = np.arange(10) % 3
TRAIN, TEST = [[9, 0, 4], [1], [2, 3]], [[0, 1], [], [1, 3]]


def save(path, train=TRAIN, test=None):
  if path.suffix == '.json':
    path.write_text(json.dumps(train if test is None else dict(
        train=train, test=test
    )))  # fmt: skip
  else:
    lists = dict(train=train, test=test or [])
    np.savez(path, **{
        f'{split}_{k}': np.array(part, int)
        for split, parts in lists.items()
        for k, part in enumerate(parts)
    })  # fmt: skip
  return str(path)


@pytest.mark.parametrize('name', ['a.json', 'a.npz'])
@pytest.mark.parametrize('test', [None, TEST])
def test_clients_get_what_the_file_lists_in_its_order(tmp_path, name, test):
  file = save(tmp_path / name, test=test)
  for seed in (0, 5):
    parts = partition(LABELS, 3, name='file', seed=seed, file=file)
    assert [part.tolist() for part in parts] == TRAIN
    assert all(part.dtype == np.int32 for part in parts)
  own = partition_file.own_tests(file, 3, 4)
  if test is None:
    assert own is None
  else:
    assert [part.tolist() for part in own] == TEST
    assert all(part.dtype == np.int32 for part in own)


@pytest.mark.parametrize(
    ('train', 'message'),
    [
        (TRAIN[:2], 'it lists 2 clients, but the groups hold 3.'),
        ([[0], [], [1]], 'Client 1 has no example'),
        ([[0], [10], [1]], 'client 1 names example 10, but there are 10 ex'),
        ([[0], [-1], [1]], 'client 1 names example -1'),
        ([[0, 1, 0], [2], [3]], 'client 0 names example 0 twice'),
        ([[0, 1], [2], [3, 1]], 'example 1 belongs to clients 0 and 2; each'),
        ([[0.5], [1], [2]], 'client 0 must be a list of example numbers'),
    ],
)
def test_wrong_lists_are_refused_with_the_file(tmp_path, train, message):
  file = save(tmp_path / 'a.json', train)
  with pytest.raises(ValueError) as error:
    partition(LABELS, 3, name='file', seed=0, file=file)
  assert str(error.value).startswith(f'{file}: ')
  assert message in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('test', 'message'),
    [
        (TEST[:2], 'it lists 2 clients'),
        ([[0], [], [4]], 'test of client 2 names example 4, but there are 4'),
        ([[0, 0], [], []], 'test of client 0 names an example twice'),
        ([[], [], []], 'test names no example'),
    ],
)
def test_wrong_test_lists_are_refused(tmp_path, test, message):
  file = save(tmp_path / 'a.json', test=test)
  with pytest.raises(ValueError) as error:
    partition_file.own_tests(file, 3, 4)
  assert str(error.value).startswith(f'{file}: ')
  assert message in str(error.value)


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('[[0, 1', 'is no JSON file'),
        ('3', 'must hold'),
        ('{"test": [[0]]}', 'must hold'),
        ('{"train": [[0]], "tests": [[0]]}', 'must hold'),
        ('[0, 1, 2]', 'train must be a list of lists'),
        ('{"train": [[0]], "test": 4}', 'test must be a list of lists'),
    ],
)
def test_wrong_json_is_refused(tmp_path, text, message):
  path = tmp_path / 'a.json'
  path.write_text(text)
  with pytest.raises(ValueError) as error:
    partition_file.read(str(path))
  assert str(path) in str(error.value) and message in str(error.value)
  assert '\n' not in str(error.value)


def test_wrong_archives_are_refused(tmp_path):
  path = tmp_path / 'a.npz'
  for arrays, message in (
      (dict(train_0=[0], train_2=[1]), 'lacks train_1'),
      (dict(train_0=[0], test_1=[1]), 'lacks test_0'),
      (dict(train_0=[0], client_1=[1]), "holds 'client_1'"),
  ):
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message):
      partition_file.read(str(path))
  with pytest.raises(ValueError, match=r'a\.npz is no \.npz file'):
    np.savez(path, train_0=np.array([{}]))
    partition_file.read(str(path))
  path.write_bytes(b'nothing')
  with pytest.raises(ValueError, match=r'a\.npz is no \.npz file'):
    partition_file.read(str(path))
  with pytest.raises(FileNotFoundError, match=r'b\.json: no such partition'):
    partition_file.read(str(tmp_path / 'b.json'))


def test_the_option_is_needed():
  with pytest.raises(ValueError, match="'file' needs the option 'file'"):
    partition(LABELS, 3, name='file', seed=0)
