"""Files of a run: config.json, facts.json and metrics.jsonl."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import itertools
import json
import operator
import pathlib
from typing import Any

from fedjax_het.files import read_bytes, read_json
from fedjax_het.renamed import with_moved_entries

Row = dict[str, Any]


@contextlib.contextmanager
def fitting(what: Any) -> Iterator[None]:
  """Turns errors on unexpected contents into a ValueError with one line.

  Valid JSON can lack any entry or hold another type; checking each entry would
  take more code than the report.

  Args:
    what: Owner of the files, for the error's text.

  Yields:
    Nothing.

  Raises:
    ValueError: If an entry is missing or of another type.
  """
  try:
    yield
  except ImportError:
    raise
  except (
      ArithmeticError,
      AttributeError,
      LookupError,
      MemoryError,
      RecursionError,
      TypeError,
      ValueError,
  ) as e:
    text = ' '.join(str(e).split())[:80]
    raise ValueError(
        f'The files of {what} do not fit together ({type(e).__name__}: {text}).'
    ) from e


def short_names(folders: Sequence[pathlib.Path]) -> list[str]:
  """Folders without the path that all of them share.

  Args:
    folders: Workdirs.

  Returns:
    A name for each, at least its own.
  """
  parts = [folder.absolute().parts for folder in folders]
  levels = zip(*(found[:-1] for found in parts), strict=False)
  differ = (len(set(level)) > 1 for level in levels)
  shared = len([*itertools.takewhile(operator.not_, differ)])
  return ['/'.join(found[shared:]) for found in parts]


def early_stopping(config: Mapping[str, Any]) -> dict[str, Any]:
  """The entries of `callbacks` that decide when a run ends.

  Args:
    config: A run's config, as nested dicts.

  Returns:
    {entry: value}; {} without early stopping.
  """
  callbacks = config.get('callbacks')
  if not isinstance(callbacks, dict) or callbacks.get('patience') is None:
    return {}
  return {name: callbacks.get(name) for name in ('patience', 'metric', 'mode')}


def read_config(folder: pathlib.Path) -> dict[str, Any]:
  """The config of the run that a workdir holds, as nested dicts.

  Args:
    folder: The workdir.

  Returns:
    The contents of config.json.

  Raises:
    FileNotFoundError: If there is none.
    ValueError: If it does not hold a JSON object.
  """
  try:
    stored = read_json(
        folder / 'config.json', 'restore it or choose another workdir'
    )
  except FileNotFoundError:
    raise FileNotFoundError(
        f'{folder} is not a workdir: it has no config.json.'
    ) from None
  with fitting(folder):
    return with_moved_entries(stored)


def read_run(
    folder: pathlib.Path,
) -> tuple[dict[str, Any], dict[str, Any], list[Row]]:
  """Reads the config, the facts and the rows of a workdir.

  Args:
    folder: The workdir.

  Returns:
    Its config and facts as nested dicts, and its rows.

  Raises:
    FileNotFoundError: If it is not a workdir, or has no evaluation yet.
    ValueError: If a file is damaged.
  """
  config = read_config(folder)
  try:
    facts = read_json(
        folder / 'facts.json', 'the command that ran it measures them again'
    )
  except FileNotFoundError:
    raise FileNotFoundError(
        f'{folder} has no facts.json: its run has not begun to train.'
    ) from None
  rows = read_rows(folder / 'metrics.jsonl')
  if not any(row['split'] == 'test' for row in rows):
    raise FileNotFoundError(f'{folder} holds no evaluation yet.')
  return config, facts, rows


def read_rows(path: pathlib.Path) -> list[Row]:
  """All rows of a metrics file, without a torn last line.

  Args:
    path: metrics.jsonl; it may be absent.

  Returns:
    The rows in order.

  Raises:
    ValueError: If it is not a file, or a complete line is damaged, out of
      order or repeated; the message names the line.
  """
  rows, before = [], (-1, 0, '')
  lines = read_lines(path)
  for number, line in enumerate(lines, 1):
    row = parse_line(line)
    if row is None:
      if number < len(lines) or line.endswith(b'\n'):
        raise ValueError(
            f'{path}, line {number} is damaged: {_show(line)}; the command '
            'that ran it restores the file.'
        )
      break
    # A round is trained before it is tested.
    place = row['round'], row['split'] in ('test', 'validation'), row['split']
    if place[:2] < before[:2] or place == before:
      raise ValueError(
          f'{path}, line {number} is damaged: round {row["round"]}, '
          f'{row["split"]}, is there twice or out of its order; the command '
          'that ran it restores the file.'
      )
    before = place
    rows.append(row)
  return rows


def parse_line(line: bytes) -> Row | None:
  """A line's row; None for a torn or damaged line."""
  try:
    row = json.loads(line.decode()) if line.endswith(b'\n') else None
  except (ValueError, RecursionError):
    return None
  if not isinstance(row, dict) or not isinstance(row.get('split'), str):
    return None
  return row if type(row.get('round')) is int else None


def _show(line: bytes) -> str:
  """The beginning of a line, for an error's text."""
  return repr(line[:40]).removeprefix('b') + ('...' if len(line) > 40 else '')


def read_lines(path: pathlib.Path) -> list[bytes]:
  """The lines of a file, [] if it is absent; only a line feed ends a line."""
  try:
    contents = read_bytes(path)
  except FileNotFoundError:
    return []
  lines = contents.split(b'\n')
  last = [lines[-1]] if lines[-1] else []
  return [line + b'\n' for line in lines[:-1]] + last
