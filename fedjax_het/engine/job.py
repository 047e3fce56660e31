"""What a driver runs: the method, clients, data and keys of a run."""

from typing import NamedTuple

import jax

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine.clock import Device
from fedjax_het.engine.mapping import Backend
from fedjax_het.engine.types import FederatedAlgorithm, Federation


class Job(NamedTuple):
  """The run, independent of its driver.

  Attributes:
    algorithm: The algorithm.
    federation: The federation, with the clients' sizes if there are devices.
    data: The federated data.
    cohort_size: Clients, or uploads, a round.
    backend: How clients are mapped.
    key: The key of training.
    sampling_key: The key of cohorts.
    num_rounds: Rounds of the whole run.
    capacity: The most rounds in one dispatch; None for a program of one round.
    devices: The device of each client, which determines the virtual times; None
      for no virtual time.
    clock_seed: The seed of the devices' jitter, pauses and losses.
  """

  algorithm: FederatedAlgorithm
  federation: Federation
  data: FederatedData
  cohort_size: int
  backend: Backend
  key: jax.Array
  sampling_key: jax.Array
  num_rounds: int
  capacity: int | None = None
  devices: tuple[Device, ...] | None = None
  clock_seed: int = 0
