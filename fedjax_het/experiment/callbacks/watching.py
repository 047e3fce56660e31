"""Callbacks that follow one metric: early stopping and the best checkpoint."""

from collections.abc import Mapping
import shutil

from fedjax_het.experiment.callbacks.base import Callback, Start, numbers
from fedjax_het.experiment.checkpoints import Checkpoints
from fedjax_het.experiment.trained import Trained
from fedjax_het.names import check_name, suggest
from fedjax_het.options import at_least, not_negative
from fedjax_het.reporting.run_files import Row

_EVALUATIONS = ('test', 'validation')
# How names of losses end.
_LOSSES = ('loss', 'cross_entropy')


class _Metric:
  """A metric of the lines of one split, with the direction of improvement.

  Attributes:
    text: The metric as the user named it.
  """

  def __init__(self, text: str, mode: str):
    """Reads a metric's name.

    Args:
      text: Its name in metrics.jsonl, optionally after 'test/', 'validation/'
        or 'train/'. The default split is 'validation' if examples are held
        out, else 'test'.
      mode: 'max' or 'min'.

    Raises:
      ValueError: If the mode is unknown, or 'max' for a loss.
    """
    check_name('mode', mode, ('max', 'min'))
    split, _, name = text.partition('/')
    known = split in (*_EVALUATIONS, 'train') and name
    self.text = text
    self.split, self._name = (split, name) if known else ('', text)
    parts = self._name.split('/')
    if mode == 'max' and any(part.endswith(_LOSSES) for part in parts):
      raise ValueError(
          f"metric={text!r} is a loss, but mode='max' looks for larger values; "
          "set mode='min'."
      )
    self._sign = 1 if mode == 'max' else -1

  def settle(self, config) -> None:
    """Sets the default split if the name has none.

    Args:
      config: The run's config.

    Raises:
      ValueError: If the split is 'validation', and nothing is held out.
    """
    if not self.split:
      self.split = 'test' if config.validation is None else 'validation'
    if self.split == 'validation' and config.validation is None:
      raise ValueError(
          f'{self.text} is a metric of held-out examples, and there are none; '
          'set validation, such as to 0.2.'
      )

  def is_in(self, row: Row) -> bool:
    """Whether a line, maybe of a start with other callbacks, has the metric."""
    return row['split'] == self.split and (
        self._name in row or self.split == 'train'
    )

  def merit(self, row: Row) -> float | None:
    """The value, negated for 'min'; None if it is missing or not finite.

    Args:
      row: A line of the metric's split.

    Raises:
      ValueError: If the line lacks the metric; suggests the nearest name.
    """
    found = numbers(row)
    if self._name in found:
      return self._sign * found[self._name]
    may_lack = False
    if self.split == 'train':
      # A round without an upload has no metrics of its clients, nor has a group
      # without a client in the cohort.
      name, _, group = self._name.partition('/')
      may_lack = row.get('loss') is None or (group and name in row)
    if self._name not in row and not may_lack:
      raise ValueError(
          f'{self.split} lines have no metric {self._name!r}'
          f'{suggest(self._name, found)}'
      )
    return None


class EarlyStopping(Callback):
  """Stops the run when a metric no longer improves.

  A resumed run continues the count. A run that was stopped stops again at once,
  unless the patience is larger now.
  """

  def __init__(
      self,
      patience: int,
      metric: str = 'accuracy',
      mode: str = 'max',
      min_delta: float = 0.0,
  ):
    """Chooses the metric.

    Args:
      patience: The run stops after this number of lines of the split, such as
        evaluations, without an improvement.
      metric: Its name in metrics.jsonl, optionally after the split, such as
        'train/loss'. The default split is 'validation' if examples are held
        out, else 'test'.
      mode: 'max' or 'min', whether larger or smaller is better.
      min_delta: Only a change by more than this counts as an improvement.

    Raises:
      ValueError: If an argument is out of its range, or mode is 'max' for a
        loss.
    """
    at_least(1, patience=patience)
    not_negative(min_delta=min_delta)
    self._patience, self._delta = patience, min_delta
    self._metric = _Metric(metric, mode)
    self._best, self._waited = None, 0

  def on_start(self, run: Start) -> str | None:
    """Counts the lines so far."""
    self._metric.settle(run.config)
    self._best, self._waited = None, 0
    reason, at = None, 0
    # When a line of training stops a run, later rounds are already running. No
    # round runs after an evaluation.
    training = self._metric.split == 'train'
    running = 2 * run.config.rounds_per_dispatch if training else 0
    for row in run.rows:
      if self._metric.is_in(row):
        found = self.on_row(row)
        if found or row['round'] - at >= running:
          reason, at = found, row['round']
    return reason

  def on_row(self, row: Row) -> str | None:
    """Counts one line; returns why to stop."""
    if row['split'] != self._metric.split:
      return None
    merit = self._metric.merit(row)
    if merit is not None and (
        self._best is None or merit > self._best + self._delta
    ):
      self._best, self._waited = merit, 0
    else:
      self._waited += 1
    if self._waited < self._patience:
      return None
    lines = 'line' if self._waited == 1 else f'{self._waited} lines'
    return (
        f'{self._metric.text} has not improved in the last {lines} '
        f'({self._metric.split}), up to round {row["round"]}'
    )


class BestCheckpoint(Callback):
  """Keeps the models of the best evaluation in the workdir's `best`.

  `load_run(workdir, best=True)` reads them. At each improvement the run waits
  until the state is written, so that a later checkpoint of the run never
  exists without the best models so far. The best models before stay until
  there is one, since a killed run goes on from its last checkpoint.
  """

  def __init__(self, metric: str = 'accuracy', mode: str = 'max'):
    """Chooses the metric.

    Args:
      metric: As for `EarlyStopping`, but not of 'train'.
      mode: 'max' or 'min', whether larger or smaller is better.

    Raises:
      ValueError: If it is a metric of training, or the mode is unknown or 'max'
        for a loss.
    """
    self._metric = _Metric(metric, mode)
    if self._metric.split == 'train':
      raise ValueError(
          'The best checkpoint is that of an evaluation; choose a metric of '
          f'{" or ".join(_EVALUATIONS)} lines, got {metric!r}.'
      )
    self._best, self._checkpoints, self._notes = None, None, {}
    # The folder of the run's own checkpoints, and the rounds between them.
    self._run, self._every = None, 1

  def on_start(self, run: Start) -> None:
    """Opens the folder, and looks up the metric of its checkpoint."""
    self._metric.settle(run.config)
    folder = run.workdir / 'best'
    evaluated = {row['round'] for row in run.rows}
    for step in _steps(folder):
      # These rounds and their evaluations will be computed again.
      if step > run.rounds or step not in evaluated:
        shutil.rmtree(folder / str(step))
    stored = max(_steps(folder), default=None)
    self._best = None
    for row in run.rows:
      if row['split'] == self._metric.split and row['round'] == stored:
        self._best = self._metric.merit(row)
    self._notes = dict(run.notes)
    self._checkpoints = Checkpoints(folder, keep=None)
    self._run = run.workdir / 'checkpoints'
    self._every = run.config.checkpoint_every

  def on_evaluation(self, rows: Mapping[str, Row], models: Trained) -> None:
    """Stores the state if it is the best so far."""
    merit = self._metric.merit(rows[self._metric.split])
    if merit is None or (self._best is not None and merit <= self._best):
      return
    self._best = merit
    self._checkpoints.save(models.rounds, models.state, self._notes)
    self._checkpoints.wait()
    self._remove_others()

  def _remove_others(self) -> None:
    """Keeps the best models, and those of checkpoints to go on from."""
    stored = _steps(self._checkpoints.folder)
    newest, last = max(stored, default=0), max(_steps(self._run), default=0)
    # Later ones may be being written.
    first = last - last % self._every
    ends = {last, newest, *range(first, newest, self._every)}
    kept = {
        max((step for step in stored if step <= end), default=0)
        for end in ends
        if end >= last
    }
    for step in stored:
      if step not in kept:
        self._checkpoints.remove(step)

  def close(self) -> None:
    """Closes the folder."""
    if self._checkpoints is not None:
      self._remove_others()
      self._checkpoints.close()


def _steps(folder) -> list[int]:
  """The rounds of the checkpoints in a folder."""
  return [
      int(path.name) for path in folder.glob('*') if path.name.isdecimal()
  ]
