"""The subsets of the public set whose logits FedMD's clients exchange."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data.federated import ClientData
from fedjax_het.options import integer_between

# N_a of all the authors' experiments.
NUM_ALIGNMENT = 5000


def subset_size(num_alignment: int | None, num_public: int) -> int:
  """N_a, by default 5,000, or all public examples if there are fewer.

  Args:
    num_alignment: The option; None for the default.
    num_public: Size of the public set.

  Returns:
    N_a.

  Raises:
    ValueError: If the option is less than 1 or exceeds the public set.
  """
  if num_alignment is None:
    return min(NUM_ALIGNMENT, num_public)
  integer_between(1, num_public, num_alignment=num_alignment)
  return num_alignment


def public_subset(seed, number, data: ClientData, size: int) -> ClientData:
  """The public examples of one subset, stratified by class.

  Every example has the same probability, size / P. A class-balanced public set
  gives balanced subsets if `size` is a multiple of the number of classes.

  Args:
    seed: Data of the key that all clients share.
    number: [] int32, the subset's number.
    data: Any client's data, with public examples.
    size: N_a, at most the number P of public examples.

  Returns:
    The subset as if it were a client's own data, never augmented.
  """
  num = len(data.public)
  key = jax.random.fold_in(jax.random.wrap_key_data(seed), number)
  order = jax.random.permutation(key, num)
  by_class = order[jnp.argsort(data.labels[data.public][order], stable=True)]
  # Evenly spaced positions (i P + offset) // N_a, without overflow.
  whole, rest = np.divmod(np.arange(size) * num, size)
  offset = jax.random.randint(jax.random.fold_in(key, 1), (), 0, num)
  place = whole.astype(np.int32) + (rest.astype(np.int32) + offset) // size
  return data.unaugmented().replace(
      index=data.public[by_class[place]], size=jnp.int32(size)
  )
