"""Stores of limited size that drop their oldest rows first."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import Batch


class Rings(NamedTuple):
  """R ring buffers of L rows each; for a server, one per class.

  Attributes:
    rows: A tree of leaves [R, L, ...].
    next: [R] int32, the place of the next row.
    size: [R] int32, rows so far, at most L; they are at the places 0 .. size-1.
  """

  rows: Any
  next: jax.Array
  size: jax.Array

  @property
  def filled(self) -> jax.Array:
    """[R, L] bool, the places that hold a row."""
    length = jax.tree.leaves(self.rows)[0].shape[1]
    return jnp.arange(length)[None] < self.size[:, None]


def empty_rings(num_rings: int, length: int, row: Any) -> Rings:
  """Rings without rows.

  Args:
    num_rings: R.
    length: L.
    row: The shapes and dtypes of one row, a tree.

  Returns:
    The rings, with zeros in all places.
  """
  rows = jax.tree.map(
      lambda leaf: jnp.zeros((num_rings, length, *leaf.shape), leaf.dtype), row
  )
  zeros = jnp.zeros(num_rings, jnp.int32)
  return Rings(rows, zeros, zeros)


def push(rings: Rings, rows: Any, ring, mask) -> Rings:
  """Appends rows in their order; full rings drop their oldest rows.

  Args:
    rings: The rings.
    rows: The tree, leaves [M, ...].
    ring: [M] int32, the ring of each row.
    mask: [M] bool, the rows that count.

  Returns:
    The new rings.
  """
  num_rings, length = rings.filled.shape
  belongs = (ring[:, None] == jnp.arange(num_rings)[None]) & mask[:, None]
  number = jnp.sum(belongs, axis=0, dtype=jnp.int32)
  # How many of the new rows of its ring are in front of each row.
  before = jnp.cumsum(belongs, axis=0, dtype=jnp.int32) - 1
  rank = jnp.sum(jnp.where(belongs, before, 0), axis=1)
  # Of more than L rows, the last L remain, so that no place is set twice.
  stays = jnp.any(belongs & (rank[:, None] >= number[None] - length), axis=1)
  place = (rings.next[ring] + rank) % length
  where = jnp.where(stays, ring, num_rings)
  return Rings(
      jax.tree.map(
          lambda old, new: old.at[where, place].set(new, mode='drop'),
          rings.rows,
          rows,
      ),
      (rings.next + number) % length,
      jnp.minimum(rings.size + number, length),
  )


def oldest_first(rings: Rings, ring: int) -> Any:
  """The rows of one ring in the order of `push`, leaves [L, ...]."""
  length = rings.filled.shape[1]
  oldest = jnp.where(rings.size[ring] == length, rings.next[ring], 0)
  return jax.tree.map(
      lambda leaf: jnp.roll(leaf[ring], -oldest, axis=0), rings.rows
  )


class RingExamples(NamedTuple):
  """The rows of all rings as `Examples`, labelled by their ring.

  Attributes:
    rings: Rings whose rows are one array, [R, L, ...].
  """

  rings: Rings

  @property
  def size(self) -> jax.Array:
    """[] int32, the rows of all rings."""
    return jnp.sum(self.rings.size)

  @property
  def length(self) -> int:
    """R L."""
    return self.rings.filled.size

  def batch(self, position, mask=None, key=None) -> Batch:
    """Gathers the rows at `position` ([B] int32), ring after ring."""
    del key
    num_rings, length = self.rings.filled.shape
    ends = jnp.cumsum(self.rings.size)
    # Positions of padding may lie behind the last ring.
    ring = jnp.sum(position[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    ring = jnp.minimum(ring, num_rings - 1)
    place = position - (ends - self.rings.size)[ring]
    rows = self.rings.rows[ring, jnp.minimum(place, length - 1)]
    return Batch(rows, ring, mask, position)
