"""FedAvg and FedProx on quadratics f_k = h_k (w - a_k)^2 / 2: closed forms."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.exchange import Optimized
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedprox import fedprox
from fedjax_het.engine import local, rounds, visits
from fedjax_het.engine.types import Visit
from fedjax_het.options import keyword_options
from tests.algorithms import suite
from tests.quadratics import RATE, play, quadratics
from tests.tiny import tiny_data, tiny_federation, tiny_local

# Methods with the options of a server's optimiser.
TAKERS = [
    name for name, make in ALGORITHMS.items()
    if 'server_optimizer' in keyword_options(make)
]  # fmt: skip


def run(minima, num_rounds, *, make=fedavg, cohorts=None, setting=None, **how):
  """Yields the parameter l1 after each round; `how` are options of `make`."""
  federation, data = quadratics(minima, **(setting or {}))
  cohorts = cohorts or [range(len(minima))] * num_rounds
  algorithm = make(federation, **how)
  for server, _ in play(algorithm, federation, data, cohorts):
    x = server.variables if isinstance(server, Optimized) else server
    yield float(x.params['l1']['w'])


def last(*args, **kwargs):
  *_, end = run(*args, **kwargs)
  return end


def test_three_rounds_of_two_clients():
  """McMahan et al.: a = (1, 5), two steps of rate 0.1, uniform weights."""
  got = list(run([1, 5], 3))
  np.testing.assert_allclose(got, [0.57, 1.0317, 1.405677], rtol=1e-5)


BOTH = pytest.mark.parametrize(
    'make,how', [(fedavg, {}), (fedprox, dict(mu=0.0))]
)


@BOTH
def test_one_server_step_by_its_learning_rate(make, how):
  got = list(run([1, 5], 1, make=make, server_lr=0.5, **how))
  np.testing.assert_allclose(got, [0.57 / 2], rtol=1e-6)


@BOTH
def test_averaging_inside_an_architecture(make, how):
  """Each group has its own l1; the second client's is 0.95."""
  federation, data = quadratics([1, 5], owned=('l1', 'l1 l2'))
  algorithm = make(federation, aggregation='architecture', **how)
  ((params, _), _), = play(algorithm, federation, data, [(0, 1)])
  got = params['l1/l1']['w'], params['l1+l2/l1']['w']
  np.testing.assert_allclose(got, [0.19, 0.95], rtol=1e-6)


def test_only_those_that_train_are_in_the_mean():
  """Client 1 gives 0.95; from there client 0 gives 0.81 * 0.95 + 0.19."""
  got = list(run([1, 5], 2, cohorts=[(1,), (0,), ()]))
  np.testing.assert_allclose(got, [0.95, 0.9595, 0.9595], rtol=1e-6)
  assert got[1] == got[2]


@BOTH
def test_coefficients_by_size(make, how):
  """Results 0.19 and 0.95; by size p = (1/4, 3/4)."""
  for weights, want in (('data', 0.76), ('uniform', 0.57)):
    got = list(
        run([1, 5], 1, make=make, setting=dict(sizes=(1, 3)), weights=weights,
            **how)
    )  # fmt: skip
    np.testing.assert_allclose(got, [want], rtol=1e-6)


def test_one_full_batch_step_is_a_step_on_the_pooled_loss():
  setting = dict(sizes=(1, 3), epochs=1)
  got = list(run([1, 5], 1, weights='data', setting=setting))
  np.testing.assert_allclose(got, [RATE * (1 * 1 + 3 * 5) / 4], rtol=1e-6)


def test_identical_clients_give_one_clients_result():
  for sizes in ([1, 1], [1, 7]):
    got = list(run([2, 2], 1, weights='data', setting=dict(sizes=sizes)))
    np.testing.assert_allclose(got, [0.38], rtol=1e-6)


@pytest.mark.parametrize(
    'setting,want',
    [
        # Unequal work moves the fixed point from the optimum 3 ...
        (dict(sizes=(1, 3), batch_size=1, epochs=1), 3.92183),
        # ... and unequal curvature from 4.2.
        (dict(epochs=5, curvature=(1, 4)), 3.77001),
    ],
)
def test_known_bias_of_the_fixed_point(setting, want):
  got = last([1, 5], 120, setting=setting)
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_each_block_is_averaged_over_its_owners():
  """l1 is averaged over two clients, l2 over the one that owns it."""
  federation, data = quadratics([1, 5], owned=('l1', 'l1 l2'))
  ((params, _), _), = play(fedavg(federation), federation, data, [(0, 1)])
  np.testing.assert_allclose(params['l1']['w'], 0.57, rtol=1e-6)
  np.testing.assert_allclose(params['l2']['w'], 0.95, rtol=1e-6)


@pytest.mark.parametrize('mu', [1.0, 0.1])
def test_two_proximal_steps_by_hand(mu):
  """The second step has the gradient (w - a) + mu w at w = RATE a."""
  got = last([5], 1, make=fedprox, mu=mu)
  w = RATE * 5
  np.testing.assert_allclose(got, w - RATE * (w - 5 + mu * w), rtol=1e-6)


@pytest.mark.parametrize('mu', [1.0, 0.1])
def test_many_proximal_steps_reach_the_damped_minimum(mu):
  """argmin = (a + mu x) / (1 + mu), here from x = 0."""
  got = last([1], 1, make=fedprox, mu=mu, setting=dict(epochs=400))
  np.testing.assert_allclose(got, 1 / (1 + mu), rtol=1e-5)


def test_the_default_strength_is_the_papers():
  """FedIN v2's mu = 0.1."""
  default, given = (
      last([5], 2, make=fedprox, **how) for how in ({}, dict(mu=0.1))
  )
  assert default == given


def test_exact_proximal_rounds():
  """a = (1, 5), mu = 1: x <- (3 + x) / 2."""
  got = list(run([1, 5], 3, make=fedprox, mu=1.0, setting=dict(epochs=400)))
  np.testing.assert_allclose(got, [1.5, 2.25, 2.625], rtol=1e-5)


def test_without_a_proximal_term_it_is_fedavg():
  assert list(run([1, 5], 2, make=fedprox, mu=0.0)) == list(run([1, 5], 2))


RULES = dict(
    adam=lambda v, d: 0.99 * v + 0.01 * d,
    yogi=lambda v, d: v - 0.01 * d * np.sign(v - d),
    adagrad=lambda v, d: v + d,
)


@BOTH
@pytest.mark.parametrize('name', [*RULES])
def test_adaptive_server_steps_through_the_methods_options(name, make, how):
  """The mean change is 0.19 (3 - x): two steps of rate 0.1 towards 1 and 5."""
  how = dict(how, server_lr=0.3, server_eps=0.05, server_optimizer=name)
  x, m, v, wanted = 0.0, 0.0, 0.05**2, []
  beta = 0.0 if name == 'adagrad' else 0.9
  for _ in range(4):
    change = 0.19 * (3 - x)
    m, v = beta * m + (1 - beta) * change, RULES[name](v, change**2)
    x += 0.3 * m / (np.sqrt(v) + 0.05)
    wanted.append(x)
  got = list(run([1, 5], 4, make=make, **how))
  np.testing.assert_allclose(got, wanted, rtol=1e-5)


@BOTH
def test_server_momentum_through_the_methods_options(make, how):
  """FedAvgM: b <- 0.9 b + D, x <- x + b."""
  x = b = 0.0
  for got in run([1, 5], 3, make=make, server_momentum=0.9, **how):
    b = 0.9 * b + 0.19 * (3 - x)
    x += b
    np.testing.assert_allclose(got, x, rtol=1e-5)


def test_one_client_is_centralised_training():
  """With the keys that the round gives the client; equal up to one rounding."""
  # The last batch has one example. After a norm its gradients are only
  # rounding errors, which Adam would scale up; hence SGD.
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
  # The round adds the change to its start, which rounds once.
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
  return uplink.summed


@pytest.mark.parametrize(
    'tx', [optax.sgd, pytest.param(optax.adam, marks=pytest.mark.slow)]
)
def test_the_proximal_term_acts_from_the_second_step(tx):
  """At the anchor its gradient is zero; norm statistics have no such term."""
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
  first, second = changes[8, 0.0].change, changes[8, 0.5].change
  assert any(
      np.any(a != b)
      for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second))
  )


@pytest.mark.parametrize('name', [
    'fedavg', 'fedprox', 'incoavg', 'fednova', 'moon', 'fedgen', 'fedasync',
])  # fmt: skip
def test_blocks_that_stay_are_trained(name):
  """The kernels of all of its own blocks that a client keeps have moved."""
  aggregation = 'classifier' if name == 'fedgen' else 'ends'
  federation = tiny_federation((1,), 2, norm=False)
  algorithm = ALGORITHMS[name](federation, aggregation=aggregation)
  (group,), key = federation.groups, jax.random.key(0)
  visit = Visit(jnp.int32(0), jnp.int32(0), key)
  server = algorithm.init(key)
  sent = algorithm.downlink(server, group, visit)
  client = algorithm.init_client(group, 0, key)
  data = tiny_data([8, 5]).client(0)
  after, _, _ = jax.jit(functools.partial(algorithm.client_update, group))(
      client, sent, data, visit
  )
  # The own blocks are what is found under the names of unshared blocks.
  own = ('mid0',) if aggregation == 'ends' else ('stem', 'mid0')
  moved = {}
  pairs = zip(
      jax.tree_util.tree_leaves_with_path(client),
      jax.tree_util.tree_leaves_with_path(after),
      strict=True,
  )
  for (path, old), (_, new) in pairs:
    names = [getattr(entry, 'key', None) for entry in path]
    for block in own:
      if block in names and 'kernel' in names:
        moved[block] = moved.get(block, True) and bool(np.any(old != new))
  assert moved == dict.fromkeys(own, True)


def test_negative_mu_is_refused():
  with pytest.raises(ValueError, match='mu must be at least 0'):
    fedprox(tiny_federation(), mu=-1.0)


def test_rounds_keep_the_structure_of_a_server_with_an_optimiser():
  """Resuming through the host is exact, and the model can be evaluated."""
  federation, data = quadratics([1, 5], owned=('l1', 'l1 l2'))
  algorithm = fedavg(federation, server_optimizer='adam', server_lr=0.1)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=1, backend='map'
  )
  keys = jax.random.key(1), jax.random.key(2)
  results = []
  for through_host in (False, True):
    state = rounds.init_state(algorithm, federation, jax.random.key(0))
    structure = jax.tree.structure(state)
    for _ in range(3):
      if through_host:
        state = jax.tree.map(jnp.asarray, jax.device_get(state))
      state, _ = run_round(state, data, *keys)
      assert jax.tree.structure(state) == structure
    results.append(jax.device_get(state))
  jax.tree.map(np.testing.assert_array_equal, *results)
  model = algorithm.client_model(state.server, (), federation.groups[0])
  assert set(model.params) == set(federation.groups[0].model.block_names)
  assert np.any(model.params['l1']['w'])


def takes_the_step_itself(name):
  """Whether a method calls `server_step`, and does not leave it to exchange."""
  return hasattr(sys.modules[ALGORITHMS[name].__module__], 'server_step')


@pytest.mark.parametrize('name', [
    pytest.param(
        name, marks=() if takes_the_step_itself(name) else pytest.mark.slow
    )
    for name in TAKERS
])  # fmt: skip
def test_methods_take_the_servers_optimiser(name):
  """Moments beside each parameter, in a state that keeps its structure."""
  case = suite.cases(name)[0]
  options = dict(case.options, server_optimizer='yogi', server_lr=0.1)
  algorithm, federation = suite.make(name, case=case._replace(options=options))
  plain, _ = suite.make(name, federation, case)
  key = jax.random.key(0)
  few, many = (
      len(jax.tree.leaves(jax.eval_shape(made.init, key)))
      for made in (plain, algorithm)
  )
  assert many >= few + 8
  before = jax.eval_shape(
      lambda key: rounds.init_state(algorithm, federation, key), key
  )
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=2, backend='map'
  )
  data = tiny_data(public=suite.NUM_PUBLIC)
  after, _ = jax.eval_shape(run_round, before, data, key, key)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
      lambda x: (x.shape, x.dtype), before
  )


def test_every_option_of_a_servers_step_is_one_of_the_method():
  """As `takes_server_options` says; FedNova has a default of its own."""
  assert len(TAKERS) >= 15
  for name in TAKERS:
    known = keyword_options(ALGORITHMS[name])
    assert 'tx' not in known
    momentum = 0.0 if name == 'fednova' else None
    assert known['server_momentum'] == (float | None, momentum)
    assert known['server_lr'] == (float, 1.0)
    assert known['server_eps'] == (float, 1e-3)
  with pytest.raises(ValueError, match="has no option 'tx'"):
    fedavg(tiny_federation(), tx=optax.sgd(1.0))
