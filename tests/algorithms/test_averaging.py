"""FedAvg and FedProx on quadratics f_k = h_k (w - a_k)^2 / 2: closed forms."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.averaging import average_weights
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedprox import fedprox
from fedjax_het.data.federated import federate
from fedjax_het.engine import local, rounds, visits
from fedjax_het.engine.types import Federation, Group, Visit
from fedjax_het.models.blocks import Block, BlockModel
from tests.tiny import tiny_data, tiny_federation, tiny_local

RATE = 0.1


class Weight(nn.Module):
  """One number that starts at zero."""

  @nn.compact
  def __call__(self, x, train, mask):
    return x + self.param('w', nn.initializers.zeros, ())


def scalar_federation(num_clients):
  blocks = tuple(Block(name, Weight()) for name in 'abc')
  model = BlockModel('scalar', blocks, (1,), 2, (1, 2))
  group = Group('all', model, np.arange(num_clients))
  return Federation((group,), tiny_local())


def run(
    minima, num_rounds, *, steps=2, curvature=1.0, weights='uniform',
    sizes=None, mu=0.0,
):  # fmt: skip
  """The server's weight after each round; per-client values as sequences."""
  num = len(minima)
  a, k = jnp.asarray(minima, jnp.float32), jnp.broadcast_to(steps, num)
  h = jnp.broadcast_to(jnp.float32(curvature), num)
  federation = scalar_federation(num)

  def train(group, start, data, visit):
    i = visit.client_id
    anchor = start.params

    def step(_, params):
      grads = jax.tree.map(lambda w: h[i] * (w - a[i]), params)
      grads = local.proximal_gradient(grads, params, anchor, mu)
      return jax.tree.map(lambda w, g: w - RATE * g, params, grads)

    params = jax.lax.fori_loop(0, k[i], step, start.params)
    return start._replace(params=params), {}, k[i]

  sizes = sizes or [1] * num
  data = federate(
      np.zeros((sum(sizes), 1, 1, 1), np.uint8),
      np.zeros(sum(sizes)),
      np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]),
      lambda images, key=None: images,
  )
  algorithm = average_weights(
      make_exchange(federation, 'layerwise', weights), train
  )
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=num, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  seen = []
  for _ in range(num_rounds):
    state, _ = run_round(state, data, jax.random.key(0), jax.random.key(0))
    seen.append(float(state.server.params['b']['w']))
  return seen


def test_three_rounds_of_two_clients():
  """McMahan et al. with a = (1, 5), two steps of rate 0.1, uniform means."""
  np.testing.assert_allclose(
      run([1, 5], 3), [0.57, 1.0317, 1.405677], rtol=1e-5
  )


def test_weights_by_size():
  """p = (1/4, 3/4) of the results 0.19 and 0.95."""
  got = run([1, 5], 1, weights='data', sizes=[1, 3])
  np.testing.assert_allclose(got, [0.76], rtol=1e-6)


def test_one_full_batch_step_is_a_step_on_the_pooled_loss():
  got = run([1, 5], 1, steps=1, weights='data', sizes=[1, 3])
  np.testing.assert_allclose(got, [RATE * (1 * 1 + 3 * 5) / 4], rtol=1e-6)


def test_identical_clients_give_one_clients_result():
  for sizes in ([1, 1], [1, 7]):
    got = run([2, 2], 1, weights='data', sizes=sizes)
    np.testing.assert_allclose(got, [0.38], rtol=1e-6)


@pytest.mark.parametrize(
    'options,want',
    [
        # Unequal work moves the fixed point from the optimum 3 ...
        (dict(steps=jnp.array([1, 3])), 3.92183),
        # ... and unequal curvature from 4.2.
        (dict(steps=5, curvature=jnp.array([1.0, 4.0])), 3.77001),
    ],
)
def test_known_bias_of_the_fixed_point(options, want):
  np.testing.assert_allclose(run([1, 5], 120, **options)[-1], want, rtol=1e-5)


@pytest.mark.parametrize('mu', [1.0, 0.1])
def test_many_proximal_steps_reach_the_damped_minimum(mu):
  """argmin = (a + mu x) / (1 + mu), here from x = 0."""
  got = run([1], 1, steps=400, mu=mu)
  np.testing.assert_allclose(got, [1 / (1 + mu)], rtol=1e-5)


def test_exact_proximal_rounds():
  """a = (1, 5), mu = 1: x <- (3 + x) / 2."""
  got = run([1, 5], 3, steps=400, mu=1.0)
  np.testing.assert_allclose(got, [1.5, 2.25, 2.625], rtol=1e-5)


def test_one_client_is_centralised_training():
  """With the keys that the round gives the client; rounded once more."""
  # The last batch is of one example, whose gradients, behind a norm, are but
  # rounding; Adam would make them as large as any other.
  federation = tiny_federation((2,), 1, local=tiny_local(optax.sgd, 0.1))
  group, data = federation.groups[0], tiny_data([9])
  algorithm = fedavg(federation)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  start = algorithm.client_model(state.server, (), group)
  start = jax.tree.map(jnp.copy, start)  # The state is donated.
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=1, backend='map'
  )
  state, _ = run_round(state, data, jax.random.key(1), jax.random.key(2))
  _, key = jax.random.split(visits.client_key(jax.random.key(1), 0, 0))
  visit = Visit(jnp.int32(0), jnp.int32(0), key)
  end, _, _ = jax.jit(
      lambda start, data: local.train_model(
          group.model, federation.local, start, data, visit
      )
  )(start, data.client(0))
  # The round adds a difference to its start, which rounds once.
  want = jax.tree.map(lambda s, e: s + (e - s), start, end)
  got = algorithm.client_model(state.server, (), group)
  jax.tree.map(
      lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-7),
      got,
      want,
  )


def one_visit(algorithm, federation, data):
  group = federation.groups[0]
  server = algorithm.init(jax.random.key(0))
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(3))
  _, uplink, _ = algorithm.client_update(
      group,
      algorithm.init_client(group, 0, jax.random.key(0)),
      algorithm.downlink(server, group, visit),
      data.client(0),
      visit,
  )
  return uplink.summed.change


@pytest.mark.parametrize(
    'tx', [optax.sgd, pytest.param(optax.adam, marks=pytest.mark.slow)]
)
def test_the_leash_starts_at_the_second_step(tx):
  """At the anchor its gradient is zero; norm statistics are never leashed."""
  changes = {}
  for size in (4, 8):
    for mu in (0.0, 0.5):
      federation = tiny_federation(
          depths=(1,), per_group=1, local=tiny_local(tx, 0.1, 1, 4)
      )
      changes[size, mu] = one_visit(
          fedprox(federation, mu=mu), federation, tiny_data([size])
      )
  jax.tree.map(np.testing.assert_array_equal, changes[4, 0.0], changes[4, 0.5])
  first, second = changes[8, 0.0].params, changes[8, 0.5].params
  assert any(
      np.any(a != b)
      for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second))
  )


def test_negative_mu_is_refused():
  with pytest.raises(ValueError, match='mu must be at least 0'):
    fedprox(tiny_federation(), mu=-1.0)
