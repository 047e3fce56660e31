"""Where the state of a run lies."""

import logging
import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.engine import placement
from fedjax_het.engine.rounds import state_shardings
from fedjax_het.experiment.build import Experiment
from fedjax_het.experiment.processes import several

_log = logging.getLogger(__name__)
# Bytes of states on every device from which on a run warns of them.
_LARGE = 1 << 28


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
  """Refuses, or warns of, what does not fit the run's devices.

  Args:
    experiment: The experiment.

  Raises:
    ValueError: If several processes cannot run it.
  """
  if experiment.config.client_store == 'host':
    if several():
      raise ValueError(
          "client_store='host' is for one process; several of them share the "
          "clients' states among their devices (client_store='device')."
      )
    return
  if experiment.mesh is None:
    return
  init_client = experiment.algorithm.init_client
  for group in experiment.federation.groups:
    one = jax.eval_shape(
        lambda key, group=group: init_client(group, jnp.int32(0), key),
        jax.random.key(0),
    )
    size = group.num_clients * sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(one)
    )
    cut = placement.is_cut(group.num_clients, experiment.mesh)
    if not cut and size > _LARGE:
      _log.warning(
          'The %d clients of group %s do not divide by %d devices, so their '
          'states, %.0f MB, lie on each of them.',
          group.num_clients, group.name, experiment.mesh.devices.size,
          size / 1e6,
      )  # fmt: skip
