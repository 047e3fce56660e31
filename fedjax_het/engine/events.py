"""Converts a schedule into arrays of the events of asynchronous rounds.

A round is a fixed number m of accepted uploads. Clients that have downloaded
train together, in a wave, as soon as one of them uploads.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from fedjax_het.engine.clock import Schedule
from fedjax_het.engine.types import Federation


class Turns(NamedTuple):
  """A group's downloads, or trainings, in a round of m uploads.

  Attributes:
    row: [T] int32, rows of the group's clients, in order.
    visit: [T] int32, the number of the client's visit.
    bounds: [m + 1] int32; the turns [bounds[i], bounds[i + 1]) come before
      upload i.
  """

  row: np.ndarray
  visit: np.ndarray
  bounds: np.ndarray


class Events(NamedTuple):
  """A round of m uploads as arrays of fixed shapes.

  Attributes:
    client: [m] int32, the senders in order.
    staleness: [m] int32, server updates since their downloads.
    wave: [m] int32, 1 if training comes before the upload, else 0.
    downloads: {group name: Turns}.
    training: {group name: Turns}.
  """

  client: np.ndarray
  staleness: np.ndarray
  wave: np.ndarray
  downloads: dict[str, Turns]
  training: dict[str, Turns]


class RoundPlan(NamedTuple):
  """A round of m uploads, as lists.

  Attributes:
    client: The senders of the m uploads, in order.
    staleness: For each upload, the server updates since its download.
    wave: For each upload, 1 if training comes before it, else 0.
    downloads: m lists of (client, visit).
    training: m lists of (client, visit).
    time: When the last upload arrives, in seconds.
    lost: Senders of the uploads that were lost during the round.
  """

  client: list[int]
  staleness: list[int]
  wave: list[int]
  downloads: list[list[tuple[int, int]]]
  training: list[list[tuple[int, int]]]
  time: float
  lost: list[int]


def plan_rounds(
    events: Iterable[tuple[str, tuple]], cohort_size: int
) -> Iterator[RoundPlan]:
  """Cuts a stream of events into rounds, lazily.

  Args:
    events: The events, from `clock.stream`.
    cohort_size: Uploads a round, m.

  Yields:
    Whole rounds. Memory is bounded by one round and the number of clients.
  """
  waiting, downloads = {}, []
  done = RoundPlan([], [], [], [], [], 0.0, [])
  for kind, event in events:
    if kind == 'd':
      client, visit, _ = event
      downloads.append((client, visit))
      waiting[client] = visit
    elif kind == 'l':
      done.lost.append(event[0])
    else:
      client, _, _, time, staleness = event
      wave = client in waiting
      done.client.append(client)
      done.staleness.append(staleness)
      done.wave.append(int(wave))
      done.downloads.append(downloads)
      done.training.append([*waiting.items()] if wave else [])
      if wave:
        waiting = {}
      downloads = []
      if len(done.client) == cohort_size:
        yield done._replace(time=time)
        done = RoundPlan([], [], [], [], [], 0.0, [])


def lay_out(plan: RoundPlan, federation: Federation) -> Events:
  """Turns a planned round into arrays of fixed shapes."""
  places = federation.places()
  return Events(
      np.array(plan.client, np.int32),
      np.array(plan.staleness, np.int32),
      np.array(plan.wave, np.int32),
      _turns(federation, places, plan.downloads),
      _turns(federation, places, plan.training),
  )


def round_events(
    schedule: Schedule, federation: Federation, cohort_size: int
) -> list[Events]:
  """Cuts a schedule into rounds.

  Args:
    schedule: A schedule of at least one round.
    federation: The federation.
    cohort_size: Uploads a round, m.

  Returns:
    The events of each whole round.
  """
  rounds = plan_rounds(schedule.events(), cohort_size)
  return [lay_out(plan, federation) for plan in rounds]


def _turns(federation: Federation, places, per_upload) -> dict[str, Turns]:
  """Turns lists [upload][turn] of (client, visit) into arrays, by group."""
  group_of, row_of = places
  result = {}
  for number, group in enumerate(federation.groups):
    # Each client has at most one turn more than it has uploads, so a group of K
    # clients has at most m + K turns. A wave reads K turns from any position,
    # so K more rows follow.
    flat = np.zeros((len(per_upload) + 2 * group.num_clients, 2), np.int32)
    mine = [
        [(row_of[k], visit) for k, visit in turns if group_of[k] == number]
        for turns in per_upload
    ]
    turns = [turn for turns in mine for turn in turns]
    if turns:
      flat[: len(turns)] = turns
    ends = np.cumsum([len(turns) for turns in mine])
    bounds = np.concatenate([[0], ends]).astype(np.int32)
    result[group.name] = Turns(flat[:, 0].copy(), flat[:, 1].copy(), bounds)
  return result
