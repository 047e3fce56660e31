"""Owned labels, and the loss that masks all others."""

import math

import jax.numpy as jnp
import numpy as np

from fedjax_het.aggregation.label_masks import masked_logits, owned_labels
from fedjax_het.data.federated import Batch
from fedjax_het.engine.task import CLASSIFICATION
from tests.tiny import NUM_CLASSES, tiny_data


def test_the_masked_loss():
  logits = jnp.array([[2, 0.5, -1, 3]])
  owned = jnp.array([True, True, False, False])
  batch = Batch(None, jnp.array([0]), None, None)

  def loss(mask):
    masked = masked_logits(logits, batch, owned, mask)
    return CLASSIFICATION.loss(masked, batch.y)

  np.testing.assert_allclose(loss('client'), 0.401324, atol=1e-6)
  np.testing.assert_allclose(loss('none'), 1.384092, atol=1e-6)
  # Only label 0 is in the minibatch: log(e^2 + 3) - 2.
  np.testing.assert_allclose(
      loss('batch'), math.log(math.exp(2) + 3) - 2, atol=1e-6
  )
  # A padding example's label does not count.
  padded = Batch(
      None, jnp.array([0, 3]), jnp.array([True, False]), None
  )
  got = masked_logits(jnp.tile(logits, (2, 1)), padded, owned, 'batch')
  assert got[0].tolist() == [2, 0, 0, 0]


def test_a_client_owns_the_labels_of_its_examples_alone():
  data = tiny_data((1, 2, 8))  # The first two tables are mostly padding.
  for client in range(3):
    own = data.client(client)
    real = np.asarray(own.labels[own.index[: int(own.size)]])
    want = [c in real for c in range(NUM_CLASSES)]
    assert owned_labels(own, NUM_CLASSES).tolist() == want
  assert sum(owned_labels(data.client(0), NUM_CLASSES).tolist()) == 1
