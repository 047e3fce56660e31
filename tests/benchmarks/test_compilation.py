"""The command that lists the compiled programs and their times."""

import json
import sys

import pytest

from benchmarks import compilation


def test_a_table_begins_with_the_largest_program():
  programs = {'small': {'trace': 1.0}, 'round': {'trace': 2.0, 'compile': 3.0}}
  spans = [(0.5, 2.0, 'compile_0', 'round')]
  one = dict(
      imports=1.0, cpu=6.0, seconds=7.0, count=2, programs=programs, spans=spans
  )
  first, *rest, span = compilation.lines('work', {'empty': one})
  assert first.startswith('work, empty cache: 6.0 CPU s in 7.0 s')
  assert [line.split()[0] for line in rest] == ['round', 'small']
  assert span.split() == '0.5 to 2.0 s, compile_0: round'.split()


@pytest.mark.slow
def test_the_second_process_loads_what_the_first_has_compiled(
    tmp_path, monkeypatch
):
  path = tmp_path / 'found.json'
  command = ['compilation', '--quick', f'--output={path}']
  monkeypatch.setattr(sys, 'argv', command)
  compilation.main()
  found = json.loads(path.read_text())['quick']
  loaded = found['warm']['programs']['all programs']
  assert loaded['load'] > 0
  assert found['empty']['count'] == found['warm']['count']
