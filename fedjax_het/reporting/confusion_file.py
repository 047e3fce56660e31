"""confusion.npz of a workdir: the last evaluation's confusion matrices."""

from collections.abc import Mapping
import io
import pathlib
from typing import NamedTuple
import zipfile

import numpy as np

from fedjax_het.files import read_bytes, write_atomically

_NAME = 'confusion.npz'


class Confusion(NamedTuple):
  """Confusion matrices of an evaluation on the whole test set.

  Attributes:
    round_num: Rounds done.
    client_id: {group: [E] int32}, the clients of the evaluated models; the
      group's first client if one model serves the whole group.
    counts: {group: [E, C, C] int32}, test examples of each model by true class
      (rows) and predicted class (columns).
  """

  round_num: int
  client_id: dict[str, np.ndarray]
  counts: dict[str, np.ndarray]


def write_confusion(
    folder: pathlib.Path,
    round_num: int,
    client_id: Mapping[str, np.ndarray],
    counts: Mapping[str, np.ndarray],
) -> None:
  """Writes confusion.npz and replaces an earlier one; see `Confusion`.

  Args:
    folder: The workdir.
    round_num: Rounds done.
    client_id: {group: [E]}.
    counts: {group: [E, C, C]} whole numbers.

  Raises:
    OSError: If it cannot be written.
  """
  arrays = dict(round=np.int32(round_num))
  for group, matrices in counts.items():
    arrays[f'counts/{group}'] = np.asarray(matrices, np.int32)
    arrays[f'client_id/{group}'] = np.asarray(client_id[group], np.int32)
  contents = io.BytesIO()
  np.savez_compressed(contents, **arrays)
  write_atomically(folder / _NAME, contents.getvalue())


def read_confusion(folder: pathlib.Path) -> Confusion | None:
  """The contents of confusion.npz.

  Args:
    folder: The workdir.

  Returns:
    The matrices; None if there is no such file, as for runs of older versions
    and tasks without classes.

  Raises:
    ValueError: If the file is damaged.
  """
  path = folder / _NAME
  try:
    with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as arrays:
      groups = [name[7:] for name in arrays if name.startswith('counts/')]
      found = Confusion(
          int(arrays['round']),
          {group: arrays[f'client_id/{group}'] for group in groups},
          {group: arrays[f'counts/{group}'] for group in groups},
      )
  except FileNotFoundError:
    return None
  except (ValueError, LookupError, TypeError, zipfile.BadZipFile, OSError,
          EOFError) as e:  # fmt: skip
    raise _damaged(path, type(e).__name__) from e
  for group, counts in found.counts.items():
    size = len(np.atleast_1d(found.client_id[group]))
    if counts.ndim != 3 or counts.shape != (size, *counts.shape[2:] * 2):
      raise _damaged(path, f'counts of shape {counts.shape}')
  return found


def _damaged(path: pathlib.Path, why: str) -> ValueError:
  return ValueError(
      f'{path} is damaged ({why}); delete it: the report does without.'
  )
