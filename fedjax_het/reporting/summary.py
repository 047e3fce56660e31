"""Summary of the lines of metrics.jsonl."""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.engine.task import ACCURACY, Metric
from fedjax_het.reporting.run_files import Row


class Summary(NamedTuple):
  """Summary of a run.

  Attributes:
    rounds: Rounds done.
    last: Row of the last evaluation; None before the first.
    best: Row of the evaluation in the round with the best mean metric on
      held-out examples, or on the test set (optimistic) if none are held out.
    validated: Whether the best round was chosen on held-out examples.
    reached: First evaluated round whose mean metric is at least as good as the
      target.
    bytes_up: Bytes from clients to the server, warm-up and all rounds.
    bytes_down: Bytes from the server to clients, warm-up and all rounds.
    round_seconds: Median wall time of a round, compilation not included.
    dropped: Updates left out because they were not finite.
    virtual_time: Seconds of the virtual clock at the end; None without one.
    reached_time: Seconds of the virtual clock after round `reached`.
    lost: Visits whose upload did not arrive.
    metric: The main metric of the run's task.
  """

  rounds: int
  last: Row | None
  best: Row | None
  validated: bool
  reached: int | None
  bytes_up: int
  bytes_down: int
  round_seconds: float | None
  dropped: int
  virtual_time: float | None = None
  reached_time: float | None = None
  lost: int = 0
  metric: Metric = ACCURACY


def main_metric(facts: Mapping[str, Any]) -> Metric:
  """The main metric of a run's task, from its facts."""
  return Metric(**facts['metric']) if 'metric' in facts else ACCURACY


def num_clients(config: Mapping[str, Any]) -> int:
  """The number of clients of a run, from its config as nested dicts."""
  entries = config['groups'].values()
  return sum(e['clients'] if isinstance(e, Mapping) else e for e in entries)


def views_of(row: Mapping[str, Any]) -> list[str]:
  """The names of the further models that an evaluation has results of.

  Args:
    row: A row of metrics.jsonl.

  Returns:
    The method's views, without those of single groups.
  """
  keys = [key.split('/') for key in row]
  return [key[1] for key in keys if key[0] == 'views' and len(key) == 2]


def in_common_rounds(
    rounds: Sequence[Sequence[int]], values: Sequence[Sequence[float]]
) -> tuple[list[int], np.ndarray]:
  """The values of several runs in the rounds that all of them evaluated.

  Early stopping ends some runs before others.

  Args:
    rounds: The evaluated rounds of each of S runs.
    values: Their values.

  Returns:
    The R common rounds, and [S, R] values.
  """
  first, *others = rounds
  common = [r for r in first if all(r in other for other in others)]
  found = [dict(zip(*run, strict=True)) for run in zip(rounds, values)]
  return common, np.array([[run[r] for r in common] for run in found], float)


def summarise(
    rows: Sequence[Row],
    target: float | None = None,
    metric: Metric = ACCURACY,
) -> Summary:
  """Adds up the rows of a run.

  Args:
    rows: As in metrics.jsonl.
    target: Mean metric to reach; None for none.
    metric: The main metric of the run's task.

  Returns:
    The summary.
  """
  train = [row for row in rows if row['split'] == 'train']
  sending = [row for row in rows if row['split'] in ('train', 'warm_up')]
  tests = [row for row in rows if row['split'] == 'test']
  scored = [row for row in tests if row[metric.name] is not None]
  validation = {
      row['round']: row[metric.name]
      for row in rows
      if row['split'] == 'validation'
  }

  def merit(row):
    """The score that selects the best round; -inf if it is not finite."""
    chosen = validation.get(row['round']) if validation else row[metric.name]
    return -math.inf if chosen is None else metric.merit(chosen)

  reached = [
      row
      for row in scored
      if target is not None and metric.reaches(row[metric.name], target)
  ]
  return Summary(
      rounds=len(train),
      last=tests[-1] if tests else None,
      best=max(scored, key=merit, default=None),
      validated=bool(validation),
      reached=reached[0]['round'] if reached else None,
      bytes_up=sum(row['bytes_up'] for row in sending),
      bytes_down=sum(row['bytes_down'] for row in sending),
      round_seconds=(
          float(np.median([row['seconds'] for row in train])) if train else None
      ),
      dropped=sum(len(row['nonfinite']) for row in sending),
      virtual_time=train[-1].get('virtual_time') if train else None,
      reached_time=reached[0].get('virtual_time') if reached else None,
      lost=sum(row.get('lost', 0) for row in train),
      metric=metric,
  )
