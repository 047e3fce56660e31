r"""Runs one experiment, or goes on with one that was interrupted.

  python -m launch.train
  python -m launch.train --config=configs/fedin.py:quick --workdir=/tmp/quick
  python -m launch.train --config=configs/fedavg.py:fashion_mnist,iid \
      --config.data_dir=DIR --config.num_rounds=50

Variants follow the config file after a colon; `--config.<key>=<value>` sets
any entry. Without a workdir a new one is made under ./runs. The same command
with the same workdir resumes. `--distributed` makes this one of several
processes of a run; see docs/scaling.md. Exit codes: 0 all rounds are done, 1
the run failed (full disk, a client's NaN, a process lost), 2 the command or
config is wrong, 130 interrupted.
"""

from collections.abc import Iterator, Sequence
import contextlib
import logging
import os
import pathlib
import re
import shlex
import signal
import sys
import traceback
from typing import Any, NoReturn

from absl import app, flags
from absl import logging as absl_logging
import ml_collections
from ml_collections import config_flags
import tqdm

from launch import distributed, python_files
from launch.terminal import (
  CommandError,
  expanded,
  fail,
  folder,
  line,
  read_expanded,
  with_flagfiles,
)

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def _define_config():
  """The config's flag; to define it would read the flagfiles of sys.argv."""
  argv, sys.argv = sys.argv, sys.argv[:1]
  try:
    return config_flags.DEFINE_config_file(
        'config', None, 'FILE[:variant,...]; configs/fedin.py by default.'
    )
  finally:
    sys.argv = argv


_CONFIG = _define_config()
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder of the run; a new one under ./runs by default.'
)
_DISTRIBUTED = flags.DEFINE_bool(
    'distributed', False, 'Run in several processes, of which this is one.'
)
_COORDINATOR = flags.DEFINE_string(
    'coordinator', None, 'HOST:PORT of process 0, where JAX cannot find it.'
)
_NUM_PROCESSES = flags.DEFINE_integer(
    'num_processes', None, 'How many there are, where JAX cannot find it.'
)
_PROCESS_ID = flags.DEFINE_integer(
    'process_id', None, 'Which this is, from 0, where JAX cannot find it.'
)
_PLAN = flags.DEFINE_enum(
    'plan',
    None,
    ('paper', 'measured'),
    "Whose figures FeDepth's schedules go by; else as the config says.",
)
_DEBUG = flags.DEFINE_bool('debug', False, 'Show where an error came from.')
_OVERRIDE = re.compile(r'--?(?P<no>no)?config\.(?P<key>[^=]*)(=(?P<value>.*))?')
_BOOLEANS = dict.fromkeys(('true', 't', '1'), True) | dict.fromkeys(
    ('false', 'f', '0'), False
)
_PARSERS = {
    int: ('an integer', int),
    float: ('a finite number', float),
    bool: ('true or false', lambda text: _BOOLEANS[text.lower()]),
}


# The command as it was typed, to be shown again.
_typed: list[str] = []


def parse_flags(argv: Sequence[str]) -> list[str]:
  """absl's flags parser, with the default config and one line per error.

  Args:
    argv: The command line.

  Returns:
    What is not a flag: the program's name alone.
  """
  _typed[:] = argv[1:]
  try:
    argv = _with_config(with_flagfiles(argv))
    _check_overrides(argv)
    sys.argv = argv  # Where the config flag looks for its overrides.
    rest = read_expanded(argv)
    if len(rest) > 1:
      raise CommandError(
          f'Unexpected argument {rest[1]!r}; options look like --workdir=DIR.'
      )
    if _PLAN.value is not None:
      section = _CONFIG.value.algorithm
      if 'plan' not in section:
        raise CommandError(f'--plan is for fedepth, not for {section.name}.')
      section.plan = _PLAN.value
    if not _DISTRIBUTED.value:
      for flag in (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID):
        if flag.value is not None:
          raise CommandError(f'--{flag.name} needs --distributed.')
    return rest
  except CommandError as e:
    if '--debug' in argv:
      raise
    fail(e, 2)


def _with_config(argv: list[str]) -> list[str]:
  """Puts the config in front as one argument with a path that exists."""
  specs, rest, args = [], [], iter(argv[1:])
  for arg in args:
    if re.fullmatch(r'--?config', arg):
      specs.append(next(args, ''))
    elif re.match(r'--?config=', arg):
      specs.append(arg.split('=', 1)[1])
    else:
      rest.append(arg)
  if '' in specs:
    raise CommandError('--config needs a file, --config=FILE.')
  # Of a flagfile's and the command line's the last one counts.
  spec = specs[-1] if specs else 'configs/fedin.py'
  name, colon, variants = spec.partition(':')
  # From any folder, the experiments that come with the library are found.
  paths = [pathlib.Path(name), _ROOT / name]
  path = next((path for path in paths if os.path.isfile(path)), None)
  if path is None:
    known = sorted(
        f'configs/{path.name}'
        for path in (_ROOT / 'configs').glob('*.py')
        if path.name not in ('__init__.py', 'common.py', 'fedhe_setting.py')
    )
    raise CommandError(
        f'No config file {name!r}; there are {", ".join(known)}.'
    )
  return [argv[0], f'--config={path}{colon}{variants}', *rest]


def _load_config(spec: str) -> Any:
  """The config of FILE[:variants], with errors that need no traceback."""
  name, colon, variants = spec.partition(':')
  try:
    module = python_files.load(name, 'get_config')
    config = python_files.call(
        module, 'get_config', *([variants] if colon else [])
    )
  except ValueError as e:
    raise CommandError(str(e)) from e
  if not isinstance(config, ml_collections.ConfigDict):
    raise CommandError(
        f'{name}: get_config returns {type(config).__name__}, not a ConfigDict.'
    )
  return config


def _check_overrides(argv: list[str]) -> None:
  """Refuses overrides of keys that do not exist, or with values of no sense."""
  config = _load_config(argv[1].split('=', 1)[1])
  from fedjax_het.names import suggest
  from fedjax_het.renamed import new_name

  for i, arg in enumerate(argv):
    match = _OVERRIDE.fullmatch(arg)
    if not match:
      continue
    section, path = config, match['key'].split('.')
    for depth, name in enumerate(path):
      known = list(section) if hasattr(section, 'keys') else []
      if name not in known:
        where = '.'.join(path[: depth + 1])
        if new_name(where):
          raise CommandError(f'--config.{new_name(where)}')
        hint = suggest(name, known) if known else '.'
        raise CommandError(f'Unknown config key {where}{hint}')
      kind = section.get_type(name)
      section = section[name]
    value = match['value']
    # Only a boolean may stand without a value.
    if value is None and kind is not bool and i + 1 < len(argv):
      value = argv[i + 1]
    if kind in _PARSERS and value is not None:
      words, parse = _PARSERS[kind]
      try:
        parse(value)
      except (ValueError, KeyError):
        raise CommandError(
            f'{match["key"]} must be {words}, got {value!r}.'
        ) from None


class _Log(logging.Handler):
  """Writes the library's messages without breaking a progress bar."""

  def emit(self, record):
    prefix = '' if record.levelno < logging.WARNING else 'Warning: '
    tqdm.tqdm.write(prefix + record.getMessage(), file=sys.stderr)


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
  """Collects the first Ctrl-C or SIGTERM; a second one interrupts at once."""
  received: list[int] = []

  def handle(number, frame):
    del frame
    received.append(number)
    if len(received) > 1:
      raise KeyboardInterrupt
    tqdm.tqdm.write(
        'Stopping after this round; once more stops at once.', file=sys.stderr
    )

  old = {
      number: signal.signal(number, handle)
      for number in (signal.SIGINT, signal.SIGTERM)
  }
  try:
    yield received
  finally:
    for number, handler in old.items():
      signal.signal(number, handler)


def _resume_command(workdir: pathlib.Path) -> str:
  command = ['python', '-m', 'launch.train', *_typed]
  if _WORKDIR.value is None:
    command.append(f'--workdir={workdir}')
  return shlex.join(command)


def main(argv: Sequence[str]) -> None:
  """Runs the experiment that the flags describe."""
  del argv
  absl_logging.set_verbosity(absl_logging.WARNING)
  if _DISTRIBUTED.value:
    try:
      distributed.start(
          _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
      )
    except ValueError as e:
      fail(e, 2)
  # Imported here, so that --help and a typing error answer at once.
  from fedjax_het import experiment
  from fedjax_het.experiment import processes

  first = processes.is_first()
  log = logging.getLogger('fedjax_het')
  log.handlers, log.propagate = [_Log()], False
  log.setLevel(logging.INFO if first else logging.ERROR)
  config = _CONFIG.value
  progress = None
  workdir = None
  try:
    processes.together(lambda: experiment.check(config))
    for entry in ('data_dir', 'data_file'):
      if config[entry]:
        expanded(config[entry], f'--config.{entry}')
    workdir = pathlib.Path(
        processes.on_first(
            lambda: str(_folder() or experiment.new_workdir(config))
        )
    )
    if first:
      progress = experiment.Progress(config.num_rounds)
    with _asked_to_stop() as received:
      result = experiment.run(
          config,
          workdir,
          observe=progress or (lambda row: None),
          stop=lambda: bool(received),
      )
  except (ValueError, FileNotFoundError, ImportError) as e:
    _end(progress, e, 2)
  except FloatingPointError as e:
    _end(progress, e, 1)
  except OSError as e:
    command = _resume_command(workdir)
    _end(progress, e, 1, f'When that is settled, go on with: {command}')
  except KeyboardInterrupt as e:
    command = _resume_command(workdir)
    _end(progress, e, 130, f'Interrupted. Resume with: {command}')
  except Exception as e:
    if not distributed.is_on():
      raise
    _end(progress, e, 1)
  if first:
    progress.close()
    _show(config, workdir, result)
  code = 0 if result.finished else 130
  distributed.finish(code)
  if code:
    sys.exit(code)


def _folder() -> pathlib.Path | None:
  """The workdir that the flag names."""
  text = _WORKDIR.value
  return None if text is None else folder('--workdir', text)


def _show(config, workdir: pathlib.Path, result) -> None:
  """Prints what a run has come to."""
  from fedjax_het.reporting import tables

  print()
  print(tables.as_text(tables.results(result.summary, result.facts)))
  print(*tables.totals(result.summary, config.target_accuracy), sep='\n')
  print(f'Report: {workdir / "report.md"}')
  if not result.finished:
    rounds = result.summary.rounds
    print(
        f'Stopped after round {rounds} of {config.num_rounds}. Resume with: '
        f'{_resume_command(workdir)}'
    )


def _end(progress, error: BaseException, code: int, advice='') -> NoReturn:
  """Ends the bar, then the process, with one line and maybe an advice."""
  if progress is not None:
    progress.close()
  text = f'Error: {line(error)}' + (f'. {advice}' if advice else '')
  if isinstance(error, KeyboardInterrupt):
    text = advice
  if distributed.is_on():
    if _DEBUG.value:
      traceback.print_exception(error)
    distributed.end(error, code, text)
  if _DEBUG.value:
    raise error
  print(text, file=sys.stderr)
  sys.exit(code)


if __name__ == '__main__':
  app.run(main, flags_parser=parse_flags)
