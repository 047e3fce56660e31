"""A virtual clock on which each group of clients has rounds of its own.

A group is a tier. In a round of a tier, m of its clients, drawn uniformly,
download together, and the tier waits for all of them, as in a synchronous run;
then their m uploads reach the server one after another, and the tier begins its
next round. No tier waits for another. A round of a run is thus a round of one
tier.

Tiers whose rounds end at the same time take turns, in the order of the groups:
each downloads right after its own uploads.

References:
  Chai et al., `FedAT <https://arxiv.org/abs/2010.05958>`_, SC 2021.
"""

from collections.abc import Iterable, Iterator, Sequence
import heapq
import itertools

import numpy as np

from fedjax_het.engine.clock import (
    MODES,
    Fleet,
    check_return,
    synchronous_rounds,
)
from fedjax_het.options import at_least

# The modes of a clock by which the server updates its state with every upload.
UPLOAD_MODES = (*MODES, 'tiers')


def tier_stream(
    fleet: Fleet,
    tiers: Sequence[Sequence[int]],
    cohort_size: int,
    max_staleness: int | None = None,
) -> Iterator[tuple[str, tuple]]:
  """Plans a run lazily, event by event; the stream is infinite.

  Args:
    fleet: The clients.
    tiers: The clients of each tier; no client is in two of them.
    cohort_size: Clients of a round of a tier, m.
    max_staleness: As for `clock.stream`.

  Returns:
    An iterator over events like those of `clock.stream`. Staleness counts the
    uploads of other tiers since the download, and the m uploads of a round
    have the same time and the same staleness.

  Raises:
    ValueError: If a tier has fewer than m clients, a client never returns, or,
      while iterating, a visit takes no time or too long, or a million visits of
      a client in a row are lost.
  """
  at_least(1, cohort_size=cohort_size)
  check_tiers(map(len, tiers), cohort_size)
  check_return(fleet, np.concatenate(tiers))
  return _events(fleet, tiers, cohort_size, max_staleness)


def check_tiers(sizes: Iterable[int], cohort_size: int) -> None:
  """Raises ValueError if a tier has fewer clients than a cohort."""
  smallest = min(sizes)
  if smallest < cohort_size:
    raise ValueError(
        "clock.mode='tiers' draws a cohort from one group: cohort_size must be "
        f'at most {smallest}, the clients of the smallest group, got '
        f'{cohort_size}.'
    )


def _cohorts(seed: int, number: int, clients, cohort_size: int):
  """Yields the cohorts of a tier: sorted lists of clients."""
  rng = np.random.default_rng((seed, 0, number))
  while True:
    drawn = rng.choice(np.asarray(clients), cohort_size, replace=False)
    yield sorted(drawn.tolist())


def _events(fleet, tiers, cohort_size, max_staleness):
  rounds = []
  for number, clients in enumerate(tiers):
    cohorts, same = itertools.tee(
        _cohorts(fleet.seed, number, clients, cohort_size)
    )
    rounds.append(zip(cohorts, synchronous_rounds(fleet, same)))
  visits = dict.fromkeys(itertools.chain.from_iterable(tiers), 0)
  # `updates` counts the uploads that the server has not dropped.
  version = updates = 0
  under_way, heap = {}, []

  def begin(number):
    cohort, (end, lost) = next(rounds[number])
    turns = []
    for client in cohort:
      # Lost visits count as visits.
      visit = visits[client] + lost.count(client)
      visits[client] = visit + 1
      turns.append((client, visit, version))
      yield 'd', turns[-1]
    under_way[number] = turns, lost, updates
    heapq.heappush(heap, (end, number))

  for number in range(len(tiers)):
    yield from begin(number)
  while True:
    time, number = heapq.heappop(heap)
    turns, lost, seen = under_way[number]
    yield from (('l', (client, version)) for client in lost)
    staleness = updates - seen
    for turn in turns:
      yield 'u', (*turn, time, staleness)
      version += 1
    if max_staleness is None or staleness <= max_staleness:
      updates += cohort_size
    yield from begin(number)
