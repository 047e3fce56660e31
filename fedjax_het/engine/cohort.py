"""Sampling of cohorts, and the states of their clients."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.engine.rows import put_rows
from fedjax_het.engine.types import Federation
from fedjax_het.engine.visits import round_key
from fedjax_het.options import integer_between

# Populations up to this size are sampled by a permutation, whose cost grows
# with the population. Changing this number changes the cohorts of the
# populations in between. No built-in data set has as many examples, so runs on
# these always use permutations.
PERMUTED_UP_TO = 100_000
# Cohorts of a larger share of the population always use a permutation.
_MOST = 1 / 4


def sample_cohort(key, round_num, num_clients: int, cohort_size: int):
  """Draws a round's clients uniformly without replacement.

  Populations of at most `PERMUTED_UP_TO` clients are permuted. From larger ones
  a cohort of at most a quarter is drawn by `draw_distinct`, in time that does
  not depend on the population.

  Args:
    key: The sampling key, separate from the training key, so that all methods
      see the same cohorts.
    round_num: [] int32.
    num_clients: Size of the population.
    cohort_size: Clients a round, m.

  Returns:
    [m] int32, ascending.
  """
  if cohort_size == num_clients:
    return jnp.arange(num_clients, dtype=jnp.int32)
  key = round_key(key, round_num)
  large = num_clients > PERMUTED_UP_TO
  if large and cohort_size <= _MOST * num_clients:
    return jnp.sort(draw_distinct(key, num_clients, cohort_size))
  order = jax.random.permutation(key, num_clients)
  return jnp.sort(order[:cohort_size]).astype(jnp.int32)


def draw_distinct(key, num: int, size: int, spare: int = 64) -> jax.Array:
  """Draws distinct integers uniformly, in O(size log size).

  The first `size` distinct values of independent draws are a uniform sample in
  random order. If there are fewer distinct values, all are drawn again; by
  symmetry the sample stays uniform. This is rare if `size` is at most a quarter
  of `num`.

  Args:
    key: A random key.
    num: The integers are from 0 to num - 1.
    size: How many, at most `num`.
    spare: Number of draws beyond 1.5 times `size`.

  Returns:
    [size] int32.
  """
  length = size + size // 2 + spare

  def draw(attempt):
    attempt_key = jax.random.fold_in(key, attempt)
    found = jax.random.randint(attempt_key, (length,), 0, num, jnp.int32)
    order = jnp.argsort(found, stable=True)
    ranked = found[order]
    fresh = jnp.append(True, ranked[1:] != ranked[:-1])
    return attempt + 1, found, jnp.zeros(length, bool).at[order].set(fresh)

  def is_short(carry):
    return jnp.sum(carry[2]) < size

  _, found, first = jax.lax.while_loop(
      is_short, lambda carry: draw(carry[0]), draw(jnp.int32(0))
  )
  (place,) = jnp.nonzero(first, size=size)
  return found[place]


class Share(NamedTuple):
  """A group's part of a cohort, in a fixed number of slots.

  Attributes:
    client_id: [slots] int32, global; slots from `num_valid` on are padding.
    row: [slots] int32, rows of the clients in the group's tables.
    num_valid: [] int32, number of clients that take part.
  """

  client_id: jax.Array
  row: jax.Array
  num_valid: jax.Array


def make_plan(
    federation: Federation, cohort_size: int
) -> Callable[..., dict[str, Share]]:
  """Builds the function that draws a cohort and splits it by group.

  Args:
    federation: The federation.
    cohort_size: Clients a round.

  Returns:
    `plan(round_num, sampling_key) -> {group: share}`, traceable.

  Raises:
    ValueError: If the cohort is empty or larger than the population.
  """
  num_clients = federation.num_clients
  integer_between(1, num_clients, cohort_size=cohort_size)
  group_of, row_of = federation.places()

  def plan(round_num, sampling_key):
    cohort = sample_cohort(sampling_key, round_num, num_clients, cohort_size)
    shares = {}
    for i, group in enumerate(federation.groups):
      mine = jnp.asarray(group_of)[cohort] == i
      slots = min(cohort_size, group.num_clients)
      (place,) = jnp.nonzero(mine, size=slots, fill_value=cohort_size)
      ids = cohort.at[place].get(mode='fill', fill_value=0)
      shares[group.name] = Share(ids, jnp.asarray(row_of)[ids], jnp.sum(mine))
    return shares

  return plan


def fetch(clients, share: Share):
  """The states of a share's clients, [slots, ...]."""
  return jax.tree.map(lambda leaf: leaf[share.row], clients)


def store(clients, share: Share, updated):
  """A group's client states, with those of a share's clients replaced."""
  return put_rows(clients, share.row, share.num_valid, updated)
