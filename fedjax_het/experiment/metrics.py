"""metrics.jsonl: its lines, how they are written, and what they add up to."""

from collections.abc import Mapping, Sequence
import json
import math
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.engine.evaluate import Scores
from fedjax_het.engine.rounds import GroupReport, round_bytes
from fedjax_het.engine.types import Federation
from fedjax_het.experiment.workdir import write_atomically

Row = dict[str, Any]


def _number(value) -> float | None:
  """A float for JSON; None where it is not finite."""
  value = float(value)
  return value if math.isfinite(value) else None


def _mean(values: Sequence[float | None]) -> float | None:
  """Mean of the values; None if there is none or one is None."""
  if not values or None in values:
    return None
  return float(np.mean(values))


def train_row(
    round_num: int,
    reports: Mapping[str, GroupReport],
    federation: Federation,
    seconds: float,
    split: str = 'train',
) -> Row:
  """The line of a round's local training.

  Args:
    round_num: Rounds done, this one included.
    reports: {group: report} on the host.
    federation: The federation.
    seconds: Wall time of the round.
    split: 'train', or 'warm_up' for what comes before the first round.

  Returns:
    Client metrics (`train_loss` is called `loss`) as the mean over a group's
    clients of this round, `<name>/<group>`, and the mean of those over the
    groups that took part, `<name>`; number of clients and bytes both ways, in
    all and by group; the ids of clients whose update was not finite, which
    count in none of the means.
  """
  num_clients = federation.num_clients
  row: Row = {'round': round_num, 'split': split, 'seconds': seconds}
  groups: Row = {}
  values: dict[str, list[float | None]] = {}
  counts: Row = {'clients': 0, 'bytes_up': 0, 'bytes_down': 0}
  dropped: list[int] = []
  for group in federation.groups:
    report = reports[group.name]
    real = report.client_id < num_clients
    down, up = round_bytes(report, num_clients)
    own = dict(clients=int(real.sum()), bytes_up=up, bytes_down=down)
    for name, value in own.items():
      counts[name] += value
      groups[f'{name}/{group.name}'] = value
    dropped += report.client_id[real & ~report.finite].tolist()
    good = real & report.finite
    for name, metric in report.metrics.items():
      name = 'loss' if name == 'train_loss' else name
      if good.any():
        mean = _number(np.mean(metric[good], dtype=np.float64))
        groups[f'{name}/{group.name}'] = mean
        values.setdefault(name, []).append(mean)
  row['loss'] = None  # Unless a client had one.
  row.update({name: _mean(means) for name, means in values.items()})
  return {**row, **counts, 'nonfinite': dropped, **groups}


def test_row(
    round_num: int,
    scores: Mapping[str, Scores],
    federation: Federation,
    seconds: float,
    virtual_time: float | None = None,
    split: str = 'test',
) -> Row:
  """The line of an evaluation on the global test set.

  Args:
    round_num: Rounds done; 0 before training.
    scores: {group: scores}.
    federation: The federation.
    seconds: Wall time of the evaluation.
    virtual_time: Seconds of the virtual clock; None without one.
    split: 'test', or 'validation' for examples that clients have held out.

  Returns:
    `accuracy` in [0, 1] and `loss` in nats: the mean over groups of
    `accuracy/<group>`, itself the mean over the group's evaluated models, of
    which there are `models/<group>`; `accuracy/<group>/models` are all of
    them, `accuracy/worst` and `accuracy/<group>/worst` the lowest;
    `accuracy/clients` is the mean over clients, each group counting with the
    number of its clients. A method's further views stand as
    `views/<view>/<group>` and, as mean over clients, `views/<view>`.
  """
  means, groups = {}, {}
  for name in ('accuracy', 'loss'):
    for group, score in scores.items():
      values = np.asarray(getattr(score, name), np.float64)
      groups[f'{name}/{group}'] = _number(values.mean())
    means[name] = _mean([groups[f'{name}/{group}'] for group in scores])
  for group, score in scores.items():
    groups[f'accuracy/{group}/worst'] = _number(np.min(score.accuracy))
    models = np.asarray(score.accuracy, np.float64).tolist()
    groups[f'accuracy/{group}/models'] = models
    groups[f'models/{group}'] = len(score.client_id)
  means['accuracy/worst'] = min(
      groups[f'accuracy/{group}/worst'] for group in scores
  )
  means['accuracy/clients'] = (
      sum(
          group.num_clients * groups[f'accuracy/{group.name}']
          for group in federation.groups
      )
      / federation.num_clients
  )
  for view in next(iter(scores.values())).views:
    for group in federation.groups:
      values = np.asarray(scores[group.name].views[view], np.float64)
      groups[f'views/{view}/{group.name}'] = _number(values.mean())
    means[f'views/{view}'] = (
        sum(
            group.num_clients * groups[f'views/{view}/{group.name}']
            for group in federation.groups
        )
        / federation.num_clients
    )
  row = {'round': round_num, 'split': split, 'seconds': seconds}
  if virtual_time is not None:
    row['virtual_time'] = virtual_time
  return {**row, **means, **groups}


class MetricsFile:
  """Appends lines to metrics.jsonl; each is on its way to disk at once.

  Attributes:
    path: The file.
  """

  def __init__(self, path: pathlib.Path):
    self.path = path
    self._file = open(path, 'ab', buffering=0)

  def append(self, row: Row) -> None:
    """Writes one line; raises OSError if it does not fit on the disk."""
    line = json.dumps(row, allow_nan=False).encode() + b'\n'
    try:
      while line:
        line = line[self._file.write(line) :]
    except OSError as e:
      raise OSError(e.errno, f'{e.strerror} while writing {self.path}') from e

  def sync(self) -> None:
    """Returns when all lines are on the disk."""
    try:
      os.fsync(self._file.fileno())
    except OSError as e:
      raise OSError(e.errno, f'{e.strerror} while writing {self.path}') from e

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def _parse(line: bytes) -> Row | None:
  """A line's row; None for a torn or damaged line."""
  try:
    row = json.loads(line) if line.endswith(b'\n') else None
  except ValueError:
    return None
  return row if isinstance(row, dict) and 'round' in row else None


def read_rows(path: pathlib.Path) -> list[Row]:
  """All rows of a metrics file, without a torn last line.

  Args:
    path: metrics.jsonl; it may be absent.

  Returns:
    The rows in order.

  Raises:
    ValueError: If a line before the last is damaged, naming it.
  """
  if not path.exists():
    return []
  rows, lines = [], path.read_bytes().splitlines(keepends=True)
  for number, line in enumerate(lines, 1):
    row = _parse(line)
    if row is not None:
      rows.append(row)
    elif number < len(lines):
      raise ValueError(f'{path}, line {number} is damaged: {line[:60]!r}.')
  return rows


def cut_rows(path: pathlib.Path, rounds: int) -> list[Row]:
  """Removes the lines of rounds after `rounds`, and a torn last line.

  The lines that stay are kept byte for byte.

  Args:
    path: metrics.jsonl; it may be absent.
    rounds: Rounds that the restored state has done; -1 removes all lines.

  Returns:
    The rows that stay.

  Raises:
    ValueError: If lines of rounds up to `rounds` are missing or damaged.
  """
  kept, rows = [], []
  lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
  for line in lines:
    row = _parse(line)
    if row is None or row['round'] > rounds:
      break
    kept.append(line)
    rows.append(row)
  done = [row['round'] for row in rows if row['split'] == 'train']
  if done != [*range(1, rounds + 1)]:
    missing = next(
        i for i in range(1, rounds + 2) if i > len(done) or done[i - 1] != i
    )
    raise ValueError(
        f'{path} lacks or repeats round {missing}, but the checkpoint has '
        f'done {rounds} rounds; restore the file or choose another workdir.'
    )
  if len(kept) < len(lines):
    write_atomically(path, b''.join(kept))
  return rows


class Summary(NamedTuple):
  """What a run comes to.

  Attributes:
    rounds: Rounds done.
    last: Row of the last evaluation; None before the first.
    best: Row of the evaluation in the round with the highest mean accuracy on
      held-out examples; without any on the test set, which flatters.
    validated: Whether the best round was chosen on held-out examples.
    reached: First evaluated round whose mean accuracy is at least the target.
    bytes_up: Bytes from clients to the server, warm-up and all rounds.
    bytes_down: Bytes from the server to clients, warm-up and all rounds.
    round_seconds: Median wall time of a round, compilation not included.
    dropped: Updates left out because they were not finite.
    virtual_time: Seconds of the virtual clock at the end; None without one.
    reached_time: The same for the round `reached`.
    lost: Visits whose upload never arrived.
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


def summarise(rows: Sequence[Row], target: float | None = None) -> Summary:
  """Adds up the rows of a run.

  Args:
    rows: As in metrics.jsonl.
    target: Mean accuracy to reach; None for none.

  Returns:
    The summary.
  """
  train = [row for row in rows if row['split'] == 'train']
  sending = [row for row in rows if row['split'] in ('train', 'warm_up')]
  tests = [row for row in rows if row['split'] == 'test']
  scored = [row for row in tests if row['accuracy'] is not None]
  validation = {
      row['round']: row['accuracy']
      for row in rows
      if row['split'] == 'validation'
  }

  def merit(row):
    """Accuracy by which a round is chosen; a round without one comes last."""
    chosen = validation.get(row['round']) if validation else row['accuracy']
    return -1.0 if chosen is None else chosen

  reached = [
      row
      for row in scored
      if target is not None and row['accuracy'] >= target
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
  )
