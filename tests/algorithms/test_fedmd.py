"""FedMD: losses by hand, the paper's round, the subset and early stopping."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.algorithms import fedmd as make
from fedjax_het.algorithms import private
from fedjax_het.algorithms.fedmd import Client, digest_loss, early_stopping
from fedjax_het.algorithms.fedmd.early_stopping import fit_until, hold_out
from fedjax_het.algorithms.fedmd.subsets import public_subset
from fedjax_het.data.federated import Batch, federate
from fedjax_het.engine import rounds
from fedjax_het.engine.local import fit, model_loss
from fedjax_het.engine.types import (
  Federation,
  Group,
  Maybe,
  Received,
  Visit,
)
from fedjax_het.models import Variables, create
from tests import numeric
from tests.algorithms.suite import Case, Clocks
from tests.tiny import (
  SHAPE,
  preprocess,
  server_step,
  tiny_data,
  tiny_federation,
  tiny_local,
  tiny_model,
)

# What the shared suite runs, see `tests/algorithms/suite.py`.
SUITE = [
    Case(dict(num_alignment=7, digest_batch_size=4, pretrain_batch_size=4))
]
CLOCKS = Clocks(
    dict(
        num_alignment=3,
        digest_batch_size=2,
        pretrain_epochs=1,
        pretrain_patience=0,
        transfer_epochs=1,
        transfer_patience=0,
    ),
    'digest_loss',
)
SHORT = dict(pretrain_epochs=2, transfer_epochs=2, num_alignment=7)
SIZES = (5, 8, 3, 7)


def federate_tiny(**kwargs):
  kwargs = dict(num_public=11, norm=False) | kwargs
  return tiny_federation((1, 2), **kwargs)


def received(*logits, number=1, **kwargs):
  """One client of each group sends its logits [N_a, C] on a subset."""
  return {
      str(i): Received(
          jnp.asarray(z, jnp.float32),
          jnp.array([number, number]),
          jnp.array([i, 9]),
          **kwargs,
      )
      for i, z in enumerate(logits)
  }


def sent_by(algorithm, server):
  return algorithm.downlink(server, None, None)


def consensus(*logits):
  """What is sent after a synchronous round."""
  num_public, num_classes = np.shape(logits[0])
  model = create('mlp', SHAPE, num_classes, hidden=4)
  group = Group('g', model, np.arange(9))
  algorithm = make(
      Federation((group,), tiny_local(), num_public=num_public)
  )
  server = algorithm.init(jax.random.key(0))
  return sent_by(
      algorithm, server_step(algorithm, server, received(*logits), None)
  )


def test_worked_consensus_digest_loss_and_gradient():
  z = consensus([[2.0, 0.0]], [[0.0, 4.0]]).consensus
  assert bool(z.present) and z.value.tolist() == [[1, 2]]
  model = types.SimpleNamespace(
      apply=lambda variables, x, **kwargs: (variables.params, {})
  )
  # The second row of the batch is padding.
  batch = Batch(None, None, jnp.array([True, False]), jnp.array([0, 0]))

  def loss(logits):
    return digest_loss(model, z.value)(Variables(logits, {}), batch, None)[0]

  value, grad = jax.value_and_grad(loss)(jnp.array([[2.0, 0.0], [9.0, 9.0]]))
  assert float(value) == 1.5 and grad.tolist() == [[0.5, -0.5], [0, 0]]


def test_norms_digest_as_in_training():
  model = tiny_model(1)
  variables = model.init(jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (8, *SHAPE))
  consensus = jnp.zeros((8, 3))
  batch = Batch(x, None, jnp.ones(8, bool), jnp.arange(8))
  loss, (stats, _) = digest_loss(model, consensus)(variables, batch, None)
  logits, want = model.apply(variables, x, train=True)
  np.testing.assert_allclose(loss, jnp.mean(jnp.abs(logits)), rtol=1e-5)
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), stats, want
  )
  logits, _ = model.apply(variables, x)
  assert abs(loss - jnp.mean(jnp.abs(logits))) > 0.01


def test_consensus_ignores_the_order_of_clients_and_keeps_a_common_shift():
  logits = np.random.default_rng(0).normal(size=(3, 4, 2)).astype(np.float32)
  want = consensus(*logits).consensus.value
  np.testing.assert_allclose(want, logits.mean(0), rtol=1e-5, atol=1e-6)
  again = consensus(*logits[::-1]).consensus.value
  np.testing.assert_allclose(again, want, rtol=1e-5, atol=1e-6)
  shift = np.array([3.0, -1.0], np.float32)
  moved = consensus(*(logits + shift[None, None])).consensus.value
  np.testing.assert_allclose(moved, want + shift[None], rtol=1e-5, atol=1e-6)


def test_nobody_sends_nothing_is_known():
  nobody = {'a': Received(jnp.ones((1, 3)), jnp.array([1]), jnp.array([9]))}
  federation = tiny_federation((1,), 9, num_public=1)
  algorithm = make(federation)
  server = algorithm.init(jax.random.key(0))
  after = server_step(algorithm, server, nobody, None)
  assert not bool(sent_by(algorithm, after).consensus.present)
  assert int(after.number) == 0
  # A consensus stays until there is another one.
  after = server_step(algorithm, server, received(jnp.ones((1, 3))), None)
  again = server_step(algorithm, after, nobody, None)
  jax.tree.map(np.testing.assert_array_equal, again, after)


def test_without_a_consensus_a_visit_revisits_with_the_private_optimiser():
  """The digest takes no step, and its optimiser does not change."""
  local = tiny_local(lambda rate: optax.sgd(rate, momentum=0.9), 0.1)
  federation = federate_tiny(local=local)
  algorithm, group = make(federation, **SHORT), federation.groups[0]
  client = algorithm.init_client(group, 0, jax.random.key(0))
  ones = jax.tree.map(jnp.ones_like, client.private_state)
  client = client._replace(private_state=ones)
  sent = sent_by(algorithm, algorithm.init(jax.random.key(0)))
  assert not bool(sent.consensus.present)
  data = tiny_data(SIZES, public=11).client(0)
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(4))
  after, _, metrics = algorithm.client_update(group, client, sent, data, visit)
  variables, private_state, _, _ = fit(
      model_loss(group.model, local.task),
      local,
      client.variables,
      data,
      visit,
      opt_state=ones,
  )
  assert metrics['digest_loss'] == 0
  want = Client(variables, client.digest_state, private_state)
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
      after,
      want,
  )


def test_a_client_alone_digests_nothing_and_trains_as_if_private():
  """With integers in the digest its difference is exactly 0."""
  federation = tiny_federation(
      (1,), 1, norm=False, num_public=11, local=tiny_local(optax.sgd, 2e-3)
  )
  (group,) = federation.groups
  algorithm = make(federation, num_alignment=7)
  data = tiny_data((8,), public=11).replace(
      preprocess=lambda images, key=None: jnp.floor(images / 64.0)
  )
  client = algorithm.init_client(group, 0, jax.random.key(0))
  params = jax.tree.map(lambda a: jnp.round(3 * a), client.variables.params)
  client = client._replace(variables=Variables(params, {}))
  sent = sent_by(algorithm, algorithm.init(jax.random.key(0)))
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(5))
  subset = public_subset(sent.seed, 0, data.client(0), 7)
  z, _ = group.model.apply(client.variables, subset.batch(jnp.arange(7)).x)
  sent = sent._replace(consensus=Maybe(z, jnp.bool_(True)))
  got, uplink, metrics = algorithm.client_update(
      group, client, sent, data.client(0), visit
  )
  assert float(metrics['digest_loss']) == 0.0
  (want, _), _, _ = private(federation).client_update(
      group, (client.variables, None), (), data.client(0), visit
  )
  for a, b in zip(jax.tree.leaves(got.variables), jax.tree.leaves(want)):
    # A digest step would move biases by a large part of 2e-3.
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  assert uplink.summed.shape == (7, 3) and int(uplink.kept) == 1


LAYERS = ('stem', 'mid0', 'head')


def in_numpy(params):
  """{block: {'kernel', 'bias'}} of a tiny model, in float64."""
  return {
      name: {leaf: np.float64(a) for leaf, a in params[name]['Dense_0'].items()}
      for name in LAYERS
  }


def step_in_numpy(params, loss, rate=0.1):
  """A step of gradient descent, and its gradient."""
  grads = numeric.gradient(loss, params)
  return numeric.combine(lambda w, g: w - rate * g, params, grads), grads


def cross_entropy_on(batch):
  x, y = np.float64(batch.x).reshape(len(batch.y), -1), np.asarray(batch.y)
  return lambda w: numeric.cross_entropies(numeric.net(w, LAYERS, x), y).mean()


def assert_close_to_numpy(got, want):
  got = in_numpy(got)
  for name, leaves in want.items():
    for leaf, value in leaves.items():
      np.testing.assert_allclose(got[name][leaf], value, rtol=1e-3, atol=1e-5)


def of_whole_batches(**options):
  """One client of eight examples, eleven public ones, one step a pass."""
  local = tiny_local(lr=0.1, epochs=1, batch_size=8)
  federation = tiny_federation(
      (1,), 1, norm=False, num_public=11, local=local
  )
  algorithm = make(federation, num_alignment=7, **options)
  (group,) = federation.groups
  client = algorithm.init_client(group, 0, jax.random.key(3))
  data = tiny_data((8,), public=11).client(0)
  sent = sent_by(algorithm, algorithm.init(jax.random.key(0)))
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(4))
  return algorithm, group, client, data, sent, visit


def test_a_visit_digests_revisits_and_publishes_in_this_order():
  """One step of each, and the logits of the next subset, in NumPy."""
  algorithm, group, client, data, sent, visit = of_whole_batches()
  z_t = jax.random.normal(jax.random.key(6), (7, 3))
  sent = sent._replace(consensus=Maybe(z_t, jnp.bool_(True)))
  after, uplink, _ = algorithm.client_update(group, client, sent, data, visit)
  this, following = (
      np.float64(
          public_subset(sent.seed, number, data, 7).batch(jnp.arange(7)).x
      ).reshape(7, -1)
      for number in (0, 1)
  )

  def distance(w):
    return np.abs(numeric.net(w, LAYERS, this) - np.float64(z_t)).mean()

  digested, _ = step_in_numpy(in_numpy(client.variables.params), distance)
  want, _ = step_in_numpy(digested, cross_entropy_on(data.batch(jnp.arange(8))))
  assert_close_to_numpy(after.variables.params, want)
  np.testing.assert_allclose(
      uplink.summed, numeric.net(want, LAYERS, following), rtol=1e-3, atol=1e-4
  )


def test_the_warm_up_takes_the_public_then_the_own_examples():
  """One step on each, whose optimisers begin anew; the second one is kept."""
  algorithm, group, client, data, sent, visit = of_whole_batches(
      pretrain_epochs=1, pretrain_patience=0, pretrain_batch_size=11,
      transfer_epochs=1, transfer_patience=0, transfer_batch_size=8,
  )  # fmt: skip
  after, uplink, metrics = algorithm.warm_up(group, client, sent, data, visit)
  public = cross_entropy_on(data.of_public().batch(jnp.arange(11)))
  own = cross_entropy_on(data.batch(jnp.arange(8)))
  start = in_numpy(client.variables.params)
  pretrained, _ = step_in_numpy(start, public)
  want, grads = step_in_numpy(pretrained, own)
  assert_close_to_numpy(after.variables.params, want)
  np.testing.assert_allclose(metrics['pretrain_loss'], public(start), rtol=1e-4)
  np.testing.assert_allclose(
      metrics['train_loss'], own(pretrained), rtol=1e-4
  )
  # The trace of momentum after one step is its gradient.
  assert_close_to_numpy(after.private_state[0].trace, grads)
  assert not any(map(np.any, jax.tree.leaves(after.digest_state)))
  x = public_subset(sent.seed, 0, data, 7).batch(jnp.arange(7)).x
  np.testing.assert_allclose(
      uplink.summed,
      numeric.net(want, LAYERS, np.float64(x).reshape(7, -1)),
      rtol=1e-3, atol=1e-4,
  )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('cohort_size', [4])
def test_the_consensus_is_the_mean_of_the_models_at_the_rounds_start(
    cohort_size,
):
  """After the warm-up and after every round, on the next round's subset."""
  federation = federate_tiny(norm=True)
  algorithm = make(federation, **SHORT)
  data = tiny_data(SIZES, public=11)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  warm_up = rounds.make_warm_up(algorithm, federation, backend='map')
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=cohort_size, backend='map'
  )

  def check(state, round_num):
    subset = public_subset(state.server.seed, round_num, data.client(0), 7)
    x = subset.batch(jnp.arange(7)).x
    z = [
        group.model.apply(
            jax.tree.map(lambda a, i=i: a[i], state.clients[group.name])
            .variables,
            x,
        )[0]
        for group in federation.groups
        for i in range(2)
    ]
    sent = sent_by(algorithm, state.server)
    assert int(sent.number) == round_num
    np.testing.assert_allclose(
        sent.consensus.value, sum(z) / 4, rtol=1e-5, atol=1e-6
    )

  start = jax.device_get(state)
  state, reports = warm_up(state, data, jax.random.key(1))
  assert int(state.round_num) == 0
  check(state, 0)
  # All clients have trained, each on its own.
  for name, report in reports.items():
    assert np.all(np.asarray(report.metrics['pretrain_loss']) > 0)
    before = start.clients[name].variables.params['stem']
    after = state.clients[name].variables.params['stem']
    assert all(
        np.any(a[i] != b[i])
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after))
        for i in range(2)
    )
  state, reports = run_round(
      state, data, jax.random.key(1), jax.random.key(2)
  )
  check(state, 1)
  assert np.all(np.asarray(reports['tiny1'].metrics['digest_loss']) > 0)


def test_uploads_one_by_one_join_the_subset_that_they_are_for():
  """Rounds of two uploads under a clock, by hand."""
  federation = tiny_federation((1,), 9, num_public=1)
  algorithm = make(federation)
  server = algorithm.init(jax.random.key(0))

  def arrives(server, value, number, ends):
    one = received(jnp.full((1, 3), value), number=number, round_ends=ends)
    return server_step(algorithm, server, one, None)

  def offered(server):
    number, (value, present) = sent_by(algorithm, server)[1:]
    return int(number), float(value[0, 0]) if present else None

  assert offered(server) == (0, None)
  server = arrives(server, 2.0, 0, True)  # The warm-up's.
  assert offered(server) == (0, 2.0)
  server = arrives(server, 3.0, 1, False)
  assert offered(server) == (0, 2.0)  # Until the round ends.
  server = arrives(server, 5.0, 1, True)
  assert offered(server) == (1, 4.0)
  # A late upload joins the current subset; for an older one it is left out.
  server = arrives(server, 7.0, 1, False)
  assert offered(server) == (1, 5.0)
  server = arrives(server, 100.0, 0, True)
  assert offered(server) == (1, 5.0)  # Nothing for number 2 has come.
  server = arrives(server, 6.0, 2, True)
  assert offered(server) == (2, 6.0)
  assert int(server.coming.count) == 0


def test_the_subset_is_everybodys_new_each_round_and_flat():
  labels = np.repeat(np.arange(10), 700)
  images = np.zeros((7000, 1, 1, 1), np.uint8)
  order = np.random.default_rng(0).permutation(7000)
  public = np.concatenate([order[labels[order] == c][:600] for c in range(10)])
  data = federate(images, labels, [[0], [1], [2]], preprocess, public)
  seed = jax.random.key_data(jax.random.key(3))

  @jax.jit
  def draw(client, round_num):
    return public_subset(seed, round_num, data.client(client), 5000).index

  first = draw(0, 0)
  np.testing.assert_array_equal(first, draw(2, 0))
  assert not np.array_equal(np.sort(first), np.sort(draw(0, 1)))
  for index in (first, draw(0, 1)):
    assert len(np.unique(index)) == 5000 and np.isin(index, public).all()
    assert np.bincount(labels[index]).tolist() == [500] * 10
  few = public_subset(seed, 0, data.client(0), 3).index
  assert len(np.unique(labels[few])) == 3
  whole = public_subset(seed, 0, data.client(0), 6000).index
  np.testing.assert_array_equal(np.sort(whole), np.sort(public))


def test_the_public_set_is_shared_and_never_copied_per_client():
  data = tiny_data(SIZES, public=11)

  def of(client_id):
    seed = jax.random.key_data(jax.random.key(0))
    subset = public_subset(seed, 0, data.client(client_id), 7)
    return data.client(client_id).of_public().index, subset.index

  # vmap refuses `out_axes=None` for anything that differs between clients.
  public, subset = jax.vmap(of, out_axes=None)(jnp.arange(4))
  np.testing.assert_array_equal(public, data.public)
  assert subset.shape == (7,)


def test_80000_numbers_and_the_subsets_go_up_and_a_seed_more_comes_down():
  model = create('mlp', SHAPE, 16, hidden=4)
  federation = Federation(
      (Group('g', model, np.array([0])),), tiny_local(), num_public=5000
  )
  algorithm = make(federation)
  data = tiny_data((4,), public=5000)
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(0))

  def update():
    server = algorithm.init(jax.random.key(0))
    group = federation.groups[0]
    client = algorithm.init_client(group, 0, jax.random.key(0))
    sent = sent_by(algorithm, server)
    return sent, algorithm.client_update(
        group, client, sent, data.client(0), visit
    )

  with jax.default_prng_impl('threefry2x32'):  # The users' default.
    sent, (_, uplink, _) = jax.eval_shape(update)
  assert [leaf.size for leaf in jax.tree.leaves(uplink)] == [80_000, 1]
  assert sent.consensus.value.size == 80_000 and sent.number.size == 1
  assert sent.seed.size * sent.seed.dtype.itemsize == 8


@pytest.mark.parametrize(
    ('n', 'want'), [(1, 0), (2, 1), (9, 1), (20, 2), (33, 3)]
)
def test_a_tenth_is_held_out_but_never_all(n, want):
  rest, held = hold_out(jax.random.key(0), tiny_data((n, 40)).client(0))
  assert (int(rest.size), int(held.size)) == (n - want, want)
  together = [*rest.index[: n - want].tolist(), *held.index[:want].tolist()]
  assert sorted(together) == list(range(n))


@pytest.mark.parametrize(
    ('scores', 'epochs'),
    [
        # A gain exceeds the best score so far by more than 0.04.
        ((0.5, 0.3, 0.4, 0.9), 3),
        ((0.5, 0.53, 0.53, 0.9), 3),
        ((0.5, 0.56, 0.59, 0.59, 0.9), 4),
        ((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), 6),
    ],
)
def test_a_gain_exceeds_the_best_score_of_the_held_out(
    monkeypatch, scores, epochs
):
  """The scores after each epoch are given; a model counts its epochs."""
  sizes = []

  def fit_once(loss_fn, local, count, data, visit, opt_state):
    sizes.append(int(data.size))
    assert local.epochs == 1
    return count + 1, opt_state + 2, {'train_loss': 1.0}, 5

  def score(model, count, data):
    sizes.append(int(data.size))
    return jnp.asarray(scores, jnp.float32)[count - 1]

  monkeypatch.setattr(early_stopping, 'fit', fit_once)
  monkeypatch.setattr(early_stopping, 'accuracy', score)
  count, opt_state, means, steps = fit_until(
      None, tiny_local(epochs=6), jnp.int32(0), tiny_data((20,)).client(0),
      Visit(jnp.int32(0), jnp.int32(0), jax.random.key(1)), jnp.int32(0),
      patience=2, min_delta=0.04,
  )  # fmt: skip
  assert (int(count), int(steps)) == (epochs, 5 * epochs)
  assert int(opt_state) == 2 * epochs  # It goes on from epoch to epoch.
  assert means['train_loss'] == 1
  assert sizes[:2] == [18, 2]  # Trained on; held out.


@pytest.mark.slow
def test_training_stops_when_the_held_out_tenth_gains_no_more():
  """With a learning rate of 0 nothing improves after the first epoch."""
  model = tiny_model(1, norm=False)
  local = tiny_local(optax.sgd, 0.0, epochs=9, batch_size=4)
  data = tiny_data((20, 33, 8))
  start = model.init(jax.random.key(0))
  state = local.optimizer(0.0).init(start.params)

  def train(client_id, patience, local=local, start=start):
    visit = Visit(client_id, jnp.int32(0), jax.random.key(1))
    return fit_until(
        model, local, start, data.client(client_id), visit, state,
        patience=patience, min_delta=0.001,
    )  # fmt: skip

  # 18 of 20 examples and 30 of 33 are trained on, in batches of 4.
  for client_id, per_epoch in ((0, 5), (1, 8)):
    # With more patience training ends after all nine epochs.
    steps = [int(train(client_id, p)[3]) for p in (1, 20)]
    assert steps == [2 * per_epoch, 9 * per_epoch]
  assert int(train(0, 3)[3]) == 4 * 5
  assert int(train(0, 0)[3]) == 9 * 5  # Patience 0: all 20 train, all epochs.
  lost = jax.tree.map(lambda leaf: jnp.nan * leaf, start)
  assert int(train(0, 1, start=lost)[3]) == 2 * 5

  # Under vmap a client that has stopped no longer changes.
  moving = dataclasses.replace(
      local, learning_rate=lambda round_num: 0.3, epochs=5
  )
  together = jax.vmap(lambda i: train(i, 1, moving))(jnp.arange(3))
  assert len(set(together[3].tolist())) > 1
  for i in range(3):
    alone = train(jnp.int32(i), 1, moving)
    assert int(alone[3]) == int(together[3][i])
    for a, b in zip(jax.tree.leaves(alone[0]), jax.tree.leaves(together[0])):
      np.testing.assert_allclose(a, b[i], rtol=1e-5, atol=1e-6)


def test_optimisers_are_two_and_are_kept_or_not():
  federation = federate_tiny(local=tiny_local(optax.adam))
  group = federation.groups[0]
  algorithm = make(federation, num_alignment=7, digest_batch_size=4)
  data = tiny_data(SIZES, public=11).client(1)
  sent = sent_by(algorithm, algorithm.init(jax.random.key(0)))
  sent = sent._replace(
      consensus=sent.consensus._replace(present=jnp.bool_(True))
  )
  visit = Visit(jnp.int32(1), jnp.int32(0), jax.random.key(5))
  client = algorithm.init_client(group, 1, jax.random.key(0))
  client, _, _ = algorithm.client_update(group, client, sent, data, visit)
  # 7 public examples once, 8 private ones twice, in batches of 4.
  assert int(client.digest_state[0].count) == 2
  assert int(client.private_state[0].count) == 4
  local = dataclasses.replace(federation.local, keep_optimizer=False)
  fresh = make(dataclasses.replace(federation, local=local), num_alignment=7)
  client = fresh.init_client(group, 1, jax.random.key(0))
  assert client.digest_state is None and client.private_state is None
  client, _, _ = fresh.client_update(group, client, sent, data, visit)
  assert client.digest_state is None and client.private_state is None


@pytest.mark.parametrize(
    'options,message',
    [
        (dict(num_alignment=12), 'num_alignment must be at least 1 and'),
        (dict(digest_batch_size=0), 'digest_batch_size must be at least 1'),
        (dict(transfer_patience=-1), 'transfer_patience must be at least 0'),
    ],
)
def test_bad_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    make(federate_tiny(), **options)


def test_a_federation_without_public_set_is_refused():
  with pytest.raises(ValueError, match=r'^fedmd needs a public set, Fed'):
    make(tiny_federation())
