"""The pairs that a client uploads: of a final pass, or of training passes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.fedin.pairs import Pairs
from fedjax_het.algorithms.fedin.passes import Features, forward
from fedjax_het.engine.local import shuffled_positions
from fedjax_het.engine.types import Maybe
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.options import at_least


class Sizes(NamedTuple):
  """How many pairs a client uploads and receives.

  Attributes:
    num_chunks: Number of whole batches, N.
    batch_size: Pairs per batch, B.
  """

  num_chunks: int
  batch_size: int

  @property
  def num_pairs(self) -> int:
    """N B."""
    return self.num_chunks * self.batch_size


def pair_sizes(num_pairs: int, batch_size: int) -> Sizes:
  """Divides the pairs into batches for the local steps.

  Args:
    num_pairs: Pairs in all.
    batch_size: Examples per local step.

  Returns:
    The sizes.

  Raises:
    ValueError: If `num_pairs` is less than 1, or above the batch size and not a
      multiple of it.
  """
  at_least(1, num_pairs=num_pairs)
  if num_pairs > batch_size and num_pairs % batch_size:
    raise ValueError(
        f'num_pairs must be at most the batch size {batch_size}, or a '
        f'multiple of it, got {num_pairs}.'
    )
  batch_size = min(batch_size, num_pairs)
  return Sizes(num_pairs // batch_size, batch_size)


def empty_buffer(sizes: Sizes, pair_shapes) -> Maybe:
  """No pairs: `Maybe` of `Pairs` [N, B, ...]."""
  pairs = Pairs(*(jnp.zeros((*sizes, *shape)) for shape in pair_shapes))
  return Maybe(pairs, jnp.zeros(sizes, bool))


def write(buffer: Maybe, pairs: Pairs, mask, step_num) -> Maybe:
  """Overwrites the oldest pairs with the first ones of a training batch.

  Args:
    buffer: `Maybe` of `Pairs` [N, B, ...].
    pairs: The pairs of the batch, at least B.
    mask: Which of them count.
    step_num: [] int32, local steps before this one.

  Returns:
    The new buffer.
  """
  num_chunks, batch_size = buffer.present.shape
  return jax.tree.map(
      lambda rows, new: rows.at[step_num % num_chunks].set(
          jax.lax.stop_gradient(new[:batch_size])
      ),
      buffer,
      Maybe(pairs, mask),
  )


def final_pairs(
    model: BlockModel,
    variables: Variables,
    data,
    key,
    sizes: Sizes,
    protect: Features,
) -> Maybe:
  """Pairs of one random draw of examples, computed with the trained model.

  Args:
    model: The client's architecture.
    variables: The trained variables.
    data: The client's examples.
    key: A random key.
    sizes: How many pairs.
    protect: Clipping and noise in the pass.

  Returns:
    `Maybe` of `Pairs` [N, B, ...].
  """
  order_key, key = jax.random.split(key)
  order = shuffled_positions(order_key, data)
  place = jnp.arange(sizes.num_pairs).reshape(sizes)

  def one_batch(arg):
    place, key = arg
    mask = place < data.size
    batch = data.batch(order[jnp.minimum(place, len(order) - 1)], mask)
    _, pairs, _, _ = forward(model, variables, batch.x, mask, key, protect)
    return Maybe(pairs, mask)

  keys = jax.random.split(key, sizes.num_chunks)
  return jax.lax.map(one_batch, (place, keys))


def protect_upload(buffer: Maybe, key, protect: Features) -> Maybe:
  """Clips the pairs of an upload and adds noise; [N B, ...]."""
  (s_in, s_out), mask = jax.tree.map(
      lambda a: a.reshape(-1, *a.shape[2:]), buffer
  )
  in_key, out_key = jax.random.split(key)
  pairs = Pairs(protect(in_key, s_in, mask), protect(out_key, s_out, mask))
  return Maybe(pairs, mask)
