"""How the sets of personal entries grow, and the bits that they take."""

import jax
import jax.numpy as jnp

# Leaves that may have personal entries.
MASKED = ('kernel', 'scale')


def grow(mask, params, reference, growth: float, limit: float):
  """Step 4: the masks with the entries that have changed most.

  Args:
    mask: M.
    params: w.
    reference: r_k.
    growth: p, share of the free (not personal) entries that become personal.
    limit: Largest personal share of a tensor that still grows.

  Returns:
    The new M.
  """

  def leaf(path, m, w, r):
    if path[-1].key not in MASKED:
      return m
    taken = m.reshape(-1)
    free = jnp.sum(~taken)
    # f - round((1 - p) f).
    number = free - jnp.round((1 - growth) * free).astype(free.dtype)
    # Rank by |w - r|, largest first, taken entries last.
    change = jnp.where(taken, -jnp.inf, jnp.abs(w - r).reshape(-1))
    order = jnp.argsort(-change, stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    # Rounding must not put a tensor at the limit above it.
    grows = jnp.sum(taken) <= (1 + 1e-6) * limit * m.size
    return m | (grows & (rank < number)).reshape(m.shape)

  return jax.tree.map_with_path(leaf, mask, params, reference)


def packed(mask) -> jax.Array:
  """[bytes] uint8: one bit for each entry that may be personal."""
  found = [
      leaf.reshape(-1)
      for path, leaf in jax.tree.leaves_with_path(mask)
      if path[-1].key in MASKED
  ]
  return jnp.packbits(jnp.concatenate([jnp.zeros(0, bool), *found]))
