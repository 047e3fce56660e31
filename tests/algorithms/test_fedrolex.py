"""FedRolex: rolling windows, the mean over holders, one round in NumPy."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.slicing import narrow, width_index
from fedjax_het.algorithms import fedavg, fedrolex, heterofl
from fedjax_het.algorithms.fedrolex import Sent, window
from fedjax_het.engine import rounds, traffic
from fedjax_het.engine.static_norm import static_statistics
from fedjax_het.engine.types import (
  Federation,
  Group,
  Received,
  Turn,
  Visit,
)
from fedjax_het.experiment.config import default_config
from fedjax_het.experiment.local import local_training
from fedjax_het.models import create
from fedjax_het.models.intercept import scaled_norm_inputs
from fedjax_het.models.norm import BatchNorm
from tests.algorithms.suite import Case
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  one_model_federation,
  preprocess,
  server_step,
  tiny_data,
  tiny_local,
  with_group_options,
)
from tests.trees import assert_equal, assert_trees

# What the shared suite runs, see `tests/algorithms/suite.py`.
SUITE = [Case(), Case(dict(mask='batch', direction=-1))]
KEYS = (jax.random.key(1), jax.random.key(2))
SGD = tiny_local(optax.sgd, 0.1, 2, 8)


def small(*rates, norm='none', local=SGD, hidden=4, per_group=2):
  """Groups g0, g1, ... of an MLP of two hidden layers."""
  model = create('mlp', SHAPE, NUM_CLASSES, hidden=hidden, norm=norm)
  groups = tuple(
      Group(f'g{i}', model, np.arange(per_group) * len(rates) + i)
      for i in range(len(rates))
  )
  return with_group_options(Federation(groups, local), rate=rates)


def run(algorithm, federation, num_rounds=1, change=lambda server: server,
        data=None):  # fmt: skip
  """The server's first state and those after each round, and the reports."""
  if data is None:
    data = tiny_data((5, 8, 3, 7)[: federation.num_clients])
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=federation.num_clients, backend='map'
  )
  servers, reports = [jax.device_get(state.server)], []
  for _ in range(num_rounds):
    state = state._replace(server=change(state.server))
    state, report = run_round(state, data, *KEYS)
    servers.append(jax.device_get(state.server))
    reports.append(jax.device_get(report))
  return servers, reports


@pytest.mark.parametrize(
    'direction,want',
    [
        (1, [[0, 1], [1, 2], [2, 3], [3, 0], [0, 1]]),
        (-1, [[0, 1], [3, 0], [2, 3], [1, 2], [0, 1]]),
    ],
)
def test_windows_move_by_one_and_wrap(direction, want):
  got = [window(jnp.int32(t), 4, 2, direction).tolist() for t in range(5)]
  assert got == want


@pytest.mark.parametrize('direction,units', [(1, [1, 2]), (-1, [3, 0])])
def test_a_client_gets_the_window_of_its_direction(direction, units):
  federation = small('1/2', per_group=1)
  algorithm = fedrolex(federation, direction=direction)
  server, (sent,) = at(federation, algorithm, 1)
  full, part = (p['layer1']['linear']['kernel'] for p in (server.params, sent))
  np.testing.assert_array_equal(part, full[np.ix_(units, units)])


def test_in_K_rounds_each_unit_is_in_w_windows():
  for size, kept in ((5, 3), (7, 1), (4, 4)):
    for first in (0, 9):
      seen = np.concatenate(
          [window(jnp.int32(t), size, kept) for t in range(first, first + size)]
      )
      assert np.bincount(seen, minlength=size).tolist() == [kept] * size


def test_a_full_window_does_not_roll():
  assert window(jnp.int32(3), 4, 4).tolist() == [0, 1, 2, 3]


def test_weights_far_from_the_diagonal_are_never_trained():
  """w = 2, K = 4: distance d is in max(0, 2-d) + max(0, d-2) windows."""
  federation = small('1/2', '1/2')
  servers, _ = run(fedrolex(federation, mask='none'), federation, 4)
  changed = [
      a.params['layer1']['linear']['kernel']
      != b.params['layer1']['linear']['kernel']
      for a, b in itertools.pairwise(servers)
  ]
  held = np.array([[2, 1, 0, 1], [1, 2, 1, 0], [0, 1, 2, 1], [1, 0, 1, 2]])
  counts = np.sum(changed, axis=0)
  assert np.all(counts <= held) and np.all(counts[held == 0] == 0)
  # Round t trains rows and columns t and t + 1 mod 4, and nothing else.
  for t, moved in enumerate(changed):
    inside = np.isin(np.arange(4), [t, (t + 1) % 4])
    assert not np.any(moved & ~np.outer(inside, inside))
    assert np.any(moved)
  assert servers[-1].t == 4


@pytest.mark.parametrize(
    'norm,local,weights',
    [
        ('none', tiny_local(), 'data'),
        ('batch_only', SGD, 'uniform'),
        ('none', tiny_local(), 'uniform'),
        pytest.param('batch_only', SGD, 'data', marks=pytest.mark.slow),
    ],
)
def test_all_rates_1_is_fedavg(norm, local, weights):
  """In every round; bit for bit where XLA fuses both programs alike."""
  federation = small('1', 1, norm=norm, local=local)
  algorithm = fedrolex(federation, mask='none', weights=weights)
  got, _ = run(algorithm, federation, 3)
  want, _ = run(fedavg(federation, weights=weights), federation, 3)
  error = 0 if norm == 'none' else 1e-6
  assert_trees(
      [s.params for s in got], [s.params for s in want], rtol=error, atol=error
  )


def test_at_t_0_it_is_heterofl_bit_for_bit():
  """In the first round, and in all while t is held at 0."""
  federation = small('1', '1/2', '1/4', norm='batch', per_group=1)
  want, _ = run(heterofl(federation), federation, 3)
  held, _ = run(
      fedrolex(federation),
      federation,
      3,
      change=lambda server: server._replace(t=jnp.int32(0)),
  )
  assert_equal([s.params for s in held], [s.params for s in want])
  rolled, _ = run(fedrolex(federation), federation, 2)
  assert_equal(rolled[1].params, want[1].params)
  rolled, prefix = (s.params['layer1']['linear'] for s in (rolled[2], want[2]))
  assert np.any(rolled['kernel'] != prefix['kernel'])


def test_both_branches_of_a_residual_block_have_one_window():
  """ResNet152 at 1/4; at t = 100 windows start at 36 of 64 and 100 of 256."""
  full = create('resnet152', (32, 32, 3), 10)
  thin = narrow(full, lambda k: -(-k // 4))
  for t in (0, 1, 63, 100, 2047, 4999):
    index = width_index(
        full, thin, lambda size, kept, t=t: np.asarray(window(t, size, kept))
    ).params
    checked = 0
    for name, leaves in index.items():
      convs = sorted(n for n in leaves if n.startswith('conv'))
      if name.startswith('stage') and 'shortcut' not in str(sorted(leaves)):
        first, last = (leaves[n]['kernel'] for n in (convs[0], convs[-1]))
        np.testing.assert_array_equal(first[2], last[3])
        checked += 1
    assert checked == 50 - 4
    kernels = [index['stage1_block1'][f'conv{i}']['kernel'] for i in (1, 3)]
    got = [(kernel[3][0], len(kernel[3])) for kernel in kernels]
    assert got == [(t % 64, 16), (t % 256, 64)]


@pytest.mark.parametrize('shortcut', ['A', 'B'])
def test_windows_pass_over_all_channels_also_those_of_padding(shortcut):
  model = create('preresnet20', (8, 8, 1), 3, shortcut=shortcut, num_blocks=1)
  thin = narrow(model, lambda k: math.ceil(k / 2))
  seen = {name: set() for name in ('stage2_block0', 'stage3_block0')}
  for t in range(64):
    index = width_index(model, thin, functools.partial(window, t)).params
    for name, channels in seen.items():
      channels.update(np.asarray(index[name]['conv2']['kernel'][-1]).tolist())
  assert [len(channels) for channels in seen.values()] == [32, 64]


def test_without_rates_groups_have_halves_as_in_heterofl():
  federation = small('1', '1')
  for rate in ('', None):
    groups = tuple(
        dataclasses.replace(group, options=dict(rate=rate))
        for group in federation.groups
    )
    plain = dataclasses.replace(federation, groups=groups)
    algorithm, other = fedrolex(plain), heterofl(plain)
    visit = Visit(jnp.int32(1), jnp.int32(0), jax.random.key(0))

    def sent(method, visit=visit, plain=plain):
      server = jax.eval_shape(method.init, jax.random.key(0))
      return jax.eval_shape(
          lambda server: method.downlink(server, plain.groups[1], visit), server
      )

    assert sent(algorithm)[1] == sent(other)


def test_without_a_learning_rate_nothing_moves():
  federation = small(
      '1/2', '3/4', norm='batch', local=tiny_local(optax.sgd, 0.0)
  )
  servers, reports = run(fedrolex(federation), federation, 5)
  for server in servers[1:]:
    assert_equal(server.params, servers[0].params)
  data, some_lack = tiny_data((5, 8, 3, 7)), False
  # Down: t, and 2 or 3 of 4 channels; each norm has two vectors.
  for name, k in (('g0', 2), ('g1', 3)):
    numbers = 1 + k * (4 + k + NUM_CLASSES) + 2 * 3 * k + NUM_CLASSES
    report = reports[0][name]
    assert traffic.num_bytes(report.down).tolist() == [4 * numbers] * 2
    # Up: two more weights, but no head row of a label that a client lacks.
    own = [data.client(i) for i in report.client_id]
    owned = [len(np.unique(c.labels[c.index[: c.size]])) for c in own]
    some_lack |= min(owned) < NUM_CLASSES
    assert traffic.num_bytes(report.up).tolist() == [
        4 * (numbers + 1 + NUM_CLASSES - (NUM_CLASSES - n) * (k + 1))
        for n in owned
    ]
  assert some_lack


def test_the_scaler_changes_epsilon_alone():
  """One channel, batch (0, 2), rate 1/4: epsilon becomes epsilon / 16."""
  norm, x = BatchNorm(momentum=None), jnp.array([[0.0], [2.0]])
  params = norm.init(jax.random.key(0), x)
  for factor, want in ((1, 1 / np.sqrt(1 + 1e-5)), (4, 4 / np.sqrt(16 + 1e-5))):
    with scaled_norm_inputs(factor):
      got = norm.apply(params, x, True)
    np.testing.assert_allclose(got[:, 0], [-want, want], rtol=2e-7)


def test_statistics_come_from_the_full_model_and_no_client():
  """Statistics of scaled inputs would be wrong in evaluation."""
  federation = small('1', '1/2', norm='batch')
  algorithm, data = fedrolex(federation), tiny_data((5, 8, 3, 7))
  servers, _ = run(algorithm, federation, 2, data=data)
  assert_equal(servers[2].stats, servers[0].stats)
  after = algorithm.calibrate(servers[2], data)
  want = static_statistics(
      federation.groups[0].model, servers[2].params, data, batch_size=8
  )
  assert_equal(after.stats, want)
  group = federation.groups[1]
  model = algorithm.client_model(after, (), group)
  assert_equal(model.stats, want)
  assert_equal(model.params, servers[2].params)
  one_batch = fedrolex(federation, calibrate_batches=1)
  assert np.any(
      one_batch.calibrate(servers[2], data).stats['stem']['norm']['mean']
      != want['stem']['norm']['mean']
  )
  assert fedrolex(small('1', norm='batch_only')).calibrate is None


def returns(narrow_params, t, client_id=0, weight=1.0, rows=(1, 1, 1),
            **leaves):  # fmt: skip
  """`Received` of one client and a padding slot: changes of two biases."""
  change = jax.tree.map(jnp.zeros_like, narrow_params)
  if 'layer1' in leaves:
    change['layer1']['linear']['bias'] = jnp.array(leaves['layer1'])
  if 'head' in leaves:
    change['head']['bias'] = jnp.array(leaves['head'])
  weight = jnp.float32(weight)
  sent = Sent(change, weight, weight * jnp.array(rows, jnp.float32))
  return Received(sent, jnp.array([t, 98]), jnp.array([client_id, 2]))


def at(federation, algorithm, t):
  """The server in round t, and the narrow parameters of each group."""
  server = algorithm.init(jax.random.key(0))._replace(t=jnp.int32(t))
  sent = [algorithm.downlink(server, g, None)[1] for g in federation.groups]
  return server, sent


@pytest.mark.parametrize('now', [3, 4])
def test_the_mean_is_over_holders(now):
  """theta = 0, t = 3: A (w = 2) holds units 3 and 0, B holds all.

  An upload of round 3 has the window of round 3, whatever the round is now.
  """
  federation = small('1/2', '1', per_group=1)
  algorithm = fedrolex(federation)
  server, (a, b) = at(federation, algorithm, 3)
  received = dict(
      g0=returns(a, 3, 0, layer1=[1.0, 2.0]),
      g1=returns(b, 3, 1, layer1=[4.0] * 4),
  )
  server = server._replace(t=jnp.int32(now))
  after = server_step(algorithm, server, received, round_num=now)
  assert after.params['layer1']['linear']['bias'].tolist() == [3, 4, 4, 2.5]
  assert after.t == now + 1


def test_coverage_of_a_layer_in_four_rounds():
  """Entry (i, o) at distance d is in max(0, 2 - d) + max(0, d - 2) windows."""
  federation = small('1/2', per_group=1)
  algorithm = fedrolex(federation)
  server, (sent,) = at(federation, algorithm, 0)
  change = jax.tree.map(jnp.zeros_like, sent)
  change['layer1']['linear']['kernel'] = jnp.ones((2, 2))
  server.params['layer1']['linear']['kernel'] = jnp.zeros((4, 4))

  @jax.jit
  def update(server, t):
    sent = Sent(change, jnp.float32(1), jnp.ones(NUM_CLASSES))
    received = dict(g0=Received(sent, t[None], jnp.zeros(1, jnp.int32)))
    return algorithm.server_update(server, received, Turn(t, KEYS[0]))[0]

  for t in range(4):
    server = update(server, jnp.int32(t))
  want = [[2, 1, 0, 1], [1, 2, 1, 0], [0, 1, 2, 1], [1, 0, 1, 2]]
  assert server.params['layer1']['linear']['kernel'].tolist() == want


def test_head_rows_count_for_the_owners_of_their_label():
  federation = small('1/2', '1', per_group=1)
  algorithm = fedrolex(federation)
  server, (a, b) = at(federation, algorithm, 1)
  server.params['head']['bias'] = jnp.array([0.0, 0, 9])
  received = dict(
      g0=returns(a, 1, 0, rows=(1, 1, 0), head=[1.0, 2, 0]),
      g1=returns(b, 1, 1, rows=(0, 1, 0), head=[0.0, 4, 0]),
  )
  after = server_step(algorithm, server, received)
  assert after.params['head']['bias'].tolist() == [1, 3, 9]


def test_a_missing_group_and_an_unfinished_round_move_nothing():
  """Padding may have any window; t changes only at the end of a round."""
  federation = small('1/2', '1', per_group=1)
  algorithm = fedrolex(federation)
  server, (a, b) = at(federation, algorithm, 3)
  received = dict(
      g0=returns(a, -7, 2, weight=0.0),
      g1=returns(b, 3, 1, weight=0.0),
  )
  received = {
      name: got._replace(round_ends=jnp.bool_(False))
      for name, got in received.items()
  }
  after = server_step(algorithm, server, received, round_num=3)
  assert_equal(after, server)


def test_what_nobody_holds_keeps_its_value():
  """Entries outside of all windows, and head rows of labels nobody has."""
  federation, data = small('1/2', '1/2'), tiny_data((5, 8, 3, 7))
  data = data.replace(labels=jnp.minimum(data.labels, 1))
  (before, _, after), _ = run(fedrolex(federation), federation, 2, data=data)
  old, new = before.params, after.params
  # Rounds 0 and 1: units {0, 1} and {1, 2}; label 2 has no example.
  held = np.zeros((4, 4), bool)
  held[:2, :2] = held[1:3, 1:3] = True
  kernels = [p['layer1']['linear']['kernel'] for p in (old, new)]
  np.testing.assert_array_equal(kernels[0][~held], kernels[1][~held])
  heads = [p['head']['kernel'] for p in (old, new)]
  moved = heads[0] != heads[1]
  assert not np.any(moved[3]) and not np.any(moved[:, 2])
  assert np.any(moved[:3, :2])


def test_weights_are_one_or_the_number_of_examples_and_0_without_a_step():
  federation, data = small('1/2'), tiny_data((5, 8))
  group, visit = federation.groups[0], Visit(0, 0, jax.random.key(4))
  for weights, size, want in (
      ('uniform', 5, 1.0), ('data', 5, 5.0), ('uniform', 0, 0.0),
  ):  # fmt: skip
    algorithm = fedrolex(federation, weights=weights)
    server = algorithm.init(jax.random.key(0))
    given = data.replace(sizes=data.sizes.at[0].set(size)).client(0)
    sent = algorithm.downlink(server, group, visit)
    _, up, _ = algorithm.client_update(group, (), sent, given, visit)
    assert up.summed.weight == want


@pytest.mark.parametrize(
    'options,message',
    [
        (dict(direction=2), 'direction'),
        (dict(mask='all'), 'mask'),
        (dict(weights='size'), 'weights'),
        (dict(calibrate_batches=0), 'calibrate_batches'),
    ],
)
def test_bad_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    fedrolex(small('1'), **options)


def test_bad_rates_and_models_are_refused():
  with pytest.raises(ValueError, match=r'groups\.g1\.rate must be a share'):
    fedrolex(small('1', '3/2'))
  one, other = one_model_federation().groups[0], small('1').groups[0]
  different = (one, Group('x', other.model, np.array([1, 2, 4, 5])))
  one = Group('y', one.model, np.array([0, 3]))
  with pytest.raises(ValueError, match='fedrolex needs one model for all gr'):
    fedrolex(Federation((one, *different[1:]), SGD))


def test_the_gradient_is_clipped_and_then_decayed():
  """Gradient norm 5, parameter 10, decay 0.1: direction 5 / 5 + 1 = 2."""
  config = default_config('fedrolex')
  config.local.optimizer = 'sgd'
  config.local.momentum = 0.0
  config.local.weight_decay = 0.1
  config.local.clip_norm = 1.0
  tx = local_training(config).optimizer(1.0)
  weight = jnp.array([10.0])
  step, _ = tx.update(jnp.array([5.0]), tx.init(weight), weight)
  np.testing.assert_allclose(step, [-2.0], rtol=1e-6)


# One round in NumPy; in round 3 the windows wrap.

RATE, MOMENTUM, DECAY, CLIP, STEPS = 0.2, 0.9, 0.05, 0.5, 2


def clipped(lr):
  """As in the paper: the gradient is clipped, then the decay is added."""
  return optax.chain(
      optax.clip_by_global_norm(CLIP),
      optax.add_decayed_weights(DECAY),
      optax.sgd(lr, MOMENTUM),
  )


def oracle_gradient(p, x, y, owned, factor):
  """Gradient of the masked loss of two hidden layers with batch norm."""
  tape, a = [], x
  for i in range(2):
    z = factor * (a @ p[i, 'w'] + p[i, 'b'])
    inv = 1 / np.sqrt(z.var(axis=0) + 1e-5)
    hat = (z - z.mean(axis=0)) * inv
    tape.append((a, inv, hat))
    a = np.maximum(hat * p[i, 'scale'] + p[i, 'shift'], 0)
  logits = np.where(owned, a @ p[2, 'w'] + p[2, 'b'], 0)
  q = np.exp(logits - logits.max(axis=1, keepdims=True))
  q /= q.sum(axis=1, keepdims=True)
  d = np.where(owned, q - np.eye(q.shape[1])[y], 0) / len(y)
  g = {(2, 'w'): a.T @ d, (2, 'b'): d.sum(axis=0)}
  d = d @ p[2, 'w'].T
  for i in (1, 0):
    a, inv, hat = tape[i]
    d = d * (hat * p[i, 'scale'] + p[i, 'shift'] > 0)
    g[i, 'scale'], g[i, 'shift'] = (d * hat).sum(axis=0), d.sum(axis=0)
    d = d * p[i, 'scale']
    d = factor * inv * (d - d.mean(axis=0) - hat * (d * hat).mean(axis=0))
    g[i, 'w'], g[i, 'b'] = a.T @ d, d.sum(axis=0)
    d = d @ p[i, 'w'].T
  return g


def oracle_cut(key, units):
  """The rows and columns of a leaf in a window of hidden units."""
  layer, leaf = key
  if leaf == 'w':
    rows = slice(None) if layer == 0 else units
    columns = slice(None) if layer == 2 else units
    return rows, columns
  return (slice(None) if layer == 2 else units,)


def oracle_round(theta, clients, t, width):
  """The entrywise mean over holders; `clients` are (x, y, rho)."""
  total = {key: np.zeros_like(leaf) for key, leaf in theta.items()}
  count = {key: np.zeros_like(leaf) for key, leaf in theta.items()}
  for x, y, rho in clients:
    units = [(t + m) % width for m in range(int(np.ceil(rho * width)))]
    if rho == 1:
      units = list(range(width))
    owned = np.isin(np.arange(theta[2, 'b'].size), y)
    start = {}
    for key, leaf in theta.items():
      for axis, chosen in enumerate(oracle_cut(key, units)):
        if not isinstance(chosen, slice):
          leaf = np.take(leaf, chosen, axis=axis)
      start[key] = leaf
    p = {key: leaf.copy() for key, leaf in start.items()}
    velocity = {key: np.zeros_like(leaf) for key, leaf in p.items()}
    for _ in range(STEPS):
      g = oracle_gradient(p, x, y, owned, 1 / rho)
      length = np.sqrt(sum((leaf**2).sum() for leaf in g.values()))
      for key in p:
        step = g[key] * min(1, CLIP / length) + DECAY * p[key]
        velocity[key] = MOMENTUM * velocity[key] + step
        p[key] = p[key] - RATE * velocity[key]
    for key, leaf in theta.items():
      held, change = np.zeros_like(leaf), np.zeros_like(leaf)
      place = [np.arange(size) for size in leaf.shape]
      for axis, chosen in enumerate(oracle_cut(key, units)):
        if not isinstance(chosen, slice):
          place[axis] = np.array(chosen)
      held[np.ix_(*place)] = 1
      change[np.ix_(*place)] = p[key] - start[key]
      if key[0] == 2:
        held, change = held * owned, change * owned
      total[key] += change
      count[key] += held
  return {
      key: leaf + total[key] / np.maximum(count[key], 1)
      for key, leaf in theta.items()
  }


def flat(params):
  """{(layer, leaf): float64} of the MLP's parameters."""
  out = {}
  for i, name in enumerate(('stem', 'layer1')):
    linear, norm = params[name]['linear'], params[name]['norm']
    out[i, 'w'], out[i, 'b'] = linear['kernel'], linear['bias']
    out[i, 'scale'], out[i, 'shift'] = norm['scale'], norm['bias']
  out[2, 'w'], out[2, 'b'] = params['head']['kernel'], params['head']['bias']
  return {key: np.asarray(leaf, np.float64) for key, leaf in out.items()}


@pytest.mark.parametrize('t,norm', [(0, 'batch'), (3, 'batch_only')])
def test_a_round_in_numpy(t, norm):
  """Widths 5 and ceil(5 / 2); labels that some clients lack."""
  sizes, hidden = (5, 8, 3, 7), 5
  federation = small('1', '1/2', hidden=hidden, norm=norm,
                     local=tiny_local(clipped, RATE, STEPS, 8))  # fmt: skip
  data = tiny_data(sizes)

  def begin(server):
    # Random values, so that no leaf is zero or one.
    leaves, tree = jax.tree.flatten(server.params)
    rng = np.random.default_rng(5)
    leaves = [
        leaf + jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32)
        for leaf in leaves
    ]
    params = jax.tree.unflatten(tree, leaves)
    starts.append(jax.device_get(params))
    return server._replace(params=params, t=jnp.int32(t))

  starts = []
  servers, _ = run(fedrolex(federation), federation, 1, begin, data)
  clients = []
  for client, size in enumerate(sizes):
    index = np.asarray(data.index[client, :size])
    x = np.asarray(preprocess(data.images[index])).reshape(size, -1)
    y = np.asarray(data.labels[index])
    clients.append((x.astype(np.float64), y, (1.0, 0.5)[client % 2]))
  assert any(len(set(y)) < NUM_CLASSES for _, y, _ in clients)
  want = oracle_round(flat(starts[0]), clients, t, hidden)
  got = flat(servers[1].params)
  for key, leaf in want.items():
    np.testing.assert_allclose(got[key], leaf, rtol=1e-5, atol=1e-5)
    assert np.abs(leaf - flat(starts[0])[key]).max() > 1e-3, key
