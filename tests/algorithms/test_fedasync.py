"""FedAsync: its coefficients, its mixing, and what it leaves unchanged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms import fedasync, fedprox
from fedjax_het.algorithms.fedasync import Sent, mix, staleness_factor
from fedjax_het.engine import rounds, visits
from fedjax_het.engine.local import train_model
from fedjax_het.engine.types import Received, Visit
from tests.quadratics import quadratics
from tests.tiny import server_step, tiny_data, tiny_federation, tiny_local


@pytest.mark.parametrize(
    ('kind', 'a', 'k', 'alpha_t'),
    [
        ('constant', 0.5, [0, 3, 100], [0.6, 0.6, 0.6]),
        ('polynomial', 0.5, [0, 3, 8], [0.6, 0.3, 0.2]),
        ('hinge', 10.0, [0, 4, 5, 6], [0.6, 0.6, 0.6 / 11, 0.6 / 21]),
        # Without the + 1 this would exceed the coefficient of a fresh upload.
        ('hinge', 0.5, [5], [0.4]),
    ],
)
def test_coefficients_by_hand(kind, a, k, alpha_t):
  got = 0.6 * staleness_factor(np.array(k, np.int32), kind, a, 4.0)
  np.testing.assert_allclose(got, alpha_t, rtol=1e-6)


def test_one_mix_by_hand():
  weight = 0.6 * staleness_factor(jnp.int32(3), 'polynomial', 0.5, 4.0)
  got = mix({'l': jnp.float32(1.0), 'm': 5.0}, {'l': jnp.float32(3.0)}, weight)
  np.testing.assert_allclose(got['l'], 1.6, rtol=1e-6)
  assert got['m'] == 5.0


@pytest.mark.parametrize('weight', [0.0, 0.3, 0.6, 1.0])
def test_what_comes_back_unchanged_changes_nothing(weight):
  x = {'l': jax.random.normal(jax.random.key(0), (50,))}
  got = mix(x, x, jnp.float32(weight))
  np.testing.assert_array_equal(got['l'], x['l'])


def constant_tree(tree, value):
  return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), tree)


def upload(algorithm, federation, senders):
  """A server of zeros, and `Received` of constant models {id: value}."""
  server = algorithm.init(jax.random.key(0))
  received = {}
  for group in federation.groups:
    mine = [k for k in sorted(senders) if k in group.client_ids]
    change = algorithm.downlink(
        server, group, Visit(jnp.int32(0), jnp.int32(0), jax.random.key(0))
    )
    # A padding slot, which must have no effect.
    values = [senders[k] for k in mine] + [np.nan]
    stacked = [constant_tree(change, v) for v in values]
    received[group.name] = Received(
        (),
        Sent(
            jax.tree.map(lambda *rows: jnp.stack(rows), *stacked),
            jnp.ones(len(values)),
        ),
        jnp.array([*mine, federation.num_clients], jnp.int32),
        jnp.zeros(len(values), jnp.int32),
    )
  return constant_tree(server, 0.0), received


def leaves_of(server, block):
  leaves = jax.tree.leaves(server.params[block])
  return np.unique(np.concatenate([np.ravel(leaf) for leaf in leaves]))


def test_uploads_of_a_round_are_mixed_by_client_id():
  # Clients 0, 2 of tiny1 and 1, 3 of tiny2.
  for depths in ((1, 2), (2, 1)):
    federation = tiny_federation(depths, norm=False)
    algorithm = fedasync(federation, alpha=0.5, mu=0.0)
    update = jax.jit(functools.partial(server_step, algorithm))
    for values, want in (
        ({0: 4.0, 2: 8.0}, 5.0),  # 0, 2, 5
        ({0: 8.0, 2: 4.0}, 4.0),  # 0, 4, 4
        # By client id across groups, in either order of groups: 0, 4, 4, 6.
        ({0: 8.0, 1: 4.0, 2: 8.0}, 6.0),
    ):
      server, received = upload(algorithm, federation, values)
      got = update(server, received, jax.random.key(0))
      np.testing.assert_allclose(leaves_of(got, 'stem'), want)
      np.testing.assert_allclose(leaves_of(got, 'head'), want)


def test_only_what_the_client_owns_moves():
  federation = tiny_federation((1, 2))
  algorithm = fedasync(federation, alpha=0.5)
  server, received = upload(algorithm, federation, {0: 2.0})
  server = jax.tree.map(
      lambda leaf: jax.random.uniform(jax.random.key(1), leaf.shape), server
  )
  got = server_step(algorithm, server, received, jax.random.key(0))
  for tree, old in zip(got, server, strict=True):
    for block in tree:
      pairs = zip(*map(jax.tree.leaves, (tree[block], old[block])), strict=True)
      for a, b in pairs:
        if block == 'mid1':  # tiny1 has no mid1.
          np.testing.assert_array_equal(a, b)
        else:
          np.testing.assert_allclose(a, (b + 2.0) / 2, rtol=1e-6)


def test_blocks_are_shared_as_the_option_says():
  federation = tiny_federation((1, 2), norm=False)
  for aggregation, moved in (('layerwise', 3), ('ends', 2), ('none', 0)):
    algorithm = fedasync(federation, aggregation=aggregation)
    _, received = upload(algorithm, federation, {0: 1.0})
    assert len(received['tiny1'].kept.w.params) == moved
    assert algorithm.personal == (aggregation != 'layerwise')


def test_too_stale_and_untrained_uploads_are_dropped():
  federation = tiny_federation((1,), norm=False)
  algorithm = fedasync(
      federation, alpha=0.5, staleness='constant', max_staleness=3
  )
  server, received = upload(algorithm, federation, {0: 8.0})
  (one,) = received.values()
  for staleness, weight, want in ((3, 1.0, 4.0), (4, 1.0, 0.0), (0, 0.0, 0.0)):
    changed = one._replace(
        staleness=jnp.full(2, staleness, jnp.int32),
        kept=one.kept._replace(weight=jnp.full(2, weight)),
    )
    got = server_step(
      algorithm,
        server, {'tiny1': changed}, jax.random.key(0)
    )
    np.testing.assert_array_equal(leaves_of(got, 'mid0'), want)


@pytest.mark.parametrize(('size', 'weight'), [(1, 1.0), (0, 0.0)])
def test_a_visit_without_a_step_has_no_weight(size, weight):
  federation, data = quadratics([5])
  data = data.replace(sizes=jnp.array([size]))
  (group,), algorithm = federation.groups, fedasync(federation)
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(0))
  sent = algorithm.downlink(
      algorithm.init(jax.random.key(0)), group, visit
  )
  client = algorithm.init_client(group, 0, jax.random.key(0))
  _, uplink, _ = algorithm.client_update(
      group, client, sent, data.client(0), visit
  )
  assert float(uplink.kept.weight) == weight


@pytest.mark.parametrize(
    'options,mu', [(dict(mu=1.0), 1.0), ({}, 0.005), (dict(mu=0.0), 0.0)]
)
def test_a_client_sends_two_proximal_steps_by_hand(options, mu):
  """f = (w - 5)^2 / 2, rate 0.1, x_tau = 0: w = 0.5 after the first step."""
  federation, data = quadratics([5])
  (group,), algorithm = federation.groups, fedasync(federation, **options)
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(0))
  server = algorithm.init(jax.random.key(0))
  client = algorithm.init_client(group, 0, jax.random.key(0))
  _, uplink, _ = algorithm.client_update(
      group, client, algorithm.downlink(server, group, visit), data.client(0),
      visit,
  )  # fmt: skip
  got = uplink.kept.w.params['l1']['w']
  np.testing.assert_allclose(got, 0.5 + 0.1 * (4.5 - mu * 0.5), rtol=1e-6)


def test_the_defaults_are_the_papers():
  """alpha 0.6 and (k + 1)^-0.5; hinge with a = 10, b = 4; nothing dropped."""
  federation = tiny_federation((1,), norm=False)
  for options, k, want in (
      ({}, 0, 0.6), ({}, 3, 0.3), ({}, 99, 0.06),
      (dict(staleness='hinge'), 4, 0.6), (dict(staleness='hinge'), 5, 0.6 / 11),
  ):  # fmt: skip
    algorithm = fedasync(federation, **options)
    server, received = upload(algorithm, federation, {0: 1.0})
    (one,) = received.values()
    stale = one._replace(staleness=jnp.full(2, k, jnp.int32))
    got = server_step(algorithm, server, {'tiny1': stale})
    np.testing.assert_allclose(leaves_of(got, 'mid0'), want, rtol=1e-6)


def test_running_statistics_are_mixed_alike():
  federation = tiny_federation((1,))
  algorithm = fedasync(federation, alpha=0.25)
  server, received = upload(algorithm, federation, {0: 8.0})
  got = server_step(algorithm, server, received)
  assert got.stats
  for leaf in jax.tree.leaves(got.stats):
    np.testing.assert_allclose(leaf, 2.0, rtol=1e-6)


def test_a_client_trains_as_in_fedprox_from_what_it_was_sent():
  federation = tiny_federation((1,), norm=False)
  (group,), data = federation.groups, tiny_data()
  visit = Visit(jnp.int32(2), jnp.int32(0), jax.random.key(3))
  mine, theirs = fedasync(federation, mu=0.7), fedprox(federation, mu=0.7)
  server = mine.init(jax.random.key(0))
  client = mine.init_client(group, 2, jax.random.key(0))

  @jax.jit
  def both(server):
    return [
        a.client_update(group, client, server, data.client(2), visit)[1]
        for a in (mine, theirs)
    ]

  whole, change = both(server)
  assert whole.summed == () and whole.kept.weight == 1
  for w, x, d in zip(
      jax.tree.leaves(whole.kept.w.params),
      jax.tree.leaves(server.params),
      jax.tree.leaves(change.summed.change),
      strict=True,
  ):
    np.testing.assert_allclose(w, x + d, rtol=1e-6, atol=1e-7)


def test_alpha_one_is_training_of_one_model_in_turn():
  federation = tiny_federation((1,), 1, norm=False, local=tiny_local(epochs=1))
  (group,), data = federation.groups, tiny_data((6,))
  algorithm = fedasync(federation, alpha=1.0, staleness='constant', mu=0.0)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=1, backend='map'
  )
  key = jax.random.key(5)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  model = jax.tree.map(jnp.copy, state.server)

  @jax.jit
  def train(model, round_num):
    _, up = visits.visit_pair(key, round_num, jnp.int32(0))
    return train_model(
        group.model, federation.local, model, data.client(0), up
    )[0]

  for round_num in range(3):
    state, _ = run_round(state, data, key, key)
    model = train(model, jnp.int32(round_num))
  for a, b in zip(jax.tree.leaves(state.server), jax.tree.leaves(model)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        (dict(alpha=0.0), 'alpha must be above 0 and at most 1, got 0.0.'),
        (dict(alpha=1.5), 'alpha must be above 0 and at most 1, got 1.5.'),
        (dict(staleness='poly'), "Unknown staleness 'poly'"),
        (dict(mu=-1.0), 'mu must be at least 0, got -1.0.'),
        (dict(max_staleness=-1), 'max_staleness must be at least 0, got'),
    ],
)
def test_wrong_options_are_refused(options, expected):
  with pytest.raises(ValueError) as error:
    fedasync(tiny_federation((1,)), **options)
  assert str(error.value).startswith(expected)
