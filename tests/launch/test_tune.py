"""The command that measures a machine's speeds."""

import json
import os
import subprocess
import sys

import pytest

from launch import tune
from tests.experiment.test_form import table


def run(folder, *flags, variable='FEDJAX_HET_TUNED', **variables):
  env = {
      **os.environ,
      variable: str(folder),
      'JAX_DEFAULT_PRNG_IMPL': 'threefry2x32',  # For several devices.
      **variables,
  }
  if variable != 'FEDJAX_HET_TUNED':
    env.pop('FEDJAX_HET_TUNED', None)
  return subprocess.run(
      [sys.executable, '-m', 'launch.tune', *flags],
      env=env,
      capture_output=True,
      text=True,
  )


def test_all_forms_are_shown():
  *_, dense, convolutions, note = '\n'.join(tune.lines(table())).splitlines()
  assert dense.split() == ['dense', '100', '1,000', '-', '-']
  assert convolutions.split()[1:] == ['100', '150', '200', '250']
  assert note.startswith('Behind each library')


@pytest.mark.slow
def test_measured_once_and_shown(tmp_path):
  missing = run(tmp_path, '--show')
  assert missing.returncode == 2 and 'launch.tune does so' in missing.stderr
  measured = run(tmp_path, '--quick', '--seconds=1000')
  assert measured.returncode == 0, measured.stderr
  (path,) = tmp_path.iterdir()
  assert measured.stdout.splitlines()[-1].endswith(str(path))
  found = json.loads(path.read_text())
  assert len(found['cases']) == 7
  for case in found['cases'].values():
    assert {row['devices'] for row in case['rows']} == {1, found['devices']}
  shown = run(tmp_path, '--show')
  assert measured.stdout.endswith(shown.stdout)


@pytest.mark.slow
def test_speeds_that_no_run_should_follow_are_not_stored(tmp_path):
  args = '--quick', '--seconds=0.001'
  quick = run(tmp_path, *args, variable='XDG_CACHE_HOME')
  assert quick.returncode == 0 and not list(tmp_path.rglob('*.json'))
  assert quick.stdout.splitlines()[-1].startswith('Not stored')
  nothing = run(tmp_path, '--seconds=0')
  assert nothing.returncode == 2 and 'No net was measured' in nothing.stderr
  several = run(tmp_path, *args, JAX_NUM_CPU_DEVICES='5')
  assert several.returncode == 2 and not list(tmp_path.rglob('*.json'))
  assert 'JAX has 5 CPU devices' in several.stderr
