"""Where the state of a run lies."""

from typing import Any

import jax

from fedjax_het.engine import placement
from fedjax_het.engine.rounds import state_shardings
from fedjax_het.experiment.build import Experiment


def shardings(experiment: Experiment) -> Any:
  """Shardings of the state, a prefix of it; None on the default device."""
  config, mesh = experiment.config, experiment.mesh
  if mesh is None or config.client_store == 'host':
    return None
  if config.clock.mode == 'synchronous':
    return state_shardings(experiment.federation, mesh)
  # Whose turn it is follows from the clock: no device owns a client.
  return placement.everywhere(mesh)


def place(experiment: Experiment, state: Any) -> Any:
  """Lays a state where the run wants it."""
  where = shardings(experiment)
  return state if where is None else placement.put(state, where)


def with_shardings(experiment: Experiment, shapes: Any) -> Any:
  """Adds to the state's shapes where their arrays lie."""
  where = shardings(experiment)
  if where is None:
    return shapes
  return jax.tree.map(
      lambda sharding, part: jax.tree.map(
          lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
          part,
      ),
      where,
      shapes,
  )


def check(experiment: Experiment) -> None:
  """Warns of, or refuses, what does not fit the run's devices.

  Args:
    experiment: The experiment.

  Raises:
    ValueError: If several processes cannot run it.
  """
  if jax.process_count() == 1:
    return
  if experiment.config.client_store == 'host':
    raise ValueError(
        "client_store='host' is for one process; several of them share the "
        "clients' states among their devices (client_store='device')."
    )
