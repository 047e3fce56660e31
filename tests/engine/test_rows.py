"""Rows of trees, compared with NumPy; both ways of writing several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.engine.rows import put_row, put_rows, take_row

TABLE = dict(
    a=np.arange(12.0).reshape(4, 3), b=np.arange(4), c=np.ones(4, bool)
)
NEW = dict(a=-np.ones((3, 3)), b=np.array([7, 8, 9]), c=np.zeros(3, bool))


def assert_equal(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_one_row():
  row = jax.jit(take_row)(TABLE, jnp.int32(2))
  assert_equal(row, jax.tree.map(lambda leaf: leaf[2], TABLE))
  changed = jax.jit(put_row)(TABLE, jnp.int32(1), row)
  assert_equal(
      changed, jax.tree.map(lambda leaf: leaf[[0, 2, 2, 3]], TABLE)
  )


@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
@pytest.mark.parametrize('num', [0, 2, 3])
def test_several_rows(platform, num, monkeypatch):
  monkeypatch.setattr(jax, 'default_backend', lambda: platform)
  where = np.array([3, 0, 1])
  want = jax.tree.map(np.copy, TABLE)
  for leaf, new in zip(jax.tree.leaves(want), jax.tree.leaves(NEW)):
    leaf[where[:num]] = new[:num]
  assert_equal(jax.jit(put_rows)(TABLE, where, jnp.int32(num), NEW), want)
