"""The command that writes the trained models of a run."""

import pathlib

import pytest

from fedjax_het import PARTITIONS, run
from tests.experiment.tiny_runs import tiny_config
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


OWN = """
import numpy as np
from fedjax_het import PARTITIONS

def halves(labels, num_clients, *, seed):
  return np.array_split(np.arange(len(labels)), num_clients)

PARTITIONS['halves'] = halves

def get_config():
  pass
"""


def test_what_a_config_file_registers_is_found_in_it(tmp_path):
  own, workdir = tmp_path / 'own.py', tmp_path / 'run'
  own.write_text(OWN)
  exec(OWN, {})
  try:
    config = tiny_config()
    config.partition = dict(name='halves', seed=0)
    run(config, workdir)
  finally:
    del PARTITIONS['halves']
  arguments = [f'--workdir={workdir}', f'--out={tmp_path / "out"}']
  done = forks.run('export', arguments, ROOT)
  assert done.code == 2 and "partition 'halves'" in done.err, done.err
  assert '--config=FILE' in done.err and done.err.count('\n') == 1
  done = forks.run('export', [*arguments, f'--config={own}'], ROOT)
  assert done.code == 0, done.err
  assert [*(tmp_path / 'out').iterdir()]
