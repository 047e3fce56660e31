"""Results tables by name: files, scales, and the cells that flags choose."""

from collections.abc import Sequence
import os
import pathlib
import subprocess
from typing import NamedTuple

from . import python_files
from .terminal import folder

# A larger number of seeds is taken for a seed.
_MOST_SEEDS = 1000
_ROOT = pathlib.Path(__file__).resolve().parents[1]


class Found(NamedTuple):
  """A table at one scale.

  Attributes:
    table: The `Table`.
    name: Name of its file, without the suffix.
    scale: One of its scales; '' if it has only one.
    merged: Rows and columns of other scales that have no cell of their own at
      this one.
  """

  table: object
  name: str
  scale: str
  merged: tuple[str, ...] = ()

  @property
  def heading(self) -> str:
    """Its title, with the scale."""
    if not self.scale:
      return self.table.title
    return f'{self.table.title} (scale {self.scale!r})'

  def folder(self, parent: str | None, default: str) -> pathlib.Path:
    """The folder of this scale's files; each scale has its own."""
    return pathlib.Path(parent or f'{default}/{self.name}', self.scale)


def names() -> list[str]:
  """The tables that come with the library."""
  files = (_ROOT / 'configs' / 'tables').glob('[!_]*.py')
  return sorted(path.stem for path in files)


def find_table(name: str, scale: str | None = None) -> Found:
  """A table of `configs/tables` by name, or of a Python file by path.

  A file defines `get_table()`, whose scale is 'cpu', or a tuple `SCALES` with
  the default first and `get_table(scale)`. At the scale 'quick', cells with
  equal configs become one cell, and only one seed is kept.

  Args:
    name: 'fedin_v2_table1', or a path.
    scale: One of the table's scales; None for its default.

  Returns:
    The table.

  Raises:
    ValueError: If there is no such table or scale, or the file defines no
      table; the message names the known ones.
  """
  from fedjax_het.names import check_name, nearest
  from fedjax_het.reporting.results_table import Table, distinct

  paths = [pathlib.Path(name), _ROOT / name]
  if pathlib.Path(name).name == name:
    paths.append(_ROOT / 'configs' / 'tables' / f'{name}.py')
  path = next((path for path in paths if os.path.isfile(path)), None)
  if path is None:
    close = nearest(pathlib.Path(name).stem, names())
    hint = f'did you mean {close!r}? There' if close else 'there'
    raise ValueError(
        f'No results table {name!r}; {hint} are {", ".join(names())}, or give '
        'the path of a file.'
    )
  module = python_files.load(path, 'get_table')
  scales = getattr(module, 'SCALES', ('cpu',))
  scale = scales[0] if scale is None else scale
  check_name(f'scale of {path.stem}', scale, scales)
  args = [scale] if hasattr(module, 'SCALES') else []
  table = python_files.call(module, 'get_table', *args)
  if not isinstance(table, Table):
    raise ValueError(
        f'{path}: get_table returns {type(table).__name__}, not a Table.'
    )
  every = (*table.labels, *table.columns)
  if scale == 'quick':
    table = distinct(table)
  left = {*table.labels, *table.columns}
  return Found(
      table, path.stem, scale if len(scales) > 1 else '',
      tuple(label for label in every if label not in left),
  )  # fmt: skip


def is_tracked(folder: pathlib.Path) -> bool:
  """Whether git tracks a file of a folder."""
  if not folder.is_dir():
    return False
  try:
    found = subprocess.run(
        ['git', '-C', str(folder), 'ls-files', '--', '.'],
        capture_output=True,
        check=False,
    )
  except OSError:  # No git.
    return False
  return found.returncode == 0 and bool(found.stdout)


def results_folder(found: Found, out: str | None) -> pathlib.Path:
  """The folder to which results of a table are written.

  Args:
    found: The table.
    out: The flag --out; None for results/<table>.

  Returns:
    The folder, which may not exist.

  Raises:
    ValueError: If the flag is not given and git tracks files there, or the
      folder cannot be written.
  """
  path = flag_folder(found, '--out', out, 'results')
  if out is None and is_tracked(path):
    raise ValueError(
        f'{path} holds files that git tracks, such as results that come with '
        'the library; name another folder by --out, or change them by '
        f'--out=results/{found.name}.'
    )
  return path


def flag_folder(
    found: Found, flag: str, text: str | None, default: str
) -> pathlib.Path:
  """The folder of a table's files at one scale, below the one of a flag.

  Args:
    found: The table.
    flag: The flag, for errors.
    text: Its value; None for `default`/<table>.
    default: 'results' or 'runs'.

  Returns:
    The folder, which may not exist.

  Raises:
    CommandError: If it cannot be written.
  """
  if text is not None:
    folder(flag, text)  # Before a path changes the text, as in gs://.
  return folder(flag, str(found.folder(text, default)))


def show(found: Found, out: pathlib.Path, formats: Sequence[str]) -> None:
  """Renders the stored results of a table, and prints it.

  Args:
    found: The table.
    out: Folder of its results.
    formats: Further formats, as of `sweep_report.render`.

  Raises:
    FileNotFoundError: If there is no result.
    ValueError: If a result is damaged, or of another config.
  """
  from fedjax_het.experiment import sweep_table
  from fedjax_het.reporting import sweep_report

  stored = sweep_table.stored_cells(found.table, out)
  others = {*out.glob('cells/*.json')} - {path for path, _, _ in stored}
  if others:
    print(
        f'Note: the table leaves out {len(others)} of the results in '
        f'{out / "cells"}, which are not of it: {min(others).name}'
        f'{", ..." * (len(others) > 1)}\n'
    )
  cells = [cell for _, _, cell in stored]
  markdown = sweep_report.render(found.table, cells, out, formats)
  print(f'{found.heading}\n\n{markdown}')
  print(f'\nTable: {out / "table.md"}')


def parse_seeds(text: str) -> tuple[int, ...]:
  """Seeds as `--seeds` names them.

  A single number is a count: '3' means 0, 1 and 2. Numbers with a comma are a
  list: '0,4' means 0 and 4, and '5,' means only 5.

  Args:
    text: The flag's value.

  Returns:
    The seeds.

  Raises:
    ValueError: If it is neither, names no seed, or names a seed twice.
  """
  parts = [part.strip() for part in text.split(',')]
  if len(parts) > 1 and not parts[-1]:
    parts.pop()
    listed = True
  else:
    listed = len(parts) > 1
  if not all(part.isascii() and part.isdigit() for part in parts):
    raise ValueError(
        f'--seeds={text}: write how many (--seeds=3 for 0, 1, 2) or which ones '
        '(--seeds=0,4, or --seeds=5, for 5 alone), integers of 0 or more.'
    )
  seeds = [int(part) for part in parts]
  if not listed and seeds == [0]:
    raise ValueError(
        '--seeds=0 asks for no seed at all; the seed 0 alone is --seeds=0, '
        '(with a comma) or --seeds=1 (the first one).'
    )
  if not listed and seeds[0] > _MOST_SEEDS:
    raise ValueError(
        f'--seeds={text:.30} asks for more than {_MOST_SEEDS:,} seeds; one '
        'seed alone is written with a comma, --seeds=5,.'
    )
  if len(set(seeds)) < len(seeds):
    raise ValueError(f'--seeds={text} names a seed twice.')
  return tuple(seeds) if listed else tuple(range(seeds[0]))


def choose(
    table,
    seeds: str | None = None,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    merged: Sequence[str] = (),
):
  """The part of a table that flags name.

  Args:
    table: The `Table`.
    seeds: See `parse_seeds`; None for the table's own.
    rows: Labels, or their names in lower case with _, or the first words of
      several; None for all.
    columns: Likewise, of columns.
    merged: See `Found`; an error for one of these says why.

  Returns:
    The table with only these cells.

  Raises:
    ValueError: If something is unknown, or no cell is left.
  """
  if seeds is not None:
    table = table._replace(seeds=parse_seeds(seeds))
  if rows is not None:
    # A view shows the runs of its row.
    labels = _named('row', rows, table.labels, merged)
    labels = {table.views.get(label, (label,))[0] for label in labels}
    table = table._replace(
        rows={row: c for row, c in table.rows.items() if row in labels}
    )
  if columns is not None:
    if tuple(table.columns) == ('',):
      raise ValueError('This table has no columns; leave --cols out.')
    chosen = _named('column', columns, table.columns, merged)
    table = table._replace(
        columns=tuple(c for c in table.columns if c in chosen)
    )
  if not any(
      table.config(row, column) is not None
      for row in table.rows
      for column in table.columns
  ):
    raise ValueError('The table has no cells in these rows and columns.')
  return table


def _named(
    what: str,
    given: Sequence[str],
    known: Sequence[str],
    merged: Sequence[str],
) -> list[str]:
  """The known labels that are given, by label or by name as in file names.

  A name that is no label but the first words of some means all of these.
  """
  from fedjax_het.names import check_name
  from fedjax_het.reporting.results_table import slug

  if not given:
    raise ValueError(f'Name at least one {what}: {", ".join(known)}.')
  by_slug = {slug(label): label for label in known}
  chosen = []
  for name in given:
    words = slug(name)
    if words in by_slug:
      chosen.append(by_slug[words])
      continue
    begun = [by_slug[s] for s in by_slug if s.startswith(f'{words}_')]
    if not begun and any(
        f'{slug(label)}_'.startswith(f'{words}_') for label in merged
    ):
      raise ValueError(
          f'At this scale no {what} {name!r} is left, since cells with equal '
          f'configs are one cell; the {what}s are {", ".join(known)}.'
      )
    if not begun:
      check_name(what, name, known)
    chosen += begun
  return chosen
