"""Side exits: each ends a chain of blocks, and the trunk does not change."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.aggregation.exchange import WeightExchange
from fedjax_het.aggregation.sharing import Sharing, check_shared_shapes
from fedjax_het.depthwise import make_stages, own_heads
from fedjax_het.engine.static_norm import static_statistics
from fedjax_het.engine.types import Federation, Group
from fedjax_het.models import Block, BlockModel, Head, Variables, create
from fedjax_het.models.flops import forward_flops, product_flops
from fedjax_het.models.layers import GlobalPool, Linear
from fedjax_het.models.mlp import Layer
from fedjax_het.models.preresnet import NormPool
from fedjax_het.models.resnet import BasicBlock
from tests.tiny import tiny_data, tiny_local

SHAPE = (4, 4, 1)
CLASSES = 3


class Drop(nn.Module):
  """Dropout and a linear layer."""

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    x = nn.Dropout(0.5, deterministic=not train)(x)
    return Linear(CLASSES, name='linear')(x)


def trunk(**kwargs):
  options = dict(hidden=8, depth=4, norm='batch') | kwargs
  return create('mlp', SHAPE, CLASSES, **options)


def exits(model):
  """Exits behind `stem` (one block) and `layer2` (two blocks, with a norm)."""
  return model.with_heads(
      Head('stem', (Block('exit1', Drop()),)),
      Head(
          'layer2',
          (Block('exit2/hidden', Layer(5, 'batch')), Block('exit2', Drop())),
      ),
  )


@pytest.fixture(scope='module')
def model():
  return exits(trunk())


@pytest.fixture(scope='module')
def variables(model):
  """Random numbers everywhere, statistics too."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
      lambda s: jnp.asarray(rng.uniform(0.1, 1, s.shape), jnp.float32),
      model.abstract_variables,
  )


X = jax.random.normal(jax.random.key(1), (5, *SHAPE))


def assert_equal(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def part(variables, names):
  return Variables(*({n: t[n] for n in t if n in names} for t in variables))


def names_of(model):
  return {block.name for block in model.all_blocks}


def test_a_chain_is_a_trunk_with_one_head():
  model = trunk()
  assert model.head_names == ('head',)
  assert model.all_blocks == model.path() == model.path('head') == model.blocks
  assert model.branch('head') == len(model.blocks)
  assert model.chain('head') == model
  assert tuple(model.outputs) == tuple(model.inputs) == model.block_names
  assert tuple(model.outputs.values()) == model.shapes
  assert tuple(model.inputs.values()) == (SHAPE, *model.shapes[:-1])
  variables = model.init(jax.random.key(0))
  plain = model.apply(variables, X, train=True)
  assert_equal(model.apply(variables, X, train=True, head='head'), plain)
  logits, stats = model.apply_heads(variables, X, train=True)
  assert_equal((logits['head'], stats), plain)


def test_the_trunk_does_not_notice_its_heads(model):
  chain = trunk()
  assert model.blocks == chain.blocks and model.block_names == chain.block_names
  assert model.shapes == chain.shapes and model.extractor == chain.extractor
  key = jax.random.key(3)
  drawn, plain = model.init(key), chain.init(key)
  assert_equal(part(drawn, chain.block_names), plain)
  assert set(drawn.params) - set(plain.params) == {
      'exit1', 'exit2', 'exit2/hidden',
  }
  assert set(drawn.stats) - set(plain.stats) == {'exit2/hidden'}
  assert_equal(
      model.apply(drawn, X, train=True)[0], chain.apply(plain, X, train=True)[0]
  )
  # A head's initial parameters depend on its name, not on its trunk.
  deeper = exits(trunk(depth=6)).init(key)
  assert_equal(deeper.params['exit2'], drawn.params['exit2'])


def test_shapes_of_heads(model):
  assert model.inputs['exit1'] == (8,) and model.outputs['exit1'] == (CLASSES,)
  assert model.inputs['exit2/hidden'] == (8,)
  assert model.inputs['exit2'] == (5,)
  params = model.abstract_variables.params
  assert params['exit2/hidden']['linear']['kernel'].shape == (8, 5)
  assert params['exit2']['linear']['kernel'].shape == (5, CLASSES)
  assert model.head_names == ('exit1', 'exit2', 'head')
  assert [model.branch(name) for name in model.head_names] == [1, 3, 5]
  assert [block.name for block in model.path('exit2')] == [
      'stem', 'layer1', 'layer2', 'exit2/hidden', 'exit2',
  ]


@pytest.mark.parametrize('train', [False, True])
def test_exits_are_the_ends_of_their_chains_bit_for_bit(
    model, variables, train
):
  """With batch norm, statistics and dropout; in one pass, or one by one."""
  mask = jnp.array([True, True, False, True, True])
  kwargs = dict(train=train, mask=mask, key=jax.random.key(5))
  together, stats = model.apply_heads(variables, X, **kwargs)
  assert tuple(together) == model.head_names
  for name in ('exit2', 'head'):
    chain = model.chain(name)
    mine = part(variables, chain.block_names)
    want, moved = chain.apply(mine, X, **kwargs)
    assert_equal(together[name], want)
    got, one = model.apply(variables, X, head=name, **kwargs)
    assert_equal(got, want)
    assert_equal({n: one[n] for n in moved}, moved)
    assert_equal({n: stats[n] for n in moved}, moved)
    if train:
      assert np.any(moved['stem']['norm']['mean'] != (
          variables.stats['stem']['norm']['mean']))  # fmt: skip
  # `exit1` is too early to end a model.
  z, _ = model.apply(variables, X, stop=1, **kwargs)
  want, _ = model.apply(variables, z, start=1, head='exit1', **kwargs)
  assert_equal(together['exit1'], want)
  assert together['exit1'].shape == (5, CLASSES)


def test_a_pass_goes_as_far_as_its_exits_need(model, variables):
  needed = {'stem', 'layer1', 'layer2', 'exit1', 'exit2', 'exit2/hidden'}
  some = part(variables, needed)
  got, stats = model.apply_heads(some, X, ('exit2', 'exit1'), train=False)
  assert tuple(got) == ('exit2', 'exit1')
  assert_equal(stats, some.stats)
  # A pass may start in the middle of the trunk.
  z, _ = model.apply(variables, X, stop=2)
  late, _ = model.apply_heads(variables, z, ('exit2', 'head'), start=2)
  assert_equal(late['exit2'], got['exit2'])
  with pytest.raises(ValueError, match="'exit1' branches off behind 1 blocks"):
    model.apply_heads(variables, z, start=2)


def test_the_trunk_is_computed_once(model):
  """FLOPs of all exits are those of the trunk and each exit's own."""
  trunk_flops = 2 * (16 * 8 + 3 * 8 * 8 + 8 * CLASSES)
  exit1, exit2 = 2 * 8 * CLASSES, 2 * (8 * 5 + 5 * CLASSES)
  assert forward_flops(model) == forward_flops(trunk()) == trunk_flops
  assert forward_flops(model, heads=('exit1', 'exit2')) == (
      trunk_flops + exit1 + exit2
  )
  assert forward_flops(model, (0,), heads=('exit1',)) == 2 * 16 * 8 + exit1
  one_pass = product_flops(
      lambda v, x: model.apply_heads(v, x)[0], model.abstract_variables, X[:1]
  )
  assert one_pass == trunk_flops + exit1 + exit2


def test_gradients_reach_the_path_of_an_exit_alone(model, variables):
  def loss(params, head):
    logits, _ = model.apply_heads(
        Variables(params, variables.stats), X, train=False
    )
    return jnp.sum(logits[head] ** 2)

  for head in model.head_names:
    grads = jax.grad(loss)(variables.params, head)
    path = {block.name for block in model.path(head)}
    for name, tree in grads.items():
      reached = any(np.any(leaf) for leaf in jax.tree.leaves(tree))
      assert reached == (name in path), (head, name)


def test_unused_weights_of_heads_are_dropped_and_put_back():
  """On a 1x1 map a 3x3 kernel of a head uses its centre alone."""
  model = create('mini_resnet6', (2, 2, 1), CLASSES, width=1 / 16, norm='none')
  head = (
      Block('exit/block', BasicBlock(4, 2, norm='none')),
      Block('exit/last', BasicBlock(4, norm='none')),
      Block('exit/pool', GlobalPool()),
      Block('exit', Linear(CLASSES)),
  )
  model = model.with_heads(Head('stem', head))
  variables = model.init(jax.random.key(0))
  small = model.trim(variables)
  kernel = small.params['exit/last'].params['conv1']['kernel']
  assert kernel.shape == (1, 1, 4, 4)
  x = jax.random.normal(jax.random.key(1), (3, 2, 2, 1))
  for name in model.head_names:
    got, _ = model.apply(small, x, head=name)
    want, _ = model.apply(variables, x, head=name)
    np.testing.assert_allclose(got, want, rtol=1e-6)
  assert_equal(model.fill(small, variables), variables)


def test_unknown_and_impossible_heads_are_refused_in_one_line(model, variables):
  with pytest.raises(ValueError, match=r"head 'exit3'; did you mean 'exit2'\?"):
    model.apply(variables, X, head='exit3')
  with pytest.raises(ValueError, match=r"known are exit1, exit2, head\."):
    model.apply_heads(variables, X, ('exit1', 'ends'))
  with pytest.raises(ValueError, match=r"'layer'; did you mean 'layer"):
    model.with_heads(Head('layer', (Block('exit4', Drop()),)))
  with pytest.raises(ValueError, match='repeats a block name'):
    model.with_heads(Head('stem', (Block('layer1', Drop()),)))
  with pytest.raises(ValueError, match="head after 'stem' has no block"):
    model.with_heads(Head('stem', ()))


def test_models_with_other_heads_differ(model):
  assert model == exits(trunk()) and hash(model) == hash(exits(trunk()))
  assert model != trunk()
  assert model.with_modules(lambda name, module: module) == model


def test_a_model_that_ends_in_an_exit_keeps_the_earlier_ones(model):
  """DepthFL: a client of depth 2 trains exits 1 and 2 of a shorter trunk."""
  shallow = model.chain('exit2', keep=('exit1',))
  assert shallow.head_names == ('exit1', 'exit2')
  assert names_of(shallow) < names_of(model)
  key = jax.random.key(2)
  assert_equal(
      shallow.init(key), part(model.init(key), names_of(shallow))
  )
  with pytest.raises(ValueError, match="'exti1'"):
    model.chain('exit2', keep=('exti1',))
  # `exit2` is behind the end of this trunk.
  with pytest.raises(ValueError, match="of the head 'exit2' 'layer2'"):
    model.chain('exit1', keep=('exit2',))


def test_a_stage_of_m_fedepth_ends_in_a_head_of_the_model():
  model = create('preresnet20', (8, 8, 1), CLASSES, width=0.25, num_blocks=1)
  heads = own_heads(model)
  assert [head.name for head in heads.values()] == [
      f'{model.block_names[end - 1]}/head' for end in heads
  ]
  headed = model.with_heads(*heads.values())
  spans = [(end - 2, end - 1) for end in heads]
  key = jax.random.key(0)
  drawn, plain = headed.init(key), model.init(key)
  stages = make_stages(model, spans, heads='own')
  for (end, head), stage in zip(heads.items(), stages, strict=True):
    assert stage.model.blocks == model.blocks[:end] + head.blocks
    assert stage.head == end and stage.model.cut == (1, end)
    assert not stage.model.heads
    assert_equal(stage.model.init(key), part(drawn, stage.model.block_names))
    # A copy of the model's head without ReLU, for the unit's width.
    for (name, module), (old, like) in zip(
        head.blocks, model.blocks[-len(head.blocks) :], strict=True
    ):
      assert name == f'{head.after}/{old}'
      if isinstance(like, NormPool):
        like = like.clone(use_relu=False)
      assert module == like
  assert_equal(part(drawn, model.block_names), plain)


def test_a_private_head_stays_on_its_client(model):
  """InclusiveFL: its shared key is None; all other blocks are sent."""
  groups = (
      Group('a', model, np.array([0, 1])),
      Group('b', trunk(), np.array([2])),
  )
  federation = Federation(groups, tiny_local())

  def shared_key(group, block):
    del group
    return None if block.startswith('exit1') else block

  check_shared_shapes(federation, shared_key)
  exchange = WeightExchange(federation, Sharing(shared_key))
  key = jax.random.key(0)
  server = exchange.init(key)
  assert 'exit1' not in server.params and 'exit2' in server.params
  own = exchange.init_client(groups[0], key)
  assert set(own.params) == {'exit1'} and exchange.personal
  sent = exchange.download(server, groups[0])
  assert_equal(exchange.assemble(groups[0], own, sent), model.init(key))
  assert not exchange.init_client(groups[1], key).params


def test_static_statistics_are_those_of_the_heads_too(model):
  data = dataclasses.replace(tiny_data(), preprocess=functools.partial(_grow))
  params = model.init(jax.random.key(0)).params
  stats = static_statistics(model, params, data, batch_size=8)
  assert np.all(stats['exit2/hidden']['norm']['var'] > 0)
  plain = static_statistics(
      trunk(), {n: params[n] for n in trunk().block_names}, data, batch_size=8
  )
  for name, tree in plain.items():
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6),
        stats[name],
        tree,
    )


def _grow(images, key=None):
  del key
  x = images.astype(jnp.float32) / 100
  return jnp.tile(x, (1, 2, 2, 1))


def test_several_heads_behind_one_block():
  model = trunk().with_heads(
      Head('layer1', (Block('shared', Linear(CLASSES)),)),
      Head('layer1', (Block('private', Linear(CLASSES)),)),
  )
  variables = model.init(jax.random.key(0))
  outputs, _ = model.apply_heads(variables, X, ('private', 'shared'))
  for name, got in outputs.items():
    assert_equal(got, model.apply(variables, X, head=name)[0])
  assert np.any(outputs['private'] != outputs['shared'])
  assert isinstance(model, BlockModel)
