"""FedH2L by hand, and against NumPy over three rounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms import fedh2l, private
from fedjax_het.algorithms.fedh2l.seeds import (
  EMPTY,
  Seeds,
  draw_seeds,
  publish_seeds,
)
from fedjax_het.algorithms.fedh2l.steps import (
  Sent,
  log_posteriors,
  seed_loss,
)
from fedjax_het.engine import rounds, traffic, visits
from fedjax_het.engine.projection import project_gradient
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.types import (
  Federation,
  Group,
  Maybe,
  Received,
  Visit,
)
from fedjax_het.models import create
from tests.algorithms import fedh2l_numpy
from tests.algorithms.suite import Case, Clocks
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  server_step,
  tiny_data,
  tiny_federation,
  tiny_local,
  tiny_model,
)

# For the shared tests, see `tests/algorithms/suite.py`.
SUITE = [
    Case(dict(seed_fraction=0.4)),
    Case(dict(seed_fraction=0.4, teachers='owner', update='alternate')),
]
CLOCKS = Clocks(dict(seed_fraction=0.5), 'distillation_loss')
SIZES = (5, 8, 3, 7)
NUM_SEEDS = (2, 3, 1, 3)  # For a share of 0.4.
SLOTS = 5
LR, STEPS = 0.1, 2
KEYS = jax.random.key(1), jax.random.key(2)


# The projection.


@pytest.mark.parametrize(
    ('g_l', 'g_g', 'want'),
    [
        ([1.0, 0.0], [-2.0, 1.0], [0.0, 1.0]),
        ([1.0, 1.0], [1.0, 0.0], [1.0, 0.0]),
        ([0.0, 0.0], [-2.0, 1.0], [-2.0, 1.0]),
        # One constraint on all leaves: the first alone would conflict.
        ([1.0, 1.0], [-1.0, 2.0], [-1.0, 2.0]),
    ],
)
def test_the_projected_gradient(g_l, g_g, want):
  z = project_gradient(g_g, g_l, scope='tree')
  np.testing.assert_allclose(jax.tree.leaves(z), want, atol=1e-7)


# The seeds.


def test_a_share_of_each_class_is_published_as_the_models_see_it():
  labels = jnp.array([2, 0, 1, 0, 2, 1, 2, 0, 1, 0, 0, 2, 1, 0, 1, 2])
  augmented = []

  def preprocess(images, key=None):
    augmented.append(key is not None)
    return images / 255.0

  data = tiny_data((16,)).replace(labels=labels, preprocess=preprocess)
  publish = jax.jit(publish_seeds, static_argnums=(1, 2))
  (x, y), real = jax.device_get(publish(data.client(0), 0.25, 6))
  assert real.tolist() == [True] * 4 + [False] * 2 and not any(augmented)
  assert x.dtype == jnp.float32 and not np.any(x[4:])
  assert np.bincount(y[:4]).tolist() == [1, 1, 2]
  assert y[4:].tolist() == [EMPTY] * 2
  mine = fedh2l_numpy.choose(labels.tolist(), 0.25)
  np.testing.assert_array_equal(y[:4], labels[np.array(mine)])
  images = np.asarray(data.images)[data.index[0, np.array(mine)]]
  np.testing.assert_allclose(x[:4], images / 255.0, rtol=1e-6)


TABLE = jnp.array([
    [0, 1, EMPTY], [2, EMPTY, EMPTY], [EMPTY] * 3, [1, 1, 0]
])  # fmt: skip


def test_a_draw_has_seeds_of_the_others_alone_and_all_count_equally():
  draw = jax.jit(draw_seeds, static_argnums=3)
  for seed in range(20):
    index, weight = draw(jax.random.key(seed), TABLE, jnp.int32(0), 3)
    assert len(set(index.tolist())) == 3
    assert set(index.tolist()) <= {3, 9, 10, 11}
    np.testing.assert_allclose(weight, np.where(index == 3, 1, 1 / 3))
  drawn = {
      tuple(draw(jax.random.key(seed), TABLE, jnp.int32(0), 3)[0].tolist())
      for seed in range(20)
  }
  assert len(drawn) > 5
  # More than there are: all once, padding last.
  index, weight = draw(jax.random.key(0), TABLE, jnp.int32(3), 8)
  assert sorted(index[:3].tolist()) == [0, 1, 3]
  assert weight[3:].tolist() == [0] * 5
  np.testing.assert_allclose(jnp.sum(weight), 2)


def test_token_ids_are_published_as_integers():
  model = create('text', (5,), 3, vocabulary=9, width=0.25)
  federation = Federation(
      (Group('text', model, np.arange(2)),),
      tiny_local(),
      sizes=np.array([4, 4]),
  )
  server = jax.eval_shape(fedh2l(federation).init, jax.random.key(0))
  assert server.seeds.x.dtype == jnp.int32
  assert server.seeds.x.shape == (2, 2, 5)


# The loss on seeds.


def make_sent(log_p, present, y):
  """A downlink of seeds with labels y [K, S] that are 1 on all inputs."""
  seeds = Seeds(jnp.ones((*y.shape, *SHAPE)), y)
  return Sent(Maybe(seeds, y != EMPTY), Maybe(log_p, present))


def test_a_model_that_teaches_itself_has_no_kl_divergence():
  model = tiny_model(1, norm=False)
  variables = model.init(jax.random.key(0))
  y = jnp.array([[0, 1], [2, EMPTY]])
  seeds = Seeds(jnp.ones((4, *SHAPE)), y.ravel())
  weight = jnp.array([0.5, 0.5, 1, 0])

  @jax.jit
  def run(variables):
    rows, real = log_posteriors(model, variables, seeds)
    sent = make_sent(jnp.stack([rows, rows]), jnp.ones((2, 4), bool), y)
    loss_fn = seed_loss(model, CLASSIFICATION, sent, 1.0)
    loss, (_, metrics) = loss_fn(
        variables, jnp.arange(4), weight, jax.random.key(0)
    )
    return rows, real, loss, metrics

  rows, real, loss, metrics = jax.device_get(run(variables))
  assert real.tolist() == [True, True, True, False] and not np.any(rows[3])
  np.testing.assert_allclose(np.exp(rows[:3]).sum(axis=1), 1, rtol=1e-5)
  np.testing.assert_allclose(metrics['distillation_loss'], 0, atol=1e-6)
  # The weighted mean of -log f(y): both clients count equally.
  want = -np.mean([np.mean(rows[[0, 1], [0, 1]]), rows[2, 2]])
  np.testing.assert_allclose(metrics['seed_loss'], want, rtol=1e-5)
  np.testing.assert_allclose(loss, want, rtol=1e-5)


def test_the_loss_on_seeds_has_the_tasks_change_of_outputs():
  model = tiny_model(1, norm=False)
  task = CLASSIFICATION._replace(
      before_loss=lambda z, y, mask: jnp.where(mask[:, None], 0.0, z)
  )
  y = jnp.array([[0, 1], [2, EMPTY]])
  sent = make_sent(
      jnp.zeros((2, 4, NUM_CLASSES)), jnp.zeros((2, 4), bool), y
  )
  weight = jnp.array([0.5, 0.5, 1, 0])
  loss, _ = seed_loss(model, task, sent, 1.0)(
      model.init(jax.random.key(0)), jnp.arange(4), weight, jax.random.key(0)
  )
  np.testing.assert_allclose(loss, np.log(NUM_CLASSES), rtol=1e-6)


def test_slots_without_a_seed_do_not_enter_a_norm():
  """With norms that take the statistics of a test batch."""
  model = create('mlp', SHAPE, NUM_CLASSES, hidden=4, norm='batch_only')
  variables = model.init(jax.random.key(0))
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(5, *SHAPE)), jnp.float32)
  y = jnp.array([0, EMPTY, 2, EMPTY, 1])
  publish = jax.jit(functools.partial(log_posteriors, model))
  got = jax.device_get(publish(variables, Seeds(x, y)).value)
  # Other values in the empty slots change nothing.
  other = publish(variables, Seeds(x.at[1].add(9.0), y)).value
  np.testing.assert_array_equal(got, other)
  assert np.any(got[0]) and not np.any(got[1])


def test_without_seeds_the_loss_is_0_and_statistics_stay():
  model = tiny_model(1)
  variables = model.init(jax.random.key(0))
  y = jnp.full((2, 2), EMPTY)
  sent = make_sent(
      jnp.zeros((2, 4, NUM_CLASSES)), jnp.zeros((2, 4), bool), y
  )
  loss_fn = seed_loss(model, CLASSIFICATION, sent, 1.0)

  @jax.jit
  def both(variables):
    return jax.value_and_grad(
        lambda params: loss_fn(
            variables._replace(params=params), jnp.arange(4), jnp.zeros(4),
            jax.random.key(0),
        ),
        has_aux=True,
    )(variables.params)  # fmt: skip

  (loss, (stats, _)), grads = both(variables)
  assert loss == 0 and not any(np.any(g) for g in jax.tree.leaves(grads))
  jax.tree.map(np.testing.assert_array_equal, stats, variables.stats)


# Whole rounds.


@functools.cache
def federate(teachers='all'):
  """Four clients with norms, of two depths; one depth for 'owner'."""
  depths = (1, 2) if teachers == 'all' else (1,)
  local = tiny_local(lr=LR, epochs=STEPS, batch_size=8)
  return tiny_federation(
      depths, 4 // len(depths), local=local, sizes=np.array(SIZES)
  )


def as_numpy(variables, names):
  """The net as `fedh2l_numpy` has it."""
  params, stats = jax.device_get(variables)
  p, s = {}, {}
  for name in names:
    for leaf in ('kernel', 'bias'):
      p[name, leaf] = np.float64(params[name]['Dense_0'][leaf])
    if name in stats:
      norm = params[name]['BatchNorm_0']
      p[name, 'scale'] = np.float64(norm['scale'])
      p[name, 'shift'] = np.float64(norm['bias'])
      running = stats[name]['BatchNorm_0']
      s[name] = np.float64(running['mean']), np.float64(running['var'])
  return p, s


def participants(state, federation, data):
  """Clients of `fedh2l_numpy`, by id."""
  found = {}
  for group in federation.groups:
    names = [block.name for block in group.model.blocks]
    for row, i in enumerate(group.client_ids.tolist()):
      variables = jax.tree.map(
          lambda a, row=row: a[row], state.clients[group.name].variables
      )
      mine = data.index[i, : SIZES[i]]
      x = np.float64(data.images[mine]) / 127.5 - 1.0
      found[i] = fedh2l_numpy.Client(
          as_numpy(variables, names), names, x, np.asarray(data.labels[mine])
      )
  return [found[i] for i in range(len(found))]


@functools.cache
def three_rounds(**options):
  """States and reports of a warm-up and three rounds of three clients."""
  federation = federate(options.get('teachers', 'all'))
  data = jax.device_put(tiny_data(SIZES))
  algorithm = fedh2l(federation, seed_fraction=0.4, **options)
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  warm_up = rounds.make_warm_up(algorithm, federation, backend='map')
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=3, backend='map'
  )
  state, report = warm_up(state, data, KEYS[0])
  states, reports = [jax.device_get(state)], [jax.device_get(report)]
  for _ in range(3):
    state, report = run_round(state, data, *KEYS)
    states.append(jax.device_get(state))
    reports.append(jax.device_get(report))
  return states, reports


def by_client(report, get):
  """{client id: entry} of a round's report."""
  return {
      int(i): jax.tree.map(lambda a, row=row: a[row], get(group))
      for group in report.values()
      for row, i in enumerate(group.client_id)
      if i < len(SIZES)
  }


@pytest.mark.parametrize('options', [
    dict(),
    dict(teachers='owner', update='alternate', distill_weight=2.0),
    pytest.param(dict(project=False), marks=pytest.mark.slow),
    pytest.param(dict(teachers='owner'), marks=pytest.mark.slow),
    pytest.param(dict(update='alternate'), marks=pytest.mark.slow),
])  # fmt: skip
def test_three_rounds_are_those_of_the_paper(options):
  states, reports = three_rounds(**options)
  federation = federate(options.get('teachers', 'all'))
  data = jax.device_get(tiny_data(SIZES))
  clients = participants(states[0], federation, data)
  seeds = [
      (c.x[chosen], c.y[chosen])
      for c in clients
      for chosen in [fedh2l_numpy.choose(c.y, 0.4)]
  ]
  assert [len(y) for _, y in seeds] == list(NUM_SEEDS)
  metrics = [by_client(r, lambda group: group.metrics) for r in reports[1:]]
  losses, table = fedh2l_numpy.run(
      clients,
      seeds,
      [sorted(m) for m in metrics],
      STEPS,
      **dict(
          dict(
              lr=LR, teachers='all', update='sum', project=True,
              distill_weight=1.0,
          ),
          **options,
      ),
  )  # fmt: skip
  names = 'train_loss', 'seed_loss', 'distillation_loss', 'conflicts'
  for got, want in zip(metrics, losses, strict=True):
    for i, row in want.items():
      np.testing.assert_allclose(
          [got[i][name] for name in names], row, rtol=2e-4, atol=2e-5
      )
  # Some steps project, some do not; from round 2 on the others teach.
  shares = [row[3] for round_ in losses for row in round_.values()]
  assert 0 < np.mean(shares) < 1
  assert all(row[2] == 0 for row in losses[0].values())
  assert all(row[2] > 1e-3 for row in losses[1].values())
  after = participants(states[-1], federation, data)
  for got, want in zip(after, clients, strict=True):
    for a, b in zip(got.net, want.net, strict=True):
      assert a.keys() == b.keys()
      for path in a:
        np.testing.assert_allclose(a[path], b[path], rtol=1e-3, atol=1e-4)
  # The server has the latest P_j.
  value, present = states[-1].server.log_p
  for (j, owner), want in table.items():
    if options.get('teachers') == 'owner':
      if j != owner:
        continue
      rows, real = value[j], present[j]
    else:
      part = slice(owner * SLOTS, (owner + 1) * SLOTS)
      rows, real = value[j, part], present[j, part]
    assert real.tolist() == [True] * len(want) + [False] * (SLOTS - len(want))
    np.testing.assert_allclose(
        np.exp(rows[real]), want, rtol=2e-3, atol=2e-4
    )


@pytest.mark.parametrize('teachers', ['all', 'owner'])
def test_what_travels(teachers):
  """Seeds once; then posteriors on all seeds, or on a client's own."""
  options = dict(
      teachers='owner', update='alternate', distill_weight=2.0
  ) if teachers == 'owner' else {}
  _, reports = three_rounds(**options)
  of_seed, of_row = 4 * 4 + 4, 4 * NUM_CLASSES
  up = by_client(reports[0], lambda group: group.up)
  for i, number in enumerate(NUM_SEEDS):
    assert traffic.num_bytes(up[i]) == number * of_seed
  down = by_client(reports[0], lambda group: group.down)
  assert all(traffic.num_bytes(message) == 0 for message in down.values())
  known, total = set(), sum(NUM_SEEDS)
  received = set()
  for report in reports[1:]:
    up = by_client(report, lambda group: group.up)
    down = by_client(report, lambda group: group.down)
    for i in up:
      own = NUM_SEEDS[i]
      others = [NUM_SEEDS[j] if teachers == 'owner' else total
                for j in known - {i}]  # fmt: skip
      want = sum(others) * of_row
      if i not in received:
        want += (total - own) * of_seed
      assert traffic.num_bytes(down[i]) == want
      rows = own if teachers == 'owner' else total
      assert traffic.num_bytes(up[i]) == rows * of_row
    known |= set(up)
    received |= set(up)
  assert known == set(range(4)), 'Every client has been visited.'


@pytest.mark.parametrize('teachers', ['all', 'owner'])
def test_expected_bytes_are_those_of_a_later_visit(teachers):
  federation, data = federate(), tiny_data(SIZES)
  algorithm = fedh2l(federation, seed_fraction=0.4, teachers=teachers)
  of_row, total = 4 * NUM_CLASSES, sum(NUM_SEEDS)
  for group in federation.groups:
    sizes = federation.sizes[group.client_ids]
    got = visits.expected_bytes(algorithm, group, data, sizes)
    own = np.array(NUM_SEEDS)[group.client_ids]
    if teachers == 'owner':
      want = np.stack([total - own, own], axis=1)
    else:
      want = np.stack([np.full(2, 3 * total), np.full(2, total)], axis=1)
    np.testing.assert_allclose(got, want * of_row, atol=1)


def test_a_client_that_sends_nothing_keeps_what_is_stored():
  """Slots of padding, or of updates that are not finite."""
  states, _ = three_rounds()
  server = jax.device_put(states[1].server)
  algorithm = fedh2l(federate(), seed_fraction=0.4)
  rows = jnp.full((1, 4 * SLOTS, NUM_CLASSES), jnp.nan)
  received = {
      group.name: Received(
          (), Maybe(rows, jnp.ones(rows.shape[:2], bool)), jnp.array([4])
      )
      for group in federate().groups
  }
  after = server_step(algorithm, server, received)
  jax.tree.map(np.testing.assert_array_equal, after, server)
  received['tiny2'] = received['tiny2']._replace(client_id=jnp.array([3]))
  after = server_step(algorithm, server._replace(holds=jnp.zeros(4, bool)),
                      received)  # fmt: skip
  assert after.holds.tolist() == [False, False, False, True]
  assert np.all(np.isnan(after.log_p.value[3]))
  np.testing.assert_array_equal(
      after.log_p.value[:3], server.log_p.value[:3]
  )


def two_visits(algorithm, federation, data, keys, client_id=0):
  """A client's state after two visits, and the metrics of both."""
  (group,) = federation.groups
  server = algorithm.init(KEYS[0])
  visit_of = functools.partial(Visit, jnp.int32(client_id), jnp.int32(0))
  if algorithm.warm_up is not None:

    @jax.jit
    def publish(i):
      sent = algorithm.downlink(server, group, visit_of(KEYS[0]))
      return algorithm.warm_up(group, (), sent, data.client(i), None)[1].kept

    ids = jnp.asarray(group.client_ids)
    rows = [jax.device_get(publish(i)) for i in ids]
    rows = jax.tree.map(lambda *rows: jnp.asarray(np.stack(rows)), *rows)
    received = {group.name: Received((), rows, ids)}
    server, _ = algorithm.server_update(server, received, None)

  @jax.jit
  def update(client, key):
    visit = visit_of(key)
    sent = algorithm.downlink(server, group, visit)
    client, _, metrics = algorithm.client_update(
        group, client, sent, data.client(client_id), visit
    )
    return client, metrics

  client, found = algorithm.init_client(group, client_id, KEYS[0]), []
  for key in keys:
    client, metrics = update(client, key)
    found.append(jax.device_get(metrics))
  return jax.device_get(client), found


@pytest.mark.parametrize(
    ('num', 'options'),
    [
        (1, dict(seed_fraction=0.5, update='alternate')),
        pytest.param(2, dict(seed_fraction=0.0), marks=pytest.mark.slow),
    ],
)
def test_without_seeds_of_others_it_is_private_bit_for_bit(num, options):
  """Also, a momentum does not move twice in a step."""
  federation = tiny_federation(
      (1,), num, local=tiny_local(keep_optimizer=True),
      sizes=np.array(SIZES[:num]),
  )  # fmt: skip
  data = tiny_data(SIZES[:num])
  got, want = (
      jax.tree.leaves(two_visits(algorithm, federation, data, KEYS)[0])
      for algorithm in (fedh2l(federation, **options), private(federation))
  )
  assert len(got) == len(want)
  assert all(np.array_equal(x, y) for x, y in zip(got, want, strict=True))


def test_a_visit_draws_its_own_seeds():
  """Only the minibatches of seeds are random: the client has one of its own."""
  local = tiny_local(lr=0.0, batch_size=3, epochs=1)
  federation = tiny_federation((1,), 3, local=local, sizes=np.array([3, 8, 8]))
  algorithm = fedh2l(federation, seed_fraction=0.6)
  keys = jax.random.split(jax.random.key(3), 6)
  _, metrics = two_visits(algorithm, federation, tiny_data((3, 8, 8)), keys)
  assert len({float(m['seed_loss']) for m in metrics}) > 3
  losses = [m['train_loss'] for m in metrics]
  np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (dict(seed_fraction=1.0), 'seed_fraction must be'),
        (dict(distill_weight=-1.0), 'distill_weight must be at least 0'),
        (dict(teachers='some'), "^Unknown teachers 'some'"),
        (dict(update='both'), "^Unknown update 'both'"),
    ],
)
def test_options_are_checked(options, message):
  with pytest.raises(ValueError, match=message):
    fedh2l(federate(), **options)


def test_models_of_different_outputs_are_refused():
  groups = tuple(
      Group(f'c{c}', create('mlp', SHAPE, c, hidden=2), np.array([i]))
      for i, c in enumerate((3, 4))
  )
  with pytest.raises(ValueError, match='number of outputs, got c3 3, c4 4'):
    fedh2l(Federation(groups, tiny_local(), sizes=np.array([4, 4])))
