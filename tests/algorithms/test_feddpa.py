"""FedDPA by hand, against NumPy over a round, and beside FedAvg and Private."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.personal_entries import (
  blend,
  fit_masked,
  fraction,
)
from fedjax_het.algorithms import fedavg, feddpa, private
from fedjax_het.algorithms.feddpa import distance, penalised, released
from fedjax_het.algorithms.feddpa.fisher import fisher, personal_entries
from fedjax_het.engine import rounds
from fedjax_het.engine.evaluate import make_evaluate
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.types import Visit
from fedjax_het.models import create
from tests.algorithms.test_scaffold import oracle_gradient
from tests.quadratics import play, quadratics
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  preprocess,
  tiny_data,
  tiny_federation,
  tiny_local,
)
from tests.trees import assert_trees

KEY = jax.random.key(0)
CLOSE = dict(rtol=1e-5, atol=1e-6)


def test_fisher_takes_each_example_by_itself():
  """Gradients h (w - a) = 1, -2: mean of squares 2.5, square of mean 0.25."""
  federation, data = quadratics([1], sizes=2, owned='l1 l2')
  model = federation.groups[0].model
  data = data.replace(labels=jnp.array([-1, 2])).client(0)
  start = model.init(KEY)
  information = functools.partial(
      fisher, model, federation.task, federation.local, data=data
  )
  got = information(start.params)
  np.testing.assert_allclose([got['l1']['w'], got['l2']['w']], 2.5)
  got = information({**start.params, 'l1': dict(w=jnp.float32(2.0))})
  np.testing.assert_allclose([got['l1']['w'], got['l2']['w']], [4.5, 2.5])


def test_fisher_without_running_statistics_is_that_with_those_of_the_client():
  """An example alone would be normalised to 0."""
  data, local = tiny_data().client(1), tiny_local(batch_size=8)
  params, found = None, {}
  for norm in ('batch', 'batch_only'):
    model = create('mlp', SHAPE, NUM_CLASSES, hidden=4, norm=norm)
    params = params or model.init(KEY).params
    found[norm] = fisher(model, CLASSIFICATION, local, params, data)
  assert_trees(found['batch_only'], found['batch'], **CLOSE)
  assert all(np.any(leaf) for leaf in jax.tree.leaves(found['batch_only']))


def test_personal_entries_by_hand():
  information = dict(
      a=jnp.array([4.0, 1.0, 0.0, 2.0]), b=jnp.full((2, 2), 3.0),
      c=jnp.array([[5.0]]), d=jnp.array([0.0, 0.4, 1.0]),
  )  # fmt: skip
  for scale in (1.0, 1e-20):
    scaled = jax.tree.map(lambda f, scale=scale: scale * f, information)
    mask = personal_entries(scaled, 0.4)
    assert mask['a'].tolist() == [True, False, False, True]
    assert not np.any(mask['b']) and not np.any(mask['c'])
  # An entry at tau itself is shared.
  assert personal_entries(information, 0.4)['d'].tolist() == [
      False, False, True
  ]
  assert not np.any(jax.tree.leaves(personal_entries(information, 1.0)['a']))
  assert np.all(personal_entries(information, -1.0)['b'])
  mask = personal_entries(information, 0.4)['a']
  start = blend(mask, jnp.full(4, 9.0), jnp.ones(4))
  assert start.tolist() == [9, 1, 1, 9]
  assert float(fraction(dict(a=mask, b=jnp.ones(4, bool)))) == 0.75


def test_penalties_by_hand():
  """Differences (3, 4) and (0, 1): R = 6."""
  x = dict(a=jnp.zeros(2), b=jnp.zeros((1, 2)))
  w = dict(a=jnp.array([3.0, 4.0]), b=jnp.array([[0.0, 1.0]]))
  assert float(distance(w, x)) == 6.0
  none = jax.tree.map(jnp.zeros_like, w)

  def gradient(strength, aim, w):
    got = penalised(strength, aim, x)(none, w)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(got)])

  towards = np.array([0.6, 0.8, 0.0, 1.0])
  for strength, aim, want in (
      (0.1, 0.0, 0.05 * towards),
      (0.05, 0.5, 0.025 * towards),
      (0.05, 7.0, -0.025 * towards),
      (0.0, 0.5, 0 * towards),
  ):
    np.testing.assert_allclose(gradient(strength, aim, w), want, rtol=1e-6)
  # At x itself the gradient is zero, and not NaN.
  assert not np.any(gradient(0.1, 0.0, x)) and float(distance(x, x)) == 0.0
  assert not np.any(gradient(0.05, 0.5, x))
  # The code has gradients only. R is homogeneous, so (w - x) . grad R = R, and
  # lambda / 2 |R - C| is 0.3, 0.1375 and, at x, 0.0125.
  difference = np.array([3.0, 4.0, 0.0, 1.0])
  for strength, aim, want in ((0.1, 0.0, 0.3), (0.05, 0.5, 0.1375 + 0.0125)):
    got = gradient(strength, aim, w) @ difference
    np.testing.assert_allclose(got, want, rtol=1e-6)
  ones = jax.tree.map(jnp.ones_like, w)
  got = penalised(0.1, 0.0, x)(ones, w)
  np.testing.assert_allclose(got['a'], 1 + 0.05 * towards[:2], rtol=1e-6)


def test_clipping_and_noise():
  update = dict(a=jnp.array([3.0]), b=jnp.array([[4.0]]))
  got = released(update, 0.5, 0.0, 4, KEY)
  np.testing.assert_allclose([got['a'][0], got['b'][0, 0]], [0.3, 0.4], 1e-6)
  small = dict(a=jnp.array([0.1, 0.2]), b=jnp.array([[0.2]]))
  assert_trees(released(small, 0.5, 0.0, 4, KEY), small, rtol=0)
  # sigma S / sqrt(N) = 2 * 0.5 / 10, independent in all entries.
  many = dict(a=jnp.zeros((200, 500)), b=jnp.zeros((200, 500)))
  noise = released(many, 0.5, 2.0, 100, KEY)
  for leaf in jax.tree.leaves(noise):
    np.testing.assert_allclose(np.std(leaf), 0.1, rtol=0.01)
  assert abs(np.corrcoef(noise['a'].ravel(), noise['b'].ravel())[0, 1]) < 0.01
  # U + 0.1 z with the numbers z of the key.
  z = optax.tree.random_like(KEY, small)
  want = jax.tree.map(lambda u, z: u + 0.1 * z, small, z)
  assert_trees(released(small, 0.5, 2.0, 100, KEY), want, rtol=1e-6)


def adamw(lr):
  return optax.adamw(lr, weight_decay=0.1)


def momentum(lr):
  return optax.sgd(lr, momentum=0.9)


@pytest.mark.parametrize('tx', [adamw, momentum])
def test_a_phase_moves_the_entries_of_its_mask_alone(tx):
  federation = tiny_federation((1,), 1, local=tiny_local(tx, 0.1))
  (group,), data = federation.groups, tiny_data((8,)).client(0)
  start = group.model.init(KEY)
  mask = jax.tree.map(
      lambda a: jnp.asarray(np.arange(a.size) % 2 > 0).reshape(a.shape),
      start.params,
  )
  visit = Visit(jnp.int32(0), jnp.int32(0), KEY)
  fit = jax.jit(
      lambda mask: fit_masked(
          group.model, federation.local, start, data, visit, mask
      )
  )
  end, state, _, num = fit(mask)
  assert int(num) == 4
  moved = jax.tree.map(lambda a, b: a != b, start.params, end.params)
  for m, changed in zip(jax.tree.leaves(mask), jax.tree.leaves(moved)):
    assert not np.any(changed & ~m) and np.any(changed & m)
  # Moments of the other entries stay 0.
  alike = jax.tree.structure(mask)
  for moments in jax.tree.leaves(
      state, is_leaf=lambda node: jax.tree.structure(node) == alike
  ):
    if jax.tree.structure(moments) == alike:
      others = jax.tree.map(lambda m, v: ~m & (v != 0), mask, moments)
      assert not any(np.any(leaf) for leaf in jax.tree.leaves(others))
  # With an empty mask there is no step: statistics stay, too.
  nothing = jax.tree.map(jnp.zeros_like, mask)
  end, _, metrics, num = fit(nothing)
  assert int(num) == 0 and float(metrics['train_loss']) == 0
  assert_trees(end, start, rtol=0)


@pytest.mark.parametrize(
    ('options', 'first', 'second'),
    [
        (dict(threshold=-1.0, lambda1=0.0), 1.9, 3.439),
        (dict(threshold=-1.0, lambda1=0.2), 1.89, 3.4119),
        (dict(threshold=1.0, lambda2=0.0), 1.9, 1.9),
        (dict(threshold=1.0, lambda2=0.2), 1.89, 1.89),
        (dict(threshold=1.0, lambda2=0.2, target=2.0), 1.91, 1.91),
    ],
)
def test_the_penalties_change_both_limits_by_hand(options, first, second):
  """Minima 10 and -10, two steps of rate 0.1 from x = 0, which x stays.

  Without a penalty, all entries personal is local training from the stored w,
  and none is FedAvg. lambda / 2 = 0.1 pulls the second step of 0.9 to x by
  0.01, or pushes it away while the distance of 1 is below C = 2. The first step
  of the first visit has no penalty, since w = x.
  """
  federation, data = quadratics([10, 10])
  data = data.replace(labels=jnp.array([10, -10]))
  algorithm = feddpa(federation, **options)
  played = play(algorithm, federation, data, [(0, 1)] * 2)
  for (server, clients), want in zip(played, (first, second), strict=True):
    got = [clients[k].params['l1']['w'] for k in (0, 1)]
    np.testing.assert_allclose(got, [want, -want], rtol=1e-6)
    np.testing.assert_allclose(server.params['l1']['w'], 0.0, atol=1e-6)


def test_personal_entries_are_averaged_as_well():
  """All entries personal: a client alone ends where the server does."""
  federation, data = quadratics([10, 6])
  algorithm = feddpa(federation, threshold=-1.0, lambda1=0.0)
  for number, (server, clients) in enumerate(
      play(algorithm, federation, data, [(0,)] * 2), 1
  ):
    w = clients[0].params['l1']['w']
    np.testing.assert_allclose(w, 10 * (1 - 0.9 ** (2 * number)), rtol=1e-5)
    np.testing.assert_allclose(server.params['l1']['w'], w, rtol=1e-5)


# Rounds of the engine.


def small(norm=False, batch_size=8, **fields):
  """Depths 1 and 2, four clients; SGD, by default with full batches."""
  federation = tiny_federation(
      (1, 2), norm=norm, local=tiny_local(optax.sgd, 0.1, 3, batch_size),
      **fields,
  )  # fmt: skip
  return federation, tiny_data((5, 8, 3, 7))


@functools.cache
def played(method, norm=False, num=2, cohort_size=4, batch_size=8, **options):
  """The states before the first round and after each, and the last report."""
  federation, data = small(norm, batch_size)
  algorithm = method(federation, **options)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=cohort_size, backend='map'
  )
  state = rounds.init_state(algorithm, federation, KEY)
  states = [jax.device_get(state)]
  for _ in range(num):
    state, report = run_round(state, data, jax.random.key(1), jax.random.key(2))
    states.append(jax.device_get(state))
  return states, report


def test_without_personal_entries_it_is_fedavg_bit_for_bit():
  """tau = 1, lambda2 = 0: parameters and statistics, in minibatches."""
  setting = dict(norm=True, batch_size=4, cohort_size=3)
  got, report = played(feddpa, threshold=1.0, lambda2=0.0, **setting)
  want, plain = played(fedavg, **setting)
  for a, b in zip(got, want):
    assert_trees(a.server, b.server, rtol=0)
  for name, group in report.items():
    assert not np.any(group.metrics['personal_share'])
    np.testing.assert_allclose(
        group.metrics['train_loss'], plain[name].metrics['train_loss'], **CLOSE
    )
    # As many bytes, too.
    assert rounds.round_bytes(group, 4) == rounds.round_bytes(plain[name], 4)


def private_in_this_order(federation):
  """Private, with the key of the personal phase in place of the visit's."""
  algorithm = private(federation)

  def client_update(group, client, sent, data, visit):
    visit = visit._replace(key=jax.random.fold_in(visit.key, 1))
    return algorithm.client_update(group, client, sent, data, visit)

  return algorithm._replace(client_update=client_update)


def test_with_personal_entries_only_it_is_local_training_bit_for_bit():
  """tau = -1, lambda1 = 0, in minibatches: the server's model is not used."""
  got, report = played(feddpa, threshold=-1.0, lambda1=0.0, batch_size=4)
  want, _ = played(private_in_this_order, batch_size=4)
  for a, b in zip(got, want):
    for name in a.clients:
      assert_trees(a.clients[name], b.clients[name][0], rtol=0)
  for group in report.values():
    np.testing.assert_allclose(group.metrics['personal_share'], 1.0, rtol=1e-6)


def perturbed(state, seed=0):
  """The server and the clients of a state with noise of deviation 0.3."""
  rng = np.random.default_rng(seed)

  def noise(tree):
    return jax.tree.map(
        lambda a: (a + rng.normal(0, 0.3, np.shape(a))).astype(np.float32), tree
    )

  state = jax.device_get(state)
  return state._replace(
      server=noise(state.server), clients=noise(state.clients)
  )


def test_without_a_learning_rate_only_personal_entries_are_sent():
  """Nothing moves while w_k = x. Later w = M w_k + (1 - M) x, U = w - x."""
  federation = tiny_federation(
      (1, 2), norm=False, local=tiny_local(optax.sgd, 0.0)
  )
  algorithm = feddpa(federation)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )

  def run(state):
    state = jax.tree.map(jnp.asarray, state)
    data = tiny_data((5, 8, 3, 7))
    state, report = run_round(state, data, jax.random.key(1), jax.random.key(2))
    return jax.device_get(state), report

  before = jax.device_get(rounds.init_state(algorithm, federation, KEY))
  after, _ = run(before)
  assert_trees(after.server, before.server, rtol=0)
  assert_trees(after.clients, before.clients, rtol=0)

  before = perturbed(after)
  after, report = run(before)
  changes = {}  # {(block, leaf): U of each owner}
  for name, old in before.clients.items():
    personal, number = 0, 0
    for block, leaves in old.params.items():
      for leaf, w_k in leaves['Dense_0'].items():
        x = before.server.params[block]['Dense_0'][leaf]
        w = after.clients[name].params[block]['Dense_0'][leaf]
        mask = w == w_k
        np.testing.assert_array_equal(w, np.where(mask, w_k, x))
        changes.setdefault((block, leaf), []).extend(mask * (w_k - x))
        personal, number = personal + mask.sum(), number + mask.size
    assert 0.05 < personal / number < 0.95
    share = report[name].metrics['personal_share'].mean()
    np.testing.assert_allclose(personal / number, share, rtol=1e-6)
  for (block, leaf), found in changes.items():
    np.testing.assert_allclose(
        after.server.params[block]['Dense_0'][leaf],
        before.server.params[block]['Dense_0'][leaf] + np.mean(found, axis=0),
        rtol=1e-6, atol=1e-6,
    )  # fmt: skip


def test_a_visit_moves_the_running_statistics():
  states, _ = played(feddpa, norm=True)
  for client in states[1].clients.values():
    for leaf, old in zip(
        jax.tree.leaves(client.stats),
        jax.tree.leaves(states[0].clients['tiny1'].stats) * 2,
    ):
      assert np.all(np.any(leaf != np.ravel(old)[0], axis=-1))


def test_noise_is_sent_and_not_kept():
  loud, _ = played(feddpa, num=1, clip=1e3, sigma=1e-3)
  plain, _ = played(feddpa, num=1, clip=1e3)
  assert_trees(loud[1].clients, plain[1].clients, rtol=0)
  gaps = jax.tree.map(lambda a, b: a - b, loud[1].server, plain[1].server)
  noise = np.concatenate([np.ravel(g) for g in jax.tree.leaves(gaps.params)])
  # S sigma / sqrt(N) = 0.5, averaged over 4 clients (mid1: over 2): 55 numbers
  # of deviation 0.25 and 20 of 0.354.
  assert len(noise) == 75
  want = np.sqrt((55 * 0.25**2 + 20 * 0.125) / 75)
  np.testing.assert_allclose(np.std(noise), want, rtol=0.2)


def test_own_models_and_the_servers_are_evaluated():
  federation, data = small(norm=True)
  algorithm = feddpa(federation)
  states, _ = played(feddpa, norm=True)
  state = jax.tree.map(jnp.asarray, states[-1])
  scores = make_evaluate(
      algorithm, federation, np.asarray(data.images), np.asarray(data.labels),
      preprocess,
  )(state)  # fmt: skip
  x = preprocess(data.images)
  for group in federation.groups:
    for row, k in enumerate(scores[group.name].client_id.tolist()):
      mine = jax.tree.map(lambda a, row=row: a[row], state.clients[group.name])
      view = scores[group.name].views['global']
      for model, found in (
          (mine, scores[group.name].accuracy),
          (fedavg(federation).client_model(state.server, (), group), view),
      ):
        logits, _ = group.model.apply(model, x)
        want = np.mean(np.argmax(logits, axis=1) == data.labels)
        np.testing.assert_allclose(found[row], want, rtol=1e-6, err_msg=str(k))


# One round in NumPy, from perturbed parameters.


def norm(a):
  return np.sqrt(np.sum(a**2))


def oracle_visit(w_k, x, names, inputs, labels, rate, steps, clip, target):
  """The client's new parameters, its upload and its mask, as in the paper."""
  total = {n: {i: 0.0 for i in w_k[n]} for n in names}
  for one, label in zip(inputs, labels):
    g = oracle_gradient(w_k, names, one[None], np.array([label]))
    for n in names:
      for i in g[n]:
        total[n][i] = total[n][i] + g[n][i] ** 2 / len(labels)
  mask = {
      n: {
          i: (f - f.min()) / (np.ptp(f) or 1.0) > 0.4
          for i, f in total[n].items()
      }
      for n in names
  }
  w = {
      n: {i: np.where(mask[n][i], w_k[n][i], x[n][i]) for i in w_k[n]}
      for n in names
  }
  for personal, strength, aim in ((True, 0.1, 0.0), (False, 0.05, target)):
    for _ in range(steps):
      g = oracle_gradient(w, names, inputs, labels)
      r = sum(norm(w[n][i] - x[n][i]) for n in names for i in w[n])
      sign = np.sign(r - aim)
      for n in names:
        for i in w[n]:
          d = w[n][i] - x[n][i]
          pull = strength / 2 * sign * d / norm(d) if norm(d) else 0.0
          moves = mask[n][i] == personal
          w[n][i] = w[n][i] - moves * rate * (g[n][i] + pull)
  sent = {n: {i: w[n][i] - x[n][i] for i in w[n]} for n in names}
  length = np.sqrt(sum(norm(u) ** 2 for n in names for u in sent[n].values()))
  factor = 1 / max(1, length / clip)
  sent = {n: {i: factor * u for i, u in sent[n].items()} for n in names}
  return w, sent, mask


def dense(tree):
  """The tree in float64, without Flax's layer names."""
  return {
      n: {i: np.asarray(a, np.float64) for i, a in block['Dense_0'].items()}
      for n, block in tree.items()
  }


def test_one_round_in_numpy():
  """Two architectures, three of four clients, weighted by examples."""
  federation, data = small()
  target = 2.0  # Distances are 2.7 to 3.
  algorithm = feddpa(federation, clip=0.3, weights='data', target=target)
  state = perturbed(rounds.init_state(algorithm, federation, KEY))
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=3, backend='map'
  )
  after, reports = run_round(
      jax.tree.map(jnp.asarray, state), data, jax.random.key(1),
      jax.random.key(2),
  )  # fmt: skip
  images, x = np.asarray(preprocess(data.images)), dense(state.server.params)
  total = {n: {i: 0.0 for i in x[n]} for n in x}
  weight, shares = dict.fromkeys(x, 0.0), []
  for group in federation.groups:
    ids = np.asarray(reports[group.name].client_id)
    for row, k in enumerate(group.client_ids.tolist()):
      one = lambda tree, row=row: dense(  # noqa: E731
          jax.tree.map(lambda a: a[row], tree.params)
      )
      before, got = (one(s.clients[group.name]) for s in (state, after))
      if k not in ids:
        assert_trees(got, before, rtol=0)
        continue
      index = np.asarray(data.index[k, : data.sizes[k]])
      w, sent, mask = oracle_visit(
          before, x, group.model.block_names,
          images[index].reshape(len(index), -1).astype(np.float64),
          np.asarray(data.labels)[index], 0.1, 3, 0.3, target,
      )  # fmt: skip
      assert_trees(got, w, **CLOSE)
      flat = np.concatenate([np.ravel(m) for m in jax.tree.leaves(mask)])
      shares.append(flat.mean())
      (place,) = np.flatnonzero(ids == k)
      np.testing.assert_allclose(
          reports[group.name].metrics['personal_share'][place], shares[-1], 1e-6
      )
      for n in sent:
        weight[n] += len(index)
        for i in sent[n]:
          total[n][i] = total[n][i] + len(index) * sent[n][i]
  assert len(shares) == 3 and 0.05 < min(shares) and max(shares) < 0.95
  want = {
      n: {i: x[n][i] + total[n][i] / (weight[n] or 1.0) for i in x[n]}
      for n in x
  }
  assert_trees(dense(after.server.params), want, **CLOSE)


def test_running_statistics_can_stay():
  federation, _ = small(norm=True)
  federation = dataclasses.replace(federation, local_stats=True)
  assert not feddpa(federation).init(KEY).stats


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(threshold=1.5), 'threshold must be at least -1 and at most 1, '),
        (dict(lambda1=-0.1), 'lambda1 must be at least 0, got -0.1.'),
        (dict(lambda2=-0.1), 'lambda2 must be at least 0, got -0.1.'),
        (dict(target=-1.0), 'target must be at least 0, got -1.0.'),
        (dict(clip=0.0), 'clip must be above 0, got 0.'),
        (dict(sigma=0.5), 'sigma must be 0 without a clip, got 0.5.'),
        (dict(weights='size'), "Unknown weights 'size'"),
    ],
)
def test_wrong_options_are_refused(options, message):
  with pytest.raises(ValueError) as error:
    feddpa(tiny_federation(), **options)
  assert str(error.value).startswith(message)
