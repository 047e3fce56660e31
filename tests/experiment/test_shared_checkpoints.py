"""Checkpoints of sharded states: checksums do not depend on the sharding."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.experiment import shared_checkpoints
from fedjax_het.experiment.checkpoints import Checkpoints
from fedjax_het.experiment.shared_checkpoints import (
  SharedCheckpoints,
  checksums,
  combine,
)


@pytest.mark.parametrize('cut', [0, 1, 5, 999, 1000])
def test_combine_is_the_crc_of_both(cut):
  data = np.random.default_rng(0).bytes(1000)
  first, second = data[:cut], data[cut:]
  assert combine(
      zlib.crc32(first), zlib.crc32(second), len(second)
  ) == zlib.crc32(data)


def laid(tree, num_devices):
  mesh = jax.make_mesh(
      (num_devices,),
      ('client',),
      axis_types=(jax.sharding.AxisType.Auto,),
      devices=jax.devices()[:num_devices],
  )

  def one(leaf):
    cut = leaf.ndim and len(leaf) % num_devices == 0
    spec = jax.P('client') if cut else jax.P()
    return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))

  return jax.tree.map(one, tree)


def state():
  rng = np.random.default_rng(0)
  return dict(
      rows=jnp.asarray(rng.normal(size=(8, 3)), jnp.float32),
      odd=jnp.arange(5, dtype=jnp.int8),
      scalar=jnp.float32(2.5),
      nothing=jnp.zeros((8, 0)),
  )


def test_checksums_are_those_of_one_device():
  arrays = {k: v for k, v in state().items() if v.size}
  want = {k: zlib.crc32(np.asarray(v).tobytes()) for k, v in arrays.items()}
  for num in (1, 2, 4):
    assert checksums(laid(arrays, num)) == want


def test_reads_and_writes_what_one_process_does(tmp_path):
  """In one process `SharedCheckpoints` and `Checkpoints` share a format."""
  want = jax.device_get(state())
  for num, kind, other in (
      (4, SharedCheckpoints, Checkpoints),
      (2, Checkpoints, SharedCheckpoints),
  ):
    folder = tmp_path / str(num)
    writer = kind(folder)
    writer.save(3, laid(state(), num), dict(data=1))
    writer.wait()
    writer.close()
    like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
        laid(state(), 4 // num),
    )
    reader = other(folder)
    restored = reader.restore(like)
    reader.close()
    assert restored.step == 3 and restored.notes == dict(data=1)
    jax.tree.map(np.testing.assert_array_equal, restored.state, want)


def test_a_changed_bit_is_found(tmp_path, monkeypatch, caplog):
  checkpoints = SharedCheckpoints(tmp_path)
  checkpoints.save(1, laid(state(), 2), {})
  checkpoints.save(2, laid(state(), 2), {})
  read = checkpoints._read

  def flipped(step, like, on_host):
    arrays, notes = read(step, like, on_host)
    if step == 2:
      arrays['rows'] = arrays['rows'].at[5, 1].add(1e-7)
    return arrays, notes

  monkeypatch.setattr(checkpoints, '_read', flipped)
  like = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
      laid(state(), 2),
  )
  assert checkpoints.restore(like).step == 1
  assert 'the checksum of rows does not match' in caplog.text
  assert (tmp_path / 'damaged-2').exists()


def test_one_process_keeps_the_simple_kind(tmp_path):
  checkpoints = shared_checkpoints.open_checkpoints(tmp_path, 2)
  assert type(checkpoints) is Checkpoints
  checkpoints.close()
