"""FedAT: its weights by hand, and rounds of tiers beside plain Python."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms import fedat, fedavg
from fedjax_het.algorithms.fedat import Ends, combine, tier_weights
from fedjax_het.engine import asynchronous, rounds
from fedjax_het.engine.clock import Device, Fleet
from fedjax_het.engine.events import lay_out, plan_rounds
from fedjax_het.engine.tiers import tier_stream
from fedjax_het.engine.types import Received
from tests.quadratics import RATE, play, quadratics
from tests.tiny import server_step, tiny_federation

MINIMA = [2, 6, 8, 5, 1, 9]
SIZES = [1, 3, 2, 2, 5, 1]
# Three tiers of two clients; they share one or both of two parameters.
OWNED = ['l1', 'l1', 'l1 l2', 'l1 l2', 'l2', 'l2']
TIERS = [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ('counts', 'want'),
    [
        ([10, 5, 1], [1 / 16, 5 / 16, 10 / 16]),
        # By number of rounds, in whatever order the groups are.
        ([5, 1, 10], [5 / 16, 10 / 16, 1 / 16]),
        ([6, 2], [2 / 8, 6 / 8]),
        ([3, 3, 3], [1 / 3, 1 / 3, 1 / 3]),
        # Of equal tiers the first one counts as the faster.
        ([3, 1, 3], [1 / 7, 3 / 7, 3 / 7]),
        ([4, 0, 0], [0, 0, 1]),
        ([7], [1]),
        ([0, 0], [0, 0]),
    ],
)
def test_weights_by_hand(counts, want):
  got = tier_weights(jnp.array(counts, jnp.int32))
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_three_models_are_combined_by_hand():
  models = [{'a': 1.0, 'b': 4.0}, {'a': 3.0}, {'a': 11.0, 'b': 8.0}]
  got = combine({'a': 9.0, 'b': 9.0}, models, jnp.array([0.5, 0.3, 0.2]))
  np.testing.assert_allclose(got['a'], 0.5 + 0.9 + 2.2, rtol=1e-6)
  np.testing.assert_allclose(got['b'], (2 + 1.6) / 0.7, rtol=1e-6)
  # Where all weights are 0, the old one stays.
  got = combine({'a': 9.0, 'b': 9.0}, models, jnp.array([0.0, 1.0, 0.0]))
  assert got == {'a': 3.0, 'b': 9.0}


def counts_of(server):
  """T_m of each tier."""
  return [int(tier.count) for tier in server.tiers.values()]


def visit(x, a, num_steps, mu):
  """Local steps on (w - a)^2 / 2 + (mu / 2) (w - x)^2 from x."""
  w = x
  for _ in range(num_steps):
    w = w - RATE * ((w - a) + mu * (w - x))
  return w


def by_hand(seconds, num_rounds, mu, weighted):
  """Yields x and the rounds of each tier, after each round of a tier.

  Args:
    seconds: Of a round of each tier.
    num_rounds: Rounds of all tiers together.
    mu: lambda.
    weighted: Whether clients weigh by their numbers of examples.
  """
  keys = ('l1', 'l2')
  x = dict.fromkeys(keys, 0.0)
  own = [[k for k in keys if k in OWNED[tier[0]].split()] for tier in TIERS]
  models = [dict.fromkeys(mine, 0.0) for mine in own]
  starts, counts = [dict(x) for _ in TIERS], [0] * len(TIERS)
  queue = [(s, number) for number, s in enumerate(seconds)]
  for _ in range(num_rounds):
    now, m = heapq.heappop(queue)
    n = [SIZES[k] if weighted else 1 for k in TIERS[m]]
    for key in own[m]:
      ends = [visit(starts[m][key], MINIMA[k], 2, mu) for k in TIERS[m]]
      models[m][key] = np.dot(n, ends) / sum(n)
    counts[m] += 1
    # The tier with the r-th largest count has the r-th smallest one's weight.
    ranks = sorted(range(len(TIERS)), key=lambda t: (-counts[t], t))
    weight = {t: sorted(counts)[r] for r, t in enumerate(ranks)}
    for key in keys:
      holders = [t for t in range(len(TIERS)) if key in own[t]]
      total = sum(weight[t] for t in holders)
      if total:
        x[key] = sum(weight[t] * models[t][key] for t in holders) / total
    starts[m] = dict(x)
    heapq.heappush(queue, (now + seconds[m], m))
    yield dict(x), list(counts)


@pytest.mark.parametrize(
    ('options', 'mu', 'weighted'),
    [
        ({}, 0.4, True),
        (dict(mu=0.0, weights='uniform'), 0.0, False),
    ],
)
def test_rounds_of_tiers_by_hand(options, mu, weighted):
  """Tiers of 1, 2.6 and 4.7 s in the compiled asynchronous round."""
  federation, data = quadratics(MINIMA, sizes=SIZES, owned=OWNED)
  assert [g.client_ids.tolist() for g in federation.groups] == TIERS
  algorithm = fedat(federation, **options)
  # A tier waits for the slower of its two clients.
  seconds = [1, 0.3, 2.6, 2.6, 1.1, 4.7]
  devices = [Device(examples_per_second=1 / s, latency=0.0) for s in seconds]
  fleet = Fleet(devices, [1] * 6, [0] * 6, [0] * 6)
  run_round = asynchronous.make_async_round(
      algorithm, federation, cohort_size=2, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  state = asynchronous.init_async_state(algorithm, federation, state, data)
  plans = plan_rounds(tier_stream(fleet, TIERS, 2), 2)
  wanted = by_hand([1, 2.6, 4.7], 16, mu, weighted)
  for (x, counts), plan in zip(wanted, plans, strict=False):
    events = lay_out(plan, federation)
    state, _ = run_round(state, data, jax.random.key(1), events)
    got = {n: float(t['w']) for n, t in state.server.x.params.items() if t}
    assert got == pytest.approx(x, rel=1e-5)
    assert counts_of(state.server) == counts
  for group in federation.groups:  # The common model is evaluated.
    model = algorithm.client_model(
        state.server,
        jax.tree.map(lambda leaf: leaf[0], state.clients[group.name]),
        group,
    )
    tested = {n: float(t['w']) for n, t in model.params.items() if t}
    assert tested == {n: got[n] for n in tested} and tested
  assert counts == [10, 4, 2] and min(abs(v) for v in got.values()) > 0.3


def test_one_tier_is_fedavg():
  federation, data = quadratics([2, 6, 9], sizes=[1, 3, 2])
  cohorts = [(0, 1, 2), (1,), (0, 2)]
  found = [
      [
          getattr(server, 'x', server).params['l1']['w']
          for server, _ in play(algorithm, federation, data, cohorts)
      ]
      for algorithm in (
          fedat(federation, mu=0.0), fedavg(federation, weights='data')
      )
  ]  # fmt: skip
  np.testing.assert_allclose(*found, rtol=1e-6)


def test_synchronous_tiers_may_miss_a_round():
  """x_m is the mean of the w_k, also if x has moved since the tier's last."""
  federation, data = quadratics([2, 6], owned=['l1', 'l1 l2'])
  algorithm = fedat(federation, mu=0.0)
  cohorts = [(0, 1), (0,), (0,), (1,)]
  x, models, counts, wanted = 0.0, [0.0, 0.0], [0, 0], []
  for cohort in cohorts:
    for k in cohort:
      models[k] = visit(x, (2, 6)[k], 2, 0.0)
      counts[k] += 1
    # The first tier never has fewer rounds: it weighs by the second's.
    x = (counts[1] * models[0] + counts[0] * models[1]) / sum(counts)
    wanted.append(x)
  servers = [s for s, _ in play(algorithm, federation, data, cohorts)]
  found = [server.x.params['l1']['w'] for server in servers]
  np.testing.assert_allclose(found, wanted, rtol=1e-6)
  assert counts_of(servers[-1]) == counts == [3, 2]


def test_synchronous_tiers_count_alike():
  """x is the plain mean of the tiers' means, whatever their sizes."""
  federation, data = quadratics(
      [2, 6, 3], sizes=[1, 3, 2], owned=['l1', 'l1', 'l1 l2']
  )
  algorithm = fedat(federation, mu=0.0)
  (server, _), = play(algorithm, federation, data, [(0, 1, 2)])  # fmt: skip
  ends = [visit(0.0, a, 2, 0.0) for a in (2, 6, 3)]
  means = [(ends[0] + 3 * ends[1]) / 4, ends[2]]
  x = server.x.params
  np.testing.assert_allclose(x['l1']['w'], np.mean(means), rtol=1e-6)
  np.testing.assert_allclose(x['l2']['w'], ends[2], rtol=1e-6)
  assert counts_of(server) == [1, 1]


def uploads(algorithm, federation, values, ends=True):
  """`Received` of models of one value, from {group: (value, weight)}."""
  server = algorithm.init(jax.random.key(0))
  received = {}
  for group in federation.groups:
    value, weight = values.get(group.name, (0, 0))
    model = jax.tree.map(
        lambda leaf, total=value * weight: jnp.full_like(leaf, total),
        server.tiers[group.name].model,
    )
    summed = Ends(model, jnp.float32(weight))
    received[group.name] = Received(
        summed, None, None, round_ends=jnp.array(ends)
    )
  return received


def values_in(tree):
  """The distinct values of all leaves."""
  return set(np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]))


def test_a_tier_waits_for_its_last_upload():
  federation = tiny_federation((1, 2))
  algorithm = fedat(federation)
  first = algorithm.init(jax.random.key(0))
  one = uploads(algorithm, federation, {'tiny1': (2.0, 3.0)}, ends=False)
  waiting = server_step(algorithm, first, one)
  jax.tree.map(np.testing.assert_array_equal, waiting.x, first.x)
  old, tier = (server.tiers['tiny1'] for server in (first, waiting))
  jax.tree.map(np.testing.assert_array_equal, tier.model, old.model)
  assert counts_of(waiting) == [0, 0]
  last = uploads(algorithm, federation, {'tiny1': (6.0, 1.0)})
  done = server_step(algorithm, waiting, last)
  # (3 * 2 + 1 * 6) / 4.
  tier = done.tiers['tiny1']
  assert values_in(tier.model) == {3.0}
  assert counts_of(done) == [1, 0]
  assert not any(map(np.any, jax.tree.leaves(tier.pending)))
  # As printed, the tier without a round has all the weight: its first model.
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
      done.x, first.x,
  )  # fmt: skip
  # Both have a round: 3 and 5 weigh alike; what one tier alone has is its own.
  both = server_step(
      algorithm, done, uploads(algorithm, federation, {'tiny2': (5.0, 1.0)})
  )
  for block, value in (('stem', 4.0), ('mid1', 5.0)):
    assert values_in((both.x.params[block], both.x.stats[block])) == {value}
  assert counts_of(both) == [1, 1]


def test_a_round_without_a_step_does_not_count():
  federation = tiny_federation((1, 2), norm=False)
  algorithm = fedat(federation)
  first = algorithm.init(jax.random.key(0))
  got = server_step(algorithm, first, uploads(algorithm, federation, {}))
  jax.tree.map(np.testing.assert_array_equal, got, first)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(mu=-1.0), 'mu must be at least 0, got -1.0'),
        (dict(weights='size'), "^Unknown weights 'size'"),
        (dict(aggregation='all'), "^Unknown aggregation 'all'"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, message):
  with pytest.raises(ValueError, match=message):
    fedat(tiny_federation((1,), norm=False), **options)
