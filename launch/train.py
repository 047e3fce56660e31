r"""Runs one experiment, or resumes one that was interrupted.

  python -m launch.train
  python -m launch.train --config=configs/fedin.py:quick --workdir=/tmp/quick
  python -m launch.train --config=configs/fedavg.py:fashion_mnist,iid \
      --config.data_dir=DIR --config.num_rounds=50

Variants follow the config file after a colon; `--config.<key>=<value>` sets
any entry. Without --workdir, a new workdir is made under ./runs. The same
command with the same workdir resumes. `--distributed` makes this one of several
processes of a run; see docs/scaling.md. Exit codes: 0 all rounds are done
or a callback stopped the run, 1 the run failed (full disk, a client's NaN, a
process lost), 2 the command or config is wrong, 130 interrupted.
"""

from collections.abc import Sequence
import json
import logging
import pathlib
import shlex
import sys
import textwrap
import traceback
from typing import NoReturn

from absl import flags
from absl import logging as absl_logging
import tqdm

from . import config_command, config_flag, distributed, stopping, terminal
from .terminal import CommandError, expanded, fail, folder, line

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
_PRINT_CONFIG = flags.DEFINE_bool(
    'print_config', False, 'Print the config with all its entries, and stop.'
)
_DRY_RUN = flags.DEFINE_bool(
    'dry_run', False,
    'Print data, partition, models, memory, bytes and time, and stop.',
)  # fmt: skip
_DEBUG = flags.DEFINE_bool('debug', False, 'Show where an error came from.')
# The command as it was typed, to be shown again.
_typed: list[str] = []


def parse_flags(argv: Sequence[str]) -> list[str]:
  """absl's flags parser, with the default config and one line per error.

  Args:
    argv: The command line.

  Returns:
    The arguments that are not flags: only the program's name.
  """
  _typed[:] = argv[1:]
  try:
    rest = config_command.read_flags(argv)
    if not _DISTRIBUTED.value:
      for flag in (_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID):
        if flag.value is not None:
          raise CommandError(f'--{flag.name} needs --distributed.')
    return rest
  except CommandError as e:
    if '--debug' in argv:
      raise
    fail(e, 2)


class _Stop:
  """Handles the first Ctrl-C or SIGTERM, and prints what the run waits for.

  Attributes:
    asked: Whether the signal has come.
  """

  def __init__(self, num_rounds: int):
    self.asked = False
    self._done, self._num_rounds = None, num_rounds

  def observe(self, row) -> None:
    """Notes the round of a line of metrics.jsonl."""
    self._done = row['round']

  def ask(self) -> None:
    """Handles the first signal."""
    self.asked = True
    # The row of round 0 is written while the rounds are compiled.
    if not self._done:
      what = 'the compilation and the first round'
    elif self._done < self._num_rounds:
      what = f'the round after {self._done} of {self._num_rounds}'
    else:
      what = 'the report'
    tqdm.tqdm.write(
        f'Stopping after this round: waiting for {what} and its checkpoint. '
        'Once more stops at once.',
        file=sys.stderr,
    )


def _resume_command(workdir: pathlib.Path | None) -> str:
  words = [*terminal.command('train'), *_typed]
  if _WORKDIR.value is None and workdir is not None:
    words.append(f'--workdir={workdir}')
  return shlex.join(words)


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
  # Imported here, so that --help and typing errors are answered at once.
  from fedjax_het import experiment
  from fedjax_het.experiment import processes
  from fedjax_het.experiment.callbacks import CallbackError

  first = processes.is_first()
  log = logging.getLogger('fedjax_het')
  log.setLevel(logging.INFO if first else logging.ERROR)
  config = config_command.CONFIG.value
  progress = None
  workdir = None
  try:
    processes.together(lambda: experiment.check(config))
    stop = _Stop(config.num_rounds)
    for entry in ('data_dir', 'data_file'):
      if config[entry]:
        expanded(config[entry], f'--config.{entry}')
    if _PRINT_CONFIG.value or _DRY_RUN.value:
      log.setLevel(logging.WARNING)  # The preview says all that is known.
      if first:
        _show_plan(config, _folder())
      distributed.finish(0)
      return
    workdir = pathlib.Path(
        processes.on_first(
            lambda: str(_folder() or experiment.new_workdir(config))
        )
    )
    if first:
      progress = experiment.Progress(config.num_rounds)

    def observe(row):
      stop.observe(row)
      if progress is not None:
        progress(row)

    def end_at_once():
      print(f'\n{_interrupted(workdir)}', file=sys.stderr)
      distributed.leave(130)

    stopping.raise_if_it_came()
    with stopping.watched(stop.ask, end_at_once):
      result = experiment.run(
          config, workdir, observe=observe, stop=lambda: stop.asked
      )
  except (ValueError, FileNotFoundError, ImportError) as e:
    _end(progress, e, 2)
  except FloatingPointError as e:
    _end(progress, e, 1)
  except (CallbackError, OSError) as e:
    command = _resume_command(workdir)
    if isinstance(e.__cause__, ValueError):
      # The same command would fail in the same way.
      _end(progress, e, 2, f'With that corrected, go on with: {command}')
    _end(progress, e, 1, f'When that is settled, go on with: {command}')
  except KeyboardInterrupt as e:
    _end(progress, e, 130, _interrupted(workdir))
  except Exception as e:
    if not distributed.is_on():
      raise
    _end(progress, e, 1)
  if first:
    progress.close()
    _show(config, workdir, result)
  code = 0 if result.finished or result.stopped else 130
  distributed.finish(code)
  if code:
    sys.exit(code)


def _interrupted(workdir: pathlib.Path | None) -> str:
  return f'Interrupted. Resume with: {_resume_command(workdir)}'


def _show_plan(config, workdir: pathlib.Path | None) -> None:
  """Prints what the flags ask for instead of a run in a workdir."""
  if _PRINT_CONFIG.value:
    terminal.show(json.dumps(config.to_dict(), indent=2, sort_keys=True))
  if _DRY_RUN.value:
    from fedjax_het.experiment import preview

    terminal.show('\n'.join(preview.lines(config, workdir)))


def _folder() -> pathlib.Path | None:
  """The workdir that the flag names."""
  text = _WORKDIR.value
  return None if text is None else folder('--workdir', text)


def _show(config, workdir: pathlib.Path, result) -> None:
  """Prints the results of a run."""
  from fedjax_het.reporting import tables

  print()
  print(tables.as_text(tables.results(result.summary, result.facts)))
  print(*tables.totals(result.summary, config.target_accuracy), sep='\n')
  print(f'Report: {workdir / "report.md"}')
  rounds = result.summary.rounds
  if result.stopped:
    print(f'Stopped after round {rounds}: {result.stopped}.')
  elif not result.finished:
    print(
        f'Stopped after round {rounds} of {config.num_rounds}. Resume with: '
        f'{_resume_command(workdir)}'
    )


def _end(progress, error: BaseException, code: int, advice='') -> NoReturn:
  """Ends the bar, then the process, with one line and optional advice."""
  if progress is not None:
    progress.close()
  text = line(error).replace('pass verify=False', 'pass --config.verify=false')
  text = terminal.as_started(text)
  text = f'Error: {text}'
  if advice:
    text = f'{text.removesuffix(".")}. {advice}'
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


def names() -> str:
  """Lists the known methods, variants, data sets and partitions."""
  from fedjax_het.algorithms import ALGORITHMS
  from fedjax_het.configs import common
  from fedjax_het.data import own_files, sources
  from fedjax_het.data.partition import PARTITIONS

  lists = {
      'Methods (--config=NAME, or --config.algorithm.name=NAME)': ALGORITHMS,
      'Data sets (--config.dataset=NAME)': (
          *sources.DATASETS, *own_files.NAMES, f'{own_files.TFDS}NAME'
      ),
      'Partitions (--config.partition.name=NAME)': PARTITIONS,
      'Variants (--config=fedin:VARIANT,VARIANT), data set': common.DATA,
      "Variants, a paper's setting; text is ours": common.SETTINGS,
      'Variants, partition': (*common.SPLITS, 'file=PATH'),
      'Variants, size': common.SIZES,
      'Variants, clock': common.CLOCKS,
      'Variants, speed of its devices': common.SPEEDS,
      'Variants, one model for all clients': common.MODELS,
  }  # fmt: skip
  for name in config_flag.experiments():
    lists[f'Variants of {name} alone'] = config_flag.variants(name)
  paragraphs = [
      textwrap.fill(f'{what}: {", ".join(found)}', 80, subsequent_indent='  ')
      for what, found in lists.items()
      if found
  ]
  return '\n'.join([*paragraphs, '--print_config prints all other entries.'])


def run() -> None:
  """Runs the program."""
  terminal.run(main, parse_flags, __doc__, names)


if __name__ == '__main__':
  run()
