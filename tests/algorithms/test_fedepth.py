"""FeDepth against FedAvg, against masked SGD, and by hand."""

import dataclasses
import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het import algorithms
from fedjax_het.aggregation.exchange import Delta
from fedjax_het.algorithms import fedavg
from fedjax_het.algorithms.fedepth import mutual
from fedjax_het.depthwise import adapt, share_out
from fedjax_het.depthwise.memory import paper_costs
from fedjax_het.engine import rounds
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.local import train_epochs
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.engine.types import Federation, Group, Received, Visit
from fedjax_het.models.blocks import Block, BlockModel, Variables
from fedjax_het.models.layers import Linear
from fedjax_het.models.vit import vit
from tests.algorithms.suite import Case, Clocks
from tests.depthwise.nets import small_data, small_preresnet
from tests.models.augreg import PATCH, save
from tests.tiny import server_step, tiny_data, tiny_local, tiny_model

# Units take 0.0198, 0.0198 and 0.0145 MB at batches of four. EACH gives every
# unit a stage; LAST holds the last unit alone.
EACH, LAST = '0.0200MB', '0.0145MB'
# Tests use the paper's estimate: measuring would compile each stage.
fedepth = functools.partial(algorithms.fedepth, plan='paper')
# What the shared suite runs, see `tests/algorithms/suite.py`.
HALF = dict(tiny2=dict(budget='1/2'))
SUITE = [
    Case(dict(plan='paper', heads='own'), HALF),
    Case(dict(plan='paper', heads='own', cache_prefix=True), HALF),
    Case(dict(plan='paper', mkd_models=2), dict(tiny2=dict(budget='2'))),
    Case(
        dict(plan='paper', mkd_models=2, mkd_partners='shared'),
        dict(tiny2=dict(budget='2')),
    ),
]
CLOCKS = Clocks(dict(plan='paper'))
# What `tests/fuzz/test_options_act.py` cannot see: these act for certain
# budgets or nets only.
UNSEEN = {
    'plan', 'slack', 'partial', 'dilute', 'scan_stages', 'mkd_models',
    'mkd_partners', 'calibrate',
}  # fmt: skip
RATE = 0.05


def sgd(rate):
  return optax.chain(
      optax.add_decayed_weights(0.01), optax.sgd(rate, momentum=0.9)
  )


def federate(model=None, *, poor='', rich='', **local):
  """Clients 0 and 1 are poor, 2 and 3 are rich; their budgets are options."""
  model = model or small_preresnet()
  groups = tuple(
      Group(name, model, np.array(ids), options=dict(budget=budget))
      for name, ids, budget in (('poor', [0, 1], poor), ('rich', [2, 3], rich))
  )
  return Federation(groups, tiny_local(sgd, RATE, 1, 4, **local))


def one_visit(algorithm, federation, data, client_id=1, server=None):
  """The server before a visit; the client, uplink and metrics after it."""
  group = federation.groups[client_id // 2]
  server = algorithm.init(jax.random.key(0)) if server is None else server
  client = algorithm.init_client(group, client_id, jax.random.key(0))
  visit = Visit(jnp.int32(client_id), jnp.int32(0), jax.random.key(4))

  @jax.jit
  def update(server, client, data):
    sent = algorithm.downlink(server, group, visit)
    return algorithm.client_update(group, client, sent, data, visit)

  return server, *update(server, client, data.client(client_id))


def assert_same(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_close(got, want, rtol=1e-4, atol=1e-5):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), got, want
  )


def runner(algorithm, federation, size=8):
  run = rounds.make_round(
      algorithm, federation, cohort_size=3, backend='map'
  )
  data, keys = small_data(size=size), (jax.random.key(1), jax.random.key(2))
  return lambda state: run(jax.tree.map(jnp.copy, state), data, *keys)[0]


def restart(algorithm, federation, state):
  """A device upgrade, as FeDepth's module docstring describes it."""
  fresh = rounds.init_state(algorithm, federation, jax.random.key(9))
  return fresh._replace(round_num=state.round_num, server=state.server)


def test_one_stage_is_fedavg_bit_for_bit():
  federation = federate(poor='1', rich=1)
  plain = fedavg(federation, weights='data')
  want = rounds.init_state(plain, federation, jax.random.key(0))
  algorithm = fedepth(federation)
  got = rounds.init_state(algorithm, federation, jax.random.key(0))
  average, run = runner(plain, federation), runner(algorithm, federation)
  assert_same(got.server, want.server)
  for _ in range(2):
    want, got = average(want), run(got)
    assert_same(got.server, want.server)


@pytest.mark.slow
def test_an_upgrade_in_mid_run():
  """Poor clients get memory after a round; client 1 then changes its group."""
  model = tiny_model(2, norm=False)
  before, federation = federate(model, poor='1/2'), federate(model)
  algorithm = fedepth(before)
  state = rounds.init_state(algorithm, before, jax.random.key(0))
  state = runner(algorithm, before, 2)(state)
  upgraded, plain = fedepth(federation), fedavg(federation, weights='data')
  got, want = (
      runner(new, federation, 2)(restart(new, federation, state))
      for new in (upgraded, plain)
  )
  assert int(got.round_num) == 2
  assert_same(got.server, want.server)
  # Names and numbers of groups may change, too.
  poor, rich = before.groups
  moved = dataclasses.replace(
      federation,
      groups=(
          dataclasses.replace(poor, client_ids=np.array([0])),
          dataclasses.replace(rich, name='more', client_ids=np.arange(1, 4)),
      ),
  )
  algorithm = fedepth(moved)
  state = runner(algorithm, moved, 2)(restart(algorithm, moved, got))
  assert int(state.round_num) == 3 and set(state.clients) == {'poor', 'more'}
  changed = jax.tree.map(np.any, jax.tree.map(
      lambda a, b: a != b, state.server, got.server))  # fmt: skip
  assert all(jax.tree.leaves(changed))


def masked_sgd(model, start, data, spans, label_mask):
  """The oracle: SGD on the whole tree; each step restores frozen leaves."""
  head = len(model.blocks) - 2
  names, shape, end = model.block_names, model.shapes[head - 1], start.params
  for j, (first, stop) in enumerate(spans):
    trained = {*names[first:stop], *names[head:]}
    key = jax.random.key(4)
    key = jax.random.fold_in(key, j + 1) if j else key
    tx = sgd(RATE)

    def step(carry, batch, step, key, trained=trained, stop=stop):
      params, opt = carry

      def loss(params):
        z, _ = model.apply(
            Variables(params, {}), batch.x, stop=stop, train=True,
            mask=batch.mask,
        )  # fmt: skip
        logits, _ = model.apply(
            Variables(params, {}), adapt(z, shape), start=head, train=True,
            mask=batch.mask,
        )  # fmt: skip
        if label_mask:
          is_y = batch.y[:, None] == jnp.arange(logits.shape[1])[None]
          here = jnp.any(is_y & batch.mask[:, None], axis=0)
          logits = logits * here[None]
        return CLASSIFICATION.loss(logits, batch.y, batch.mask)

      updates, opt = tx.update(jax.grad(loss)(params), opt, params)  # noqa: B023
      new = optax.apply_updates(params, updates)
      new = {n: new[n] if n in trained else params[n] for n in params}
      return (new, opt), {}

    (end, _), _, _ = train_epochs(
        step, (end, tx.init(end)), data, key, epochs=1, batch_size=4
    )
  return end


@pytest.mark.slow
@pytest.mark.parametrize('mask', ['none', 'batch'])
def test_three_stages_are_masked_sgd(mask):
  """Neither weight decay nor momentum moves frozen leaves."""
  federation, data = federate(poor=EACH), small_data()
  model = federation.groups[0].model
  algorithm = fedepth(federation, mask=mask)
  server, _, uplink, metrics = one_visit(algorithm, federation, data)
  change, _, weight = uplink.summed
  assert weight == 9  # Its number of examples.
  got = jax.tree.map(lambda s, c: s + c / 9, server.params, change)
  spans = [(0, 2), (2, 3), (3, 4)]
  want = jax.jit(
      lambda s, d: masked_sgd(model, s, d, spans, mask == 'batch')
  )(server, data.client(1))
  assert_close(got, want)
  moved = jax.tree.map(lambda c: bool(np.any(c)), change)
  assert all(any(jax.tree.leaves(moved[n])) for n in model.block_names)
  assert 0 < metrics['train_loss'] < 3


@pytest.mark.parametrize(
    ('options', 'sent'),
    [
        ({}, {'unit2', 'pool', 'head'}),
        (dict(partial='bypass'), {'stem', 'unit2', 'pool', 'head'}),
    ],
)
def test_partial_training_sends_what_it_trained(options, sent):
  """Only the last unit fits; equal widths, so that a bypass is possible."""
  federation = federate(small_preresnet((2, 2, 2)), poor='1/2')
  data = small_data()
  # The last unit costs as much as the others; schedule it alone.
  names = federation.groups[0].model.block_names
  algorithm = _scheduled(federation, ((2, 3),), **options)
  _, _, uplink, _ = one_visit(algorithm, federation, data)
  assert set(uplink.summed.change) == sent
  algorithm = _scheduled(federation, ((2, 3),), dilute=True, **options)
  _, _, diluted, _ = one_visit(algorithm, federation, data)
  assert set(diluted.summed.change) == set(names)
  for name, tree in diluted.summed.change.items():
    if name in sent:
      assert_close(tree, uplink.summed.change[name], 1e-5, 1e-6)
    else:
      assert not any(np.any(leaf) for leaf in jax.tree.leaves(tree))


def _scheduled(federation, spans, **options):
  """FeDepth whose planner returns these stages."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
        'fedjax_het.depthwise.memory.pack',
        lambda costs, budget, slack: spans,
    )
    return fedepth(federation, **options)


def test_a_small_budget_trains_the_last_unit_alone():
  federation = federate(poor=LAST)
  algorithm = fedepth(federation)
  shapes = jax.eval_shape(
      lambda: one_visit(algorithm, federation, small_data())[2]
  )
  assert set(shapes.summed.change) == {'unit2', 'pool', 'head'}


@pytest.mark.slow
def test_a_transformer_is_fine_tuned_from_a_file(tmp_path):
  """Only what is trained moves; stage 1 alone trains the embeddings."""
  leaves = save(tmp_path / 'w.npz', depth=3)
  model = vit(
      (8, 8, 1), 3, depth=3, variant='mini', patch=PATCH,
      pretrained=str(tmp_path / 'w.npz'),
  )  # fmt: skip
  federation, data = federate(model, poor='1/2'), small_data()
  sent = {}
  for spans in (((0, 1), (1, 2), (2, 3)), ((0, 1),)):
    algorithm = _scheduled(federation, spans)
    server, _, uplink, _ = one_visit(algorithm, federation, data)
    sent[spans] = uplink.summed.change
  start, (every, first) = server.params, sent.values()
  np.testing.assert_array_equal(start['embed']['token'], leaves['cls'])
  np.testing.assert_array_equal(
      start['encoder02']['mlp1']['kernel'],
      leaves['Transformer/encoderblock_2/MlpBlock_3/Dense_0/kernel'],
  )
  assert set(every) == set(model.block_names)
  assert set(first) == {'embed', 'encoder00', 'token', 'head'}
  for name in ('embed', 'encoder00'):
    # Two programs, so that sums may differ by rounding.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        every[name], first[name],
    )  # fmt: skip
    assert all(np.any(leaf) for leaf in jax.tree.leaves(first[name]))
  # A round in which all clients train the last block alone.
  federation = federate(model, poor='1/2', rich=0.5)
  algorithm = _scheduled(federation, ((2, 3),))
  state = rounds.init_state(algorithm, federation, jax.random.key(0))
  after = runner(algorithm, federation)(state).server.params
  for name in model.block_names:
    moved = jax.tree.map(lambda a, b: np.any(a != b), after[name], start[name])
    trained = name in ('encoder02', 'token', 'head')
    assert any(jax.tree.leaves(moved)) == trained


def received(federation, **leaves):
  """`Received` of {group: (p, {block: change})}; a delta is p * change."""
  model = federation.groups[0].model.abstract_variables.params
  out = {}

  def full(name, value):
    return jax.tree.map(lambda s: jnp.full(s.shape, value), model[name])

  for group, (weight, changes) in leaves.items():
    change = {name: full(name, weight * c) for name, c in changes.items()}
    delta = Delta(change, {}, jnp.float32(weight))
    out[group] = Received(delta, None, jnp.array([0]))
  return out


def test_means_over_those_who_trained_a_leaf():
  """p = (1, 3), changes 0 and 4: 3. A block of one trainer has its change 5."""
  federation = federate()
  algorithm = fedepth(federation)
  zero = jax.tree.map(jnp.zeros_like, algorithm.init(jax.random.key(0)))
  got = server_step(
      algorithm,
      zero,
      received(
          federation, poor=(1.0, {'head': 0.0, 'unit2': 5.0}),
          rich=(3.0, {'head': 4.0}),
      ),
      None,
  ).params  # fmt: skip
  np.testing.assert_allclose(got['head']['bias'], 3.0)
  np.testing.assert_allclose(got['unit2']['conv1']['kernel'], 5.0)
  np.testing.assert_array_equal(got['stem']['conv']['kernel'], 0.0)


def test_at_a_rate_of_zero_the_upload_is_the_download():
  federation = federate(small_preresnet((2, 4)), poor=EACH)
  still = dataclasses.replace(federation.local, learning_rate=lambda r: 0.0)
  federation = dataclasses.replace(federation, local=still)
  algorithm = fedepth(federation)
  _, _, uplink, _ = one_visit(algorithm, federation, small_data())
  assert uplink.summed.weight == 9
  assert not any(np.any(x) for x in jax.tree.leaves(uplink.summed.change))


def test_own_heads_travel_to_those_who_train_them():
  federation = federate(poor=EACH)
  algorithm = fedepth(federation, heads='own')
  data = small_data()
  server, client, uplink, _ = one_visit(algorithm, federation, data)
  heads = {f'{unit}/{part}' for unit in ('unit0', 'unit1')
           for part in ('pool', 'head')}  # fmt: skip
  blocks = set(federation.groups[0].model.block_names)
  assert set(server.params) == blocks | heads
  assert set(uplink.summed.change) == blocks | heads
  assert not jax.tree.leaves(client)
  moved = uplink.summed.change['unit1/head']['kernel']
  assert np.any(moved)
  # Weighted as all blocks: by nine examples, or by 1.
  uniform = fedepth(federation, heads='own', weights='uniform')
  _, _, vote, _ = one_visit(uniform, federation, data)
  np.testing.assert_allclose(
      9 * vote.summed.change['unit1/head']['kernel'], moved, rtol=1e-4,
      atol=1e-6,
  )  # fmt: skip
  poor, rich = federation.groups
  for group, names in ((poor, blocks | heads), (rich, blocks)):
    sent, partners = algorithm.downlink(server, group, None)
    assert set(sent.params) == names and not partners
  assert set(algorithm.client_model(server, client, poor).params) == blocks
  # Rich clients do not train them, so that they do not count in the mean.
  got = server_step(
      algorithm,
      server,
      {
          'poor': Received(uplink.summed, None, jnp.array([1])),
          'rich': received(federation, rich=(27.0, {'head': 0.0}))['rich'],
      },
      None,
  ).params
  np.testing.assert_allclose(
      got['unit1/head']['kernel'],
      server.params['unit1/head']['kernel'] + moved / 9,
      rtol=1e-5, atol=1e-6,
  )  # fmt: skip
  # The last stage's head is the model's; no other stage trained it.
  np.testing.assert_allclose(
      got['head']['bias'],
      server.params['head']['bias']
      + uplink.summed.change['head']['bias'] / 36,
      rtol=1e-5, atol=1e-6,
  )  # fmt: skip


class Rounded(nn.Module):
  """A dense layer with outputs in bfloat16."""

  @nn.compact
  def __call__(self, x, train, mask):
    return nn.relu(nn.Dense(4, dtype='bfloat16')(x.reshape(len(x), -1)))


@pytest.mark.slow
def test_cached_prefixes_have_the_dtype_of_the_blocks():
  names = 'stem', 'a', 'b'
  blocks = tuple(Block(name, Rounded()) for name in names)
  blocks += (Block('head', Linear(3)),)
  model = BlockModel('rounded', blocks, (8, 8, 1), 3, (1, 3))
  costs = paper_costs(model, 4)
  federation = federate(model, poor=f'{costs.span(1, 2):.6f}MB')
  assert costs.span(0, 2) > 1.1 * costs.span(1, 2)  # So it has two stages.
  data = small_data()
  got, want = (
      one_visit(fedepth(federation, cache_prefix=c), federation, data)[2]
      for c in (True, False)
  )
  assert_close(got, want)


@pytest.mark.slow
def test_cached_prefixes_change_nothing_without_batch_statistics():
  federation = federate(small_preresnet((2, 4), norm='group'), poor=EACH)
  data = small_data()
  got, want = (
      one_visit(fedepth(federation, cache_prefix=c), federation, data)[2]
      for c in (True, False)
  )
  assert_close(got, want)


def test_running_statistics_move_where_blocks_are_trained():
  federation = federate(small_preresnet(norm='batch'), poor=LAST)
  algorithm = fedepth(federation)
  _, _, uplink, _ = one_visit(algorithm, federation, small_data())
  assert set(uplink.summed.stats) == {'unit2', 'pool'}


@pytest.mark.parametrize(
    ('local', 'want'),
    [(dict(epochs=7), [3, 2, 2]), (dict(steps=4, epochs=1), [2, 1, 1])],
)
def test_split_epochs(local, want):
  local = dataclasses.replace(tiny_local(), **local)
  field = 'epochs' if local.steps is None else 'steps'
  shares = share_out(local, 3, 'split')
  assert [getattr(share, field) for share in shares] == want
  every = share_out(local, 3, 'per_stage')
  assert every == (local,) * 3


def visit_program(**options) -> str:
  """The program of a visit of a poor client of four equal layers."""
  federation = federate(tiny_model(4, norm=False), poor='1/3', rich='1')
  algorithm = fedepth(federation, plan='paper', **options)
  group, data = federation.groups[0], tiny_data()
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(0))

  def uplink(key):
    sent = algorithm.downlink(algorithm.init(key), group, visit)
    client = algorithm.init_client(group, 0, key)
    return algorithm.client_update(
        group, client, sent, data.client(0), visit
    )[1]

  return str(jax.make_jaxpr(uplink)(jax.random.key(0)))


def test_a_scan_over_equal_stages_is_a_smaller_program():
  assert len(visit_program()) < 0.8 * len(visit_program(scan_stages=False))


def test_with_slack_a_stage_may_hold_more_blocks():
  assert visit_program(slack=1.0) != visit_program()


def test_mutual_distillation_numbers():
  """h1 = [1, 0], h2 = [0, 1]: KL(h2 || h1) = 0.46212."""
  h1, h2 = jnp.array([[1.0, 0.0]]), jnp.array([[0.0, 1.0]])
  np.testing.assert_allclose(distillation(h1, h2), [0.46212], atol=5e-6)
  label = jnp.array([0])
  ce = [float(CLASSIFICATION.loss(h, label)) for h in (h1, h2)]
  np.testing.assert_allclose(
      mutual.mutual_loss(CLASSIFICATION, (h1, h2), label),
      sum(ce) + 2 * 0.46212,
      atol=1e-5,
  )
  # Three models: each learns from the mean of the two others.
  three = mutual.mutual_loss(CLASSIFICATION, (h1, h2, h2), label)
  np.testing.assert_allclose(
      three, ce[0] + 2 * ce[1] + 0.46212 * (1 + 0.5 + 0.5), atol=1e-5
  )
  # Padding counts in neither term.
  padded = mutual.mutual_loss(
      CLASSIFICATION,
      (jnp.concatenate([h1, 5 * h1]), jnp.concatenate([h2, -7 * h2])),
      jnp.array([0, 1]),
      jnp.array([True, False]),
  )
  np.testing.assert_allclose(padded, sum(ce) + 2 * 0.46212, atol=1e-5)


def test_equal_models_learn_nothing_from_each_other():
  h, label = jnp.array([[0.3, -1.0, 2.0]]), jnp.array([1])
  assert distillation(h, h).tolist() == [0]
  first, second = jax.grad(
      lambda pair: mutual.mutual_loss(CLASSIFICATION, pair, label)
  )((h, h))
  np.testing.assert_array_equal(first, second)
  np.testing.assert_allclose(
      first, jax.grad(CLASSIFICATION.loss)(h, label), rtol=1e-6
  )


def test_private_models_begin_differently():
  """Two partners of each of two clients, and the server's model."""
  federation = federate(tiny_model(1, norm=False), rich='3')
  algorithm, key = fedepth(federation, mkd_models=3), jax.random.key(0)
  models = [algorithm.init(key)]
  for client_id in (2, 3):
    client = algorithm.init_client(federation.groups[1], client_id, key)
    models += client.partners
  kernels = [model.params['stem']['Dense_0']['kernel'] for model in models]
  assert len({tuple(np.ravel(kernel)) for kernel in kernels}) == 5


class Thinned(nn.Module):
  """Dropout alone."""

  @nn.compact
  def __call__(self, x, train, mask):
    return nn.Dropout(0.5, deterministic=not train)(x)


@pytest.fixture(scope='module')
def steps_of_three():
  """A step of three equal models with dropout, clipped at a norm of 0.01."""

  def clipped(rate):
    return optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(rate))

  tiny = tiny_model(1, norm=False)
  stem, *rest = tiny.blocks
  model = dataclasses.replace(
      tiny, blocks=(stem, Block('thin', Thinned()), *rest)
  )
  start = model.init(jax.random.key(0))
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(4))
  end, partners, _, _ = mutual.train_together(
      model, tiny_local(clipped, 1.0, steps=1), start, (start, start),
      tiny_data().client(1), visit,
  )  # fmt: skip
  return [
      jax.tree.map(jnp.subtract, one.params, start.params)
      for one in (end, *partners)
  ]


def test_gradients_of_mutual_models_are_clipped_apart(steps_of_three):
  norms = [optax.global_norm(step) for step in steps_of_three]
  np.testing.assert_allclose(norms, [0.01] * 3, rtol=1e-4)


def test_mutual_models_have_dropout_masks_of_their_own(steps_of_three):
  kernels = [step['head']['Dense_0']['kernel'] for step in steps_of_three]
  assert len({tuple(np.ravel(kernel)) for kernel in kernels}) == 3


def test_two_models_teach_each_other_and_stay_in_their_places():
  """One step on one batch: each moves by CE and KL(p of the other || its p)."""
  model = tiny_model(1, norm=False)
  start, partner = (model.init(jax.random.key(i)) for i in (0, 1))
  local = tiny_local(optax.sgd, 0.5, epochs=1, batch_size=8)
  data = tiny_data((8,)).client(0)
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(2))
  end, (other,), metrics, num = mutual.train_together(
      model, local, start, (partner,), data, visit
  )
  batch = data.batch(jnp.arange(8))
  logits = lambda params: model.apply(Variables(params, {}), batch.x)[0]  # noqa: E731

  def entropy(params):
    log_p = jax.nn.log_softmax(logits(params))
    return -jnp.mean(log_p[jnp.arange(8), batch.y])

  def loss(params, teacher):
    p = jax.nn.softmax(logits(teacher))
    log_q = jax.nn.log_softmax(logits(params))
    gap = jnp.sum(p * (jnp.log(p) - log_q), axis=1)
    return entropy(params) + jnp.mean(gap)

  for got, mine, teacher in ((end, start, partner), (other, partner, start)):
    grads = jax.grad(loss)(mine.params, teacher.params)
    want = jax.tree.map(lambda w, g: w - 0.5 * g, mine.params, grads)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        got.params,
        want,
    )
  assert int(num) == 1
  np.testing.assert_allclose(
      metrics['train_loss'], entropy(start.params), rtol=1e-5
  )


def partner_of(variables, m):
  """The blocks of partner m in a server's tree."""
  name = f'partner{m}/'
  return Variables(*(
      {
          block.removeprefix(name): value
          for block, value in tree.items()
          if block.startswith(name)
      }
      for tree in variables
  ))  # fmt: skip


@pytest.mark.parametrize('norm', [False, True])
def test_a_shared_partner_is_the_mean_of_what_the_rich_made_of_it(norm):
  """As if each had it as its own, weighted by numbers of examples."""
  federation = federate(tiny_model(2, norm=norm), poor='1', rich='3')
  rich, data = federation.groups[1], tiny_data((5, 3, 6, 4))
  options = dict(mkd_models=3, server_lr=0.5)
  shared = fedepth(federation, mkd_partners='shared', **options)
  private = fedepth(federation, **options)
  before, common = (one.init(jax.random.key(0)) for one in (shared, private))
  held = [partner_of(before, m) for m in (1, 2)]
  made, uplinks = [], []
  for client_id in (2, 3):
    visit = Visit(jnp.int32(client_id), jnp.int32(0), jax.random.key(4))
    client = private.init_client(rich, client_id, jax.random.key(0))
    client, alone, _ = private.client_update(
        rich,
        client._replace(partners=tuple(held)),
        private.downlink(common, rich, visit),
        data.client(client_id),
        visit,
    )
    made.append(client.partners)
    _, client, uplink, _ = one_visit(shared, federation, data, client_id)
    # Nothing stays on the client; the common model does not notice.
    assert not jax.tree.leaves(client)
    for name, tree in alone.summed.change.items():
      assert_close(uplink.summed.change[name], tree)
    uplinks.append(uplink.summed)
  poor = one_visit(shared, federation, data, 0)[2].summed
  sums = dict(rich=jax.tree.map(jnp.add, *uplinks), poor=poor)
  received = {n: Received(s, None, jnp.array([0])) for n, s in sums.items()}
  new = server_step(shared, before, received)
  for m, old in enumerate(held, 1):
    got, (first, second) = partner_of(new, m), (own[m - 1] for own in made)
    mean = jax.tree.map(lambda a, b: 0.6 * a + 0.4 * b, first, second)
    # Half a step towards the mean of the parameters; that of the statistics.
    half = jax.tree.map(lambda x, y: 0.5 * (x + y), old.params, mean.params)
    assert_close(got, Variables(half, mean.stats))
    change = jax.tree.map(jnp.subtract, got.params, old.params)
    assert optax.global_norm(change) > 0.01
  # Two partners and the common model begin differently.
  kernels = [one.params['stem']['Dense_0']['kernel'] for one in (before, *held)]
  assert len({tuple(np.ravel(kernel)) for kernel in kernels}) == 3


def test_a_shared_partner_travels_to_those_who_train_it():
  """But for its statistics, if these stay; the poor have another net here."""
  federation = federate(tiny_model(1), poor='1', rich='2')
  poor, rich = federation.groups
  poor = dataclasses.replace(poor, model=tiny_model(2))
  federation = dataclasses.replace(
      federation, groups=(poor, rich), local_stats=True
  )
  algorithm = fedepth(federation, mkd_models=2, mkd_partners='shared')
  visit = Visit(jnp.int32(0), jnp.int32(0), jax.random.key(4))
  server = algorithm.init(jax.random.key(0))
  blocks = set(rich.model.block_names)
  partner = {f'partner1/{name}' for name in blocks}
  assert set(partner_of(server, 1).params) == blocks
  assert not server.stats
  for group, partners in ((poor, 0), (rich, 1)):
    model, others = algorithm.downlink(server, group, visit)
    assert set(model.params) == set(group.model.block_names)
    assert [set(other.params) for other in others] == partners * [partner]
  data = tiny_data((4, 4, 4, 4))
  uplink = one_visit(algorithm, federation, data, 0)[2]
  assert set(uplink.summed.change) == set(poor.model.block_names)
  _, client, uplink, _ = one_visit(algorithm, federation, data, 2)
  assert set(uplink.summed.change) == blocks | partner
  (kept,) = client.partners
  assert not kept.params and set(kept.stats) == {'stem', 'mid0'}
  tested = algorithm.client_model(server, client, rich)
  assert set(tested.params) == blocks


@pytest.mark.slow
def test_the_rich_train_two_models_and_send_one():
  federation, data = federate(poor='1', rich='2'), small_data()
  algorithm = fedepth(federation, mkd_models=2)
  group = federation.groups[1]
  before = algorithm.init_client(group, 3, jax.random.key(0))
  other = algorithm.init_client(group, 2, jax.random.key(0))
  server, after, uplink, _ = one_visit(algorithm, federation, data, 3)
  kernel = lambda c: c.partners[0].params['unit0']['conv1']['kernel']  # noqa: E731
  assert np.any(kernel(before) != kernel(other))
  assert np.any(kernel(before) != server.params['unit0']['conv1']['kernel'])
  assert np.any(kernel(before) != kernel(after))
  assert len(after.partners) == 1
  blocks = set(group.model.block_names)
  assert set(uplink.summed.change) == blocks
  alone = one_visit(fedepth(federation), federation, data, 3)[2]
  differs = jax.tree.map(
      lambda a, b: bool(np.any(a != b)), uplink.summed, alone.summed
  )
  assert any(jax.tree.leaves(differs.change))
  poor = algorithm.init_client(federation.groups[0], 0, jax.random.key(0))
  assert not jax.tree.leaves(poor)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (
            dict(poor='much'),
            "^groups.poor.budget must be a share of .* got 'much'",
        ),
        (dict(rich=0), "^groups.rich.budget must be a share of .* got 0"),
        (dict(rich=float('nan')), "^groups.rich.budget must be .* got nan"),
        (
            dict(poor='0.001MB'),
            "^groups.poor: A budget of 0.001 MB does not hold the last .* take "
            '0.0145 MB; the smallest that would do is 0.0139 MB',
        ),
        (dict(mkd_models=1), 'mkd_models must be at least 2, got 1'),
        (
            dict(mkd_models=2, rich='1.9'),
            'mkd_models=2 needs a group whose budget holds 2 whole models; '
            "the budgets are poor '', rich '1.9'",
        ),
        (dict(plan='best'), "^Unknown plan 'best'"),
        (dict(heads='mine'), "^Unknown heads 'mine'"),
        (dict(partial='skip'), "^Unknown partial 'skip'"),
        (dict(epochs_mode='all'), "^Unknown epochs_mode 'all'"),
        (dict(mkd_partners='mine'), "^Unknown mkd_partners 'mine'"),
        (dict(slack=-0.1), 'slack must be at least 0, got -0.1'),
        (
            dict(calibrate=True),
            'calibrate=True: the norms of small keep no running statistics; u',
        ),
        (dict(weights='size'), "^Unknown weights 'size'"),
        (
            dict(plan='measured', partial='bypass'),
            "plan='measured' compiles stages behind frozen blocks; partial=",
        ),
        (
            dict(epochs_mode='split', poor=EACH),
            "^groups.poor: epochs_mode='split' needs at least one of the epoch",
        ),
    ],
)
def test_bad_options_are_refused_in_one_line(options, message):
  budgets = {n: options[n] for n in ('poor', 'rich') if n in options}
  options = {n: options[n] for n in options if n not in budgets}
  with pytest.raises(ValueError, match=message) as error:
    fedepth(federate(**budgets), **options)
  assert '\n' not in str(error.value)


def test_statistics_of_own_heads_stay_where_all_statistics_do():
  federation = dataclasses.replace(
      federate(small_preresnet(norm='batch'), poor=EACH), local_stats=True
  )
  algorithm = fedepth(federation, heads='own')
  key, heads = jax.random.key(0), {'unit0/pool', 'unit1/pool'}
  server = jax.eval_shape(algorithm.init, key)
  assert not server.stats and heads < set(server.params)
  poor, rich = (
      algorithm.init_client(group, 0, key).own for group in federation.groups
  )
  assert set(poor.stats) == set(rich.stats) | heads and not poor.params


def test_calibration_takes_the_moments_of_all_examples():
  federation = federate(small_preresnet(norm='batch'), poor=EACH)
  algorithm = fedepth(federation, heads='own', calibrate=True)
  server = algorithm.init(jax.random.key(0))
  data = small_data((6, 9, 4, 5))  # Six whole batches.
  ready = jax.jit(algorithm.calibrate)(server, data)
  assert_same(ready.params, server.params)
  maps = jax.lax.conv_general_dilated(
      data.preprocess(data.images),
      server.params['stem']['conv']['kernel'],
      (1, 1),
      'SAME',
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )
  (found,) = ready.stats['stem'].values()
  np.testing.assert_allclose(
      found['mean'], np.mean(maps, (0, 1, 2)), rtol=1e-4, atol=1e-5
  )
  # m-FeDepth's own heads are for training and are not evaluated.
  for name in server.stats.keys() - federation.groups[0].model.block_names:
    assert_same(ready.stats[name], server.stats[name])


def test_calibration_needs_one_model():
  model, wider = (small_preresnet(f, norm='batch') for f in ((2, 2), (4, 4)))
  federation = federate(model)
  poor, rich = federation.groups
  groups = poor, Group('rich', wider, rich.client_ids)
  mixed = dataclasses.replace(federation, groups=groups)
  with pytest.raises(ValueError, match="all clients: group 'rich' has anoth"):
    fedepth(mixed, calibrate=True)


def test_facts_are_the_schedules(monkeypatch):
  monkeypatch.setattr(
      'fedjax_het.depthwise.schedules.step_memory',
      lambda stage, local, label: types.SimpleNamespace(mb=1.5),
  )
  got = fedepth(federate(poor=LAST)).facts()['schedules']
  assert [*got] == ['poor', 'rich']
  assert got['poor']['budget'] == 0.0145 and got['rich']['budget'] is None
  for group in got.values():
    assert (group['plan'], group['models']) == ('paper', 1)
    assert [stage['measured'] for stage in group['stages']] == [1.5]


@pytest.mark.slow
def test_a_measured_plan():
  federation = federate(poor=1)
  algorithm = algorithms.fedepth(federation)  # It measures by default.
  sent = jax.eval_shape(
      lambda: one_visit(algorithm, federation, small_data())[2]
  )
  names = set(federation.groups[0].model.block_names)
  assert set(sent.summed.change) == names
  with pytest.raises(ValueError, match='does not hold the last block and the'):
    algorithms.fedepth(federate(poor='0.001MB'))
