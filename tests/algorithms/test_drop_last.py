"""Every method under `drop_last`: all clients train and none has weight 0."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine.types import Visit
from tests.algorithms.suite import NUM_PUBLIC, make
from tests.algorithms.test_suite import federate
from tests.tiny import SIZES, tiny_data

# The second client of the first group has 3 examples; a batch has 4.
CLIENT = SIZES.index(3)


def visits(name, drop_last):
  """States, uplinks and metrics of a client's first visit, with eight keys."""
  federation = federate(name, norm=True)
  local = dataclasses.replace(federation.local, drop_last=drop_last)
  federation = dataclasses.replace(federation, local=local)
  algorithm, federation = make(name, federation)
  (group,) = (g for g in federation.groups if CLIENT in g.client_ids)
  data = tiny_data(public=NUM_PUBLIC)
  server = algorithm.init(jax.random.key(0))
  client = algorithm.init_client(group, CLIENT, jax.random.key(0))

  @jax.jit
  def update(server, client, data, visit):
    sent = algorithm.downlink(server, group, visit)
    return algorithm.client_update(group, client, sent, data, visit)

  return [
      update(
          server,
          client,
          data.client(CLIENT),
          Visit(jnp.int32(CLIENT), jnp.int32(0), key),
      )
      for key in jax.random.split(jax.random.key(4), 8)
  ]


FAST = ('fedavg', 'fedhe', 'fedin')


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name in sorted(ALGORITHMS)
])  # fmt: skip
def test_a_client_below_a_batch_takes_its_one_batch(name):
  """It trains and uploads the same as without `drop_last`."""
  got, want = visits(name, True), visits(name, False)
  assert jax.tree.structure(got) == jax.tree.structure(want)
  # Two programs, which XLA may round differently.
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      got,
      want,
  )
  for _, _, metrics in got:
    assert float(metrics['train_loss']) > 0
  # An upload may be lost, which is no matter of the data.
  weights = [getattr(uplink.summed, 'weight', 1) for _, uplink, _ in got]
  assert any(
      np.sum(leaf) > 0
      for weight in weights
      for leaf in jax.tree.leaves(weight)
  )
