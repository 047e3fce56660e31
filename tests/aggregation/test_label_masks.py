"""Owned labels, and the loss that masks all others."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.label_masks import (
  masked_task,
  owned_labels,
  with_batch_mask,
)
from fedjax_het.algorithms import fedavg, fedepth
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.types import Visit
from tests.quadratics import quadratics
from tests.tiny import (
  NUM_CLASSES,
  one_model_federation,
  preprocess,
  tiny_data,
  tiny_federation,
  tiny_local,
)


def test_the_masked_loss():
  logits = jnp.array([[2, 0.5, -1, 3]])
  owned = jnp.array([True, True, False, False])
  labels = jnp.array([0])

  def loss(mask):
    return masked_task(CLASSIFICATION, mask, owned).loss(logits, labels)

  np.testing.assert_allclose(loss('client'), 0.401324, atol=1e-6)
  np.testing.assert_allclose(loss('none'), 1.384092, atol=1e-6)
  # Only label 0 is in the minibatch: log(e^2 + 3) - 2.
  np.testing.assert_allclose(
      loss('batch'), math.log(math.exp(2) + 3) - 2, atol=1e-6
  )
  # A padding example's label does not count.
  got = masked_task(CLASSIFICATION, 'batch').loss(
      jnp.tile(logits, (2, 1)), jnp.array([0, 3]), jnp.array([True, False])
  )
  np.testing.assert_allclose(got, loss('batch'), rtol=1e-6)


def test_a_task_keeps_its_own_change_of_outputs():
  doubled = CLASSIFICATION._replace(before_loss=lambda z, y, real: 2 * z)
  got = masked_task(doubled, 'batch').loss(
      jnp.array([[2, 0.5, -1, 3]]), jnp.array([0])
  )
  want = math.log(math.exp(4) + 3) - 4
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_without_a_mask_nothing_changes():
  federation = tiny_federation()
  assert masked_task(CLASSIFICATION, 'none') is CLASSIFICATION
  assert with_batch_mask('fedavg', federation, 'none') is federation


@pytest.mark.parametrize('mask', ['batch', 'none'])
@pytest.mark.parametrize(
    ('make', 'options'), [(fedavg, {}), (fedepth, dict(plan='paper'))]
)
def test_a_visit_written_out(make, options, mask):
  """One step on three examples of two labels, in a batch padded to eight."""
  federation = one_model_federation(
      norm=False, local=tiny_local(optax.sgd, 0.1, 1, 8)
  )
  algorithm = make(federation, weights='data', mask=mask, **options)
  data, client, group = tiny_data(), 2, federation.groups[2]
  own, key = data.client(client), jax.random.key(0)
  index = own.index[: int(own.size)]
  x = np.asarray(preprocess(own.images[index]))
  y = np.asarray(own.labels[index])
  here = np.isin(np.arange(NUM_CLASSES), y)
  assert (len(y), here.sum()) == (3, 2)
  visit = Visit(jnp.int32(client), jnp.int32(0), jax.random.key(4))
  server = algorithm.init(key)

  @jax.jit
  def update(server):
    mine = algorithm.init_client(group, client, key)
    sent = algorithm.downlink(server, group, visit)
    _, uplink, metrics = algorithm.client_update(group, mine, sent, own, visit)
    return uplink.summed, metrics

  (change, *_), metrics = update(server)
  params = jax.tree.map(np.asarray, server.params)
  h = x.reshape(3, -1)
  for name in ('stem', 'layer1'):
    linear = params[name]['linear']
    h = np.maximum(h @ linear['kernel'] + linear['bias'], 0)
  z = h @ params['head']['kernel'] + params['head']['bias']
  if mask == 'batch':
    z = np.where(here, z, 0)
  p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
  # dL/dz = (p - onehot) / 3, and 0 for masked logits.
  slope = (p - np.eye(NUM_CLASSES)[y]) / 3
  if mask == 'batch':
    slope = slope * here
  np.testing.assert_allclose(
      metrics['train_loss'], -np.log(p[np.arange(3), y]).mean(), rtol=1e-5
  )
  # Changes are weighted by the three examples.
  for got, want in (
      (change['head']['bias'], slope.sum(0)),
      (change['head']['kernel'], h.T @ slope),
  ):
    np.testing.assert_allclose(got, 3 * -0.1 * want, rtol=1e-4, atol=1e-7)
    absent = np.asarray(got)[..., ~here]
    assert np.any(absent) == (mask == 'none')


@pytest.mark.parametrize('make', [fedavg, fedepth])
def test_bad_masks_are_refused(make):
  for mask in ('client', 'minibatch'):
    with pytest.raises(ValueError, match=f'^Unknown mask {mask!r}'):
      make(tiny_federation(), mask=mask)
  name = make.__name__
  with pytest.raises(
      ValueError, match=f"^{name} with a label mask is made for the task 'clas"
  ):
    make(quadratics([1.0, 2.0])[0], mask='batch')


def test_a_client_owns_the_labels_of_its_examples_alone():
  data = tiny_data((1, 2, 8))  # The first two tables are mostly padding.
  for client in range(3):
    own = data.client(client)
    real = np.asarray(own.labels[own.index[: int(own.size)]])
    want = [c in real for c in range(NUM_CLASSES)]
    assert owned_labels(own, NUM_CLASSES).tolist() == want
  assert sum(owned_labels(data.client(0), NUM_CLASSES).tolist()) == 1
