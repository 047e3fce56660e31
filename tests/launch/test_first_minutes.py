"""What a new user tries first: help, dry runs, other methods, Ctrl-C."""

import importlib
import json
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from absl import flags
import pytest

from fedjax_het import experiment
from fedjax_het.data import sources
from fedjax_het.experiment import duration, preview, sweep, switch
from fedjax_het.experiment.callbacks import CallbackError
from fedjax_het.experiment.workdir import settle_config
from fedjax_het.reporting import tables
from launch import cli, config_flag, stopping, terminal, train
from tests.experiment.tiny_runs import tiny_config
from tests.fuzz import programs
from tests.launch.test_prepare_data import write_raw

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUICK = '--config=configs/fedin.py:quick'
# What users are promised, whatever else there is.
ASKED_COMMANDS = (
    'train', 'sweep', 'report', 'prepare-data', 'plan-memory', 'communication',
    'similarity',
)  # fmt: skip


def parsed(*args):
  """The config and the notes of a command line."""
  argv = config_flag.with_config(['train', *args])
  notes = config_flag.check(argv)
  return config_flag._load(argv[1][9:], config_flag._overrides(argv))[0], notes


def refused(*args):
  with pytest.raises(terminal.CommandError) as error:
    parsed(*args)
  return str(error.value)


def test_another_partition_keeps_what_both_have():
  config, notes = parsed(QUICK, '--config.partition.name=iid')
  assert config.partition.to_dict() == dict(name='iid', seed=0, shuffle=True)
  (note,) = notes
  assert note == (
      'partition iid does not take partition.alpha, partition.min_size: left '
      'out.'
  )
  config, notes = parsed(QUICK, '--config.partition.name', 'dirichlet_fedagm')
  assert config.partition.alpha == 0.5 and len(notes) == 1
  # An option without a default gets an empty entry; `check` needs a value.
  config, _ = parsed(
      QUICK, '--config.partition.name=file', '--config.partition.file=x.json'
  )
  with pytest.raises(ValueError, match=r'partition\.file is missing'):
    experiment.check(config)
  config, notes = parsed(QUICK, '--config.partition.name=dirichlet')
  same = experiment.default_config().partition
  assert config.partition.to_dict() == same.to_dict() and not notes
  assert refused('--config.partition.name=iidd').startswith(
      "Unknown partition 'iidd'; did you mean 'iid'?"
  )


def test_another_method_takes_its_own_defaults():
  config, notes = parsed(QUICK, '--config.algorithm.name=fedprox')
  alone = experiment.default_config('fedprox').algorithm
  assert config.algorithm.to_dict() == alone.to_dict() and not notes
  config, notes = parsed(
      '--config=configs/fedin.py:quick,noise', '--config.algorithm.name=fedavg'
  )
  assert notes == [
      'algorithm fedavg does not take algorithm.noise: left out.'
  ]
  experiment.check(config)
  config, _ = parsed(QUICK, '--config.algorithm.name=fedhe')
  assert config.local.keep_optimizer
  experiment.check(config)


def test_another_method_drops_what_groups_and_servers_had():
  config = experiment.default_config('heterofl')
  config.groups = {'a': dict(model='mlp', clients=2, rate='1/2')}
  assert switch.algorithm(config, 'fedavg') == ['groups.a.rate']
  assert config.groups.to_dict() == {'a': dict(model='mlp', clients=2)}
  config = experiment.default_config('fedgkt')
  config.server_model = 'mini_resnet10'
  assert 'server_model' in switch.algorithm(config, 'fedavg')
  assert config.server_model is None
  experiment.check(config)


def test_a_section_is_no_value():
  assert refused('--config.algorithm=fedin') == (
      'algorithm is a section; set its entries, such as '
      '--config.algorithm.name=fedin'
  )
  assert refused('--config.local=3').startswith('local is a section; set its ')
  # What it advises is an entry.
  assert refused(QUICK, '--config.groups=mlp').endswith(
      'such as --config.groups.mlp2.clients=VALUE'
  )
  config, _ = parsed(QUICK, "--config.groups={'mlp': 3}")  # A dict is a value.
  assert config.groups


def test_a_mistyped_name_is_guessed():
  assert refused('--config.algorithm=fedinn') == (
      "algorithm is a section; did you mean 'fedin'? Set "
      '--config.algorithm.name=fedin'
  )
  assert refused('--config.partition=dirichlt') == (
      "partition is a section; did you mean 'dirichlet'? Set "
      '--config.partition.name=dirichlet'
  )
  for spec in ('fedinn', 'fedinn:quick', 'configs/fedinn.py'):
    with pytest.raises(terminal.CommandError) as error:
      config_flag.with_config(['train', f'--config={spec}'])
    message = str(error.value)
    assert message.startswith(f'No config file {spec.split(":")[0]!r}; did ')
    assert "you mean 'fedin'? There are configs/" in message


def test_a_cloud_folder_is_refused_by_name(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(terminal.CommandError) as error:
    terminal.folder('--workdir', 'gs://bucket/run')
  text = '=gs://bucket/run: cloud folders are not supported; mount it, or '
  assert str(error.value).startswith(f'--workdir{text}')
  with pytest.raises(ValueError, match='cloud folders are not supported'):
    experiment.run(experiment.default_config(), 'gs://bucket/run')
  run = experiment.Run(tmp_path, None, {}, [], {})
  model = experiment.Model(None, {})
  for write in (
      experiment.load_run,
      run.export,
      model.save,
      lambda out: experiment.write_comparison([], out),
      lambda out: sweep.run_cells(None, out, 'runs'),
  ):
    with pytest.raises(ValueError, match='cloud folders are not supported'):
      write('gs://bucket/out')
  assert not [*tmp_path.iterdir()]


def test_the_command_names_its_programs(monkeypatch, capsys):
  assert set(ASKED_COMMANDS) <= set(cli.COMMANDS)
  for name in cli.COMMANDS:
    module = importlib.import_module(f'launch.{name.replace("-", "_")}')
    assert callable(module.run)
  monkeypatch.setattr(sys, 'argv', ['fedjax-het', 'tran'])
  with pytest.raises(SystemExit) as end:
    cli.main()
  assert end.value.code == 2
  assert capsys.readouterr().err.startswith(
      "Error: Unknown command 'tran'; did you mean 'train'? Known are train, "
  )
  monkeypatch.setattr(sys, 'argv', ['fedjax-het', '--help'])
  cli.main()
  out = capsys.readouterr().out
  assert all(f'\n  {name} ' in out for name in ASKED_COMMANDS)


def test_a_warning_is_shown_once_and_a_message_each_time(capsys):
  handler = terminal._Log()
  for level, text in (
      (logging.WARNING, 'few examples'), (logging.INFO, 'cell done'),
      (logging.WARNING, 'few examples'), (logging.INFO, 'cell done'),
      (logging.WARNING, 'no examples'),
  ):  # fmt: skip
    handler.emit(logging.LogRecord('x', level, '', 0, text, None, None))
  assert capsys.readouterr().err.splitlines() == [
      'Warning: few examples', 'cell done', 'cell done', 'Warning: no examples'
  ]


def test_commands_are_named_as_they_were_started(monkeypatch):
  text = 'Resume with: python -m launch.prepare_data --list'
  assert terminal.as_started(text) == text
  monkeypatch.setattr(terminal, '__package__', 'fedjax_het.launch')
  assert terminal.as_started(text) == (
      'Resume with: fedjax-het prepare-data --list'
  )


def test_help_names_all_there_is(monkeypatch, capsys):
  monkeypatch.setattr(sys, 'argv', ['train', '--config=x.py', '--help'])
  train.run()
  out = capsys.readouterr().out
  text = train.names()
  assert out.startswith('Runs one experiment') and out.endswith(f'{text}\n')
  assert '--[no]dry_run: ' in out and 'Default: None' not in out
  for name in ('fedselect', 'tfds:NAME', 'beta_heterofl', 'wo_opt', 'quick'):
    assert name in text
  assert max(map(len, text.splitlines())) <= 80


def test_help_shows_the_defaults_of_flags():
  found = flags.FlagValues()
  flags.DEFINE_integer('a', 0, 'A.', flag_values=found)
  flags.DEFINE_bool('b', True, 'B.', flag_values=found)
  flags.DEFINE_bool('c', False, 'C.', flag_values=found)
  flags.DEFINE_list('d', '', 'D.', flag_values=found)
  flags.DEFINE_string('e', None, 'E.', flag_values=found)
  flags.DEFINE_string('f', 'attack', 'F.', flag_values=found)
  shown = {name: terminal._default(found[name]) for name in 'abcdef'}
  assert shown == dict(
      a=' Default: 0.', b=' Default: true.', c='', d='', e='',
      f=' Default: attack.',
  )  # fmt: skip


def test_a_dry_run_says_what_a_run_would_take():
  config = experiment.default_config('fedavg')
  config.groups = dict(mlp=4)
  config.model = dict(hidden=8, depth=2, norm='none')
  config.cohort_size = 2
  found = preview.lines(config)
  text = '\n'.join(found)
  assert '1,442 training and 355 test examples of shape 8x8x1' in text
  assert 'Partition: dirichlet alpha=0.5 ' in text and '4 clients of ' in text
  (row,) = (line for line in text.splitlines() if line.startswith('mlp '))
  numbers = 64 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10
  assert f'{numbers:,}' in row
  assert f'{4 * numbers / 1e6:.5f} MB' in row  # The model, down.
  assert f'of 4 clients, about {2 * 4 * numbers / 1e6:.5f} MB down' in text
  assert 'Memory: at least ' in text
  assert re.search('Time: about .* s of plain local training a round', text)
  first, _ = preview._traffic(experiment.build(config), {'mlp': (1e6, 3e6)})
  assert first == (
      'A round: 2 of 4 clients, about 2.00 MB down and 6.00 MB up.'
  )


def test_the_time_of_a_round_follows_from_one_step(monkeypatch):
  monkeypatch.setattr(duration, '_step_seconds', lambda *args: 0.5)
  config = tiny_config(cohort_size=2, backend='map')
  config.local.epochs, config.local.batch_size = 3, 10
  config.groups.large.depth = 2  # All groups have one model.
  built = experiment.build(config)
  steps = 3 * sum(-(-len(part) // 10) for part in built.parts)
  assert duration.estimate(built).round_seconds == pytest.approx(
      2 / 5 * 0.5 * steps
  )
  config.backend = 'vmap'
  built = experiment.build(config)
  assert duration.estimate(built) is None
  (line,) = preview._time(built, 'vmap')
  assert line.startswith('Time: not estimated for the backend vmap, ')
  assert tables.duration(0.2345) == '0.23 s'
  assert tables.duration(210) == '3.5 min'
  assert tables.duration(80_000) == '22 h'


def test_print_config_and_dry_run_write_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(duration, '_step_seconds', lambda *args: 0.5)
  monkeypatch.chdir(tmp_path)
  try:
    done = programs.call(
        'train', ['--config=fedavg:quick', '--print_config', '--dry_run']
    )
  finally:
    for name in ('print_config', 'dry_run'):  # Flags outlive a test.
      flags.FLAGS[name].unparse()
  assert done.code == 0, done.err
  config, end = json.JSONDecoder().raw_decode(done.out)
  assert config['algorithm']['name'] == 'fedavg'
  assert done.out[end:].startswith('\nData: digits, ')
  assert done.out.endswith('Nothing was trained.\n')
  assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ('workdir', 'message'),
    [
        ('gs://bucket/run', 'cloud folders are not supported; mount it'),
        ('there', 'there is a file, not a folder'),
        ('thesis', 'thesis holds no run, but report.md, which a run replaces'),
        ('other', 'other holds a run of another config: algorithm.mu is 0.1'),
        ('broken', 'broken holds metrics.jsonl but no config.json, so'),
    ],
)
def test_a_dry_run_refuses_the_workdir_that_a_run_refuses(
    workdir, message, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'there').touch()
  for name, file in (('thesis', 'report.md'), ('broken', 'metrics.jsonl')):
    (tmp_path / name).mkdir()
    (tmp_path / name / file).touch()
  settle_config(tmp_path, experiment.default_config('fedprox'))
  (tmp_path / 'other').mkdir()
  (tmp_path / 'config.json').rename(tmp_path / 'other' / 'config.json')
  said, before = [], sorted(tmp_path.rglob('*'))
  for more in ([], ['--dry_run']):
    try:
      done = programs.call(
          'train', ['--config=fedavg:quick', f'--workdir={workdir}', *more]
      )
    finally:
      for name in ('workdir', 'dry_run'):  # Flags outlive a test.
        flags.FLAGS[name].unparse()
    assert done.code == 2 and not done.out
    said.append(done.err)
  assert message in said[0] and said[0] == said[1]
  assert sorted(tmp_path.rglob('*')) == before


def test_a_part_of_a_data_set_is_taken_on_request(tmp_path, capsys):
  write_raw(tmp_path / 'fashion_mnist', 60, 20)
  entries = dict(
      dataset='fashion_mnist', data_dir=str(tmp_path), data_file=None,
      image_size=None,
  )  # fmt: skip
  data = sources.load_entries(**entries, verify=False)
  assert len(data.train_labels) == 60
  where = '--config.dataset=fashion_mnist', f'--config.data_dir={tmp_path}'
  done = programs.call('train', [QUICK, *where])
  assert done.code == 2 and 'pass --config.verify=false' in done.err
  # Programs without a flag for it.
  with pytest.raises(ValueError) as error:
    sources.load_entries(**entries, verify=True)
  with pytest.raises(SystemExit):
    terminal.fail(error.value)
  assert 'set verify=False in the config to use' in capsys.readouterr().err


def test_the_second_signal_ends_a_busy_main_thread():
  """The main thread stays in C code, as during compilation."""
  code = (
      'import hashlib, os\n'
      'from launch import stopping\n'
      'with stopping.watched(lambda: os.write(1, b"first"),\n'
      '                      lambda: os._exit(130)):\n'
      '  os.write(1, b"ready")\n'
      '  hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)\n'
  )
  process = subprocess.Popen(
      [sys.executable, '-c', code], stdout=subprocess.PIPE, cwd=ROOT
  )
  try:
    assert process.stdout.read(5) == b'ready'
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert process.stdout.read() == b'first'
  finally:
    process.kill()


def test_a_ctrl_c_that_a_callback_loses_still_ends_the_program():
  code = (
      'import gc, signal\n'
      'import jax\n'
      'from launch import stopping\n'
      'signal.signal(signal.SIGINT, signal.default_int_handler)\n'
      'def callback(*args):\n'
      '  gc.callbacks.remove(callback)\n'
      '  signal.raise_signal(signal.SIGINT)\n'
      'with stopping.second_ends_at_once():\n'
      '  stopping.raise_if_it_came()\n'
      '  gc.callbacks.append(callback)\n'
      '  gc.collect()\n'
      '  print("lost", flush=True)\n'
      '  stopping.raise_if_it_came()\n'
      '  print("goes on", flush=True)\n'
  )
  done = subprocess.run(
      [sys.executable, '-c', code], cwd=ROOT, text=True, capture_output=True
  )
  assert done.stdout == 'lost\n' and 'Exception ignored' not in done.stderr
  assert done.stderr.endswith('KeyboardInterrupt\n')
  assert 'Stopping: waiting' in done.stderr and done.returncode


def test_the_first_ctrl_c_of_any_command_says_what_it_waits_for():
  code = (
      'import functools, hashlib, signal, threading\n'
      'import jax\n'
      'from launch import stopping\n'
      # It may be ignored where the tests run.
      'signal.signal(signal.SIGINT, signal.default_int_handler)\n'
      'with stopping.second_ends_at_once():\n'
      '  say = functools.partial(print, "ready", flush=True)\n'
      '  threading.Timer(0.2, say).start()  # When the other is in C.\n'
      '  hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)\n'
  )
  process = subprocess.Popen(
      [sys.executable, '-c', code], cwd=ROOT, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip
  try:
    assert process.stdout.readline() == 'ready\n'
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == '\n'
    assert 'Once more stops at once.' in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert process.stderr.read() == '\nInterrupted.\n'
  finally:
    process.kill()


@pytest.mark.parametrize(
    ('done', 'what'),
    [
        (None, 'the compilation and the first round'),
        (0, 'the compilation and the first round'),
        (3, 'the round after 3 of 20'),
        (20, 'the report'),
    ],
)
def test_a_run_says_what_the_first_signal_waits_for(done, what, capsys):
  stop = train._Stop(20)
  if done is not None:
    stop.observe(dict(round=done))
  stop.ask()
  assert stop.asked
  assert f'waiting for {what} and its checkpoint' in capsys.readouterr().err


def test_signals_have_their_old_handlers_afterwards():
  seen = []
  before = signal.getsignal(signal.SIGTERM)
  with stopping.watched(lambda: seen.append('first'), lambda: None):
    assert signal.getsignal(signal.SIGTERM) is not before
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(100):
      if seen:
        break
      time.sleep(0.01)
  assert seen == ['first'] and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_ctrl_c_twice_while_compiling(tmp_path):
  args = ['--config=configs/fedin.py', '--config.compilation_cache=false']
  process = subprocess.Popen(
      [sys.executable, '-m', 'launch.train', *args, '--workdir=w'],
      cwd=tmp_path,
      env=dict(os.environ, JAX_PLATFORMS='cpu', PYTHONPATH=str(ROOT)),
      stderr=subprocess.PIPE,
      text=True,
  )
  for line in process.stderr:
    if 'Compiling' in line:
      break
  time.sleep(1)
  process.send_signal(signal.SIGINT)
  for line in process.stderr:  # Round 0 may be printed before it.
    if 'waiting for' in line:
      break
  assert 'waiting for the compilation and the first round' in line
  process.send_signal(signal.SIGINT)
  rest = process.stderr.read()
  assert process.wait(10) == 130 and 'Compiled' not in rest
  assert 'Interrupted. Resume with: python -m launch.train ' in rest


def test_the_command_says_why_a_callback_has_ended_a_run(tmp_path, monkeypatch):
  result = experiment.Result(
      tmp_path, [], {}, experiment.summarise([]), None, False, 'good enough'
  )
  monkeypatch.setattr(experiment, 'run', lambda *args, **options: result)
  monkeypatch.setattr(tables, 'results', lambda *args: [['']])
  monkeypatch.setattr(tables, 'totals', lambda *args: [])
  args = ['--config=fedavg:quick', f'--workdir={tmp_path}']
  done = programs.call('train', args)
  assert done.code == 0, done.err
  assert 'Stopped after round 0: good enough.' in done.out

  def fail(*args, **options):
    raise CallbackError('The callback Mine failed in on_row: no')

  monkeypatch.setattr(experiment, 'run', fail)
  done = programs.call('train', args)
  assert done.code == 1
  assert 'Error: The callback Mine failed in on_row: no. When that' in done.err


def test_the_command_of_a_wrong_metric_is_not_repeated(tmp_path):
  args = [
      '--config=fedavg:quick', f'--workdir={tmp_path}',
      '--config.callbacks.metric=acuracy', '--config.callbacks.patience=2',
  ]  # fmt: skip
  done = programs.call('train', args)
  assert done.code == 2
  last = done.err.splitlines()[-1]
  assert "did you mean 'accuracy'?" in last and '..' not in last
  assert '. With that corrected, go on with: python -m launch.train ' in last
