"""SCAFFOLD on quadratics, against NumPy, and beside FedAvg."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.algorithms import fedavg, scaffold
from fedjax_het.engine import rounds
from fedjax_het.engine.traffic import full_bytes
from fedjax_het.engine.types import Federation, Group
from tests.models.test_reach import small_maps
from tests.quadratics import RATE, play, quadratics
from tests.tiny import (
  bytes_of_a_visit,
  preprocess,
  tiny_data,
  tiny_federation,
  tiny_local,
)
from tests.trees import assert_trees

BOTH = (0, 1)


def run(minima, cohorts, **options):
  """Yields (x, c, {client: c_k}) of the parameter l1 after each round."""
  federation, data = quadratics(minima, **options)
  for (x, c), clients in play(scaffold(federation), federation, data, cohorts):
    yield (
        float(x.params['l1']['w']),
        float(c['l1']['w']),
        {i: float(c_k['l1']['w']) for i, (_, c_k) in clients.items()},
    )


def close(got, want):
  np.testing.assert_allclose(got, want, rtol=2e-6)


def test_three_rounds_by_hand():
  """a = (1, 5), two steps of rate 0.1."""
  first, second, third = run([1, 5], [BOTH] * 3)
  # y = 0.19 and 0.95; c_k = the means of the gradients -1, -0.9 and -5, -4.5.
  close(first[:2], (0.57, -2.85))
  close(list(first[2].values()), (-0.95, -4.75))
  # From there to y = 1.0127 and 1.0507.
  close(second[:2], (1.0317, -2.3085))
  close(list(second[2].values()), (-0.3135, -4.3035))
  close(third[0], 1.405677)


def test_unequal_steps_by_hand():
  """Clients of one and three steps: each divides by its own number."""
  (first,) = run([1, 5], [BOTH], sizes=(1, 3), batch_size=1, epochs=1)
  close(first[:2], (0.7275, -2.758333))
  close(list(first[2].values()), (-1.0, -4.516667))


def test_partial_participation_by_hand():
  """c moves by 1/N of the changes, N = 2; a first visit has c_k = 0."""
  first, second = run([1, 5], [(0,), (1,)])
  close(first[:2], (0.19, -0.475))
  assert first[2] == {0: pytest.approx(-0.95), 1: 0.0}
  # y = 0.19, g = -4.81, then y = 0.7185, g = -4.2815 with the shift -0.475.
  close(second[0], 0.19 + 0.1 * (4.81 + 0.475) + 0.1 * (4.2815 + 0.475))
  close(second[1], -0.475 - (4.81 + 4.2815) / 4)
  close(second[2][0], -0.95)


def test_a_client_without_a_step_keeps_c_k_and_is_in_no_mean():
  """The third client is empty in the second round; N stays 3."""
  federation, data = quadratics([1, 5, 9])
  algorithm = scaffold(federation)

  def client_update(group, client, sent, data, visit):
    empty = (visit.client_id == 2) & (visit.round_num == 1)
    data = data.replace(size=jnp.where(empty, 0, data.size))
    return algorithm.client_update(group, client, sent, data, visit)

  starved = algorithm._replace(client_update=client_update)
  _, ((x, c), clients) = play(starved, federation, data, [range(3)] * 2)
  # After the first round: x = 0.95, c = -4.75, c_k = -0.95, -4.75 and -8.55.
  y, c_k = {}, {}
  for k, a, old in ((0, 1, -0.95), (1, 5, -4.75)):
    one = 0.95 - 0.1 * (0.95 - a - 4.75 - old)
    y[k] = one - 0.1 * (one - a - 4.75 - old)
    c_k[k] = (0.95 - a + one - a) / 2
  close(clients[2][1]['l1']['w'], -8.55)
  close([clients[k][1]['l1']['w'] for k in y], [c_k[0], c_k[1]])
  close(x.params['l1']['w'], (y[0] + y[1]) / 2)
  close(c['l1']['w'], (c_k[0] + c_k[1] - 8.55) / 3)


def test_each_block_has_its_own_owners():
  """l2 has one owner, which follows plain descent: 5 (1 - 0.9^(2 r))."""
  federation, data = quadratics([1, 5], owned=('l1', 'l1 l2'))
  played = play(scaffold(federation), federation, data, [BOTH] * 3)
  wanted = [(0.57, -2.85, -4.75), (1.0317, -2.3085, -3.8475), None]
  for r, (((x, c), _), want) in enumerate(zip(played, wanted), 1):
    close(x.params['l2']['w'], 5 * (1 - 0.9 ** (2 * r)))
    if want:
      close([x.params['l1']['w'], c['l1']['w'], c['l2']['w']], want)


def test_one_of_two_owners_among_four_clients():
  """c of l2 moves by half of the client's change: l2 has two owners."""
  federation, data = quadratics(
      [1, 1, 1, 1], owned=('l1', 'l1', 'l1 l2', 'l1 l2'), epochs=1
  )
  ((_, c), clients), = play(scaffold(federation), federation, data, [(2,)])
  close(clients[2][1]['l2']['w'], -1.0)
  close(c['l2']['w'], -0.5)
  close(c['l1']['w'], -0.25)


def test_curvatures_do_not_move_the_fixed_point():
  """h = (1, 4), five steps: the optimum 4.2, where FedAvg ends at 3.77."""
  *_, last = run([1, 5], [BOTH] * 250, curvature=(1, 4), epochs=5)
  np.testing.assert_allclose(last[0], 4.2, rtol=1e-4)


def test_server_lr_scales_x_and_not_c():
  federation, data = quadratics([1, 5])
  algorithm = scaffold(federation, server_lr=0.5)
  ((x, c), _), = play(algorithm, federation, data, [BOTH])
  close([x.params['l1']['w'], c['l1']['w']], [0.285, -2.85])


def test_momentum_of_the_server_is_one_of_x_alone():
  """Two rounds of two steps of rate 0.1; c is the mean of the c_k."""
  federation, data = quadratics([1, 5])
  algorithm = scaffold(federation, server_momentum=0.9)
  minima, c_k = np.array([1.0, 5.0]), np.zeros(2)
  x = m = c = 0.0
  for (server, got), _ in play(algorithm, federation, data, [BOTH] * 2):
    y = np.full(2, x)
    for _ in range(2):
      y -= 0.1 * (y - minima - c_k + c)
    c_k = c_k - c + (x - y) / 0.2
    m = 0.9 * m + np.mean(y - x)
    x, c = x + m, c_k.mean()
    close([server.variables.params['l1']['w'], got['l1']['w']], [x, c])


def test_c_k_is_a_gradient_with_adam_too():
  """One step: c_k is the gradient -a at 0, not Adam's update."""
  (first,) = run([1, 5], [BOTH], tx=optax.adam, epochs=1)
  close([first[1], *first[2].values()], [-3.0, -1.0, -5.0])
  np.testing.assert_allclose(first[0], RATE, rtol=1e-5)


def test_without_a_learning_rate_c_becomes_the_gradient():
  *_, last = run([1, 5], [BOTH] * 2, rate=0.0)
  assert last[0] == 0.0
  close([last[1], *last[2].values()], [-3.0, -1.0, -5.0])


def small(norm=False, tx=optax.sgd, **kwargs):
  """Depths 1 and 2, four clients; full batches, by default with SGD."""
  federation = tiny_federation(
      (1, 2), norm=norm, local=tiny_local(tx, 0.1, 3, 8), **kwargs
  )
  return federation, tiny_data((5, 8, 3, 7))


def rounds_of(algorithm, federation, data, num, cohort_size=4):
  """The states after each round."""
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=cohort_size, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  states = []
  for _ in range(num):
    state, _ = run_round(state, data, jax.random.key(1), jax.random.key(2))
    states.append(jax.device_get(state))
  return states


def test_the_first_round_is_that_of_fedavg_bit_for_bit():
  """With norms; later rounds have rate 0, and c is no longer zero."""
  federation, data = small(norm=True)
  rate = lambda round_num: jnp.where(round_num == 0, 0.1, 0.0)  # noqa: E731
  federation = dataclasses.replace(
      federation,
      local=dataclasses.replace(federation.local, learning_rate=rate),
  )
  first, *later = rounds_of(scaffold(federation), federation, data, 3)
  wanted = rounds_of(fedavg(federation), federation, data, 3)
  # Statistics move at rate 0, too; they have no control variate.
  for got, want in zip([first, *later], wanted, strict=True):
    assert_trees(got.server[0], want.server, rtol=0, atol=0)
  for got in later:
    assert_trees(got.server[0].params, first.server[0].params, rtol=0, atol=0)
  x, c = first.server
  assert jax.tree.structure(c) == jax.tree.structure(x.params)
  assert all(np.any(leaf) for leaf in jax.tree.leaves(c))
  # The evaluated model has no control variate, either.
  group = federation.groups[0]
  model = scaffold(federation).client_model(first.server, ({}, {}), group)
  assert_trees(model, fedavg(federation).client_model(x, (), group), rtol=0)


def with_zeros(algorithm):
  """The algorithm with c and c_k set to zero after each round."""

  def client_update(*args):
    (own, c_k), uplink, metrics = algorithm.client_update(*args)
    return (own, optax.tree.zeros_like(c_k)), uplink, metrics

  def server_update(*args):
    (x, c), metrics = algorithm.server_update(*args)
    return (x, optax.tree.zeros_like(c)), metrics

  return algorithm._replace(
      client_update=client_update, server_update=server_update
  )


@pytest.mark.parametrize('tx', [optax.sgd, optax.adam])
def test_while_c_is_held_at_zero_all_rounds_are_those_of_fedavg(tx):
  """Bit for bit, with two architectures, unequal steps and curvatures."""
  federation, data = quadratics(
      [3, 7], curvature=(1, 3), sizes=(3, 5), batch_size=2,
      owned=('l1', 'l1 l2'), tx=tx,
  )  # fmt: skip

  def servers(algorithm):
    played = play(algorithm, federation, data, [BOTH] * 3)
    return [server for server, _ in played]

  wanted = servers(fedavg(federation))
  held = [x for x, _ in servers(with_zeros(scaffold(federation)))]
  assert_trees(held, wanted, rtol=0, atol=0)
  # The variates are used: without the zeros only the first round is equal.
  first, second, _ = (x for x, _ in servers(scaffold(federation)))
  assert_trees(first, wanted[0], rtol=0, atol=0)
  assert second.params['l1'] != wanted[1].params['l1']


@pytest.mark.parametrize('minima', [[3], [2, 2]])
def test_one_client_or_equal_clients_are_not_corrected(minima):
  """c - c_k = 0: plain descent to a (1 - 0.9^(2 r))."""
  num = len(minima)
  got = [x for x, _, _ in run(minima, [range(num)] * 3)]
  close(got, [minima[0] * (1 - 0.9 ** (2 * r)) for r in (1, 2, 3)])


def owners_mean(federation, state, key):
  """The mean of a block's c_k over all its owners."""
  trees = [c[key] for _, c in state.clients.values() if key in c]
  total = jax.tree.map(lambda *rows: sum(r.sum(0) for r in rows), *trees)
  number = sum(
      group.num_clients
      for group in federation.groups
      if key in state.clients[group.name][1]
  )
  return jax.tree.map(lambda t: t / number, total)


@pytest.mark.parametrize(
    'aggregation',
    ['layerwise', 'ends', pytest.param('architecture', marks=pytest.mark.slow)],
)
def test_c_is_the_mean_of_c_k_over_all_owners(aggregation):
  """Per leaf and after each round, whichever clients take part."""
  federation, data = small(tx=optax.adam)
  algorithm = scaffold(federation, aggregation=aggregation)
  for state in rounds_of(algorithm, federation, data, 3, cohort_size=2):
    _, c = state.server
    assert len(c) == dict(layerwise=4, architecture=7, ends=2)[aggregation]
    for key in c:
      mean = owners_mean(federation, state, key)
      assert_trees(c[key], mean, rtol=1e-5, atol=1e-6)
  assert all(np.any(leaf) for leaf in jax.tree.leaves(c))


def test_everything_starts_at_zero():
  federation, _ = small()
  algorithm = scaffold(federation)
  _, c = algorithm.init(jax.random.key(3))
  for group in federation.groups:
    _, c_k = algorithm.init_client(group, 0, jax.random.key(3))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((c, c_k)))
    assert set(c_k) == set(group.model.block_names)


def test_variates_travel_both_ways():
  """Parameters twice, statistics once; the uplink adds the coefficient."""
  federation, data = small(norm=True)
  group = federation.groups[1]
  params, stats = map(full_bytes, group.model.abstract_variables)
  both = 2 * params + stats
  sizes = bytes_of_a_visit(scaffold(federation), group, data)
  assert sizes == (both, both + 4)


def test_blocks_that_stay_are_not_corrected():
  """With nothing shared a client descends alone: 5 (1 - 0.9^(2 r))."""
  federation, data = quadratics([1, 5])
  algorithm = scaffold(federation, aggregation='none')
  for r, (_, clients) in enumerate(
      play(algorithm, federation, data, [BOTH] * 2), 1
  ):
    own, c_k = clients[1]
    close(own.params['l1']['w'], 5 * (1 - 0.9 ** (2 * r)))
    assert c_k == {}


def test_unused_weights_can_be_dropped():
  """The steps are the same; variates of unreached entries are zero."""
  ids = np.arange(2)
  groups = tuple(
      Group(f'd{d}', small_maps(d), 2 * (d - 1) + ids) for d in (1, 2)
  )
  data, results = tiny_data((5, 8, 6, 7)), []
  for drop in (False, True):
    federation = Federation(
        groups, tiny_local(optax.sgd, 0.1, drop_unused_weights=drop)
    )
    results.append(rounds_of(scaffold(federation), federation, data, 2)[-1])
  assert_trees(results[1], results[0], rtol=1e-5, atol=1e-6)
  kernel = results[1].server[1]['mid0']['Conv_0']['kernel']
  assert np.any(kernel[1, 1]) and not np.any(kernel[0])


# One round in NumPy, from variates that are not zero.


def oracle_gradient(weights, names, x, y):
  """Gradient of the mean cross-entropy of a dense ReLU net."""
  inputs, a = [], x
  for name in names:
    inputs.append(a)
    a = a @ weights[name]['kernel'] + weights[name]['bias']
    if name != names[-1]:
      a = np.maximum(a, 0.0)
  p = np.exp(a - a.max(axis=1, keepdims=True))
  p /= p.sum(axis=1, keepdims=True)
  d, grads = (p - np.eye(p.shape[1])[y]) / len(y), {}
  for name, z in zip(names[::-1], inputs[::-1], strict=True):
    grads[name] = dict(kernel=z.T @ d, bias=d.sum(axis=0))
    d = (d @ weights[name]['kernel'].T) * (z > 0)
  return grads


def oracle_round(x, c, c_k, names, batches, rate, num_steps):
  """Algorithm 1 with option II; c_k, names and batches are {client: ...}."""
  owners = {n: sum(n in mine for mine in names.values()) for n in x}
  dx, dc, new_c_k = {n: [] for n in x}, {n: [] for n in x}, {}
  for k, batch in batches.items():
    y = {n: dict(x[n]) for n in names[k]}
    for _ in range(num_steps):
      g = oracle_gradient(y, names[k], *batch)
      for n in names[k]:
        for leaf in y[n]:
          y[n][leaf] = y[n][leaf] - rate * (
              g[n][leaf] + c[n][leaf] - c_k[k][n][leaf]
          )
    new_c_k[k] = {
        n: {
            leaf: c_k[k][n][leaf] - c[n][leaf]
            + (x[n][leaf] - y[n][leaf]) / (num_steps * rate)
            for leaf in y[n]
        }
        for n in names[k]
    }  # fmt: skip
    for n in names[k]:
      dx[n].append({i: y[n][i] - x[n][i] for i in x[n]})
      dc[n].append({i: new_c_k[k][n][i] - c_k[k][n][i] for i in x[n]})
  x = {
      n: {i: x[n][i] + sum(d[i] for d in dx[n]) / max(len(dx[n]), 1)
          for i in x[n]}
      for n in x
  }  # fmt: skip
  c = {
      n: {i: c[n][i] + sum(d[i] for d in dc[n]) / owners[n] for i in c[n]}
      for n in c
  }
  return x, c, new_c_k


def test_one_round_in_numpy():
  """Two architectures, three of four clients, three full-batch steps."""
  federation, data = small()
  algorithm = scaffold(federation)
  rng = np.random.default_rng(0)

  def noise(tree):
    return jax.tree.map(
        lambda a: rng.normal(0, 0.3, np.shape(a)).astype(np.float32), tree
    )

  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  state = jax.device_get(state)
  x, c = state.server
  state = state._replace(
      server=(x._replace(params=noise(x.params)), noise(c)),
      clients={n: (own, noise(c)) for n, (own, c) in state.clients.items()},
  )
  (x, _), c = state.server
  names, before = {}, {}
  for group in federation.groups:
    for row, k in enumerate(group.client_ids.tolist()):
      names[k] = list(group.model.block_names)
      before[k] = jax.tree.map(
          lambda leaf, row=row: leaf[row], state.clients[group.name][1]
      )
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=3, backend='map'
  )
  after, reports = run_round(
      jax.tree.map(jnp.asarray, state), data, jax.random.key(1),
      jax.random.key(2),
  )  # fmt: skip
  cohort = np.concatenate([r.client_id for r in reports.values()])
  cohort = sorted(cohort[cohort < 4].tolist())
  assert len(cohort) == 3
  images = np.asarray(preprocess(data.images), np.float64)
  batches = {}
  for k in cohort:
    index = np.asarray(data.index[k, : data.sizes[k]])
    batches[k] = (
        images[index].reshape(len(index), -1), np.asarray(data.labels)[index]
    )

  def dense(tree):  # Without Flax's layer names.
    return {
        n: {i: np.float64(a) for i, a in block['Dense_0'].items()}
        for n, block in tree.items()
    }

  want_x, want_c, want_c_k = oracle_round(
      dense(x), dense(c), {k: dense(t) for k, t in before.items()}, names,
      batches, 0.1, 3,
  )  # fmt: skip
  (got_x, _), got_c = after.server
  assert_trees(dense(got_x), want_x, rtol=1e-5, atol=1e-5)
  assert_trees(dense(got_c), want_c, rtol=1e-5, atol=1e-5)
  for group in federation.groups:
    for row, k in enumerate(group.client_ids.tolist()):
      got = jax.tree.map(
          lambda leaf, row=row: leaf[row], after.clients[group.name][1]
      )
      want = want_c_k[k] if k in cohort else dense(before[k])
      assert_trees(dense(got), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('value', [np.nan, np.inf, 0.0])
def test_wrong_options_are_refused(value):
  message = 'server_lr must be (a finite number|above 0)'
  with pytest.raises(ValueError, match=message):
    scaffold(tiny_federation(), server_lr=value)


def test_a_kept_optimiser_is_not_heeded():
  """Each visit starts a new optimiser, as in the paper."""
  federation, data = small(tx=optax.adam)
  keeping = dataclasses.replace(
      federation,
      local=dataclasses.replace(federation.local, keep_optimizer=True),
  )
  (got,) = rounds_of(scaffold(keeping), keeping, data, 1)
  (want,) = rounds_of(scaffold(federation), federation, data, 1)
  assert_trees(got, want, rtol=0, atol=0)
