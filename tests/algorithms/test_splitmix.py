"""SplitMix: bases are trained separately and predict together."""

import dataclasses
from fractions import Fraction
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.slicing import narrow
from fedjax_het.algorithms import fedavg, splitmix
from fedjax_het.algorithms.splitmix import (
  Sent,
  bases_of,
  choose_bases,
  draw_base,
  first_choice,
)
from fedjax_het.engine import rounds, traffic
from fedjax_het.engine.needs import needs_of
from fedjax_het.engine.static_norm import static_statistics
from fedjax_het.engine.types import Federation, Group, Maybe, Received, Visit
from fedjax_het.engine.visits import expected_bytes
from fedjax_het.models import Block, BlockModel, create, model_options
from fedjax_het.models.intercept import (
  scaled_behind_norms,
  scaled_outputs,
)
from fedjax_het.models.layers import GlobalPool, Linear, Scaler, conv_layer
from fedjax_het.models.simple_cnn import ConvUnit
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  one_model_federation,
  preprocess,
  server_step,
  tiny_data,
  tiny_federation,
  tiny_local,
  with_group_options,
)
from tests.trees import assert_trees

KEYS = (jax.random.key(1), jax.random.key(2))


def budgets(federation, *values):
  """The federation with the budgets of its groups."""
  return with_group_options(federation, budget=values)


def run(algorithm, federation, num_rounds=1, change=lambda server: server):
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  state = state._replace(server=change(state.server))
  before = jax.device_get(state.server)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=6, backend='map'
  )
  for _ in range(num_rounds):
    state, reports = run_round(state, tiny_data(), *KEYS)
  return before, jax.device_get(state.server), reports


@pytest.fixture(scope='module')
def federation():
  return one_model_federation(norm=False)


@pytest.fixture(scope='module')
def algorithm(federation):
  """Four bases of width 2; clients of tiny1, 2, 3 train 4, 2 and 1."""
  return splitmix(federation)


@pytest.fixture(scope='module')
def two_rounds(algorithm, federation):
  return run(algorithm, federation, 2)


def test_one_base_is_fedavg_bit_for_bit(federation):
  one = splitmix(budgets(federation, 1, 1, 1), num_bases=1, mask='none')
  _, got, _ = run(one, federation, 2)
  _, want, _ = run(fedavg(federation, weights='data'), federation, 2)
  params = jax.tree.map(lambda leaf: leaf[0], got.bases.params)
  assert_trees(params, want.params, rtol=0, atol=0)


def test_a_base_does_not_see_the_others(algorithm, federation, two_rounds):
  def change(server):
    params = jax.tree.map(
        lambda leaf: leaf.at[1].add(0.3), server.bases.params
    )
    return server._replace(bases=server.bases._replace(params=params))

  _, want, _ = two_rounds
  _, got, _ = run(algorithm, federation, 2, change)
  for base, equal in ((0, True), (1, False), (2, True), (3, True)):
    same = jax.tree.map(
        lambda a, b, i=base: np.array_equal(a[i], b[i]),
        got.bases.params,
        want.bases.params,
    )
    assert all(jax.tree.leaves(same)) == equal


def test_a_base_is_the_weighted_mean_over_its_trainers(algorithm, federation):
  """A (0.3) returns 1 and B (0.1) returns 2: 1.25; other bases do not move."""
  server = algorithm.init(jax.random.key(0))
  old = server.bases.params

  def returned(value, weight):
    weight = jnp.array([weight, 0.0, 0, 0])
    change = jax.tree.map(
        lambda leaf: weight.reshape((-1,) + (1,) * (leaf.ndim - 1))
        * (value - leaf),
        old,
    )
    return Received(Sent(Maybe(change, weight > 0), weight), None, None)

  received = dict(
      tiny1=returned(1.0, 0.3), tiny2=returned(2.0, 0.1),
      tiny3=returned(9.0, 0.0),
  )  # fmt: skip
  new = server_step(algorithm, server, received, jax.random.key(1))
  for a, b in zip(*map(jax.tree.leaves, (new.bases.params, old))):
    np.testing.assert_allclose(a[0], np.full_like(a[0], 1.25), rtol=1e-5)
    np.testing.assert_array_equal(a[1:], b[1:])
  assert new.queue == server.queue


def test_the_queue_names_every_base_before_any_again():
  first = jax.jit(first_choice, static_argnums=2)
  turns = np.array([first(7, i, 4) for i in range(36)]).reshape(9, 4)
  assert np.all(np.sort(turns) == np.arange(4)[None])
  assert len({tuple(row) for row in turns}) > 1  # It is reshuffled.


def test_the_bases_of_a_client_are_distinct():
  choose = jax.jit(choose_bases, static_argnums=(2, 3))
  seconds = np.zeros(4, int)
  for i, key in enumerate(jax.random.split(jax.random.key(1), 60)):
    chosen = choose(key, i % 4, 4, 3).tolist()
    assert chosen[0] == i % 4 and len(set(chosen)) == 3
    seconds[chosen[1]] += 1
  assert seconds.min() >= 5  # 15 are expected.
  key = jax.random.key(2)
  assert sorted(choose(key, 3, 4, 4).tolist()) == [0, 1, 2, 3]


def check_first_choices(backend):
  """Three of six clients train one base each: all three bases move."""
  federation = one_model_federation(norm=False)
  algorithm = splitmix(
      budgets(federation, '1/3', 1 / 3, '1/3'), num_bases=3
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=3, backend=backend
  )
  keys = [jax.random.key(i) for i in (1, 2)]
  for _ in range(3):
    before = jax.device_get(state.server.bases.params['head']['bias'])
    state, _ = run_round(state, tiny_data(), *keys)
    after = jax.device_get(state.server.bases.params['head']['bias'])
    assert np.all(np.any(after != before, axis=1))


def test_first_choices_of_sampled_cohorts_are_balanced():
  check_first_choices('map')


@pytest.mark.slow
@pytest.mark.usefixtures('users_generator')
def test_first_choices_are_balanced_on_several_devices():
  check_first_choices('shard_map')


def test_budgets_are_exact():
  for num_bases, shares, want in (
      (8, '1/8 1/6 1/2 1', [1, 1, 4, 8]),
      (6, '1/6 1/3 1/2 1', [1, 2, 3, 6]),
  ):
    got = [bases_of(Fraction(b), num_bases) for b in shares.split()]
    assert got == want


@pytest.mark.parametrize(
    'num_bases,widths,count', [(6, (2, 5, 10), 6817), (8, (2, 4, 8), 4536)]
)
def test_bases_of_preresnet20(num_bases, widths, count):
  model = create('preresnet20', (32, 32, 3), 10)
  base = narrow(model, lambda k: k // num_bases).abstract_variables.params
  firsts = [base[f'stage{i}_block0']['conv1'] for i in (1, 2, 3)]
  assert tuple(conv['kernel'].shape[3] for conv in firsts) == widths
  assert sum(math.prod(s.shape) for s in jax.tree.leaves(base)) == count


def test_the_ensemble_averages_logits(federation):
  algorithm = splitmix(
      budgets(federation, '1', '1/2', '1/2'), num_bases=2, views=True
  )
  bases = jax.tree.map(
      jnp.zeros_like, algorithm.init(jax.random.key(0)).bases
  )
  bases.params['head']['bias'] = jnp.array([[1.0, 3, 0], [2, 0, 0]])
  x = jnp.zeros((1, 2, 2, 1))
  group = federation.groups[0]
  assert algorithm.predict(group, bases, x)[0].tolist() == [1.5, 1.5, 0]
  assert set(algorithm.views) == {'bases_1', 'bases_2'}
  one = algorithm.views['bases_1'](group, bases, x)
  assert one[0].tolist() == [1, 3, 0]


def test_joint_training_is_separate_training_on_the_same_batches(
    algorithm, federation
):
  group, data = federation.groups[0], tiny_data().client(0)
  server = algorithm.init(jax.random.key(0))
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(5))
  chosen, params = algorithm.downlink(server, group, visit)
  update = jax.jit(
      lambda sent: algorithm.client_update(group, (), sent, data, visit)[1:]
  )
  (joint, _), metrics = update((chosen, params))
  assert joint.weight.tolist() == [5.0] * 4  # Examples of client 0.
  losses = []
  for i in range(4):
    one = chosen[i : i + 1], jax.tree.map(lambda leaf: leaf[i : i + 1], params)  # noqa: B023
    (alone, _), of_one = update(one)
    losses.append(of_one['train_loss'])
    base = int(chosen[i])
    assert alone.change.present.tolist() == [b == base for b in range(4)]
    assert_trees(
        jax.tree.map(lambda leaf: leaf[base], alone.change.value),  # noqa: B023
        jax.tree.map(lambda leaf: leaf[base], joint.change.value),  # noqa: B023
        rtol=1e-5,
        atol=1e-6,
    )
  np.testing.assert_allclose(
      metrics['train_loss'], np.mean(losses), rtol=1e-5
  )
  assert np.std(losses) > 1e-3


def conv_federation(norm):
  """One group with a convolution, its mean and a linear head."""
  blocks = (
      Block('stem', ConvUnit(4, norm, kernel=2, pool=False)),
      Block('pool', GlobalPool()),
      Block('head', Linear(NUM_CLASSES)),
  )
  model = BlockModel('conv', blocks, SHAPE, NUM_CLASSES, (1, 2))
  groups = (Group('a', model, np.arange(6)),)
  return Federation(groups, tiny_local(optax.sgd, 0.1, 1, 8))


@pytest.mark.parametrize('mask', ['client', 'none'])
@pytest.mark.parametrize('rescale', [True, False])
def test_one_step_is_that_of_the_paper(mask, rescale):
  """Written out: a convolution times 1 / r = 2, its mean, a linear head."""
  # A net without norms, whose factor is in testing, too, shows it best.
  federation = conv_federation('none')
  groups = federation.groups
  algorithm = splitmix(
      federation, num_bases=2, rescale=rescale, rescale_test=True, mask=mask
  )
  server = algorithm.init(jax.random.key(0))
  data, client = tiny_data(), 2
  own = data.client(client)
  index = own.index[: int(own.size)]
  x, y = preprocess(own.images[index]), own.labels[index]
  owned = np.isin(np.arange(NUM_CLASSES), y)
  assert owned.sum() == 2
  visit = Visit(jnp.int32(client), jnp.int32(0), jax.random.key(4))
  sent = algorithm.downlink(server, groups[0], visit)
  up = jax.jit(
      lambda sent: algorithm.client_update(groups[0], (), sent, own, visit)[1]
  )(sent).summed

  def logits(params):
    conv = params['stem']['conv']
    kernel = conv['kernel'].reshape(4, 2)  # The whole image of 2x2.
    h = x.reshape(3, 4) @ kernel + conv['bias'][None]
    h = jax.nn.relu((2 if rescale else 1) * h)
    return h @ params['head']['kernel'] + params['head']['bias'][None]

  def loss(params):
    z = logits(params)
    z = z if mask == 'none' else jnp.where(owned[None], z, 0)
    return -jnp.mean(jax.nn.log_softmax(z)[jnp.arange(3), y])

  assert up.weight.tolist() == [3.0, 3.0]
  slope = jax.jit(jax.grad(loss))
  trees = jax.device_get((server.bases.params, up.change.value))
  for base in range(2):
    start, change = (
        jax.tree.map(lambda leaf, b=base: leaf[b], tree) for tree in trees
    )
    # Three examples times -0.1 g.
    want = jax.tree.map(lambda g: 3 * -0.1 * g, slope(start))
    assert_trees(change, want, rtol=1e-4, atol=1e-6)
  # The test has the same factor.
  got = algorithm.predict(groups[0], server.bases, x)
  want = np.mean(jax.vmap(logits)(server.bases.params), axis=0)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_bytes_are_those_of_the_bases_that_travel(
    algorithm, federation, two_rounds
):
  """Those of the clock, too."""
  _, _, reports = two_rounds
  for group in federation.groups:
    planned = expected_bytes(algorithm, group, tiny_data(), np.ones(2, int))
    report = reports[group.name]
    sent = map(traffic.num_bytes, (report.down, report.up))
    assert planned.T.tolist() == [one.tolist() for one in sent]
  base = (4 * 2 + 2) + (2 * 2 + 2) + (2 * NUM_CLASSES + NUM_CLASSES)
  for name, m in dict(tiny1=4, tiny2=2, tiny3=1).items():
    down, up = reports[name].down, reports[name].up
    assert traffic.num_bytes(down).tolist() == [4 * m * (base + 1)] * 2
    assert traffic.num_bytes(up).tolist() == [4 * (m * base + 4)] * 2


@pytest.mark.parametrize('factor', [1, 4])
def test_kernels_of_convolutions_are_drawn_as_for_the_full_width(factor):
  model, key = create('simple_cnn', (16, 16, 1), 3), jax.random.key(0)
  plain, drawn = model.init(key).params, draw_base(model, key, factor).params
  root = factor**-0.5
  # Not the stem's; of dense layers, whose outputs are not multiplied, the
  # classifier's alone.
  scales = dict(
      conv1=('conv', 1.0), conv2=('conv', root), hidden1=('linear', 1.0),
      hidden2=('linear', 1.0), head=('', root),
  )  # fmt: skip
  assert scales.keys() == plain.keys()
  for block, (layer, scale) in scales.items():
    got, want = (t[block][layer] if layer else t[block] for t in (drawn, plain))
    np.testing.assert_allclose(got['kernel'], scale * want['kernel'], rtol=1e-6)
    np.testing.assert_allclose(got['bias'], want['bias'], rtol=1e-6)


def test_outputs_of_convolutions_and_scalers_are_rescaled_dense_ones_not():
  conv = conv_layer(2, 3, 'conv', inputs=1, init='torch', use_bias=True)
  x = jax.random.normal(jax.random.key(0), (2, 4, 4, 1))
  for module, factor in ((conv, 4), (Scaler(), 4), (Linear(3), 1)):
    x = x if factor == 4 else x.reshape(2, -1)
    variables = module.init(jax.random.key(1), x)
    with scaled_outputs(4):
      got = module.apply(variables, x)
    want = factor * module.apply(variables, x)
    np.testing.assert_allclose(got, want, rtol=1e-6)


# One net of every family, and variants with norms in other places.
FAMILIES = (
    ('preresnet20', {}),
    ('preresnet20', dict(preact_shortcut=False)),
    ('preresnet20', dict(shortcut='A')),
    ('preresnet20', dict(stem_norm=False)),
    pytest.param('resnet10', dict(width=0.25), marks=pytest.mark.slow),
    pytest.param('resnet50', dict(width=0.125), marks=pytest.mark.slow),
    ('resnet14_mnist', {}),
    ('mini_resnet6', {}),
    pytest.param('fedin_e', dict(width=0.125), marks=pytest.mark.slow),
    ('simple_cnn', {}),
    ('dropout_cnn', dict(dropout=0.0)),
    ('fedhe_cnn5', dict(dropout=0.0, width=0.25)),
    ('mini_vit4', {}),
    ('mlp', {}),
)


def drawn(shapes):
  """Random kernels by fan-in, scales 1, other leaves 0; compiles nothing."""
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    if len(leaf.shape) > 1:
      values = rng.normal(0, math.prod(leaf.shape[:-1]) ** -0.5, leaf.shape)
    else:
      values = np.full(leaf.shape, path[-1].key == 'scale')
    return values.astype(leaf.dtype)

  return jax.tree.map_with_path(draw, shapes)


@pytest.mark.parametrize('name,options', FAMILIES)
def test_training_and_testing_are_one_function(name, options):
  """Batch statistics cancel the factor; if misplaced, the error is near 1."""
  if 'norm' in model_options(name):
    options = dict(options, norm='batch_only')
  model = create(name, (16, 16, 3), 10, **options)
  base = narrow(model, lambda k: max(1, k // 2))
  variables = drawn(base.abstract_variables)
  x = np.random.default_rng(1).normal(size=(16, 16, 16, 3)).astype(np.float32)

  @jax.jit
  def logits(variables, x):
    with scaled_outputs(6):
      trained, _ = base.apply(variables, x, train=True)
    return trained, base.apply(variables, x)[0]

  trained, tested = logits(variables, x)
  # The rest is due to the norms' epsilon, which the factor makes smaller.
  error = np.linalg.norm(trained - tested) / np.linalg.norm(tested)
  assert error < (1e-4 if name == 'preresnet20' else 0.03)


def test_a_classifier_that_would_see_the_factor_is_refused():
  federation = one_model_federation(norm=False)
  model = create('preresnet20', (8, 8, 1), 3, final_norm=False, num_blocks=1)
  groups = tuple(
      dataclasses.replace(group, model=model) for group in federation.groups
  )
  federation = dataclasses.replace(federation, groups=groups)
  with pytest.raises(ValueError, match="in 'preresnet8' no norm follows the l"):
    splitmix(federation)
  splitmix(federation, rescale=False)
  splitmix(federation, rescale_test=True)


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        ('mini_resnet6', dict(norm='none')),
        ('mini_resnet6', dict(norm='group')),
        ('simple_cnn', {}),
        ('simple_cnn', dict(norm='batch_only')),
        ('fedin_a', dict(norm='none')),
        ('preresnet20', dict(norm='none', num_blocks=1)),
        ('preresnet20', dict(num_blocks=1)),
        ('mini_vit4', {}),
        ('mlp', {}),
    ],
)
def test_the_nets_that_are_refused_are_those_that_the_factor_changes(
    name, options
):
  shape = (32, 32, 3)
  model = create(name, shape, 10, **options)
  base = narrow(model, lambda k: max(1, k // 4))
  x = jax.random.normal(jax.random.key(0), (4, *shape))

  @functools.partial(jax.jit, static_argnums=1)
  def logits(variables, factor):
    with scaled_outputs(factor):
      return base.apply(variables, x, train=True, key=jax.random.key(1))[0]

  variables = base.init(jax.random.key(2))
  plain, scaled = (logits(variables, factor) for factor in (1, 4))
  error = np.linalg.norm(scaled - plain) / np.linalg.norm(plain)
  # Norms cancel the factor but for their epsilon.
  assert scaled_behind_norms(model) == bool(error > 0.03)


def test_statistics_are_estimated_for_every_base():
  federation = one_model_federation(norm=True)
  algorithm = splitmix(budgets(federation, '1', '1', '1'), num_bases=2)
  server = algorithm.init(jax.random.key(0))
  ready = jax.jit(algorithm.calibrate)(server, tiny_data())
  mean = ready.bases.stats['stem']['norm']['mean']
  assert mean.shape == (2, 4) and np.all(mean[0] != mean[1])
  # From the first batch of four alone.
  few = splitmix(
      budgets(federation, '1', '1', '1'), num_bases=2, calibrate_batches=1
  )
  got = jax.jit(few.calibrate)(server, tiny_data()).bases.stats
  base = narrow(federation.groups[0].model, lambda k: k // 2)
  first = jax.tree.map(lambda leaf: leaf[0], server.bases.params)
  want = static_statistics(
      base, first, tiny_data(), batch_size=4, num_batches=1
  )
  assert_trees(
      jax.tree.map(lambda leaf: leaf[0], got), want, rtol=1e-5, atol=1e-6
  )
  assert np.all(got['stem']['norm']['mean'] != mean)
  assert splitmix(one_model_federation(norm=False)).calibrate is None


def test_statistics_have_the_factor_of_the_test():
  federation = conv_federation('batch')
  means = []
  for rescale_test in (False, True):
    algorithm = splitmix(federation, num_bases=2, rescale_test=rescale_test)
    server = algorithm.init(jax.random.key(0))
    ready = jax.jit(algorithm.calibrate)(server, tiny_data())
    means.append(ready.bases.stats['stem']['norm']['mean'])
  np.testing.assert_allclose(means[1], 2 * means[0], rtol=1e-5, atol=1e-6)


def test_bad_options_are_refused_in_one_line(federation):
  with pytest.raises(ValueError, match='splitmix needs one model for all gr'):
    splitmix(tiny_federation())
  for options, message in (
      (dict(num_bases=0), 'num_bases must be at least 1, got 0'),
      (dict(num_bases=16), "Block 'stem' of 'mlp2' would keep 0 of its 8 ch"),
      (dict(num_bases=2), '^groups.tiny3: A budget of 1/4 affords no base of '),
      (dict(mask='labels'), 'Unknown mask '),
  ):
    with pytest.raises(ValueError, match=message):
      splitmix(federation, **options)
  with pytest.raises(ValueError, match='budget must be a share above 0'):
    splitmix(budgets(federation, '1', '1', '2'))
  with pytest.raises(ValueError, match='budget is missing; give it in'):
    splitmix(budgets(federation, '', '1', '1/2'))


def test_it_declares_what_it_needs():
  needs = needs_of(splitmix)
  assert needs.one_model and needs.group_options == dict(budget=None)
  assert needs.keep_optimizer is None
