"""Shardings of a run's arrays on a mesh, in one or several processes.

Server state, keys and data are replicated. A group's table of client states is
sharded by rows, in equal blocks; it is replicated if the number of clients is
not a multiple of the number of devices. A round moves only the rows of its
cohort between devices, a few at a time.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.engine.types import Federation

# Bytes that a device sends in one exchange of rows; at least one row is sent to
# each device.
_BUFFER = 1 << 26
# The most exchanges of an array; of more rows, each exchange sends more bytes.
_MOST_BLOCKS = 16
# Rows of a new table that are computed at once.
_CHUNK = 256


def everywhere(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """The sharding of replicated arrays."""
  return jax.sharding.NamedSharding(mesh, jax.P())


def is_cut(num_rows: int, mesh: jax.sharding.Mesh) -> bool:
  """Whether a table with this number of rows is sharded over the mesh."""
  return num_rows % mesh.devices.size == 0


def of_tables(
    federation: Federation, mesh: jax.sharding.Mesh
) -> dict[str, jax.sharding.NamedSharding]:
  """{group: sharding of its table of client states}."""
  return {
      group.name: jax.sharding.NamedSharding(
          mesh, _spec(group.num_clients, mesh)
      )
      for group in federation.groups
  }


def _spec(num_rows: int, mesh: jax.sharding.Mesh) -> jax.P:
  return jax.P('client') if is_cut(num_rows, mesh) else jax.P()


def put(tree: Any, shardings: Any) -> Any:
  """Places values, which each process holds in full, on a mesh.

  Args:
    tree: A pytree of arrays.
    shardings: Shardings over one mesh, a prefix of the tree.

  Returns:
    The tree of global arrays.
  """
  if jax.process_count() == 1:
    return jax.device_put(tree, shardings)

  def place(sharding, leaf):
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      return _move(leaf, sharding)
    # `device_put` would compare the values of all processes, over the network.
    host = np.asarray(leaf)
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: host[index]
    )

  return jax.tree.map(
      lambda sharding, part: jax.tree.map(
          lambda leaf: place(sharding, leaf), part
      ),
      shardings,
      tree,
  )


def _move(leaf, sharding):
  if leaf.sharding == sharding:
    return leaf
  return jax.jit(lambda x: x, out_shardings=sharding)(leaf)


def build(
    make: Callable[[np.ndarray], Any], keys: np.ndarray, sharding
) -> Any:
  """Builds a table; each process computes the rows of its own devices.

  Args:
    make: `(some of the keys) -> their rows`, a pytree with leaves [n, ...].
    keys: [K], one for each row.
    sharding: The sharding of the table.

  Returns:
    The tree of tables [K, ...].
  """

  @functools.cache
  def block(start, stop):
    mine = keys[start:stop]
    parts = [
        jax.device_get(make(mine[i : i + _CHUNK]))
        for i in range(0, len(mine), _CHUNK)
    ]
    return jax.tree.map(lambda *a: np.concatenate(a), *parts)

  places = sharding.addressable_devices_indices_map(keys.shape)
  parts = [
      jax.device_put(block(rows.start, rows.stop), device)
      for device, (rows,) in places.items()
  ]
  return jax.tree.map(
      lambda *leaves: jax.make_array_from_single_device_arrays(
          (*keys.shape, *leaves[0].shape[1:]), sharding, list(leaves)
      ),
      *parts,
  )


def _blocks(rows, devices: int) -> list[tuple[int, int]]:
  """Divides the rows of a device into blocks that are exchanged one by one.

  The blocks are unrolled. With a loop around a collective, CPU devices may run
  the collectives of a program in different orders and wait for each other
  forever, or exchange wrong rows: XLA keeps the order in a loop's body apart
  from that around it, at least in programs from the compilation cache.

  Args:
    rows: [C, ...], rows of one device.
    devices: D.

  Returns:
    (first row, number of rows) of each block.
  """
  turns = rows.shape[0]
  row_bytes = max(1, rows.nbytes // turns * devices)
  block = max(1, _BUFFER // row_bytes, -(-turns // _MOST_BLOCKS))
  return [(i, min(block, turns - i)) for i in range(0, turns, block)]


def _after(done, index, rows):
  """`index`, but not before `done`, so that blocks share their buffers."""
  zero = jnp.minimum(rows.ravel()[0], 0)  # XLA does not know that it is 0.
  return index + done.ravel()[0].astype(jnp.int32) * zero


def take_rows(mesh: jax.sharding.Mesh, table, rows):
  """Gathers rows of a table on the devices that need them.

  Args:
    mesh: D devices.
    table: A pytree of tables [K, ...], sharded as `of_tables` says.
    rows: [D * C] int32, C rows for each device.

  Returns:
    The tree with leaves [D * C, ...], C rows on each device.
  """
  if not jax.tree.leaves(table):
    return table
  num_rows = jax.tree.leaves(table)[0].shape[0]
  cut, devices = is_cut(num_rows, mesh), mesh.devices.size
  size = num_rows // devices
  rows = rows.reshape(devices, -1)

  def leaf(table, rows):
    device = jax.lax.axis_index('client')
    if not cut:
      return table[rows[device]]
    out = jnp.zeros((rows.shape[1], *table.shape[1:]), table.dtype)
    if not out.size:
      return out
    for first, block in _blocks(out, devices):
      wanted = rows[:, first : first + block]
      if first:
        wanted = _after(out[first - 1], wanted, rows)
      # Candidate rows for each device, assuming this shard owns them.
      here = jnp.clip(wanted - device * size, 0, size - 1)
      got = jax.lax.all_to_all(table[here], 'client', 0, 0)
      mine = got[wanted[device] // size, jnp.arange(block)]
      out = out.at[first : first + block].set(mine)
    return out

  return jax.shard_map(
      lambda table, rows: jax.tree.map(lambda a: leaf(a, rows), table),
      mesh=mesh,
      in_specs=(_spec(num_rows, mesh), jax.P()),
      out_specs=jax.P('client'),
      check_vma=False,
  )(table, rows)


def put_rows(mesh: jax.sharding.Mesh, table, rows, num, new):
  """Scatters new rows into a table, from the devices that hold them.

  Args:
    mesh: D devices.
    table: A pytree of tables [K, ...], sharded as `of_tables` says.
    rows: [D * C] int32, the table rows of each device's C new rows.
    num: [D] int32, how many of each device's C rows are real.
    new: The tree with leaves [D * C, ...], C rows on each device.

  Returns:
    The table with those rows replaced, and the same sharding.
  """
  if not jax.tree.leaves(table):
    return table
  num_rows = jax.tree.leaves(table)[0].shape[0]
  cut, devices = is_cut(num_rows, mesh), mesh.devices.size
  size = num_rows // devices if cut else num_rows
  rows = rows.reshape(devices, -1)

  def leaf(table, new, rows, num):
    if not table.size:
      return table
    first_row = jax.lax.axis_index('client') * size if cut else 0
    for first, block in _blocks(new, devices):
      start = _after(table, first, rows) if first else 0
      part = jax.lax.dynamic_slice_in_dim(new, start, block)
      part = jax.lax.all_gather(part, 'client')
      where = rows[:, first : first + block] - first_row
      turn = first + jnp.arange(block)
      mine = (turn[None] < num[:, None]) & (where >= 0) & (where < size)
      table = table.at[jnp.where(mine, where, size)].set(part, mode='drop')
    return table

  spec = _spec(num_rows, mesh)
  return jax.shard_map(
      lambda table, rows, num, new: jax.tree.map(
          lambda a, b: leaf(a, b, rows, num), table, new
      ),
      mesh=mesh,
      in_specs=(spec, jax.P(), jax.P(), jax.P('client')),
      out_specs=spec,
      check_vma=False,
  )(table, rows, num, new)
