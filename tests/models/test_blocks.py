import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.models import (
    MODELS,
    Block,
    BlockModel,
    Variables,
    create,
    model_options,
)
from fedjax_het.models.layers import Linear

SHAPE = (8, 8, 1)
NESTED = {
    'resnet': [
        (f'resnet{d}', {'width': 1 / 32}) for d in (10, 14, 18, 22, 26)
    ],
    'vit': [(f'vit_s{d}', {'width': 1 / 6}) for d in range(8, 13)],
    'mlp': [('mlp', {'hidden': 8, 'depth': d}) for d in (2, 3, 5)],
}


def leaf_shapes(variables):
  leaves, _ = jax.tree.flatten_with_path(variables)
  return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize('family', NESTED)
def test_leaves_are_nested_by_path_and_shape(family):
  models = [create(name, SHAPE, 10, **opts) for name, opts in NESTED[family]]
  shapes = [leaf_shapes(model.abstract_variables) for model in models]
  for small, large in itertools.pairwise(shapes):
    assert small.items() < large.items()


def test_resnet_owners_of_blocks():
  names = {d: create(f'resnet{d}', SHAPE, 10).block_names for d in (10, 14, 22)}
  assert names[10] == (
      'stem', 'stage1_block0', 'stage2_block0', 'stage3_block0',
      'stage4_block0', 'pool', 'head',
  )
  assert set(names[14]) - set(names[10]) == {'stage3_block1', 'stage4_block1'}
  assert set(names[22]) - set(names[14]) == {
      'stage1_block1', 'stage2_block1', 'stage3_block2', 'stage4_block2',
  }


def test_shared_blocks_start_equal_and_others_differ():
  key = jax.random.key(3)
  small, large = (
      create(name, SHAPE, 10, width=1 / 32).init(key)
      for name in ('resnet10', 'resnet26')
  )
  shared = Variables(
      {name: large.params[name] for name in small.params},
      {name: large.stats[name] for name in small.stats},
  )
  jax.tree.map(np.testing.assert_array_equal, small, shared)
  one, two = large.params['stage4_block1'], large.params['stage4_block2']
  assert (one['conv1']['kernel'] != two['conv1']['kernel']).all()
  assert (one['conv1']['kernel'] != one['conv2']['kernel']).all()
  again = create('resnet10', SHAPE, 10, width=1 / 32).init(jax.random.key(4))
  first, other = (v.params['head']['kernel'] for v in (small, again))
  assert (first != other).all()


def test_init_of_some_blocks():
  model = create('mlp', SHAPE, 10, hidden=8, norm='batch', depth=3)
  full = model.init(jax.random.key(0))
  part = model.init(jax.random.key(0), ('layer1', 'head'))
  assert set(part.params) == {'layer1', 'head'}
  assert set(part.stats) == {'layer1'}
  for name, tree in part.params.items():
    jax.tree.map(np.testing.assert_array_equal, tree, full.params[name])


def test_spans_compose_to_the_whole():
  model = create('mlp', SHAPE, 10, hidden=8, norm='batch', depth=3)
  variables = model.init(jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (5, *SHAPE))
  mask = jnp.array([True, True, False, True, True])
  for train in (False, True):
    logits, stats = model.apply(variables, x, train=train, mask=mask)
    for i in range(len(model.blocks) + 1):
      s, new = model.apply(variables, x, stop=i, train=train, mask=mask)
      y, new = model.apply(
          variables._replace(stats=new), s, start=i, train=train, mask=mask
      )
      np.testing.assert_allclose(y, logits, rtol=1e-6, atol=1e-6)
      jax.tree.map(np.testing.assert_array_equal, new, stats)


def test_a_span_needs_its_own_variables_only():
  model = create('mlp', SHAPE, 10, hidden=8, depth=3)
  part = model.init(jax.random.key(0), model.intermediate)
  s_in = jnp.ones((2, *model.shapes[model.cut[0] - 1]))
  start, stop = model.cut
  s_out, _ = model.apply(part, s_in, start=start, stop=stop)
  assert s_out.shape == (2, *model.shapes[stop - 1])


def test_equal_models_are_equal_and_hash_alike():
  # So a model can be a static argument without recompilation.
  for name in ('resnet10', 'vit_s8', 'fedhe_cnn5', 'preresnet20', 'mlp'):
    one, two = create(name, (32, 32, 1), 10), create(name, (32, 32, 1), 10)
    assert one == two
    assert hash(one) == hash(two)
    assert one != create(name, (32, 32, 1), 11)


def test_bad_block_lists_are_refused():
  blocks = tuple(Block(name, Linear(3)) for name in ('a', 'b', 'a'))
  with pytest.raises(ValueError, match='repeats a block name'):
    BlockModel('x', blocks, SHAPE, 3, (1, 2))
  blocks = tuple(Block(name, Linear(3)) for name in 'abc')
  with pytest.raises(ValueError, match='cut'):
    BlockModel('x', blocks, SHAPE, 3, (2, 2))


def test_create_knows_its_names_and_options():
  assert model_options('resnet18') == {
      'stem': 'imagenet', 'width': 1.0, 'norm': 'batch', 'init': 'he_fan_out',
  }
  assert model_options('vit_s8') == {
      'patch': None, 'width': 1.0, 'head_dim': 64, 'init': 'truncated',
      'pretrained': None,
  }
  assert all('norm' in model_options(n) for n in MODELS if 'vit' not in n)


@pytest.mark.parametrize(
    ('args', 'options', 'message'),
    [
        (('resnt18', SHAPE, 10), {}, "'resnt18'.*mean 'resnet18'.*simple_cnn"),
        (('resnet18', SHAPE, 10), {'wdith': 1}, "'wdith'.*mean 'width'.*stem"),
        (('resnet18', SHAPE, 10), {'depth': 10}, "no option 'depth'"),
        (('resnet18', SHAPE, 10), {'stem': 'x'}, "stem 'x'.*imagenet.*cifar"),
        (('resnet18', SHAPE, 10), {'norm': 'x'}, "norm 'x'.*batch_only"),
        (('resnet18', SHAPE, 10), {'width': 0}, 'width must be above 0, got 0'),
        (('resnet18', (8, 8), 10), {}, r'height.*got \(8, 8\)'),
        (('resnet18', (8, 8.5, 1), 10), {}, r'got \(8, 8.5, 1\)'),
        (('resnet18', SHAPE, 0), {}, 'num_classes.*got 0'),
        (('preresnet20', SHAPE, 10), {'shortcut': 'C'}, "shortcut 'C'"),
        (('fedhe_cnn5', SHAPE, 10), {}, 'at least 12x12, got 8x8'),
        (('fedhe_cnn5', (28, 28, 1), 10), {'dropout': 1}, 'below 1, got 1'),
        (('simple_cnn', SHAPE, 10), {}, 'at least 16x16, got 8x8'),
        (('vit_s8', (28, 28, 1), 10), {'patch': 16}, 'patch=16.*28x28'),
        (('mlp', SHAPE, 10), {'depth': 1}, 'depth must be at least 2'),
    ],
)
def test_create_refuses_in_one_line(args, options, message):
  with pytest.raises(ValueError, match=message) as error:
    create(*args, **options)
  assert '\n' not in str(error.value)


def test_equal_blocks_are_traced_once_and_changed_calls_are_heard():
  calls = []

  class Counted(nn.Module):

    @nn.compact
    def __call__(self, x, train=False, mask=None):
      calls.append(x.shape)
      return nn.Dense(x.shape[-1])(x)

  net = BlockModel.from_module(
      {'a': Counted(), 'b': Counted(), 'c': Counted()}, (4,), 3
  )
  variables = net.init(jax.random.key(0))
  x = jnp.ones((2, 4))
  calls.clear()
  plain = net.apply(variables, x, stop=2)[0]
  net.apply(variables, 2 * x, stop=2)
  assert len(calls) == 1

  def zero(call, args, kwargs, context):
    out = call(*args, **kwargs)
    return 0 * out if isinstance(context.module, nn.Dense) else out

  with nn.intercept_methods(zero):
    hidden = net.apply(variables, x, stop=2)[0]
  np.testing.assert_array_equal(hidden, jnp.zeros((2, 4)))
  again = net.apply(variables, x, stop=2)[0]
  np.testing.assert_array_equal(again, plain)
