"""Labels that a client or a minibatch lacks, and losses that mask them."""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import ClientData
from fedjax_het.engine.needs import check_task
from fedjax_het.engine.task import Task
from fedjax_het.engine.types import Federation
from fedjax_het.options import one_of

MASKS = ('client', 'batch', 'none')


def owned_labels(data: ClientData, num_classes: int) -> jax.Array:
  """[C] bool: the labels for which a client has an example, Y_k."""
  real = jnp.arange(len(data.index)) < data.size
  labels = data.labels[data.index]
  return jnp.zeros(num_classes, bool).at[labels].max(real)


def masked_task(task: Task, mask: str, owned=None) -> Task:
  """A task whose loss sets the logits of absent labels to 0.

  They stay in the softmax, so a label that is present is still trained against
  them.

  Args:
    task: A task with classes.
    mask: 'client' keeps the client's labels, 'batch' those of the minibatch
      (the code of SplitMix and FeDepth), 'none' all.
    owned: [C] bool, the client's labels; read by the mask 'client' only.

  Returns:
    The task.
  """
  if mask == 'none':
    return task

  def absent_at_0(logits, labels, real):
    if task.before_loss is not None:
      logits = task.before_loss(logits, labels, real)
    present = owned
    if mask == 'batch':
      rows = jax.nn.one_hot(labels, logits.shape[1], dtype=bool)
      if real is not None:
        rows = rows & real[:, None]
      present = jnp.any(rows, axis=0)
    # z_c <- 0 for absent labels c
    return jnp.where(present[None], logits, 0.0)

  return task._replace(before_loss=absent_at_0)


def with_batch_mask(name: str, federation: Federation, mask: str) -> Federation:
  """A federation whose local training has the label mask of a minibatch.

  Args:
    name: The algorithm's name, for the message.
    federation: The federation.
    mask: 'batch', or 'none' for the federation as it is.

  Returns:
    The federation.

  Raises:
    ValueError: If the mask is unknown, or the task has no classes to mask.
  """
  one_of('mask', mask, MASKS[1:])
  if mask == 'none':
    return federation
  check_task(f'{name} with a label mask', 'classification', federation)
  local = dataclasses.replace(
      federation.local, task=masked_task(federation.task, mask)
  )
  return dataclasses.replace(federation, local=local)
