"""The command that writes the trained models of a run."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--workdr=w'], 'Did you mean: workdir'),
        (['--workdir=nowhere', '--out=o'], 'nowhere is not a workdir'),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(arguments, message):
  command = [sys.executable, '-m', 'launch.export', *arguments]
  done = subprocess.run(command, capture_output=True, text=True)
  assert done.returncode == 2 and message in done.stderr, done.stderr
  assert done.stderr.count('\n') == 1
