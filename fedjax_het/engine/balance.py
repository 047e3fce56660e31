"""Deals clients of unequal work to devices."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import FederatedData
from fedjax_het.engine.cohort import Share
from fedjax_het.engine.local import visit_steps
from fedjax_het.engine.types import Federation
from fedjax_het.models.flops import forward_flops


class Deal(NamedTuple):
  """Which client runs where.

  D devices have C places each; a device's clients come first in its places.

  Attributes:
    slot: [D * C] int32, the slot of the cohort at each place; 0 for padding.
    num: [D] int32, clients of each device.
    place: [slots] int32, the place of each slot; D * C for padding slots.
    total: [D] float32, the work of each device, what it had before included.
  """

  slot: jax.Array
  num: jax.Array
  place: jax.Array
  total: jax.Array

  def collect(self, rows) -> Any:
    """Brings [D * C, ...] in the order of slots, zeros in padding slots."""
    return jax.tree.map(
        lambda row: row.at[self.place].get(mode='fill', fill_value=0), rows
    )


def deal(loads, num_valid, num_devices: int, total=None) -> Deal:
  """Gives the longest job left to the device with the least to do, and so on.

  No device gets more than its part of the slots, so that what clients take
  with them needs no more memory than dealing them in turn. Equal loads are
  dealt in turn. Traceable; the result changes where a client runs and nothing
  else.

  Args:
    loads: [slots] work of each client in any unit, at least 0.
    num_valid: How many of the slots are clients; the rest is padding.
    num_devices: D.
    total: [D] float32, the work that devices have already; None for none.

  Returns:
    The deal, with C = slots / D, rounded up.

  References:
    Graham, `Bounds on Multiprocessing Timing Anomalies
    <https://doi.org/10.1137/0117039>`_, SIAM J. Appl. Math. 17, 1969.
  """
  slots = loads.shape[0]
  capacity = -(-slots // num_devices)
  loads = loads.astype(jnp.float32)
  real = jnp.arange(slots) < num_valid
  # Stable: equals stay in the order of their slots.
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
  return Deal(*jax.lax.fori_loop(0, num_valid, body, start))


def step_weights(federation: Federation) -> dict[str, float]:
  """{group: what a local step costs beside the dearest's}, the dearest first.

  By the products of a forward pass; all the same where a model has a loop of
  unknown length.

  Args:
    federation: The groups and their models.

  Returns:
    Numbers from 0 to 1, without a unit.
  """
  try:
    costs = {g.name: float(forward_flops(g.model)) for g in federation.groups}
  except ValueError:
    costs = {g.name: 1.0 for g in federation.groups}
  largest = max(*costs.values(), 1.0)
  ranked = sorted(costs.items(), key=lambda item: -item[1])
  return {name: cost / largest for name, cost in ranked}


def deal_groups(
    federation: Federation,
    weights: Mapping[str, float],
    shares: Mapping[str, Share],
    data: FederatedData,
    num_devices: int,
) -> dict[str, Deal]:
  """Deals a cohort: each group on top of the ones before it.

  So groups of fewer clients than there are devices fill these together.

  Args:
    federation: The federation.
    weights: {group: cost of a local step}, in the order of dealing.
    shares: {group: its part of the cohort}.
    data: All clients' examples.
    num_devices: D.

  Returns:
    {group: deal}, in the order of the shares.
  """
  deals, total = {}, None
  for name, weight in weights.items():
    steps = visit_steps(federation.local, data.sizes[shares[name].client_id])
    loads = weight * steps
    deals[name] = deal(loads, shares[name].num_valid, num_devices, total)
    total = deals[name].total
  return {name: deals[name] for name in shares}
