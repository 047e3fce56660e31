"""Atomic writes of files, and reads with one-line errors."""

import contextlib
import json
import os
import pathlib
import re
import stat
from typing import Any

import numpy as np


def check_local(path: str | os.PathLike, name: str) -> None:
  """Raises ValueError for an address such as gs://bucket/folder.

  Args:
    path: The path of a file or folder.
    name: The option's name, for the message.

  Raises:
    ValueError: If the path is such an address.
  """
  text = os.fspath(path)
  if isinstance(text, str) and re.match(r'[A-Za-z]\w+:/', text):
    raise ValueError(
        f'{name}={text}: cloud folders are not supported; mount it, or copy a '
        'local folder there afterwards.'
    )


def as_json(config: Any) -> dict[str, Any]:
  """A ConfigDict as config.json stores it: tuples as lists, no NumPy numbers.

  Args:
    config: The config.

  Returns:
    The entries as plain values.

  Raises:
    TypeError: If an entry is of another type, such as an array.
  """

  def scalar(value):
    if isinstance(value, np.generic):
      return value.item()
    raise TypeError(f'A config cannot hold {value!r}.')

  return json.loads(json.dumps(config.to_dict(), default=scalar))


def write_atomically(path: pathlib.Path, contents: str | bytes) -> None:
  """Writes a file so that a kill leaves either the old or the new one intact.

  Args:
    path: The file.
    contents: The new contents; text is encoded as UTF-8.

  Raises:
    OSError: If it cannot be written; the old file is then intact.
  """
  if isinstance(contents, str):
    # Characters that are not UTF-8, such as in a folder's name, are escaped.
    contents = contents.encode(errors='backslashreplace')
  # A name for this process alone, since two sweeps may write the same table.
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  try:
    with open(temporary, 'wb') as file:
      file.write(contents)
      file.flush()
      os.fsync(file.fileno())
    temporary.replace(path)
  except OSError as e:
    with contextlib.suppress(OSError):
      temporary.unlink(missing_ok=True)
    raise OSError(e.errno, f'{e.strerror} while writing {path}') from e


def set_aside(path: pathlib.Path) -> pathlib.Path:
  """Renames a damaged path to damaged-<name>, so that nothing is lost.

  Args:
    path: A file or folder.

  Returns:
    Its new path, at which nothing was before.
  """
  new, count = path.with_name(f'damaged-{path.name}'), 1
  while os.path.lexists(new):
    count += 1
    new = path.with_name(f'damaged-{path.name}-{count}')
  path.rename(new)
  return new


def read_bytes(path: pathlib.Path) -> bytes:
  """The contents of a regular file; others, such as pipes, are not opened.

  Args:
    path: The file.

  Returns:
    Its bytes.

  Raises:
    FileNotFoundError: If the path does not exist.
    ValueError: If it is not a regular file or cannot be read; the message is
      one line that names it.
  """
  try:
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
      what = 'a folder' if stat.S_ISDIR(mode) else 'something else'
      raise ValueError(f'{path} is {what}, not a file; move it away.')
    return path.read_bytes()
  except FileNotFoundError:
    if path.is_symlink():
      raise ValueError(f'{path} is a link to nothing.') from None
    raise
  except OSError as e:
    raise ValueError(f'{path} cannot be read: {e.strerror}.') from e


def read_json(path: pathlib.Path, advice: str) -> dict[str, Any]:
  """The object that a JSON file holds.

  Args:
    path: The file.
    advice: What to do if it is damaged, for the error's text.

  Returns:
    The object.

  Raises:
    FileNotFoundError: If the path does not exist.
    ValueError: If it does not hold exactly one object, in UTF-8; the message is
      one line that names it.
  """
  contents = read_bytes(path)
  try:
    value = json.loads(contents.decode())
  except UnicodeDecodeError as e:
    reason = f'byte {e.start} is not UTF-8'
  except RecursionError:
    reason = 'it is nested too deep'
  except ValueError as e:
    reason = str(e)
  else:
    if isinstance(value, dict):
      return value
    reason = 'it holds no JSON object'
  raise ValueError(f'{path} is damaged ({reason}); {advice}.')
