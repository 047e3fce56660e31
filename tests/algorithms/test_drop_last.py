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


def one_visit(name, drop_last):
  """The state, uplink and metrics of a client's first visit."""
  federation = federate(name, norm=True)
  local = dataclasses.replace(federation.local, drop_last=drop_last)
  federation = dataclasses.replace(federation, local=local)
  algorithm, federation = make(name, federation)
  (group,) = (g for g in federation.groups if CLIENT in g.client_ids)
  visit = Visit(jnp.int32(CLIENT), jnp.int32(0), jax.random.key(4))
  data = tiny_data(public=NUM_PUBLIC)
  server = algorithm.init(jax.random.key(0))
  client = algorithm.init_client(group, CLIENT, jax.random.key(0))

  @jax.jit
  def update(server, client, data):
    sent = algorithm.downlink(server, group, visit)
    return algorithm.client_update(group, client, sent, data, visit)

  return update(server, client, data.client(CLIENT))


FAST = ('fedavg', 'fedhe', 'fedin')


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name in sorted(ALGORITHMS)
])  # fmt: skip
def test_a_client_below_a_batch_takes_its_one_batch(name):
  """It trains and uploads the same as without `drop_last`."""
  got, want = one_visit(name, True), one_visit(name, False)
  assert jax.tree.structure(got) == jax.tree.structure(want)
  # Two programs, which XLA may round differently.
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      got,
      want,
  )
  _, uplink, metrics = got
  assert float(metrics['train_loss']) > 0
  weight = getattr(uplink.summed, 'weight', None)
  assert weight is None or np.all(np.sum(weight) > 0)
