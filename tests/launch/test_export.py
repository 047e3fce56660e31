"""The command that writes the trained models of a run."""

import pathlib

import pytest

from tests.fuzz import forks

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--workdr=w'], 'Did you mean: workdir'),
        (['--workdir=nowhere', '--out=o'], 'nowhere is not a workdir'),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(arguments, message):
  done = forks.run('export', arguments, ROOT)
  assert done.code == 2 and message in done.err, done.err
  assert done.err.count('\n') == 1
