"""Client states sharded over devices: rows move bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.engine import mapping, placement


def mesh_of(num):
  return mapping.client_mesh(jax.devices()[:num])


def table(num_rows):
  rng = np.random.default_rng(0)
  weights = rng.normal(size=(num_rows, 3, 2)).astype(np.float32)
  weights[0, 0] = [-0.0, np.nan]
  return dict(
      weights=weights,
      flag=rng.random(num_rows) < 0.5,
      small=rng.integers(0, 99, num_rows).astype(np.int8),
      nothing=np.zeros((num_rows, 0), np.float32),
  )


def laid(mesh, tree, num_rows):
  return jax.device_put(
      tree, jax.sharding.NamedSharding(mesh, placement._spec(num_rows, mesh))
  )


@pytest.mark.parametrize('buffer', [1, 1 << 26])
@pytest.mark.parametrize('num_devices', [1, 2, 4])
@pytest.mark.parametrize('num_rows', [8, 7])
def test_rows_travel_bit_for_bit(num_rows, num_devices, buffer, monkeypatch):
  monkeypatch.setattr(placement, '_BUFFER', buffer)
  mesh, host = mesh_of(num_devices), table(num_rows)
  rng = np.random.default_rng(1)
  wanted = rng.permutation(num_rows)[:num_devices].astype(np.int32)
  # Of three places per device, device 0 uses one, device 1 two, others none.
  rows = np.zeros((num_devices, 3), np.int32)
  num = np.zeros(num_devices, np.int32)
  rows[0, 0], num[0] = wanted[0], 1
  if num_devices > 1:
    rows[1, :2], num[1] = wanted[:2][::-1], 2
    rows[0, 0] = next(r for r in range(num_rows) if r not in wanted[:2])
  tables = laid(mesh, host, num_rows)
  take = jax.jit(lambda t: placement.take_rows(mesh, t, rows.ravel()))
  taken = take(tables)
  for name, leaf in taken.items():
    got = np.asarray(leaf).reshape(num_devices, 3, *host[name].shape[1:])
    for d in range(num_devices):
      for t in range(num[d]):
        assert got[d, t].tobytes() == host[name][rows[d, t]].tobytes()

  def change(t, taken):
    new = jax.tree.map(lambda a: ~a if a.dtype == bool else a + 1, taken)
    return placement.put_rows(mesh, t, rows.ravel(), num, new)

  after = jax.jit(change)(tables, taken)
  for name, leaf in after.items():
    want = host[name].copy()
    for d in range(num_devices):
      for r in rows[d, : num[d]]:
        want[r] = ~want[r] if want.dtype == bool else want[r] + 1
    np.testing.assert_array_equal(leaf, want)
    spec = placement._spec(num_rows, mesh)
    wanted = jax.sharding.NamedSharding(mesh, spec)
    assert not leaf.size or leaf.sharding.is_equivalent_to(wanted, leaf.ndim)


@pytest.mark.parametrize('num_devices', [1, 2, 4])
def test_tables_in_chunks_have_the_rows_of_their_keys(num_devices, monkeypatch):
  monkeypatch.setattr(placement, '_CHUNK', 2)
  mesh = mesh_of(num_devices)
  keys = np.array([5, 3, 8, 1, 9, 2, 7, 4])
  for num_rows in (8, 7):
    where = jax.sharding.NamedSharding(mesh, placement._spec(num_rows, mesh))
    got = placement.build(lambda some: dict(x=some), keys[:num_rows], where)
    np.testing.assert_array_equal(got['x'], keys[:num_rows])


@pytest.mark.usefixtures('optimised')
def test_no_device_holds_the_whole_table(monkeypatch):
  """Besides its shard a device needs a few rows, by XLA's statistics."""
  monkeypatch.setattr(placement, '_BUFFER', 1 << 12)
  num_rows, row = 512, 1024
  shape = jax.ShapeDtypeStruct((num_rows, row), jnp.float32)

  def one(mesh, table, rows, num):
    taken = placement.take_rows(mesh, table, rows)
    return placement.put_rows(mesh, table, rows, num, taken + 1)

  def bytes_of(num_devices):
    mesh = mesh_of(num_devices)
    rows = jnp.zeros(num_rows, jnp.int32)
    num = jnp.full(num_devices, num_rows // num_devices)
    cut = jax.sharding.NamedSharding(mesh, jax.P('client'))
    everywhere = placement.everywhere(mesh)
    compiled = (
        jax.jit(
            lambda table, rows, num: one(mesh, table, rows, num),
            in_shardings=(cut, everywhere, everywhere),
            out_shardings=cut,
            donate_argnums=0,
        )
        .lower(shape, rows, num)
        .compile()
    )
    stats = compiled.memory_analysis()
    return stats.argument_size_in_bytes, stats.temp_size_in_bytes

  whole = num_rows * row * 4
  for num_devices in (2, 4):
    argument, temporary = bytes_of(num_devices)
    assert argument <= whole / num_devices + 4096
    # The rows of its clients (here a shard's worth) before and after the
    # visit, and the buffers of the exchange.
    limit = 2.1 * whole / num_devices + 8 * num_devices * row * 4
    assert temporary <= limit
