"""The loop over a run's rounds, and the writers of its lines."""

from collections.abc import Callable
import logging
import pathlib
import time
from typing import Any

import jax
import numpy as np

from fedjax_het.engine.reports import RoundReport
from fedjax_het.engine.rounds import State
from fedjax_het.experiment import metrics, processes
from fedjax_het.experiment.build import Experiment
from fedjax_het.experiment.callbacks import Callbacks
from fedjax_het.experiment.checkpoints import Checkpoints
from fedjax_het.experiment.metrics_file import NO_LINES, MetricsFile
from fedjax_het.experiment.programs import Programs, rounds_to_run
from fedjax_het.experiment.trained import Reader as ModelReader
from fedjax_het.reporting.confusion_file import write_confusion
from fedjax_het.reporting.run_files import Row

_log = logging.getLogger(__name__)


class RowWriter:
  """Appends the lines of a run to its file, and passes them to callbacks.

  Attributes:
    rows: All lines.
  """

  def __init__(
      self,
      folder: pathlib.Path,
      rows: list[Row],
      observe: Callable[[Row], None],
      callbacks: Callbacks,
  ):
    """Opens the workdir's metrics.jsonl, which already holds `rows`."""
    self.rows = rows
    self._folder, self._observe = folder, observe
    self._callbacks = callbacks
    self._file = MetricsFile(
        folder / 'metrics.jsonl', folder / 'checkpoints' / 'metrics.jsonl'
    )
    self.mark, self.close = self._file.mark, self._file.close

  def __call__(self, row: Row) -> None:
    """Writes the next line, and passes it on."""
    self._file.append(row)
    self.rows.append(row)
    self._observe(row)
    self._callbacks.row(row)

  def keep_confusion(self, round_num, scores) -> None:
    """Writes the confusion matrices of an evaluation, if it has any."""
    if any(score.confusion is not None for score in scores.values()):
      write_confusion(
          self._folder,
          round_num,
          {name: score.client_id for name, score in scores.items()},
          {name: score.confusion for name, score in scores.items()},
      )


class RowReader:
  """Collects the lines in a process that writes none."""

  def __init__(self, rows: list[Row]):
    """Appends to `rows`."""
    self.rows = rows

  def __call__(self, row: Row) -> None:
    """Keeps the next line."""
    self.rows.append(row)

  def keep_confusion(self, round_num, scores) -> None:
    """Writes nothing."""

  def mark(self):
    """The mark of no lines; there is no file."""
    return NO_LINES, lambda: None

  def close(self) -> None:
    """Does nothing; there is no file."""


def train(
    experiment: Experiment,
    programs: Programs,
    await_rounds: Callable[[], None],
    state: State,
    checkpoints: Checkpoints,
    notes: dict[str, Any],
    write: RowWriter | RowReader,
    stop: Callable[[], bool],
    callbacks: Callbacks,
    stop_after_test: Callable[[], str],
) -> State:
  """The loop over rounds.

  Rounds and evaluations start before the lines of the previous rounds are
  written, so that the device does not wait for the host.

  Args:
    experiment: The experiment.
    programs: Its programs.
    await_rounds: Called before the first round, after the warm-up and the first
      evaluation; waits for the rounds' compilation.
    state: The state to continue from.
    checkpoints: Where states are stored.
    notes: What is stored beside them.
    write: Called with each line.
    stop: Called after every dispatch; True ends the run with a checkpoint.
    callbacks: The run's callbacks.
    stop_after_test: Called after every evaluation; returns why to stop the run,
      or ''.

  Returns:
    The state after the last round.

  Raises:
    FloatingPointError: If an update is not finite and `config.nonfinite` is
      'raise'.
    CallbackError: If a callback raises an error.
    OSError: If a file cannot be written.
  """
  config = experiment.config
  read_models = ModelReader(experiment) if callbacks.read_models else None
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
    """Starts the evaluations, and returns {split: scores} without blocking."""
    return {
        split: evaluate(state)
        for split, evaluate in (
            ('validation', programs.validate),
            ('test', programs.evaluate),
        )
        if evaluate is not None
    }

  def test(round_num, scores, state):
    """Blocks on scores and writes their lines."""
    when, rows = programs.timeline(round_num).get('virtual_time'), {}
    for split, score in scores.items():
      score = jax.device_get(score)
      rows[split] = metrics.test_row(
          round_num, score, experiment.federation, seconds_since(0.0),
          when, split,
      )  # fmt: skip
      if split == 'test':
        write.keep_confusion(round_num, score)
    if read_models is not None:
      callbacks.evaluation(rows, read_models(round_num, state))
    for row in rows.values():
      write(row)

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
    test(0, begin_test(state), state)
    if stop_after_test():
      return state
  await_rounds()
  begun = None
  while done < config.num_rounds:
    begin = time.perf_counter()
    num = rounds_to_run(config, done)
    callbacks.dispatch(done + 1, done + num)
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
    if testing:
      test(done, scores, state)
      stopping = bool(stop_after_test()) or stopping
    if saving or stopping:
      mark, keep = write.mark()
      checkpoints.save(done, state, dict(notes, metrics=mark), before=keep)
    if stopping:
      break
  checkpoints.wait()
  return state


def _check_finite(
    experiment: Experiment, report: RoundReport, done: int
) -> None:
  """Warns or raises if an update of a client or the server is not finite.

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
          "clients out by setting nonfinite to 'drop'.",
          'it is left out',
      )
  if report.server_finite is not None and not report.server_finite:
    found(
        "server's update",
        "Lower the learning rate of the server's training, or let the server "
        "keep its last state by setting nonfinite to 'drop'.",
        'the server keeps its last state',
    )
