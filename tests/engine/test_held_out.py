"""Which examples are held out."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.engine.held_out import hold_out
from tests.tiny import tiny_data


def test_validation_is_stratified_and_disjoint():
  labels = [2, 0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 2, 1, 0, 1, 2, 2, 0, 0, 1]
  data = tiny_data((20, 3)).replace(labels=jnp.array(labels * 2)).client(0)
  training, held = hold_out(data, 0.2)
  assert (int(training.size), int(held.size)) == (16, 4)
  mine = np.asarray(held.index[:4]).tolist()
  rest = np.asarray(training.index[:16]).tolist()
  assert sorted(mine + rest) == list(range(20))
  # The classes have 9, 7 and 4 examples.
  assert np.bincount(np.array(labels)[mine], minlength=3).tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    ('n', 'share', 'want'),
    [(1, 0.2, 0), (2, 0.2, 0), (3, 0.2, 1), (8, 0.2, 2), (8, 0.0, 0),
     (2, 0.9, 1), (1, 0.9, 0)],
)  # fmt: skip
def test_the_number_held_out(n, share, want):
  training, held = hold_out(tiny_data((n, 9)).client(0), share)
  assert (int(held.size), int(training.size)) == (want, n - want)
  together = [*held.index[:want].tolist(), *training.index[: n - want].tolist()]
  assert sorted(together) == list(range(n)) and held.length >= want


def test_of_no_example_none_is_trained_on():
  nobody = tiny_data((3, 9)).client(0).replace(size=jnp.int32(0))
  training, held = hold_out(nobody, 0.2)
  assert (int(training.size), int(held.size)) == (0, 0)
