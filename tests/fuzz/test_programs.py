"""Wrong command lines: one line, exit status 2, nothing written, no hang."""

import shutil

import pytest

from tests.fuzz import forks
from tests.fuzz.commands import PROGRAMS, commands
from tests.fuzz.programs import contents


def _refuses(name, args, here):
  """Runs one command; raises AssertionError unless it is refused."""
  before = contents(here)
  ended = forks.run(name, args, here)
  assert ended.code == 2, (name, args, ended)
  assert 'Traceback' not in ended.err, (name, args, ended)
  lines = ended.err.splitlines()
  assert lines[-1].startswith('Error: '), (name, args, ended)
  assert sum(line.startswith('Error: ') for line in lines) == 1, ended
  after = contents(here)
  for held in (before, after):  # A workdir is locked before it is read.
    held.pop('list/.lock', None)
  assert after == before, (name, args)


@pytest.fixture
def here(tmp_path):
  folder = tmp_path / 'here'
  folder.mkdir()
  yield folder
  shutil.rmtree(folder)


def test_wrong_commands(here):
  """The fast part: each program, and every twelfth command."""
  everything = commands(here)
  assert len(everything) >= 80
  assert {name for name, _ in everything} == {*PROGRAMS}
  for name, args in everything[::12]:
    _refuses(name, args, here)


@pytest.mark.slow
def test_all_wrong_commands(here):
  everything = commands(here)
  for name, args in everything:
    _refuses(name, args, here)
  print(f'{len(everything)} commands refused')
