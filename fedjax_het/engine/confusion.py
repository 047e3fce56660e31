"""Confusion matrices: numbers of examples by true and by predicted class."""

import jax
import numpy as np


def count(predicted, labels, mask, num_classes: int) -> jax.Array:
  """Counts the examples of a batch by true and by predicted class.

  It multiplies one-hot matrices, because scatters are slow on accelerators; the
  product adds little to compile time.

  Args:
    predicted: [B] integers, the predicted class.
    labels: [B] integers, the true class.
    mask: [B] bool, examples that count.
    num_classes: C.

  Returns:
    [C, C] float32 whole numbers, exact up to 2^24: rows are true classes,
    columns predicted ones.
  """
  true = jax.nn.one_hot(labels, num_classes) * mask[:, None]
  return true.T @ jax.nn.one_hot(predicted, num_classes)


def class_accuracy(counts) -> np.ndarray:
  """The accuracy on each class: the share of its examples predicted as it.

  Args:
    counts: [..., C, C], rows are true classes.

  Returns:
    [..., C] float64 in [0, 1]; NaN for a class without examples.
  """
  counts = np.asarray(counts, np.float64)
  right = np.diagonal(counts, axis1=-2, axis2=-1)
  total = counts.sum(axis=-1)
  return np.divide(
      right, total, out=np.full(total.shape, np.nan), where=total > 0
  )
