"""A virtual clock: when which client downloads, trains and uploads.

How long a visit takes follows from the device, the bytes that travel and the
examples that are trained on, never from what is learned; so all that will
happen is planned before training, on the host, and training follows the plan.

A visit of client k takes

  2 latency + down_bytes / down + jitter * examples / speed + up_bytes / up

seconds; then the device pauses, and downloads again. What happens at one time
happens in this order: first all uploads, by client id, then all downloads.
Equal devices that never pause therefore act as in synchronous rounds.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import heapq
import math
from typing import NamedTuple

import numpy as np

MODES = ('async', 'sequential')
_UPLOAD, _DOWNLOAD = 0, 1  # Their order at one time.


@dataclasses.dataclass(frozen=True)
class Device:
  """How fast and how reliable a client is.

  The defaults are those of a phone on a mobile network.

  Attributes:
    examples_per_second: Training speed; an example counts once per pass.
    up: Bytes a second to the server.
    down: Bytes a second from the server.
    latency: Seconds that every message takes besides.
    pause: Mean seconds between an upload and the next download, drawn from an
      exponential distribution; 0 for always available.
    jitter: Sigma of the log-normal factor, of median 1, on the training time.
    drop_out: Probability that a visit never reaches the server. What the
      client did in it is lost with it.

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

  def __post_init__(self):
    for name in ('examples_per_second', 'up', 'down'):
      value = getattr(self, name)
      if not value > 0:
        raise ValueError(f'{name} of a device must be above 0, got {value}.')
    for name in ('latency', 'pause', 'jitter'):
      value = getattr(self, name)
      if not (value >= 0 and math.isfinite(value)):
        raise ValueError(
            f'{name} of a device must be finite and at least 0, got {value}.'
        )
    if not 0 <= self.drop_out <= 1:
      raise ValueError(
          f'drop_out of a device must be between 0 and 1, got {self.drop_out}.'
      )


class Fleet(NamedTuple):
  """All that durations follow from; one entry per client.

  Attributes:
    devices: The clients' devices.
    examples: Examples that a client trains on in a visit.
    down_bytes: Bytes of what it downloads.
    up_bytes: Bytes of what it uploads.
    seed: Of jitter, pauses and losses. Every client has a stream of its own.
  """

  devices: Sequence[Device]
  examples: Sequence[int]
  down_bytes: Sequence[int]
  up_bytes: Sequence[int]
  seed: int = 0

  def visits(self, client: int) -> Iterator[tuple[float, bool, float]]:
    """Yields a client's visits: seconds, whether lost, seconds of pause."""
    device, examples = self.devices[client], self.examples[client]
    rng = np.random.default_rng((self.seed, 1 + client))
    messages = (
        2 * device.latency
        + self.down_bytes[client] / device.down
        + self.up_bytes[client] / device.up
    )
    training = examples / device.examples_per_second
    if not 0 < messages + training < math.inf:
      raise ValueError(
          f'A visit of client {client}, of {examples} examples, would take '
          f'{messages + training} s; it must take some time.'
      )
    while True:
      # Always three draws, so that one option does not shift the others.
      normal, chance, wait = rng.normal(), rng.random(), rng.exponential()
      seconds = messages + training * math.exp(device.jitter * normal)
      yield seconds, chance < device.drop_out, device.pause * wait


class Schedule(NamedTuple):
  """What reaches the server, and when; N uploads, D downloads, L losses.

  A version of the server is the number of uploads that have reached it; a
  client's visits are counted from 0, lost ones included.

  Attributes:
    client: [N] int32, the sender of each accepted upload, in order.
    visit: [N] int32, which of the sender's visits it was.
    version: [N] int32, the server's version that the visit began with.
    time: [N] float64, seconds of its arrival.
    down_client: [D] int32, who downloads, in order; only downloads of visits
      that are not lost, those still under way at the end included.
    down_visit: [D] int32, for which of its visits.
    down_version: [D] int32, the server's version at that time.
    lost_client: [L] int32, senders of the uploads that did not arrive.
    lost_version: [L] int32, the server's version when they should have.
    staleness: [N] int32, server updates between a visit's download and its
      upload: the uploads in between but for those that were too stale.
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


def plan(
    fleet: Fleet,
    num_uploads: int,
    mode: str = 'async',
    max_staleness: int | None = None,
) -> Schedule:
  """Plans a run until the server has accepted so many uploads.

  Planning more uploads repeats what was planned and goes on.

  Args:
    fleet: The clients.
    num_uploads: Uploads to accept, N.
    mode: 'async': all clients run at once, each at its own pace. 'sequential':
      one client at a time, drawn uniformly, downloads, trains and uploads
      while the others wait, as in the official code of FedHe; nothing is ever
      stale, and nobody pauses.
    max_staleness: The server drops uploads staler than that, which then are
      no updates that make others stale; None if it drops none.

  Returns:
    The schedule.

  Raises:
    ValueError: If the mode is unknown, no upload would ever arrive, or a visit
      takes no time.
  """
  if mode not in MODES:
    raise ValueError(f'Unknown mode {mode!r}; known are {", ".join(MODES)}.')
  if all(device.drop_out == 1 for device in fleet.devices):
    raise ValueError(
        'No upload would ever arrive: drop_out is 1 for every client.'
    )
  if mode == 'async':
    events = _async(fleet, max_staleness)
  else:
    events = _sequential(fleet)
  uploads, downloads, losses = [], [], []
  for kind, event in events:
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
  """Yields ('u', upload), ('d', download) and ('l', loss) in their order."""
  clients = range(len(fleet.devices))
  visits = [enumerate(fleet.visits(client)) for client in clients]
  heap = [(0.0, _DOWNLOAD, client) for client in clients]
  # `updates` are the uploads that the server has not dropped.
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
  """As `_async`, one client after another."""
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


def synchronous_times(fleet: Fleet, cohorts: np.ndarray) -> np.ndarray:
  """When synchronous rounds of the same fleet would end.

  A round begins when the one before has ended and ends with the last upload
  of its cohort. A client that still pauses begins later, and one whose visit
  is lost begins anew.

  Args:
    fleet: The clients.
    cohorts: [R, m] integers, the clients of each round.

  Returns:
    [R] float64, seconds since the beginning.

  Raises:
    ValueError: If a client takes part that never returns, or a visit takes no
      time.
  """
  visits = {int(k): fleet.visits(int(k)) for k in np.unique(cohorts)}
  for client in visits:
    if fleet.devices[client].drop_out == 1:
      raise ValueError(
          f'Client {client} never returns (drop_out is 1): a synchronous round '
          'would wait for it for ever.'
      )
  ready = dict.fromkeys(visits, 0.0)
  now, ends = 0.0, []
  for cohort in cohorts:
    begin = now
    for client in map(int, cohort):
      time, lost = max(begin, ready[client]), True
      while lost:
        seconds, lost, pause = next(visits[client])
        arrival = time + seconds
        time = ready[client] = arrival + pause
      now = max(now, arrival)
    ends.append(now)
  return np.array(ends, np.float64)
