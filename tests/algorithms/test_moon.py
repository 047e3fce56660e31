"""MOON's loss by hand, a round against NumPy, and MOON beside FedAvg."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.algorithms import fedavg, moon
from fedjax_het.algorithms.moon import Client, contrast, moon_loss
from fedjax_het.data.federated import Batch
from fedjax_het.engine import rounds
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.traffic import full_bytes
from fedjax_het.engine.types import Federation, Group, Visit
from fedjax_het.models import create
from fedjax_het.models.blocks import BlockModel, Variables
from tests.models.test_reach import small_maps
from tests.quadratics import play, quadratics
from tests.tiny import (
  preprocess,
  tiny_data,
  tiny_federation,
  tiny_local,
  tiny_model,
)
from tests.trees import assert_trees

E1, E2 = np.eye(4, dtype=np.float32)[:2, None]


@pytest.mark.parametrize(
    ('rows', 'temperature', 'want'),
    [
        ((E1, E1, E2), 0.5, 0.126928),  # log(1 + e^-2)
        ((E1, E2, E1), 0.5, 2.126928),
        ((E1, E1, E2), 1.0, 0.313262),  # log(1 + e^-1)
        ((E1, E1, -E1), 0.5, 0.018150),  # log(1 + e^-4)
    ],
)
def test_the_loss_of_unit_vectors(rows, temperature, want):
  got = contrast(*map(jnp.asarray, rows), temperature)
  np.testing.assert_allclose(got, [want], rtol=2e-5)


@pytest.fixture(scope='module')
def vectors():
  rng = np.random.default_rng(0)
  return tuple(rng.normal(0, 1, (3, 5, 4)).astype(np.float32))


def test_it_is_the_fraction_of_the_paper(vectors):
  def cos(a, b):
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.sum(a * b, axis=1) / norms

  z, z_g, z_p = np.float64(vectors)
  near, far = np.exp(cos(z, z_g) / 0.5), np.exp(cos(z, z_p) / 0.5)
  want = -np.log(near / (near + far))
  np.testing.assert_allclose(contrast(*vectors, 0.5), want, rtol=1e-6)


def test_lengths_do_not_count(vectors):
  z, z_g, z_p = vectors
  want = contrast(z, z_g, z_p, 0.5)
  np.testing.assert_allclose(
      contrast(3 * z, 0.2 * z_g, 7 * z_p, 0.5), want, rtol=1e-5
  )
  slope = jax.grad(lambda z: jnp.sum(contrast(z, z_g, z_p, 0.5)))(z)
  np.testing.assert_allclose(np.sum(slope * z, axis=1), 0, atol=1e-6)
  assert np.min(np.linalg.norm(slope, axis=1)) > 1e-2


def test_equal_models_say_nothing(vectors):
  z, z_g, _ = vectors
  loss, slope = jax.value_and_grad(
      lambda z: jnp.mean(contrast(z, z_g, z_g, 0.5))
  )(z)
  np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
  assert not np.any(slope)


def test_features_of_zeros_have_a_loss_and_a_gradient(vectors):
  zero = jnp.zeros((5, 4))
  for rows in ((zero, *vectors[:2]), (zero,) * 3, (vectors[0], zero, zero)):
    loss, slope = jax.value_and_grad(
        lambda z, rest=rows[1:]: jnp.mean(contrast(z, *rest, 0.5))
    )(rows[0])
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
    assert np.all(np.isfinite(slope)) and np.max(np.abs(slope)) < 2
  # sigmoid(0) / T (u_p - u_g), as of a feature whose norm is 1.
  slope = jax.grad(lambda z: contrast(z, E1, E2, 0.5)[0])(zero[:1])
  np.testing.assert_allclose(slope, E2 - E1, rtol=1e-6)


def perturbed(model, seed):
  """Random variables, unlike initial ones, with positive variances."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda leaf: jnp.asarray(
          rng.uniform(0.2, 1.0, leaf.shape)
          * np.where(rng.random(leaf.shape) < 0.5, 1, -1) ** (leaf.ndim > 1),
          jnp.float32,
      ),
      model.abstract_variables,
  )


def test_the_passes_of_a_step():
  """y in training mode, the two others in test mode; padding is left out."""
  model = tiny_model(2)
  y, x, previous = (perturbed(model, seed) for seed in range(3))
  rng = np.random.default_rng(3)
  images = jnp.asarray(rng.normal(0, 1, (5, *model.input_shape)), jnp.float32)
  mask = jnp.arange(5) < 3
  batch = Batch(images, jnp.array([0, 1, 2, 0, 1]), mask, jnp.arange(5))
  last = len(model.blocks) - 1

  @jax.jit
  def loss(y, visited, mu):
    loss_fn = moon_loss(model, CLASSIFICATION, x, previous, visited, mu, 0.5)
    return loss_fn(y, batch, jax.random.key(0))

  @jax.jit
  def parts(y):
    logits, stats = model.apply(y, images, train=True, mask=mask)
    z, _ = model.apply(y, images, stop=last, train=True, mask=mask)
    z_g, z_p = (model.apply(v, images, stop=last)[0] for v in (x, previous))
    plain = CLASSIFICATION.loss(logits, batch.y, mask)
    return stats, plain, contrast(z, z_g, z_p, 0.5)

  stats, plain, away = jax.device_get(parts(y))
  away = np.mean(away[:3])
  total, (got_stats, metrics) = loss(y, True, 5.0)
  np.testing.assert_allclose(metrics['contrastive_loss'], away, rtol=1e-6)
  np.testing.assert_allclose(total, plain + 5 * away, rtol=1e-6)
  assert_trees(got_stats, stats, rtol=1e-6)
  np.testing.assert_allclose(loss(y, False, 5.0)[0], plain, rtol=1e-6)
  # The placeholder of prev_k on a first visit makes no NaN.
  slope = jax.jit(jax.grad(lambda y: loss(y, False, 5.0)[0]))(y)
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(slope))


@pytest.mark.parametrize('projection', [False, True])
def test_the_feature_is_what_the_output_layer_multiplies(projection):
  """With the projection head, the head's output; the test net has it, too."""
  # The dense blocks of the paper's net.
  _, _, *blocks = create(
      'simple_cnn', (16, 16, 1), 3, width=0.2, projection=projection
  ).blocks
  last = len(blocks) - 1
  model = BlockModel('dense', tuple(blocks), (2, 2, 1), 3, (1, last))
  group = Group('g', model, np.arange(1))
  algorithm = moon(Federation((group,), tiny_local()))
  y, x, previous = (perturbed(model, seed) for seed in range(3))
  images = np.random.default_rng(3).normal(0, 1, (4, 2, 2, 1))
  batch = Batch(
      jnp.asarray(images, jnp.float32), jnp.array([0, 1, 2, 0]),
      jnp.ones(4, bool), jnp.arange(4),
  )  # fmt: skip

  @jax.jit
  def run():
    loss_fn = moon_loss(model, CLASSIFICATION, x, previous, True, 1.0, 0.5)
    features = [
        model.apply(variables, batch.x, stop=last)[0]
        for variables in (y, x, previous)
    ]
    # W z + bias
    head = y.params['head']
    product = features[0] @ head['kernel'] + head['bias'][None]
    logits = algorithm.predict(group, y, batch.x)
    plain = CLASSIFICATION.loss(logits, batch.y, batch.mask)
    away = jnp.mean(contrast(*features, 0.5))
    loss = loss_fn(y, batch, jax.random.key(0))
    return loss, features[0], product, logits, plain, away

  (loss, (_, metrics)), z, product, logits, plain, away = run()
  assert z.shape == (4, 256 if projection else 16)
  assert np.all(np.ptp(logits, axis=0) > 0)
  np.testing.assert_array_equal(product, logits)
  assert abs(away - np.log(2)) > 1e-3
  np.testing.assert_allclose(metrics['contrastive_loss'], away, rtol=1e-6)
  np.testing.assert_allclose(loss, plain + away, rtol=1e-6)


# Beside FedAvg, through the engine.


def test_while_every_client_is_new_it_is_fedavg_bit_for_bit():
  """With mu = 0 also when the first two clients return; two architectures."""
  federation, data = quadratics(
      [3, 7, 2, 4], curvature=(1, 3, 2, 1), sizes=(3, 5, 4, 1), batch_size=2,
      owned=('l1', 'l1 l2') * 2,
  )  # fmt: skip
  cohorts = [(0, 1), (2, 3), (0, 1)]
  want, none, five = (
      [server for server, _ in play(algorithm, federation, data, cohorts)]
      for algorithm in (
          fedavg(federation),
          moon(federation, contrast_weight=0.0),
          moon(federation, contrast_weight=5.0),
      )
  )
  assert_trees(none, want, rtol=0, atol=0)
  assert_trees(five[:2], want[:2], rtol=0, atol=0)
  assert five[2].params['l1'] != want[2].params['l1']


@pytest.fixture(scope='module')
def played():
  """Two rounds, three of four clients: FedAvg, mu = 0 and mu = 5."""
  local = tiny_local(lr=0.1, epochs=1)
  federation = tiny_federation((1,), 4, local=local)
  data, states = tiny_data((8, 6, 8, 7)), {}
  for name, algorithm in (
      ('fedavg', fedavg(federation)),
      ('none', moon(federation, contrast_weight=0.0)),
      ('five', moon(federation, contrast_weight=5.0)),
  ):
    run_round = rounds.make_round(
        algorithm, federation, cohort_size=3, backend='map'
    )
    state = rounds.init_state(algorithm, federation, jax.random.key(0))
    states[name] = [jax.device_get(state)]
    for _ in range(2):
      state, reports = run_round(
          state, data, jax.random.key(1), jax.random.key(2)
      )
      states[name].append(jax.device_get(state))
    states[name].append(reports)
  return federation, states


def test_without_the_loss_it_is_fedavg_bit_for_bit(played):
  """With norms and momentum; the passes of the frozen models are left out."""
  _, states = played
  for report in states['none'][3].values():
    assert list(report.metrics) == ['train_loss']
  for got, want in zip(states['none'][:3], states['fedavg'][:3], strict=True):
    assert_trees(got.server, want.server, rtol=0, atol=0)


def test_the_first_round_is_that_of_fedavg_and_the_second_is_not(played):
  """Bit for bit."""
  _, states = played
  _, first, second, reports = states['five']
  _, want, later, _ = states['fedavg']
  assert_trees(first.server, want.server, rtol=0, atol=0)
  apart = jax.tree.map(
      lambda a, b: np.abs(a - b).max(), second.server.params,
      later.server.params,
  )  # fmt: skip
  assert max(jax.tree.leaves(apart)) > 1e-4
  seen = [r.metrics['contrastive_loss'] for r in reports.values()]
  assert np.max(seen[0]) > 0.1


def test_a_client_keeps_the_model_that_it_trained(played):
  """With statistics; the mean of the kept models is the server's model."""
  federation, states = played
  start, first, second, _ = states['five']
  kept, cohort = [], 0
  for group in federation.groups:
    client = first.clients[group.name]
    assert not np.any(start.clients[group.name].visited)
    for row in np.flatnonzero(client.visited):
      kept.append(jax.tree.map(lambda a, row=row: a[row], client.previous))
    for row in np.flatnonzero(~client.visited):
      assert not any(np.any(a[row]) for a in jax.tree.leaves(client.previous))
    cohort += np.sum(client.visited)
    # Clients that took part are still marked in the next round.
    assert np.all(second.clients[group.name].visited >= client.visited)
  assert cohort == 3
  for part in (0, 1):
    mean = jax.tree.map(
        lambda *leaves: np.mean(leaves, axis=0),
        *(variables[part]['stem'] for variables in kept),
    )
    got = first.server[part]['stem']
    assert_trees(mean, got, rtol=1e-5, atol=1e-6)


def test_who_is_not_there_keeps_its_model(played):
  """One of four clients is not in the cohort; its model does not change."""
  federation, states = played
  _, first, second, reports = states['five']
  for group in federation.groups:
    there = np.isin(group.client_ids, reports[group.name].client_id)
    for row in range(group.num_clients):
      old, new = (
          jax.tree.map(lambda a, row=row: a[row], s.clients[group.name])
          for s in (first, second)
      )
      same = all(
          np.array_equal(a, b)
          for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new))
      )
      assert same != there[row]


def visit_of(model, local, client, data, **options):
  """The result of a visit that starts at `perturbed(model, 0)`."""
  federation = Federation((Group('g', model, np.arange(1)),), local)
  algorithm = moon(federation, **options)
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(0))
  return jax.jit(
      lambda client: algorithm.client_update(
          federation.groups[0], client, perturbed(model, 0), data.client(0),
          visit,
      )
  )(client)  # fmt: skip


def test_a_visit_without_a_step_or_a_rate():
  """Without a step the state stays; at rate 0 prev_k is x, with y's stats."""
  model = tiny_model(1)
  old = Client(
      Variables({}, {}), perturbed(model, 1), jnp.bool_(False)
  )
  data = tiny_data((4,))
  none = data.replace(sizes=jnp.zeros_like(data.sizes))
  new, uplink, _ = visit_of(model, tiny_local(), old, none)
  assert_trees(new, old, rtol=0)
  assert uplink.summed.weight == 0
  still = dataclasses.replace(tiny_local(optax.sgd, 0.0), epochs=1)
  new, uplink, _ = visit_of(
      model, still, old._replace(visited=jnp.bool_(True)), data
  )
  assert_trees(new.previous.params, perturbed(model, 0).params, rtol=0)
  assert not any(map(np.any, jax.tree.leaves(uplink.summed.change)))
  assert new.visited and np.any(
      new.previous.stats['stem']['BatchNorm_0']['mean']
      != perturbed(model, 0).stats['stem']['BatchNorm_0']['mean']
  )


def test_a_previous_model_equal_to_the_received_one_changes_nothing():
  """The loss is log 2 and has no gradient: a visit is that of FedAvg."""
  model = tiny_model(1)
  client = Client(Variables({}, {}), perturbed(model, 0), jnp.bool_(True))
  results = [
      visit_of(
          model, tiny_local(optax.sgd, 0.1), client, tiny_data((6,)),
          contrast_weight=contrast_weight,
      )
      for contrast_weight in (5.0, 0.0)
  ]  # fmt: skip
  (_, got, metrics), (_, want, _) = results
  np.testing.assert_allclose(
      metrics['contrastive_loss'], np.log(2), rtol=1e-6
  )
  assert_trees(got, want, rtol=1e-6, atol=1e-6)
  assert any(map(np.any, jax.tree.leaves(got.summed.change)))


def test_unused_weights_can_be_dropped():
  model = small_maps(2)
  client = Client(
      Variables({}, {}), perturbed(model, 1), jnp.bool_(True)
  )
  results = [
      visit_of(
          model,
          tiny_local(optax.sgd, 0.1, drop_unused_weights=drop),
          client,
          tiny_data((6,)),
          contrast_weight=5.0,
      )
      for drop in (False, True)
  ]
  assert_trees(*results[::-1], rtol=1e-5, atol=1e-6)


def test_only_the_model_travels():
  federation = tiny_federation((1, 2))
  algorithm, group = moon(federation), federation.groups[1]
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
  assert full_bytes(uplink) == full_bytes(sent) + 4


# One round in NumPy.


def oracle_features(weights, names, x):
  """Inputs of all layers of a dense ReLU net; the last is R."""
  inputs = [x]
  for name in names[:-1]:
    a = inputs[-1] @ weights[name]['kernel'] + weights[name]['bias']
    inputs.append(np.maximum(a, 0.0))
  return inputs


def oracle_cosine(a, b):
  """cos(a, b) of rows and its gradient with respect to a."""
  norm_a = np.linalg.norm(a, axis=1, keepdims=True)
  norm_b = np.linalg.norm(b, axis=1, keepdims=True)
  # Zero rows of a get no gradient through the ReLU anyway.
  norm_a, norm_b = (np.where(n > 0, n, 1.0) for n in (norm_a, norm_b))
  cos = np.sum(a * b, axis=1, keepdims=True) / (norm_a * norm_b)
  return cos, (b / norm_b - cos * a / norm_a) / norm_a


def oracle_gradient(y, x, previous, names, images, labels, mu, temperature):
  """Gradient of CE + mu l, with l as the paper's quotient."""
  inputs = oracle_features(y, names, images)
  z, head = inputs[-1], y[names[-1]]
  logits = z @ head['kernel'] + head['bias']
  p = np.exp(logits - logits.max(axis=1, keepdims=True))
  p /= p.sum(axis=1, keepdims=True)
  d = (p - np.eye(p.shape[1])[labels]) / len(labels)
  grads = {names[-1]: dict(kernel=z.T @ d, bias=d.sum(axis=0))}
  d = d @ head['kernel'].T
  if previous is not None:
    cos_g, dcos_g = oracle_cosine(z, oracle_features(x, names, images)[-1])
    cos_p, dcos_p = oracle_cosine(
        z, oracle_features(previous, names, images)[-1]
    )
    near, far = np.exp(cos_g / temperature), np.exp(cos_p / temperature)
    # The derivative of -log(near / (near + far)) with respect to z.
    share = far / (near + far)
    d = d + mu * share * (dcos_p - dcos_g) / temperature / len(labels)
  for name, a, out in zip(
      names[-2::-1], inputs[-2::-1], inputs[:0:-1], strict=True
  ):
    d = d * (out > 0)
    grads[name] = dict(kernel=a.T @ d, bias=d.sum(axis=0))
    d = d @ y[name]['kernel'].T
  return grads


@pytest.fixture(scope='module')
def one_round():
  """Two depths, four clients, the last on its first visit; three steps."""
  federation = tiny_federation(
      (1, 2), norm=False, local=tiny_local(optax.sgd, 0.1, 3, 8)
  )
  algorithm = moon(
      federation, contrast_weight=0.8, temperature=0.4, weights='data'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  deep = federation.groups[1].model
  server = perturbed(deep, 7)
  clients = {
      group.name: Client(
          state.clients[group.name].own,
          jax.tree.map(
              lambda *rows: jnp.stack(rows),
              *(perturbed(group.model, 10 + k) for k in group.client_ids),
          ),
          jnp.asarray(group.client_ids != 3),
      )
      for group in federation.groups
  }
  before = jax.device_get(state._replace(server=server, clients=clients))
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )

  def run(data):
    """The state after the round."""
    state = jax.tree.map(jnp.asarray, before)
    state, _ = run_round(state, data, jax.random.key(1), jax.random.key(2))
    return jax.device_get(state)

  return federation, before, run


def test_a_block_does_not_depend_on_clients_that_lack_it(one_round):
  """Other labels and fewer examples of tiny1 do not change mid1 of tiny2."""
  federation, before, run = one_round
  data = tiny_data((5, 8, 3, 7))
  shallow, deep = federation.groups
  labels, sizes = data.labels, data.sizes
  for k in shallow.client_ids.tolist():
    mine = data.index[k, : data.sizes[k]]
    labels = labels.at[mine].set((labels[mine] + 1) % 3)
    sizes = sizes.at[k].add(-1)
  got, want = (
      run(d) for d in (data, data.replace(labels=labels, sizes=sizes))
  )
  old, got_x, want_x = (s.server.params for s in (before, got, want))
  assert_trees(got_x['mid1'], want_x['mid1'], rtol=0, atol=0)
  kernel = lambda x, name: x[name]['Dense_0']['kernel']  # noqa: E731
  assert np.any(kernel(got_x, 'mid1') != kernel(old, 'mid1'))
  for name in ('stem', 'mid0', 'head'):
    assert np.any(kernel(got_x, name) != kernel(want_x, name))
  assert_trees(
      got.clients[deep.name], want.clients[deep.name], rtol=0, atol=0
  )


def test_one_round_in_numpy(one_round):
  """Two depths, four clients, the last on its first visit; three steps."""
  federation, before, run = one_round
  data, mu, temperature = tiny_data((5, 8, 3, 7)), 0.8, 0.4
  after = run(data)

  def dense(tree):
    return {
        n: {i: np.float64(leaf) for i, leaf in block['Dense_0'].items()}
        for n, block in tree.items()
    }

  x, images = dense(before.server.params), preprocess(data.images)
  total = {n: {i: 0.0 for i in leaves} for n, leaves in x.items()}
  weight = dict.fromkeys(x, 0)
  for group in federation.groups:
    names = list(group.model.block_names)
    for row, k in enumerate(group.client_ids.tolist()):
      old, new = (
          jax.tree.map(lambda a, row=row: a[row], s.clients[group.name])
          for s in (before, after)
      )
      index = np.asarray(data.index[k, : data.sizes[k]])
      batch = (
          np.asarray(images, np.float64)[index].reshape(len(index), -1),
          np.asarray(data.labels)[index],
      )
      y = {n: dict(x[n]) for n in names}
      previous = dense(old.previous.params) if old.visited else None
      for _ in range(3):
        grads = oracle_gradient(
            y, x, previous, names, *batch, mu, temperature
        )
        for n in names:
          y[n] = {i: y[n][i] - 0.1 * grads[n][i] for i in y[n]}
      assert new.visited
      assert_trees(dense(new.previous.params), y, rtol=1e-5, atol=1e-5)
      for n in names:
        weight[n] += len(index)
        total[n] = {
            i: total[n][i] + len(index) * (y[n][i] - x[n][i]) for i in y[n]
        }
  want = {
      n: {i: x[n][i] + total[n][i] / weight[n] for i in x[n]} for n in x
  }
  assert_trees(dense(after.server.params), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    'options',
    [dict(contrast_weight=np.nan), dict(contrast_weight=-1.0),
     dict(temperature=0.0), dict(temperature=np.inf)],
)  # fmt: skip
def test_wrong_options_are_refused(options):
  with pytest.raises(ValueError, match=f'{next(iter(options))} must be'):
    moon(tiny_federation(), **options)


def test_long_features_of_half_precision():
  """The squares of float16 features above 255 would overflow."""
  z, z_g, z_p = 100 * jax.random.normal(jax.random.key(0), (3, 4, 20))
  want = contrast(z, z_g, z_p, 0.5)
  half = (a.astype(jnp.float16) for a in (z, z_g, z_p))
  got = contrast(*half, 0.5)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, want, rtol=1e-2)
