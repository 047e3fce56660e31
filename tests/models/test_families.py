"""What each family computes, at tiny widths."""

import functools

import flax.linen as nn
import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.models import create
from fedjax_het.models.fedhe_cnn import _pool_same, _pool_valid
from fedjax_het.models.fedin_v1 import PointwiseBlock
from fedjax_het.models.resnet import BasicBlock
from fedjax_het.models.vit import Embed, EncoderBlock, Token

# Name, input, options of one small member of each family.
SMALL = {
    'resnet10': ((8, 8, 1), {'width': 1 / 32}),
    'resnet14_mnist': ((8, 8, 1), {'width': 1 / 8, 'shortcut': 'A'}),
    'preresnet20': ((8, 8, 1), {'width': 1 / 8}),
    'fedin_e': ((8, 8, 1), {'width': 1 / 32}),
    'fedhe_cnn5': ((12, 12, 1), {'width': 1 / 32, 'dropout': 0.0}),
    'simple_cnn': ((16, 16, 1), {'norm': 'batch'}),
    'mini_vit4': ((8, 8, 1), {}),
    'mlp': ((8, 8, 1), {'norm': 'batch', 'hidden': 8}),
}

# These compile for three seconds or more.
DEEP = ('resnet10', 'fedin_e')


def random_like(variables, seed=0):
  """Positive random numbers, so that no leaf has a special value."""
  flat, back = ravel_pytree(variables)
  return back(jax.random.uniform(jax.random.key(seed), flat.shape, minval=0.2))


@pytest.mark.parametrize('name', [
    pytest.param(name, marks=pytest.mark.slow if name in DEEP else ())
    for name in SMALL
])  # fmt: skip
def test_padding_examples_change_nothing_and_gradients_are_finite(name):
  shape, options = SMALL[name]
  model = create(name, shape, 3, **options)
  variables = model.init(jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (6, *shape))
  labels = jnp.array([0, 1, 2, 0, 1, 2])
  mask = jnp.array([True, True, False, True, True, False])

  def loss(params, x):
    logits, stats = model.apply(
        variables._replace(params=params), x, train=True, mask=mask
    )
    picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=1) - picked
    return jnp.sum(jnp.where(mask, losses, 0)), (logits, stats)

  grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (value, (logits, stats)), grads = grad(variables.params, x)
  other = x.at[2].mul(30).at[5].add(7)
  (value2, (logits2, stats2)), grads2 = grad(variables.params, other)
  np.testing.assert_array_equal(logits[mask], logits2[mask])
  assert not np.array_equal(logits[~mask], logits2[~mask])
  np.testing.assert_array_equal(value, value2)
  jax.tree.map(np.testing.assert_array_equal, stats, stats2)
  for a, b in zip(
      jax.tree.leaves(grads), jax.tree.leaves(grads2), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  assert np.isfinite(ravel_pytree(grads)[0]).all()
  for path, leaf in jax.tree.leaves_with_path(grads):
    if path[-1].key == 'kernel':
      assert np.any(leaf), f'no gradient reaches {path}'
  # Training moves every running statistic.
  before, after = (ravel_pytree(s)[0] for s in (variables.stats, stats))
  assert before.shape == after.shape
  assert np.mean(before != after) > 0.9 or not before.size


def test_test_mode_treats_examples_alone_unless_batch_only():
  x = jax.random.normal(jax.random.key(1), (4, 8, 8, 1))
  for norm in ('batch', 'group', 'none', 'batch_only'):
    model = create('mlp', (8, 8, 1), 3, hidden=8, norm=norm)
    variables = random_like(model.init(jax.random.key(0)))
    logits, stats = model.apply(variables, x)
    alone, _ = model.apply(variables, x[:2])
    jax.tree.map(np.testing.assert_array_equal, stats, variables.stats)
    assert np.allclose(logits[:2], alone, 1e-5) == (norm != 'batch_only')
    assert bool(variables.stats) == (norm == 'batch')


@pytest.mark.parametrize(
    ('stem', 'want'),
    [
        ('imagenet', [(8, 64), (8, 64), (4, 128), (2, 256), (1, 512)]),
        ('cifar', [(32, 64), (32, 64), (16, 128), (8, 256), (4, 512)]),
    ],
)
def test_resnet_maps_at_32x32(stem, want):
  model = create('resnet10', (32, 32, 3), 10, stem=stem)
  assert model.shapes == (*((n, n, c) for n, c in want), (512,), (10,))
  assert model.cut == (1, 6)


def test_other_maps():
  shapes = create('resnet10', (28, 28, 1), 10).shapes
  assert [s[0] for s in shapes[:5]] == [7, 7, 4, 2, 1]
  shapes = create('fedin_e', (28, 28, 1), 10).shapes
  assert shapes[0] == (14, 14, 64)
  assert [s for s in shapes[1:7:2]] == [
      (14, 14, 256), (7, 7, 512), (4, 4, 1024),
  ]
  assert create('fedin_e', (32, 32, 3), 10).shapes[6:] == (
      (4, 4, 1024), (1024,), (10,),
  )
  assert create('fedhe_cnn9', (32, 32, 3), 10).shapes[2:4] == (
      (3, 3, 192), (1728,),
  )
  assert create('fedhe_cnn0', (28, 28, 1), 10).shapes[2] == (13 * 13 * 256,)
  shapes = create('preresnet20', (32, 32, 3), 10).shapes
  assert shapes[3::3] == ((32, 32, 16), (16, 16, 32), (8, 8, 64))
  assert create('vit_s8', (224, 224, 3), 10).shapes[1] == (197, 384)


@pytest.mark.parametrize('train', [False, True])
@pytest.mark.parametrize(
    'block', [BasicBlock(5), PointwiseBlock(3, 5)], ids=['v2', 'v1']
)
def test_zero_last_scale_makes_a_block_the_identity(block, train):
  x = jax.random.uniform(jax.random.key(0), (4, 3, 3, 5))
  variables = random_like(jax.jit(block.init)(jax.random.key(1), x))
  zeros = jax.tree.map(jnp.zeros_like, variables['params']['norm2'])
  variables['params']['norm2'] = zeros
  y, _ = block.apply(variables, x, train, None, mutable=['batch_stats'])
  np.testing.assert_array_equal(x, y)


def test_shape_changing_block_adds_its_shortcut():
  x = jax.random.uniform(jax.random.key(0), (2, 6, 6, 2))
  block = BasicBlock(4, 2, 'A', 'none')
  variables = jax.jit(block.init)(jax.random.key(1), x)
  variables['params']['conv2']['kernel'] *= 0
  y = block.apply(variables, x)
  np.testing.assert_array_equal(y[..., 1:3], x[:, ::2, ::2])
  np.testing.assert_array_equal(y[..., :1], 0)
  block = BasicBlock(4, 2, 'B', 'none')
  variables = jax.jit(block.init)(jax.random.key(1), x)
  variables['params']['conv2']['kernel'] *= 0
  kernel = variables['params']['conv_shortcut']['kernel'][0, 0]
  y = block.apply(variables, x)
  want = jnp.maximum(x[:, ::2, ::2] @ kernel, 0)
  np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


def test_tied_block_is_one_block_applied_again():
  x = jax.random.uniform(jax.random.key(0), (2, 4, 4, 3))
  once, twice = (PointwiseBlock(2, 3, repeats=r) for r in (1, 2))
  variables = random_like(jax.jit(twice.init)(jax.random.key(1), x))
  y = once.apply(variables, once.apply(variables, x))
  np.testing.assert_allclose(twice.apply(variables, x), y, rtol=1e-6)
  models = [create(f'fedin_{v}', (8, 8, 1), 3, tied=True) for v in 'abcde']
  assert len({model.block_names for model in models}) == 1
  shapes = [jax.tree.leaves(model.abstract_variables) for model in models]
  assert all(s == shapes[0] for s in shapes)


def test_tied_block_updates_its_statistics_at_each_use():
  x = jax.random.uniform(jax.random.key(0), (2, 4, 4, 3))
  once, twice = (PointwiseBlock(2, 3, repeats=r) for r in (1, 2))
  variables = random_like(jax.jit(twice.init)(jax.random.key(1), x))
  y, new = once.apply(variables, x, True, None, mutable='batch_stats')
  _, new = once.apply(
      {**variables, **new}, y, True, None, mutable='batch_stats'
  )
  _, got = twice.apply(variables, x, True, None, mutable='batch_stats')
  jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-5), got, new
  )


def test_fedhe_pools_equal_flax():
  x = jax.random.normal(jax.random.key(0), (2, 5, 7, 3))
  np.testing.assert_allclose(
      _pool_same(x),
      nn.avg_pool(x, (2, 2), (1, 1), 'SAME', count_include_pad=False),
      rtol=1e-5,
      atol=1e-6,
  )
  np.testing.assert_allclose(
      _pool_valid(x), nn.avg_pool(x, (2, 2), (2, 2)), rtol=1e-5, atol=1e-6
  )


def test_fedhe_dropout_follows_the_key_and_rests_in_test():
  model = create('fedhe_cnn3', (3, 3, 1), 3)
  variables = model.init(jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (4, 3, 3, 256))

  def unit(train, seed):
    key = jax.random.key(seed)
    return model.apply(
        variables, x, start=1, stop=2, train=train, key=key
    )[0]

  np.testing.assert_array_equal(unit(True, 0), unit(True, 0))
  assert not np.array_equal(unit(True, 0), unit(True, 1))
  # Half of the normalised numbers are positive, 0.7 of those are kept.
  assert 0.3 < np.mean(unit(True, 0) > 0) < 0.4
  np.testing.assert_array_equal(unit(False, 0), unit(False, 1))


def test_patches_are_a_convolution():
  x = jax.random.normal(jax.random.key(0), (2, 8, 12, 3))
  module = Embed(5, 4)
  params = random_like(jax.jit(module.init)(jax.random.key(1), x))['params']
  conv = nn.Conv(5, (4, 4), (4, 4), padding='VALID')
  kernel = params['patch']['kernel'].reshape((4, 4, 3, 5))
  y = conv.apply({'params': {**params['patch'], 'kernel': kernel}}, x)
  y = jnp.concatenate(
      [jnp.broadcast_to(params['token'], (2, 1, 5)), y.reshape((2, 6, 5))], 1
  )
  np.testing.assert_allclose(
      module.apply({'params': params}, x),
      y + params['position'],
      rtol=1e-4,
      atol=1e-5,
  )


def test_encoder_block_is_the_published_one():
  x = jax.random.normal(jax.random.key(0), (2, 5, 8))
  module = EncoderBlock(2)
  params = jax.jit(module.init)(jax.random.key(1), x)['params']
  # Parameters of size 1, so that attention is far from uniform.
  params = jax.tree.map(lambda p: 20 * p, params)
  got = jax.jit(module.apply)({'params': params}, x)
  p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

  def norm(x, p):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(
        x.var(-1, keepdims=True) + 1e-6
    )
    return x * p['scale'] + p['bias']

  def dense(x, p):
    return x @ p['kernel'] + p['bias']

  def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)

  x = np.asarray(x, np.float64)
  for b in range(2):
    qkv = dense(norm(x[b], p['norm1']), p['qkv'])
    heads = []
    for h in range(2):
      q, k, v = (qkv[:, 8 * i + 4 * h : 8 * i + 4 * h + 4] for i in range(3))
      heads.append(softmax(q @ k.T / 2) @ v)
    y = x[b] + dense(np.concatenate(heads, 1), p['out'])
    hidden = dense(norm(y, p['norm2']), p['mlp1'])
    hidden = np.asarray(jax.nn.gelu(hidden, approximate=False))
    want = y + dense(hidden, p['mlp2'])
    np.testing.assert_allclose(got[b], want, rtol=2e-3, atol=2e-2)


def test_token_is_the_normalised_class_token():
  x = 3 * jax.random.normal(jax.random.key(0), (2, 5, 8)) + 1
  y = Token().apply(Token().init(jax.random.key(1), x), x)
  np.testing.assert_allclose(y.mean(1), 0, atol=1e-5)
  np.testing.assert_allclose(y.var(1), 1, rtol=1e-4)
  np.testing.assert_allclose(
      np.corrcoef(y[0], x[0, 0])[0, 1], 1, rtol=1e-5
  )


def test_moon_projection_keeps_the_body():
  plain, moon = (
      create('simple_cnn', (16, 16, 1), 3, projection=p) for p in (False, True)
  )
  assert set(moon.block_names) - set(plain.block_names) == {'projection'}
  assert moon.shapes[moon.cut[1] - 1] == (256,)
  assert plain.shapes[plain.cut[1] - 1] == (84,)
