"""HeteroFL: the mean over holders, and the three additions to training."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.exchange import Delta
from fedjax_het.aggregation.narrow_training import train_narrow
from fedjax_het.aggregation.slicing import extract
from fedjax_het.algorithms import fedavg, heterofl
from fedjax_het.algorithms.heterofl_widths import Sent
from fedjax_het.data.federated import Normalise, federate
from fedjax_het.engine import rounds, traffic
from fedjax_het.engine.evaluate import make_evaluate
from fedjax_het.engine.needs import needs_of
from fedjax_het.engine.static_norm import example_order, static_statistics
from fedjax_het.engine.types import Federation, Group, Maybe, Received, Visit
from fedjax_het.engine.visits import expected_bytes
from fedjax_het.models import BlockModel, Variables, create
from fedjax_het.models.blocks import Block
from fedjax_het.models.intercept import scaled_norm_inputs
from fedjax_het.models.layers import GlobalPool, Linear
from fedjax_het.models.norm import BatchNorm
from tests.algorithms.suite import Case
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  Dense,
  one_model_federation,
  preprocess,
  server_step,
  tiny_data,
  tiny_federation,
  tiny_local,
  tiny_model,
  with_group_options,
)
from tests.trees import assert_trees

# What the shared suite runs, see `tests/algorithms/suite.py`.
SUITE = [
    Case(),
    Case(dict(odds=(1.0, 1.0), levels=('1', '1/2'), mask='batch')),
]
KEYS = (jax.random.key(1), jax.random.key(2))


def one_group(**kwargs):
  return one_model_federation(num_groups=1, per_group=6, **kwargs)


def rates(federation, *values):
  """The federation with the rates of its groups."""
  return with_group_options(federation, rate=values)


def run(algorithm, federation, num_rounds=1, cohort_size=6, backend='map',
        data=None):  # fmt: skip
  data = tiny_data() if data is None else data
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  before = jax.device_get(state.server)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=cohort_size, backend=backend
  )
  for _ in range(num_rounds):
    state, reports = run_round(state, data, *KEYS)
  return before, jax.device_get(state.server), reports


def test_all_rates_1_is_fedavg_bit_for_bit():
  federation = one_model_federation(norm=False, num_groups=2, per_group=3)
  algorithm = heterofl(rates(federation, '1', 1), mask='none')
  _, got, _ = run(algorithm, federation, 2)
  _, want, _ = run(fedavg(federation), federation, 2)
  assert_trees(got.params, want.params, rtol=0, atol=0)


@pytest.mark.parametrize(
    'options',
    [dict(server_momentum=0.9), dict(server_optimizer='adam', server_lr=0.1)],
)
def test_server_optimisers_at_full_width_are_those_of_fedavg(options):
  """Two server steps of one upload each, bit for bit."""
  federation = one_group(norm=False)
  wide, plain = heterofl(federation, **options), fedavg(federation, **options)
  x = plain.init(jax.random.key(0))
  server = wide.init(jax.random.key(0))
  change = jax.tree.map(lambda leaf: 0.3 * leaf + 0.1, x.variables.params)
  number, rows = jnp.ones(1), jnp.ones((1, NUM_CLASSES))
  marked = jax.tree.map(lambda leaf: Maybe(leaf, jnp.bool_(True)), change)
  delta = Delta(change, {}, jnp.float32(1))
  for _ in range(2):
    x = server_step(plain, x, dict(tiny1=Received(delta, None, None)))
    up = Received(Sent(marked, number, rows), None, None)
    server = server_step(wide, server, dict(tiny1=up))
  assert_trees(server.params, x.variables.params, rtol=0, atol=0)
  assert_trees(server.opt_state, x.opt_state, rtol=0, atol=0)


def two_widths(**options):
  """Groups 'a' and 'b' of a net whose layer1 is 2x2, at rates 1 and 1/2."""
  model = create('mlp', SHAPE, NUM_CLASSES, hidden=2)
  groups = (Group('a', model, np.array([0])), Group('b', model, np.array([1])))
  federation = Federation(groups, tiny_local())
  algorithm = heterofl(federation, **options)
  server = algorithm.init(jax.random.key(0))
  server.params['layer1']['linear']['kernel'] = jnp.array([[1.0, 2], [3, 4]])
  server.params['head']['bias'] = jnp.array([0.0, 0, 9])
  return federation, algorithm, server


def returns(federation, algorithm, server, name, number=1.0, owned=(1, 1, 1),
            kernel=None, bias=None):  # fmt: skip
  """What the server receives from a group whose client returns these leaves."""
  group = next(g for g in federation.groups if g.name == name)
  sent = algorithm.downlink(server, group, None)
  change = jax.tree.map(jnp.zeros_like, sent)
  if kernel is not None:
    old = sent['layer1']['linear']['kernel']
    change['layer1']['linear']['kernel'] = number * (jnp.array(kernel) - old)
  if bias is not None:
    owned_change = jnp.array(bias) - sent['head']['bias']
    change['head']['bias'] = number * owned_change * jnp.array(owned)
  here = jnp.array([name == 'a', name == 'b'], jnp.float32) * number
  change = jax.tree.map(lambda leaf: Maybe(leaf, jnp.bool_(True)), change)
  owned = here[:, None] * jnp.array(owned, jnp.float32)[None]
  return Received(Sent(change, here, owned), None, None)


@pytest.mark.parametrize(
    'wide,want', [(0.0, [[6, 2], [3, 4]]), (1.0, [[4, 2], [2, 2]])]
)
def test_a_number_is_the_mean_over_its_holders(wide, want):
  """From [[1, 2], [3, 4]]: the narrow client returns 6, the wide one all 2s."""
  federation, algorithm, server = two_widths()
  make = functools.partial(returns, federation, algorithm, server)
  after = server_step(
      algorithm,
      server,
      dict(
          a=make('a', wide, kernel=[[2.0, 2], [2, 2]]),
          b=make('b', kernel=[[6.0]]),
      ),
      None,
  )
  assert after.params['layer1']['linear']['kernel'].tolist() == want


def test_momentum_of_numbers_that_nobody_held_is_left_alone():
  """FedAvgM: in the second round only the narrow client's entry moves."""
  federation, algorithm, server = two_widths(server_momentum=0.5)
  for wide, value, momentum in (
      # b = -D: from [[1, 2], [3, 4]] to 2s, the first entry to mean(2, 6).
      (1.0, [[4, 2], [2, 2]], [[-3, 0], [1, 2]]),
      # b <- 0.5 b - (6 - 4) where it was held.
      (0.0, [[7.5, 2], [2, 2]], [[-3.5, 0], [1, 2]]),
  ):
    make = functools.partial(returns, federation, algorithm, server)
    server = server_step(
        algorithm,
        server,
        dict(
            a=make('a', wide, kernel=[[2.0, 2], [2, 2]]),
            b=make('b', kernel=[[6.0]]),
        ),
    )
    assert server.params['layer1']['linear']['kernel'].tolist() == value
    trace = jax.tree.leaves(server.opt_state['layer1'])
    assert momentum in [leaf.tolist() for leaf in trace]


def test_head_rows_count_for_the_owners_of_their_label():
  federation, algorithm, server = two_widths()
  make = functools.partial(returns, federation, algorithm, server)
  after = server_step(
      algorithm,
      server,
      dict(
          a=make('a', owned=(1, 1, 0), bias=[1.0, 2, 5]),
          b=make('b', owned=(0, 1, 0), bias=[7.0, 4, 8]),
      ),
      None,
  )
  assert after.params['head']['bias'].tolist() == [1, 3, 9]


def sbn_model():
  blocks = (
      Block('norm', BatchNorm()),
      Block('pool', GlobalPool()),
      Block('head', Linear(2)),
  )
  return BlockModel('sbn', blocks, (1, 1, 1), 2, (1, 2))


def sbn_data(width=2):
  """Two clients of two examples; in the fixed order they are 0, 2, 4, 8."""

  def make(values):
    images = np.zeros((4, 1, 1, 1), np.uint8)
    images[:, 0, 0, 0] = values
    data = federate(
        images, np.zeros(4, int), [np.array([0, 3]), np.array([1, 2])],
        lambda images, key=None: images.astype(jnp.float32),
    )  # fmt: skip
    padding = jnp.full((2, width - 2), 3, jnp.int32)
    return data.replace(index=jnp.concatenate([data.index, padding], axis=1))

  order, total = example_order(make([0, 0, 0, 0]))
  assert total == 4
  values = np.zeros(4, int)
  values[np.asarray(order[:4])] = [0, 2, 4, 8]
  return make(values)


@pytest.mark.parametrize('width', [2, 5])
def test_static_statistics_average_over_batches(width):
  """Batches {0, 2} and {4, 8}: means 1 and 6, unbiased variances 2 and 8."""
  model, data = sbn_model(), sbn_data(width)
  params = model.init(jax.random.key(0)).params
  stats = static_statistics(model, params, data, batch_size=2)['norm']
  np.testing.assert_allclose(stats['mean'], [3.5])
  np.testing.assert_allclose(stats['var'], [5.0])
  # A partial batch {8} counts as much as {0, 2, 4}; 1 / 0 is avoided.
  stats = static_statistics(model, params, data, batch_size=3)['norm']
  np.testing.assert_allclose(stats['mean'], [5.0])
  np.testing.assert_allclose(stats['var'], [2.0])
  first = static_statistics(
      model, params, data, batch_size=2, num_batches=1
  )['norm']
  np.testing.assert_allclose(first['mean'], [1.0])
  np.testing.assert_allclose(first['var'], [2.0])


def test_static_statistics_see_images_as_they_are():
  """The pass over the training data does not augment them."""
  model, data = sbn_model(), sbn_data()
  params = model.init(jax.random.key(0)).params

  def darkened(key, images):
    del key
    return jnp.zeros_like(images)

  def stats(augment):
    normalise = Normalise((0.1,), (0.3,), augment)
    plain = data.replace(preprocess=normalise)
    return static_statistics(model, params, plain, batch_size=2)

  jax.tree.map(np.testing.assert_array_equal, stats(darkened), stats(None))


def test_with_batch_norm_the_scaler_only_rescales_epsilon():
  x = jax.random.normal(jax.random.key(0), (6, 2, 2, 3))
  weight = jax.random.normal(jax.random.key(1), (6, 2, 2, 3))

  def loss_at(factor, epsilon):
    norm = BatchNorm(momentum=None, epsilon=epsilon)
    params = norm.init(jax.random.key(0), x)

    def loss(params, x):
      with scaled_norm_inputs(factor):
        return jnp.sum(weight * norm.apply(params, x, True) ** 3)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)

  assert_trees(loss_at(8.0, 0.0), loss_at(1, 0.0), rtol=2e-4, atol=2e-4)
  gap = loss_at(8.0, 1.0)[0] - loss_at(1, 1.0)[0]
  assert abs(gap) > 1e-2


def test_the_scaler_acts_in_training_where_there_is_no_norm():
  """One step of plain SGD: at rate 1/2 the first layer's output is doubled."""
  federation = one_group(norm=False, local=tiny_local(optax.sgd, 0.1, 1, 8))
  results = {
      scaler: run(
          heterofl(rates(federation, 0.5), scaler=scaler), federation
      )[1]
      for scaler in (True, False)
  }
  gaps = jax.tree.map(
      lambda a, b: np.abs(a - b).max(), *(r.params for r in results.values())
  )
  assert max(jax.tree.leaves(gaps)) > 1e-4


def visit_once(algorithm, federation, data, client):
  """What a client is sent, and what it sends, in its first visit."""
  group = federation.groups[0]
  visit = Visit(jnp.int32(client), jnp.int32(0), jax.random.key(4))
  server = algorithm.init(jax.random.key(0))

  @jax.jit
  def both(server):
    sent = algorithm.downlink(server, group, visit)
    _, uplink, _ = algorithm.client_update(
        group, (), sent, data.client(client), visit
    )
    return sent, uplink.summed

  return both(server)


def values(tree):
  return jax.tree.map(
      lambda m: m.value, tree, is_leaf=lambda x: isinstance(x, Maybe)
  )


def decayed(lr):
  """SGD with weight decay, which moves parameters without a gradient."""
  return optax.chain(optax.add_decayed_weights(0.5), optax.sgd(lr))


@pytest.mark.parametrize('mask', ['client', 'batch', 'none'])
def test_masks_of_batches_of_one_example(mask):
  """At a rate of 0; a client with two of three labels, or one in each batch."""
  model = tiny_model(1, norm=False)
  params = model.init(jax.random.key(0)).params
  data = tiny_data((4,)).replace(labels=jnp.array([0, 2, 2, 0])).client(0)
  _, _, metrics, num = train_narrow(
      model, 1.0, tiny_local(optax.sgd, 0.0, epochs=1, batch_size=1), params,
      data, Visit(jnp.int32(0), jnp.int32(0), jax.random.key(1)),
      scaler=True, mask=mask,
  )  # fmt: skip
  batch = data.batch(jnp.arange(4))
  z = np.asarray(model.apply(Variables(params, {}), batch.x)[0])
  rows = np.eye(3, dtype=bool)[np.asarray(batch.y)]
  kept = dict(client=rows.any(0)[None], batch=rows, none=True)[mask]
  z = np.where(kept, z, 0)
  want = np.mean(np.log(np.exp(z).sum(1)) - z[rows])
  np.testing.assert_allclose(metrics['train_loss'], want, rtol=1e-5)
  assert int(num) == 4


class Thinned(nn.Module):
  """Flattens, and drops half of the features in training."""

  @nn.compact
  def __call__(self, x, train, mask):
    x = x.reshape(len(x), -1)
    return nn.Dropout(0.5, deterministic=not train)(x)


def test_dropout_acts_in_training():
  model = BlockModel(
      'thin',
      (
          Block('stem', Thinned()),
          Block('mid', Dense(4)),
          Block('head', Dense(3, relu=False)),
      ),
      SHAPE,
      3,
      (1, 2),
  )
  params = model.init(jax.random.key(0)).params
  local = tiny_local(optax.sgd, 0.0, epochs=1, batch_size=8)
  losses = {
      float(
          train_narrow(
              model, 1.0, local, params, tiny_data((8,)).client(0),
              Visit(jnp.int32(0), jnp.int32(0), jax.random.key(seed)),
              scaler=False, mask='none',
          )[2]['train_loss']
      )
      for seed in range(3)
  }  # fmt: skip
  assert len(losses) == 3 and np.ptp(list(losses)) > 1e-3


@pytest.mark.parametrize('mask', ['client', 'batch', 'none'])
@pytest.mark.parametrize('scaler', [True, False])
def test_one_step_is_that_of_the_paper(mask, scaler):
  """Written out: rate 1/2, two hidden layers, three examples of two labels."""
  federation = one_group(norm=False, local=tiny_local(decayed, 0.1, 1, 8))
  algorithm = heterofl(
      rates(federation, '1/2'), mask=mask, scaler=scaler, weights='data'
  )
  data, client = tiny_data(), 2
  own = data.client(client)
  index = own.index[: int(own.size)]
  x, y = preprocess(own.images[index]).reshape(3, -1), own.labels[index]
  owned = np.isin(np.arange(NUM_CLASSES), y)
  assert owned.sum() == 2
  sent, up = visit_once(algorithm, federation, data, client)
  factor = 2 if scaler else 1

  def loss(params):
    stem, layer1 = (params[n]['linear'] for n in ('stem', 'layer1'))
    h = jax.nn.relu(factor * (x @ stem['kernel'] + stem['bias'][None]))
    h = jax.nn.relu(factor * (h @ layer1['kernel'] + layer1['bias'][None]))
    z = h @ params['head']['kernel'] + params['head']['bias'][None]
    z = z if mask == 'none' else jnp.where(owned[None], z, 0)
    return -jnp.mean(jax.nn.log_softmax(z)[jnp.arange(3), y])

  # w <- w - 0.1 (g + 0.5 w), weighted by three examples.
  want = jax.tree.map(
      lambda w, g: 3 * -0.1 * (np.asarray(g) + 0.5 * np.asarray(w)),
      sent,
      jax.jit(jax.grad(loss))(sent),
  )
  rows = owned if mask == 'client' else np.ones(NUM_CLASSES, bool)
  want['head'] = jax.tree.map(
      lambda leaf: np.asarray(leaf) * rows, want['head']
  )
  assert_trees(values(up.change), want, rtol=1e-4, atol=1e-6)
  assert up.number.tolist() == [3.0]
  assert up.owned.tolist() == [(3.0 * rows).tolist()]
  for leaf in up.change['head'].values():
    assert np.all(leaf.present == np.broadcast_to(rows, leaf.value.shape))


def test_weights_are_one_or_the_number_of_examples_and_0_without_a_step():
  data = tiny_data()
  federation = one_model_federation(norm=False)
  for weights, size, want in (
      ('uniform', 5, 1.0), ('data', 5, 5.0), ('uniform', 0, 0.0),
  ):  # fmt: skip
    given = data.replace(sizes=data.sizes.at[0].set(size))
    _, up = visit_once(
        heterofl(federation, weights=weights), federation, given, 0
    )
    assert up.number.tolist() == [want, 0.0, 0.0]


def test_slices_that_return_unchanged_leave_the_server_unchanged():
  federation = one_group(local=tiny_local(optax.sgd, lr=0.0))
  algorithm = heterofl(rates(federation, '2/3'))
  before, after, reports = run(algorithm, federation)
  # ceil(2/3 8) = 6 channels: kernels, biases and norms.
  narrow = 6 * (4 + 6 + NUM_CLASSES) + 3 * (6 + 6) + NUM_CLASSES
  down = traffic.num_bytes(reports['tiny1'].down)
  assert down.tolist() == [4 * narrow] * 6
  assert_trees(after, before, rtol=0, atol=0)


def test_numbers_outside_of_all_slices_keep_their_value():
  federation = one_group(norm=False)
  algorithm = heterofl(rates(federation, '1/2'))
  before, after, reports = run(algorithm, federation)
  old = before.params['layer1']['linear']['kernel']
  new = after.params['layer1']['linear']['kernel']
  held = np.zeros((8, 8), bool)
  held[:4, :4] = True
  np.testing.assert_array_equal(new[~held], old[~held])
  assert np.any(new[held] != old[held])
  # Down: the slice. Up: the slice without head rows of labels not owned,
  # and the numbers of holders.
  size = (4 * 4 + 4) + (4 * 4 + 4)
  data, levels = tiny_data(), 1
  for report in reports.values():
    down, up = (traffic.num_bytes(t) for t in (report.down, report.up))
    assert down.tolist() == [4 * (size + 5 * NUM_CLASSES)] * 6
    for client, number in zip(report.client_id, up):
      owned = len({*np.asarray(data.labels[data.index[client, : data.sizes[
          client]]]).tolist()})  # fmt: skip
      mine = size + 5 * owned + levels * (1 + NUM_CLASSES)
      assert number == 4 * mine


def test_dynamic_rates_of_one_level_are_fixed_rates():
  federation = one_group(local=tiny_local(optax.sgd, 0.1))
  _, got, reports = run(
      heterofl(federation, levels=(1, '1/2'), odds=(0.0, 1.0)), federation
  )
  _, want, fixed = run(heterofl(rates(federation, '1/2')), federation)
  assert_trees(got.params, want.params, rtol=1e-5, atol=1e-6)
  # The clock knows which widths are likely: here always the half.
  algorithm = heterofl(federation, levels=(1, '1/2'), odds=(0.0, 1.0))
  planned = expected_bytes(
      algorithm, federation.groups[0], tiny_data(), np.ones(1, int)
  )
  (report,) = reports.values()
  assert planned[0, 0] == traffic.num_bytes(report.down)[0]
  for name, report in reports.items():
    assert np.all(np.asarray(report.metrics['rate']) == 0.5)
    # The downlink also has the level.
    down = traffic.num_bytes(report.down) - 4
    assert down.tolist() == traffic.num_bytes(fixed[name].down).tolist()
    up = traffic.num_bytes(report.up) - 4 * (1 + NUM_CLASSES)  # Two levels.
    assert up.tolist() == traffic.num_bytes(fixed[name].up).tolist()


def test_dynamic_rates_are_drawn_by_client_and_round():
  federation = one_group(norm=False)
  algorithm = heterofl(federation, odds=(1.0, 1.0, 4.0))
  server = algorithm.init(jax.random.key(0))
  group = federation.groups[0]

  @jax.jit
  def level(key):
    return algorithm.downlink(server, group, Visit(0, 0, key))[0]

  keys = jax.random.split(jax.random.key(0), 200)
  counts = np.bincount([int(level(key)) for key in keys], minlength=3)
  np.testing.assert_allclose(counts / 200, [1 / 6, 1 / 6, 2 / 3], atol=0.09)


@pytest.mark.slow
def test_a_width_that_is_left_out_is_as_clients_without_a_step():
  federation = one_model_federation(norm=False)
  absent = np.isin(np.arange(6), federation.groups[1].client_ids)
  data = tiny_data()
  alone = data.replace(sizes=jnp.where(absent, 0, data.sizes))
  algorithms = (heterofl(federation, left_out='tiny2'), heterofl(federation))
  got, want = (
      run(algorithm, federation, data=d)[1]
      for algorithm, d in zip(algorithms, (data, alone))
  )
  assert_trees(got.params, want.params, rtol=0, atol=0)
  # Drawn widths can be left out, too: here all that are drawn.
  options = dict(levels=('1', '1/2'), odds=(0.0, 1.0), left_out=('1/2',))
  before, after, _ = run(heterofl(federation, **options), federation)
  assert_trees(after, before, rtol=0, atol=0)


def test_evaluation_collects_statistics_for_every_width():
  federation = one_model_federation()
  algorithm = heterofl(federation, views=True)
  server = algorithm.init(jax.random.key(0))
  data = tiny_data()
  ready = jax.jit(algorithm.calibrate)(server, data)
  x = data.preprocess(data.images[:7])
  group = federation.groups[0]
  assert set(algorithm.views) == {'rate_0.5', 'rate_0.25'}
  for rate, predict in (
      (1, algorithm.predict), (0.25, algorithm.views['rate_0.25'])
  ):  # fmt: skip
    small = create(
        'mlp', SHAPE, NUM_CLASSES, hidden=int(8 * rate), norm='batch'
    )
    axes = jax.tree.map(
        lambda s: tuple(np.arange(n) for n in s.shape),
        small.abstract_variables.params,
    )
    params = extract(server.params, axes)
    stats = static_statistics(small, params, data, batch_size=4)
    want, _ = small.apply(Variables(params, stats), x)
    np.testing.assert_allclose(
        predict(group, ready, x), want, rtol=1e-4, atol=1e-5
    )
  evaluate = make_evaluate(
      algorithm, federation, np.asarray(data.images), np.asarray(data.labels),
      preprocess, batch_size=16, data=data,
  )  # fmt: skip
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  scores = evaluate(state)['tiny2']
  assert set(scores.views) == set(algorithm.views)
  assert 0 <= scores.accuracy[0] <= 1 and np.isfinite(scores.loss[0])
  # Without running statistics there is nothing to collect.
  assert heterofl(one_model_federation(norm=False)).calibrate is None


def test_statistics_may_come_from_a_few_batches():
  federation, data = one_group(), tiny_data()
  model = federation.groups[0].model
  algorithm = heterofl(federation, calibrate_batches=1)
  server = algorithm.init(jax.random.key(0))
  (got,) = algorithm.calibrate(server, data).stats.values()
  one, every = (
      static_statistics(
          model, server.params, data, batch_size=4, num_batches=num
      )
      for num in (1, None)
  )
  assert_trees(got, one, rtol=1e-6)
  assert np.any(one['stem']['norm']['mean'] != every['stem']['norm']['mean'])


def test_every_group_can_be_evaluated_at_its_own_width():
  federation, data = one_model_federation(), tiny_data()
  full = heterofl(federation, views=True)
  own = heterofl(federation, evaluate='own')
  assert full.one_model and not own.one_model and not own.views
  server = full.init(jax.random.key(0))
  x = data.preprocess(data.images[:7])
  of_full, of_own = (a.calibrate(server, data) for a in (full, own))
  # The widths of the groups are 1, 1/2 and 1/4, by their names.
  widths = full.predict, full.views['rate_0.5'], full.views['rate_0.25']
  results = []
  for group, predict in zip(federation.groups, widths, strict=True):
    results.append(own.predict(group, of_own, x))
    np.testing.assert_array_equal(results[-1], predict(group, of_full, x))
  assert not np.allclose(results[0], results[1])
  evaluate = make_evaluate(
      own, federation, np.asarray(data.images), np.asarray(data.labels),
      preprocess, batch_size=16, data=data,
  )  # fmt: skip
  scores = evaluate(rounds.init_state(own, federation, jax.random.key(0)))
  assert len({float(of_group.loss[0]) for of_group in scores.values()}) == 3


def test_bad_options_are_refused_in_one_line():
  federation = one_model_federation()
  with pytest.raises(ValueError, match="those of 'tiny1' "):
    heterofl(tiny_federation())
  for options, message in (
      (dict(mask='clients'), 'Unknown mask '),
      (dict(odds=(0.0, 0.0)), 'odds must be at least 0, and not only zeros'),
      (dict(levels=('1',)), 'give one number of odds for each'),
      (dict(odds=(1.0,), levels=('1', '1/2')), 'levels must be 1 different sh'),
      (dict(odds=(1, 1), levels=('1', 'b')), r"levels\[1\] must be a share su"),
      (dict(odds=(1, 1), left_out='a'), "Unknown left_out 'a'; .* 1, 1/2"),
      (dict(left_out=('tiny',)), "Unknown left_out 'tiny'.* are tiny1, tiny2,"),
      (dict(evaluate='owner'), "Unknown evaluate 'owner'; did you mean 'own'"),
      (dict(evaluate='own', odds=(1.0,)), "evaluate='own' is for fixed widths"),
      (dict(left_out='tiny1 tiny2'), r"such as \('tiny1', 'tiny2'\), got "),
  ):
    with pytest.raises(ValueError, match=message):
      heterofl(federation, **options)
  for values, message in (
      (('1', 'b', '1'), "tiny2.rate must be a share such as '1/2' or 0.5"),
      (('1', '0', '1'), "tiny2.rate must be a share above 0 and at most"),
      (('1', '3/2', '1'), "and at most 1, got '3/2'"),
      (('1', '', '1'), 'groups.tiny2.rate is missing; give it in every group'),
      (('1', '1/2', '0.50001'), 'must differ in their first four digits'),
      (('0.99999', '1/2', '1/2'), 'must differ in their first four digits'),
  ):
    with pytest.raises(ValueError, match=message):
      heterofl(rates(federation, *values))
  with pytest.raises(ValueError, match=r'groups\.tiny1\.rate is for fixed'):
    heterofl(rates(federation, '1', '1', '1'), odds=(1.0,))


def test_it_declares_what_it_needs():
  needs = needs_of(heterofl)
  assert needs.one_model and needs.group_options == dict(rate=None)
  assert needs.keep_optimizer is None
