"""Each kind of block beside the same net in NumPy, in float64.

Parameters, statistics and inputs have both signs, so that a ReLU that is
missing, or a shortcut of another array, is noticed.
"""

import jax
import numpy as np
import pytest

from fedjax_het.models import create
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.fedhe_cnn import VARIANTS, Unit
from fedjax_het.models.fedin_v1 import PointwiseBlock
from fedjax_het.models.layers import Linear
from fedjax_het.models.preresnet import NormPool, PreactBlock
from fedjax_het.models.resnet import BasicBlock, Bottleneck, Stem
from fedjax_het.models.simple_cnn import ConvUnit, Hidden, Projection
from fedjax_het.models.text import Conv


def conv(x, params, stride=1, pad=0):
  """[B, H, W, I] -> [B, H', W', O], `pad` zeros on each side."""
  kernel = params['kernel']
  size = kernel.shape[0]
  x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
  rows, cols = ((n - size) // stride + 1 for n in x.shape[1:3])
  y = np.zeros((len(x), rows, cols, kernel.shape[3]))
  for i in range(rows):
    for j in range(cols):
      at, to = i * stride, j * stride
      window = x[:, at : at + size, to : to + size]
      y[:, i, j] = np.tensordot(window, kernel, 3)
  return y + params.get('bias', 0)


def norm(x, params, stats, epsilon=1e-5):
  x = (x - stats['mean']) / np.sqrt(stats['var'] + epsilon)
  return x * params['scale'] + params['bias']


def relu(x):
  return np.maximum(x, 0)


def max_pool(x, size, stride, pad=0):
  x = np.pad(
      x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), constant_values=-np.inf
  )
  rows, cols = ((n - size) // stride + 1 for n in x.shape[1:3])
  return np.stack([
      np.stack([
          x[:, i : i + size, j : j + size].max((1, 2))
          for j in range(0, cols * stride, stride)
      ], 1)
      for i in range(0, rows * stride, stride)
  ], 1)  # fmt: skip


def drawn(module, shape):
  """A module's output on random input, and everything that it is made of.

  Returns:
    Input, parameters, statistics in float64, and the output in test mode.
  """
  rng = np.random.default_rng(0)
  x = rng.normal(size=shape).astype(np.float32)
  shapes = jax.eval_shape(module.init, jax.random.key(0), x)

  def draw(path, leaf):
    value = rng.normal(size=leaf.shape)
    return np.float32(np.abs(value) if path[-1].key == 'var' else value)

  variables = jax.tree.map_with_path(draw, shapes)
  y = jax.jit(module.apply)(variables, x)
  wide = jax.tree.map(np.float64, variables)
  return np.float64(x), wide.get('params'), wide.get('batch_stats'), y


def close(got, want):
  scale = np.abs(want).max()
  assert scale > 0.1
  np.testing.assert_allclose(got / scale, want / scale, atol=2e-5)


@pytest.mark.parametrize('pool', [False, True])
def test_conv_unit(pool):
  x, p, s, y = drawn(ConvUnit(3, 'batch', 3, pool), (2, 6, 8, 2))
  want = relu(norm(conv(x, p['conv']), p['norm'], s['norm']))
  close(y, max_pool(want, 2, 2) if pool else want)


@pytest.mark.parametrize('module', [Hidden(5), Projection(5)])
def test_dense_blocks(module):
  x, p, _, y = drawn(module, (30, 4))

  def dense(x, name):
    return x @ p[name]['kernel'] + p[name]['bias']

  if 'linear' in p:
    close(y, relu(dense(x, 'linear')))
  else:
    close(y, dense(relu(dense(x, 'linear1')), 'linear2'))


@pytest.mark.parametrize(
    ('kernel', 'stride', 'pad', 'pool'),
    [(3, 1, 1, 'same'), (2, 2, 0, 'valid'), (3, 2, 0, None)],
)
def test_unit_of_fedhe(kernel, stride, pad, pool):
  module = Unit(3, kernel, stride, pad, pool, 0.2, 'batch')
  x, p, s, y = drawn(module, (2, 9, 9, 2))
  y2 = conv(x, p['conv'], stride, pad)
  # The norm of Keras: epsilon 1e-3.
  want = relu(norm(y2, p['norm'], s['norm'], 1e-3))
  if pool == 'valid':
    want = want[:, :4, :4].reshape((2, 2, 2, 2, 2, 3)).mean((2, 4))
  elif pool == 'same':
    last = want.shape[1] - 1
    want = np.stack([
        np.stack([
            want[:, i : i + 2, j : j + 2].mean((1, 2)) for j in range(last + 1)
        ], 1)
        for i in range(last + 1)
    ], 1)  # fmt: skip
  close(y, want)


def test_unit_of_fedhe_has_the_statistics_of_keras():
  """Momentum 0.99; the variance of a batch is the biased one."""
  module = Unit(3, 3, 1, 1, None, 0.0, 'batch')
  x = np.random.default_rng(0).normal(size=(2, 4, 4, 2)).astype(np.float32)
  variables = jax.jit(module.init)(jax.random.key(0), x)
  _, new = jax.jit(
      lambda v: module.apply(v, x, True, mutable='batch_stats')
  )(variables)
  y = conv(
      np.float64(x),
      jax.tree.map(np.float64, variables['params']['conv']),
      pad=1,
  )
  stats = new['batch_stats']['norm']
  np.testing.assert_allclose(
      stats['mean'], 0.01 * y.mean((0, 1, 2)), rtol=1e-3, atol=1e-6
  )
  np.testing.assert_allclose(
      stats['var'], 0.99 + 0.01 * y.var((0, 1, 2)), rtol=1e-4
  )


def test_dropout_rates_are_those_of_the_papers():
  for variant, rate in enumerate(
      [0.2, 0.2, 0.2, 0.3, 0.4, 0.2, 0.2, 0.2, 0.3, 0.3]
  ):
    model = create(f'fedhe_cnn{variant}', (12, 12, 1), 3, width=1 / 64)
    units = [b.module for b in model.blocks if isinstance(b.module, Unit)]
    assert [u.dropout for u in units] == [rate] * len(VARIANTS[variant][0])
  model = create('dropout_cnn', (6, 6, 1), 3)
  rates = [getattr(block.module, 'dropout', None) for block in model.blocks]
  assert rates == [0.0, 0.25, 0.5, None]


@pytest.mark.parametrize('pool', [False, True])
def test_stem(pool):
  x, p, s, y = drawn(Stem(3, 7, 2, pool), (2, 9, 9, 2))
  want = relu(norm(conv(x, p['conv'], 2, 3), p['norm'], s['norm']))
  close(y, max_pool(want, 3, 2, 1) if pool else want)


@pytest.mark.parametrize('features', [3, 2])
@pytest.mark.parametrize('stride', [1, 2])
def test_basic_block(features, stride):
  x, p, s, y = drawn(BasicBlock(features, stride), (2, 5, 5, 2))

  def unit(x, suffix, stride, pad):
    x = conv(x, p['conv' + suffix], stride, pad)
    return norm(x, p['norm' + suffix], s['norm' + suffix])

  want = unit(relu(unit(x, '1', stride, 1)), '2', 1, 1)
  if stride > 1 or features > 2:
    x = unit(x, '_shortcut', stride, 0)
  close(y, relu(x + want))


@pytest.mark.parametrize(('channels', 'stride'), [(8, 1), (3, 1), (8, 2)])
def test_bottleneck(channels, stride):
  """The 3x3 convolution has the stride, as in torchvision."""
  x, p, s, y = drawn(Bottleneck(2, stride), (2, 5, 5, channels))

  def unit(x, suffix, stride=1, pad=0):
    x = conv(x, p['conv' + suffix], stride, pad)
    return norm(x, p['norm' + suffix], s['norm' + suffix])

  want = unit(relu(unit(relu(unit(x, '1')), '2', stride, 1)), '3')
  if stride > 1 or channels < 8:
    x = unit(x, '_shortcut', stride)
  close(y, relu(x + want))


@pytest.mark.parametrize('shortcut', ['A', 'B'])
@pytest.mark.parametrize('stride', [1, 2])
def test_preact_block_where_the_shape_changes(shortcut, stride):
  """Convolution and shortcut take u = relu(norm(x))."""
  block = PreactBlock(5, stride, shortcut, 'batch')
  x, p, s, y = drawn(block, (2, 5, 5, 3))
  u = relu(norm(x, p['norm1'], s['norm1']))
  h = relu(norm(conv(u, p['conv1'], stride, 1), p['norm2'], s['norm2']))
  want = conv(h, p['conv2'], 1, 1)
  if shortcut == 'A':
    want[..., 1:4] += u[:, ::stride, ::stride]
  else:
    want += conv(u, p['conv_shortcut'], stride)
  close(y, want)


@pytest.mark.parametrize('preact', [False, True])
def test_preact_block_where_it_does_not(preact):
  x, p, s, y = drawn(PreactBlock(3, norm='batch', preact=preact), (2, 4, 4, 3))
  u = relu(norm(x, p['norm1'], s['norm1']))
  h = relu(norm(conv(u, p['conv1'], 1, 1), p['norm2'], s['norm2']))
  close(y, conv(h, p['conv2'], 1, 1) + (u if preact else x))


def test_norm_before_the_mean():
  x, p, s, y = drawn(NormPool(norm='batch'), (2, 3, 4, 5))
  close(y, relu(norm(x, p['norm'], s['norm'])).mean((1, 2)))
  x, _, _, y = drawn(NormPool(use_norm=False), (2, 3, 4, 5))
  close(y, x.mean((1, 2)))


@pytest.mark.parametrize(
    ('stride', 'down'), [(1, False), (1, True), (2, True)]
)
def test_pointwise_block(stride, down):
  features = 4 if down else 3
  block = PointwiseBlock(2, features, stride, down)
  x, p, s, y = drawn(block, (2, 5, 5, 3))

  def unit(x, suffix, stride=1, pad=0):
    x = conv(x, p['conv' + suffix], stride, pad)
    return norm(x, p['norm' + suffix], s['norm' + suffix])

  want = unit(relu(unit(x, '1', stride)), '2', 1, 1)
  close(y, relu((unit(x, '_shortcut', stride) if down else x) + want))


def test_convolution_over_tokens():
  x, p, s, y = drawn(Conv(4, 3, 'batch'), (2, 5, 3))
  kernel = p['conv']['kernel'][0]  # [span, I, O]
  padded = np.pad(x, ((0, 0), (1, 1), (0, 0)))
  want = np.stack(
      [np.tensordot(padded[:, t : t + 3], kernel, 2) for t in range(5)], 1
  )
  want = norm(want + p['conv']['bias'], p['norm'], s['norm'])
  close(y, relu(want))


def ones_of(module, shape, key):
  """A module's output in training, of ones after its ReLU."""
  x = np.ones(shape, np.float32)
  shapes = jax.eval_shape(module.init, jax.random.key(0), x)['params']
  params = jax.tree.map_with_path(
      lambda path, leaf: np.full(
          leaf.shape, path[-1].key == 'bias', np.float32
      ),
      shapes,
  )
  rngs = {'dropout': jax.random.key(key)}
  apply = jax.jit(lambda p: module.apply({'params': p}, x, True, rngs=rngs))
  return np.asarray(apply(params))


def test_dropout_is_before_the_pool_in_fedhe_and_after_it_in_the_cnn():
  unit = Unit(8, 1, 1, 0, 'valid', 0.5, 'none')
  means = ones_of(unit, (4, 8, 8, 1), 0)
  assert set(np.unique(means)) == {0, 0.5, 1, 1.5, 2}
  kept = ones_of(ConvUnit(8, 'none', 1, True, 0.5), (4, 8, 8, 1), 0)
  assert set(np.unique(kept)) == {0, 2}
  assert 0.4 < np.mean(kept == 0) < 0.6


def test_equal_blocks_drop_different_units():
  blocks = tuple(Block(name, Hidden(8, 0.5)) for name in 'abc')
  blocks += (Block('head', Linear(3)),)
  model = BlockModel('three', blocks, (8,), 3, (1, 3))
  variables = model.init(jax.random.key(0))
  params = {
      name: jax.tree.map_with_path(
          lambda path, leaf: np.full_like(leaf, path[-1].key == 'bias'), tree
      )
      for name, tree in variables.params.items()
  }
  variables = variables._replace(params=params)
  x = np.ones((16, 8), np.float32)
  masks = [
      np.asarray(model.apply(
          variables, x, start=at, stop=at + 1, train=True,
          key=jax.random.key(5),
      )[0])
      for at in range(3)
  ]  # fmt: skip
  for mask, other in zip(masks, (*masks[1:], masks[0]), strict=True):
    assert set(np.unique(mask)) == {0, 2}
    assert 0.3 < np.mean(mask == other) < 0.7
