"""metrics.jsonl: its lines, how they are written, and what they add up to."""

from collections.abc import Callable, Mapping, Sequence
import json
import logging
import math
import os
import pathlib
from typing import Any, NamedTuple
import zlib

import numpy as np

from fedjax_het.engine.evaluate import Scores
from fedjax_het.engine.reports import RoundReport
from fedjax_het.engine.rounds import round_bytes
from fedjax_het.engine.types import Federation
from fedjax_het.experiment.workdir import (
  read_bytes,
  set_aside,
  write_atomically,
)

_log = logging.getLogger(__name__)

Row = dict[str, Any]
# Of a file's first lines: {'bytes': their number, 'crc32': their CRC-32}.
Mark = dict[str, int]
NO_LINES: Mark = dict(bytes=0, crc32=0)


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
    reports: RoundReport,
    federation: Federation,
    seconds: float,
    split: str = 'train',
) -> Row:
  """The line of a round's local training.

  Args:
    round_num: Rounds done, this one included.
    reports: What the round measured, on the host.
    federation: The federation.
    seconds: Wall time of the round.
    split: 'train', or 'warm_up' for what comes before the first round.

  Returns:
    Client metrics (`train_loss` is called `loss`) as the mean over a group's
    clients of this round, `<name>/<group>`, and the mean of those over the
    groups that took part, `<name>`; number of clients and bytes both ways, in
    all and by group; the ids of clients whose update was not finite, which
    count in none of the means; `server`, {name: number}, if the server's
    update has metrics.
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
  row = {**row, **counts, 'nonfinite': dropped, **groups}
  if reports.server:
    row['server'] = {k: _number(v) for k, v in reports.server.items()}
  return row


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

  With each checkpoint the new lines are appended to a copy, from which the
  file is restored if it is damaged.

  Attributes:
    path: The file.
  """

  def __init__(self, path: pathlib.Path, copy: pathlib.Path | None = None):
    """Opens the file, whose lines so far the copy holds already."""
    self.path = path
    self._file = open(path, 'ab', buffering=0)
    self._copy = copy and open(copy, 'ab', buffering=0)
    self._new = b''  # What the copy does not hold yet.
    lines = path.read_bytes()
    self._mark = Mark(bytes=len(lines), crc32=zlib.crc32(lines))

  def append(self, row: Row) -> None:
    """Writes one line; raises OSError if it does not fit on the disk."""
    line = json.dumps(row, allow_nan=False).encode() + b'\n'
    _write(self._file, line)
    self._new += line
    self._mark = Mark(
        bytes=self._mark['bytes'] + len(line),
        crc32=zlib.crc32(line, self._mark['crc32']),
    )

  def mark(self) -> tuple[Mark, Callable[[], None]]:
    """What a checkpoint notes of the lines so far, and how they are kept.

    Returns:
      The mark, and a function that returns when these lines are on the disk,
      in the file and in its copy. Another thread may call it.
    """
    new, self._new = self._new, b''

    def keep():
      _sync(self._file)
      if self._copy is not None:
        _write(self._copy, new)
        _sync(self._copy)

    return self._mark, keep

  def close(self) -> None:
    """Closes both."""
    self._file.close()
    if self._copy is not None:
      self._copy.close()


def _write(file, data: bytes) -> None:
  """Appends bytes to an unbuffered file."""
  try:
    while data:
      data = data[file.write(data) :]
  except OSError as e:
    raise OSError(e.errno, f'{e.strerror} while writing {file.name}') from e


def _sync(file) -> None:
  """Returns when all of a file is on the disk."""
  try:
    os.fsync(file.fileno())
  except OSError as e:
    raise OSError(e.errno, f'{e.strerror} while writing {file.name}') from e


def _parse(line: bytes) -> Row | None:
  """A line's row; None for a torn or damaged line."""
  try:
    row = json.loads(line.decode()) if line.endswith(b'\n') else None
  except (ValueError, RecursionError):
    return None
  if not isinstance(row, dict) or not isinstance(row.get('split'), str):
    return None
  return row if type(row.get('round')) is int else None


def read_rows(path: pathlib.Path) -> list[Row]:
  """All rows of a metrics file, without a torn last line.

  Args:
    path: metrics.jsonl; it may be absent.

  Returns:
    The rows in order.

  Raises:
    ValueError: If it is no file, or a line before the last is damaged, out of
      its order or there twice, naming it.
  """
  rows, before = [], (-1, 0, '')
  lines = _lines(path)
  for number, line in enumerate(lines, 1):
    row = _parse(line)
    if row is None:
      if number < len(lines) or line.endswith(b'\n'):
        raise ValueError(
            f'{path}, line {number} is damaged: {_show(line)}; the command '
            'that ran it restores the file.'
        )
      break
    # A round is trained before it is tested.
    place = row['round'], row['split'] in ('test', 'validation'), row['split']
    if place[:2] < before[:2] or place == before:
      raise ValueError(
          f'{path}, line {number} is damaged: round {row["round"]}, '
          f'{row["split"]}, is there twice or out of its order; the command '
          'that ran it restores the file.'
      )
    before = place
    rows.append(row)
  return rows


def _show(line: bytes) -> str:
  """The beginning of a line, for an error's text."""
  return repr(line[:40]).removeprefix('b') + ('...' if len(line) > 40 else '')


def _lines(path: pathlib.Path) -> list[bytes]:
  """The lines of a file that may be absent; only a line feed ends one."""
  try:
    contents = read_bytes(path)
  except FileNotFoundError:
    return []
  lines = contents.split(b'\n')
  last = [lines[-1]] if lines[-1] else []
  return [line + b'\n' for line in lines[:-1]] + last


def restore_rows(
    path: pathlib.Path,
    copy: pathlib.Path,
    rounds: int,
    mark: Mark | None,
) -> list[Row]:
  """Makes metrics.jsonl what it was when a checkpoint was written.

  Lines after that are removed. Where what was there then is damaged, it is
  taken from the copy, and the damaged file is set aside.

  Args:
    path: metrics.jsonl; it may be absent.
    copy: The copy that lies beside the checkpoints; it may be absent.
    rounds: Rounds that the restored state has done.
    mark: What the checkpoint notes of the file; None for one of a version
      without copies.

  Returns:
    The rows that stay.

  Raises:
    ValueError: If lines of rounds up to `rounds` are missing or damaged, in
      the copy as well.
  """
  if mark is None:
    rows = cut_rows(path, rounds)
    lines = _contents(path)
  else:
    found = _contents(path)
    lines = None if found is None else _marked(path, mark)
    if lines is None:
      lines = _marked(copy, mark)
      if lines is None:
        raise ValueError(
            f'{path} is damaged, and {copy}, from which it would be restored, '
            'is so too; restore one of them or choose another workdir.'
        )
      _log.warning(
          '%s is damaged; restored as of round %d from %s.', path, rounds, copy
      )
      if os.path.lexists(path):
        set_aside(path)
      write_atomically(path, lines)
    elif found != lines:
      write_atomically(path, lines)
    rows = [json.loads(line) for line in lines.splitlines()]
  kept = _contents(copy)
  if kept != lines:
    if kept is None:
      set_aside(copy)
    write_atomically(copy, lines)
  return rows


def _contents(path: pathlib.Path) -> bytes | None:
  """A file's bytes, none if it is absent; None if it cannot be read."""
  try:
    return read_bytes(path)
  except FileNotFoundError:
    return b''
  except ValueError:
    return None


def _marked(path: pathlib.Path, mark: Mark) -> bytes | None:
  """The bytes that a mark is of; None if the file does not begin with them."""
  lines = (_contents(path) or b'')[: mark['bytes']]
  return lines if zlib.crc32(lines) == mark['crc32'] else None


def cut_rows(path: pathlib.Path, rounds: int) -> list[Row]:
  """Removes the lines of rounds after `rounds`, and a torn last line.

  The lines that stay are kept byte for byte.

  Args:
    path: metrics.jsonl; it may be absent.
    rounds: Rounds that the restored state has done.

  Returns:
    The rows that stay.

  Raises:
    ValueError: If lines of rounds up to `rounds` are missing or damaged.
  """
  kept, rows = [], []
  lines = _lines(path)
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
