"""FedGKT: distillation by hand, the store by example, the server's net."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.algorithms import fedgkt as make
from fedjax_het.algorithms import private
from fedjax_het.algorithms.fedgkt import feature_shape, publish
from fedjax_het.algorithms.fedgkt.server import (
  Tail,
  Uploads,
  choose_server,
  eval_logits,
)
from fedjax_het.data.federated import InMemory
from fedjax_het.engine import rounds, traffic
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.evaluate import make_evaluate
from fedjax_het.engine.local import fit
from fedjax_het.engine.task import CLASSIFICATION, masked_mean
from fedjax_het.engine.types import (
  Federation,
  Group,
  Maybe,
  Received,
  Turn,
  Visit,
)
from fedjax_het.engine.visits import expected_bytes
from fedjax_het.models import BlockModel, Variables, create
from fedjax_het.models.blocks import Block
from tests.algorithms.suite import Case, Clocks
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  Dense,
  preprocess,
  server_step,
  tiny_data,
  tiny_federation,
  tiny_local,
  tiny_model,
)

# What the shared suite runs, see `tests/algorithms/suite.py`.
SUITE = [Case(dict(server_epochs=2))]
CLOCKS = Clocks(dict(server_epochs=1))
SIZES = (5, 8, 3, 7)
LENGTH = max(SIZES)


def server_net(federation, name=None):
  return choose_server(federation, name, feature_shape(federation))


def federate_tiny(**kwargs):
  """Two groups of two clients: 0 and 2, 1 and 3."""
  kwargs = dict(norm=False, sizes=np.array(SIZES)) | kwargs
  return tiny_federation((1, 2), **kwargs)


def run(algorithm, federation, num_rounds=1, cohort_size=4):
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=cohort_size, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  for _ in range(num_rounds):
    state, reports = run_round(
        state, tiny_data(SIZES), jax.random.key(1), jax.random.key(2)
    )
  return jax.device_get(state), reports


def test_worked_divergence():
  teacher = jnp.array([[3 * np.log(3), 0.0]])
  got = distillation(jnp.zeros((1, 2)), teacher, 3.0)
  np.testing.assert_allclose(got, [1.177308], rtol=1e-6)
  np.testing.assert_allclose(got / 9, [0.130812], rtol=1e-5)


def test_gradient_is_temperature_times_the_gap_of_probabilities():
  rng = np.random.default_rng(0)
  student, teacher = jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32)
  total = jax.grad(lambda s, t: jnp.sum(distillation(s, t, 2.5)), (0, 1))
  grad, to_teacher = total(student, teacher)
  gap = jax.nn.softmax(student / 2.5) - jax.nn.softmax(teacher / 2.5)
  np.testing.assert_allclose(grad, 2.5 * gap, rtol=1e-4, atol=1e-6)
  assert not np.any(to_teacher)
  np.testing.assert_allclose(distillation(teacher, teacher, 2.5), 0, atol=1e-6)
  np.testing.assert_allclose(total(teacher, teacher)[0], 0, atol=1e-6)


@pytest.mark.slow
def test_without_server_epochs_clients_train_alone():
  """As in round 1; SGD without state, since `private` resets its optimiser."""
  federation = federate_tiny(local=tiny_local(optax.sgd, 0.1))
  got, reports = run(make(federation, server_epochs=0), federation, 2)
  want, _ = run(private(federation), federation, 2)
  for name, (variables, _) in got.clients.items():
    pairs = zip(
        jax.tree.leaves(variables), jax.tree.leaves(want.clients[name])
    )
    for a, b in pairs:
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  assert not np.any(got.server.logits.present)
  assert traffic.num_bytes(reports['tiny1'].down).tolist() == [0, 0]


# (client, group, slot) of the messages of `planted`.
PLANTED = ((0, 'tiny1', 0), (1, 'tiny2', 0), (3, 'tiny2', 1))


def planted(federation, algorithm):
  """A server of integers, and features that encode client and example."""
  server = algorithm.init(jax.random.key(0))
  params = jax.tree.map(lambda a: jnp.round(4 * a), server.net.params)
  server = server._replace(net=Variables(params, server.net.stats))
  sizes = jnp.array([*SIZES, 0])

  def kept(ids):
    present = jnp.arange(LENGTH)[None] < sizes[ids][:, None]
    name = 10.0 * ids[:, None] + jnp.arange(LENGTH)[None]
    h = name[..., None] * jnp.array([1.0, 2, 0, 1])[None, None]
    z = jnp.zeros((len(ids), LENGTH, NUM_CLASSES))
    labels = jnp.zeros((len(ids), LENGTH), jnp.int32)
    return Received((), Maybe((h, z, labels), present), ids)

  # Client 2 is not in the cohort: its slot is padding.
  received = {
      'tiny1': kept(jnp.array([0, 4])),
      'tiny2': kept(jnp.array([1, 3])),
  }
  return server, received


@pytest.mark.parametrize('mode', ['train', 'eval'])
def test_logits_return_to_their_examples_in_whatever_order(mode):
  federation = federate_tiny(local=tiny_local(optax.sgd, 0.0))
  algorithm = make(federation, server_logits=mode, server_epochs=2)
  server, received = planted(federation, algorithm)
  update = jax.jit(functools.partial(server_step, algorithm))
  chief = server_net(federation).model
  assert chief.name == 'tiny2'
  for seed in (0, 1):  # The order of visits follows the key.
    after = update(server, received, jax.random.key(seed))
    assert after.logits.present.sum(1).tolist() == [5, 8, 0, 7]
    for i, n in ((0, 5), (1, 8), (3, 7)):
      name = 10.0 * i + jnp.arange(n)
      h = name[:, None] * jnp.array([1.0, 2, 0, 1])[None]
      want, _ = chief.apply(server.net, h, start=1)
      np.testing.assert_array_equal(after.logits.value[i, :n], want)
      visit = Visit(jnp.int32(i), jnp.int32(1), None)
      sent = algorithm.downlink(after, federation.groups[0], visit)
      np.testing.assert_array_equal(sent.value[:n], want)
    assert not np.any(after.logits.value[2])


def test_examples_that_the_server_drops_have_no_logits():
  """One epoch in batches of 4 that leaves out partial ones, but not all."""
  local = tiny_local(optax.sgd, 0.0, batch_size=4, drop_last=True)
  federation = federate_tiny(local=local)
  algorithm = make(federation, server_epochs=1)
  server, received = planted(federation, algorithm)
  known = server_step(algorithm, server, received).logits
  assert known.present.sum(1).tolist() == [4, 8, 0, 4]
  assert not np.any(known.value[~known.present])


def test_uploads_do_not_depend_on_padding():
  """Nor do the logits in eval mode, with norms over the batch."""
  model = create('mlp', SHAPE, NUM_CLASSES, hidden=4, norm='batch_only')
  variables = model.init(jax.random.key(0))
  net = Tail(model, model.cut[0])
  data = tiny_data((5, 130)).client(0)
  found = []
  for length in (5, 130):
    (h, z_c, y), present = publish(model, variables, data, length)
    assert present.sum() == 5 and len(y) == length
    assert not np.any(h[5:]) and not np.any(z_c[5:])
    sizes = jnp.array([5])
    uploads = Uploads(sizes, h[None], z_c[None], y[None], sizes)
    z_s, known = eval_logits(net, variables, uploads)
    assert known.sum() == 5
    found.append((h[:5], z_c[:5], z_s[0, :5]))
    np.testing.assert_allclose(z_s[0, :5], z_c[:5], rtol=1e-5, atol=1e-6)
  for one, other in zip(*found):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
  assert np.ptp(found[0][1], axis=0).max() > 0.01


def test_who_is_absent_keeps_its_logits():
  federation = federate_tiny(local=tiny_local(optax.sgd, 0.0))
  algorithm = make(federation, server_epochs=1)
  server, received = planted(federation, algorithm)
  old = jnp.full((4, LENGTH, NUM_CLASSES), 7.0)
  known = jnp.ones((4, LENGTH), bool)
  server = server._replace(logits=Maybe(old, known))
  after = server_step(algorithm, server, received)
  assert np.all(after.logits.value[2] == 7) and after.logits.present[2].all()
  assert not np.any(after.logits.value[1] == 7)


@pytest.mark.parametrize(('client_id', 'batch_size'), [(1, 2), (3, 8)])
def test_clients_distil_each_example_from_its_own_logits(
    client_id, batch_size
):
  """At a learning rate of 0 the mean loss is known, whatever the order.

  Client 1 has four whole batches, client 3 one of seven examples and padding.
  """
  local = tiny_local(optax.sgd, 0.0, epochs=1, batch_size=batch_size)
  federation = federate_tiny(local=local)
  group, n = federation.groups[1], SIZES[client_id]
  algorithm = make(federation, distill_weight=0.5, temperature=2.0)
  client = algorithm.init_client(group, client_id, jax.random.key(0))
  data = tiny_data(SIZES).client(client_id)
  place = jnp.arange(LENGTH)
  teacher = place[:, None] * jnp.array([1.0, -1.0, 0.5])[None]
  known = place != 3
  sent = Maybe(teacher, known)
  batch = data.batch(jnp.arange(n))
  logits, _ = group.model.apply(client[0], batch.x)
  gap = jnp.where(known[:n], distillation(logits, teacher[:n], 2.0), 0.0)
  want = CLASSIFICATION.loss(logits, batch.y) + 0.5 * jnp.mean(gap)
  for seed in (0, 1):
    visit = Visit(jnp.int32(client_id), jnp.int32(0), jax.random.key(seed))
    _, uplink, metrics = algorithm.client_update(
        group, client, sent, data, visit
    )
    np.testing.assert_allclose(metrics['train_loss'], want, rtol=1e-5)
    h, z, y = (a[:n] for a in uplink.kept.value)
    np.testing.assert_allclose(z, logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(y, batch.y)
    features, _ = group.model.apply(client[0], batch.x, stop=1)
    np.testing.assert_allclose(h, features, rtol=1e-5, atol=1e-6)


def test_uploads_are_those_of_the_trained_model():
  federation = federate_tiny(local=tiny_local(optax.sgd, 0.3))
  group, algorithm = federation.groups[1], make(federation)
  client = algorithm.init_client(group, 1, jax.random.key(0))
  data, visit = tiny_data(SIZES).client(1), Visit(1, 0, jax.random.key(0))
  sent = Maybe(jnp.zeros((LENGTH, NUM_CLASSES)), jnp.zeros(LENGTH, bool))
  after, uplink, _ = algorithm.client_update(group, client, sent, data, visit)
  x = data.batch(jnp.arange(LENGTH)).x
  h, z, _ = uplink.kept.value
  want, _ = group.model.apply(after[0], x)
  np.testing.assert_allclose(z, want, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
      h, group.model.apply(after[0], x, stop=1)[0], rtol=1e-5, atol=1e-6
  )
  assert np.abs(z - group.model.apply(client[0], x)[0]).max() > 0.05


def one_upload(size, length, seed=0):
  """A message of one client: random features and logits, and padding."""
  rng = np.random.default_rng(seed)
  h, z = jnp.asarray(rng.normal(size=(2, length, 4)), jnp.float32)
  y = jnp.arange(length) % NUM_CLASSES
  message = Maybe(
      (h[None], z[None, :, :NUM_CLASSES], y[None]),
      jnp.arange(length)[None] < size,
  )
  return h, {'tiny1': Received((), message, jnp.array([0]))}


def test_the_servers_norms_take_the_batch_in_training_and_not_in_eval():
  """Five examples and three of padding, which no statistic may see."""
  h, received = one_upload(5, 8)
  for mode, rate in (('train', 0.0), ('eval', 0.1)):
    local = tiny_local(optax.sgd, rate, batch_size=8)
    federation = tiny_federation((1,), 1, local=local, sizes=np.array([8]))
    algorithm = make(federation, server_epochs=1, server_logits=mode)
    server = algorithm.init(jax.random.key(0))
    after = server_step(algorithm, server, received)
    chief = federation.groups[0].model
    trained, stats = chief.apply(server.net, h[:5], start=1, train=True)
    if mode == 'train':
      want = trained
    else:  # The net and the running statistics after training.
      want, _ = chief.apply(after.net, h[:5], start=1)
      before, _ = chief.apply(server.net, h[:5], start=1)
      assert np.abs(want - before).max() > 1e-3
    np.testing.assert_allclose(
        after.logits.value[0, :5], want, rtol=1e-4, atol=1e-5
    )
    for name, leaf in after.net.stats.items():
      jax.tree.map(
          lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
          leaf,
          stats[name],
      )


def test_logits_of_the_training_pass_are_those_of_the_last_epoch():
  """After one of two steps; the temperature is not the default."""
  local = tiny_local(optax.sgd, 0.5, batch_size=4)
  federation = tiny_federation(
      (1,), 1, norm=False, local=local, sizes=np.array([4])
  )
  h, received = one_upload(4, 4)
  algorithm = make(federation, server_epochs=2, temperature=2.0)
  chief, server = federation.groups[0].model, algorithm.init(jax.random.key(0))
  _, z_c, y = (a[0] for a in received['tiny1'].kept.value)

  def logits(params):
    return chief.apply(Variables(params, {}), h, start=1)[0]

  def loss(params):
    z_s = logits(params)
    p, log_q = jax.nn.softmax(z_c / 2), jax.nn.log_softmax(z_s / 2)
    gap = jnp.mean(jnp.sum(p * (jnp.log(p) - log_q), axis=1))
    log_p = jax.nn.log_softmax(z_s)
    return -jnp.mean(log_p[jnp.arange(4), y]) + 4 * gap

  params = server.net.params
  stepped = jax.tree.map(
      lambda w, g: w - 0.5 * g, params, jax.grad(loss)(params)
  )
  assert np.abs(logits(stepped) - logits(params)).max() > 0.05
  after = server_step(algorithm, server, received)
  np.testing.assert_allclose(
      after.logits.value[0], logits(stepped), rtol=1e-4, atol=1e-5
  )


def test_uploads_are_computed_as_in_tests():
  """With running statistics, which are not those of the client's examples."""
  model = tiny_model(1)
  variables = model.init(jax.random.key(0))
  variables = variables._replace(
      stats=jax.tree.map(lambda a: a + 0.5, variables.stats)
  )
  data = tiny_data(SIZES).client(1)
  x = data.batch(jnp.arange(SIZES[1])).x
  h, z_c, _ = publish(model, variables, data, SIZES[1]).value
  want, _ = model.apply(variables, x)
  np.testing.assert_allclose(z_c, want, rtol=1e-5, atol=1e-6)
  want, _ = model.apply(variables, x, stop=1)
  np.testing.assert_allclose(h, want, rtol=1e-5, atol=1e-6)
  trained, _ = model.apply(variables, x, train=True)
  assert np.abs(trained - z_c).max() > 0.1


@pytest.mark.slow
def test_batches_of_the_server_never_mix_clients_and_padding_is_no_step():
  federation = federate_tiny(norm=True, local=tiny_local(optax.adam))
  algorithm = make(federation, server_epochs=3, server_batch_size=4)
  state, reports = run(algorithm, federation)
  steps = 3 * sum(-(-n // 4) for n in SIZES)
  assert int(state.server.opt_state[0].count) == steps
  up = traffic.num_bytes(reports['tiny1'].up)
  assert up.tolist() == [4 * (4 + NUM_CLASSES + 1) * n for n in (5, 3)]
  planned = expected_bytes(
      algorithm, federation.groups[0], tiny_data(SIZES), np.array([5, 3])
  )
  assert planned[:, 1].tolist() == up.tolist()
  # A cohort of two: half of the slots are padding.
  state, reports = run(algorithm, federation, cohort_size=2)
  here = [
      int(i)
      for r in reports.values()
      for i in np.asarray(r.client_id)
      if i < 4
  ]
  assert len(here) == 2
  steps = 3 * sum(-(-SIZES[i] // 4) for i in here)
  assert int(state.server.opt_state[0].count) == steps
  present = np.arange(LENGTH)[None] < np.array(SIZES)[:, None]
  present &= np.isin(np.arange(4), here)[:, None]
  np.testing.assert_array_equal(state.server.logits.present, present)


@pytest.mark.slow
def test_the_servers_loss_with_and_without_distillation():
  """One SGD step on one batch moves the net by the gradient of its loss."""
  local = tiny_local(optax.sgd, 1.0, batch_size=LENGTH)
  federation = tiny_federation(
      (1,), 1, norm=False, local=local, sizes=np.array([4])
  )
  chief = federation.groups[0].model
  rng = np.random.default_rng(0)
  h, z = jnp.asarray(rng.normal(size=(2, 4, 4)), jnp.float32)
  z, y = z[:, :NUM_CLASSES], jnp.array([0, 1, 2, 1])
  message = Maybe((h[None], z[None], y[None]), jnp.ones((1, 4), bool))
  received = {'tiny1': Received((), message, jnp.array([0]))}
  for distils in (True, False):
    algorithm = make(
        federation, server_epochs=1, server_alpha=0.3,
        server_distillation=distils,
    )  # fmt: skip
    server = algorithm.init(jax.random.key(0))

    def loss(params, distils=distils):
      logits, _ = chief.apply(Variables(params, {}), h, start=1)
      entropy = CLASSIFICATION.loss(logits, y)
      gap = jnp.mean(distillation(logits, z, 3.0))
      return 0.3 * entropy + gap if distils else entropy

    params = server.net.params
    want = jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))
    turn = Turn(jnp.int32(0), jax.random.key(0))
    after, metrics = algorithm.server_update(server, received, turn)
    np.testing.assert_allclose(
        metrics['server_loss'], loss(params), rtol=1e-5
    )
    pairs = zip(
        jax.tree.leaves(after.net.params), jax.tree.leaves(want), strict=True
    )
    for a, b in pairs:
      np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_servers_learning_rate_is_that_of_the_round():
  """With a rate of 0 from round 2 on the net no longer moves."""
  local = dataclasses.replace(
      tiny_local(optax.sgd), learning_rate=lambda r: jnp.where(r < 2, 0.1, 0.0)
  )
  federation = federate_tiny(local=local)
  algorithm = make(federation, server_epochs=1)
  server, received = planted(federation, algorithm)
  key = jax.random.key(0)
  for round_num, moves in ((0, True), (1, True), (2, False), (3, False)):
    after = server_step(algorithm, server, received, key, round_num)
    moved = jax.tree.map(
        lambda a, b: bool(np.any(a != b)), after.net, server.net
    )
    assert any(jax.tree.leaves(moved)) == moves


def test_the_server_trains_on_one_client_after_another_by_id():
  """A client's batches follow from the turn's key, the epoch and its id."""
  local = tiny_local(optax.sgd, 1e-3)
  federation = federate_tiny(local=local)
  algorithm = make(
      federation, server_epochs=2, server_batch_size=2, server_alpha=0.3
  )
  server, received = planted(federation, algorithm)
  key, net = jax.random.key(5), server_net(federation)
  turn = Turn(jnp.int32(0), key)
  after, metrics = algorithm.server_update(server, received, turn)
  one_pass = dataclasses.replace(local, epochs=1, batch_size=2)

  @jax.jit
  def train(variables, opt_state, h, z, y, size, key):
    def loss_fn(variables, batch, key):
      logits, stats = net.apply(variables, batch.x, train=True)
      gap = distillation(logits, z[batch.position], 3.0)
      loss = 0.3 * CLASSIFICATION.loss(logits, batch.y, batch.mask)
      return loss + masked_mean(gap, batch.mask), (stats, {})

    return fit(
        loss_fn,
        one_pass,
        variables,
        InMemory(h, y, size),
        turn._replace(key=key),
        opt_state=opt_state,
    )

  variables, opt_state = server.net, server.opt_state
  loss = steps = 0
  for e in range(2):
    for client, group, slot in PLANTED:
      h, z, y = (a[slot] for a in received[group].kept.value)
      visit_key = jax.random.fold_in(jax.random.fold_in(key, e), client)
      size = jnp.int32(SIZES[client])
      variables, opt_state, means, num_steps = train(
          variables, opt_state, h, z, y, size, visit_key
      )
      loss += means['train_loss'] * num_steps
      steps += num_steps
  np.testing.assert_allclose(metrics['server_loss'], loss / steps, rtol=1e-5)
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      after.net,
      variables,
  )


def test_16395_numbers_an_example_go_up_at_the_papers_feature_map():
  class Map(nn.Module):
    @nn.compact
    def __call__(self, x, train, mask):
      return jnp.tile(nn.Dense(16)(x), (1, 1, 1, 1))

  blocks = (
      Block('stem', Map()),
      Block('mid', Dense(4)),
      Block('head', Dense(10, relu=False)),
  )
  model = BlockModel('conv', blocks, (32, 32, 3), 10, (1, 2))
  federation = Federation(
      (Group('g', model, np.array([0])),), tiny_local(), sizes=np.array([6])
  )
  algorithm = make(federation)
  data = tiny_data((6,))
  data = data.replace(images=jnp.zeros((6, 32, 32, 3), jnp.uint8))

  def update():
    server = algorithm.init(jax.random.key(0))
    visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(0))
    group = federation.groups[0]
    return algorithm.client_update(
        group,
        algorithm.init_client(group, 0, jax.random.key(0)),
        algorithm.downlink(server, group, visit),
        data.client(0),
        visit,
    )[1].kept

  kept = jax.eval_shape(update)
  numbers = sum(leaf.size for leaf in jax.tree.leaves(kept.value))
  assert numbers == 16_395 * 6 and kept.present.shape == (6,)


@pytest.mark.slow
def test_evaluation_composes_extractor_and_server_and_shows_the_clients():
  federation = federate_tiny(norm=True)
  algorithm = make(federation, server_epochs=1)
  state, _ = run(algorithm, federation)
  data = tiny_data(SIZES)
  x = preprocess(data.images)
  chief = server_net(federation).model
  scores = make_evaluate(
      algorithm, federation, np.asarray(data.images), np.asarray(data.labels),
      preprocess, batch_size=len(x),
  )(state)  # fmt: skip
  for group in federation.groups:
    for row in range(2):
      client = jax.tree.map(
          lambda a, row=row: a[row], state.clients[group.name]
      )
      model = algorithm.client_model(state.server, client, group)
      own, net = model
      whole = Variables(
          {**net.params, 'stem': own.params['stem']},
          {**net.stats, 'stem': own.stats['stem']},
      )
      want, _ = chief.apply(whole, x)
      got = algorithm.predict(group, model, x)
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
      right = np.mean(np.argmax(want, -1) == data.labels)
      np.testing.assert_allclose(scores[group.name].accuracy[row], right)
      alone, _ = group.model.apply(own, x)
      right = np.mean(np.argmax(alone, -1) == data.labels)
      np.testing.assert_allclose(
          scores[group.name].views['clients'][row], right
      )


def test_the_servers_net_is_that_of_the_deepest_group_or_of_the_one_named():
  federation = federate_tiny()
  assert set(make(federation).init(jax.random.key(0)).net.params) == {
      'mid0', 'mid1', 'head',
  }  # fmt: skip
  shallow = make(federation, server_group='tiny1')
  assert set(shallow.init(jax.random.key(0)).net.params) == {'mid0', 'head'}


def test_a_servers_net_of_its_own():
  """Its layers after the cut are used; they must fit features and labels."""
  federation = federate_tiny(server_model=tiny_model(3, norm=False))
  net = make(federation).init(jax.random.key(0)).net
  assert set(net.params) == {'mid0', 'mid1', 'mid2', 'head'}
  with pytest.raises(ValueError, match="server_group='tiny1' and server_mod"):
    make(federation, server_group='tiny1')
  wide = federate_tiny(server_model=tiny_model(1, width=5))
  message = r"server_model='tiny1' takes features of shape \(5,\) and has 3 out"
  with pytest.raises(ValueError, match=message):
    make(wide)


def test_features_of_different_shapes_are_refused():
  groups = tuple(
      Group(f'w{w}', tiny_model(1, width=w), np.array([i]))
      for i, w in enumerate((4, 5))
  )
  federation = Federation(groups, tiny_local(), sizes=np.array([3, 3]))
  with pytest.raises(ValueError, match='from all groups, got w4 4, w5 5; ch'):
    make(federation)


@pytest.mark.parametrize(
    'options,message',
    [
        (dict(temperature=0.0), 'temperature must be at least 0.001'),
        (dict(distill_weight=-1.0), 'distill_weight must be at least 0'),
        (dict(server_logits='both'), "^Unknown server_logits 'both'"),
        (dict(server_group='tiny9'), "^Unknown server_group 'tiny9'"),
        (dict(server_batch_size=0), 'server_batch_size must be at least 1'),
    ],
)
def test_bad_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    make(federate_tiny(), **options)


def test_unknown_sizes_are_refused():
  with pytest.raises(ValueError, match=r'needs Federation\(sizes='):
    make(federate_tiny(sizes=None))


@pytest.mark.slow
def test_without_an_upload_the_servers_loss_is_not_known():
  sizes = (8, 8, 8, 8)
  federation = tiny_federation((1,), 4, sizes=np.array(sizes))
  data = tiny_data(sizes).replace(
      preprocess=lambda x, key=None: jnp.nan * x
  )
  algorithm = make(federation)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  run = rounds.make_round(algorithm, federation, cohort_size=4, backend='map')
  _, report = run(state, data, *map(jax.random.key, (1, 2)))
  assert np.isnan(report.server['server_loss'])
