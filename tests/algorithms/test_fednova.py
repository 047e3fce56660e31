"""FedNova on quadratics, by hand, against NumPy, and beside FedAvg."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.exchange import Delta, Optimized, make_exchange
from fedjax_het.algorithms import fedavg, fednova
from fedjax_het.algorithms.fednova import Sent, effective_steps
from fedjax_het.data.federated import federate
from fedjax_het.engine import rounds
from fedjax_het.engine.task import Task
from fedjax_het.engine.traffic import full_bytes
from fedjax_het.engine.types import Received, Visit
from fedjax_het.models.blocks import Variables
from tests.algorithms.test_scaffold import oracle_gradient, rounds_of
from tests.quadratics import play, quadratics
from tests.tiny import (
  momentum,
  preprocess,
  server_step,
  tiny_data,
  tiny_federation,
  tiny_local,
)
from tests.trees import assert_trees

# One step for the first client, three for the second.
ONE_AND_THREE = dict(sizes=(1, 3), batch_size=1, epochs=1)


def slopes(outputs, labels):
  """-a w_1 of each example: the gradient is -a everywhere."""
  return -outputs[:, 1] * labels.astype(jnp.float32)


# Changes of local training.
LINEAR = dict(task=Task('linear', slopes, {'loss': slopes}))


def run(
    minima, num_rounds, setting, known_sizes=False, absent=None, local=None,
    **options,
):  # fmt: skip
  """Yields the parameter l1 after each round; `absent` has no example."""
  federation, data = quadratics(minima, **setting)
  federation = dataclasses.replace(
      federation, local=dataclasses.replace(federation.local, **local or {})
  )
  if known_sizes:
    federation = dataclasses.replace(federation, sizes=np.asarray(data.sizes))
  if absent is not None:
    data = data.replace(sizes=data.sizes.at[absent].set(0))
  algorithm = fednova(federation, **options)
  cohorts = [range(len(minima))] * num_rounds
  for server, _ in play(algorithm, federation, data, cohorts):
    x = server.variables if isinstance(server, Optimized) else server
    yield float(x.params['l1']['w'])


def close(got, want, rtol=2e-6):
  np.testing.assert_allclose(got, want, rtol=rtol)


@pytest.mark.parametrize('known_sizes', [False, True])
def test_unequal_steps_by_hand(known_sizes):
  """y = (0.1, 1.355), tau = 2; FedAvg moves to 0.7275."""
  got = list(run([1, 5], 1, ONE_AND_THREE, known_sizes))
  close(got, [0.551667], rtol=1e-6)


def test_coefficients_by_size():
  """p = (1/4, 3/4), tau = 2.5: 2.5 (0.1 / 4 + 1.355 / 4)."""
  close(list(run([1, 5], 1, ONE_AND_THREE, weights='data')), [0.909375])


def test_few_steps_count_as_more():
  """A = (2, 3), tau = 2.5."""
  got = list(run([1, 5], 1, ONE_AND_THREE, True, min_steps=2))
  close(got, [2.5 * (0.1 / 2 + 1.355 / 3) / 2])


def test_the_floor_counts_steps_whatever_a_step_is():
  """Clipped to 0.1, each step is 0.01 long: y = (0.01, 0.03), A = (2, 3)."""

  def clipped(lr):
    return optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(lr))

  setting = ([1, 5], 1, ONE_AND_THREE, True)
  got = list(run(*setting, local=dict(optimizer=clipped), min_steps=2))
  close(got, [2.5 * (0.01 / 2 + 0.03 / 3) / 2], rtol=1e-5)


def test_the_fixed_point_is_nearer_to_the_optimum_than_fedavgs():
  """2.89842, where FedAvg ends at 3.92183 and the optimum is 3."""
  first, second = run([1, 5], 2, ONE_AND_THREE)
  # A round maps x to first + r x; the fixed point is first / (1 - r).
  close(first**2 / (2 * first - second), 2.89842, rtol=1e-5)


@pytest.mark.parametrize(
    ('tx', 'alpha', 'steps', 'want'),
    [
        (optax.sgd(1.0), 0.0, (0, 1, 3, 10), (0, 1, 3, 10)),
        (optax.sgd(1.0, 0.9), 0.0, (1, 2, 3, 10), (1, 2.9, 5.61, 41.381060)),
        (optax.sgd(1.0), 0.1, (1, 2, 3), (1, 1.9, 2.71)),
        (optax.sgd(1.0, 0.9), 0.1, (1, 2, 3, 4), (1, 2.8, 5.14, 7.732)),
        (optax.sgd(1.0, 0.9, nesterov=True), 0.0, (1, 2), (1.9, 4.61)),
    ],
)
def test_effective_steps(tx, alpha, steps, want):
  close([effective_steps(tx, k, alpha) for k in steps], want)


def test_what_is_not_linear_counts_its_steps():
  close(effective_steps(optax.adam(1.0), 10), 10, rtol=1e-4)


def test_decay_of_weights_is_part_of_the_gradient():
  decaying = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0))
  close(effective_steps(decaying, 3), 3)


def test_constant_gradients_are_recovered():
  """Delta = -lr g A on a linear loss, with momentum and a proximal term."""
  lr, mu, g, w = 0.05, 2.0, 2.7, 0.0
  tx = optax.sgd(lr, 0.9)
  state = tx.init(w)
  for _ in range(7):
    update, state = tx.update(g + mu * w, state)
    w += update
  a = effective_steps(optax.sgd(1.0, 0.9), 7, lr * mu)
  close(w, -lr * g * a, rtol=1e-5)


@pytest.mark.parametrize('known_sizes', [False, True])
def test_constant_gradients_are_averaged_without_their_steps(known_sizes):
  """x <- x - lr tau sum p g; alpha = 0.2, p = (1/4, 3/4)."""
  setting = dict(ONE_AND_THREE, tx=momentum)
  got = list(
      run([1, 5], 2, setting, known_sizes, local=LINEAR, mu=2.0, weights='data')
  )
  a, c, steps = 0.0, 0.0, []
  for _ in range(3):
    c = 0.9 * c + 1 - 0.2 * a
    a += c
    steps.append(a)
  tau = steps[0] / 4 + steps[2] * 3 / 4
  close(got, 0.1 * tau * (1 + 3 * 5) / 4 * np.array([1, 2]))


def test_a_proximal_term_shrinks_the_change_and_its_steps():
  """alpha = 0.05: A = (1, 2.8525)."""
  got = list(run([1, 5], 1, ONE_AND_THREE, mu=0.5))
  y, a = 0.0, 0.0
  for _ in range(3):
    y, a = y + 0.1 * (5 - y) - 0.05 * y, 0.95 * a + 1
  close(a, 2.8525)
  close(got, [(1 + a) / 2 * (0.1 + y / a) / 2])


def test_a_proximal_term_with_a_rate_that_falls():
  """A_k is that of the round's own rate: alpha = 0.05, then 0.005."""
  rates = (0.1, 0.01)
  local = dict(learning_rate=lambda r: jnp.asarray(rates)[r])
  got = list(run([1, 5], 2, ONE_AND_THREE, local=local, mu=0.5))
  x, want = 0.0, []
  for rate in rates:
    changes, steps = [], []
    for minimum, num in ((1, 1), (5, 3)):
      y, a = x, 0.0
      for _ in range(num):
        y += rate * (minimum - y) - rate * 0.5 * (y - x)
        a = (1 - rate * 0.5) * a + 1
      changes.append((y - x) / a)
      steps.append(a)
    x += np.mean(steps) * np.mean(changes)
    want.append(x)
  close(got, want)


def test_without_a_learning_rate_nothing_moves():
  got = list(run([1, 5], 2, dict(ONE_AND_THREE, rate=0.0), True, mu=0.5))
  assert got == [0.0, 0.0]


@pytest.mark.parametrize(('num', 'rho'), [(2, 0.0), (3, 0.5), (7, 0.9)])
def test_one_client_is_not_changed(num, rho):
  """Plain local training, in this case with momentum."""
  tx = functools.partial(optax.sgd, momentum=rho)
  w, c = 0.0, 0.0
  for _ in range(num):
    c = rho * c + w - 3
    w -= 0.1 * c
  close(list(run([3], 1, dict(epochs=num, tx=tx))), [w])


def test_a_client_without_a_step_is_as_if_absent():
  setting = dict(ONE_AND_THREE, sizes=(1, 3, 3))
  close(list(run([1, 5, 9], 1, setting, absent=2)), [0.551667])
  got = list(run([1, 5, 9], 1, setting, True, absent=2, min_steps=0.5))
  close(got, [0.551667])


# The server alone, from uploads made by hand.


def by_hand(federation, change, steps, aggregation):
  """Uploads of one client a group, whose leaves all changed by `change`."""
  sharing = make_exchange(federation, aggregation).sharing
  received = {}
  for group, d, a in zip(federation.groups, change, steps, strict=True):
    params = jax.tree.map(
        lambda leaf, d=d, a=a: np.full(leaf.shape, d / a, np.float32),
        sharing.split(group, group.model.abstract_variables.params)[0],
    )
    delta = Delta(params, {}, np.float32(1))
    received[group.name] = Received(
        Sent(delta, np.float32(a)), None, group.client_ids
    )
  return received


def moved(federation, changes, steps, aggregation='layerwise', **options):
  """How far each block moves over the rounds, {name: number}."""
  algorithm = fednova(federation, aggregation=aggregation, **options)
  start = server = algorithm.init(jax.random.key(0))
  step = jax.jit(functools.partial(server_step, algorithm))
  for change in changes:
    server = step(server, by_hand(federation, change, steps, aggregation))
  if isinstance(server, Optimized):
    start, server = start.variables, server.variables
  return {
      name: float(tree['Dense_0']['kernel'][0, 0])
      - float(start.params[name]['Dense_0']['kernel'][0, 0])
      for name, tree in server.params.items()
  }


@pytest.fixture(scope='module')
def three():
  """Three clients: mid1 is owned by the last two, mid2 by the last."""
  return tiny_federation((1, 2, 3), 1, norm=False)


def test_tau_is_that_of_the_owners_of_a_leaf(three):
  """tau = 70 / 3, 30 and 40."""
  got = moved(three, [(1, 1, 1)], (10, 20, 40))
  want = dict(stem=1.361111, mid0=1.361111, mid1=1.125, mid2=1, head=1.361111)
  assert got == pytest.approx(want, rel=1e-5)


def test_inside_an_architecture_nothing_is_normalised(three):
  got = moved(three, [(1, 2, 3)], (10, 20, 40), 'architecture')
  want = {
      f'{group.name}/{name}': 1 + i
      for i, group in enumerate(three.groups)
      for name in group.model.block_names
  }
  assert got == pytest.approx(want, rel=1e-5)


def test_momentum_of_the_server_is_one_of_steps(three):
  """Two changes of 1: 1 + 1.9."""
  got = moved(three, [(1, 1, 1)] * 2, (5, 5, 5), server_momentum=0.9)
  assert got == pytest.approx(dict.fromkeys(got, 2.9), rel=1e-5)


def test_momentum_of_the_server_keeps_the_rates_of_its_steps():
  """Rates 0.1, then 0.01, gradient -1: 0.1, then 0.9 * 0.1 + 0.01."""
  local = dict(LINEAR, learning_rate=lambda round_num: 0.1 * 0.1**round_num)
  setting = dict(epochs=1)
  got = run([1, 1], 2, setting, local=local, server_momentum=0.9)
  close(list(got), [0.1, 0.2])


def test_no_client_stores_anything():
  """The server has a velocity only with momentum, which starts at 0."""
  federation, data = quadratics([1, 5], owned=('l1', 'l1 l2'), epochs=1)
  algorithm = fednova(federation, server_momentum=0.9)
  assert not any(map(np.any, jax.tree.leaves(
      algorithm.init(jax.random.key(0)).opt_state
  )))  # fmt: skip
  for group in federation.groups:
    client = algorithm.init_client(group, 0, jax.random.key(0))
    assert not jax.tree.leaves(client)
  ((server, clients),) = play(algorithm, federation, data, [(0, 1)])
  assert not jax.tree.leaves(clients)
  assert all(map(np.any, jax.tree.leaves(server.opt_state)))
  plain = fednova(federation).init(jax.random.key(0))
  assert isinstance(plain, Variables)


def test_statistics_become_their_plain_mean():
  """As in FedAvg bit for bit, whatever the steps."""
  federation = tiny_federation((1, 2), 1)
  rng, got, want = np.random.default_rng(0), {}, {}
  for group, a in zip(federation.groups, (1, 50), strict=True):
    change = jax.tree.map(
        lambda leaf: np.float32(rng.uniform(-0.9, 0.1, leaf.shape)),
        group.model.abstract_variables,
    )
    delta = Delta(*change, np.float32(1))
    want[group.name] = Received(delta, None, group.client_ids)
    got[group.name] = Received(
        Sent(delta, np.float32(a)), None, group.client_ids
    )
  start = fedavg(federation).init(jax.random.key(0))
  got, want = (
      jax.jit(functools.partial(server_step, make(federation)))(start, sent)
      for make, sent in ((fednova, got), (fedavg, want))
  )
  assert_trees(got.stats, want.stats, rtol=0, atol=0)
  assert np.any(got.params['stem']['Dense_0']['kernel']
                != want.params['stem']['Dense_0']['kernel'])  # fmt: skip


# Whole rounds, beside FedAvg and in NumPy.


def test_equal_steps_are_fedavg_bit_for_bit():
  """Momentum, two depths, three of four clients, two rounds."""
  federation = tiny_federation(
      (1, 2),
      norm=False,
      local=tiny_local(functools.partial(optax.sgd, momentum=0.9), 0.1),
      sizes=np.full(4, 8, np.int32),
  )
  data = tiny_data((8, 8, 8, 8))
  got, want = (
      rounds_of(make(federation), federation, data, 2, 3)[-1]
      for make in (fednova, fedavg)
  )
  assert_trees(got.server, want.server, rtol=0, atol=0)


def test_with_adam_and_norms_it_is_fedavg_bit_for_bit():
  """Rate 0 with unequal steps, then rate 0.1 with equal steps."""
  local = dataclasses.replace(
      tiny_local(optax.adam),
      learning_rate=lambda round_num: jnp.where(round_num == 0, 0.0, 0.1),
  )
  federation = tiny_federation(
      (1,), 4, local=local, sizes=np.full(4, 8, np.int32)
  )
  data, states = tiny_data((8, 8, 8, 8)), {}
  for make in (fednova, fedavg):
    algorithm = make(federation)
    run_round = rounds.make_round(
        algorithm, federation, cohort_size=3, backend='map'
    )
    state = rounds.init_state(algorithm, federation, jax.random.key(0))
    states[make] = [jax.device_get(state)]
    for sizes in ((8, 3, 4, 1), (8, 8, 8, 8)):
      state, _ = run_round(
          state, data.replace(sizes=jnp.array(sizes)), jax.random.key(1),
          jax.random.key(2),
      )  # fmt: skip
      states[make].append(jax.device_get(state))
  start, still, moved = states[fednova]
  for got, want in zip(states[fednova], states[fedavg], strict=True):
    assert_trees(got.server, want.server, rtol=0, atol=0)
  assert_trees(still.server.params, start.server.params, rtol=0, atol=0)
  kernels, variances = (
      [s.server[part]['stem'][layer][leaf] for s in (start, still, moved)]
      for part, layer, leaf in (
          (0, 'Dense_0', 'kernel'), (1, 'BatchNorm_0', 'var')
      )
  )
  assert np.all(variances[0] != variances[1])
  assert np.any(kernels[1] != kernels[2])


def test_one_number_travels_besides():
  federation = tiny_federation((1, 2))
  algorithm, group = fednova(federation), federation.groups[1]
  visit = Visit(jnp.int32(1), jnp.int32(0), jax.random.key(0))
  server = algorithm.init(visit.key)
  sent = algorithm.downlink(server, group, visit)
  client = algorithm.init_client(group, 1, visit.key)
  assert_trees(algorithm.client_model(server, client, group), sent, rtol=0)
  uplink = jax.eval_shape(
      lambda: algorithm.client_update(
          group, client, sent, tiny_data((5, 8, 3, 7)).client(1), visit
      )[1]
  )
  assert full_bytes(sent) == full_bytes(group.model.abstract_variables)
  # The coefficient of the mean and A.
  assert full_bytes(uplink) == full_bytes(sent) + 8


def oracle_round(x, names, examples, sizes, rate, momentum, decay, batch):
  """Section 3 of the paper as printed, with d_k = -Delta_k / (lr A_k)."""
  d, p, a = {}, {}, {}
  for k, (image, label) in examples.items():
    y = {n: dict(x[n]) for n in names[k]}
    buffer = {n: dict.fromkeys(x[n], 0.0) for n in names[k]}
    num = 2 * -(-sizes[k] // batch)
    for _ in range(num):
      g = oracle_gradient(y, names[k], image, label)
      for n in names[k]:
        for leaf in y[n]:
          grad = g[n][leaf] + decay * y[n][leaf]
          buffer[n][leaf] = momentum * buffer[n][leaf] + grad
          y[n][leaf] = y[n][leaf] - rate * buffer[n][leaf]
    a[k] = (num - momentum * (1 - momentum**num) / (1 - momentum)) / (
        1 - momentum
    )
    p[k] = sizes[k]
    d[k] = {
        n: {i: (x[n][i] - y[n][i]) / (rate * a[k]) for i in x[n]}
        for n in names[k]
    }
  new = {}
  for n in x:
    owners = [k for k in names if n in names[k]]
    total = sum(p[k] for k in owners)
    tau = sum(p[k] / total * a[k] for k in owners)
    new[n] = {
        i: x[n][i]
        - rate * tau * sum(p[k] / total * d[k][n][i] for k in owners)
        for i in x[n]
    }
  return new


def test_one_round_in_numpy():
  """Momentum and weight decay; each client has copies of one example."""
  sizes = (5, 9, 2, 7)  # 4, 6, 2 and 4 steps.

  def tx(rate):
    return optax.chain(
        optax.add_decayed_weights(0.01), optax.sgd(rate, momentum=0.9)
    )

  federation = tiny_federation(
      (1, 2), norm=False, local=tiny_local(tx, 0.1), sizes=np.array(sizes)
  )
  few = tiny_data((1, 1, 1, 1))
  data = federate(
      np.asarray(few.images), np.asarray(few.labels),
      [np.full(n, k) for k, n in enumerate(sizes)], preprocess,
  )  # fmt: skip
  algorithm = fednova(federation, weights='data')
  rng = np.random.default_rng(1)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  x = jax.tree.map(
      lambda leaf: rng.normal(0, 0.4, leaf.shape).astype(np.float32),
      jax.device_get(state.server.params),
  )
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  state = state._replace(server=Variables(jax.tree.map(jnp.asarray, x), {}))
  after, _ = run_round(state, data, jax.random.key(1), jax.random.key(2))

  def dense(tree):
    return {
        n: {i: np.float64(leaf) for i, leaf in block['Dense_0'].items()}
        for n, block in tree.items()
    }

  images = np.asarray(preprocess(few.images), np.float64).reshape(4, 1, -1)
  labels = np.asarray(few.labels).reshape(4, 1)
  names = {
      k: list(group.model.block_names)
      for group in federation.groups
      for k in group.client_ids.tolist()
  }
  examples = {k: (images[k], labels[k]) for k in range(4)}
  want = oracle_round(dense(x), names, examples, sizes, 0.1, 0.9, 0.01, 4)
  assert_trees(dense(after.server.params), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('option', ['mu', 'min_steps', 'server_momentum'])
@pytest.mark.parametrize('value', [np.nan, np.inf, -1.0])
def test_wrong_options_are_refused(option, value):
  with pytest.raises(ValueError, match=f'{option} must be'):
    fednova(tiny_federation(), **{option: value})


def test_without_a_step_nothing_moves():
  """No division by the 0 steps of the largest client."""
  sizes = (4, 6)
  federation = tiny_federation(
      (1,), 2, local=tiny_local(steps=0), sizes=np.array(sizes)
  )
  algorithm = fednova(federation)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  before = jax.device_get(state.server)
  run = rounds.make_round(algorithm, federation, cohort_size=2, backend='map')
  keys = map(jax.random.key, (1, 2))
  state, report = run(state, tiny_data(sizes), *keys)
  assert np.all(report['tiny1'].finite)
  after = jax.device_get(state.server)
  jax.tree.map(np.testing.assert_array_equal, before, after)
