"""FedDyn on quadratics, against NumPy, and beside FedProx."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.algorithms import feddyn, fedprox
from fedjax_het.algorithms.feddyn import predict_mean
from fedjax_het.engine import rounds
from fedjax_het.engine.traffic import full_bytes
from fedjax_het.engine.types import Federation, Group, Visit
from fedjax_het.models.blocks import Variables
from tests.algorithms.test_scaffold import oracle_gradient, rounds_of, small
from tests.models.test_reach import small_maps
from tests.quadratics import play, quadratics
from tests.tiny import (
  bytes_of_a_visit,
  preprocess,
  tiny_data,
  tiny_federation,
  tiny_local,
)
from tests.trees import assert_trees

BOTH = (0, 1)
ALPHA = 0.1
# With SGD of this rate the first step reaches the minimum of the regularised
# loss, (a_k + h_k + alpha x) / (1 + alpha); the second stays there only if all
# three terms of the gradient are right.
EXACT = dict(rate=1 / (1 + ALPHA), epochs=2)
SIZES = np.array([5, 8, 3, 7])


def exact(minima, **setting):
  """Clients that reach their minima unless `setting` differs, and the data."""
  federation, data = quadratics(minima, **{**EXACT, **setting})
  sizes = np.asarray(data.sizes)
  return dataclasses.replace(federation, sizes=sizes), data


def run(minima, cohorts, alpha=ALPHA, weights='uniform', **setting):
  """Yields (x, h, [h_k], mean of the cohort's models) of the parameter l1."""
  federation, data = exact(minima, **setting)
  algorithm = feddyn(federation, alpha=alpha, weights=weights)
  group = federation.groups[0]
  for server, clients in play(algorithm, federation, data, cohorts):
    model = algorithm.client_model(server, clients[0], group)
    yield (
        float(server[0].params['l1']['w']),
        float(server[1]['l1']['w']),
        [float(h_k['l1']['w']) for _, h_k in clients.values()],
        float(model.mean.params['l1']['w']),
    )


def close(got, want):
  np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


def test_exact_rounds_by_hand():
  """a = (1, 5): x overshoots to 5.45 and ends at the optimum 3."""
  first, second, third, *_, last = run([1, 5], [BOTH] * 6)
  # theta = 0.909091 and 4.545455, and h_k = -alpha theta.
  close(first[:2], (5.454545, -0.272727))
  close(first[2], (-0.0909091, -0.4545455))
  close(first[3], (0.909091 + 4.545455) / 2)
  # theta = 1.322314 and 4.628099.
  close(second[:2], (3.223140, -0.024793))
  close(second[3], (1.322314 + 4.628099) / 2)
  close(third[0], 3.020285)
  close(last[0], 3.0000153)


def test_h_k_is_the_gradient_at_the_end_of_a_visit():
  """Curvatures 1 and 3: x ends at the optimum (1 + 3 * 5) / 4."""
  x, h = 0.0, np.zeros(2)
  minima, curve = np.array([1, 5]), np.array([1, 3])
  setting = dict(alpha=1.0, curvature=(1, 3), rate=0.3, epochs=40)
  for got in run([1, 5], [BOTH] * 20, **setting):
    theta = (curve * minima + h + x) / (curve + 1)
    h = curve * (theta - minima)
    x = theta.mean() - h.mean()
    close(got[2], h)
    close(got[0], x)
  close(got[0], 4.0)


def test_partial_participation_by_hand():
  """h moves by 1/N of the sum over S, N = 2; x averages over S."""
  first, second = run([1, 5], [(0,), (1,)])
  close(first[:2], (1.363636, -0.0454545))
  close(first[2], (-0.0909091, 0))
  close(first[3], 0.909091)
  # theta_1 = (5 + 0 + 0.1363636) / 1.1; client 0 keeps h_0.
  theta = 5.1363636 / 1.1
  h = -0.0454545 - 0.05 * (theta - 1.363636)
  close(second[:2], (theta - h / ALPHA, h))
  close(second[2], (-0.0909091, theta - 5))
  close(second[3], theta)


def test_one_client_by_hand():
  """x overshoots, then contracts by alpha / (1 + alpha)."""
  got = list(run([1], [(0,)] * 3))
  close([x for x, *_ in got], (1.818182, 1.074380, 1.006762))
  close([mean for *_, mean in got], (0.909091, 0.991736, 0.999249))


def test_equal_clients_reach_their_minimum():
  close([x for x, *_ in run([4] * 3, [range(3)] * 9)][-1], 4.0)


def test_two_steps_by_hand():
  """N = 1, a = 5, rate 0.1: the minimum is not reached."""
  x = h = 0.0
  for got in run([5], [(0,)] * 3, alpha=0.5, rate=0.1):
    one = x - 0.1 * (x - 5 - h)
    theta = one - 0.1 * (one - 5 - h + 0.5 * (one - x))
    h -= 0.5 * (theta - x)
    x = theta - h / 0.5
    close([*got[:2], *got[2]], (x, h, h))


def test_terms_are_added_before_the_optimiser():
  """Gradients -5 and 2 - 5 + 0.1 are both clipped to -1."""
  def clipped(rate):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate))

  first, second = run([5], [(0,)] * 2, tx=clipped, rate=1.0, epochs=1)
  close(first[:2], (2, -0.1))
  close(second[:2], (5, -0.2))


@pytest.mark.parametrize(('weights', 'optimum'), [('uniform', 3), ('data', 4)])
def test_the_optimum_with_unequal_sizes(weights, optimum):
  """1 and 3 examples: the mean of (1, 5), or (1 + 3 * 5) / 4."""
  *_, last = run(
      [1, 5], [BOTH] * 25, alpha=1.0, weights=weights, sizes=(1, 3), rate=0.4,
      epochs=40,
  )  # fmt: skip
  close(last[0], optimum)


def test_weights_by_examples_by_hand():
  """w = (1/2, 3/2), alpha_k = (0.2, 0.1 / 1.5); h is the mean of w_k h_k."""
  first, second = run(
      [1, 5], [BOTH, (1,)], weights='data', sizes=(1, 3), rate=0.5, epochs=60
  )
  alpha = np.array([0.2, 0.1 / 1.5])
  theta = np.array([1, 5]) / (1 + alpha)
  h_k = -alpha * theta
  h = (0.5 * h_k[0] + 1.5 * h_k[1]) / 2
  x = theta.mean() - h / ALPHA
  close(first[2], h_k)
  close([*first[:2], first[3]], (x, h, theta.mean()))
  theta = (5 + h_k[1] + alpha[1] * x) / (1 + alpha[1])
  close(second[2], (h_k[0], theta - 5))
  h = (0.5 * h_k[0] + 1.5 * (theta - 5)) / 2
  close(second[:2], (theta - h / ALPHA, h))


def test_a_client_without_a_step_changes_nothing():
  """The third client is empty in the second round; N stays 3."""
  for weights in ('uniform', 'data'):
    federation, data = exact([1, 5, 9])
    algorithm = feddyn(federation, alpha=ALPHA, weights=weights)

    def client_update(group, client, sent, data, visit, of=algorithm):
      empty = (visit.client_id == 2) & (visit.round_num == 1)
      data = data.replace(size=jnp.where(empty, 0, data.size))
      return of.client_update(group, client, sent, data, visit)

    starved = algorithm._replace(client_update=client_update)
    played = play(starved, federation, data, [range(3)] * 2)
    ((x, h), before), ((x2, h2), after) = played
    assert after[2] == before[2]
    x, h, x2, h2 = (
        float(tree['l1']['w']) for tree in (x.params, h, x2.params, h2)
    )
    theta = [
        (a + float(before[k][1]['l1']['w']) + ALPHA * x) / (1 + ALPHA)
        for k, a in enumerate((1, 5))
    ]
    h -= ALPHA / 3 * (theta[0] + theta[1] - 2 * x)
    close([x2, h2], [np.mean(theta) - h / ALPHA, h])


def test_each_block_has_its_own_owners():
  """l2 has one owner: test_one_client_by_hand, 5 times; l1 has two."""
  federation, data = exact([1, 5], owned=('l1', 'l1 l2'))
  played = play(feddyn(federation, alpha=ALPHA), federation, data, [BOTH] * 3)
  l1, l2 = (5.454545, 3.223140, 3.020285), (1.818182, 1.074380, 1.006762)
  for ((x, _), _), one, two in zip(played, l1, l2, strict=True):
    close([x.params['l1']['w'], x.params['l2']['w']], [one, 5 * two])


def test_a_block_without_a_sender_keeps_x_and_h():
  """Bit for bit; one of the three owners of l2 takes part in round 1."""
  federation, data = exact([1, 5, 3, 7], owned=('l1', *3 * ['l1 l2']))
  algorithm = feddyn(federation, alpha=ALPHA)
  played = play(algorithm, federation, data, [(0, 1), (0,)])
  ((x, h), _), ((x2, h2), clients) = played
  theta = 5 / 1.1
  close(h['l2']['w'], -ALPHA / 3 * theta)
  close(x.params['l2']['w'], theta + theta / 3)
  close(h['l1']['w'], -ALPHA / 4 * (theta + 1 / 1.1))
  assert h2['l2'] == h['l2'] and x2.params['l2'] == x.params['l2']
  assert h2['l1'] != h['l1'] and x2.params['l1'] != x.params['l1']
  # Still the mean of the models of round 1.
  group = federation.groups[1]
  model = algorithm.client_model((x2, h2), clients[1], group)
  close(model.mean.params['l2']['w'], theta)


def test_blocks_that_stay_are_not_regularised():
  """With nothing shared a client descends alone: 5 (1 - 0.9^(2 r))."""
  federation, data = exact([1, 5], rate=0.1)
  algorithm = feddyn(federation, alpha=ALPHA, aggregation='none')
  assert algorithm.personal
  played = play(algorithm, federation, data, [BOTH] * 2)
  for r, (_, clients) in enumerate(played, 1):
    own, h_k = clients[1]
    close(own.params['l1']['w'], 5 * (1 - 0.9 ** (2 * r)))
    assert h_k == {}


# Whole rounds.


def test_the_first_visit_is_that_of_fedprox_bit_for_bit():
  """With Adam and a batch per step, h_k = 0; h_k = 1 differs."""
  federation, data = exact(
      [3, 7], curvature=(1, 3), sizes=(3, 5), batch_size=2, rate=0.1,
      owned=('l1', 'l1 l2'), tx=optax.adam,
  )  # fmt: skip
  group = federation.groups[1]
  ours, theirs = feddyn(federation, alpha=ALPHA), fedprox(federation, mu=ALPHA)
  key = jax.random.key(2)
  visit = Visit(jnp.int32(1), jnp.int32(0), key)
  x, _ = ours.init(key)
  sent = jax.tree.map(lambda leaf: leaf + 0.5, theirs.downlink(x, group, visit))

  def change(algorithm, client):
    update = jax.jit(functools.partial(algorithm.client_update, group))
    return update(client, sent, data.client(1), visit)[1].summed

  own, h_k = ours.init_client(group, 1, key)
  want = change(theirs, theirs.init_client(group, 1, key))
  assert_trees(change(ours, (own, h_k)), want, rtol=0, atol=0)
  h_k = jax.tree.map(lambda leaf: leaf + 1, h_k)
  assert change(ours, (own, h_k)).change['l1'] != want.change['l1']


def test_the_first_round_is_one_of_fedprox():
  """With norms; x moves twice as far."""
  federation = tiny_federation(
      (1,), local=tiny_local(optax.sgd, 0.1, 3, 8), sizes=SIZES[:2]
  )
  data, algorithm = tiny_data((5, 8)), feddyn(federation, alpha=ALPHA)
  got, = rounds_of(algorithm, federation, data, 1, 2)
  want, = rounds_of(fedprox(federation, mu=ALPHA), federation, data, 1, 2)
  x, h = got.server
  # Statistics become their plain mean.
  assert_trees(x.stats, want.server.stats, rtol=0, atol=0)
  start = jax.device_get(algorithm.init(jax.random.key(0))[0])
  change = jax.tree.map(np.subtract, want.server.params, start.params)
  # All owners take part: h = -alpha D, x = x + D - h / alpha.
  assert_trees(
      h, jax.tree.map(lambda d: -ALPHA * d, change), rtol=1e-4, atol=1e-6
  )
  assert_trees(
      x.params,
      jax.tree.map(lambda x, d: x + 2 * d, start.params, change),
      rtol=1e-4, atol=1e-6,
  )  # fmt: skip


def owners_mean(federation, clients, key):
  """The mean of a block's h_k over all its owners."""
  rows = [
      clients[group.name][1][key]
      for group in federation.groups
      if key in clients[group.name][1]
  ]
  return jax.tree.map(lambda *r: np.concatenate(r).mean(axis=0), *rows)


@functools.cache
def program(aggregation='layerwise', weights='uniform'):
  """The method, its federation, data, and a round of three of four clients."""
  federation, data = small(sizes=SIZES)
  algorithm = feddyn(
      federation, alpha=ALPHA, aggregation=aggregation, weights=weights
  )
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=3, backend='map'
  )
  return algorithm, federation, data, run_round


@pytest.mark.parametrize(
    'aggregation',
    ['layerwise', 'ends', pytest.param('architecture', marks=pytest.mark.slow)],
)
def test_h_is_the_mean_of_h_k_over_all_owners(aggregation):
  """After each round, whichever clients take part."""
  algorithm, federation, data, run_round = program(aggregation)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  for _ in range(3):
    state, _ = run_round(state, data, jax.random.key(1), jax.random.key(2))
    (_, h), clients = jax.device_get((state.server, state.clients))
    assert len(h) == dict(layerwise=4, architecture=7, ends=2)[aggregation]
    for key in h:
      mean = owners_mean(federation, clients, key)
      assert_trees(h[key], mean, rtol=1e-5, atol=1e-7)
  assert all(np.any(leaf) for leaf in jax.tree.leaves(h))


def test_everything_starts_at_zero():
  federation, _ = small(sizes=SIZES)
  algorithm = feddyn(federation)
  x, h = algorithm.init(jax.random.key(3))
  assert jax.tree.structure(h) == jax.tree.structure(x.params)
  for group in federation.groups:
    _, h_k = algorithm.init_client(group, 0, jax.random.key(3))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((h, h_k)))
    assert set(h_k) == set(group.model.block_names)


def test_what_travels_is_what_fedavg_sends():
  """Parameters and statistics; the uplink adds the coefficient."""
  federation, data = small(norm=True, sizes=SIZES)
  group = federation.groups[1]
  whole = full_bytes(group.model.abstract_variables)
  sizes = bytes_of_a_visit(feddyn(federation), group, data)
  assert sizes == (whole, whole + 4)


def test_the_view_is_a_model_of_its_own():
  federation, data = small(sizes=SIZES)
  algorithm, group = feddyn(federation), federation.groups[0]
  x, h = algorithm.init(jax.random.key(0))
  h = jax.tree.map(lambda leaf: leaf + 0.01, h)
  model = algorithm.client_model((x, h), ({}, {}), group)
  images = preprocess(data.images[:3])
  x = algorithm.downlink((x, h), group, None)
  mean = x._replace(params=jax.tree.map(lambda a: a + 1, x.params))
  for predict, want in ((algorithm.predict, x), (predict_mean, mean)):
    got = predict(group, model, images)
    close(got, group.model.apply(want, images)[0])
  assert algorithm.views == {'mean': predict_mean}
  # Two architectures, whose clients share their models.
  assert not algorithm.personal and not algorithm.one_model


def test_unused_weights_can_be_dropped():
  """The steps are the same; h of unreached entries is zero."""
  group = Group('d1', small_maps(1), np.arange(2))
  data, results = tiny_data((5, 8)), []
  for drop in (False, True):
    federation = Federation(
        (group,),
        tiny_local(optax.sgd, 0.1, drop_unused_weights=drop),
        sizes=SIZES[:2],
    )
    algorithm = feddyn(federation, alpha=ALPHA)
    results.append(rounds_of(algorithm, federation, data, 2, 2)[-1])
  assert_trees(results[1], results[0], rtol=1e-5, atol=1e-6)
  kernel = results[1].server[1]['mid0']['Conv_0']['kernel']
  assert np.any(kernel[1, 1]) and not np.any(kernel[0])


# One round in NumPy, in the form of the authors' code.


def oracle_round(x, u, names, sizes, batches, alpha, rate, num_steps):
  """u_k is the sum of the client's changes, the linear term alpha_k u_k.

  Args:
    x: {block: {leaf: array}}, the server's model.
    u: The same for each client, {client: ...}.
    names: {client: its blocks}.
    sizes: {client: number of its examples}, of all clients.
    batches: {client: (inputs, labels)} of the cohort.
    alpha: Strength for a client of mean size.
    rate: Learning rate.
    num_steps: Steps on the whole batch.

  Returns:
    The new x and u, and the mean of the cohort's models.
  """
  u, ends = dict(u), {}
  for k, batch in batches.items():
    strength = alpha / (sizes[k] / np.mean(list(sizes.values())))
    theta = {n: dict(x[n]) for n in names[k]}
    for _ in range(num_steps):
      g = oracle_gradient(theta, names[k], *batch)
      theta = {
          n: {
              i: theta[n][i] - rate * (
                  g[n][i] + strength * (u[k][n][i] - x[n][i] + theta[n][i])
              )
              for i in theta[n]
          }
          for n in names[k]
      }  # fmt: skip
    u[k] = {
        n: {i: u[k][n][i] + theta[n][i] - x[n][i] for i in theta[n]}
        for n in names[k]
    }
    ends[k] = theta
  new, mean = {}, {}
  for n in x:
    sent = [theta[n] for theta in ends.values() if n in theta]
    owned = [u[k][n] for k in names if n in names[k]]
    mean[n] = {i: sum(t[i] for t in sent) / len(sent) for i in x[n]}
    new[n] = {
        i: mean[n][i] + sum(d[i] for d in owned) / len(owned) for i in x[n]
    }
  return new, u, mean


def dense(tree):
  """In double precision, without Flax's layer names."""
  return {
      n: {i: np.float64(a) for i, a in block['Dense_0'].items()}
      for n, block in tree.items()
  }


def scaled(tree, factor):
  return jax.tree.map(lambda leaf: factor * leaf, tree)


@pytest.mark.parametrize(
    'weights', ['uniform', pytest.param('data', marks=pytest.mark.slow)]
)
def test_one_round_in_numpy(weights):
  """Two architectures, three of four clients, three full-batch steps."""
  algorithm, federation, data, run_round = program(weights=weights)
  rng = np.random.default_rng(0)

  def noise(tree):
    return jax.tree.map(
        lambda a: rng.normal(0, 0.3, np.shape(a)).astype(np.float32), tree
    )

  state = jax.device_get(
      rounds.init_state(algorithm, federation, jax.random.key(0))
  )
  names = {
      k: list(group.model.block_names)
      for group in federation.groups
      for k in group.client_ids.tolist()
  }
  sizes = dict.fromkeys(range(4), 1)
  if weights == 'data':
    sizes = dict(enumerate(federation.sizes.tolist()))
  mean_size = np.mean(list(sizes.values()))
  strength = {k: ALPHA * mean_size / size for k, size in sizes.items()}

  def row(tree, k):
    """u_k = -h_k / alpha_k."""
    group = federation.groups[k % 2]
    own = jax.tree.map(
        lambda leaf: leaf[group.client_ids.tolist().index(k)],
        tree[group.name][1],
    )
    return scaled(dense(own), -1 / strength[k])

  # h_k, and h = -alpha mean u_k over the owners.
  state = state._replace(clients={
      name: (own, scaled(noise(h_k), 0.1))
      for name, (own, h_k) in state.clients.items()
  })  # fmt: skip
  u = {k: row(state.clients, k) for k in range(4)}
  x = noise(state.server[0].params)
  h = {
      n: {'Dense_0': {
          i: np.float32(-ALPHA * np.mean(
              [u[k][n][i] for k in names if n in names[k]], axis=0
          ))
          for i in block['Dense_0']
      }}
      for n, block in x.items()
  }  # fmt: skip
  state = state._replace(server=(Variables(x, {}), h))
  after, reports = run_round(
      jax.tree.map(jnp.asarray, state), data, jax.random.key(1),
      jax.random.key(2),
  )  # fmt: skip
  after = jax.device_get(after)
  cohort = np.concatenate([r.client_id for r in reports.values()])
  cohort = sorted(cohort[cohort < 4].tolist())
  assert len(cohort) == 3
  images = np.asarray(preprocess(data.images), np.float64)
  labels, index = np.asarray(data.labels), np.asarray(data.index)
  batches = {}
  for k in cohort:
    mine = index[k, : federation.sizes[k]]
    batches[k] = images[mine].reshape(len(mine), -1), labels[mine]
  want_x, want_u, want_mean = oracle_round(
      dense(x), u, names, sizes, batches, ALPHA, 0.1, 3
  )
  assert_trees(dense(after.server[0].params), want_x, rtol=1e-4, atol=1e-5)
  for k in range(4):
    assert_trees(row(after.clients, k), want_u[k], rtol=1e-4, atol=1e-5)
  group = federation.groups[1]
  model = algorithm.client_model(after.server, ({}, {}), group)
  mean = {n: want_mean[n] for n in group.model.block_names}
  assert_trees(dense(model.mean.params), mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('value', [np.nan, np.inf, 0.0, -0.1])
def test_wrong_options_are_refused(value):
  with pytest.raises(ValueError, match='alpha must be'):
    feddyn(tiny_federation((1,), 4, sizes=SIZES), alpha=value)


def test_unknown_weights_are_refused():
  with pytest.raises(ValueError, match="Unknown weights 'size'"):
    feddyn(tiny_federation((1,), 4, sizes=SIZES), weights='size')
