"""FedAUX: the scores, the ensemble by hand, FedDF as a limit, NumPy."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms import fedaux as make
from fedjax_het.algorithms import fedavg, feddf
from fedjax_het.algorithms.fedaux import Scores, Server, weighted_logits
from fedjax_het.algorithms.fedaux.scores import (
  Scorer,
  add_noise,
  fit_scorer,
  noise_scale,
  score,
  split_public,
)
from fedjax_het.engine import rounds
from fedjax_het.engine.local import shuffled_positions
from fedjax_het.engine.traffic import full_bytes
from fedjax_het.engine.types import Received, Turn, Visit
from fedjax_het.engine.visits import client_key
from fedjax_het.models.blocks import Variables
from tests.algorithms import fedaux_numpy
from tests.algorithms.suite import Case, Clocks
from tests.algorithms.test_feddf import (
  BLOCKS,
  SIZES,
  absent,
  doubles,
  reordered,
  same,
  sharpened,
)
from tests.algorithms.test_feddf import federate as feddf_federate
from tests.tiny import bytes_of_a_visit, preprocess, tiny_data, uploads_of
from tests.trees import assert_trees

SUITE = [Case(dict(server_steps=3, server_batch_size=4))]
# Adam would divide what is left of a loss of 0, rounding errors, by their size.
CLOCKS = Clocks(dict(server_steps=2, distill_lr=0.0))

NUM_PUBLIC = 9
SHARE = 0.6
MINUS, REST = [1, 3, 5, 7], [0, 2, 4, 6, 8]
KEY = jax.random.key(1)
L2 = 0.02
OPTIONS = dict(distill_share=SHARE, l2=L2)


def federate(**kwargs):
  """Two architectures with norms, four clients (0 and 2, 1 and 3)."""
  return dataclasses.replace(
      feddf_federate(**kwargs), num_public=NUM_PUBLIC
  )


def data_of(seed=0):
  return tiny_data(SIZES, seed, public=NUM_PUBLIC)


# The ensemble.


def test_two_teachers_by_hand():
  """The third client did not take part."""
  logits = jnp.array([[[2.0, 0]], [[0, 4]], [[np.nan, 90]]])
  scores = jnp.array([[0.9], [0.3], [0.5]])
  part = jnp.array([True, True, False])
  z = weighted_logits(logits, scores, part)
  np.testing.assert_allclose(z, [[1.5, 1.0]], rtol=1e-6)
  np.testing.assert_allclose(
      jax.nn.softmax(z[0]), [0.622459, 0.377541], atol=1e-6
  )
  # The scale of the scores does not matter.
  np.testing.assert_allclose(
      weighted_logits(logits, 0.01 * scores, part), z, rtol=1e-6
  )
  # A score near 0 removes its client.
  scores = jnp.array([[0.9], [1e-8], [0.5]])
  np.testing.assert_allclose(
      weighted_logits(logits, scores, part), [[2, 0]], atol=1e-6
  )
  nobody = weighted_logits(logits, scores, jnp.zeros(3, bool))
  np.testing.assert_array_equal(nobody, [[0, 0]])


def test_each_example_has_its_own_scores():
  logits = jnp.array([[[1.0, 0], [1, 0]], [[0, 1], [0, 1]]])
  scores = jnp.array([[0.6, 0.1], [0.2, 0.3]])
  z = weighted_logits(logits, scores, jnp.ones(2, bool))
  np.testing.assert_allclose(z, [[0.75, 0.25], [0.25, 0.75]], rtol=1e-6)


# The scores.


@pytest.mark.parametrize(
    ('num', 'share', 'sizes'),
    [(9, 0.6, (4, 5)), (143, 0.8, (29, 114)), (2, 0.99, (1, 1)),
     (7, 0.01, (6, 1)), (5, 0.8, (1, 4))],
)  # fmt: skip
def test_the_public_set_is_split_in_two(num, share, sizes):
  minus, rest = split_public(num, share)
  assert (len(minus), len(rest)) == sizes
  np.testing.assert_array_equal(
      np.sort(np.concatenate([minus, rest])), np.arange(num)
  )
  assert np.all(np.diff(rest) > 0)
  # Evenly spaced.
  if len(minus) > 1:
    assert np.ptp(np.diff(minus)) <= 1


def test_the_split_of_these_tests():
  minus, rest = split_public(NUM_PUBLIC, SHARE)
  assert (minus.tolist(), rest.tolist()) == (MINUS, REST)


@pytest.fixture(scope='module')
def regressions():
  """`fit_scorer` of two clients under `vmap`, with padding in all rows."""
  return {
      intercept: jax.jit(jax.vmap(
          functools.partial(fit_scorer, intercept=intercept),
          in_axes=(0, 0, 0, None),
      ))
      for intercept in (True, False)
  }  # fmt: skip


@pytest.mark.parametrize('intercept', [True, False])
@pytest.mark.parametrize('l2', [0.01, 0.3])
def test_the_regression_is_that_of_gradient_descent(
    regressions, intercept, l2
):
  """Two clients of 12 and 5 examples against 6; padding is NaN."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2, 20, 3)) + np.array([0.5, 0, 0])
  x /= np.linalg.norm(x, axis=2).max()
  own = np.arange(20) < 14
  real = np.stack([~own | (np.arange(20) < n) for n in (12, 5)])
  x[:, own] += 0.2
  x /= np.linalg.norm(x, axis=2).max()
  got = regressions[intercept](
      np.where(real[..., None], x, np.nan).astype(np.float32),
      np.stack([own, own]), real, l2,
  )  # fmt: skip
  for i in range(2):
    w, b = fedaux_numpy.regression(
        x[i][own & real[i]], x[i][~own], l2, intercept
    )
    np.testing.assert_allclose(got.coefficients[i], w, atol=1e-4)
    np.testing.assert_allclose(got.intercept[i], b, atol=1e-4)
  assert np.any(got.intercept != 0) == intercept


def test_a_regression_for_which_whole_steps_are_too_long(regressions):
  """Newton's method without shorter steps ends in NaN here."""
  rows = np.array([
      [0.57, 0.70, 0.44], [0.60, 0.47, 0.44], [0.08, 0.07, 0.04],
      [0.07, 0.02, 0.04], [0.04, 0.10, 0.04], [0.04, 0.02, 0.04],
      [0.08, 0.03, 0.04], [0.05, 0.07, 0.04], [0.10, 0.71, 0.44],
      [0.04, 0.00, 0.04],
  ])  # fmt: skip
  l2, x = 1e-5, np.zeros((2, 20, 3), np.float32)
  x[:, :10] = rows
  own, real = np.arange(20) < 3, np.arange(20) < 10
  w, b = (
      np.float64(leaf)[0]
      for leaf in regressions[True](
          x, np.stack([own, own]), np.stack([real, real]), l2
      )
  )
  # The derivative of the objective is 0, in float64.
  slope = 1 / (1 + np.exp(-(rows @ w + b))) - own[:10]
  np.testing.assert_allclose(slope @ rows / 10 + l2 * w, 0, atol=1e-6)
  np.testing.assert_allclose(slope.mean(), 0, atol=1e-6)
  assert np.linalg.norm(w) > 50


def test_the_probability_that_an_example_is_the_clients():
  scorer = Scorer(jnp.array([2.0, -1.0]), jnp.array(0.5))
  x = jnp.array([[0.0, 0.5], [1, 0], [-400, 400]])
  want = [0.5, 1 / (1 + np.exp(-2.5)), 1e-8]
  np.testing.assert_allclose(score(scorer, x), want, rtol=1e-6)


def test_the_noise_of_the_specification():
  """n = 1000, lambda = 0.01: Delta = 0.2; epsilon 0.1, delta 1e-5."""
  np.testing.assert_allclose(
      noise_scale(1000, 0.01, 0.1, 1e-5), 9.689611, rtol=1e-6
  )
  np.testing.assert_allclose(
      noise_scale(1000, 0.01, 0.1, 1e-5),
      0.2 * np.sqrt(2 * np.log(1.25e5)) / 0.1, rtol=1e-12,
  )  # fmt: skip


def test_one_example_moves_the_regression_by_less_than_delta():
  """The sensitivity 2 / (n lambda), for the worst of many exchanges."""
  rng = np.random.default_rng(1)
  other = rng.normal(size=(4, 3))
  other /= np.linalg.norm(other, axis=1, keepdims=True)
  own = other[:1] * np.ones((5, 1))
  moved = []
  for row in (-own[0], own[0] * 0, *other):
    changed = np.concatenate([row[None], own[1:]])
    ends = [
        fedaux_numpy.regression(rows, other, 0.1, False, 2000)[0]
        for rows in (own, changed)
    ]
    moved.append(np.linalg.norm(ends[1] - ends[0]))
  bound = 2 / (9 * 0.1)
  assert 0.05 * bound < max(moved) < bound


@pytest.mark.parametrize('intercept', [True, False])
def test_coefficients_and_intercept_are_noised(intercept):
  scorer = Scorer(jnp.ones(4), jnp.float32(3.0))
  keys = jax.random.split(KEY, 4000)
  w, b = jax.jit(jax.vmap(lambda key: add_noise(key, scorer, 2.0, intercept)))(
      keys
  )
  np.testing.assert_allclose(np.mean(w, 0), 1, atol=0.15)
  np.testing.assert_allclose(np.std(w, 0), 2, rtol=0.05)
  np.testing.assert_allclose(np.mean(b), 3, atol=0.15)
  np.testing.assert_allclose(np.std(b), 2 * intercept, rtol=0.05, atol=1e-6)
  table = np.corrcoef(np.column_stack([w, b]).T[: 4 + intercept])
  np.testing.assert_allclose(table, np.eye(len(table)), atol=0.08)


# The warm-up and a round, in NumPy.


def public_rows(data):
  """Own rows and labels of each client, D^- and D_distill, in float64."""
  x = np.asarray(preprocess(data.images), np.float64).reshape(-1, 4)
  y, index = np.asarray(data.labels), np.asarray(data.index)
  own = [(x[index[k, :n]], y[index[k, :n]]) for k, n in enumerate(SIZES)]
  public = x[np.asarray(data.public)]
  return own, public[MINUS], public[REST]


def started(algorithm, federation):
  """The first state on the host, with larger parameters."""
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  return jax.device_get(state._replace(
      server=state.server._replace(model=sharpened(state.server.model))
  ))  # fmt: skip


@functools.cache
def warmed_up(**options):
  """The states before and after the warm-up, and its report."""
  federation = federate()
  algorithm = make(federation, **OPTIONS, **options)
  warm_up = rounds.make_warm_up(algorithm, federation, backend='vmap')
  first = started(algorithm, federation)
  state, report = warm_up(jax.device_put(first), data_of(3), KEY)
  return first, jax.device_get(state), jax.device_get(report)


@functools.cache
def wanted_scores():
  own, minus, rest = public_rows(data_of(3))
  first, _, _ = warmed_up()
  return np.stack([
      fedaux_numpy.scores(
          doubles(first.server.model, name), BLOCKS[name], own[k][0], minus,
          rest, L2,
      )
      for k, name in enumerate(['tiny1', 'tiny2'] * 2)
  ])  # fmt: skip


def test_the_scores_in_numpy():
  """Of clients of unequal sizes, in tables with padding, under `vmap`."""
  first, state, report = warmed_up()
  np.testing.assert_array_equal(first.server.scores, np.ones((4, 5)))
  want = wanted_scores()
  assert np.ptp(want, axis=1).min() > 0.02 and np.ptp(want) > 0.2
  np.testing.assert_allclose(state.server.scores, want, atol=1e-4)
  # Nothing else changes.
  assert same(state.server.model, first.server.model)
  for i, name in enumerate(BLOCKS):
    np.testing.assert_allclose(
        report[name].metrics['mean_score'], want[i::2].mean(1), atol=1e-4
    )


def test_the_noise_of_a_client():
  """Its regression in NumPy, and the module's noise for all its examples."""
  _, state, _ = warmed_up(epsilon=0.9, delta=0.1)
  own, minus, rest = public_rows(data_of(3))
  server = warmed_up()[0].server
  key = rounds.round_key(KEY, 2**31 - 1)
  for k, name in enumerate(['tiny1', 'tiny2'] * 2):
    net = doubles(server.model, name)
    w, b, norm = fedaux_numpy.fitted(net, BLOCKS[name], own[k][0], minus, L2)
    sigma = 2 / (SIZES[k] + 4) / L2 * np.sqrt(2 * np.log(12.5)) / 0.9
    # The key of the client's training, of which further draws fold 2.
    visit = jax.random.split(client_key(key, jnp.int32(0), k))[1]
    w, b = add_noise(
        jax.random.fold_in(visit, 2), Scorer(w, b), sigma, True
    )
    z = fedaux_numpy.features(net, BLOCKS[name], rest) / norm @ w + b
    want = 1 / (1 + np.exp(-z)) + 1e-8
    np.testing.assert_allclose(state.server.scores[k], want, atol=2e-3)


def test_one_round_in_numpy():
  """Two architectures with norms; minibatches of 3 and 2 of D_distill."""
  federation, data = federate(), data_of(3)
  algorithm = make(
      federation, server_steps=3, server_batch_size=3, distill_lr=0.05,
      **OPTIONS,
  )  # fmt: skip
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  state = jax.device_put(warmed_up()[1])
  before = warmed_up()[1].server
  state, report = run_round(state, data, KEY, jax.random.key(2))
  after = jax.device_get(state.server)
  own, _, rest = public_rows(data)
  clients = [(f'tiny{k % 2 + 1}', x, y) for k, (x, y) in enumerate(own)]
  order_key, _ = jax.random.split(client_key(KEY, jnp.int32(0), 4))
  table = types.SimpleNamespace(length=5, size=5)
  first, second = (
      np.asarray(shuffled_positions(jax.random.fold_in(order_key, i), table))
      for i in range(2)
  )
  want, losses = fedaux_numpy.one_round(
      {name: doubles(before.model, name) for name in BLOCKS}, BLOCKS, clients,
      wanted_scores(), rest, [first[:3], first[3:], second[:3]],
      lr=0.1, steps=2, distill_lr=0.05,
  )  # fmt: skip
  for name in BLOCKS:
    assert_trees(doubles(after.model, name), want[name], rtol=5e-4, atol=5e-4)
  np.testing.assert_allclose(
      report.server['server_loss'], np.mean(losses), rtol=1e-3
  )
  assert same(after.scores, before.scores)


# Limits and invariances.


@functools.cache
def uploads():
  """The federation, its data, the uploads of all clients.

  The groups are not in the order of their names, as `received` is in a jitted
  function.
  """
  federation, data = federate(), data_of()
  federation = dataclasses.replace(
      federation, groups=federation.groups[::-1]
  )
  algorithm = make(federation, **OPTIONS)
  server = jax.device_get(algorithm.init(jax.random.key(0)))
  return federation, data, uploads_of(algorithm, federation, server, data, KEY)


@functools.cache
def cohort():
  """The server's state, all uploads, and the server's update."""
  federation, data, received = uploads()
  algorithm = make(federation, server_steps=3, distill_lr=0.05, **OPTIONS)
  server = jax.device_get(algorithm.init(jax.random.key(0)))
  scores = np.random.default_rng(0).uniform(0.05, 0.95, (4, 5))
  server = server._replace(scores=np.float32(scores))
  turn = Turn(jnp.int32(0), KEY, data.of_public())
  step = jax.jit(lambda server, received: algorithm.server_update(
      server, received, turn
  ))  # fmt: skip
  return server, received, step


def test_equal_scores_are_feddf():
  """On D_distill alone, whatever their size."""
  server, received, step = cohort()
  federation, data, _ = uploads()
  other = feddf(
      dataclasses.replace(federation, num_public=5), server_steps=3,
      distill_lr=0.05,
  )  # fmt: skip
  public = data.replace(public=data.public[np.array(REST)]).of_public()
  turn = Turn(jnp.int32(0), KEY, public)
  want, metrics = jax.jit(
      lambda server, received: other.server_update(server, received, turn)
  )(server.model, received)
  for size in (1.0, 0.3):
    scores = np.full((4, 5), size, np.float32)
    got, mine = step(server._replace(scores=scores), received)
    assert_trees(got.model, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        mine['server_loss'], metrics['server_loss'], rtol=1e-5
    )
  # Unequal ones are not.
  got, mine = step(server, received)
  assert abs(mine['server_loss'] / metrics['server_loss'] - 1) > 1e-3


def test_a_client_without_certainty_is_no_teacher():
  server, received, step = cohort()
  scores = server.scores.copy()
  scores[[1, 3]] = 1e-8
  got, _ = step(server._replace(scores=scores), received)
  want, _ = step(server, absent(received, 'tiny2'))
  keys = [key for key in got.model.params if key.startswith('tiny1/')]
  assert_trees(
      [got.model.params[key] for key in keys],
      [want.model.params[key] for key in keys], rtol=1e-4, atol=1e-5,
  )  # fmt: skip


def test_scores_follow_the_clients_and_not_their_slots():
  server, received, step = cohort()
  want = step(server, received)
  got = step(server, reordered(received, np.array([1, 0])))
  assert_trees(got, want, rtol=1e-5, atol=1e-5)


def test_nobody_has_sent():
  """No model moves, and the loss is NaN."""
  server, received, step = cohort()
  after, metrics = step(server, absent(received, 'tiny1', 'tiny2'))
  assert_trees(after, server, rtol=0, atol=0)
  assert np.isnan(metrics['server_loss'])


def test_a_server_without_steps_is_fedavg():
  """Inside each architecture; the scores stay."""
  server, received, _ = cohort()
  federation, _, _ = uploads()
  algorithm = make(federation, server_steps=0, **OPTIONS)
  after, metrics = jax.jit(
      lambda *args: algorithm.server_update(*args, Turn(jnp.int32(0), KEY))
  )(server, received)
  plain = fedavg(federation, aggregation='architecture')
  summed = {
      name: r._replace(
          summed=jax.tree.map(lambda leaf: leaf.sum(0), r.kept), kept=None
      )
      for name, r in received.items()
  }
  want, _ = jax.jit(
      lambda *args: plain.server_update(*args, Turn(jnp.int32(0), KEY))
  )(server.model, summed)
  assert_trees(after.model, want, rtol=1e-6, atol=1e-7)
  assert same(after.scores, server.scores) and metrics == {}
  assert not same(after.model, server.model)


def test_scores_that_have_not_come_stay():
  """The padding slot of a group, here of client 2, is ignored."""
  federation, _, _ = uploads()
  algorithm = make(federation, **OPTIONS)
  server, _, _ = cohort()
  new = np.arange(20, dtype=np.float32).reshape(4, 5)
  received = {
      'tiny1': Received((), Scores(new[[0, 2]]), np.array([0, 4])),
      'tiny2': Received((), Scores(new[[1, 3]]), np.array([1, 3])),
  }
  after, metrics = jax.jit(
      lambda *args: algorithm.server_update(*args, Turn(jnp.int32(0), KEY))
  )(server, received)
  want = np.where(np.arange(4)[:, None] == 2, server.scores, new)
  np.testing.assert_array_equal(after.scores, want)
  assert metrics == {} and same(after.model, server.model)


def test_the_model_that_is_evaluated_is_the_students():
  federation, _, _ = uploads()
  server, _, _ = cohort()
  algorithm = make(federation, **OPTIONS)
  want = feddf(federation)
  for group in federation.groups:
    got = algorithm.client_model(server, Variables({}, {}), group)
    assert same(got, want.client_model(server.model, Variables({}, {}), group))
  assert not algorithm.personal and not algorithm.one_model


def test_what_travels():
  """In a round as much as FedAvg's models, before it a score an example."""
  federation, data, _ = uploads()
  algorithm, group = make(federation, **OPTIONS), federation.groups[1]
  mine, other = (
      bytes_of_a_visit(method, group, data)
      for method in (algorithm, fedavg(federation))
  )
  assert mine == other
  _, uplink, metrics = jax.eval_shape(warm_up_of(algorithm, group, data), KEY)
  assert full_bytes(uplink) == 4 * 5
  assert set(metrics) == {'mean_score'}


def warm_up_of(algorithm, group, data):
  def warm_up(key):
    visit = Visit(jnp.int32(1), jnp.int32(0), key)
    sent = algorithm.downlink(algorithm.init(key), group, visit)
    own = algorithm.init_client(group, 1, key)
    return algorithm.warm_up(group, own, sent, data.client(1), visit)

  return warm_up


def test_public_examples_are_not_augmented():
  """A preprocessing function that augments gets no key."""

  def augments(images, key=None):
    assert key is None
    return preprocess(images)

  federation, data, received = uploads()
  server, _, _ = cohort()
  algorithm = make(federation, **OPTIONS)
  data = data.replace(preprocess=augments)
  turn = Turn(jnp.int32(0), KEY, data.of_public())
  jax.eval_shape(
      lambda *args: algorithm.server_update(*args, turn), server, received
  )
  jax.eval_shape(warm_up_of(algorithm, federation.groups[0], data), KEY)


def test_the_states_of_the_clients_and_the_server():
  """The optimiser of a client may be kept, as in FedDF."""
  federation, _, _ = uploads()
  server, _, _ = cohort()
  assert isinstance(server, Server)
  local = dataclasses.replace(federation.local, keep_optimizer=True)
  kept = dataclasses.replace(federation, local=local)
  algorithm, data = make(kept, **OPTIONS), data_of()
  client, _, _ = jax.eval_shape(
      warm_up_of(algorithm, kept.groups[0], data), KEY
  )
  want = jax.eval_shape(lambda: algorithm.init_client(kept.groups[0], 1, KEY))
  assert jax.tree.map(jnp.shape, client) == jax.tree.map(jnp.shape, want)


# Refusals.


@pytest.mark.parametrize(
    'options,message',
    [
        (dict(distill_share=0.0), 'distill_share must be above 0'),
        (dict(distill_share=1.0), 'distill_share must be .*below 1'),
        (dict(l2=0.0), 'l2 must be above 0'),
        (dict(epsilon=0.0), 'epsilon must be above 0'),
        (dict(epsilon=1.0), 'epsilon must be .*below 1'),
        (dict(delta=1.0), 'delta must be .*below 1'),
        (dict(server_steps=-1), 'server_steps must be at least 0'),
        (dict(server_batch_size=0), 'server_batch_size must be at least 1'),
        (dict(distill_lr=-0.1), 'distill_lr must be at least 0'),
        (dict(weights='size'), "^Unknown weights 'size'"),
    ],
)
def test_bad_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    make(federate(), **options)


def test_federations_that_do_not_fit_are_refused():
  for num, message in ((0, 'fedaux needs a public set'), (1, 'two public ex')):
    with pytest.raises(ValueError, match=message):
      make(dataclasses.replace(federate(), num_public=num))
  with pytest.raises(ValueError, match='fedaux does not keep running stati'):
    make(federate(local_stats=True))
