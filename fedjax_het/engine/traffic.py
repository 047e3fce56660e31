"""Bytes of messages, measured from the pytrees that are sent."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.engine.types import Maybe, values_of

_MOST = np.iinfo(np.uint32).max


class Traffic(NamedTuple):
  """Bytes of one message.

  Attributes:
    fixed: [] uint32, bytes of the leaves that are always sent.
    parts: [P] uint32, full bytes of each leaf inside a `Maybe`.
    share: [P] float32, the fraction of that leaf that was sent.
  """

  fixed: jax.Array
  parts: jax.Array
  share: jax.Array


def measure(tree) -> Traffic:
  """Measures a downlink or uplink.

  Args:
    tree: A pytree of arrays, maybe with `Maybe` parts.

  Returns:
    Its traffic; `fixed` and `parts` follow from the shapes.

  Raises:
    ValueError: If its parts are of 4 GiB or more.
  """
  parts = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Maybe))
  fixed = [part for part in parts if not isinstance(part, Maybe)]
  optional = [
      (leaf, part.present)
      for part in parts
      if isinstance(part, Maybe)
      for leaf in jax.tree.leaves(part.value)
  ]
  shares = [
      jnp.mean(present, dtype=jnp.float32) if present.size else jnp.float32(0)
      for _, present in optional
  ]
  sizes = [sum(map(_num_bytes, fixed)), *(_num_bytes(x) for x, _ in optional)]
  if max(sizes) > _MOST:
    raise ValueError(
        f'A message of {max(sizes)} bytes: at most {_MOST} can be counted.'
    )
  return Traffic(
      jnp.asarray(np.uint32(sizes[0])),
      jnp.asarray(np.array(sizes[1:], np.uint32)),
      jnp.stack(shares) if shares else jnp.zeros((0,), jnp.float32),
  )


def _num_bytes(leaf) -> int:
  return math.prod(leaf.shape) * leaf.dtype.itemsize


def num_bytes(traffic: Traffic) -> np.ndarray:
  """Bytes of each message, up to the rounding of its shares.

  Args:
    traffic: One or several messages, leaves [...] and [..., P].

  Returns:
    [...] int64.
  """
  fixed, parts, share = (np.asarray(x, np.float64) for x in traffic)
  return np.rint(fixed + np.sum(parts * share, axis=-1)).astype(np.int64)


def fixed_bytes(tree) -> int:
  """Bytes of a downlink or uplink without its optional parts."""
  parts = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Maybe))
  return sum(_num_bytes(part) for part in parts if not isinstance(part, Maybe))


def full_bytes(tree) -> int:
  """Bytes of a message, or any other tree, with all its optional parts.

  Args:
    tree: A pytree of arrays or of shapes, maybe with `Maybe` parts.

  Returns:
    The number of bytes.
  """
  return sum(map(_num_bytes, jax.tree.leaves(values_of(tree))))
