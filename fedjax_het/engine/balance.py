"""Assigns clients of unequal work to devices."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine.cohort import Share
from fedjax_het.engine.local import visit_steps
from fedjax_het.engine.types import Federation
from fedjax_het.models.flops import forward_flops


class Assignment(NamedTuple):
  """Which client of a cohort runs on which device.

  Each of D devices has C places and fills them from the first one.

  Attributes:
    slot: [D * C] int32, the cohort's slot at each place; 0 for padding.
    num: [D] int32, number of clients on each device.
    place: [slots] int32, the place of each slot; D * C for padding slots.
    total: [D] float32, the work of each device, earlier groups included.
  """

  slot: jax.Array
  num: jax.Array
  place: jax.Array
  total: jax.Array

  def collect(self, rows) -> Any:
    """Reorders [D * C, ...] to [slots, ...], with zeros in padding slots."""
    return jax.tree.map(
        lambda row: row.at[self.place].get(mode='fill', fill_value=0), rows
    )


def assign(loads, num_valid, num_devices: int, total=None) -> Assignment:
  """Longest-processing-time-first scheduling.

  The client with the most work goes to the device with the least work, until
  all are assigned. No device gets more than C clients, which bounds memory.
  Equal loads are assigned round-robin. Traceable. The assignment decides where
  a client runs, and changes no result.

  Args:
    loads: [slots] work of each client, nonnegative, in any unit.
    num_valid: Number of clients; the other slots are padding.
    num_devices: D.
    total: [D] float32, work already assigned to each device; None for none.

  Returns:
    The assignment, with C = slots / D, rounded up.

  References:
    Graham, `Bounds on Multiprocessing Timing Anomalies
    <https://doi.org/10.1137/0117039>`_, SIAM J. Appl. Math. 17, 1969.
  """
  slots = loads.shape[0]
  capacity = -(-slots // num_devices)
  loads = loads.astype(jnp.float32)
  real = jnp.arange(slots) < num_valid
  # Stable sort: equal loads keep the order of their slots.
  order = jnp.argsort(jnp.where(real, -loads, jnp.inf))

  def body(i, carry):
    slot, num, place, total = carry
    client = order[i]
    device = jnp.argmin(jnp.where(num < capacity, total, jnp.inf))
    position = device * capacity + num[device]
    return (
        slot.at[position].set(client.astype(jnp.int32)),
        num.at[device].add(1),
        place.at[client].set(position.astype(jnp.int32)),
        total.at[device].add(loads[client]),
    )

  places = num_devices * capacity
  start = (
      jnp.zeros(places, jnp.int32),
      jnp.zeros(num_devices, jnp.int32),
      jnp.full(slots, places, jnp.int32),
      jnp.zeros(num_devices, jnp.float32) if total is None else total,
  )
  return Assignment(*jax.lax.fori_loop(0, num_valid, body, start))


def step_costs(federation: Federation) -> dict[str, float]:
  """Cost per local step, relative to the most expensive group.

  The cost is the number of multiplications in a forward pass. All groups cost
  the same if a model has a loop of unknown length.

  Args:
    federation: The groups and their models.

  Returns:
    {group: number from 0 to 1}, the most expensive group first.
  """
  try:
    costs = {g.name: float(forward_flops(g.model)) for g in federation.groups}
  except ValueError:
    costs = {g.name: 1.0 for g in federation.groups}
  largest = max(*costs.values(), 1.0)
  ranked = sorted(costs.items(), key=lambda item: -item[1])
  return {name: cost / largest for name, cost in ranked}


def assign_cohort(
    federation: Federation,
    costs: Mapping[str, float],
    shares: Mapping[str, Share],
    data: FederatedData,
    num_devices: int,
) -> dict[str, Assignment]:
  """Assigns a cohort, group by group, to the devices.

  Each group's assignment counts the work that earlier groups gave each device,
  so that groups with fewer clients than devices use different devices.

  Args:
    federation: The federation.
    costs: {group: cost of a local step}; groups are assigned in this order.
    shares: {group: its part of the cohort}.
    data: All clients' examples.
    num_devices: D.

  Returns:
    {group: assignment}, in the order of `shares`.
  """
  assigned, total = {}, None
  for name, cost in costs.items():
    steps = visit_steps(federation.local, data.sizes[shares[name].client_id])
    loads = cost * steps
    assigned[name] = assign(loads, shares[name].num_valid, num_devices, total)
    total = assigned[name].total
  return {name: assigned[name] for name in shares}
