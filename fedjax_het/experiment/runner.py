"""Runs an experiment in a workdir, from its start or its last checkpoint."""

from collections.abc import Callable, Sequence
import contextlib
import json
import logging
import os
import pathlib
from typing import Any, NamedTuple

import ml_collections

from fedjax_het.engine.drivers import Driver
from fedjax_het.engine.rounds import State
from fedjax_het.experiment import callbacks as callbacks_lib
from fedjax_het.experiment import facts as facts_lib
from fedjax_het.experiment import form as form_lib
from fedjax_het.experiment import processes
from fedjax_het.experiment.build import Experiment, build
from fedjax_het.experiment.cache import enable_compilation_cache
from fedjax_het.experiment.checkpoints import Checkpoints
from fedjax_het.experiment.checks import check, check_is_config
from fedjax_het.experiment.metrics_file import NO_LINES, restore_rows
from fedjax_het.experiment.programs import (
  Programs,
  compile_programs,
  make_driver,
  run_keys,
)
from fedjax_het.experiment.progress import Progress, in_notebook
from fedjax_het.experiment.shared_checkpoints import open_checkpoints
from fedjax_het.experiment.training import RowReader, RowWriter, train
from fedjax_het.experiment.workdir import (
  check_workdir,
  lock,
  new_workdir,
  settle_config,
  store_config,
)
from fedjax_het.files import check_local, write_atomically
from fedjax_het.kernels import libraries
from fedjax_het.reporting import shown
from fedjax_het.reporting.report import write_report
from fedjax_het.reporting.run_files import Row
from fedjax_het.reporting.summary import Summary, summarise

_log = logging.getLogger(__name__)


class Result(NamedTuple):
  """The result of a run.

  Attributes:
    workdir: Its folder.
    rows: The lines of metrics.jsonl.
    facts: The contents of facts.json.
    summary: A summary of the rows.
    state: The state after the last round.
    finished: False if it ended before its last round.
    stopped: Why a callback ended it; '' if none did.

  It is shown as a table of accuracies, in notebooks as HTML.
  """

  workdir: pathlib.Path
  rows: list[Row]
  facts: dict[str, Any]
  summary: Summary
  state: State
  finished: bool
  stopped: str = ''

  @property
  def _title(self) -> str:
    end = '' if self.finished else ', stopped before its last'
    end += f' ({self.stopped})' if self.stopped else ''
    return f'{self.workdir}: {self.summary.rounds} rounds{end}'

  def __repr__(self) -> str:
    return shown.as_text(self._title, self.summary, self.facts)

  def _repr_html_(self) -> str:
    return shown.as_html(self._title, self.summary, self.facts)


def run(
    config,
    workdir: str | os.PathLike | None = None,
    *,
    callbacks: Sequence[callbacks_lib.Callback] = (),
    observe: Callable[[Row], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
  """Trains and evaluates as the config says, and writes a report.

  If the workdir holds a run of this config, the run is resumed. All lines of
  metrics.jsonl are then, except for `seconds`, bit for bit those of a run that
  was never interrupted. Lines of rounds after the last valid checkpoint are
  removed and computed again. For a finished run, only the report is rewritten.

  Args:
    config: See `default_config`.
    workdir: A folder, created if it is missing; None for a new one under
      ./runs.
    callbacks: Objects that follow the run, see `Callback`. The callbacks of the
      config are called before them.
    observe: Called with each new line of metrics.jsonl; None shows the run's
      progress in a notebook, and nothing elsewhere.
    stop: Called after every dispatch, which is one round by default; True ends
      the run with a checkpoint. In a run of several processes, all call `run`,
      and any of them may stop it; `observe` is called in the first one, which
      writes all files.

  Returns:
    The result.

  Raises:
    ValueError: If the config is wrong, or the workdir holds another run, is in
      use, or is damaged beyond repair.
    FileNotFoundError: If the data are missing.
    FloatingPointError: If an update of a client or of a server that trains is
      not finite and `config.nonfinite` is 'raise'; the last checkpoint precedes
      that update.
    CallbackError: If a callback raises an error; the checkpoints stay.
    OSError: If the disk is full; the run can be resumed once there is space.
  """
  check_is_config(config)
  if workdir is not None:
    if not isinstance(workdir, str | os.PathLike):
      raise ValueError(f'workdir must be a path, got {workdir!r}.')
    if not os.fspath(workdir):
      raise ValueError('workdir is empty.')
    check_local(workdir, 'workdir')
  with contextlib.ExitStack() as stack:
    choose = form_lib.Chooser(
        config, workdir and pathlib.Path(workdir), stack, measures=True
    )
    stack.enter_context(libraries.allowed_cache(str(config.get('conv_backend'))))
    processes.together(lambda: check(config))
    if workdir is None:
      workdir = processes.on_first(lambda: str(new_workdir(config)))
    folder = pathlib.Path(workdir)
    # Before the data are read; `claim` does it again under the lock.
    processes.on_first(
        lambda: folder.is_dir() and check_workdir(folder, config)
    )
    if not isinstance(callbacks, Sequence):
      raise ValueError(
          f'callbacks must be a list of callbacks, got {callbacks!r:.80}.'
      )
    follow = processes.together(
        lambda: callbacks_lib.Callbacks(
            [*callbacks_lib.from_config(config), *callbacks]
        )
    )
    _keep_programs(config)  # Before `build`, which compiles some of them.
    experiment = processes.together(lambda: build(config, choose))
    asked = ml_collections.FrozenConfigDict(config)
    config = experiment.config
    if observe is None:
      observe = _progress(experiment, stack)
    processes.check_config(asked)
    driver = processes.together(lambda: make_driver(experiment))

    def claim():
      stack.enter_context(lock(folder))
      if settle_config(folder, asked):
        choose.store(folder)
      path = folder / 'metrics.jsonl'
      if not (folder / 'checkpoints').exists() and _holds_anything(path):
        raise _without_checkpoints(path)

    processes.on_first(claim)
    processes.check_folder(folder)
    _log.info('Workdir: %s', folder)
    checkpoints = processes.together(
        lambda: open_checkpoints(
            folder / 'checkpoints', config.keep_checkpoints
        )
    )
    stack.callback(checkpoints.close)
    state, rows, notes = _begin(experiment, driver, folder, checkpoints)
    processes.on_first(lambda: store_config(folder, asked))
    facts = facts_lib.measure(experiment)
    todo = int(state.round_num) < config.num_rounds or not rows
    some = bool(follow)  # Before the other processes drop their callbacks.
    if not processes.is_first():
      follow = callbacks_lib.Callbacks(())

    def stopped():
      """Why a callback asks to stop, in all processes; '' if none does."""
      return processes.on_first(lambda: follow.stopped) if some else ''

    if todo:
      stack.callback(follow.close)
      begin = callbacks_lib.Start(
          config, folder, (*rows,), int(state.round_num), facts, experiment,
          notes,
      )  # fmt: skip
      processes.together(lambda: follow.start(begin))
    if todo and not stopped():
      programs = processes.together(
          lambda: compile_programs(experiment, driver, state)
      )
      stack.callback(_end_compilation, programs)
      facts.update(choose.facts())
      if processes.is_first():
        if experiment.algorithm.facts is not None:
          facts.update(experiment.algorithm.facts())
        write_atomically(folder / 'facts.json', json.dumps(facts))
        writer = RowWriter(folder, rows, observe, follow)
      else:
        writer = RowReader(rows)
      stack.callback(writer.close)
      # Called before `writer.close`: a checkpoint's thread copies the lines.
      stack.callback(checkpoints.finish)
      state = train(
          experiment,
          programs,
          lambda: _await_rounds(programs, folder, facts),
          state,
          checkpoints,
          notes,
          writer,
          processes.Stop(lambda: bool(stop() or follow.stopped)),
          follow,
          stopped,
      )
    else:
      facts = processes.on_first(
          lambda: facts_lib.stored(folder / 'facts.json', facts)
      )
    # A callback may stop a run before its first evaluation.
    if any(row['split'] == 'test' for row in rows):
      processes.on_first(lambda: write_report(folder) and None)
    result = Result(
        folder,
        rows,
        facts,
        summarise(
            rows, config.target_accuracy, experiment.federation.task.main
        ),
        state,
        int(state.round_num) == config.num_rounds,
    )
    if not result.finished:
      result = result._replace(stopped=stopped())
    if todo:
      follow.end(result)
  return result


def _await_rounds(programs: Programs, folder: pathlib.Path, facts) -> None:
  """Waits for the rounds' compilation; adds memory and seconds to the facts."""
  facts.update(
      program_memory=processes.together(programs.memory),
      compile_seconds=programs.compile_seconds(),
  )
  if processes.is_first():
    write_atomically(folder / 'facts.json', json.dumps(facts))


def _end_compilation(programs: Programs) -> None:
  """Waits for the compilation, without hiding an earlier error by its own."""
  with contextlib.suppress(Exception):
    programs.memory()


def _progress(experiment, stack) -> Callable[[Row], None]:
  """An observer that shows progress in a notebook, and nothing elsewhere."""
  if not in_notebook():
    return lambda row: None
  task = experiment.federation.task
  progress = Progress(experiment.config.num_rounds, metric=task.main)
  stack.callback(progress.close)
  return progress


def _keep_programs(config) -> None:
  """Turns the compilation cache on if the config asks for it."""
  if library := libraries.uncacheable(config.conv_backend):
    _log.info("Programs with %s's convolutions are not kept on disk.", library)
  elif config.compilation_cache and enable_compilation_cache() is None:
    _log.warning('The cache folder cannot be written; programs are not kept.')


def _begin(
    experiment: Experiment,
    driver: Driver,
    folder: pathlib.Path,
    checkpoints: Checkpoints,
) -> tuple[State, list[Row], dict[str, Any]]:
  """The state to continue from, the rows before it, and notes to store."""
  path, copy = folder / 'metrics.jsonl', checkpoints.folder / 'metrics.jsonl'
  fingerprint = facts_lib.fingerprint(experiment)
  notes = dict(fingerprint, versions=facts_lib.versions())
  processes.check_same(fingerprint, 'the same data and partition')
  restored = processes.together(
      lambda: checkpoints.restore(driver.shapes(), driver.on_host)
  )
  if restored is None:
    # The first checkpoint is written before the first line, so lines without
    # a checkpoint mean that checkpoints were removed.
    if processes.on_first(lambda: _holds_anything(path, copy)):
      raise processes.on_all(_without_checkpoints(path))
    state = driver.init(run_keys(experiment.config)[0])
    checkpoints.save(0, state, notes)
    checkpoints.wait()
    return state, [], notes
  if not facts_lib.is_of(restored.notes, fingerprint):
    raise processes.on_all(
        ValueError(
            f'The data or their partition are not those with which the run in '
            f'{folder} was begun; check data_dir and data_file, or choose '
            'another workdir.'
        )
    )
  if restored.notes['versions'] != notes['versions']:
    _log.warning(
        'The run was begun with %s and goes on with %s: last bits may differ.',
        restored.notes['versions'], notes['versions'],
    )  # fmt: skip
  if restored.step > experiment.config.num_rounds:
    raise processes.on_all(
        ValueError(
            f'The workdir {folder} has done {restored.step} rounds, more than '
            f'num_rounds={experiment.config.num_rounds}.'
        )
    )
  mark = restored.notes.get('metrics')
  if not restored.step:
    # This checkpoint is from before the warm-up, which is run again.
    mark = NO_LINES
  rows = processes.on_first(
      lambda: restore_rows(path, copy, restored.step, mark)
  )
  if restored.step < experiment.config.num_rounds:
    _log.info('Resuming %s after round %d.', folder, restored.step)
  return driver.place(restored.state), rows, notes


def _without_checkpoints(path: pathlib.Path) -> ValueError:
  return ValueError(
      f'{path} holds the metrics of a run whose checkpoints are gone; restore '
      'them, or choose another workdir.'
  )


def _holds_anything(*paths: pathlib.Path) -> bool:
  """Whether any of the paths exists and is not an empty file."""
  return any(
      os.path.lexists(path) and not (path.is_file() and not path.stat().st_size)
      for path in paths
  )
