"""SlimFL: joint steps of all widths, in-place distillation, lost parts."""

from fractions import Fraction
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.nested_widths import make_nets, nested
from fedjax_het.aggregation.slicing import extract
from fedjax_het.algorithms import fedavg, slimfl
from fedjax_het.algorithms.slimfl import Parts, Sent, arrivals
from fedjax_het.algorithms.slimfl.losses import joint_loss
from fedjax_het.data.federated import Batch
from fedjax_het.engine import rounds
from fedjax_het.engine.local import model_loss
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.types import Federation, Group, Received, Visit
from fedjax_het.models import Variables, create
from tests.algorithms import slimfl_numpy
from tests.algorithms.nested import (
  KEYS,
  SGD,
  check_evaluation,
  check_messages,
  check_weights,
  run,
  small,
)
from tests.algorithms.suite import Case
from tests.quadratics import quadratics
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  one_model_federation,
  preprocess,
  server_step,
  tiny_data,
  tiny_local,
)
from tests.trees import assert_equal, assert_trees

# What the shared suite runs, see `tests/algorithms/suite.py`.
SUITE = [
    Case(dict(p_thin=0.7, p_rest=0.6)),
    Case(dict(distill_weight=0.0, widths=('1', '1/2'))),
]
QUARTER, HALF, WHOLE = Fraction(1, 4), Fraction(1, 2), Fraction(1)


def test_one_width_is_fedavg():
  """Check 1, bit for bit."""
  federation = small('1', norm='batch', local=tiny_local(), per_group=4)
  _, got = run(slimfl(federation), federation)
  _, want = run(fedavg(federation, weights='data'), federation)
  assert_equal(got.params, want.params)
  assert_equal(got.stats['rate_1'], want.stats)


def random_batch(size=8, real=6):
  """A batch whose last examples are padding."""
  rng = np.random.default_rng(3)
  x = jnp.asarray(rng.normal(size=(size, *SHAPE)), jnp.float32)
  y = jnp.asarray(rng.integers(0, NUM_CLASSES, size), jnp.int32)
  position = jnp.arange(size)
  return Batch(x, y, position < real, position)


@functools.cache
def three_nets():
  """The nets 1/4, 1/2 and 1 of an MLP, and the wide one's variables."""
  full = create('mlp', SHAPE, NUM_CLASSES, hidden=4, norm='batch')
  nets = nested(make_nets(full, [QUARTER, HALF, WHOLE]))
  rng = np.random.default_rng(5)
  params = jax.tree.map(
      lambda leaf: leaf
      + jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32),
      full.init(jax.random.key(0)).params,
  )
  stats = {net.name: net.model.init(jax.random.key(0)).stats for net in nets}
  return nets, Variables(params, stats)


FACTORS = {'rate_0.25': 0.5, 'rate_0.5': 3.0, 'rate_1': 2.0}


@functools.cache
def joint_gradient(alpha):
  """((loss, (stats, metrics)), gradient) of the joint loss."""
  nets, (params, stats) = three_nets()
  loss_fn = joint_loss(nets, CLASSIFICATION, alpha, FACTORS)

  def loss(params):
    return loss_fn(Variables(params, stats), random_batch(), None)

  return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@functools.cache
def own_gradient(i):
  """Loss, statistics and gradient of the plain loss of one net."""
  nets, (params, stats) = three_nets()
  loss_fn = model_loss(nets[i].model, CLASSIFICATION)

  def loss(params):
    own = extract(params, nets[i].index.params)
    return loss_fn(
        Variables(own, stats[nets[i].name]), random_batch(), None
    )

  return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@functools.cache
def soft_gradient(i):
  """KL and gradient of one net with the widest one's logits as constants."""
  nets, (params, stats) = three_nets()
  batch = random_batch()

  def logits(net, params):
    own = Variables(extract(params, net.index.params), stats[net.name])
    return net.model.apply(own, batch.x, train=True, mask=batch.mask)[0]

  log_p = jax.nn.log_softmax(logits(nets[-1], params))

  def kl(params):
    log_q = jax.nn.log_softmax(logits(nets[i], params))
    each = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=1)
    return jnp.sum(jnp.where(batch.mask, each, 0)) / jnp.sum(batch.mask)

  return jax.jit(jax.value_and_grad(kl))(params)


@pytest.mark.parametrize('alpha', [0.3, 1.0])
def test_the_gradient_is_the_sum_over_all_widths(alpha):
  """Check 2: c_1 CE, and c_p of (1 - alpha) CE + alpha KL of the others."""
  (loss, (stats, _)), grads = joint_gradient(alpha)
  nets, _ = three_nets()
  terms = [own_gradient(i) for i in range(3)]
  factors = [FACTORS[net.name] for net in nets]
  want = factors[2] * terms[2][0][0]
  total = jax.tree.map(lambda g: factors[2] * g, terms[2][1])
  for i in range(2):
    (hard, _), of_hard = terms[i]
    soft, of_soft = soft_gradient(i)
    want += factors[i] * ((1 - alpha) * hard + alpha * soft)
    total = jax.tree.map(
        lambda t, h, s, c=factors[i]: t + c * ((1 - alpha) * h + alpha * s),
        total,
        of_hard,
        of_soft,
    )
  np.testing.assert_allclose(loss, want, rtol=1e-5)
  assert_trees(grads, total, rtol=1e-4, atol=1e-5)
  # Every width's statistics move, once.
  for net, ((_, (its, _)), _) in zip(nets, terms):
    assert_trees(stats[net.name], its, rtol=1e-6, atol=1e-6)


def test_narrow_nets_do_not_teach_the_widest():
  """Check 6: outside the narrower nets only CE(F_1) has a gradient."""
  nets, _ = three_nets()
  _, grads = joint_gradient(1.0)
  _, own = own_gradient(2)
  narrow = extract(grads, nets[1].index.params)
  for got, want, inner in zip(*map(jax.tree.leaves, (grads, own, narrow))):
    outside = np.ones(got.shape, bool)
    outside[tuple(map(slice, inner.shape))] = False
    np.testing.assert_allclose(
        got[outside], 2 * want[outside], rtol=1e-5, atol=1e-6
    )


def test_a_step_is_one_update_for_all_widths():
  """Check 2 of a client: SGD of rate 1, gradients at the old parameters."""
  local = tiny_local(optax.sgd, 1.0, 1, 8)
  federation = small('1', local=local, per_group=1)
  algorithm = slimfl(
      federation,
      widths=('1/2', '1'),
      width_weights=(3.0, 0.5),
      distill_weight=0.0,
  )
  server, group = algorithm.init(jax.random.key(0)), federation.groups[0]
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(4))
  sent, data = algorithm.downlink(server, group, visit), tiny_data((8,))

  @jax.jit
  def both(params):
    _, up, metrics = algorithm.client_update(
        group, (), sent._replace(params=params), data.client(0), visit
    )
    batch = data.client(0).batch(jnp.arange(8), jnp.ones(8, bool))

    def loss(params):
      total = 0.0
      for net, c in zip(make_nets(group.model, [HALF, WHOLE]), (3.0, 0.5)):
        own = Variables(extract(params, net.index.params), {})
        total += c * model_loss(net.model, CLASSIFICATION)(own, batch, None)[0]
      return total

    return up.summed, metrics, *jax.value_and_grad(loss)(params)

  up, metrics, loss, grads = both(sent.params)
  assert_trees(
      up.change, jax.tree.map(lambda g: -8 * g, grads), rtol=1e-4, atol=1e-5
  )
  np.testing.assert_allclose(metrics['train_loss'], loss, rtol=1e-5)
  assert up.weight == (8, 8)


def returned(federation, algorithm, server, **uploads):
  """One server step; each group's client returns biases of layer1.

  Args:
    federation: The federation.
    algorithm: The algorithm.
    server: Its state.
    **uploads: {group: (n of the thin part, n of the remainder, values)}.

  Returns:
    The state afterwards; arrived statistics are one more than before.
  """
  received = {}
  for group in federation.groups:
    sent = algorithm.downlink(server, group, None)
    thin, rest, values = uploads[group.name]
    change = jax.tree.map(jnp.zeros_like, sent.params)
    old = sent.params['layer1']['linear']['bias']
    n = np.array([thin] * 2 + [rest] * (len(old) - 2))
    change['layer1']['linear']['bias'] = n * (jnp.asarray(values) - old)
    stats = {
        name: jax.tree.map(
            lambda s, w=thin if name == 'rate_0.5' else rest: w * (s + 1), tree
        )
        for name, tree in sent.stats.items()
    }
    parts = Parts(jnp.float32(thin), jnp.float32(rest))
    received[group.name] = Received(Sent(change, stats, parts), None, None)
  return server_step(algorithm, server, received)


def test_shells_are_averaged_over_those_from_whom_they_arrived():
  """Check 3: A delivers both parts, B its thin part; then nobody the rest."""
  federation = small('1', '1', norm='batch', per_group=1)
  algorithm = slimfl(federation, widths=('1', '1/2'))
  first = algorithm.init(jax.random.key(0))
  first.params['layer1']['linear']['bias'] = jnp.full(4, 9.0)
  step = functools.partial(returned, federation, algorithm, first)

  def layer1(server):
    return server.params['layer1']['linear']['bias'].tolist()

  after = step(g0=(1, 1, [2.0] * 4), g1=(1, 0, [4.0] * 4))
  assert layer1(after) == [3, 3, 2, 2]
  for name, tree in after.stats.items():
    assert_equal(tree, jax.tree.map(lambda s: s + 1, first.stats[name]))
  after = step(g0=(3, 0, [2.0] * 4), g1=(1, 0, [6.0] * 4))
  assert layer1(after) == [3, 3, 9, 9]
  assert_equal(after.stats['rate_1'], first.stats['rate_1'])
  assert np.all(after.stats['rate_0.5']['stem']['norm']['mean'] == 1)
  assert_equal(step(g0=(0, 0, [2.0] * 4), g1=(0, 0, [4.0] * 4)), first)


def test_parts_are_lost_with_the_given_probabilities():
  """Check 4: 0.8 and 0.5 give 0.8 and 0.4; no remainder arrives alone."""
  keys = jax.random.split(jax.random.key(0), 20_000)
  draw = jax.jit(jax.vmap(lambda key: arrivals(key, 0.8, 0.5)))
  thin, rest = map(np.asarray, draw(keys))
  assert {*thin} == {*rest} == {0, 1}
  np.testing.assert_allclose(thin.mean(), 0.8, atol=0.015)
  np.testing.assert_allclose(rest.mean(), 0.4, atol=0.015)
  assert not np.any((rest > 0) & (thin == 0))
  for p, sure in (((1.0, 1.0), (1, 1)), ((1.0, 0.0), (1, 0))):
    assert arrivals(keys[0], *p) == sure
  assert arrivals(keys[0], 0.0, 1.0) == (0, 0)


@functools.cache
def lossy_update():
  """A client's update over bad links, and without links."""
  federation = small('1', norm='batch', per_group=1)
  group, data = federation.groups[0], tiny_data((8,))
  options = dict(widths=('1', '1/2'))
  lossy = slimfl(federation, p_thin=0.6, p_rest=0.5, **options)
  ideal = slimfl(federation, **options)
  server = ideal.init(jax.random.key(0))

  @jax.jit
  def update(key):
    visit = Visit(jnp.int32(0), jnp.int32(0), key)
    sent = ideal.downlink(server, group, visit)
    return [
        algorithm.client_update(group, (), sent, data.client(0), visit)[1:]
        for algorithm in (lossy, ideal)
    ]

  return update


def test_a_lost_part_has_no_weight_and_training_does_not_notice():
  """Bits 0 to 2 of what arrives; equal batches with and without losses."""
  seen, update = set(), lossy_update()
  for seed in range(20):
    key = jax.random.key(seed)
    (up, metrics), (all_of_it, its) = jax.device_get(update(key))
    thin, rest = (float(a) for a in arrivals(key, 0.6, 0.5))
    assert (metrics['thin_arrived'], metrics['rest_arrived']) == (thin, rest)
    assert (its['thin_arrived'], its['rest_arrived']) == (1, 1)
    assert metrics['train_loss'] == its['train_loss']
    assert up.summed.weight == (8 * thin, 8 * rest)
    kernel, full = (
        u.summed.change['layer1']['linear']['kernel'] for u in (up, all_of_it)
    )
    want = rest * full
    want[:2, :2] = thin * full[:2, :2]
    np.testing.assert_allclose(kernel, want, rtol=1e-6)
    assert np.max(np.abs(full[2:])) > 1e-3
    for name, weight in {'rate_0.5': thin, 'rate_1': rest}.items():
      want = jax.tree.map(
          lambda s, w=weight: w * s, all_of_it.summed.stats[name]
      )
      assert_trees(up.summed.stats[name], want, rtol=1e-6)
    seen.add((thin, rest))
  assert seen == {(0, 0), (1, 0), (1, 1)}


def test_without_a_link_nothing_changes():
  """Check 5: p_thin = 0."""
  federation = small('1', norm='batch', per_group=4)
  algorithm = slimfl(federation, widths=('1', '1/2'), p_thin=0.0)
  before, after = run(algorithm, federation)
  assert_equal(after, before)


def test_clients_differ_in_what_arrives():
  """In rounds over bad links, and from round to round."""
  federation = small('1', per_group=4)
  algorithm = slimfl(federation, widths=('1', '1/2'), p_thin=0.5, p_rest=0.5)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  found = []
  for _ in range(5):
    state, report = run_round(state, tiny_data((5, 8, 3, 7)), *KEYS)
    metrics = jax.device_get(report['g0'].metrics)
    found.append(np.stack([metrics['thin_arrived'], metrics['rest_arrived']]))
  found = np.stack(found)
  assert np.any(np.ptp(found[:, 0], axis=0)) and np.any(
      np.ptp(found[:, 0], axis=1)
  )


def test_bytes_are_those_of_the_slices():
  """A lost part has been sent, so it counts."""
  check_messages(slimfl, 2, p_thin=0.5)


def test_every_width_is_evaluated_with_its_own_statistics():
  check_evaluation(slimfl)


def test_weights_are_the_number_of_examples_or_one_and_0_without_a_step():
  check_weights(slimfl)


@pytest.mark.parametrize(
    'rates,options,message',
    [
        (('1',), dict(distill_weight=1.5), 'distill_weight must be at least 0'),
        (('1',), dict(p_thin=-0.1), 'p_thin must be at least 0'),
        (('1',), dict(p_rest=1.1), 'p_rest must be .* at most 1'),
        (('1',), dict(weights='size'), 'weights'),
        (('1', '1/2'), dict(widths=('1',)), r'groups\.g1\.rate=1/2 must be'),
        (('1',), dict(widths=('1', '1.0')), r'^widths must differ, got'),
        (('1',), dict(width_weights=(1.0,)), r'one number for each of widths'),
        (
            ('1',),
            dict(widths=('1', '1/2'), width_weights=(1.0, 0.0)),
            r'width_weights\[1\] must be above 0',
        ),
    ],
)
def test_bad_options_are_refused(rates, options, message):
  with pytest.raises(ValueError, match=message):
    slimfl(small(*rates), **options)


def test_other_models_and_tasks_are_refused():
  one, other = one_model_federation().groups[0], small('1').groups[0]
  groups = (
      Group('x', other.model, np.array([1, 2, 4, 5])),
      Group('y', one.model, np.array([0, 3])),
  )
  with pytest.raises(ValueError, match='slimfl needs one model for all groups'):
    slimfl(Federation(groups, SGD))
  federation, _ = quadratics([1, 2])
  with pytest.raises(ValueError, match='slimfl with distill_weight is made'):
    slimfl(federation)


# One round in NumPy.

RATES = (Fraction(1, 5), HALF, WHOLE)
LR, MOMENTUM, DECAY, STEPS, HIDDEN = 0.2, 0.9, 0.05, 2, 5
SIZES = (5, 8, 3, 7)
C = {RATES[0]: 0.5, HALF: 2.0, WHOLE: 1.5}
# How many parts of each client's upload arrive.
ARRIVED = {0: 2, 1: 2, 2: 1, 3: 0}
LINK = (0.6, 0.5)


def decayed_momentum(lr):
  return optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(lr, MOMENTUM))


def flat(params, stats):
  """The MLP's parameters and statistics as `slimfl_numpy` names them."""
  names = dict(kernel='w', bias='b', scale='scale')
  theta = {}
  for layer in ('stem', 'layer1'):
    linear, norm = params[layer]['linear'], params[layer]['norm']
    theta.update({(layer, names[k]): leaf for k, leaf in linear.items()})
    theta[layer, 'scale'], theta[layer, 'shift'] = norm['scale'], norm['bias']
  theta.update({('head', names[k]): v for k, v in params['head'].items()})
  moments = {
      rate: {
          (layer, kind): np.asarray(leaf, np.float64)
          for layer, tree in stats[f'rate_{float(rate):.4g}'].items()
          for kind, leaf in tree['norm'].items()
      }
      for rate in RATES
  }
  return {k: np.asarray(v, np.float64) for k, v in theta.items()}, moments


def keys_by_parts():
  """Keys with which 0, 1 and 2 parts of an upload arrive."""
  keys = jax.random.split(jax.random.key(0), 40)
  draw = jax.jit(jax.vmap(lambda key: sum(arrivals(key, *LINK))))
  parts = draw(keys).tolist()
  return [keys[parts.index(number)] for number in range(3)]


def test_a_round_in_numpy():
  """Nets of 1, 3 and 5 units; partial batches; one upload of four is lost."""
  local = tiny_local(decayed_momentum, LR, STEPS, 8)
  federation = small('1', '1/2', hidden=HIDDEN, norm='batch', local=local)
  algorithm = slimfl(
      federation,
      widths=('1/5', '1', '1/2'),
      width_weights=(0.5, 1.5, 2.0),
      distill_weight=0.7,
      p_thin=LINK[0],
      p_rest=LINK[1],
  )
  data, rng = tiny_data(SIZES), np.random.default_rng(5)
  server = jax.device_get(algorithm.init(jax.random.key(0)))
  server = server._replace(
      params=jax.tree.map(
          lambda x: x + (0.3 * rng.normal(size=x.shape)).astype(np.float32),
          server.params,
      ),
      stats=jax.tree.map(
          lambda s: s + rng.uniform(size=s.shape).astype(np.float32),
          server.stats,
      ),
  )
  received, clients, keys = {}, [], keys_by_parts()
  for group, largest in zip(federation.groups, (WHOLE, HALF)):
    update = jax.jit(functools.partial(algorithm.client_update, group))
    uplinks = []
    for i in group.client_ids.tolist():
      visit = Visit(jnp.int32(i), jnp.int32(0), keys[ARRIVED[i]])
      sent = algorithm.downlink(server, group, visit)
      uplinks.append(update((), sent, data.client(i), visit)[1].summed)
      index = np.asarray(data.index[i, : SIZES[i]])
      x = np.asarray(preprocess(data.images[index]), np.float64)
      labels = np.asarray(data.labels[index])
      clients.append((largest, x.reshape(SIZES[i], -1), labels, ARRIVED[i]))
    total = jax.tree.map(lambda *leaves: sum(leaves), *uplinks)
    received[group.name] = Received(total, None, None)
  after = jax.device_get(server_step(algorithm, server, received))
  theta, stats = flat(server.params, server.stats)
  want = slimfl_numpy.one_round(
      theta, stats, clients, HIDDEN, factors=C, alpha=0.7, steps=STEPS,
      lr=LR, momentum=MOMENTUM, decay=DECAY,
  )  # fmt: skip
  assert_trees(flat(after.params, after.stats), want, rtol=1e-4, atol=1e-5)
  for new, old in zip(jax.tree.leaves(want[0]), jax.tree.leaves(theta)):
    assert np.max(np.abs(new - old)) > 1e-3
