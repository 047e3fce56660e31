"""ScaleFL: levels, the loss of all exits, rounds in NumPy and in PyTorch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.averaging import average_weights
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.algorithms import fedavg, scalefl
from fedjax_het.algorithms.scalefl import Sent, exits_loss
from fedjax_het.algorithms.scalefl.levels import make_levels, scaler
from fedjax_het.data.federated import Batch, federate
from fedjax_het.engine import rounds
from fedjax_het.engine.local import fit
from fedjax_het.engine.needs import with_heads
from fedjax_het.engine.task import CLASSIFICATION, Task
from fedjax_het.engine.traffic import full_bytes, num_bytes
from fedjax_het.engine.types import Federation, Group, Received, Visit
from fedjax_het.models import create
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.layers import GlobalPool, Linear
from fedjax_het.models.resnet import BasicBlock, Stem
from fedjax_het.models.vit import vit
from tests.algorithms import scalefl_numpy
from tests.algorithms.suite import Case
from tests.tiny import (
  NUM_CLASSES,
  SHAPE,
  preprocess,
  server_step,
  tiny_data,
  tiny_local,
  with_group_options,
)
from tests.trees import assert_equal, assert_trees

# What the shared suite runs, see `tests/algorithms/suite.py`.
SUITE = [Case({}, dict(tiny1=dict(rate='1/2', exit='1/2')))]
SGD = tiny_local(optax.sgd, 0.1, 2, 8)


def federation_of(model, rate, exit, per_group=1, **fields):
  """Groups g0, g1, ... of one model, with a rate and an exit each."""
  groups = tuple(
      Group(f'g{i}', model, np.arange(per_group) * len(rate) + i)
      for i in range(len(rate))
  )
  federation = Federation(groups, fields.pop('local', SGD), **fields)
  federation = with_group_options(federation, rate=rate, exit=exit)
  return with_heads(scalefl, federation)


# The authors' exits after blocks 22, 30, 38 and 46 of 54, and the last exit.
EXITS = ('11/27', '5/9', '19/27', '23/27', '1')
RATES = ('0.7', '0.7', '0.7', '0.75', '1')


def test_the_five_levels_of_resnet26():
  model = create('resnet26', (32, 32, 3), 10)
  federation = federation_of(model, RATES, EXITS)
  full, levels = make_levels(federation)
  assert [head.after for head in full.heads] == [
      'stage2_block0', 'stage2_block2', 'stage3_block1', 'stage4_block0'
  ]  # fmt: skip
  sizes = [
      full_bytes(level.model.abstract_variables.params) // 4
      for level in levels.values()
  ]
  assert sizes == [437_912, 939_081, 2_833_269, 9_993_496, 27_200_882]
  assert full.abstract_variables == levels['g4'].model.abstract_variables
  widths = [
      [shape[-1] for shape in level.model.shapes if len(shape) == 3]
      for level in levels.values()
  ]
  # Stem, the blocks of the stages, and three convolutions of the exit.
  assert widths == [
      [44] * 4 + [89] + [89] * 3,
      [44] * 4 + [89] * 3 + [89] * 3,
      [44] * 4 + [89] * 3 + [179] * 2 + [179] * 3,
      [48] * 4 + [96] * 3 + [192] * 3 + [384] + [384] * 3,
      [64] * 4 + [128] * 3 + [256] * 3 + [512] * 3,
  ]
  exits = [list(level.model.head_names) for level in levels.values()]
  names = ['exit1', 'exit2', 'exit3', 'exit4']
  assert exits == [names[:j] for j in (1, 2, 3, 4)] + [[*names, 'head']]
  # Every level's entries are among those of wider and deeper ones.
  conv1 = [
      level.index['stage1_block0']['conv1']['kernel']
      for level in levels.values()
  ]
  assert [len(axes[3]) for axes in conv1] == [44, 44, 44, 48, 64]
  assert all(a[3].tolist() == list(range(len(a[3]))) for a in conv1)


def test_two_levels_can_have_one_depth():
  """s = (0.7, 0.7, 0.75, 0.75, 1), e = (1, 2, 3, 4, 4): mean 10,979,956."""
  model = create('resnet26', (32, 32, 3), 10)
  federation = federation_of(
      model, ('0.7', '0.7', '0.75', '0.75', '1'), (*EXITS[1:], '1')
  )
  full, levels = make_levels(federation)
  assert len(full.heads) == 3
  total = sum(
      full_bytes(level.model.abstract_variables.params) // 4
      for level in levels.values()
  )
  assert total == pytest.approx(5 * 10_979_956, abs=3)


def resnet110():
  """Three stages of 18 basic blocks, with 16, 32 and 64 channels."""
  blocks = [Block('stem', Stem(16, 3))]
  for stage, features in enumerate((16, 32, 64), 1):
    for b in range(18):
      module = BasicBlock(features, 2 if stage > 1 and b == 0 else 1)
      blocks.append(Block(f'stage{stage}_block{b}', module))
  blocks += [Block('pool', GlobalPool()), Block('head', Linear(10))]
  cut = (1, len(blocks) - 1)
  return BlockModel('resnet110', tuple(blocks), (32, 32, 3), 10, cut)


def test_the_four_levels_of_the_papers_resnet110():
  """int(0.7 * 16) = 11; exits after 30, 38 and 46 of 54 blocks."""
  full, levels = make_levels(
      federation_of(resnet110(), ('0.7', '0.7', '0.75', '1'), EXITS[1:])
  )
  assert [head.after for head in full.heads] == [
      'stage2_block11', 'stage3_block1', 'stage3_block9'
  ]  # fmt: skip
  widths = [
      sorted({shape[-1] for shape in level.model.shapes if len(shape) == 3})
      for level in levels.values()
  ]
  assert widths == [[11, 22], [11, 22, 44], [12, 24, 48], [16, 32, 64]]
  sizes = [
      full_bytes(level.model.abstract_variables.params) // 4
      for level in levels.values()
  ]
  assert sizes == [157_453, 325_631, 783_402, 1_982_136]


def test_exits_of_other_families():
  """A quarter of a bottleneck's channels; after tokens a copy of the head."""
  net = create('resnet50', (32, 32, 3), 10)
  full, levels = make_levels(federation_of(net, ('0.5', '1'), ('1/2', '1')))
  (head,) = full.heads
  assert head.after == 'stage3_block0'
  kernels = [
      full.abstract_variables.params[f'exit1/conv{i}']['conv']['kernel'].shape
      for i in (1, 2, 3)
  ]
  assert kernels == [(3, 3, 1024, 256)] + [(3, 3, 256, 256)] * 2
  params = levels['g0'].model.abstract_variables.params
  assert params['exit1']['kernel'].shape == (128, 10)
  net = vit((8, 8, 1), 3, depth=4, variant='mini')
  full, _ = make_levels(federation_of(net, ('1', '1'), ('1/2', '1')))
  assert [block.name for block in full.heads[0].blocks] == [
      'exit1/token', 'exit1'
  ]  # fmt: skip


def exits_of(*logits):
  return {f'exit{j}': jnp.array(z) for j, z in enumerate(logits, 1)}


def test_the_weights_of_the_exits():
  """(1 * 1.0 + 2 * 0.8 + 3 * 0.5) / 6; padding counts nowhere."""
  task = Task('first', lambda z, y: z[:, 0], {})
  batch = Batch(None, jnp.zeros(2, jnp.int32), jnp.array([True, False]), None)
  logits = exits_of([[1.0], [9.0]], [[0.8], [9.0]], [[0.5], [9.0]])
  got = exits_loss(logits, batch, task, 0.0, 3.0)
  np.testing.assert_allclose(got, 0.683333, rtol=1e-6)


def no_loss(z, y):
  return 0.0 * z[:, 0]


@functools.partial(jax.jit, static_argnums=(2, 3))
def distilled(z_j, z_n, temperature, detach=True):
  """KD_1 of two exits, without CE: L = 2 / 6 KD_1."""
  batch = Batch(None, jnp.zeros(1, jnp.int32), jnp.array([True]), None)
  return 3 * exits_loss(
      exits_of([z_j], [z_n]), batch, Task('none', no_loss, {}), 1.0,
      temperature, detach,
  )  # fmt: skip


def test_distillation_by_hand():
  """q = (3/4, 1/4) and p = (1/2, 1/2): KL 0.130812, divided by 2 classes."""
  got = distilled([0.0, 0.0], [np.log(3.0), 0.0], 1.0)
  np.testing.assert_allclose(got, 0.065406, rtol=1e-5)
  # The same probabilities at T = 3.
  got = distilled([0.0, 0.0], [3 * np.log(3.0), 0.0], 3.0)
  np.testing.assert_allclose(got, 9 * 0.065406, rtol=1e-5)


def test_the_teacher_learns_only_if_it_is_not_detached():
  z_j, z_n = jnp.array([0.3, -0.2, 1.0]), jnp.array([1.0, 0.0, -1.0])
  student = jax.grad(distilled)(z_j, z_n, 2.0)
  p, q = jax.nn.softmax(z_j / 2), jax.nn.softmax(z_n / 2)
  np.testing.assert_allclose(student, 2 / 3 * (p - q), rtol=1e-5)
  assert not np.any(jax.grad(distilled, 1)(z_j, z_n, 2.0))
  teacher = jax.grad(distilled, 1)(z_j, z_n, 2.0, False)
  gap = jnp.log(q / p)
  want = 2 / 3 * q * (gap - jnp.sum(q * gap))
  np.testing.assert_allclose(teacher, want, rtol=1e-4)
  np.testing.assert_allclose(distilled(z_n, z_n, 2.0), 0.0, atol=1e-7)
  assert np.abs(jax.grad(distilled)(z_n, z_n, 2.0)).max() < 1e-7


def dense_net(**options):
  """Four numbered blocks of four units."""
  return create(
      'mlp', SHAPE, NUM_CLASSES, **(dict(depth=5, hidden=4) | options)
  )


def visit_loss(federation, round_nums, **options):
  """Training losses of the first client's visits to the initial server."""
  algorithm, data = scalefl(federation, **options), tiny_data((8,))
  group, params = federation.groups[0], algorithm.init(jax.random.key(1))

  @jax.jit
  def visit(round_num):
    turn = Visit(jnp.int32(0), round_num, jax.random.key(0))
    sent = algorithm.downlink(params, group, turn)
    return algorithm.client_update(group, (), sent, data.client(0), turn)[2]

  return [float(visit(jnp.int32(t))['train_loss']) for t in round_nums]


def test_distillation_begins_after_a_quarter_of_the_rounds():
  still = tiny_local(optax.sgd, 0.0, 1, 8)
  federation = federation_of(
      dense_net(), ('1', '1'), ('1', '1/2'), local=still, num_rounds=500
  )
  plain, last = visit_loss(federation, (0, 499), distill_weight=0.0)
  assert plain == last
  on = dict(distill_weight=2.0)
  first, before, after = visit_loss(federation, (0, 125, 126), **on)
  assert first == before == plain and after > plain
  assert visit_loss(federation, (2,), **on, distil_after=0.004) == [plain]
  unknown = federation_of(
      dense_net(), ('1', '1'), ('1', '1/2'), local=still
  )
  assert visit_loss(unknown, (0,), **on) == [pytest.approx(after)]


def test_the_coefficient_is_that_of_a_client_with_a_step():
  """1, or its number of examples; 0 for a client without any."""
  federation = federation_of(dense_net(), ('1',), ('1',), 2)
  group, data = federation.groups[0], tiny_data((4, 5))
  data = data.replace(sizes=jnp.array([0, 5]))
  for weights, want in (('uniform', [0, 1]), ('data', [0, 5])):
    algorithm = scalefl(federation, weights=weights)
    sent = algorithm.init(jax.random.key(1))

    @jax.jit
    def weight(k, algorithm=algorithm, sent=sent):
      turn = Visit(k, jnp.int32(0), jax.random.key(0))
      _, uplink, _ = algorithm.client_update(
          group, (), sent, data.client(k), turn
      )
      return uplink.summed.weight

    assert [float(weight(jnp.int32(k))) for k in (0, 1)] == want


def test_the_scaler_acts_in_training_and_in_tests():
  """Without norms it multiplies by 1 / s, both in the loss and in logits."""
  still = tiny_local(optax.sgd, 0.0, 1, 8)
  losses = []
  for rate, part in (('1/2', 0.5), ('1', 1.0)):
    net = dense_net(hidden=int(4 / part))
    federation = federation_of(net, (rate,), ('1/2',), local=still)
    algorithm, data = scalefl(federation), tiny_data((8,))
    group, params = federation.groups[0], algorithm.init(jax.random.key(1))
    (loss,) = visit_loss(federation, (0,))
    model = algorithm.client_model(params, (), group)
    x, y = preprocess(data.images), jnp.asarray(data.labels)
    logits = algorithm.predict(group, model, x)
    tested = CLASSIFICATION.loss(logits, y)
    np.testing.assert_allclose(loss, tested, rtol=1e-6)
    # By hand: three layers, whose outputs are divided by the rate.
    for layer in ('stem', 'layer1', 'layer2'):
      p = model.params[layer]['linear']
      x = x.reshape(len(x), -1) @ p['kernel'] + p['bias'][None]
      x = jax.nn.relu(x / part)
    exit1 = model.params['exit1']
    want = x @ exit1['kernel'] + exit1['bias'][None]
    np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-5)
    losses.append(loss)
  assert losses[0] != losses[1]


def test_the_scaler_leaves_shortcuts_alone():
  """Without norms: factor 2 * 2 on the residual branch, 1 on the shortcut."""
  net = create('mini_resnet6', SHAPE, NUM_CLASSES, width=1 / 8, norm='none')
  _, levels = make_levels(federation_of(net, ('1/2',), ('1',)))
  block = dict(levels['g0'].model.blocks)['stage2_block0']
  x = jax.random.normal(jax.random.key(0), (2, 2, 2, 2))
  params = block.init(jax.random.key(1), x)['params']
  for without, factor in (('conv2', 1.0), ('conv_shortcut', 4.0)):
    part = {**params, without: jax.tree.map(jnp.zeros_like, params[without])}
    plain = block.apply(dict(params=part), x)
    with scaler(levels['g0']):
      scaled = block.apply(dict(params=part), x)
    np.testing.assert_allclose(scaled, factor * plain, rtol=1e-5)
    assert np.any(plain)


def change(federation, changes, amounts=(), **options):
  """The server, from zeros, after mean changes {group: number}."""
  algorithm = scalefl(federation, **options)
  server = jax.tree.map(
      lambda leaf: np.zeros(leaf.shape, leaf.dtype),
      jax.eval_shape(algorithm.init, jax.random.key(0)),
  )
  received = {}
  for group in federation.groups:
    sent = algorithm.downlink(server, group, None)
    weight = float(group.name in changes) * dict(amounts).get(group.name, 1.0)
    total = weight * changes.get(group.name, 0.0)
    received[group.name] = Received(
        Sent(
            jax.tree.map(lambda leaf, c=total: np.full_like(leaf, c), sent),
            np.float32(weight),
        ),
        None,
        None,
    )
  return server_step(algorithm, server, received)


def test_every_number_is_averaged_over_its_holders():
  """Prefixes 1/2 and 1 of four units; the narrow level has two blocks."""
  federation = federation_of(dense_net(), ('1/2', '1'), ('1/2', '1'))
  narrow = np.array([[1, 1, 0, 0]] * 2 + [[0] * 4] * 2, np.float32)
  for changes, inside, outside in (
      (dict(g0=6.0), 6.0, 0.0),
      (dict(g0=6.0, g1=2.0), 4.0, 2.0),
      (dict(g1=2.0), 2.0, 2.0),
      ({}, 0.0, 0.0),
  ):
    server = change(federation, changes)
    np.testing.assert_array_equal(
        server['layer1']['linear']['kernel'],
        narrow * inside + (1 - narrow) * outside,
    )
    # Inputs and classes are never cut.
    np.testing.assert_array_equal(
        server['stem']['linear']['kernel'],
        np.repeat([[inside] * 2 + [outside] * 2], 4, axis=0),
    )
    np.testing.assert_array_equal(server['exit1']['bias'], [inside] * 3)
    np.testing.assert_array_equal(
        server['exit1']['kernel'][:, 0], [inside] * 2 + [outside] * 2
    )
    # No narrow client has these blocks.
    for block in ('layer3', 'layer4', 'head'):
      leaves = jax.tree.leaves(server[block])
      assert {float(v) for leaf in leaves for v in leaf.reshape(-1)} == {
          changes.get('g1', 0.0)
      }
  server = change(
      federation, dict(g0=6.0, g1=2.0), dict(g0=1.0, g1=3.0), weights='data'
  )
  assert float(server['exit1']['bias'][0]) == 3.0


def test_an_exit_moves_only_with_levels_that_have_it():
  exits = ('1/4', '1/2', '3/4', '1')
  federation = federation_of(dense_net(), ('1/2',) * 3 + ('1',), exits)
  for level in range(4):
    server = change(federation, {f'g{level}': 1.0})
    moved = {
        name
        for name, tree in server.items()
        if any(np.any(leaf) for leaf in jax.tree.leaves(tree))
    }
    names = ['exit1', 'exit2', 'exit3', 'head']
    layers = ['stem', *(f'layer{i}' for i in range(1, level + 2))]
    assert moved == {*names[: level + 1], *layers}


def run(algorithm, federation, num=2, data=None, backend='map'):
  """The server's state after some rounds of all clients, and the reports."""
  data = tiny_data((5, 8, 3, 7)) if data is None else data
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=federation.num_clients,
      backend=backend,
  )  # fmt: skip
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  for _ in range(num):
    state, reports = run_round(
        state, data, jax.random.key(1), jax.random.key(2)
    )
  return jax.device_get((state.server, reports))


@pytest.mark.parametrize(
    ('weights', 'norm'), [('uniform', 'batch'), ('data', 'none')]
)
def test_one_level_is_fedavg_bit_for_bit(weights, norm):
  """Whatever the distill_weight; with momentum, and partial batches.

  FedAvg's norms, too, take the statistics of the batch.
  """

  def federation(norm):
    net = dense_net(depth=2, norm=norm)
    return federation_of(net, ('1', '1'), ('1', '1'), 2, local=tiny_local())

  ours = federation(norm)
  algorithm = scalefl(ours, distill_weight=7.0, weights=weights)
  got, _ = run(algorithm, ours)
  plain = federation('batch_only' if norm == 'batch' else norm)
  want, _ = run(fedavg(plain, weights=weights), plain)
  assert_equal(got, want.params)


def test_the_full_level_alone_is_fedavg_of_the_weighted_loss():
  """Clients of the narrow level have no examples, and so are in no mean."""
  federation = federation_of(
      dense_net(depth=3), ('1/2', '1'), ('1/2', '1'), 2, local=tiny_local()
  )
  data = tiny_data((4, 8, 4, 7))
  data = data.replace(sizes=jnp.array([0, 8, 0, 7]))
  algorithm = scalefl(federation, distill_weight=2.0, temperature=1.5)
  got, _ = run(algorithm, federation, data=data)

  def train(group, start, data, visit):
    def objective(variables, batch, key):
      logits, stats = group.model.apply_heads(
          variables, batch.x, train=True, mask=batch.mask, key=key
      )
      z, last = logits['exit1'], logits['head']
      q = jax.lax.stop_gradient(jax.nn.softmax(last / 1.5))
      gap = jnp.log(q) - jax.nn.log_softmax(z / 1.5)
      # One student of weight 1, and the last exit of weight 2.
      losses = (
          optax.softmax_cross_entropy_with_integer_labels(z, batch.y)
          + 2.0 * 1.5**2 * jnp.mean(q * gap, axis=1)
          + 2 * optax.softmax_cross_entropy_with_integer_labels(last, batch.y)
      ) / 3
      total = jnp.sum(losses, where=batch.mask)
      return total / jnp.sum(batch.mask), (stats, {})

    end, _, *rest = fit(objective, federation.local, start, data, visit)
    return end, *rest

  reference = average_weights(make_exchange(federation, 'layerwise'), train)
  want, _ = run(reference, federation, data=data)
  assert_trees(got, want.params, rtol=1e-5, atol=1e-6)


# Rate and layers of the three clients.
DENSE_LEVELS = ((1 / 2, 1), (1 / 2, 2), (3 / 4, 4))


def examples_of(data):
  """Each client's images [B, D] and labels."""
  images = np.asarray(preprocess(data.images), np.float64)
  images, labels = images.reshape(len(images), -1), np.asarray(data.labels)
  sizes = np.asarray(data.sizes)
  for k in range(len(sizes)):
    index = np.asarray(data.index[k, : sizes[k]])
    yield images[index], labels[index]


@pytest.fixture(scope='module', params=['none', 'batch'])
def dense_rounds(request):
  """Two rounds of three levels, the second one at learning rate 0.

  Returns the algorithm, the federation, the data, the server's three states and
  the second round's report.
  """
  local = dataclasses.replace(
      SGD, learning_rate=lambda t: jnp.where(t == 0, 0.1, 0.0)
  )
  federation = federation_of(
      dense_net(norm=request.param), ('1/2', '1/2', '3/4'), ('1/4', '1/2', '1'),
      local=local,
  )  # fmt: skip
  algorithm = scalefl(federation, distill_weight=2.0, temperature=1.5)
  data = tiny_data((5, 8, 7))
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=3, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  servers = [full_of_noise(jax.device_get(state.server))]
  state = state._replace(server=jax.tree.map(jnp.asarray, servers[0]))
  for _ in range(2):
    state, reports = run_round(
        state, data, jax.random.key(1), jax.random.key(2)
    )
    servers.append(jax.device_get(state.server))
  return algorithm, federation, data, servers, jax.device_get(reports)


def test_one_round_in_numpy(dense_rounds):
  """Two full-batch steps of each client, with distillation."""
  _, _, data, (before, after, _), _ = dense_rounds
  clients = [
      (*level, x, y) for level, (x, y) in zip(DENSE_LEVELS, examples_of(data))
  ]
  before, got = by_path(before), by_path(after)
  want = scalefl_numpy.one_round(before, clients, 2.0, 1.5, lr=0.1, steps=2)
  assert got.keys() == want.keys()
  for path, leaf in want.items():
    np.testing.assert_allclose(got[path], leaf, rtol=1e-5, atol=1e-5)
    # No client has the last unit.
    held = np.zeros_like(leaf, bool)
    held[scalefl_numpy.entries(path, leaf, 3 / 4)] = True
    np.testing.assert_array_equal(got[path][~held], before[path][~held])
    # A norm cancels the bias before it.
    if path[-1] != 'bias' or path[0] in scalefl_numpy.EXIT_AFTER.values():
      assert np.max(np.abs(leaf - before[path])) > 1e-3


def test_at_rate_zero_nothing_moves(dense_rounds):
  *_, (_, before, after), _ = dense_rounds
  assert_equal(after, before)


def test_training_and_test_logits_are_equal(dense_rounds):
  """The loss at learning rate 0 is that of the logits in a test."""
  algorithm, federation, data, (*_, server), reports = dense_rounds
  batches = list(examples_of(data))
  for k, group in enumerate(federation.groups):
    model = algorithm.client_model(server, (), group)
    loss = reports[group.name].metrics['train_loss'][0]
    level, (x, y) = DENSE_LEVELS[k], batches[k]

    @jax.jit
    def test(model, images, labels, group=group):
      logits = algorithm.predict(group, model, images)
      return logits, CLASSIFICATION.loss(logits, labels)

    images = x.astype(np.float32).reshape(len(x), *SHAPE)
    logits, tested = test(model, images, y)
    if k == 0:  # With one exit, L is the loss of its logits.
      np.testing.assert_allclose(loss, tested, rtol=1e-6)
    p = by_path(model.params)
    *_, want = scalefl_numpy.logits(p, x, *level)
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-5)
    want = scalefl_numpy.loss(p, x, y, *level, 2.0, 1.5)
    np.testing.assert_allclose(loss, want, rtol=1e-5)


def small_resnet(shape=(4, 4, 1)):
  """A block of 4 and one of 8 channels."""
  return create('mini_resnet6', shape, NUM_CLASSES, width=1 / 8)


def image_data(sizes=(5, 8, 3, 7)):
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (sum(sizes), 4, 4, 1)).astype(np.uint8)
  labels = rng.integers(0, NUM_CLASSES, sum(sizes))
  parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
  return federate(images, labels, parts, preprocess)


def by_path(tree):
  return {
      tuple(entry.key for entry in path): np.asarray(leaf, np.float64)
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def full_of_noise(tree, scale=0.2):
  rng = np.random.default_rng(1)
  return jax.tree.map(
      lambda a: a + rng.normal(0, scale, a.shape).astype(np.float32), tree
  )


def levels_federation(local=SGD, **fields):
  """Two clients of a narrow level up to the exit, two of a wider one."""
  return federation_of(
      small_resnet(), ('1/2', '3/4'), ('1/2', '1'), 2, local=local, **fields
  )


@pytest.fixture(scope='module')
def small_round():
  """A round of two levels: parameters before and after, and the reports."""
  federation = levels_federation()
  algorithm = scalefl(federation, distill_weight=2.0, temperature=1.5)
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=4, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  before = full_of_noise(jax.device_get(state.server))
  after, reports = run_round(
      state._replace(server=jax.tree.map(jnp.asarray, before)), image_data(),
      jax.random.key(1), jax.random.key(2),
  )  # fmt: skip
  return before, *jax.device_get((after.server, reports))


# Rate and blocks of the four clients.
LEVELS = ((1 / 2, 1), (3 / 4, 2), (1 / 2, 1), (3 / 4, 2))


def test_one_round_in_pytorch(small_round):
  """Four clients of two levels, two steps on all of their examples."""
  pytest.importorskip('torch', reason='PyTorch is an optional extra')
  from tests.algorithms import scalefl_torch

  data, clients = image_data(), []
  images = np.asarray(preprocess(data.images), np.float64)
  labels = np.array(data.labels, np.int64)
  for k, level in enumerate(LEVELS):
    index = np.asarray(data.index[k, : data.sizes[k]])
    clients.append((level, images[index], labels[index]))
  before, got = map(by_path, small_round[:2])
  want = scalefl_torch.one_round(before, clients, 2.0, 1.5, 0.1, 2)
  assert got.keys() == want.keys()
  for path, leaf in want.items():
    np.testing.assert_allclose(got[path], leaf, rtol=1e-5, atol=1e-5)
    kept = scalefl_torch.entries(path, leaf, 3 / 4)
    assert np.any(leaf[kept] != before[path][kept])
    # No client holds the last quarter.
    same = np.ones_like(leaf, bool)
    same[kept] = False
    np.testing.assert_array_equal(got[path][same], before[path][same])


def test_bytes_are_those_of_the_level(small_round):
  """The uplink adds the coefficient."""
  _, levels = make_levels(levels_federation())
  for name, level in levels.items():
    size = full_bytes(level.model.abstract_variables.params)
    report = small_round[2][name]
    assert num_bytes(report.down).tolist() == [size] * 2
    assert num_bytes(report.up).tolist() == [size + 4] * 2


def test_unused_weights_can_be_dropped():
  """On 1x1 maps a kernel is trained with one of its nine taps."""
  seen, data = [], tiny_data((8,))

  def spy(rate):
    tx = optax.sgd(rate)

    def init(params):
      trained = params['stage2_block0']
      seen.append(getattr(trained, 'params', trained)['conv2']['kernel'].shape)
      return tx.init(params)

    return optax.GradientTransformation(init, tx.update)

  def visit(drop):
    """Shapes of what a client is sent and of the change that it sends back."""
    local = tiny_local(spy, 0.1, 1, 8, drop_unused_weights=drop)
    federation = federation_of(
        small_resnet(SHAPE), ('1/2',), ('1',), local=local
    )
    algorithm, group = scalefl(federation), federation.groups[0]

    def shapes(key):
      turn = Visit(jnp.int32(0), jnp.int32(0), key)
      sent = algorithm.downlink(algorithm.init(key), group, turn)
      _, uplink, _ = algorithm.client_update(
          group, (), sent, data.client(0), turn
      )
      return sent, uplink.summed.change

    return jax.eval_shape(shapes, jax.random.key(0))

  for drop in (False, True):
    sent, change = visit(drop)
    assert change == sent
  assert seen == [(3, 3, 4, 4), (1, 1, 4, 4)]


@pytest.mark.parametrize('value', [np.nan, np.inf, -1.0])
@pytest.mark.parametrize(
    'option', ['distill_weight', 'temperature', 'distil_after']
)
def test_wrong_numbers_are_refused(option, value):
  federation = federation_of(dense_net(), ('1',), ('1',))
  with pytest.raises(ValueError, match=f'{option} must be'):
    scalefl(federation, **{option: value})


def test_wrong_levels_are_refused():
  for options, message in (
      (dict(rate=('2',), exit=('1',)), 'groups.g0.rate must be a share'),
      (dict(rate=('1',), exit=('0',)), 'groups.g0.exit must be a share'),
      (dict(rate=('1/8',), exit=('1',)), 'would keep 0 of its 4 channels'),
  ):
    with pytest.raises(ValueError, match=message):
      scalefl(federation_of(dense_net(), **options))
  with pytest.raises(ValueError, match='weights'):
    scalefl(federation_of(dense_net(), ('1',), ('1',)), weights='size')


def test_a_model_without_the_exits_is_refused():
  """Exits after blocks 1 and 2 of four, which `with_heads` attaches."""
  federation = with_group_options(
      federation_of(dense_net(), ('1',) * 3, ('1',) * 3),
      rate=('1',) * 3, exit=('1/4', '1/2', '1'),
  )  # fmt: skip
  with pytest.raises(ValueError) as error:
    scalefl(federation)
  assert str(error.value) == (
      "groups.g0: scalefl needs the heads exit1, exit2, which 'mlp5' lacks; "
      'attach them by engine.needs.with_heads(scalefl, federation).'
  )
  for _ in range(2):  # Existing heads stay.
    federation = with_heads(scalefl, federation)
    heads = [
        [(head.name, head.after) for head in group.model.heads]
        for group in federation.groups
    ]
    assert heads == [[('exit1', 'layer1'), ('exit2', 'layer2')]] * 3
  scalefl(federation)
  # The exits are behind the blocks of these depths, and of no others.
  moved = with_group_options(
      federation, rate=('1',) * 3, exit=('1/2', '3/4', '1')
  )
  for take in (scalefl, lambda moved: with_heads(scalefl, moved)):
    with pytest.raises(ValueError, match="exit1 of 'mlp5' is behind 'layer1'"):
      take(moved)
  stem, layer, *_, last = dense_net().blocks
  middle = layer._replace(name='middle')
  unnumbered = dataclasses.replace(
      dense_net(), blocks=(stem, middle, last), cut=(1, 2)
  )
  with pytest.raises(ValueError, match=r'groups\.g0: .* has no numbered block'):
    federation_of(unnumbered, ('1',), ('1',))
