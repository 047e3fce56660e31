"""Entries of a test line on the personalised evaluation."""

from collections.abc import Mapping
import math
from typing import Any

import numpy as np

from fedjax_het.engine.evaluate import Scores


def entries(scores: Mapping[str, Scores]) -> dict[str, Any]:
  """Statistics over clients of their accuracy on their own test examples.

  Args:
    scores: {group: scores}.

  Returns:
    {} without own test examples. Else `personal/accuracy`, the unweighted mean
    over clients; `personal/std`, their (population) standard deviation;
    `personal/worst`; `personal/p10`, their 10th percentile; `personal/pooled`,
    the mean in which each test example has the same weight; and
    `personal/loss`, the mean over clients of their mean loss. The same of one
    group as `personal/accuracy/<group>` and so on, and the accuracy of each
    of its evaluated clients as `personal/clients/<group>`, None for a client
    without a test example, which counts nowhere else.
  """
  owned = {k: s.own for k, s in scores.items() if s.own is not None}
  if not owned:
    return {}
  by_group = {f'/{name}': _values(own) for name, own in owned.items()}
  whole = [np.concatenate(a) for a in zip(*by_group.values(), strict=True)]
  row = {
      f'personal/{name}{suffix}': value
      for suffix, values in {'': whole, **by_group}.items()
      for name, value in statistics(*values).items()
  }
  for name, own in owned.items():
    row[f'personal/clients/{name}'] = [
        float(accuracy) if size else None
        for accuracy, size in zip(own.accuracy, own.size, strict=True)
    ]
  return row


def _values(own) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Accuracy, loss and size of the clients with a test example, float64."""
  there = np.asarray(own.size) > 0
  return tuple(
      np.asarray(a, np.float64)[there]
      for a in (own.accuracy, own.loss, own.size)
  )


def statistics(accuracy, loss, size) -> dict[str, float | None]:
  """Statistics over several clients.

  Args:
    accuracy: [E] accuracy of each client on its own test examples.
    loss: [E] mean losses.
    size: [E] numbers of test examples, at least 1.

  Returns:
    {name: number}, see `entries`; None for what is not finite, or where there
    is no client.
  """
  if not len(accuracy):
    names = ('accuracy', 'std', 'worst', 'p10', 'pooled', 'loss')
    return dict.fromkeys(names)
  found = dict(
      accuracy=np.mean(accuracy),
      std=np.std(accuracy),
      worst=np.min(accuracy),
      p10=np.percentile(accuracy, 10),
      pooled=np.average(accuracy, weights=size),
      loss=np.mean(loss),
  )
  return {
      name: float(value) if math.isfinite(value) else None
      for name, value in found.items()
  }
