"""Cohorts: uniform, without repetition, the same in every program."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.data.catalog import DATASETS
from fedjax_het.engine import cohort
from fedjax_het.engine.cohort import draw_distinct, sample_cohort

KEY = jax.random.key(3)
MILLION = 1_000_000
SMALL = {
    50: [11, 17, 26, 33, 46],
    1000: [449, 610, 785, 806, 962],
    100_000: [16538, 20988, 35849, 44084, 46417],
}
LARGE = [233791, 472804, 506465, 513290, 945261]


def test_recorded_cohorts_do_not_change():
  """Both samplers draw the cohorts that were recorded first."""
  key = jax.random.key(3, impl='threefry2x32')
  for num, want in SMALL.items():
    np.testing.assert_array_equal(sample_cohort(key, 2, num, 5), want)
  np.testing.assert_array_equal(sample_cohort(key, 2, MILLION, 5), LARGE)


def test_no_built_in_data_set_has_a_client_more_than_are_permuted():
  most = max(source.num_train for source in DATASETS.values())
  assert most <= cohort.PERMUTED_UP_TO


@pytest.mark.parametrize('num, size, permuted', [
    (cohort.PERMUTED_UP_TO, 10, True),
    (cohort.PERMUTED_UP_TO + 1, 10, False),
    (MILLION, MILLION // 4, False),
    (MILLION, MILLION // 4 + 1, True),
])  # fmt: skip
def test_large_populations_are_not_permuted(num, size, permuted):
  jaxpr = str(jax.make_jaxpr(lambda r: sample_cohort(KEY, r, num, size))(0))
  assert (f'i32[{num}]' in jaxpr) == permuted
  # Without a permutation no array has the size of the population.
  assert (f'[{num}]' in jaxpr) == permuted


def test_a_large_population_gives_each_client_once():
  rounds = jnp.arange(300)
  found = jax.lax.map(lambda r: sample_cohort(KEY, r, MILLION, 1000), rounds)
  assert found.shape == (300, 1000) and found.dtype == jnp.int32
  steps = np.diff(found, axis=1)
  assert np.all(steps > 0)  # Ascending, so different.
  assert np.min(found) >= 0 and np.max(found) < MILLION
  # Uniform over the population: ten parts, 30,000 draws each.
  counts, _ = np.histogram(found, bins=10, range=(0, MILLION))
  assert np.all(np.abs(counts - 30_000) < 5 * np.sqrt(30_000))
  # Rounds are independent: two share one client on average.
  both = [np.intersect1d(a, b).size for a, b in itertools.pairwise(found)]
  assert abs(np.mean(both) - 1) < 5 / np.sqrt(len(both))


@pytest.mark.parametrize('num, size, spare', [(8, 2, 64), (4, 3, 0)])
def test_every_sample_is_equally_likely(num, size, spare):
  """Also without spare draws, where many draws fall short and are repeated."""
  times = 24_000
  keys = jax.random.split(KEY, times)
  found = np.asarray(
      jax.jit(jax.vmap(lambda k: draw_distinct(k, num, size, spare)))(keys)
  )
  ordered = [p for p in np.ndindex(*(num,) * size) if len({*p}) == size]
  codes = found @ num ** np.arange(size)
  want = times / len(ordered)
  for sample in ordered:
    count = np.sum(codes == np.dot(sample, num ** np.arange(size)))
    assert abs(count - want) < 5 * np.sqrt(want)
  assert want * len(ordered) == times  # Nothing else was drawn.


def test_a_cohort_follows_from_key_and_round_alone():
  """A resumed run and the clock's plan of all rounds find the same one."""
  draw = jax.jit(lambda r: sample_cohort(KEY, r, MILLION, 50))
  planned = jax.lax.map(
      lambda r: sample_cohort(KEY, r, MILLION, 50), jnp.arange(4)
  )
  for r in (3, 1):
    np.testing.assert_array_equal(draw(r), planned[r])
  assert len(np.unique(planned)) > 190
  other = sample_cohort(jax.random.key(4), 3, MILLION, 50)
  assert not np.array_equal(other, planned[3])
