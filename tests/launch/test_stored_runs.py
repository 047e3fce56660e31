"""The commands that write the trained models of a run, or test them again."""

import pathlib
import subprocess
import sys

import pytest

from fedjax_het import PARTITIONS, run
from fedjax_het.engine.task import ACCURACY
from fedjax_het.reporting import tables
from tests.experiment.tiny_runs import tiny_config
from tests.fuzz import forks

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ('program', 'arguments', 'message'),
    [
        ('export', ['--workdr=w'], 'Did you mean: workdir'),
        ('export', ['--workdir=nowhere', '--out=o'], 'nowhere is not a workd'),
        ('evaluate', [], '--workdir is missing'),
        ('evaluate', ['--workdir=nowhere'], 'nowhere is not a workd'),
        ('evaluate', ['--personal_tst'], 'Did you mean: personal_test'),
        (
            'evaluate',
            ['--workdir=nowhere', '--eval_clients_per_group=-1'],
            '--eval_clients_per_group must be at least 0, got -1.',
        ),
        (
            'evaluate',
            ['--workdir=nowhere', '--config=fedinn'],
            "No config file 'fedinn'; did you mean 'fedin'?",
        ),
        # A name and variants, as `train` takes them.
        (
            'export',
            ['--workdir=nowhere', '--out=o', '--config=fedin:quick'],
            'nowhere is not a workd',
        ),
        ('attack', ['--workdir=nowhere', '--steps=0'], '--steps must be at le'),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(program, arguments, message):
  done = forks.run(program, arguments, ROOT)
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
  done = forks.run('export', [*arguments, f'--config={own}:quick'], ROOT)
  assert done.code == 0, done.err
  assert [*(tmp_path / 'out').iterdir()]


@pytest.mark.slow
def test_a_package_that_is_missing_is_named_in_one_line(tmp_path):
  run(tiny_config('private', num_rounds=1), tmp_path / 'run')
  done = subprocess.run(
      [
          sys.executable, '-c',
          'import sys; sys.modules["sklearn"] = None\n'
          'from launch import tsne; tsne.run()',
          f'--workdir={tmp_path / "run"}', f'--out={tmp_path / "out"}',
      ],
      cwd=ROOT, capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode == 2, done.stderr
  assert done.stderr.startswith('Error: ') and 'sklearn' in done.stderr
  assert done.stderr.count('\n') == 1


def test_the_table_has_the_numbers_of_the_line():
  row = {
      'accuracy': 0.5, 'accuracy/clients': 0.55, 'accuracy/worst': 0.125,
      'loss': 1.5,
      'models/a': 3, 'accuracy/a': 0.6, 'accuracy/a/worst': 0.125, 'loss/a': 2,
      'models/b': 1, 'accuracy/b': 0.4, 'accuracy/b/worst': 0.4,
      'loss/b': None,
  }  # fmt: skip
  facts = {'groups': {'a': {'clients': 3}, 'b': {'clients': 1}}}
  assert tables.evaluation(row, facts, ACCURACY)[1:] == [
      ['a', '3', '3', '60.00 %', '12.50 %', '2'],
      ['b', '1', '1', '40.00 %', '40.00 %', 'not finite'],
      ['mean over groups', '4', '', '50.00 %', '12.50 %', '1.5'],
      ['mean over clients', '', '', '55.00 %', '', ''],
  ]


def test_the_command_prints_what_the_run_would_have_stored(tmp_path):
  result = run(tiny_config(personal_test=True, num_rounds=1), tmp_path)
  stored = (tmp_path / 'metrics.jsonl').read_bytes()
  done = forks.run('evaluate', [f'--workdir={tmp_path}'], ROOT)
  assert done.code == 0, done.err
  own = tables.personal(result.summary, result.facts)
  assert tables.as_text(own) in done.out
  last = result.summary.last
  table = tables.evaluation(last, result.facts, result.summary.metric)
  assert tables.as_text(table) in done.out
  assert 'after 1 of 1 rounds, accuracy:' in done.out
  without = [f'--workdir={tmp_path}', '--nopersonal_test']
  done = forks.run('evaluate', without, ROOT)
  assert done.code == 0 and 'own test' not in done.out
  assert (tmp_path / 'metrics.jsonl').read_bytes() == stored
  # The newest checkpoint is damaged: an older one is tested, and says so.
  for path in (tmp_path / 'checkpoints' / '1').rglob('*'):
    if path.is_file():
      path.write_bytes(b'')
  done = forks.run('evaluate', without, ROOT)
  assert done.code == 0 and 'after 0 of 1 rounds' in done.out
  assert 'is damaged' in done.err
