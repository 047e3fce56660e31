"""Comparison of trees of arrays."""

import jax
import numpy as np


def assert_trees(got, want, **kwargs):
  """Trees of one structure, whose leaves are close: `assert_allclose`."""
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_allclose(a, b, **kwargs)


def assert_equal(got, want):
  """Trees of one structure and equal values."""
  assert_trees(got, want, rtol=0, atol=0)
