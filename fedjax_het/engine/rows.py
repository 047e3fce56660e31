"""Rows of trees whose leaves are [K, ...]: one row a client.

`leaf[i]` with a traced index checks its bounds, and `leaf.at[i].set` becomes a
scatter for each leaf. Models and optimizer states have hundreds of leaves, so
both take long to compile. Indices here are known to be in [0, K), so each
access can be a slice.
"""

import jax
import jax.numpy as jnp


def take_row(tree, i):
  """Row `i` ([] int) of every leaf."""
  return jax.tree.map(
      lambda leaf: jax.lax.dynamic_index_in_dim(
          leaf, i, keepdims=False, allow_negative_indices=False
      ),
      tree,
  )


def put_row(tree, i, row):
  """Replaces row `i` ([] int) of every leaf by the leaves of `row`."""
  return jax.tree.map(
      lambda leaf, new: jax.lax.dynamic_update_index_in_dim(
          leaf, new, i, 0, allow_negative_indices=False
      ),
      tree,
      row,
  )


def put_rows(tree, where, num, rows):
  """Replaces several rows of every leaf.

  Args:
    tree: Leaves [K, ...].
    where: [S] int, distinct rows of `tree`; those from `num` on are ignored.
    num: [] int, how many rows to replace.
    rows: Leaves [S, ...].

  Returns:
    The new tree, with leaves [K, ...].
  """
  if jax.default_backend() != 'cpu':
    # One kernel for each leaf writes all rows in parallel.
    return jax.tree.map(
        lambda leaf, new: leaf.at[
            jnp.where(jnp.arange(len(where)) < num, where, leaf.shape[0])
        ].set(new, mode='drop'),
        tree,
        rows,
    )
  return jax.lax.fori_loop(
      0,
      num,
      lambda j, tree: put_row(tree, where[j], take_row(rows, j)),
      tree,
  )
