"""Entries of a test line for the personalised evaluation."""

from collections.abc import Mapping
import math
from typing import Any

import numpy as np

from fedjax_het.engine.evaluate import Scores
from fedjax_het.engine.own_test import OwnScores
from fedjax_het.engine.task import ACCURACY, Metric


def entries(
    scores: Mapping[str, Scores], metric: Metric = ACCURACY
) -> dict[str, Any]:
  """Statistics over clients of a metric on their own test examples.

  Args:
    scores: {group: scores}.
    metric: The task's main metric.

  Returns:
    {} without own test examples. Else `personal/<metric>`, the unweighted mean
    over clients; `personal/std`, their (population) standard deviation;
    `personal/worst`; `personal/p10`, their 10th percentile, or `personal/p90`
    if smaller is better; `personal/pooled`, the mean in which each test example
    has the same weight; and `personal/loss`, the mean over clients of their
    mean loss. The same for each group, as `personal/<metric>/<group>` and so
    on, and `personal/clients/<group>`, the value of each of its evaluated
    clients: None for a client without test examples, which the other entries
    leave out.
  """
  owned = {k: s.own for k, s in scores.items() if s.own is not None}
  if not owned:
    return {}
  by_group = {f'/{name}': _values(own, metric) for name, own in owned.items()}
  whole = [np.concatenate(a) for a in zip(*by_group.values(), strict=True)]
  row = {
      f'personal/{name}{suffix}': value
      for suffix, values in {'': whole, **by_group}.items()
      for name, value in statistics(*values, metric).items()
  }
  for name, own in owned.items():
    row[f'personal/clients/{name}'] = [
        number(value) if size else None
        for value, size in zip(own.metrics[metric.name], own.size, strict=True)
    ]
  return row


def number(value) -> float | None:
  """A float for JSON; None where it is not finite."""
  value = float(value)
  return value if math.isfinite(value) else None


def _values(
    own: OwnScores, metric: Metric
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Metric, loss and size of the clients with a test example, float64."""
  there = np.asarray(own.size) > 0
  return tuple(
      np.asarray(a, np.float64)[there]
      for a in (own.metrics[metric.name], own.loss, own.size)
  )


def statistics(
    values, loss, size, metric: Metric = ACCURACY
) -> dict[str, float | None]:
  """Statistics over several clients.

  Args:
    values: [E] metric of each client on its own test examples.
    loss: [E] mean losses.
    size: [E] numbers of test examples, at least 1.
    metric: The metric.

  Returns:
    {name: number}, see `entries`; None if it is not finite or there is no
    client.
  """
  if not len(values):
    names = metric.name, 'std', 'worst', f'p{metric.tail}', 'pooled', 'loss'
    return dict.fromkeys(names)
  found = {
      metric.name: np.mean(values),
      'std': np.std(values),
      'worst': metric.worst(values),
      f'p{metric.tail}': np.percentile(values, metric.tail),
      'pooled': np.average(values, weights=size),
      'loss': np.mean(loss),
  }
  return {name: number(value) for name, value in found.items()}
