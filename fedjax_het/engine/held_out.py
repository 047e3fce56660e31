"""A part of a client's examples, chosen by a fixed rule."""

import math

import jax.numpy as jnp

from fedjax_het.data.federated import ClientData


def hold_out(data: ClientData, share: float) -> tuple[ClientData, ClientData]:
  """Splits a client's examples into two parts by a fixed rule.

  The held-out part has n - round((1 - share) n) of n examples, at most n - 1.
  They are evenly spaced in the order of the labels, so it is stratified.

  Args:
    data: The examples.
    share: The share to hold out, in [0, 1).

  Returns:
    (the rest, the held-out part).
  """
  n, place = data.size, jnp.arange(data.length)
  num = n - jnp.round((1 - share) * n).astype(n.dtype)
  num = jnp.clip(num, 0, jnp.maximum(n - 1, 0))
  padding = place >= n
  labels = data.labels[data.index]
  order = jnp.lexsort((labels if labels.ndim == 1 else place, padding))
  # Choose example j of the order if floor(j num / n) increases at j + 1.
  steps = jnp.arange(data.length + 1) * num // jnp.maximum(n, 1)
  chosen = jnp.zeros_like(padding).at[order].set(steps[1:] > steps[:-1])

  def part(mine, size, longest):
    first = jnp.argsort(~mine, stable=True)[:longest]  # Padding stays last.
    return data.replace(index=data.index[first], size=size)

  most = min(math.ceil(share * data.length) + 1, data.length)
  return part(~chosen, n - num, data.length), part(chosen, num, most)
