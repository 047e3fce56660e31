"""Runs an experiment in a workdir, from its start or its last checkpoint."""

from collections.abc import Callable
import contextlib
import json
import logging
import os
import pathlib
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_het.engine.drivers import Driver
from fedjax_het.engine.reports import RoundReport
from fedjax_het.engine.rounds import State
from fedjax_het.experiment import facts as facts_lib
from fedjax_het.experiment import metrics, processes
from fedjax_het.experiment.build import Experiment, build
from fedjax_het.experiment.cache import enable_compilation_cache
from fedjax_het.experiment.checkpoints import Checkpoints
from fedjax_het.experiment.checks import check
from fedjax_het.experiment.programs import (
  Programs,
  compile_programs,
  make_driver,
  rounds_to_run,
  run_keys,
)
from fedjax_het.experiment.shared_checkpoints import open_checkpoints
from fedjax_het.experiment.tensorboard import Board
from fedjax_het.experiment.workdir import lock, settle_config, store_config
from fedjax_het.files import check_local, read_json, write_atomically
from fedjax_het.kernels import libraries
from fedjax_het.reporting import shown
from fedjax_het.reporting.confusion_file import write_confusion
from fedjax_het.reporting.report import write_report

_log = logging.getLogger(__name__)


class Result(NamedTuple):
  """The result of a run.

  Attributes:
    workdir: Its folder.
    rows: The lines of metrics.jsonl.
    facts: The contents of facts.json.
    summary: A summary of the rows.
    state: The state after the last round.
    finished: False if `stop` ended it before its last round.

  Shown as a table of accuracies, in notebooks as HTML.
  """

  workdir: pathlib.Path
  rows: list[metrics.Row]
  facts: dict[str, Any]
  summary: metrics.Summary
  state: State
  finished: bool

  @property
  def _title(self) -> str:
    end = '' if self.finished else ', stopped before its last'
    return f'{self.workdir}: {self.summary.rounds} rounds{end}'

  def __repr__(self) -> str:
    return shown.as_text(self._title, self.summary, self.facts)

  def _repr_html_(self) -> str:
    return shown.as_html(self._title, self.summary, self.facts)


def run(
    config,
    workdir: str | os.PathLike,
    *,
    observe: Callable[[metrics.Row], None] = lambda row: None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
  """Trains and evaluates as the config says, and writes a report.

  If the workdir holds a run of this config, the run is resumed. All lines of
  metrics.jsonl but for `seconds` are then bit for bit those of a run that was
  never interrupted. Lines of rounds after the last whole checkpoint are removed
  and computed again. Of a finished run only the report is written again.

  Args:
    config: See `default_config`.
    workdir: A folder, created if it is missing.
    observe: Called with each new line of metrics.jsonl.
    stop: Called after every round; True ends the run with a checkpoint. In a
      run of several processes, all call `run`, and any of them may stop it;
      `observe` is called in the first one, which writes all files.

  Returns:
    The result.

  Raises:
    ValueError: If the config is wrong, or the workdir holds another run, is in
      use, or is damaged beyond repair.
    FileNotFoundError: If the data are missing.
    FloatingPointError: If an update of a client or of a server that trains is
      not finite and `config.nonfinite` is 'raise'; the last checkpoint is from
      before that.
    OSError: If the disk is full; the run can be resumed when it is not.
  """
  check_local(workdir, 'workdir')
  folder = pathlib.Path(workdir)
  with contextlib.ExitStack() as stack:
    stack.enter_context(libraries.allowed_cache(str(config.get('conv_backend'))))
    processes.together(lambda: check(config))
    _keep_programs(config)  # Before `build`, which compiles some of them.
    experiment = processes.together(lambda: build(config))
    config = experiment.config
    processes.check_config(config)
    driver = processes.together(lambda: make_driver(experiment))

    def claim():
      stack.enter_context(lock(folder))
      settle_config(folder, config)
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
    processes.on_first(lambda: store_config(folder, config))
    facts = facts_lib.measure(experiment)
    finished = True
    if int(state.round_num) < config.num_rounds or not rows:
      programs = processes.together(
          lambda: compile_programs(experiment, driver, state)
      )
      facts['program_memory'] = programs.memory
      if processes.is_first():
        if experiment.algorithm.facts is not None:
          facts.update(experiment.algorithm.facts())
        write_atomically(folder / 'facts.json', json.dumps(facts))
        writer = _Writer(folder, rows, observe, config.tensorboard)
      else:
        writer = _Reader(rows)
      stack.callback(writer.close)
      # Before that: a checkpoint that is being written copies the lines.
      stack.callback(checkpoints.finish)
      state, finished = _train(
          experiment,
          programs,
          state,
          checkpoints,
          notes,
          writer,
          processes.Stop(stop),
      )
    else:
      facts = processes.on_first(
          lambda: _read_facts(folder / 'facts.json', facts)
      )
    processes.on_first(lambda: write_report(folder) and None)
  summary = metrics.summarise(
      rows, config.target_accuracy, experiment.federation.task.main
  )
  return Result(folder, rows, facts, summary, state, finished)


def _keep_programs(config) -> None:
  """Turns the compilation cache on if the config asks for it."""
  if library := libraries.uncacheable(config.conv_backend):
    _log.info("Programs with %s's convolutions are not kept on disk.", library)
  elif config.compilation_cache and enable_compilation_cache() is None:
    _log.warning('The cache folder cannot be written; programs are not kept.')


def _read_facts(path: pathlib.Path, facts: dict[str, Any]) -> dict[str, Any]:
  """The stored facts of a finished run, or those just measured."""
  facts = json.loads(json.dumps(facts))
  try:
    stored = read_json(path, 'it is measured again')
  except FileNotFoundError:
    stored = {}
  except ValueError as e:
    _log.warning('%s', e)
    stored = {}
  # Versions are those of the finished rounds; other facts cannot differ.
  differ = [k for k in facts if k != 'versions' and stored.get(k) != facts[k]]
  if not differ and isinstance(stored.get('versions'), dict):
    return stored
  if stored:
    _log.warning(
        '%s is damaged or of another version (%s); it is measured again.',
        path, ', '.join(differ or ['versions']),
    )  # fmt: skip
  write_atomically(path, json.dumps(facts))
  return facts


def _begin(
    experiment: Experiment,
    driver: Driver,
    folder: pathlib.Path,
    checkpoints: Checkpoints,
) -> tuple[State, list[metrics.Row], dict[str, Any]]:
  """The state to continue from, the rows before it, and notes to store."""
  path, copy = folder / 'metrics.jsonl', checkpoints.folder / 'metrics.jsonl'
  notes = dict(
      data=facts_lib.fingerprint(experiment), versions=facts_lib.versions()
  )
  processes.check_same(notes['data'], 'the same data and partition')
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
  if restored.notes['data'] != notes['data']:
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
    mark = metrics.NO_LINES
  rows = processes.on_first(
      lambda: metrics.restore_rows(path, copy, restored.step, mark)
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
  """Whether one of the paths is anything but an empty file."""
  return any(
      os.path.lexists(path) and not (path.is_file() and not path.stat().st_size)
      for path in paths
  )


class _Writer:
  """Writes the lines of a run to files and to the observer."""

  def __init__(self, folder, rows, observe, tensorboard):
    self.rows = rows
    self._folder, self._observe = folder, observe
    self._file = metrics.MetricsFile(
        folder / 'metrics.jsonl', folder / 'checkpoints' / 'metrics.jsonl'
    )
    self._board = None
    if tensorboard:
      done = rows[-1]['round'] if rows else -1
      self._board = Board(folder / 'tensorboard', done + 1)
    self.mark, self.close = self._file.mark, self._close

  def __call__(self, row: metrics.Row) -> None:
    self._file.append(row)
    self.rows.append(row)
    if self._board is not None:
      self._board.write(row)
    self._observe(row)

  def keep_confusion(self, round_num, scores) -> None:
    """Writes the confusion matrices of an evaluation, if it has any."""
    if any(score.confusion is not None for score in scores.values()):
      write_confusion(
          self._folder,
          round_num,
          {name: score.client_id for name, score in scores.items()},
          {name: score.confusion for name, score in scores.items()},
      )

  def _close(self) -> None:
    self._file.close()
    if self._board is not None:
      self._board.close()


class _Reader:
  """Collects the lines in a process that writes none."""

  def __init__(self, rows):
    self.rows = rows

  def __call__(self, row: metrics.Row) -> None:
    self.rows.append(row)

  def keep_confusion(self, round_num, scores) -> None:
    """Writes nothing."""

  def mark(self):
    """No lines; there is no file."""
    return metrics.NO_LINES, lambda: None

  def close(self) -> None:
    """Does nothing; there is no file."""


def _train(
    experiment: Experiment,
    programs: Programs,
    state: State,
    checkpoints: Checkpoints,
    notes: dict[str, Any],
    write: _Writer | _Reader,
    stop: Callable[[], bool],
) -> tuple[State, bool]:
  """The loop over rounds; returns the state and whether all were done.

  The next rounds start before the lines of the last ones are written, and an
  evaluation starts before the lines of the rounds before it, so that the device
  does not wait for the host.
  """
  config = experiment.config
  lap = time.perf_counter()

  def seconds_since(begin):
    """Seconds since the later of `begin` and the last call."""
    nonlocal lap
    begin, lap = max(begin, lap), time.perf_counter()
    return lap - begin

  def settle(begun):
    """Blocks on rounds and writes their lines."""
    begin, first, num, collect = begun
    reports = collect()
    seconds = seconds_since(begin) / num
    for number, report in enumerate(reports, first + 1):
      _check_finite(experiment, report, number)
      row = metrics.train_row(number, report, experiment.federation, seconds)
      write({**row, **programs.timeline(number)})

  def begin_test(state):
    """Starts the evaluations; {split: scores}, maybe not computed yet."""
    return {
        split: evaluate(state)
        for split, evaluate in (
            ('validation', programs.validate),
            ('test', programs.evaluate),
        )
        if evaluate is not None
    }

  def test(round_num, scores):
    """Blocks on scores and writes their lines."""
    when = programs.timeline(round_num).get('virtual_time')
    for split, score in scores.items():
      score = jax.device_get(score)
      write(
          metrics.test_row(
              round_num, score, experiment.federation, seconds_since(0.0),
              when, split,
          )
      )  # fmt: skip
      if split == 'test':
        write.keep_confusion(round_num, score)

  done = int(state.round_num)
  if not write.rows:
    if programs.warm_up is not None:
      _log.info('Warming up ...')
      begin = time.perf_counter()
      state, reports = programs.warm_up(state)
      reports = jax.device_get(reports)
      _check_finite(experiment, reports, 0)
      write(
          metrics.train_row(
              0,
              reports,
              experiment.federation,
              seconds_since(begin),
              'warm_up',
          )
      )
    lap = time.perf_counter()
    test(0, begin_test(state))
  begun = None
  while done < config.num_rounds:
    begin = time.perf_counter()
    num = rounds_to_run(config, done)
    state, collect = programs.run_rounds(state, done, num)
    if begun is not None:
      settle(begun)
    begun = begin, done, num, collect
    done += num
    last = done == config.num_rounds
    stopping = not last and stop()
    testing = last or done % config.eval_every == 0
    saving = last or stopping or done % config.checkpoint_every == 0
    if not testing and not saving:
      continue
    scores = begin_test(state) if testing else {}
    settle(begun)
    begun = None
    test(done, scores)
    if saving:
      mark, keep = write.mark()
      checkpoints.save(done, state, dict(notes, metrics=mark), before=keep)
    if stopping:
      break
  checkpoints.wait()
  return state, done == config.num_rounds


def _check_finite(
    experiment: Experiment, report: RoundReport, done: int
) -> None:
  """Warns of updates that are not finite, of clients or the server, or raises.

  Args:
    experiment: The experiment.
    report: The report of a round, on the host.
    done: The number of that round; 0 for the warm-up.

  Raises:
    FloatingPointError: If there is one and `config.nonfinite` is 'raise'.
  """

  def found(whose: str, remedy: str, dropped: str):
    message = f'Round {done}: the {whose} holds NaN or infinity'
    if experiment.config.nonfinite == 'raise':
      raise processes.on_all(FloatingPointError(f'{message}. {remedy}'))
    _log.warning('%s; %s.', message, dropped)

  for group, of_group in report.items():
    bad = ~np.asarray(of_group.finite)
    for client in np.asarray(of_group.client_id)[bad]:
      found(
          f'update of client {client} (group {group})',
          'Lower local.learning_rate or set local.clip_norm, or leave such '
          "clients out with nonfinite='drop'.",
          'it is left out',
      )
  if report.server_finite is not None and not report.server_finite:
    found(
        "server's update",
        "Lower the learning rate of the server's training, or let the server "
        "keep its last state with nonfinite='drop'.",
        'the server keeps its last state',
    )
