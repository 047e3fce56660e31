"""Counts the bytes that a method stores and sends, from shapes alone."""

from typing import NamedTuple

from fedjax_het.engine.traffic import full_bytes
from fedjax_het.engine.visits import message_bytes
from fedjax_het.experiment import facts
from fedjax_het.experiment.build import Experiment


class Overheads(NamedTuple):
  """Bytes per client, as means over all clients, and bytes of the server.

  Attributes:
    model: What the client trains, with running statistics of norms.
    received: What a visit downloads, with all optional parts.
    kept: What the client keeps between its visits.
    sent: What a visit uploads, with all optional parts.
    server: What the server keeps between rounds; not a mean.
  """

  model: float
  received: float
  kept: float
  sent: float
  server: int

  @property
  def held(self) -> float:
    """Bytes during a visit: trained model, download and kept state."""
    return self.model + self.received + self.kept


def count(experiment: Experiment) -> Overheads:
  """Counts the bytes of a method; computes no arrays.

  Args:
    experiment: The result of `build`.

  Returns:
    Its overheads, without the gradients, optimiser state and activations that
    every method has.
  """
  measured = facts.measure(experiment)
  total = [0.0] * 4
  for group in experiment.federation.groups:
    down, up = message_bytes(experiment.algorithm, group, experiment.data)
    model = sum(
        full_bytes(trained.abstract_variables)
        for trained in experiment.algorithm.trained_models(group)
    )
    kept = measured['groups'][group.name]['client_bytes']
    for i, size in enumerate((model, down, kept, up)):
      total[i] += size * group.num_clients
  means = (size / experiment.federation.num_clients for size in total)
  return Overheads(*means, server=measured['server_bytes'])
