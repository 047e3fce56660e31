"""FedFomo by hand, and against NumPy over three rounds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.exchange import Delta, make_exchange
from fedjax_het.algorithms import fedfomo
from fedjax_het.algorithms.fedfomo import Client, Upload, revise
from fedjax_het.algorithms.fedfomo.mixing import (
  gains,
  mixed,
  stack,
  validation_losses,
)
from fedjax_het.algorithms.fedfomo.server import (
  draw_donors,
  make_tables,
  partners,
  take,
)
from fedjax_het.engine import rounds
from fedjax_het.engine.held_out import hold_out
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.traffic import full_bytes
from fedjax_het.engine.types import Maybe, Received, Visit
from fedjax_het.models import create
from fedjax_het.models.blocks import Variables
from tests.algorithms.test_scaffold import oracle_gradient
from tests.quadratics import TASK, quadratics
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  preprocess,
  server_step,
  tiny_data,
  tiny_federation,
  tiny_local,
)
from tests.trees import assert_trees

KEY = jax.random.key(0)
CLOSE = dict(rtol=1e-5, atol=1e-6)


# One client with L(theta) = (theta - 1)^2 / 2, and b = 0.


@jax.jit
def revise_number(base, own, donors, present, size, scale):
  federation, data = quadratics([1])
  (group,), task = federation.groups, federation.task
  task = task._replace(losses=lambda *args: scale * TASK.losses(*args))
  base, own = (
      Variables(dict(stem={}, l1=dict(w=w), head={}), {}) for w in (base, own)
  )
  received = Variables(dict(l1=Maybe(dict(w=donors), present)), {})
  after, w = revise(
      group, task, Client(0, base, own), received,
      data.client(0).replace(size=size), 'block',
  )  # fmt: skip
  return after.params['l1']['w'], w


def revised(own, donors, base=0.0, size=1, scale=1.0):
  """theta after the mix, and w of the client's own model and the donors."""
  num = len(donors)  # Padded to four: one program.
  donors = np.resize(np.float32(donors), 4)
  theta, w = revise_number(base, own, donors, np.arange(4) < num, size, scale)
  assert not np.any(w[1 + num :])
  return float(theta), np.asarray(w)[: 1 + num]


def test_the_best_model_per_distance_is_taken():
  theta, w = revised(0.0, [0.8, -0.5, 2.0])
  np.testing.assert_allclose(w, [0, 0.6, -1.25, 0], rtol=1e-6)
  assert theta == np.float32(0.8)


def test_two_that_help_are_mixed():
  theta, w = revised(0.5, [0.8])
  np.testing.assert_allclose(w, [0.75, 0.6], rtol=1e-6)
  np.testing.assert_allclose(theta, (0.75 * 0.5 + 0.6 * 0.8) / 1.35, rtol=1e-6)
  np.testing.assert_allclose(theta, 0.633333, rtol=1e-6)


@pytest.mark.parametrize('donors', [[0.8], [-0.5, 0.8, 2.5]])
def test_losses_ten_times_as_large_give_the_same_mix(donors):
  """Only w, and so P, is ten times as large."""
  theta, w = revised(0.5, donors)
  large, ten = revised(0.5, donors, scale=10.0)
  np.testing.assert_allclose(large, theta, rtol=1e-6)
  np.testing.assert_allclose(ten, 10 * w, rtol=1e-6)


def test_where_nobody_helps_nothing_moves():
  theta, w = revised(0.25, [-1.0, 3.5, 0.25], base=0.25)
  assert theta == 0.25 and w[0] == w[3] == 0 and np.all(w[1:3] < 0)


def test_without_validation_examples_the_own_model_stays():
  theta, w = revised(-3.0, [1.0], size=0)
  assert theta == -3.0 and w[1] == 0


def test_the_order_of_donors_does_not_matter():
  donors = [0.4, 1.5, -1.0, 0.9]
  np.testing.assert_allclose(
      revised(0.3, donors)[0], revised(0.3, donors[::-1])[0], rtol=1e-6
  )


def test_the_distance_is_euclidean_over_the_common_blocks():
  """Distance |(0.6, 0.8)| = 1, decrease 0.48; L1 would give 0.342857."""

  def params(present):
    leaf = lambda v: dict(x=jnp.array([[0.0], [v]]))  # noqa: E731
    return dict(
        p=Maybe(leaf(0.6), jnp.array([True, True])),
        q=Maybe(leaf(0.8), jnp.array([True, present])),
    )

  losses = jnp.array([1.0, 0.52])
  np.testing.assert_allclose(gains(losses, params(True)), [0, 0.48], rtol=1e-6)
  np.testing.assert_allclose(gains(losses, params(False)), [0, 0.8], rtol=1e-6)


@pytest.mark.parametrize('lost', [jnp.nan, jnp.inf])
def test_a_model_whose_loss_overflows_is_no_help(lost):
  x = Maybe(dict(x=jnp.array([[0.0], [1.0], [2.0]])), jnp.ones(3, bool))
  w = gains(jnp.array([1.0, lost, 0.5]), dict(p=x))
  np.testing.assert_allclose(w, [0, 0, 0.25], rtol=1e-6)
  far = jax.tree.map(lambda v: v.at[1].multiply(1e30), x.value)
  w = gains(jnp.array([1.0, 0.2, 0.5]), dict(p=x._replace(value=far)))
  np.testing.assert_allclose(w, [0, 0, 0.25], rtol=1e-6)


def two_blocks():
  """Both have block p, the receiver alone q: theta_i = (1, 1), donor p = 3."""
  return dict(
      p=Maybe(dict(w=jnp.array([0.0, 1.0, 3.0])), jnp.array([1, 1, 1], bool)),
      q=Maybe(dict(w=jnp.array([0.0, 1.0, 0.0])), jnp.array([1, 1, 0], bool)),
  )


@pytest.mark.parametrize(
    ('w', 'mix', 'want'),
    [
        ((0.0, 1.0, 3.0), 'block', (2.5, 1.0)),
        ((0.0, 1.0, 3.0), 'global', (2.5, 0.25)),
        ((0.0, -1.0, 3.0), 'block', (3.0, 0.0)),
        ((0.0, -1.0, 3.0), 'global', (3.0, 0.0)),
        ((0.0, 1.0, -1.0), 'block', (1.0, 1.0)),
        ((0.0, -1.0, -1.0), 'block', (0.0, 0.0)),
    ],
)
def test_blocks_are_mixed_over_those_who_hold_them(w, mix, want):
  got = mixed(two_blocks(), jnp.array(w), mix)
  assert (float(got['p']['w']), float(got['q']['w'])) == want
  # Only the proportions of the gains count.
  ten = mixed(two_blocks(), 10 * jnp.array(w), mix)
  assert_trees(ten, got, rtol=1e-6)


@pytest.mark.parametrize(
    'w', [(0.75, 0.6, 0.0), (0.1, -4.0, 0.7), (-1.0, 0.3, 0.0), (0, -1.0, 0)]
)
def test_coefficients_are_not_negative_and_their_sum_is_0_or_1(w):
  """Candidate n is the unit vector e_n and b is 0, so the mix is u itself."""
  values = jnp.eye(len(w) + 1)[:, 1:]
  one = Maybe(dict(w=values), jnp.ones(len(values), bool))

  def coefficients(w):
    w = jnp.concatenate([jnp.zeros(1), jnp.array(w)])
    return np.asarray(mixed(dict(p=one), w, 'block')['p']['w'])

  u, a = coefficients(w), np.maximum(w, 0)
  assert np.all(u >= 0)
  np.testing.assert_allclose(u.sum(), float(np.any(a > 0)), rtol=1e-6)
  np.testing.assert_allclose(u, a / (a.sum() or 1), rtol=1e-6)
  np.testing.assert_allclose(coefficients(w[::-1]), u[::-1], rtol=1e-6)


# Whose models a client receives.

ROW = [0.0, 0.75, 0.6, -1.0, 0.0]


@jax.jit
def draw_many(free, affinity, epsilon):
  """Four donors of client 0 for 4000 keys; the first do not depend on `num`."""
  one = functools.partial(
      draw_donors, free=free, affinity=affinity, epsilon=epsilon, num=4
  )
  return jax.vmap(one)(jax.random.split(KEY, 4000))[:, 0]


def draw(row=ROW, epsilon=0.0, num=1, absent=(), keys=1):
  """[keys, num] donors of client 0, of five clients."""
  free = ~np.eye(5, dtype=bool)
  free[:, list(absent)] = False
  affinity = jnp.zeros((5, 5)).at[0].set(jnp.array(row))
  return np.asarray(draw_many(free, affinity, epsilon))[:keys, :num]


def frequencies(donors):
  return np.bincount(donors.ravel(), minlength=5) / donors.size


def test_donors_are_those_that_helped_most():
  """Untried donors rank between good and bad ones."""
  assert np.all(draw(keys=20) == 1)
  assert draw(num=4).tolist() == [[1, 2, 4, 3]]
  assert draw(num=3, absent=[2]).tolist() == [[1, 4, 3]]


def test_places_without_a_donor_stay_empty():
  assert draw(num=3, absent=[1, 2, 4]).tolist() == [[3, 5, 5]]
  assert draw(num=2, absent=range(5)).tolist() == [[5, 5]]


@pytest.mark.parametrize('options', [
    dict(epsilon=1.0), dict(row=[0.0] * 5)
])  # fmt: skip
def test_exploration_and_ties_are_uniform(options):
  found = frequencies(draw(keys=4000, **options))
  np.testing.assert_allclose(found, [0, 0.25, 0.25, 0.25, 0.25], atol=0.03)


def test_a_place_explores_with_probability_epsilon():
  found = frequencies(draw(epsilon=0.4, keys=4000))
  np.testing.assert_allclose(found, [0, 0.7, 0.1, 0.1, 0.1], atol=0.03)
  assert all(len(set(row)) == 3 for row in draw(epsilon=0.4, num=3, keys=50))


def hand_made(federation, models, gained, num):
  """Uploads of constant models {client: value} and {client: {donor: w}}."""
  nobody, received = federation.num_clients, {}
  for group in federation.groups:
    shapes = group.model.abstract_variables
    ids = group.client_ids.tolist()
    leaf = lambda s, ids=ids: jnp.stack(  # noqa: E731
        [jnp.full(s.shape, models.get(i, np.nan)) for i in ids]
    )
    w = [list(gained.get(i, {}).items()) for i in ids]
    w = [row + [(nobody, 9.0)] * (num - len(row)) for row in w]
    received[group.name] = Received(
        (),
        Upload(
            jax.tree.map(leaf, shapes),
            jnp.array([[n for n, _ in row] for row in w], jnp.int32),
            jnp.array([[x for _, x in row] for row in w], jnp.float32),
        ),
        jnp.array([i if i in models else nobody for i in ids], jnp.int32),
    )
  return received


def test_the_server_keeps_the_last_model_and_adds_up_what_helped():
  """Padding slots, which hold NaN here, change nothing."""
  federation = tiny_federation((1, 2), norm=False)
  algorithm = fedfomo(federation, num_donors=2, epsilon=0.0)
  server, step = algorithm.init(KEY), jax.jit(
      functools.partial(server_step, algorithm)
  )
  assert not np.any(server.sent) and np.all(server.donors == 4)
  assert not np.any(server.affinity)
  first = hand_made(federation, {0: 1.0, 3: 3.0}, {0: {1: 0.75, 2: 0.6}}, 2)
  server = step(server, first)
  assert server.sent.tolist() == [True, False, False, True]
  want = np.zeros((4, 4))
  want[0, 1:3] = 0.75, 0.6
  np.testing.assert_allclose(server.affinity, want, rtol=1e-6)
  ten = hand_made(federation, {0: 1.0, 3: 3.0}, {0: {1: 7.5, 2: 6.0}}, 2)
  ten = step(algorithm.init(KEY), ten)
  np.testing.assert_allclose(ten.affinity, 10 * want, rtol=1e-6)
  # A client without a stored model is no donor, whatever its affinity.
  donors = [set(row) - {4} for row in server.donors.tolist()]
  assert donors == [{3}, {0, 3}, {0, 3}, {0}]
  second = hand_made(federation, {0: 5.0, 2: 2.0}, {0: {3: -0.5, 1: 0.25}}, 2)
  server = step(server, second)
  want[0, 1:] = 1.0, 0.6, -0.5
  np.testing.assert_allclose(server.affinity, want, rtol=1e-6)
  assert server.donors[0].tolist() == [2, 3]
  for name, rows in (('stem', [5.0, 0, 2, 3]), ('mid1', [0.0, 3.0])):
    bias = server.models.params[name]['Dense_0']['bias']
    np.testing.assert_array_equal(bias[:, 0], rows)


def test_exploration_ends():
  """epsilon falls from 1 by 0.5 a round: from round 2 on draws are greedy."""
  federation = tiny_federation((1, 2), norm=False)
  algorithm = fedfomo(federation, num_donors=1, epsilon=1.0, decay=0.5)
  server = algorithm.init(KEY)
  received = hand_made(
      federation, dict.fromkeys(range(4), 1.0), {0: {1: 0.5}}, 1
  )
  keys = jax.random.split(KEY, 500)
  first = jax.jit(jax.vmap(jax.vmap(
      lambda key, number: server_step(
          algorithm, server, received, key, number
      ).donors[0, 0], (0, None)), (None, 0)))  # fmt: skip
  share = np.mean(first(keys, jnp.arange(4)) == 1, axis=1)
  np.testing.assert_allclose(share, [1 / 3, 2 / 3, 1, 1], atol=0.08)


# Rounds of the engine.


STILL = 100  # From this round on the learning rate is 0.


def small():
  """Depths 1 and 2, four clients; full-batch SGD of rate 0.5."""
  local = dataclasses.replace(
      tiny_local(optax.sgd, epochs=3, batch_size=8),
      learning_rate=lambda t: jnp.where(t < STILL, 0.5, 0.0),
  )
  federation = tiny_federation((1, 2), norm=False, local=local)
  return federation, tiny_data((5, 8, 3, 7))


@functools.cache
def compiled(cohort_size):
  """The algorithm, its setting and a compiled round."""
  federation, data = small()
  algorithm = fedfomo(federation)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=cohort_size, backend='map'
  )
  return algorithm, federation, data, run_round


@functools.cache
def played(cohort_size=3, num=3, first=0):
  """The setting, the first state and those after each round, and reports."""
  algorithm, federation, data, run_round = compiled(cohort_size)
  state = rounds.init_state(algorithm, federation, jax.random.key(3))
  state = state._replace(round_num=jnp.int32(first))
  states, reports = [jax.device_get(state)], []
  for _ in range(num):
    state, report = run_round(state, data, jax.random.key(1), jax.random.key(2))
    states.append(jax.device_get(state))
    reports.append(report)
  return algorithm, federation, data, states, reports


def cohort_of(report, total=4):
  ids = np.concatenate([r.client_id for r in report.values()])
  return sorted(ids[ids < total].tolist())


@functools.cache
def evaluation():
  """{group name: compiled `client_model` of all its clients}."""
  algorithm, federation, data, _ = compiled(3)
  return {
      group.name: jax.jit(
          lambda server, clients, group=group: jax.lax.map(
              lambda one: algorithm.client_model(
                  algorithm.calibrate(server, data), one, group
              ),
              clients,
          )
      )
      for group in federation.groups
  }


def evaluated(federation, state):
  """{client: evaluated model}."""
  found = {}
  for group in federation.groups:
    models = evaluation()[group.name](state.server, state.clients[group.name])
    for row, k in enumerate(group.client_ids.tolist()):
      found[k] = jax.tree.map(lambda a, row=row: np.asarray(a)[row], models)
  return found


def dense(tree):
  """The tree in float64, without Flax's layer names."""
  return {
      n: {i: np.asarray(a, np.float64) for i, a in block['Dense_0'].items()}
      for n, block in tree.items()
  }


class Oracle:
  """FedFomo in NumPy; each client receives all models sent so far."""

  def __init__(self, start, names, examples, rate, num_steps):
    self.names, self.rate, self.num_steps = names, rate, num_steps
    self.base = {k: {n: start[n] for n in names[k]} for k in names}
    self.theta, self.sent, self.mixed = dict(self.base), {}, dict(self.base)
    self.p = np.zeros((len(names),) * 2)
    self.train, self.held = {}, {}
    for k, (x, y) in examples.items():
      order = sorted(range(len(y)), key=lambda i, y=y: (y[i], i))
      num = len(y) - round(0.8 * len(y))
      ends = [(j + 1) * num // len(y) for j in range(len(y))]
      held = {order[j] for j in range(len(y)) if ends[j] > j * num // len(y)}
      rest = [i for i in range(len(y)) if i not in held]
      self.held[k] = x[sorted(held)], y[sorted(held)]
      self.train[k] = x[rest], y[rest]

  def loss(self, k, weights):
    (a, y), names = self.held[k], self.names[k]
    for n in names:
      a = a @ weights[n]['kernel'] + weights[n]['bias']
      a = np.maximum(a, 0) if n != names[-1] else a
    a = a - a.max(axis=1, keepdims=True)
    log_p = a - np.log(np.exp(a).sum(axis=1, keepdims=True))
    return -np.mean(log_p[np.arange(len(y)), y])

  def mix(self, k):
    b, w, parts = self.base[k], {}, {}
    for n, model in {**self.sent, k: self.theta[k]}.items():
      part = {name: model[name] for name in b if name in model}
      move = {
          name: {i: part[name][i] - b[name][i] for i in b[name]}
          for name in part
      }
      squares = [np.sum(v**2) for d in move.values() for v in d.values()]
      distance = np.sqrt(sum(squares))
      gain = self.loss(k, b) - self.loss(k, {**b, **part})
      w[n], parts[n] = gain / distance if distance else 0.0, move
    new = {}
    for name in b:
      own = {n: max(w[n], 0) for n in w if name in parts[n]}
      total = sum(own.values())
      new[name] = {
          i: b[name][i]
          + sum(own[n] * parts[n][name][i] for n in own) / (total or 1.0)
          for i in b[name]
      }
    return new, w

  def fit(self, k):
    """Local training of client k from its base."""
    weights = {n: dict(self.base[k][n]) for n in self.names[k]}
    for _ in range(self.num_steps):
      grads = oracle_gradient(weights, self.names[k], *self.train[k])
      for n, grad in grads.items():
        for i in grad:
          weights[n][i] = weights[n][i] - self.rate * grad[i]
    return weights

  def note(self, k, w):
    """P[k, n] <- P[k, n] + w_n."""
    for n in w:
      if n != k:
        self.p[k, n] += w[n]

  def round(self, cohort):
    uploads, self.helpers = {}, {}
    for k in cohort:
      self.base[k], w = self.mix(k)
      self.helpers[k] = sum(w[n] > 0 for n in w if n != k)
      self.theta[k] = uploads[k] = self.fit(k)
      self.note(k, w)
    self.sent.update(uploads)

  def paper_round(self):
    """All clients train and upload, then all download and mix."""
    self.base = dict(self.mixed)
    for k in self.names:
      self.theta[k] = self.fit(k)
    self.sent = dict(self.theta)
    for k in self.names:
      self.mixed[k], w = self.mix(k)
      self.note(k, w)


def oracle_of(federation, data, state):
  """The oracle for the examples and the first models of a run."""
  names, start = {}, {}
  for group in federation.groups:
    for k in group.client_ids.tolist():
      names[k] = list(group.model.block_names)
    model = state.clients[group.name].base.params
    start.update(dense(jax.tree.map(lambda a: a[0], model)))
  images = np.asarray(preprocess(data.images), np.float64)
  examples = {}
  for k in names:
    index = np.asarray(data.index[k, : data.sizes[k]])
    examples[k] = (
        images[index].reshape(len(index), -1), np.asarray(data.labels)[index]
    )
  return Oracle(start, names, examples, 0.5, 3)


def test_three_rounds_in_numpy():
  """Two architectures, three of four clients a round, unequal data."""
  _, federation, data, states, reports = played()
  oracle = oracle_of(federation, data, states[0])
  for state, report in zip(states[1:], reports, strict=True):
    oracle.round(cohort_of(report))
    np.testing.assert_allclose(state.server.affinity, oracle.p, **CLOSE)
    helpers = {
        int(k): int(num)
        for group in report.values()
        for k, num in zip(group.client_id, group.metrics['helpers'])
        if k < 4
    }
    assert helpers == oracle.helpers
    now = evaluated(federation, state)
    for group in federation.groups:
      for row, k in enumerate(group.client_ids.tolist()):
        mine = jax.tree.map(
            lambda a, row=row: a[row], state.clients[group.name]
        )
        assert_trees(dense(mine.base.params), oracle.base[k], **CLOSE)
        assert_trees(dense(mine.trained.params), oracle.theta[k], **CLOSE)
        assert_trees(dense(now[k].params), oracle.mix(k)[0], **CLOSE)
  # Some helped, some did not.
  assert np.any(oracle.p > 0) and np.any(oracle.p < 0)


def test_with_all_clients_the_models_are_the_papers():
  """The oracle trains, uploads, downloads and mixes inside one round.

  What is evaluated after a round is the paper's mix of this round. Its w reach
  the server with the next upload, so P is that of the paper one round later.
  """
  _, federation, data, states, reports = played(cohort_size=4)
  oracle = oracle_of(federation, data, states[0])
  for state, report in zip(states[1:], reports, strict=True):
    assert cohort_of(report) == [0, 1, 2, 3]
    np.testing.assert_allclose(state.server.affinity, oracle.p, **CLOSE)
    oracle.paper_round()
    now = evaluated(federation, state)
    for k, want in oracle.mixed.items():
      assert_trees(dense(now[k].params), want, **CLOSE)
  assert np.any(oracle.p > 0) and np.any(oracle.p < 0)


def test_without_learning_all_models_stay_as_they_are():
  """Learning rate 0: x_0 bit for bit, P = 0, and nobody helps."""
  _, federation, _, states, reports = played(num=2, first=STILL)
  x, sent = {}, np.zeros(4, bool)
  for group in federation.groups:
    first = states[0].clients[group.name].base.params
    x.update(jax.tree.map(lambda a: a[0], first))
  for state, report in zip(states[1:], reports, strict=True):
    assert not np.any(state.server.affinity)
    sent[cohort_of(report)] = True
    assert np.array_equal(state.server.sent, sent) and np.sum(sent) > 2
    for name, group in report.items():
      assert not np.any(group.metrics['helpers'][group.client_id < 4])
      clients = state.clients[name]
      for model in (clients.base, clients.trained):
        assert_trees(model, states[0].clients[name].base, rtol=0)
    for model in evaluated(federation, state).values():
      assert_trees(model.params, {n: x[n] for n in model.params}, rtol=0)


def test_bytes_are_those_of_the_donors_common_blocks():
  """Depth 1 has 55 parameters, depth 2 has 75; ids (up: and w) are added."""
  _, _, _, _, reports = played()
  sent = set()
  for report in reports:
    cohort = cohort_of(report)
    down = {'tiny1': 0, 'tiny2': 0}
    for k in cohort:
      donors = sent - {k}
      name = 'tiny2' if k % 2 else 'tiny1'
      both = sum(k % 2 and n % 2 for n in donors)
      down[name] += 4 * (55 * len(donors) + 20 * both + 3)
    for name, group in report.items():
      num = sum(k % 2 == (name == 'tiny2') for k in cohort)
      size = 75 if name == 'tiny2' else 55
      assert rounds.round_bytes(group, 4) == (
          down[name], 4 * num * (size + 3 + 3)
      )
    sent |= set(cohort)


def test_an_option_limits_the_models_and_their_bytes():
  """By default `num_donors` is 5, but there are four clients."""
  federation, _ = small()
  visit = Visit(jnp.int32(1), jnp.int32(0), KEY)
  for options, num in (
      ({}, 3), (dict(num_donors=2), 2), (dict(num_donors=0), 0),
      (dict(aggregation='architecture'), 1), (dict(aggregation='none'), 0),
  ):  # fmt: skip
    algorithm = fedfomo(federation, **options)
    server = jax.eval_shape(algorithm.init, KEY)
    assert server.donors.shape == (4, num)
    sent = jax.eval_shape(
        lambda server, algorithm=algorithm: algorithm.downlink(
            server, federation.groups[1], visit
        ),
        server,
    )
    assert full_bytes(sent) == 4 * num * (75 + 1)


def test_inside_an_architecture_donors_are_of_the_own_group():
  federation, _ = small()
  sharing = make_exchange(federation, 'architecture').sharing
  allowed = partners(make_tables(federation, sharing), 4)
  assert [np.flatnonzero(row).tolist() for row in allowed] == [
      [2], [3], [0], [1]
  ]
  sharing = make_exchange(federation, 'layerwise').sharing
  allowed = partners(make_tables(federation, sharing), 4)
  assert np.array_equal(allowed, ~np.eye(4, dtype=bool))


def test_alone_a_client_keeps_its_training_only_if_it_helps():
  """M = 0: theta_i or b_i, bit for bit, running statistics too."""
  federation = tiny_federation((1,), 1)
  (group,), data = federation.groups, tiny_data((8,)).client(0)
  models = [group.model.init(jax.random.key(i)) for i in range(2)]
  stats = jax.tree.map(
      lambda a: a + np.float32(0.1) * np.arange(a.size), models[1].stats
  )
  models[1] = models[1]._replace(stats=stats)

  @jax.jit
  def run(base, own):
    after, w = revise(
        group, federation.task, Client(0, base, own), Variables({}, {}), data,
        'block',
    )  # fmt: skip
    return after, w[0]

  for base, own in (models, models[::-1]):
    after, w = run(base, own)
    assert_trees(after, own if w > 0 else base, rtol=0)
  assert run(*models)[1] * run(*models[::-1])[1] < 0


def test_a_candidate_is_judged_as_its_owner_judges_it():
  """Its own running statistics, in inference mode, on validation examples."""
  federation = tiny_federation((1,), 1)
  (group,), data = federation.groups, tiny_data((8,)).client(0)
  model = group.model
  one, two, three = (model.init(jax.random.key(i)) for i in range(3))
  three = three._replace(stats=jax.tree.map(lambda a: a + 0.3, three.stats))
  models = Variables(*(
      stack(b, own, {
          name: Maybe(jax.tree.map(lambda a: a[None], tree), jnp.ones(1, bool))
          for name, tree in other.items()
      }, 1)
      for b, own, other in zip(one, two, three)
  ))  # fmt: skip
  _, held = hold_out(data, 0.4)
  got = validation_losses(model, federation.task, models, held)
  batch = held.batch(jnp.arange(int(held.size)))
  want = [
      federation.task.loss(model.apply(v, batch.x)[0], batch.y)
      for v in (one, two, three)
  ]
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_losses_with_norms_over_the_batch_do_not_depend_on_padding():
  model = create('mlp', SHAPE, NUM_CLASSES, hidden=4, norm='batch_only')
  one, two = (model.init(jax.random.key(i)) for i in range(2))
  models = Variables(*(
      {
          name: Maybe(
              jax.tree.map(lambda a, b: jnp.stack([a, b]), tree, other[name]),
              jnp.ones(2, bool),
          )
          for name, tree in part.items()
      }
      for part, other in zip(one, two)
  ))  # fmt: skip
  data = tiny_data((5, 130)).client(0)
  batch = data.batch(jnp.arange(5))
  want = [
      CLASSIFICATION.loss(model.apply(v, batch.x)[0], batch.y)
      for v in (one, two)
  ]
  got = validation_losses(model, CLASSIFICATION, models, data)
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_with_equal_coefficients_a_first_mix_is_fedavgs_mean():
  """a = 1 for all senders, for each client and block, bit for bit.

  All values are multiples of 2^-8, so that no sum rounds. The order of the sums
  differs: FedAvg adds up each group first, a client begins with its own model.
  """
  _, federation, _, states, _ = played()
  exchange = make_exchange(federation, 'layerwise')
  tables = make_tables(federation, exchange.sharing)

  def short(tree):
    return jax.tree.map(lambda a: jnp.round(256 * a) / 256, tree)

  # After three rounds all have sent; x_0 is the common start.
  server, clients = states[3].server, states[3].clients
  assert np.all(server.sent)
  deltas, start, ends = {}, {}, {}
  for group in federation.groups:
    first = short(states[0].clients[group.name].base.params)
    start.update(jax.tree.map(lambda a: a[0], first))
    end = ends[group.name] = short(clients[group.name].trained.params)
    change = jax.tree.map(lambda a, b: jnp.sum(a - b, axis=0), end, first)
    deltas[group.name] = Delta(change, {}, jnp.float32(2))
  mean = exchange.average(Variables(start, {}), deltas).params
  stored = short(server.models.params)
  ones = jnp.array([0.0, 1.0, 1.0, 1.0, 1.0])
  for group in federation.groups:
    for row, k in enumerate(group.client_ids.tolist()):
      others = jnp.array([n for n in range(4) if n != k])
      own = jax.tree.map(lambda a, row=row: a[row], ends[group.name])
      base = {name: start[name] for name in own}
      models = stack(base, own, take(stored, tables.params, others), 3)
      want = {name: mean[name] for name in own}
      assert_trees(mixed(models, ones, 'block'), want, rtol=0)
      if 'mid1' in want:
        # 2 of 4 clients own it, so with one sum of a_n for all blocks its
        # change is half of FedAvg's.
        want['mid1'] = jax.tree.map(
            lambda x, y: x + (y - x) / 2, start['mid1'], want['mid1']
        )
        far, near = (t['mid1']['Dense_0']['bias'] for t in (mean, want))
        assert np.any(far != near)
      assert_trees(mixed(models, ones, 'global'), want, rtol=0)


def test_running_statistics_can_stay():
  """`local_stats`: they are neither stored by the server nor sent."""
  federation = tiny_federation((1, 2), local_stats=True)
  algorithm, group = fedfomo(federation), federation.groups[0]
  visit = Visit(jnp.int32(0), jnp.int32(0), KEY)
  server = jax.eval_shape(algorithm.init, KEY)
  sent = jax.eval_shape(lambda s: algorithm.downlink(s, group, visit), server)
  assert not server.models.stats and not sent.models.stats
  assert set(server.models.params) == {'stem', 'mid0', 'mid1', 'head'}


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(num_donors=-1), 'num_donors must be at least 0, got -1.'),
        (dict(epsilon=1.5), 'epsilon must be at least 0 and at most 1, got 1'),
        (dict(decay=-0.1), 'decay must be at least 0, got -0.1.'),
        (dict(validation=1.0), 'validation must be at least 0 and below 1, '),
        (dict(mix='leaf'), "Unknown mix 'leaf'"),
        (dict(aggregation='all'), "Unknown aggregation 'all'"),
    ],
)
def test_wrong_options_are_refused(options, message):
  with pytest.raises(ValueError) as error:
    fedfomo(tiny_federation(), **options)
  assert str(error.value).startswith(message)
