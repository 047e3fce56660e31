"""The command that measures a machine's speeds."""

import json
import os
import subprocess
import sys

import pytest

from launch import tune
from tests.experiment.test_form import table


def run(folder, *flags):
  return subprocess.run(
      [sys.executable, '-m', 'launch.tune', *flags],
      env={
          **os.environ,
          'FEDJAX_HET_TUNED': str(folder),
          'JAX_DEFAULT_PRNG_IMPL': 'threefry2x32',  # For several devices.
      },
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
