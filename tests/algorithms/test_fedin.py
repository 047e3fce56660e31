"""FedIN against its equations, and its ablations against the baselines."""

import sys

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedin import Downlink, fedin
from fedjax_het.algorithms.fedin.capture import Sizes, empty_buffer, write
from fedjax_het.algorithms.fedin.pairs import Pairs
from fedjax_het.algorithms.fedin.passes import Features, forward, in_loss
from fedjax_het.algorithms.fedin.steps import takes_one_pass
from fedjax_het.algorithms.fedprox import fedprox
from fedjax_het.data.federated import Normalise, federate
from fedjax_het.engine import rounds, traffic
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.types import Federation, Group, Maybe, Visit
from fedjax_het.models import create
from fedjax_het.models.blocks import BlockModel, Variables
from tests.algorithms.suite import Case, Clocks
from tests.quadratics import play, quadratics
from tests.tiny import SHAPE, tiny_data, tiny_federation, tiny_local

# What the shared suite runs, see `tests/algorithms/suite.py`.
SUITE = [
    Case(dict(num_pairs=4)),
    Case(dict(num_pairs=4, noise=0.8)),
]
CLOCKS = Clocks(dict(num_pairs=2, rule='exact', lam=2.0), 'in_loss')
RATE = 0.5


def visit():
  return Visit(jnp.int32(0), jnp.int32(0), jax.random.key(5))


def fixed_pairs():
  keys = jax.random.split(jax.random.key(9))
  return Pairs(*(jax.random.normal(key, (4, 4)) for key in keys))


def written_loss(model, variables, pairs):
  """L_IN of v2's Eq. 7, with all pairs: the mean of (f(s_in) - s_out)^2."""
  first, last = model.cut
  out, _ = model.apply(
      variables, pairs.s_in, start=first, stop=last, train=True
  )
  return jnp.mean((out - pairs.s_out) ** 2)


def one_step(**options):
  """The change by one full-batch SGD step, and the gradients at its start."""
  local = tiny_local(optax.sgd, RATE, epochs=1, batch_size=4)
  federation = tiny_federation(depths=(2,), per_group=1, local=local)
  group = federation.groups[0]
  data = tiny_data([4]).client(0)
  algorithm = fedin(federation, num_pairs=4, **options)
  server = algorithm.init(jax.random.key(0))
  pairs = fixed_pairs()
  sent = Downlink(server.model, Maybe(pairs, jnp.ones(4, bool)))
  client = algorithm.init_client(group, 0, jax.random.key(0))

  @jax.jit
  def update(client, sent, data):
    return algorithm.client_update(group, client, sent, data, visit())

  _, uplink, metrics = update(client, sent, data)
  start = algorithm.client_model(server, client, group)
  change = uplink.summed.change
  # The one batch in table order: order does not change a mean.
  batch = data.batch(jnp.arange(4))

  def local_loss(params):
    logits, _ = group.model.apply(
        Variables(params, start.stats), batch.x, train=True
    )
    return CLASSIFICATION.loss(logits, batch.y)

  def loss_in(params):
    return written_loss(group.model, Variables(params, start.stats), pairs)

  @jax.jit
  def gradients(params):
    value, g_in = jax.value_and_grad(loss_in)(params)
    return jax.grad(local_loss)(params), g_in, value

  g_loc, g_in, value = gradients(start.params)
  return group.model, change, g_loc, g_in, metrics, value


def assert_tree_close(got, want):
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
      got,
      want,
  )


@pytest.mark.parametrize('lam', [1.0, 2.0])
def test_fixed_rule_steps_with_the_combination(lam):
  """Intermediate layers move by G_in + (lam/2) G_loc, others by G_loc.

  With lam = 2 that is the gradient of L_loc + L_IN (v1 Eq. 16).
  """
  model, change, g_loc, g_in, metrics, value = one_step(lam=lam)
  want = {}
  for name in model.block_names:
    if name in model.intermediate:
      want[name] = jax.tree.map(
          lambda i, g: -RATE * (i + lam / 2 * g), g_in[name], g_loc[name]
      )
    else:
      want[name] = jax.tree.map(lambda g: -RATE * g, g_loc[name])
  assert_tree_close(change, want)
  np.testing.assert_allclose(metrics['in_loss'], value, rtol=1e-5)


def test_the_loss_counts_the_pairs_that_are_there():
  """The mean over two of four pairs is that of the two alone."""
  group = tiny_federation(depths=(2,), per_group=1, norm=False).groups[0]
  variables, pairs = group.model.init(jax.random.key(0)), fixed_pairs()
  mask = jnp.array([True, False, True, False])
  got = in_loss(group.model, variables, pairs, mask, None)
  two = jax.tree.map(lambda a: a[::2], pairs)
  want = written_loss(group.model, variables, two)
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_exact_rule_over_the_whole_tree():
  """With scope 'tree' b and a are sums over all intermediate layers."""
  model, change, g_loc, g_in, _, _ = one_step(rule='exact', scope='tree')
  leaves = [
      jax.tree.leaves([t[name] for name in model.intermediate])
      for t in (g_in, g_loc, change)
  ]
  inner = lambda x, y: sum(  # noqa: E731
      float(jnp.vdot(i, j)) for i, j in zip(x, y, strict=True)
  )
  b, a = inner(leaves[0], leaves[1]), inner(leaves[1], leaves[1])
  each = [float(jnp.vdot(i, g)) for i, g in zip(leaves[0], leaves[1])]
  # Leaf by leaf some oppose G_loc where the whole does not, or the reverse.
  assert len({value < 0 for value in each}) == 2
  for i, g, z in zip(*leaves, strict=True):
    want = i if b >= 0 else i - b / a * g
    np.testing.assert_allclose(-z / RATE, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('rule', ['fixed', 'sequential'])
def test_two_steps_with_momentum_and_the_proximal_term(rule):
  """The prox is a part of G_loc; the second step has momentum of its own."""
  rate, beta, mu, lam = 0.1, 0.9, 0.7, 2.0
  local = tiny_local(lr=rate, epochs=2, batch_size=4)
  federation = tiny_federation((2,), 1, local=local, norm=False)
  (group,) = federation.groups
  algorithm = fedin(federation, num_pairs=4, rule=rule, mu=mu, lam=lam)
  server = algorithm.init(jax.random.key(0))
  client = algorithm.init_client(group, 0, jax.random.key(0))
  data, pairs, model = tiny_data([4]).client(0), fixed_pairs(), group.model
  sent = Downlink(server.model, Maybe(pairs, jnp.ones(4, bool)))
  _, uplink, _ = jax.jit(
      lambda sent: algorithm.client_update(group, client, sent, data, visit())
  )(sent)
  start = algorithm.client_model(server, client, group).params
  batch = data.batch(jnp.arange(4))

  def local_loss(params):
    logits, _ = model.apply(Variables(params, {}), batch.x, train=True)
    prox = sum(
        jnp.sum((a - b) ** 2)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(start))
    )
    return CLASSIFICATION.loss(logits, batch.y) + mu / 2 * prox

  @jax.jit
  def gradients(params):
    g_in = jax.grad(
        lambda p: written_loss(model, Variables(p, {}), pairs)
    )(params)  # fmt: skip
    return jax.grad(local_loss)(params), g_in

  def add(tree, other, factor):
    return jax.tree.map(lambda a, b: a + factor * b, tree, other)

  params, zeros = start, jax.tree.map(jnp.zeros_like, start)
  trace, own_trace = zeros, zeros
  for _ in range(2):
    g_loc, g_in = gradients(params)
    if rule == 'fixed':
      # Extractor and classifier: G_IN is 0 there, and lam / 2 = 1.
      trace = add(add(g_in, g_loc, lam / 2), trace, beta)
      params = add(params, trace, -rate)
    else:
      trace = add(g_loc, trace, beta)
      params = add(params, trace, -rate)
      own_trace = add(gradients(params)[1], own_trace, beta)
      params = add(params, own_trace, -rate)
  assert_tree_close(uplink.summed.change, add(params, start, -1.0))


def test_exact_rule_never_opposes_the_local_gradient():
  model, change, g_loc, g_in, _, _ = one_step(rule='exact')
  conflicts = 0
  for name in model.intermediate:
    for z, g, i in zip(
        *(jax.tree.leaves(t[name]) for t in (change, g_loc, g_in)), strict=True
    ):
      z, b, a = -z / RATE, float(jnp.vdot(i, g)), float(jnp.vdot(g, g))
      want = i if b >= 0 else i - b / a * g
      conflicts += b < 0
      np.testing.assert_allclose(z, want, rtol=1e-4, atol=1e-6)
      assert float(jnp.vdot(z, g)) >= -1e-6
  assert conflicts > 0


def test_sequential_rule_takes_two_steps():
  """'w/o Opt': the second step is G_in at the parameters after the first."""
  model, change, g_loc, _, _, _ = one_step(rule='sequential')
  for name in model.extractor + model.classifier:
    assert_tree_close(
        change[name], jax.tree.map(lambda g: -RATE * g, g_loc[name])
    )
  start = model.init(jax.random.key(0))
  after = jax.tree.map(lambda w, g: w - RATE * g, start.params, g_loc)
  g_in = jax.grad(
      lambda params: written_loss(
          model, start._replace(params=params), fixed_pairs()
      )
  )(after)
  for name in model.intermediate:
    want = jax.tree.map(
        lambda a, b: -RATE * (a + b), g_loc[name], g_in[name]
    )
    assert_tree_close(change[name], want)


def test_steps_take_the_received_pairs_in_turn():
  """At a rate of 0, two steps see two batches of pairs, each once."""
  local = tiny_local(optax.sgd, 0.0, epochs=1, batch_size=4)
  federation = tiny_federation(
      depths=(2,), per_group=1, local=local, norm=False
  )
  group, algorithm = federation.groups[0], fedin(federation, num_pairs=8)
  keys = jax.random.split(jax.random.key(9))
  pairs = Pairs(*(jax.random.normal(key, (8, 4)) for key in keys))
  server = algorithm.init(jax.random.key(0))
  client = algorithm.init_client(group, 0, jax.random.key(0))
  _, _, metrics = algorithm.client_update(
      group,
      client,
      Downlink(server.model, Maybe(pairs, jnp.ones(8, bool))),
      tiny_data([8]).client(0),
      visit(),
  )
  model = algorithm.client_model(server, client, group)
  first, second = (
      written_loss(
          group.model, model, jax.tree.map(lambda a, i=i: a[i : i + 4], pairs)
      )
      for i in (0, 4)
  )
  assert abs(first - second) > 1e-3
  np.testing.assert_allclose(
      metrics['in_loss'], (first + second) / 2, rtol=1e-5
  )


def test_in_loss_touches_the_intermediate_layers_only():
  model, _, _, g_in, _, _ = one_step()
  for name in model.extractor + model.classifier:
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(g_in[name]))


def test_pairs_of_the_own_unchanged_model_give_no_loss():
  group = tiny_federation(depths=(2,), per_group=1).groups[0]
  variables = group.model.init(jax.random.key(0))
  x = tiny_data([6]).client(0).batch(jnp.arange(6)).x
  _, pairs, _, _ = forward(group.model, variables, x, None, jax.random.key(1))
  loss = in_loss(group.model, variables, pairs, jnp.ones(6, bool), None)
  assert float(loss) == 0.0


def run(make, num_rounds, norm=True, local=None, **options):
  federation = tiny_federation((1, 2), 3, norm=norm, local=local)
  algorithm = make(federation, **options)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=6, backend='map'
  )
  for _ in range(num_rounds):
    state, reports = run_round(
        state, tiny_data(), jax.random.key(1), jax.random.key(2)
    )
  server = state.server
  return getattr(server, 'model', server), state, reports


def assert_tree_equal(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.fixture(scope='module')
def prox():
  return run(fedprox, 2, mu=0.1)[0]


def test_without_in_training_it_is_fedprox(prox):
  """'w/o IN' is FedProx; the keys differ by the dropout draw alone."""
  got = run(fedin, 2, in_training=False)[0]
  federation = tiny_federation()
  algorithm, group = fedin(federation, in_training=False), federation.groups[0]
  sent = jax.eval_shape(
      lambda key: algorithm.downlink(algorithm.init(key), group, visit()),
      jax.random.key(0),
  )
  assert sent.pairs == Maybe((), jax.ShapeDtypeStruct((0,), bool))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(prox), strict=True):
    assert a.shape == b.shape
  assert_tree_equal(got, prox)


def test_steps_of_a_visit_are_those_of_local_training():
  """If `steps` is set, it takes as many as FedProx, not whole epochs."""
  local = tiny_local(steps=3)
  got = run(fedin, 1, local=local, in_training=False)[0]
  assert_tree_equal(got, run(fedprox, 1, local=local, mu=0.1)[0])


def test_first_round_is_local_training():
  """There are no pairs yet, so the step is that of FedProx.

  Equal up to rounding: the sums of one pass have twice as many terms, half of
  them 0. SGD is used because a bias before a norm has a zero gradient, whose
  rounding error Adam would scale up to a full step.
  """
  sgd = tiny_local(optax.sgd)
  got = run(fedin, 1, local=sgd, num_pairs=4)[0]
  assert_tree_close(got, run(fedprox, 1, local=sgd)[0])


def test_without_mu_fedprox_is_fedavg(prox):
  plain = run(fedavg, 2)[0]
  assert_tree_equal(run(fedprox, 2, mu=0.0)[0], plain)
  same = [
      np.array_equal(a, b)
      for a, b in zip(jax.tree.leaves(prox), jax.tree.leaves(plain))
  ]
  assert not all(same)


def test_every_client_of_the_cohort_has_its_pairs_stored():
  _, state, reports = run(fedin, 1, num_pairs=4)
  # Clients hold 5, 8, 3, 7, 8, 6 examples: one has fewer than four.
  assert np.asarray(state.server.store.filled).sum(1).tolist() == [
      4, 4, 3, 4, 4, 4,
  ]  # fmt: skip
  down, up = rounds.round_bytes(reports['tiny1'], 6)
  weights = traffic.num_bytes(reports['tiny1'].down._replace(
      share=jnp.zeros_like(reports['tiny1'].down.share)))[0]
  assert down == 3 * weights
  # Clients 0, 2 and 4 send 4, 3 and 4 pairs, and a coefficient each.
  assert up == down + 3 * 4 + (4 + 3 + 4) * (4 + 4) * 4


@pytest.mark.parametrize('options', [
    dict(capture='training', num_pairs=8),
    *(pytest.param(options, marks=pytest.mark.slow) for options in [
        dict(aggregation='ends', lam=2.0, mu=0.0, capture='training',
             num_pairs=8),
        dict(sigma=0.1, noise_at='upload', clip=0.5, num_pairs=4),
        dict(noise=0.8, num_pairs=4),
        dict(num_pairs=2),
        dict(rule='sequential', aggregation='architecture', num_pairs=4),
    ]),
])  # fmt: skip
def test_options_train(options):
  _, state, reports = run(fedin, 2, **options)
  for leaf in jax.tree.leaves(state):
    assert np.all(np.isfinite(leaf))
  for report in reports.values():
    assert np.all(np.asarray(report.metrics['in_loss']) > 0)
  if options.get('noise_at') == 'upload':
    clean = run(fedin, 2, num_pairs=4)[1].server.store.pairs.s_in
    assert np.any(state.server.store.pairs.s_in != clean)


def variables_and_inputs():
  """A tiny group, its initial variables, and random inputs."""
  federation = tiny_federation((2,), 1, norm=False)
  group, algorithm = federation.groups[0], fedin(federation)
  server = algorithm.init(jax.random.key(0))
  client = algorithm.init_client(group, 0, jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (64, *SHAPE))
  return federation, algorithm.client_model(server, client, group), x


def test_noise_falls_on_both_features_and_on_all_that_follows():
  federation, variables, x = variables_and_inputs()
  model = federation.groups[0].model
  first, last = model.cut

  def span(rows, **kwargs):
    return model.apply(variables, rows, **kwargs)[0]

  logits, (s_in, s_out), _, _ = forward(
      model, variables, x, None, jax.random.key(2), Features(noise=0.8)
  )
  clean = span(x, stop=first), span(s_in, start=first, stop=last)
  for noisy, plain in zip((s_in, s_out), clean, strict=True):
    # 256 numbers, so that the ratio is known to some 5 %.
    assert jnp.std(noisy - plain) / jnp.std(plain) == pytest.approx(0.8, 0.2)
  np.testing.assert_allclose(
      logits, span(s_out, start=last), rtol=1e-5, atol=1e-6
  )


def clipped(feature, clip):
  """Rows of at most this L2 norm."""
  norms = np.linalg.norm(feature, axis=1, keepdims=True) + 1e-12
  return feature * np.minimum(1, clip / norms)


@pytest.mark.parametrize('noise_at', ['forward', 'upload'])
def test_uploaded_pairs_are_clipped_and_have_noise_of_sigma(noise_at):
  """Without training the pairs of two runs are of the same examples."""
  local = tiny_local(optax.sgd, 0.0, epochs=1, batch_size=64)
  federation = tiny_federation((2,), 1, norm=False, local=local)
  group, data = federation.groups[0], tiny_data([64]).client(0)
  model = group.model

  def uploaded(**options):
    algorithm = fedin(federation, num_pairs=64, capture='final', **options)
    server = algorithm.init(jax.random.key(0))
    client = algorithm.init_client(group, 0, jax.random.key(0))
    sent = algorithm.downlink(server, group, visit())
    _, uplink, _ = jax.jit(lambda sent: algorithm.client_update(
        group, client, sent, data, visit()
    ))(sent)  # fmt: skip
    return algorithm.client_model(server, client, group), uplink.kept.value

  variables, plain = uploaded()
  _, got = uploaded(clip=0.05, sigma=0.02, noise_at=noise_at)
  s_in, s_out = clipped(plain.s_in, 0.05), clipped(plain.s_out, 0.05)
  if noise_at == 'forward':  # s_out follows from the noisy s_in.
    first, last = model.cut
    s_out, _ = model.apply(variables, got.s_in, start=first, stop=last)
    s_out = clipped(s_out, 0.05)
  for feature in plain:
    assert np.linalg.norm(feature, axis=1).max() > 0.1  # Clipping acts.
  for want, protected in ((s_in, got.s_in), (s_out, got.s_out)):
    # 256 numbers, so that the deviation is known to some 5 %.
    assert np.std(protected - want) == pytest.approx(0.02, rel=0.2)
  # The two draws are independent.
  draws = [np.ravel(p - w) for w, p in ((s_in, got.s_in), (s_out, got.s_out))]
  assert abs(np.corrcoef(draws)[0, 1]) < 0.3


def test_final_pairs_are_those_of_the_trained_model():
  local = tiny_local(optax.sgd, RATE, epochs=1, batch_size=4)
  federation = tiny_federation((2,), 1, norm=False, local=local)
  (group,) = federation.groups
  algorithm = fedin(federation, num_pairs=4, capture='final')
  data = tiny_data([4]).client(0)
  server = algorithm.init(jax.random.key(0))
  client = algorithm.init_client(group, 0, jax.random.key(0))
  sent = algorithm.downlink(server, group, visit())
  _, uplink, _ = algorithm.client_update(group, client, sent, data, visit())
  start = algorithm.client_model(server, client, group)
  end = jax.tree.map(jnp.add, start.params, uplink.summed.change)
  x = data.batch(jnp.arange(4)).x
  order = lambda a: a[np.lexsort(np.asarray(a).T)]  # noqa: E731
  for stop, got in zip(group.model.cut, uplink.kept.value):
    want, _ = group.model.apply(Variables(end, {}), x, stop=stop)
    old, _ = group.model.apply(start, x, stop=stop)
    np.testing.assert_allclose(order(got), order(want), rtol=1e-4, atol=1e-5)
    assert np.abs(order(got) - order(old)).max() > 1e-2


def test_a_buffer_keeps_the_last_batches():
  """Three steps into room for two: the first one is overwritten."""
  buffer = empty_buffer(Sizes(2, 4), ((3,), (5,)))
  assert not np.any(buffer.present)
  for step in range(3):
    pairs = Pairs(jnp.full((6, 3), 1.0 + step), jnp.full((6, 5), 11.0 + step))
    mask = jnp.arange(6) < 4 - step
    buffer = write(buffer, pairs, mask, jnp.int32(step))
  assert buffer.value.s_in[:, :, 0].tolist() == [[3.0] * 4, [2.0] * 4]
  assert buffer.value.s_out[:, :, 0].tolist() == [[13.0] * 4, [12.0] * 4]
  assert buffer.present.sum(1).tolist() == [2, 3]


@pytest.mark.parametrize(('weights', 'mean'), [('data', 2.5), ('uniform', 3.0)])
def test_weights_by_the_number_of_examples(weights, mean):
  """v2's Eq. 21: clients of 5 and 3 examples with minima 1 and 5, two steps."""
  federation, data = quadratics([1, 5], sizes=(5, 3))
  algorithm = fedin(federation, weights=weights, mu=0.0, in_training=False)
  ((server, _),) = play(algorithm, federation, data, [(0, 1)])
  got = server.model.params['l1']['w']
  np.testing.assert_allclose(got, mean * (1 - 0.9**2), rtol=1e-5)


def test_pairs_of_the_final_pass_are_noisy_where_the_passes_are():
  """Without training the pairs of two runs are of the same examples."""
  local = tiny_local(optax.sgd, 0.0, epochs=1, batch_size=64)
  federation = tiny_federation((2,), 1, norm=False, local=local)
  group, data = federation.groups[0], tiny_data([64]).client(0)

  def s_in(**options):
    algorithm = fedin(federation, num_pairs=64, capture='final', **options)
    server = algorithm.init(jax.random.key(0))
    sent = algorithm.downlink(server, group, visit())
    client = algorithm.init_client(group, 0, jax.random.key(0))
    update = jax.jit(lambda sent: algorithm.client_update(
        group, client, sent, data, visit()
    )[1].kept.value.s_in)  # fmt: skip
    return update(sent)

  plain, noisy = s_in(), s_in(noise=0.8)
  assert jnp.std(noisy - plain) / jnp.std(plain) == pytest.approx(0.8, 0.2)


@pytest.mark.parametrize('noise_at', ['forward', 'upload'])
def test_the_net_in_tests_is_clipped_as_in_training(noise_at):
  """Noise is for training alone; clipping is no noise."""
  federation, variables, x = variables_and_inputs()
  group = federation.groups[0]
  algorithm = fedin(federation, clip=0.1, noise=0.8, noise_at=noise_at)
  in_training = Features(clip=0.1) if noise_at == 'forward' else Features()
  want, (s_in, s_out), _, _ = forward(
      group.model, variables, x, None, jax.random.key(2), in_training
  )
  got = algorithm.predict(group, variables, x)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  if noise_at == 'forward':
    for feature in (s_in, s_out):
      assert jnp.linalg.norm(feature, axis=1).max() <= 0.1001
    plain, _ = group.model.apply(variables, x)
    assert jnp.abs(plain - got).max() > 0.1


def test_the_number_of_pairs_follows_the_batch():
  for batch_size in (4, 8):
    federation = tiny_federation(local=tiny_local(batch_size=batch_size))
    for algorithm in (fedin(federation), fedin(federation, num_pairs=None)):
      server = jax.eval_shape(algorithm.init, jax.random.key(0))
      assert server.store.filled.shape == (6, batch_size)


def test_a_client_without_young_pairs_trains_on_its_own_data_alone():
  """Its visit equals one with an empty store, bit for bit."""
  federation = tiny_federation()
  algorithm = fedin(federation, max_pair_age=2)
  group, data = federation.groups[0], tiny_data().client(0)
  empty = algorithm.init(jax.random.key(0))
  store = empty.store._replace(
      pairs=jax.tree.map(jnp.ones_like, empty.store.pairs),
      filled=jnp.ones_like(empty.store.filled),
  )

  def visited(server):
    sent = algorithm.downlink(server, group, visit())
    client = algorithm.init_client(group, 0, jax.random.key(0))
    return sent, algorithm.client_update(group, client, sent, data, visit())

  alone = visited(empty)[1]
  for age, young in ((2, True), (3, False)):
    old = store._replace(age=jnp.full_like(store.age, age))
    sent, trained = visited(empty._replace(store=old))
    assert np.asarray(sent.pairs.present).tolist() == [young] * 4
    assert bool(trained[2]['in_loss'] > 0) == young
    if not young:
      assert_tree_equal(trained, alone)


def test_ages_follow_the_rounds():
  """Two of six clients a round; ages count rounds from a client's upload."""
  federation = tiny_federation()
  algorithm = fedin(federation, max_pair_age=1)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=2, backend='map'
  )
  last = {}
  for number in range(1, 5):
    state, reports = run_round(
        state, tiny_data(), jax.random.key(1), jax.random.key(2)
    )
    for report in reports.values():
      last |= {int(i): number for i in report.client_id if i < 6}
    store = state.server.store
    for client, seen in last.items():
      assert int(store.age[client]) == number + 1 - seen
    assert set(np.flatnonzero(store.filled.any(1))) == set(last)
  assert 2 < len(last)


def test_without_a_limit_no_ages_are_kept():
  """The server's state then has the structure of older checkpoints."""
  server = jax.eval_shape(fedin(tiny_federation()).init, jax.random.key(0))
  assert server.store.age is None and len(jax.tree.leaves(server.store)) == 3


def test_captured_pairs_are_those_of_the_last_batches():
  """With a zero learning rate they equal the features of training batches."""
  local = tiny_local(optax.sgd, 0.0, epochs=1, batch_size=4)
  federation = tiny_federation(
      depths=(1,), per_group=1, local=local, norm=False
  )
  group = federation.groups[0]
  algorithm = fedin(federation, num_pairs=8, capture='training')
  data = tiny_data([7]).client(0)
  server = algorithm.init(jax.random.key(0))
  client = algorithm.init_client(group, 0, jax.random.key(0))
  sent = algorithm.downlink(server, group, visit())
  _, uplink, _ = algorithm.client_update(group, client, sent, data, visit())
  model = algorithm.client_model(server, client, group)
  _, want, _, _ = forward(
      group.model, model, data.batch(jnp.arange(7)).x, None, jax.random.key(0)
  )
  pairs, mask = uplink.kept
  assert int(mask.sum()) == 7
  order = lambda a: a[np.lexsort(np.asarray(a).T)]  # noqa: E731
  np.testing.assert_allclose(
      order(pairs.s_in[mask]), order(want.s_in), rtol=1e-5, atol=1e-6
  )
  np.testing.assert_allclose(
      order(pairs.s_out[mask]), order(want.s_out), rtol=1e-5, atol=1e-6
  )


def exchanged(models, shape, **options):
  """Sizes of the parameters and of the pairs in a downlink, from shapes."""
  groups = tuple(
      type(tiny_federation().groups[0])(
          name, create(name, shape, 10), np.array([i])
      )
      for i, name in enumerate(models)
  )
  federation = type(tiny_federation())(groups, tiny_local(batch_size=16))
  algorithm = fedin(federation, **options)
  server = jax.eval_shape(algorithm.init, jax.random.key(0))
  sent = jax.eval_shape(
      lambda s: algorithm.downlink(s, groups[0], visit()), server
  )
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
  return count(sent.model.params), count(sent.pairs.value)


def test_sizes_of_both_papers():
  weights, pairs = exchanged(['resnet10', 'resnet26'], (32, 32, 3))
  assert (weights, pairs) == (4_910_922, 73_728)
  weights, pairs = exchanged(
      ['fedin_a', 'fedin_e'], (32, 32, 3), aggregation='ends', num_pairs=64
  )
  assert (weights, pairs) == (1_920 + 10_250, 64 * (64 * 16 * 16 + 1024))


@pytest.mark.parametrize(
    'options,message',
    [
        (dict(rule='exakt'), "^Unknown rule 'exakt'"),
        (dict(capture='x'), "^Unknown capture 'x'"),
        (dict(noise_at='x'), "^Unknown noise_at 'x'"),
        (dict(mu=-1.0), 'mu must be at least 0, got -1.0'),
        (dict(noise=-1.0), 'noise must be at least 0'),
        (dict(lam=-1.0), 'lam must be at least 0'),
        (dict(scope='x'), "^Unknown scope 'x'"),
        (dict(clip=-3.0), 'clip must be above 0, got -3.0'),
        (dict(num_pairs=6), 'num_pairs must be at most the batch size 4, or a'),
        (dict(max_pair_age=0), 'max_pair_age must be at least 1, got 0'),
        (dict(aggregation='x'), "^Unknown aggregation 'x'"),
    ],
)
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    fedin(tiny_federation(), **{'num_pairs': 4, **options})


def visit_with_pairs(norm, present, drop_last, options):
  """Two SGD steps of a small ResNet on 7 images and 8 received pairs."""
  local = tiny_local(
      optax.sgd, 0.05, epochs=1, batch_size=4, drop_last=drop_last
  )
  model = create('mini_resnet6', (4, 4, 1), 3, width=1 / 8, norm=norm)
  group = Group('mini', model, np.arange(1))
  images = np.random.default_rng(0).integers(0, 256, (7, 4, 4, 1), np.uint8)
  data = federate(
      images, np.arange(7) % 3, [np.arange(7)], Normalise((0.5,), (0.25,))
  ).client(0)
  algorithm = fedin(Federation((group,), local), num_pairs=8, **options)
  server = algorithm.init(jax.random.key(0))
  first, last = model.cut
  pairs = Pairs(*(
      jax.random.normal(jax.random.key(i), (8, *model.shapes[i - 1]))
      for i in (first, last)
  ))
  sent = Downlink(server.model, Maybe(pairs, present))
  client = algorithm.init_client(group, 0, jax.random.key(0))
  own, uplink, metrics = jax.jit(
      lambda sent: algorithm.client_update(group, client, sent, data, visit())
  )(sent)
  return own, uplink, metrics


@pytest.mark.parametrize('norm,present,drop_last,options', [
    ('batch', 'ttftffff', False, dict(noise=0.8, capture='training')),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ('none', 'ttftffff', False, dict(aggregation='none')),
        ('batch', 'tttttttt', False, {}),
        ('batch', 'ttttttft', True, dict(mu=0.0, lam=2.0, aggregation='ends')),
        ('batch', 'ffffffff', False, dict(mu=1.0)),
        ('batch_only', 'ttftfttt', False, dict(lam=0.3, clip=0.5, sigma=0.1)),
        ('group', 'ttftffff', False,
         dict(mu=1.0, noise=0.8, noise_at='upload')),
    ]),
])  # fmt: skip
def test_one_pass_takes_the_steps_of_two(
    monkeypatch, norm, present, drop_last, options
):
  """The second batch has 3 images; some or all pairs are missing."""
  present = jnp.array([c == 't' for c in present])
  got = visit_with_pairs(norm, present, drop_last, options)
  asked = []
  monkeypatch.setattr(
      sys.modules[fedin.__module__],
      'takes_one_pass',
      lambda *args: asked.append(takes_one_pass(*args)),
  )
  want = visit_with_pairs(norm, present, drop_last, options)
  assert asked == [True]  # `got` took one pass, `want` two.
  assert jax.tree.structure(got) == jax.tree.structure(want)
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-6),
      got,
      want,
  )
  assert bool(want[2]['in_loss'] > 0) == bool(present.any())


class _Stem(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.relu(nn.Dense(5)(x.reshape(len(x), -1)))


class _Body(nn.Module):
  @nn.compact
  def __call__(self, x, train=False):
    norm = nn.BatchNorm(use_running_average=not train)
    return nn.relu(norm(nn.Dense(6)(x)))


def test_a_norm_of_ones_own_never_sees_the_pairs():
  """Without pairs, as in round 1, a visit is FedAvg's."""
  model = BlockModel.from_module(
      {'stem': _Stem(), 'body': _Body()}, SHAPE, 3, name='own'
  )
  group = Group('own', model, np.arange(4))
  federation = Federation((group,), tiny_local(batch_size=4, epochs=1))
  data = tiny_data((8, 8, 8, 8))

  def after(algorithm):
    state = rounds.init_state(algorithm, federation, jax.random.key(0))
    run = rounds.make_round(algorithm, federation, cohort_size=4, backend='map')
    keys = map(jax.random.key, (1, 2))
    return jax.device_get(run(state, data, *keys)[0].server)

  want, got = after(fedavg(federation)), after(fedin(federation, mu=0.0)).model
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
      got,
      want,
  )


def test_when_one_pass_is_taken():
  assert takes_one_pass('fixed', 1.0, 16, 16)
  assert takes_one_pass('fixed', 1.0, 32, 16)
  assert not takes_one_pass('fixed', 1.0, 8, 16)  # The parts differ in length.
  assert not takes_one_pass('fixed', 0.0, 16, 16)
  assert not takes_one_pass('exact', 1.0, 16, 16)
  assert not takes_one_pass('sequential', 1.0, 16, 16)
