"""Imports between the rooms of the library point one way."""

import ast
import pathlib

import pytest

import fedjax_het

ROOT = pathlib.Path(fedjax_het.__file__).parent
# {module or folder: rooms that it must not import}.
FORBIDDEN = {
    'reporting': ('experiment',),
    'files.py': ('experiment', 'reporting', 'engine'),
    'renamed.py': ('experiment', 'reporting', 'engine'),
    'options.py': ('experiment', 'reporting', 'engine'),
    'names.py': ('experiment', 'reporting', 'engine'),
}


def imported(path):
  """The rooms of this library that a file imports from, at any depth."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom):
      names = [f'{node.module}.{alias.name}' for alias in node.names]
    elif isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    else:
      continue
    for name in names:
      library, _, rest = name.partition('.')
      if library == 'fedjax_het':
        yield rest.split('.')[0]


@pytest.mark.parametrize('room', FORBIDDEN)
def test_imports_point_one_way(room):
  place = ROOT / room
  files = [place] if place.is_file() else sorted(place.glob('*.py'))
  found = {room for path in files for room in imported(path)}
  assert not found & set(FORBIDDEN[room])


def test_imports_are_seen():
  """The test above would pass if it saw none."""
  assert {'reporting', 'engine'} <= set(imported(ROOT / 'experiment/runner.py'))
