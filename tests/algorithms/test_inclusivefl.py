"""InclusiveFL: owners of blocks, blends by hand, and five rounds in NumPy."""

import jax
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.averaging import average_weights, model_training
from fedjax_het.aggregation.exchange import Delta, WeightExchange
from fedjax_het.aggregation.sharing import Sharing
from fedjax_het.algorithms import fedavg, inclusivefl
from fedjax_het.algorithms.inclusivefl import block_mean
from fedjax_het.algorithms.inclusivefl.depths import find_depths
from fedjax_het.engine import rounds
from fedjax_het.engine.traffic import full_bytes
from fedjax_het.engine.types import Federation, Group, Received
from fedjax_het.models import create
from fedjax_het.models.vit import vit
from tests.quadratics import play, quadratics
from tests.tiny import (
  preprocess,
  server_step,
  tiny_data,
  tiny_federation,
  tiny_local,
)
from tests.trees import assert_equal, assert_trees

SGD = tiny_local(optax.sgd, 0.1, 3, 8)
FULL = dict(beta=0.0, private='none', private_heads=False)


def federation_of(*models, per_group=1):
  """A federation with one group per model, named after the model."""
  groups = tuple(
      Group(model.name, model, np.arange(per_group) * len(models) + i)
      for i, model in enumerate(models)
  )
  return Federation(groups, SGD)


def resnets(*depths):
  return federation_of(
      *(create(f'resnet{d}', (32, 32, 3), 10) for d in depths)
  )


def owners(federation, **options):
  """{block: sets of groups that share a copy}; a group is its number."""
  algorithm = inclusivefl(federation, **options)
  server = jax.eval_shape(algorithm.init, jax.random.key(0))
  held = {}
  for group in federation.groups:
    for key, tree in algorithm.downlink(server, group, None).params.items():
      if jax.tree.leaves(tree):
        number = int(''.join(filter(str.isdigit, group.name)))
        held.setdefault(key, set()).add(number)
  copies = {}
  for key, groups in held.items():
    copies.setdefault(key.split('/')[-1], []).append(groups)
  return {
      block: sorted(sets, key=lambda s: (-len(s), min(s)))
      for block, sets in copies.items()
  }


def table(**rows):
  """Parses '10,14 18': 10 and 14 share one copy, 18 has another."""
  return {
      block: [{int(n) for n in part.split(',')} for part in text.split()]
      for block, text in rows.items()
  }


EVERY = '10,14,18,22,26'
TOP = table(
    stem=EVERY,
    stage1_block0=EVERY,
    stage2_block0=EVERY,
    stage3_block0=EVERY,
    stage1_block1='18,22,26',
    stage2_block1='18,22,26',
    stage1_block2='26',
    stage2_block2='26',
    stage3_block1='14,18,22,26',
    stage3_block2='22,26',
    stage4_block0='14,18,22,26 10',
    stage4_block1='22,26 14 18',
    stage4_block2='22 26',
    head='10 14 18 22 26',
)
STAGE = TOP | table(
    stage4_block0=EVERY,
    stage1_block1='18 22 26',
    stage2_block1='18 22 26',
    stage3_block1='22,26 14 18',
    stage3_block2='22 26',
)


def test_the_tables_of_the_five_resnets():
  federation = resnets(10, 14, 18, 22, 26)
  assert owners(federation) == TOP
  assert owners(federation, private='stage') == STAGE
  shared = {name: [set().union(*sets)] for name, sets in TOP.items()}
  assert owners(federation, **FULL) == shared
  alone = owners(federation, aggregation='architecture')
  assert all(len(one) == 1 for sets in alone.values() for one in sets)


def test_what_the_server_stores_and_the_clients_receive():
  federation = resnets(10, 14, 18, 22, 26)
  algorithm = inclusivefl(federation)
  server = jax.eval_shape(algorithm.init, jax.random.key(0))
  assert full_bytes(server.model.params) == 4 * 35_307_890
  assert full_bytes(server.momentum) == 4 * (3_673_088 + 3 * 4_720_640)
  assert set(server.momentum) == {f'resnet{d}' for d in (10, 14, 18, 22)}
  sizes = [
      full_bytes(algorithm.downlink(server, group, None).params)
      for group in federation.groups
  ]
  assert sizes == [
      4 * n for n in (4910922, 10812234, 11181642, 17082954, 17452362)
  ]


def test_depths_4_8_12_of_a_transformer():
  """Its final norm is private with the head; position embeddings are not."""
  nets = [vit((8, 8, 1), 3, depth=d, variant='mini') for d in (12, 4, 8)]
  got = owners(federation_of(*nets))
  want = dict(embed='4,8,12', token='4 8 12', head='4 8 12')
  want |= {f'encoder{j:02d}': '4,8,12' for j in range(3)}
  want |= {f'encoder{j:02d}': '8,12' for j in range(4, 7)}
  want |= {f'encoder{j:02d}': '12' for j in range(8, 12)}
  want |= dict(encoder03='8,12 4', encoder07='8 12')
  assert got == table(**want)


def test_private_copies_begin_equal():
  federation = tiny_federation((1, 2, 3), norm=False)
  algorithm = inclusivefl(federation)
  server = algorithm.init(jax.random.key(4))
  for group in federation.groups:
    got = algorithm.client_model(server, (), group)
    assert_equal(got, group.model.init(jax.random.key(4)))


def update(federation, server, changes, weights=None, **options):
  """The server after a round of given mean changes.

  Args:
    federation: The federation.
    server: Its state; None for an initial state of zeros.
    changes: {group: number, or {block: number}}, the mean change of its
      clients; groups that are missing have no client.
    weights: {group: A}, 1 by default.
    **options: Options of the method.
  """
  algorithm = inclusivefl(federation, **options)
  if server is None:
    server = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(algorithm.init, jax.random.key(0)),
    )
  received = {}
  for group in federation.groups:
    mean = changes.get(group.name, 0.0)
    amount = (weights or {}).get(group.name, 1.0) * (group.name in changes)
    sent = algorithm.downlink(server, group, None)
    params = {}
    for key, tree in sent.params.items():
      block = key.split('/')[-1]
      change = mean.get(block, 0.0) if isinstance(mean, dict) else mean
      params[key] = jax.tree.map(
          lambda leaf, c=amount * change: np.full(leaf.shape, c, leaf.dtype),
          tree,
      )
    delta = Delta(params, sent.stats, np.float32(amount))
    received[group.name] = Received(delta, None, None)
  return server_step(algorithm, server, received)


def number(server, key):
  """The one number that all leaves of a block hold."""
  leaves = jax.tree.leaves(server.model.params[key])
  assert all(np.ptp(leaf) == 0 for leaf in leaves)
  values = {float(leaf.reshape(-1)[0]) for leaf in leaves}
  (value,) = values
  return value


def four_and_six():
  """Depths of four and six numbered blocks, mid0 to mid5."""
  return tiny_federation((4, 6), 1, norm=False)


LARGER = dict(mid3=0.5, mid4=0.1, mid5=-0.3)


def test_a_blend_by_hand():
  """m = (0.5 + 0.1 - 0.3) / 3 = 0.1; 0.2 * 0.1 + 0.8 * 1 = 0.82."""
  federation = four_and_six()
  first = update(federation, None, dict(tiny4=1.0, tiny6=LARGER))
  # Without m_i the factor is 1; it is 0.8 in the authors' code.
  assert number(first, 'tiny4/mid3') == 1.0
  np.testing.assert_allclose(
      jax.tree.leaves(first.momentum['tiny4']['mid3'])[0], 0.1, rtol=1e-6
  )
  second = update(federation, first, dict(tiny4=1.0, tiny6=5.0))
  np.testing.assert_allclose(number(second, 'tiny4/mid3'), 1.82, rtol=1e-6)
  # The largest depth's own top has the factor 1 in every round.
  np.testing.assert_allclose(number(second, 'tiny6/mid5'), 4.7, rtol=1e-6)
  # The head and shared blocks are not blended.
  np.testing.assert_allclose(number(second, 'tiny4/head'), 2.0, rtol=1e-6)
  np.testing.assert_allclose(number(second, 'mid0'), 0.5 + 3.0, rtol=1e-6)


def test_m_stays_until_the_larger_depth_takes_part_again():
  federation = four_and_six()
  server = update(federation, None, dict(tiny6=LARGER))
  assert server.known == dict(tiny4=True)
  values = []
  for changes in (
      dict(tiny4=0.0),  # 0.2 * 0.1; the depth's own change is 0.
      dict(tiny4=0.0),
      dict(tiny6=0.0),  # The smaller depth has no client: it stays.
      dict(tiny4=0.0),  # m = 0 by now.
  ):
    server = update(federation, server, changes)
    values.append(number(server, 'tiny4/mid3'))
  np.testing.assert_allclose(values, [0.02, 0.04, 0.04, 0.04], rtol=1e-6)
  server = update(federation, None, dict(tiny4=1.0))
  assert server.known == dict(tiny4=False)
  server = update(federation, server, dict(tiny4=1.0))
  assert number(server, 'tiny4/mid3') == 2.0


def test_weights_do_not_enter_a_blend():
  """A = 3 and 5: u is a mean, whatever its number of clients."""
  federation, weights = four_and_six(), dict(tiny4=3.0, tiny6=5.0)
  first = update(federation, None, dict(tiny6=LARGER), weights)
  second = update(federation, first, dict(tiny4=1.0), weights)
  np.testing.assert_allclose(number(second, 'tiny4/mid3'), 0.82, rtol=1e-6)


def test_groups_of_one_model_are_one_depth():
  """Their mean: 0.2 * (1 * 0.4 + 3 * 0.8) / 4 + 0.8 * (1 * 1 + 1 * 3) / 2."""
  small, large = (group.model for group in four_and_six().groups)
  federation = Federation(
      tuple(
          Group(name, model, np.array([i]))
          for i, (name, model) in enumerate(
              dict(b=small, d=large, a=small, c=large).items()
          )
      ),
      SGD,
  )
  server = update(federation, None, dict(c=0.4, d=0.8), dict(c=1.0, d=3.0))
  assert set(server.momentum) == {'a'}
  server = update(federation, server, dict(a=1.0, b=3.0))
  np.testing.assert_allclose(number(server, 'a/mid3'), 0.14 + 1.6, rtol=1e-6)


def test_blocks_of_other_shapes_are_left_out_leaf_by_leaf():
  """ResNet10 <- 14: 0.88 from (4,0) alone, 0.86 from (4,0) and (4,1)."""
  federation = resnets(10, 14)
  small, large = find_depths(federation, 'top', True)
  assert small.sources == {'stage4_block0': ('stage4_block0', 'stage4_block1')}
  params = large.model.abstract_variables.params
  blocks = [
      jax.tree.map(lambda leaf, v=v: np.full(leaf.shape, v), params[name])
      for name, v in (('stage4_block0', 0.4), ('stage4_block1', 0.2))
  ]
  want = dict.fromkeys(('conv2', 'norm1', 'norm2'), 0.86)
  want |= dict.fromkeys(('conv1', 'conv_shortcut', 'norm_shortcut'), 0.88)
  got = block_mean(blocks)
  assert set(got) == set(want)
  for name, value in want.items():
    for leaf in jax.tree.leaves(got[name]):
      np.testing.assert_allclose(0.2 * leaf + 0.8, value, rtol=1e-6)


def test_private_stages_are_helped_by_their_own_stage():
  """Stage 3 of 14 <- 22: (3,1) and (3,2), and nothing of stage 4."""
  small, large = find_depths(resnets(22, 14), 'stage', True)
  assert small.sources == dict(
      stage3_block1=('stage3_block1', 'stage3_block2'),
      stage4_block1=('stage4_block1', 'stage4_block2'),
  )
  assert large.sources == {}
  federation, options = four_and_six(), dict(private='stage', beta=0.5)
  first = update(federation, None, dict(tiny6=LARGER), **options)
  second = update(federation, first, dict(tiny4=1.0), **options)
  np.testing.assert_allclose(number(second, 'tiny4/mid3'), 0.55, rtol=1e-6)


def test_the_mean_over_depths():
  """A = (1, 2), values (1, 4): 3. Value 4 alone: 4. No client: unchanged."""
  federation = four_and_six()
  for weights, want in ((dict(tiny4=1.0, tiny6=2.0), 3.0), ({}, 2.5)):
    both = update(federation, None, dict(tiny4=1.0, tiny6=4.0), weights)
    assert number(both, 'mid0') == want
  assert number(update(federation, None, dict(tiny6=4.0)), 'mid0') == 4.0
  assert number(update(federation, both, {}), 'mid0') == 2.5
  apart = update(
      federation, None, dict(tiny4=1.0, tiny6=4.0), aggregation='architecture'
  )
  values = [number(apart, f'{name}/mid0') for name in ('tiny4', 'tiny6')]
  assert values == [1.0, 4.0]


def test_one_depth_alone_is_blended_in_architecture_mode_too():
  options = dict(aggregation='architecture')
  federation = four_and_six()
  server = update(federation, None, dict(tiny6=LARGER), **options)
  server = update(federation, server, dict(tiny4=1.0), **options)
  np.testing.assert_allclose(number(server, 'tiny4/mid3'), 0.82, rtol=1e-6)
  assert number(server, 'tiny4/mid2') == 1.0


def test_a_visit_on_a_quadratic():
  """Both weightings of the shared l1 and the private l1 and l2.

  One step of rate 0.1 from 0: changes 0.1 a.
  """
  federation, data = quadratics(
      [1, 5, 9], owned=('l1', 'l1 l2', 'l1 l2'), sizes=(1, 1, 3), epochs=1
  )
  for weights, l2 in (('uniform', 0.7), ('data', 0.8)):
    algorithm = inclusivefl(federation, weights=weights)
    ((server, _),) = play(algorithm, federation, data, [(0, 1, 2)])
    params = server.model.params
    np.testing.assert_allclose(params['l1/l1']['w'], 0.1, rtol=1e-6)
    np.testing.assert_allclose(params['l1']['w'], l2, rtol=1e-6)
    np.testing.assert_allclose(params['l1+l2/l2']['w'], l2, rtol=1e-6)
    np.testing.assert_allclose(
        server.momentum['l1']['l1']['w'], l2, rtol=1e-6
    )


def run(algorithm, federation, num=2, cohort_size=4):
  """The models of all groups and the server after the last round."""
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=cohort_size, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  data = tiny_data((5, 8, 3, 7, 8, 6)[: federation.num_clients])
  for _ in range(num):
    state, _ = run_round(state, data, jax.random.key(1), jax.random.key(2))
  return [models(algorithm, federation, state.server), state.server]


def models(algorithm, federation, server):
  return {
      group.name: jax.device_get(algorithm.client_model(server, (), group))
      for group in federation.groups
  }


def test_one_depth_is_fedavg_bit_for_bit():
  """For any beta."""
  federation = tiny_federation((2,), 4, norm=False, local=SGD)
  want, _ = run(fedavg(federation), federation)
  got, server = run(inclusivefl(federation, beta=0.7), federation)
  assert_equal(got, want)
  assert server.momentum == {}


def test_without_private_blocks_it_is_layerwise_fedavg_bit_for_bit():
  federation = tiny_federation((1, 2), norm=True, local=SGD)
  _, want = run(fedavg(federation), federation)
  _, server = run(inclusivefl(federation, **FULL), federation)
  assert_equal(jax.device_get(server.model), jax.device_get(want))


def test_without_a_blend_it_is_fedavg_with_private_tops_bit_for_bit():
  federation = tiny_federation((1, 2), norm=True, local=SGD)

  def key(group, block):
    own = dict(tiny1=('mid0', 'head'), tiny2=('mid1', 'head'))[group.name]
    return f'{group.name}/{block}' if block in own else block

  exchange = WeightExchange(federation, Sharing(key))
  _, want = run(average_weights(exchange, *model_training(SGD)), federation)
  _, server = run(inclusivefl(federation, beta=0.0), federation)
  assert_equal(jax.device_get(server.model), jax.device_get(want))


def test_at_rate_zero_nothing_moves_and_every_m_is_zero():
  """Running statistics move."""
  still = tiny_local(optax.sgd, 0.0, 1, 8)
  federation = tiny_federation((1, 2), norm=True, local=still)
  algorithm = inclusivefl(federation)
  start = jax.device_get(algorithm.init(jax.random.key(0))).model
  server = jax.device_get(run(algorithm, federation)[1])
  assert_equal(server.model.params, start.params)
  assert server.known == dict(tiny1=True)
  assert not any(map(np.any, jax.tree.leaves(server.momentum)))
  stats = zip(*map(jax.tree.leaves, (server.model.stats, start.stats)))
  assert all(np.any(new != old) for new, old in stats)


# Rounds in NumPy, in the paper's form: values of every depth, not changes.


def oracle_gradient(weights, x, y):
  """Gradient of the mean cross-entropy of a dense ReLU net, by block."""
  names, inputs, a = list(weights), [], x
  for name in names:
    inputs.append(a)
    a = a @ weights[name]['kernel'] + weights[name]['bias']
    if name != 'head':
      a = np.maximum(a, 0.0)
  p = np.exp(a - a.max(axis=1, keepdims=True))
  p /= p.sum(axis=1, keepdims=True)
  d, grads = (p - np.eye(p.shape[1])[y]) / len(y), {}
  for name, z in zip(names[::-1], inputs[::-1], strict=True):
    grads[name] = dict(kernel=z.T @ d, bias=d.sum(axis=0))
    d = (d @ weights[name]['kernel'].T) * (z > 0)
  return grads


def plus(a, b, scale=1.0):
  return {leaf: a[leaf] + scale * b[leaf] for leaf in a}


def mean_of(trees, weights):
  total = sum(weights)
  return {
      leaf: sum(w * t[leaf] for w, t in zip(weights, trees)) / total
      for leaf in trees[0]
  }


def oracle_round(nets, m, cohort, beta, rate, steps):
  """One round.

  Args:
    nets: {depth i: {block: {leaf: array}}}, of the blocks stem, mid0 to
      mid(i-1), head.
    m: {i: {leaf: array}}, the existing buffers.
    cohort: {i: [(x, y), ...]}, the data of the clients that take part.
    beta: The share of m.
    rate: Learning rate.
    steps: Full-batch steps of each client.

  Returns:
    The new nets and m.
  """
  nets, m = {i: dict(net) for i, net in nets.items()}, dict(m)
  descent, counts = {}, {i: len(cohort.get(i, ())) for i in nets}
  for i, clients in cohort.items():
    moved = []
    for x, y in clients:
      net = dict(nets[i])
      for _ in range(steps):
        grads = oracle_gradient(net, x, y)
        net = {n: plus(net[n], grads[n], -rate) for n in net}
      moved.append({n: plus(nets[i][n], net[n], -1.0) for n in net})
    descent[i] = {
        n: mean_of([d[n] for d in moved], [1] * len(moved)) for n in nets[i]
    }
  for i, g in descent.items():
    step, top = dict(g), f'mid{i - 1}'
    if i in m:
      step[top] = plus({k: beta * v for k, v in m[i].items()}, g[top], 1 - beta)
    nets[i] = {n: plus(nets[i][n], step[n], -1.0) for n in nets[i]}
  for block in ('stem', 'mid0', 'mid1', 'mid2'):
    holders = [i for i in nets if block in nets[i] and block != f'mid{i - 1}']
    if sum(counts[i] for i in holders):
      value = mean_of(
          [nets[i][block] for i in holders], [counts[i] for i in holders]
      )
      for i in holders:
        nets[i][block] = value
  for i in nets:
    if i + 1 in descent:
      helpers = [descent[i + 1][f'mid{j}'] for j in range(i - 1, i + 1)]
      m[i] = mean_of(helpers, [1, 1])
  return nets, m


def dense(variables):
  """{block: {leaf: float64}} in order, without Flax's layer names."""
  order = ('stem', 'mid0', 'mid1', 'mid2', 'head')
  return {
      n: {i: np.float64(a) for i, a in variables.params[n]['Dense_0'].items()}
      for n in order
      if n in variables.params
  }


def test_five_rounds_in_numpy():
  """Three depths of two clients each, three of six a round."""
  federation = tiny_federation((1, 2, 3), norm=False, local=SGD)
  algorithm = inclusivefl(federation, beta=0.3)
  data = tiny_data()
  run_round = rounds.make_round(
      algorithm, federation, cohort_size=3, backend='map'
  )
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  images = np.asarray(preprocess(data.images), np.float64)
  want, m, seen = None, {}, set()
  for _ in range(5):
    if want is None:
      started = models(algorithm, federation, state.server)
      want = {i: dense(started[f'tiny{i}']) for i in (1, 2, 3)}
    state, reports = run_round(
        state, data, jax.random.key(1), jax.random.key(2)
    )
    cohort = {}
    for name, report in reports.items():
      for k in np.asarray(report.client_id).tolist():
        if k < federation.num_clients:
          index = np.asarray(data.index[k, : data.sizes[k]])
          x = images[index].reshape(len(index), -1)
          example = (x, np.asarray(data.labels)[index])
          cohort.setdefault(int(name[-1]), []).append(example)
    assert sum(map(len, cohort.values())) == 3
    seen.add(tuple(sorted(cohort)))
    want, m = oracle_round(want, m, cohort, 0.3, 0.1, 3)
    got = models(algorithm, federation, state.server)
    assert_trees(
        {i: dense(got[f'tiny{i}']) for i in want}, want, rtol=1e-5, atol=1e-5
    )
  # Some depths were absent, so that old buffers and means were used.
  assert len(seen) > 1 and m.keys() == {1, 2}
  known = {name: bool(k) for name, k in state.server.known.items()}
  assert known == dict(tiny1=True, tiny2=True)


@pytest.mark.parametrize('value', [np.nan, np.inf, -0.1, 1.5])
def test_wrong_shares_are_refused(value):
  with pytest.raises(ValueError, match='beta must be'):
    inclusivefl(tiny_federation(), beta=value)


@pytest.mark.parametrize(
    'option', [dict(private='first'), dict(aggregation='ends'),
               dict(weights='size')]
)  # fmt: skip
def test_unknown_choices_are_refused(option):
  (name,) = option
  with pytest.raises(ValueError, match=name):
    inclusivefl(tiny_federation(), **option)


def test_models_that_do_not_extend_each_other_are_refused():
  shape = (32, 32, 3)
  nets = [create(name, shape, 10) for name in ('fedin_c', 'fedin_d')]
  with pytest.raises(ValueError, match="lacks the block 'stage2_block2'"):
    inclusivefl(federation_of(*nets))
  thin, wide = (
      create('mlp', shape, 10, depth=depth, hidden=hidden)
      for depth, hidden in ((2, 8), (3, 16))
  )
  with pytest.raises(ValueError, match="Block 'layer1' is shared, but"):
    inclusivefl(federation_of(thin, wide), aggregation='architecture')


def test_models_without_numbered_blocks_are_refused():
  net = tiny_federation((1,)).groups[0].model
  renamed = net.blocks[1]._replace(name='middle')
  odd = Group(
      'odd',
      type(net)('odd', (net.blocks[0], renamed, net.blocks[2]),
                net.input_shape, net.num_classes, net.cut),
      np.arange(2),
  )  # fmt: skip
  with pytest.raises(ValueError, match="Model 'odd' has no numbered block"):
    inclusivefl(Federation((odd,), SGD))
