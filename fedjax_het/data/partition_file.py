"""Reads a user's partition file: the example numbers of each client.

  JSON   [[0, 5, 7], [1, 2], ...], or {"train": [...], "test": [...]}
  .npz   arrays train_0, train_1, ... and optionally test_0, test_1, ...

`train` holds the numbers of each client's training examples. The optional
`test` holds those of its own test examples, for personalised evaluation.
"""

import json
import pathlib
import re
from typing import NamedTuple

import numpy as np

from fedjax_het.data import arrays, raw_formats
from fedjax_het.files import read_bytes
from fedjax_het.names import shown


class Parts(NamedTuple):
  """The contents of a partition file.

  Attributes:
    train: One list of training examples per client.
    test: One list of test examples per client; None if the file has none.
  """

  train: list
  test: list | None


def by_file(labels, num_clients, *, seed, file: str):
  """Reads the clients' training examples from a file.

  Args:
    labels: [n] integers.
    num_clients: Number of clients, as many as the file lists.
    seed: Not used.
    file: A JSON or .npz file, see the module docstring.

  Returns:
    `num_clients` disjoint, non-empty int32 arrays of example indices, in the
    order of the file.

  Raises:
    FileNotFoundError: If there is no such file.
    ValueError: If it cannot be read, lists another number of clients, or an
      index is wrong or appears twice.
  """
  del seed
  listed = read(file).train
  try:
    _check_number(listed, num_clients)
    parts = arrays.parts(listed, len(labels))
    _check_owners(parts, len(labels))
  except ValueError as e:
    raise ValueError(f'{file}: {e}') from e
  return parts


def own_tests(file: str, num_clients: int, num_test: int):
  """Reads the clients' own test examples from a file.

  Args:
    file: See `by_file`.
    num_clients: Number of clients, as many as the file lists.
    num_test: Examples of the test set.

  Returns:
    One int32 array of test examples per client, which may be empty; two clients
    may share examples. None if the file has no `test`.

  Raises:
    FileNotFoundError: If there is no such file.
    ValueError: As `by_file`.
  """
  listed = read(file).test
  if listed is None:
    return None
  try:
    _check_number(listed, num_clients)
    parts = [
        arrays.indices(part, num_test, f'test of client {k}')
        for k, part in enumerate(listed)
    ]
    for k, part in enumerate(parts):
      if len(np.unique(part)) < len(part):
        raise ValueError(f'test of client {k} names an example twice.')
    if not any(map(len, parts)):
      raise ValueError('test names no example.')
  except ValueError as e:
    raise ValueError(f'{file}: {e}') from e
  return parts


def _check_number(listed, num_clients: int) -> None:
  if len(listed) != num_clients:
    raise ValueError(
        f'it lists {len(listed)} clients, but the groups hold {num_clients}.'
    )


def _check_owners(parts, num: int) -> None:
  """Raises ValueError if an example is listed more than once."""
  owner = np.full(num, -1)
  for client, part in enumerate(parts):
    values, counts = np.unique(part, return_counts=True)
    if counts.max() > 1:
      example = values[counts.argmax()]
      raise ValueError(f'client {client} names example {example} twice.')
    taken = part[owner[part] >= 0]
    if len(taken):
      raise ValueError(
          f'example {taken[0]} belongs to clients {owner[taken[0]]} and '
          f'{client}; each example has one owner.'
      )
    owner[part] = client


def read(file: str) -> Parts:
  """Reads a partition file; the indices are not checked.

  Args:
    file: Its path; a JSON file unless it ends in .npz.

  Returns:
    Its lists.

  Raises:
    FileNotFoundError: If there is no such file.
    ValueError: If it is not a partition file.
  """
  path = pathlib.Path(file).expanduser()
  try:
    raw_formats.check_file(path)
  except FileNotFoundError as e:
    raise FileNotFoundError(f'{file}: no such partition file.') from e
  return _read_npz(path) if path.suffix == '.npz' else _read_json(path)


_FORM = (
    '[[0, 5], [1, 2], ...] or {"train": [[0, 5], [1, 2], ...], "test": [...]}'
)


def _read_json(path: pathlib.Path) -> Parts:
  try:
    found = json.loads(read_bytes(path))
  except (ValueError, RecursionError) as e:
    raise ValueError(f'{path} is no JSON file ({shown(str(e))}).') from e
  if isinstance(found, list):
    found = {'train': found}
  if not isinstance(found, dict) or not {'train'} <= {*found} <= {
      'train', 'test'
  }:
    raise ValueError(f'{path} must hold {_FORM}.')
  for name, lists in found.items():
    if not isinstance(lists, list) or not all(
        isinstance(part, list) for part in lists
    ):
      raise ValueError(f'{path}: {name} must be a list of lists; {_FORM}.')
  return Parts(found['train'], found.get('test'))


def _read_npz(path: pathlib.Path) -> Parts:
  lists = {'train': {}, 'test': {}}
  for name, array in raw_formats.read_npz(path).items():
    match = re.fullmatch(r'(train|test)_(\d+)', name)
    if not match:
      raise ValueError(
          f'{path} holds {name!r}; its arrays must be called train_0, train_1, '
          '... and test_0, test_1, ...'
      )
    lists[match[1]][int(match[2])] = array
  for split, parts in lists.items():
    lacking = sorted({*range(len(parts))} - {*parts})
    if lacking:
      raise ValueError(f'{path} lacks {split}_{lacking[0]}.')
  train, test = (
      [parts[k] for k in range(len(parts))] for parts in lists.values()
  )
  return Parts(train, test or None)
