"""Running statistics of norms are averaged, and kept where nobody trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.aggregation import exchange as ex
from fedjax_het.engine.types import Federation
from fedjax_het.models.blocks import Variables
from tests.aggregation.test_exchange import send, stub_group
from tests.tiny import tiny_local


def variables(w, mean, var):
  one = lambda value: jnp.array([value])  # noqa: E731
  return Variables(
      {'a': {'w': one(w)}}, {'a': {'mean': one(mean), 'var': one(var)}}
  )


@pytest.mark.parametrize('weights, want', [('data', 5.0), ('uniform', 4.0)])
def test_a_mean_of_statistics_has_the_coefficients_of_parameters(weights, want):
  """Statistics 2 and 6 of clients with 1 and 3 examples."""
  groups = tuple(stub_group(f'g{i}', [i], {'a': 1}, ['a']) for i in range(2))
  federation = Federation(groups, tiny_local())
  exchange = ex.make_exchange(federation, 'layerwise', weights)
  start = variables(0.5, 0.25, 1.0)
  deltas = {
      group.name: send(exchange, group, start, variables(0.5, s, s), size=n)
      for group, s, n in zip(groups, (2.0, 6.0), (1, 3), strict=True)
  }
  new = exchange.average(start, deltas)
  np.testing.assert_allclose(jax.tree.leaves(new.stats), [[want]] * 2)


def test_statistics_of_blocks_that_nobody_trained_are_kept():
  group = stub_group('g', [0], {'a': 1}, ['a'])
  exchange = ex.make_exchange(Federation((group,), tiny_local()), 'layerwise')
  server = variables(0.1, 0.3, 0.7)
  delta = send(exchange, group, server, variables(1.0, 2.0, 3.0), steps=0)
  new = exchange.average(server, {'g': delta})
  jax.tree.map(np.testing.assert_array_equal, new, server)
