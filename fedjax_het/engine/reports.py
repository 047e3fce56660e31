"""Measurements of a round, in each group and at the server."""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import NamedTuple

import jax

from fedjax_het.engine.traffic import Traffic


class GroupReport(NamedTuple):
  """Measurements of one group in a round; leading axis = slots of the cohort.

  Attributes:
    client_id: [slots] int32, num_clients for padding slots.
    finite: [slots] bool, whether all that the client returned was finite.
    metrics: {name: [slots] float32} of the client updates.
    down: The downlink of each client.
    up: The uplink of each client.
  """

  client_id: jax.Array
  finite: jax.Array
  metrics: dict[str, jax.Array]
  down: Traffic
  up: Traffic


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RoundReport(Mapping[str, GroupReport]):
  """Measurements of a round: a mapping {group: GroupReport}, and the server's.

  A pytree.

  Attributes:
    groups: {group: report}.
    server: {name: [] float32}, the metrics of the server's update; {} if it
      returns none. In asynchronous rounds each is the mean over those of the
      round's updates in which it is not NaN.
    server_finite: [] bool, whether the server's new state is finite; if not,
      the old state is kept. None if it is not checked because the algorithm's
      server returns no metrics.
  """

  groups: dict[str, GroupReport]
  server: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
  server_finite: jax.Array | None = None

  def __getitem__(self, group: str) -> GroupReport:
    return self.groups[group]

  def __iter__(self) -> Iterator[str]:
    return iter(self.groups)

  def __len__(self) -> int:
    return len(self.groups)
