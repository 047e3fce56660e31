"""Writes measured choices into the library's table, `kernels/auto.py`.

  python -m benchmarks.accelerator.apply --out=DIR [--table=FILE]

DIR is that of `python -m benchmarks.accelerator`. The row of the measured kind
of device is added or replaced; other rows do not change.
"""

import argparse
import ast
import pathlib

from fedjax_het.files import read_json, write_atomically
from fedjax_het.kernels import auto

_NAME = 'CHOICES'


def row_text(kind: str, choice: auto.Choice) -> list[str]:
  """The lines of a row's source."""
  fields = [f'        {k}={v!r},' for k, v in choice._asdict().items()]
  return [f'    {kind!r}: Choice(', *fields, '    ),']


def _entries(text: str) -> tuple[dict[str, tuple[int, int]], int]:
  """{kind: (first, last line) of its row}, and the table's last line."""
  for node in ast.parse(text).body:
    if isinstance(node, ast.Assign) and node.targets[0].id == _NAME:
      table = node.value
      rows = {
          key.value: (key.lineno, value.end_lineno)
          for key, value in zip(table.keys, table.values, strict=True)
      }
      return rows, table.end_lineno
  raise ValueError(f'there is no table {_NAME}.')


def with_row(text: str, kind: str, choice: auto.Choice) -> str:
  """The table's file with one row added or replaced.

  Args:
    text: The file.
    kind: The `device_kind` of JAX.
    choice: The row.

  Returns:
    The new file.

  Raises:
    ValueError: If the file has no table.
  """
  rows, end = _entries(text)
  lines = text.split('\n')
  first, last = rows.get(kind, (end, end - 1))
  lines[first - 1 : last] = row_text(kind, choice)
  return '\n'.join(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', required=True, help='folder of the results')
  parser.add_argument('--table', default=auto.__file__, help='file to change')
  args = parser.parse_args()
  path, table = pathlib.Path(args.out, 'results.json'), pathlib.Path(args.table)
  try:
    found = read_json(path, 'run benchmarks.accelerator again')
    if found.get('quick'):
      raise ValueError(f'{path} is of a quick run, whose sizes are tiny.')
    if found.get('choice') is None:
      raise ValueError(f'{path} holds no choice yet: the grid is not complete.')
    choice = auto.Choice(**found['choice'])
    kind = found['device']['kind']
    if kind == 'cpu':
      raise ValueError('The row of CPUs follows from benchmarks.engine.')
    write_atomically(table, with_row(table.read_text(), kind, choice))
  except (ValueError, OSError) as e:
    parser.error(str(e))
  print(f'{table}: {kind!r} chooses {choice.backend}, chunk {choice.chunk}.')


if __name__ == '__main__':
  main()
