"""Callbacks: objects whose methods a run calls.

    on_start       once, before the first round or after a restart
    on_dispatch    before rounds are handed to the device
    on_evaluation  after an evaluation, with the models; may add numbers to it
    on_row         after each line of metrics.jsonl
    on_end         once, after the report
    close          last, also after an error

Later rounds may already run when `on_row` is called for a round. No round runs
during `on_evaluation`, so only there a callback can read the models.
"""

from collections.abc import Mapping, Sequence
import logging
import pathlib
from typing import Any, NamedTuple

import ml_collections

from fedjax_het.experiment import processes
from fedjax_het.experiment.build import Experiment
from fedjax_het.experiment.trained import Trained
from fedjax_het.options import is_finite
from fedjax_het.reporting.run_files import Row

_log = logging.getLogger(__name__)


class CallbackError(RuntimeError):
  """A callback raised an error; the run's checkpoints are intact."""


class Start(NamedTuple):
  """A run when it starts or is resumed.

  Attributes:
    config: The run's config.
    workdir: Its folder.
    rows: The lines of metrics.jsonl so far; none at the first start.
    rounds: Rounds done.
    facts: The contents of facts.json.
    experiment: The groups, the algorithm and the data.
    notes: What is stored beside every checkpoint.
  """

  config: ml_collections.FrozenConfigDict
  workdir: pathlib.Path
  rows: Sequence[Row]
  rounds: int
  facts: Mapping[str, Any]
  experiment: Experiment
  notes: Mapping[str, Any]


class Callback:
  """Base class of callbacks, whose methods do nothing.

  Override those that you need. An error in one ends the run with a
  `CallbackError`. The checkpoints stay, so the run can be resumed. In a run of
  several processes, only the first process calls callbacks.
  """

  def on_start(self, run: Start) -> str | None:
    """Called before the first round, and again whenever the run is resumed.

    A callback with a state restores it here from `run.rows`.

    Args:
      run: The run.

    Returns:
      A sentence that says why the run should stop; None to continue.
    """

  def on_dispatch(self, first: int, last: int) -> None:
    """Called before the rounds `first` to `last`, counted from 1, start."""

  def on_evaluation(
      self, rows: Mapping[str, Row], models: Trained
  ) -> Mapping[str, float] | None:
    """Called after each evaluation, before its lines are written.

    Args:
      rows: {'test' or 'validation': its line}.
      models: The trained models. They and their arrays are valid only during
        this call; copy what you need later with `jax.device_get`.

    Returns:
      {name: number} to add to the test line; None for nothing.
    """

  def on_row(self, row: Row) -> str | None:
    """Called after each line of metrics.jsonl was written.

    Args:
      row: The line.

    Returns:
      A sentence that says why the run should stop; None to continue. If it is
      returned for a line of an evaluation, no further round starts.
    """

  def on_end(self, result: Any) -> None:
    """Called with the `Result` when the run has ended without an error."""

  def close(self) -> None:
    """Called last, also after an error, to release what is held."""


class Callbacks:
  """Calls the callbacks of a run.

  Attributes:
    stopped: Why one of them asks to stop the run; '' if none does.
  """

  def __init__(self, callbacks: Sequence[Callback]):
    """Takes the callbacks of a run.

    Args:
      callbacks: In the order in which they are called.

    Raises:
      ValueError: If one is not a `Callback`, or reads models in a run of
        several processes.
    """
    for i, callback in enumerate(callbacks):
      if not isinstance(callback, Callback):
        raise ValueError(
            f'callbacks[{i}] must be a Callback, such as '
            f'EarlyStopping(patience=5), got {callback!r:.80}.'
        )
    self._all = tuple(callbacks)
    self._dispatch = self._with('on_dispatch')
    self._evaluation = self._with('on_evaluation')
    if self._evaluation and processes.several():
      raise ValueError(
          f'{type(self._evaluation[0]).__name__} reads the models, which a '
          'callback can do in a run of one process alone.'
      )
    self.stopped = ''

  def _with(self, method: str) -> tuple[Callback, ...]:
    """The callbacks that override a method."""
    base = getattr(Callback, method)
    return tuple(c for c in self._all if getattr(type(c), method) is not base)

  def __bool__(self) -> bool:
    return bool(self._all)

  @property
  def read_models(self) -> bool:
    """Whether any callback overrides `on_evaluation`, and so reads models."""
    return bool(self._evaluation)

  def start(self, run: Start) -> None:
    """Calls `on_start`."""
    for callback in self._all:
      self._ask_stop(_call(callback, 'on_start', run))

  def dispatch(self, first: int, last: int) -> None:
    """Calls `on_dispatch`."""
    for callback in self._dispatch:
      _call(callback, 'on_dispatch', first, last)

  def evaluation(self, rows: Mapping[str, Row], models: Trained) -> None:
    """Calls `on_evaluation`, and adds the results to the test line."""
    for callback in self._evaluation:
      entries = _call(callback, 'on_evaluation', rows, models)
      try:
        if entries is not None:
          rows['test'].update(_entries(entries, rows['test']))
      except (TypeError, ValueError) as e:
        raise _error(callback, 'on_evaluation', e) from e

  def row(self, row: Row) -> None:
    """Calls `on_row`."""
    for callback in self._all:
      self._ask_stop(_call(callback, 'on_row', row))

  def end(self, result: Any) -> None:
    """Calls `on_end`."""
    for callback in self._all:
      _call(callback, 'on_end', result)

  def close(self) -> None:
    """Calls `close`; only logs errors, so as not to hide an earlier one."""
    for callback in self._all:
      try:
        callback.close()
      except Exception as e:
        _log.error('%s', _error(callback, 'close', e))

  def _ask_stop(self, reason: str | None) -> None:
    if isinstance(reason, str):
      self.stopped = self.stopped or reason


def _call(callback: Callback, method: str, *args) -> Any:
  try:
    return getattr(callback, method)(*args)
  except Exception as e:
    raise _error(callback, method, e) from e


def _error(callback: Callback, method: str, e: Exception) -> CallbackError:
  text = ' '.join(str(e).split()) or type(e).__name__
  return CallbackError(
      f'The callback {type(callback).__name__} failed in {method}: {text}'
  )


def _entries(entries: Mapping[str, Any], row: Row) -> dict[str, float | None]:
  """New entries of a line as plain numbers; None for one that is not finite."""
  if not isinstance(entries, Mapping):
    raise ValueError(
        f'it must return {{name: number}} or None, got {entries!r:.80}.'
    )
  found = {}
  for name, value in entries.items():
    if name in row:
      raise ValueError(f'the line has an entry {name!r} already.')
    if not isinstance(name, str):
      raise ValueError(f'the name of a metric must be a text, got {name!r}.')
    try:
      value = float(value)
    except (TypeError, ValueError) as e:
      raise ValueError(
          f'the metric {name!r} must be a number, got {value!r:.80}.'
      ) from e
    found[name] = value if is_finite(value) else None
  return found


def numbers(row: Row) -> dict[str, float]:
  """The finite numbers of a line by name.

  Args:
    row: A line of metrics.jsonl.

  Returns:
    {name: number} without `round`; the server's metrics are `server/<name>`,
    and lists, such as the accuracy of each model, are left out.
  """
  server = {f'server/{k}': v for k, v in row.get('server', {}).items()}
  return {
      name: value
      for name, value in {**row, **server}.items()
      if name != 'round' and isinstance(value, int | float)
  }
