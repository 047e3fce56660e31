"""Which part of the library may import which."""

import ast
import pathlib

import pytest

from fedjax_het import algorithms
from fedjax_het.models.blocks import BlockModel

ROOT = pathlib.Path(__file__).resolve().parents[1] / 'fedjax_het'
# Lowest level first: a part imports only its own and lower levels.
ROOMS = (
    ('names', 'files', 'renamed'),
    ('options',),
    ('kernels',),
    ('models',),
    ('data',),
    ('engine',),
    ('aggregation', 'depthwise', 'privacy', 'analysis'),
    ('algorithms',),
    ('reporting',),
    ('experiment',),
)
# Modules of `models` that are independent of any model family.
PLAIN_MODELS = {
    'blocks', 'heads', 'forward', 'slices', 'norm', 'reach', 'flops',
    'intercept', 'adapt',
}  # fmt: skip


def imports(path, text=None):
  """The library's modules that a file imports, such as 'models.blocks'."""
  found = set()
  for node in ast.walk(ast.parse(text or path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, f'{path} has a relative import.'
      names = [f'{node.module}.{alias.name}' for alias in node.names]
    else:
      continue
    for name in names:
      first, _, rest = name.partition('.')
      if first == 'fedjax_het':
        found.add(_module(rest))
  return found


def _module(dotted):
  """The longest prefix of a dotted name that is a module."""
  parts = dotted.split('.')
  while parts:
    place = ROOT.joinpath(*parts)
    if place.is_dir() or place.with_suffix('.py').exists():
      return '.'.join(parts)
    parts.pop()
  return ''


def files(room):
  place = ROOT / room
  return sorted(place.rglob('*.py')) if place.is_dir() else [
      place.with_suffix('.py')
  ]


def test_the_reader_of_imports_sees_all_forms():
  text = (
      'import fedjax_het.models.blocks\n'
      'from fedjax_het.models import resnet, create\n'
      'def f():\n  from fedjax_het.engine.types import Group\n'
  )
  assert imports('<text>', text) == {
      'models.blocks', 'models.resnet', 'models', 'engine.types',
  }


@pytest.mark.parametrize('level', range(len(ROOMS)))
def test_rooms_import_what_lies_below_them(level):
  below = {room for rooms in ROOMS[: level + 1] for room in rooms}
  for room in ROOMS[level]:
    for path in files(room):
      used = {name.partition('.')[0] for name in imports(path)}
      assert used <= below, f'{path} imports {sorted(used - below)}.'


def owner_of(name):
  """The method that a file or folder of `algorithms` belongs to."""
  methods = [m for m in algorithms.ALGORITHMS if f'{name}_'.startswith(f'{m}_')]
  return max(methods, key=len, default=name)


def test_algorithms_import_no_algorithm():
  """Code of one method is in its folder or in METHOD_*.py."""
  room = ROOT / 'algorithms'
  parts = [path.relative_to(room).parts for path in files('algorithms')]
  owners = {owner_of(part[0].removesuffix('.py')) for part in parts}
  assert set(algorithms.ALGORITHMS) <= owners
  for path, part in zip(files('algorithms'), parts, strict=True):
    mine = owner_of(part[0].removesuffix('.py'))
    if mine == '__init__':
      continue
    for name in imports(path):
      if name.split('.')[0] == 'algorithms':
        used = (*name.split('.'), '')[1]
        assert owner_of(used) == mine, f'{path} imports {name}.'


def test_slicing_stages_and_the_engine_know_no_model_family():
  models = ROOT / 'models'
  plain = [models / f'{name}.py' for name in ('blocks', 'heads', 'forward')]
  paths = [ROOT / 'aggregation' / 'slicing.py', *plain]
  for path in [*paths, *files('engine'), *files('depthwise')]:
    used = {n for n in imports(path) if n.split('.')[0] == 'models'}
    families = used - {f'models.{name}' for name in PLAIN_MODELS} - {'models'}
    assert not families, f'{path} imports {sorted(families)}.'
  assert BlockModel.__module__ == 'fedjax_het.models.blocks'
