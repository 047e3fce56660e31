"""Labels that a client or a minibatch lacks, and losses that mask them."""

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import ClientData

MASKS = ('client', 'batch', 'none')


def owned_labels(data: ClientData, num_classes: int) -> jax.Array:
  """[C] bool: the labels for which a client has an example, Y_k."""
  real = jnp.arange(len(data.index)) < data.size
  labels = data.labels[data.index]
  return jnp.zeros(num_classes, bool).at[labels].max(real)


def masked_logits(logits, batch, owned, mask: str):
  """Sets the logits of absent labels to 0.

  Args:
    logits: [B, C].
    batch: The minibatch.
    owned: [C] bool, the client's labels.
    mask: 'client' keeps the client's labels, 'batch' those of the minibatch
      (the code of SplitMix and FeDepth), 'none' all.

  Returns:
    [B, C].
  """
  if mask == 'none':
    return logits
  if mask == 'batch':
    owned = jax.nn.one_hot(batch.y, logits.shape[1], dtype=bool)
    if batch.mask is not None:
      owned = owned & batch.mask[:, None]
    owned = jnp.any(owned, axis=0)
  return jnp.where(owned[None], logits, 0.0)
