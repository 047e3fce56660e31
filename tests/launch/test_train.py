"""The command line: one line for every mistake, and exact resumption."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from launch import terminal, train
from tests.fuzz import forks

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUICK = '--config=configs/fedavg.py:quick'


def command(*args, module='train'):
  return [sys.executable, '-m', f'launch.{module}', *map(str, args)]


def environment(**more):
  return dict(
      os.environ, JAX_PLATFORMS='cpu', PYTHONPATH=str(ROOT), **more
  )


def launch(*args, cwd, module='train'):
  return subprocess.run(
      command(*args, module=module),
      cwd=cwd,
      env=environment(),
      capture_output=True,
      text=True,
      check=False,
  )


def fork(*args, cwd, module='train'):
  """The same in a forked process, which has imported JAX already."""
  return subprocess.CompletedProcess(args, *forks.run(module, args, cwd))


def refused(capsys, *args):
  with pytest.raises(SystemExit) as end:
    train.parse_flags(['train', *args])
  assert end.value.code == 2
  err = capsys.readouterr().err
  assert err.startswith('Error: ') and err.count('\n') == 1
  return err[len('Error: ') :].strip()


@pytest.mark.parametrize(
    ('args', 'expected'),
    [
        (['--config=configs/fed.py'], "No config file 'configs/fed.py'; did"),
        (
            ['--config=configs/fedin.py:quikc'],
            "Unknown variant 'quikc'; did you mean 'quick'? Known are mnist,",
        ),
        (
            ['--config', 'configs/fedin.py:v1,v2'],
            'The variants v1 and v2 exclude each other.',
        ),
        (['--config'], '--config needs a file, --config=FILE.'),
        (
            ['--config.num_round=3'],
            "Unknown config key num_round; did you mean 'num_rounds'? Known",
        ),
        (
            ['--config.local.epoch=3'],
            "Unknown config key local.epoch; did you mean 'epochs'? Known",
        ),
        (
            ['--config.products=bfloat16'],
            '--config.products: this entry is now called matmul_dtype.',
        ),
        (
            ['--config.algorithm.budgets=x1:1'],
            '--config.algorithm.budgets: this entry is now called groups',
        ),
        (
            ['--config.algorithm.name=fedgkt', '--config.algorithm.alpha=2'],
            '--config.algorithm.alpha: this option of fedgkt is now called '
            'algorithm.distill_weight.',
        ),
        (
            ['--config.algorithm.rho=0.1'],
            'Unknown config key algorithm.rho',
        ),
        (
            ['--config.seed.deep=3'],
            'Unknown config key seed.deep.',
        ),
        (
            ['--config.num_rounds=ten'],
            "num_rounds must be an integer, got 'ten'.",
        ),
        (['--config.seed', '1.5'], "seed must be an integer, got '1.5'."),
        (
            ['--config.algorithm.mu=much'],
            "algorithm.mu must be a finite number, got 'much'.",
        ),
        (
            ['--config.tensorboard=maybe'],
            'tensorboard must be true or false, got',
        ),
        (['--wrkdir=x'], "Unknown command line flag 'wrkdir'. Did you mean: w"),
        (
            ['--cohort_size=3'],
            "Unknown command line flag 'cohort_size'; did you mean --config.co",
        ),
        (
            ['--config.local.lr=1'],
            "Unknown config key local.lr; did you mean 'learning_rate'?",
        ),
        (['--config='], '--config is empty; give it a value, or leave it out.'),
        ([QUICK, QUICK], '--config is given twice.'),
        (['--workdir='], '--workdir is empty; give it a value, or leave it'),
        (['--workdir=a', '--workdir=b'], '--workdir is given twice.'),
        (['--config.seed=1', '--config.seed=2'], '--config.seed is given tw'),
        (['--distributed', '--nodistributed'], '--distributed is given twi'),
        (['--config.=1'], 'Unknown config key ; known are algorithm'),
        (
            ['--flagfile=missing'],
            'Unable to open flagfile: [Errno 2] No such file or directory: ',
        ),
        (['--flagfile='], '--flagfile is empty; give it a value, or leave'),
        (['--flagfile'], '--flagfile with no argument'),
        (['stray'], "Unexpected argument 'stray'; options look like --workd"),
    ],
)
def test_refuses_a_wrong_command_in_one_line(args, expected, capsys):
  assert refused(capsys, *args).startswith(expected)


def test_refuses_a_config_file_that_is_none(tmp_path, capsys):
  path = tmp_path / 'mine.py'
  path.write_text('def get_config(:\n')
  assert 'mine.py, line 1: ' in refused(capsys, f'--config={path}')
  path.write_text(
      'from configs import common\n\n'
      'def get_config():\n'
      '  config = common.base("fedavg")\n'
      '  config.num_round = 3\n'
  )
  assert 'Did you mean "num_rounds"' in refused(capsys, f'--config={path}')
  path.write_text('x = 1\n')
  assert 'has no function get_config.' in refused(capsys, f'--config={path}')


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('def get_config():\n  pass\n', 'get_config returns NoneType, not '),
        ('def get_config():\n  return {}\n', 'returns dict, not a ConfigDict.'),
        ('get_config = 3\n', 'has no function get_config.'),
        ('def get_config():\n  1 / 0\n', 'ZeroDivisionError: division by ze'),
        ('import no_such_module\n', "No module named 'no_such_module'"),
        ('raise SystemExit(0)\n', 'SystemExit: 0'),
        ('x = 1\0\n', 'null bytes'),
    ],
)
def test_refuses_a_config_file_that_fails(tmp_path, capsys, text, expected):
  path = tmp_path / 'mine.py'
  path.write_text(text)
  assert expected in refused(capsys, f'--config={path}')


def test_a_config_file_with_an_old_name_is_told_the_new_one(tmp_path, capsys):
  path = tmp_path / 'mine.py'
  for method, line, message in (
      ('fedavg', "products = 'bfloat16'", 'products: this entry is now calle'),
      ('heterofl', "algorithm.rates = 'a:1'", 'algorithm.rates: this entry i'),
      (
          'moon',
          'algorithm.mu = 5.0',
          'algorithm.mu: this option of moon is now called '
          'algorithm.contrast_weight.',
      ),
      ('fedavg', 'algorithm.mu = 5.0', "'Key \"mu\" does not exist"),
  ):
    path.write_text(
        'from configs import common\n\n\ndef get_config():\n'
        f"  config = common.get_config('{method}', '')\n  config.{line}\n"
        '  return config\n'
    )
    text = refused(capsys, f'--config={path}')
    assert text.startswith(f'{path}: {message}')


def test_a_flagfile_counts_as_what_it_holds(tmp_path, capsys):
  path = tmp_path / 'flags'
  path.write_text(f'{QUICK}\n--config.sed=3\n')
  assert refused(capsys, f'--flagfile={path}').startswith(
      'Unknown config key sed'
  )
  # Flags after --flagfile override its contents.
  path.write_text(f'{QUICK}\n--config.seed=3\n--workdir=a\n')
  assert refused(
      capsys, f'--flagfile={path}', '--config.seed=4', '--config.seed=5'
  ) == '--config.seed is given twice.'
  assert refused(
      capsys, f'--flagfile={path}', '--config.seed=4', '--workdir=b', 'stray'
  ).startswith("Unexpected argument 'stray'")
  path.write_bytes(b'\xff\n')
  assert refused(capsys, f'--flagfile={path}').startswith(
      "The flagfile is not UTF-8 ('utf-8' codec can't decode byte 0xff"
  )


def test_folders_are_checked_before_anything_is_written(tmp_path):
  (tmp_path / 'file').write_text('x')
  good = tmp_path / 'new' / 'deeper'
  assert terminal.folder('--out', str(good)) == good
  assert not good.exists()
  assert terminal.folder('--out', '~/x') == pathlib.Path.home() / 'x'
  for text, expected in (
      (f'{tmp_path}/file', f'{tmp_path}/file is a file, not a folder.'),
      (f'{tmp_path}/file/x', f'{tmp_path}/file is a file, not a folder.'),
      ('~no_such_user/x', 'the home folder of ~no_such_user is not known.'),
      ('x' * 300, 'File name too long.'),
  ):
    with pytest.raises(terminal.CommandError) as error:
      terminal.folder('--out', text)
    assert str(error.value).endswith(expected)


def test_a_config_that_does_not_fit_ends_before_training(tmp_path):
  done = fork(
      QUICK, '--config.local.batch_size=500', '--workdir=w', cwd=tmp_path
  )
  assert done.returncode == 2
  assert done.stderr.startswith('Error: local.batch_size=500 is larger than ')
  assert done.stderr.count('\n') == 1 and not done.stdout
  assert not (tmp_path / 'w').exists()


@pytest.mark.slow
def test_runs_from_anywhere_and_ends_with_a_table(tmp_path):
  done = launch(QUICK, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  (workdir,) = (tmp_path / 'runs').iterdir()
  assert workdir.name.startswith('fedavg-digits-dirichlet-')
  assert f'Workdir: {pathlib.Path("runs") / workdir.name}' in done.stderr
  lines = done.stdout.splitlines()
  header, *rows = [line.split('  ') for line in lines if '  ' in line]
  assert [cell.strip() for cell in header if cell.strip()] == [
      'group', 'clients', 'parameters', 'last round (2)', 'worst client',
      'best round (2)',
  ]  # fmt: skip
  names = [row[0] for row in rows if not row[0].startswith('-')]
  assert names == [
      'mlp2', 'mlp3', 'mlp4', 'mean over groups', 'mean over clients',
  ]  # fmt: skip
  assert lines[-1] == f'Report: runs/{workdir.name}/report.md'
  # Running the command again finds the run finished.
  again = fork(QUICK, f'--workdir={workdir}', cwd=tmp_path)
  assert again.returncode == 0 and 'Compiling' not in again.stderr
  assert again.stdout.splitlines()[1:-1] == lines[1:-1]
  # Another config is refused for this workdir.
  other = fork(QUICK, '--config.seed=1', f'--workdir={workdir}', cwd=tmp_path)
  assert other.returncode == 2
  assert 'seed is 0 there and 1 here' in other.stderr
  # The report can be written again.
  (workdir / 'report.md').unlink()
  report = fork(workdir, cwd=tmp_path, module='report')
  assert report.returncode == 0
  assert (workdir / 'report.md').exists()
  both = fork(workdir, workdir, '--out=both', cwd=tmp_path, module='report')
  assert both.returncode == 0 and (tmp_path / 'both/comparison.md').exists()
  none = fork(tmp_path, cwd=tmp_path, module='report')
  assert none.returncode == 2
  assert none.stderr.startswith('Error: ') and none.stderr.count('\n') == 1


def rows_of(workdir):
  rows = [
      json.loads(line)
      for line in (workdir / 'metrics.jsonl').read_text().splitlines()
  ]
  for row in rows:
    del row['seconds']
  return rows


LONG = (
    '--config=configs/fedin.py:quick',
    '--config.num_rounds=40',
    '--config.checkpoint_every=2',
    '--config.cohort_size=4',
)


def wait_for(workdir, size, process):
  """Waits until the metrics have grown to more than `size` bytes."""
  path = workdir / 'metrics.jsonl'
  for _ in range(60_000):
    if process.poll() is not None:
      return
    if path.exists() and path.stat().st_size > size:
      return
    time.sleep(0.001)
  raise AssertionError('The run has written nothing for a minute.')


@pytest.mark.slow
def test_killed_at_any_moment_it_resumes_exactly(tmp_path):
  args = (*LONG, f'--workdir={tmp_path / "whole"}')
  whole = forks.Begun('train', args, ROOT, drawn=False).end()
  assert whole.code == 0, whole.err
  workdir = tmp_path / 'killed'
  args = (*LONG, f'--workdir={workdir}')
  # Delays after the first new line, to hit rounds, lines and checkpoints.
  for delay in (0.0, 0.21, 0.37, 0.5):
    path = workdir / 'metrics.jsonl'
    size = path.stat().st_size if path.exists() else 0
    process = forks.Begun('train', args, ROOT, drawn=False)
    wait_for(workdir, size, process)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.end()
  last = forks.Begun('train', args, ROOT, drawn=False).end()
  assert last.code == 0, last.err
  assert rows_of(workdir) == rows_of(tmp_path / 'whole')


@pytest.mark.slow
def test_interrupted_it_says_how_to_resume(tmp_path):
  process = subprocess.Popen(
      command(QUICK, '--config.num_rounds=100000', '--workdir=w'),
      cwd=tmp_path,
      env=environment(),
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
  )
  wait_for(tmp_path / 'w', 2000, process)
  process.send_signal(signal.SIGINT)
  out, err = process.communicate(timeout=60)
  assert process.returncode == 130
  assert 'Stopping after this round' in err and 'Traceback' not in err
  rounds = rows_of(tmp_path / 'w')[-1]['round']
  assert out.splitlines()[-1] == (
      f'Stopped after round {rounds} of 100000. Resume with: python -m '
      f'launch.train {QUICK} --config.num_rounds=100000 --workdir=w'
  )
  names = {path.name for path in (tmp_path / 'w' / 'checkpoints').iterdir()}
  assert str(rounds) in names
