"""A virtual clock: when which client downloads, trains and uploads.

The duration of a visit depends on the device, the bytes sent and the number of
examples or of operations, and never on what is learned. So events are planned
on the host, ahead of training and only as far as rounds need them.

A visit of client k takes

  2 latency + down_bytes / down + jitter * work / speed + up_bytes / up

seconds; then the device pauses, and downloads again. Among simultaneous events,
uploads precede downloads, and events of one kind are ordered by client id.
Identical devices that never pause therefore behave as in synchronous rounds.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import heapq
import math
from typing import Any, NamedTuple

import numpy as np

from fedjax_het.names import check_name
from fedjax_het.options import (
    at_least,
    between,
    check_type,
    counts,
    not_negative,
    positive,
)

MODES = ('async', 'sequential')
_UPLOAD, _DOWNLOAD = 0, 1  # The order of simultaneous events.
# Consecutive lost visits after which planning raises an error.
_PATIENCE = 1_000_000
# The longest visit, in seconds: some 30,000 years.
_LONGEST = 1e12
# The largest sigma of jitter: for about one visit in three the factor is then
# above e^10 or below e^-10.
_MOST_JITTER = 10.0


@dataclasses.dataclass(frozen=True)
class Device:
  """A client's speed and reliability.

  The defaults are those of a phone on a mobile network.

  Attributes:
    examples_per_second: Training speed; an example counts once per pass of
      `local.epochs` or `local.steps`, whatever the model and the method
      compute for it.
    up: Bytes a second to the server.
    down: Bytes a second from the server.
    latency: Seconds added to every message.
    pause: Mean seconds between an upload and the next download, drawn from an
      exponential distribution; 0 for always available.
    jitter: Sigma of the log-normal factor, of median 1, on the training time;
      at most 10.
    drop_out: Probability that a visit's upload never arrives. The visit then
      does not change the client either.
    flops_per_second: Training speed in operations of matrix products and
      convolutions, two per multiply-add, that replaces `examples_per_second`:
      the visit's operations are those of `engine.client_flops`, of all that the
      method computes with the client's model. None for examples.

  Raises:
    ValueError: If a value is out of its range.
  """

  examples_per_second: float = 500.0
  up: float = 1.25e6  # 10 Mbit/s.
  down: float = 5e6  # 40 Mbit/s.
  latency: float = 0.05
  pause: float = 0.0
  jitter: float = 0.0
  drop_out: float = 0.0
  flops_per_second: float | None = None

  def __post_init__(self):
    speeds = ['examples_per_second', 'up', 'down']
    if self.flops_per_second is not None:
      speeds.append('flops_per_second')
    for name in speeds:
      positive(**{f'{name} of a device': getattr(self, name)})
    for name in ('latency', 'pause'):
      not_negative(**{f'{name} of a device': getattr(self, name)})
    between(0, _MOST_JITTER, **{'jitter of a device': self.jitter})
    between(0, 1, **{'drop_out of a device': self.drop_out})


@dataclasses.dataclass(frozen=True)
class Fleet:
  """Devices and work of the clients; one entry per client.

  Attributes:
    devices: The clients' devices.
    examples: Examples that a client trains on in a visit.
    down_bytes: Bytes of its download.
    up_bytes: Bytes of its upload.
    seed: Seed of jitter, pauses and losses. Every client has its own stream.
    flops: Operations of its visit, whole numbers; None if no device has
      `flops_per_second`.

  Raises:
    ValueError: If there is no device, a value has the wrong type, the seed is
      negative, a field does not hold one nonnegative integer for each device,
      or operations are missing.
  """

  devices: Sequence[Device]
  examples: Sequence[int]
  down_bytes: Sequence[int]
  up_bytes: Sequence[int]
  seed: int = 0
  flops: Sequence[int] | None = None

  def __post_init__(self):
    if not len(self.devices):
      raise ValueError('devices must hold at least one Device, got none.')
    for device in self.devices:
      check_type('devices', device, Device)
    fields = ['examples', 'down_bytes', 'up_bytes']
    if any(device.flops_per_second is not None for device in self.devices):
      fields.append('flops')
    for name in fields:
      values = getattr(self, name)
      counts(**{name: values})
      if len(values) != len(self.devices):
        raise ValueError(
            f'{name} must be {len(self.devices)} integers, one for each '
            f'device, got {len(values)}.'
        )
    check_type('seed', self.seed, int, high=math.inf)
    if self.seed < 0:
      raise ValueError(f'seed must be at least 0, got {self.seed}.')

  def seconds(self, client: int) -> tuple[float, float]:
    """Seconds of messages and of training in a client's visit, without jitter.

    Args:
      client: Its position.

    Returns:
      The two parts.

    Raises:
      ValueError: If the visit takes no time or too long.
    """
    device = self.devices[client]
    messages = (
        2 * device.latency
        + self.down_bytes[client] / device.down
        + self.up_bytes[client] / device.up
    )
    if device.flops_per_second is None:
      work, speed = self.examples[client], device.examples_per_second
      unit = 'examples'
    else:
      work, speed = self.flops[client], device.flops_per_second
      unit = 'operations'
    training = work / speed
    if not 0 < messages + training < _LONGEST:
      raise ValueError(
          f'A visit of client {client}, of {work} {unit}, would take '
          f'{messages + training} s; it must take some time, and less than '
          f'{_LONGEST:.0e} s.'
      )
    return messages, training

  def visits(self, client: int) -> Iterator[tuple[float, bool, float]]:
    """Yields a client's visits: (seconds, whether lost, seconds of pause)."""
    device = self.devices[client]
    rng = np.random.default_rng((self.seed, 1 + client))
    messages, training = self.seconds(client)
    while True:
      # Always draw all three, so that no option shifts the others' draws.
      normal, chance, wait = rng.normal(), rng.random(), rng.exponential()
      seconds = messages + training * math.exp(device.jitter * normal)
      yield seconds, chance < device.drop_out, device.pause * wait


class Schedule(NamedTuple):
  """The events of an asynchronous run: N uploads, D downloads, L losses.

  The server's version is the number of uploads that have reached it. A client's
  visits are counted from 0, lost ones included.

  Attributes:
    client: [N] int32, the sender of each accepted upload, in order.
    visit: [N] int32, the number of the sender's visit.
    version: [N] int32, the server's version at the visit's download.
    time: [N] float64, its arrival time in seconds.
    down_client: [D] int32, clients that download, in order, without lost visits
      but with visits that are unfinished at the end.
    down_visit: [D] int32, the number of the client's visit.
    down_version: [D] int32, the server's version at that time.
    lost_client: [L] int32, senders of the uploads that did not arrive.
    lost_version: [L] int32, the server's version at the time when they would
      have arrived.
    staleness: [N] int32, server updates between a visit's download and its
      upload; uploads that are dropped as too stale do not count as updates.
  """

  client: np.ndarray
  visit: np.ndarray
  version: np.ndarray
  time: np.ndarray
  down_client: np.ndarray
  down_visit: np.ndarray
  down_version: np.ndarray
  lost_client: np.ndarray
  lost_version: np.ndarray
  staleness: np.ndarray

  def events(self) -> Iterator[tuple[str, tuple]]:
    """Yields downloads and uploads as `stream` does, but no losses."""
    rows = zip(self.down_client, self.down_visit, self.down_version)
    downloads = collections.deque(tuple(map(int, row)) for row in rows)
    rows = zip(
        self.client, self.visit, self.version, self.time, self.staleness
    )
    for number, (client, visit, version, time, staleness) in enumerate(rows):
      while downloads and downloads[0][2] <= number:
        yield 'd', downloads.popleft()
      integers = map(int, (client, visit, version))
      yield 'u', (*integers, float(time), int(staleness))


def stream(
    fleet: Fleet, mode: str = 'async', max_staleness: int | None = None
) -> Iterator[tuple[str, tuple]]:
  """Plans a run lazily, event by event; the stream is infinite.

  Args:
    fleet: The clients.
    mode: See `plan`.
    max_staleness: See `plan`.

  Returns:
    An iterator over ('d', (client, visit, version)) for downloads, ('u',
    (client, visit, version, time, staleness)) for uploads that arrive and
    ('l', (client, version)) for lost ones, in order; fields as in
    `Schedule`.

  Raises:
    ValueError: If the mode is unknown, `max_staleness` is not a nonnegative
      integer, no upload would ever arrive, or, while iterating, a visit takes
      no time or too long, or a million visits in a row are lost.
  """
  check_name('mode', mode, MODES)
  if max_staleness is not None:
    at_least(0, max_staleness=max_staleness)
  if all(device.drop_out == 1 for device in fleet.devices):
    raise ValueError(
        'No upload would ever arrive: drop_out is 1 for every client.'
    )
  if mode == 'async':
    return _with_patience(_async(fleet, max_staleness))
  return _with_patience(_sequential(fleet))


def _with_patience(events):
  """Yields events; raises ValueError after a million losses in a row."""
  lost = 0
  for kind, event in events:
    lost = lost + 1 if kind == 'l' else 0 if kind == 'u' else lost
    if lost == _PATIENCE:
      raise ValueError(
          f'{_PATIENCE} visits in a row were lost: drop_out of the devices '
          'leaves hardly any upload.'
      )
    yield kind, event


class Window:
  """Items of an iterator by number; only the last ones are kept.

  Asking for an earlier item restarts the iterator.
  """

  def __init__(self, begin: Callable[[], Iterator[Any]], keep: int):
    """Keeps the last `keep` items of the iterators that `begin` makes."""
    self._begin = begin
    self._kept = collections.deque(maxlen=keep)
    self._items, self._end = begin(), 0

  def __getitem__(self, number: int) -> Any:
    """The item of this number, counted from 0."""
    if number < self._end - len(self._kept):
      self._kept.clear()
      self._items, self._end = self._begin(), 0
    while self._end <= number:
      self._kept.append(next(self._items))
      self._end += 1
    return self._kept[number - self._end]


def plan(
    fleet: Fleet,
    num_uploads: int,
    mode: str = 'async',
    max_staleness: int | None = None,
) -> Schedule:
  """Plans a run up to a number of accepted uploads.

  A longer plan begins with the shorter one. `stream` gives the same events
  lazily.

  Args:
    fleet: The clients.
    num_uploads: Uploads to accept, N.
    mode: 'async': all clients run at once, each at its own pace. 'sequential':
      one client at a time, drawn uniformly, downloads, trains and uploads
      while the others wait, as in the official code of FedHe; no upload is
      stale, and no client pauses.
    max_staleness: The server drops uploads that are staler than this, and does
      not count them as updates; None for no limit.

  Returns:
    The schedule.

  Raises:
    ValueError: If the mode is unknown, a number is not a nonnegative integer,
      no upload would ever arrive, a visit takes no time or too long, or a
      million visits in a row are lost.
  """
  at_least(0, num_uploads=num_uploads)
  uploads, downloads, losses = [], [], []
  for kind, event in stream(fleet, mode, max_staleness):
    if len(uploads) == num_uploads:
      break
    (uploads, downloads, losses)['udl'.index(kind)].append(event)

  def columns(rows, width):
    return list(zip(*rows, strict=True)) or [()] * width

  client, visit, version, time, staleness = columns(uploads, 5)
  integers = (client, visit, version)
  return Schedule(
      *(np.array(column, np.int32) for column in integers),
      np.array(time, np.float64),
      *(np.array(column, np.int32) for column in columns(downloads, 3)),
      *(np.array(column, np.int32) for column in columns(losses, 2)),
      np.array(staleness, np.int32),
  )


def _async(fleet, max_staleness=None):
  """Yields ('u', upload), ('d', download) and ('l', loss) in order."""
  clients = range(len(fleet.devices))
  visits = [enumerate(fleet.visits(client)) for client in clients]
  heap = [(0.0, _DOWNLOAD, client) for client in clients]
  # `updates` counts the uploads that the server has not dropped.
  under_way, version, updates = {}, 0, 0
  while True:
    time, kind, client = heapq.heappop(heap)
    if kind == _DOWNLOAD:
      visit, (seconds, lost, pause) = next(visits[client])
      under_way[client] = visit, version, updates, lost, pause
      if not lost:
        yield 'd', (client, visit, version)
      heapq.heappush(heap, (time + seconds, _UPLOAD, client))
    else:
      visit, start, seen, lost, pause = under_way[client]
      if lost:
        yield 'l', (client, version)
      else:
        staleness = updates - seen
        yield 'u', (client, visit, start, time, staleness)
        version += 1
        updates += max_staleness is None or staleness <= max_staleness
      heapq.heappush(heap, (time + pause, _DOWNLOAD, client))


def _sequential(fleet):
  """Yields the same events for one client at a time."""
  num_clients = len(fleet.devices)
  visits = [enumerate(fleet.visits(client)) for client in range(num_clients)]
  rng = np.random.default_rng((fleet.seed, 0))
  time, version = 0.0, 0
  while True:
    client = int(rng.integers(num_clients))
    visit, (seconds, lost, _) = next(visits[client])
    time += seconds
    if lost:
      yield 'l', (client, version)
    else:
      yield 'd', (client, visit, version)
      yield 'u', (client, visit, version, time, 0)
      version += 1


def check_return(fleet: Fleet, cohorts: np.ndarray) -> None:
  """Raises ValueError if a client of a cohort never uploads."""
  for client in map(int, np.unique(cohorts)):
    if fleet.devices[client].drop_out == 1:
      raise ValueError(
          f'Client {client} never returns (drop_out is 1): a synchronous round '
          'would never end.'
      )


def synchronous_rounds(
    fleet: Fleet, cohorts
) -> Iterator[tuple[float, list[int]]]:
  """Plans the synchronous rounds of a fleet.

  A round begins at the end of the one before, and ends with the last upload of
  its cohort. A client that still pauses begins later; a client whose visit is
  lost begins another one. See `check_return` for clients that never upload.

  Args:
    fleet: The clients.
    cohorts: The clients of each round.

  Yields:
    The seconds since the beginning when a round ends, and the client of each
    visit that was lost in it.

  Raises:
    ValueError: While iterating, if a visit takes no time or too long, or a
      million visits of a client in a row are lost.
  """
  visits, ready, now = {}, {}, 0.0
  for cohort in cohorts:
    begin, gone = now, []
    for client in map(int, cohort):
      if client not in visits:
        visits[client], ready[client] = fleet.visits(client), 0.0
      time = max(begin, ready[client])
      for _ in range(_PATIENCE):
        seconds, lost, pause = next(visits[client])
        arrival = time + seconds
        time = ready[client] = arrival + pause
        if not lost:
          break
        gone.append(client)
      else:
        raise ValueError(
            f'{_PATIENCE} visits of client {client} in a row were lost: its '
            'drop_out leaves hardly any upload.'
        )
      now = max(now, arrival)
    yield now, gone
