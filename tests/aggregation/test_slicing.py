"""Width slicing: a narrow model is the full one with channels set to zero."""

import dataclasses
from fractions import Fraction
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.aggregation.slicing import (
  extract,
  leading,
  make_level,
  mean_over_holders,
  narrow,
  scatter_add,
  width_index,
)
from fedjax_het.models import Block, BlockModel, Head, Variables, create
from fedjax_het.models.layers import Flatten, GlobalPool, Linear
from fedjax_het.models.norm import LayerNorm
from fedjax_het.models.running_stats import without_running_stats
from fedjax_het.models.simple_cnn import ConvUnit
from fedjax_het.models.slices import Slices
from tests.tiny import tiny_model

CLASSES = 3


def ceil_of(rate):
  return lambda k: math.ceil(round(rate * k, 6))


def cut(model, rate, **kwargs):
  small = narrow(model, ceil_of(rate))
  return small, width_index(model, small, **kwargs)


def draw(shapes, seed):
  """Random leaves, so that no bias or scale has its initial value."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda s: jnp.asarray(rng.normal(0.1, 0.5, s.shape), jnp.float32), shapes
  )


def zeros(shapes):
  return jax.tree.map(
      lambda s: jnp.asarray(np.zeros(s.shape, s.dtype)), shapes
  )


def masked(model, index, part):
  """The narrow parameters in a full model of zeros."""
  full = zeros(model.abstract_variables.params)
  return jax.jit(lambda full, part: scatter_add(full, index, part))(full, part)


def kept_layer_norm(kept):
  """Intercepts layer norms: they see only the kept coordinates, in order."""

  def call(next_call, args, kwargs, context):
    if not isinstance(context.module, LayerNorm):
      return next_call(*args, **kwargs)
    x, params = args[0], context.module.variables['params']
    part = x[..., kept]
    part -= part.mean(-1, keepdims=True)
    part /= jnp.sqrt((part**2).mean(-1, keepdims=True) + 1e-6)
    shape = (1,) * (x.ndim - 1) + (-1,)
    part = part * params['scale'][kept].reshape(shape)
    part += params['bias'][kept].reshape(shape)
    return jnp.zeros_like(x).at[..., kept].set(part)

  return nn.intercept_methods(call)


def forward(model, params, shape, train=False, seed=0):
  rng = np.random.default_rng(seed)
  x = jnp.asarray(rng.normal(size=(4, *shape)), jnp.float32)
  variables = Variables(params, zeros(model.abstract_variables.stats))
  key = jax.random.key(0) if train else None
  return jax.jit(
      lambda v: model.apply(v, x, train=train, key=key)[0]
  )(variables)


def shortened(model):
  """The model with one identity block, which tests as much as many."""
  last = max(name[:6] for name in model.block_names if 'stage' in name)

  def stays(name):
    return '_block' not in name or name.endswith('_block0') or (
        name == f'{last}_block1'
    )

  blocks = tuple(block for block in model.blocks if stays(block.name))
  return dataclasses.replace(model, blocks=blocks, cut=(1, len(blocks) - 1))


# Every residual family, both stems, both shortcuts, and the flatten-dense
# boundaries; the widths do not divide evenly.
FAMILIES = [
    ('preresnet20', (8, 8, 1), dict(width=0.5)),
    ('preresnet20', (4, 4, 2), dict(width=0.4, shortcut='A', norm='none')),
    ('resnet10', (8, 8, 2), dict(width=0.1, stem='cifar', norm='batch_only')),
    ('resnet14', (16, 16, 1), dict(width=0.07, norm='none')),
    ('resnet50', (8, 8, 1), dict(width=0.1, norm='batch_only')),
    ('resnet14_mnist', (8, 8, 1), dict(width=0.6, norm='batch_only')),
    ('mini_resnet10', (8, 8, 1), dict(width=0.3, norm='batch_only')),
    ('fedin_b', (8, 8, 1), dict(width=0.1, norm='batch_only')),
    ('fedin_c', (8, 8, 1), dict(width=0.07, tied=True, norm='none')),
    ('simple_cnn', (16, 16, 2), dict(width=1.2)),
    ('simple_cnn', (20, 16, 1), dict(projection=True)),
    ('fedhe_cnn2', (5, 7, 2), dict(width=0.1, norm='batch_only', dropout=0.)),
    ('fedhe_cnn6', (12, 12, 1), dict(width=0.1, norm='none', dropout=0.)),
    ('mlp', (3, 2, 2), dict(depth=4, hidden=13, norm='batch_only')),
]  # fmt: skip


SLOW = (2, 3, 4, 5, 7)


@pytest.mark.parametrize('place', [
    pytest.param(place, marks=pytest.mark.slow) if place in SLOW else place
    for place in range(len(FAMILIES))
])
def test_a_narrow_model_is_the_full_one_with_channels_masked(place):
  name, shape, options = FAMILIES[place]
  model = create(name, shape, CLASSES, **options)
  if 'stem' in model.block_names and name != 'mlp':
    model = shortened(model)
  rate = np.random.default_rng(place).uniform(0.1, 0.95)
  small, index = cut(model, rate)
  params = draw(small.abstract_variables.params, place)
  got = forward(small, params, shape, train=True)
  want = forward(model, masked(model, index.params, params), shape, train=True)
  np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
  assert np.std(got) > 1e-3


@pytest.mark.parametrize('seed', range(3))
def test_random_widths_and_depths(seed):
  rng = np.random.default_rng(100 + seed)
  model = create(
      'mlp', (2, 3, 1), CLASSES, depth=int(rng.integers(2, 6)),
      hidden=int(rng.integers(1, 40)), norm='batch_only',
  )  # fmt: skip
  for rate in rng.uniform(0.01, 1.0, 3):
    small, index = cut(model, rate)
    params = draw(small.abstract_variables.params, seed)
    np.testing.assert_allclose(
        forward(small, params, (2, 3, 1), True),
        forward(model, masked(model, index.params, params), (2, 3, 1), True),
        rtol=2e-4,
        atol=2e-4,
    )


@pytest.mark.parametrize('rate', [0.3, 0.5])
def test_attention_keeps_the_first_coordinates_of_every_head(rate):
  shape = (8, 8, 1)
  model = create('vit_t16', shape, CLASSES)
  model = BlockModel(  # Two of the twelve blocks.
      'vit', (*model.blocks[:3], *model.blocks[-2:]), shape, CLASSES, (2, 4)
  )
  small, index = cut(model, rate)
  kept = math.ceil(64 * rate)
  width = math.ceil(192 * rate)
  inside = (np.arange(3)[:, None] * 64 + np.arange(kept)[None]).reshape(-1)
  axes = index.params['encoder00']
  np.testing.assert_array_equal(axes['out']['kernel'][0], inside)
  qkv = np.concatenate([inside, 192 + inside, 384 + inside])
  np.testing.assert_array_equal(axes['qkv']['kernel'][1], qkv)
  np.testing.assert_array_equal(axes['qkv']['bias'][0], qkv)
  for axis in (axes['out']['kernel'][1], axes['qkv']['kernel'][0]):
    np.testing.assert_array_equal(axis, np.arange(width))
  np.testing.assert_array_equal(
      axes['mlp1']['kernel'][1], np.arange(4 * width)
  )

  params = draw(small.abstract_variables.params, 0)
  params = jax.tree.map(lambda leaf: leaf / 4, params)
  whole = masked(model, index.params, params)
  # The full model divides q k by sqrt(64), the narrow one by sqrt(kept).
  for name in ('encoder00', 'encoder01'):
    qkv = jax.tree.map(
        lambda leaf: jnp.concatenate(
            [leaf[..., :192] * math.sqrt(64 / kept), leaf[..., 192:]], -1
        ),
        whole[name]['qkv'],
    )
    whole[name] = {**whole[name], 'qkv': qkv}
  got = forward(small, params, shape)
  with kept_layer_norm(np.arange(width)):
    want = forward(model, whole, shape)
  np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def test_flattening_is_channel_minor():
  model = create('simple_cnn', (16, 16, 1), CLASSES)
  _, index = cut(model, 0.5)
  rows = index.params['hidden1']['linear']['kernel'][0]
  assert rows.tolist() == [16 * hw + c for hw in range(1) for c in range(8)]
  model = create('fedhe_cnn0', (5, 5, 1), CLASSES, width=4 / 128)
  _, index = cut(model, 0.5)  # 2x2 positions of 8 channels.
  rows, classes = index.params['head']['kernel']
  assert rows.tolist() == [8 * p + c for p in range(4) for c in range(4)]
  assert classes is None


def test_rates_round_up_and_keep_classes_and_image_channels():
  model = create('preresnet20', (8, 8, 3), 10)
  for rate, widths in ((1 / 6, (3, 6, 11)), (1 / 3, (6, 11, 22)),
                       (1 / 2, (8, 16, 32)), (1 / 8, (2, 4, 8))):  # fmt: skip
    small, index = cut(model, rate)
    params = small.abstract_variables.params
    stages = [params[f'stage{i}_block1']['conv2'] for i in (1, 2, 3)]
    assert tuple(s['kernel'].shape[-1] for s in stages) == widths
    axes = index.params['stem']['conv']['kernel']
    assert axes[:3] == (None, None, None) and len(axes[3]) == widths[0]
    assert params['head']['kernel'].shape == (widths[2], 10)
    # Shortcuts have the block's input and output channels.
    block = index.params['stage2_block0']
    shortcut = block['conv_shortcut']['kernel']
    np.testing.assert_array_equal(shortcut[2], block['conv1']['kernel'][2])
    np.testing.assert_array_equal(shortcut[3], block['conv2']['kernel'][3])


def test_a_bottleneck_expands_what_is_kept():
  model = create('resnet50', (8, 8, 3), 10, width=10 / 64)
  params = cut(model, 0.25)[0].abstract_variables.params
  block = params['stage1_block0']  # 3 of 10 channels, expanded to 12.
  assert block['conv2']['kernel'].shape[-1] == 3
  assert block['conv3']['kernel'].shape[-1] == 12


@pytest.mark.parametrize(
    'rate,count',
    [(1 / 6, 8844), (1 / 3, 33133), (1 / 2, 68706), (1, 272314), (1 / 8, 4536)],
)
def test_counts_of_the_fedepth_table(rate, count):
  model = create('preresnet20', (32, 32, 3), 10)
  small, _ = cut(model, rate)
  params = small.abstract_variables.params
  assert sum(math.prod(s.shape) for s in jax.tree.leaves(params)) == count


def test_gather_then_scatter_of_untouched_parameters_is_the_identity():
  model = create('mini_resnet6', (4, 4, 1), CLASSES, width=0.2)
  whole = draw(model.abstract_variables.params, 0)
  for rate in (0.3, 1.0):
    for index_of in (leading, lambda size, k: (jnp.arange(k) + 5) % size):
      small, index = cut(model, rate, index_of=index_of)

      @jax.jit
      def there_and_back(whole, index=index):
        part = extract(whole, index.params)
        nothing = jax.tree.map(jnp.zeros_like, whole)
        ones = jax.tree.map(jnp.ones_like, part)
        return (
            part,
            scatter_add(nothing, index.params, ones),
            scatter_add(nothing, index.params, part),
        )

      part, count, total = there_and_back(whole)
      shapes = jax.tree.map(jnp.shape, part)
      assert shapes == jax.tree.map(
          jnp.shape, small.abstract_variables.params
      )
      for leaf, n, t in zip(*map(jax.tree.leaves, (whole, count, total))):
        assert set(np.unique(n)) <= {0.0, 1.0}
        np.testing.assert_array_equal(t, np.where(n > 0, leaf, 0.0))
        assert rate < 1 or np.all(n == 1)


def window(shift):
  """FedRolex's rule: `kept` channels from `shift` on, which wrap around."""
  return lambda size, kept: (shift + np.arange(kept)) % size


def test_a_rolling_window_is_a_permuted_model():
  """FedRolex: at rate 1 it is a permutation, and any window is consistent."""
  shape = (4, 4, 1)
  model = create('mini_resnet6', shape, CLASSES, width=0.2, norm='batch_only')
  params = draw(model.abstract_variables.params, 1)

  @jax.jit
  def permuted(shift):
    _, index = cut(model, 1.0, index_of=window(shift))
    return extract(params, index.params)

  want = forward(model, params, shape, train=True)
  for shift in (1, 7):
    got = forward(model, permuted(shift), shape, train=True)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
  small, index = cut(model, 0.5, index_of=window(4))
  part = draw(small.abstract_variables.params, 2)
  np.testing.assert_allclose(
      forward(small, part, shape, train=True),
      forward(model, masked(model, index.params, part), shape, train=True),
      rtol=2e-4,
      atol=2e-4,
  )
  # A stage of 6 channels keeps 3 from index 4 on, which wrap around.
  axes = index.params['stage1_block0']['conv1']['kernel'][3]
  assert axes.tolist() == [4, 5, 0]


def test_running_statistics_are_cut_as_their_norm():
  model = create('preresnet20', (4, 4, 1), CLASSES, width=0.25, norm='batch')
  small, index = cut(model, 0.5)
  assert jax.tree.structure(model.abstract_variables) == jax.tree.structure(
      index, is_leaf=lambda x: type(x) is tuple
  )
  stats = extract(zeros(model.abstract_variables.stats), index.stats)
  assert jax.tree.map(jnp.shape, stats) == jax.tree.map(
      jnp.shape, small.abstract_variables.stats
  )
  plain = without_running_stats(model).abstract_variables
  assert not plain.stats
  assert plain.params == model.abstract_variables.params
  with pytest.raises(ValueError, match="'one' of 'gated' keeps running statis"):
    without_running_stats(gated())


def test_the_mean_of_a_number_is_that_over_its_holders():
  total, count = jnp.array([[6.0, 1], [0, 5]]), jnp.array([[2.0, 1], [0, 0]])
  mean, held = mean_over_holders(dict(k=total), dict(k=count))
  assert mean['k'].tolist() == [[3, 1], [0, 0]]
  assert held['k'].tolist() == [[True, True], [False, False]]


def test_bad_widths_are_refused_in_one_line():
  model = create('mlp', (2, 2, 1), CLASSES, hidden=8)
  with pytest.raises(ValueError, match="Block 'stem' of 'mlp2' would keep 0 "):
    narrow(model, lambda k: k // 16)
  with pytest.raises(ValueError, match='would keep 9 of its 8 channels'):
    narrow(model, lambda k: k + 1)
  remedy = 'is a Dense, which does not say how .* an attribute slices=Slices'
  with pytest.raises(ValueError, match=remedy):
    narrow(tiny_model(1), lambda k: k)
  model = create('mini_vit4', (8, 8, 1), CLASSES)
  model = model.with_modules(
      lambda name, module: (
          module.clone(head_dim=None) if 'encoder' in name else module
      )
  )
  with pytest.raises(ValueError, match=r"'encoder00' .* head_dim=None; give"):
    narrow(model, lambda k: k)


class Gated(nn.Module):
  """relu(conv(x)) * gate, as a contributor would write it."""

  slices = Slices(
      ('features',), dict(unit=('x', 'y'), gate=('*', 'y'))
  )

  features: int

  @nn.compact
  def __call__(self, x, train=False, mask=None):
    y = ConvUnit(self.features, 'batch', 3, False, name='unit')(x, train, mask)
    gate = self.param('gate', nn.initializers.ones, (self.features,))
    return y * gate.reshape(1, 1, 1, -1)


def gated(module=None, **kwargs):
  module = module or Gated(6)
  blocks = (
      Block('one', module), Block('two', Gated(5)), Block('pool', GlobalPool()),
      Block('head', Linear(CLASSES)),
  )  # fmt: skip
  return BlockModel('gated', blocks, (8, 8, 1), CLASSES, (1, 3), **kwargs)


def test_a_users_layer_is_narrowed_as_it_declares():
  """One part is a layer of the library with running statistics."""
  model = gated()
  small, index = cut(model, 0.5, index_of=window(2))
  params = draw(small.abstract_variables.params, 0)
  np.testing.assert_allclose(
      forward(small, params, (8, 8, 1), train=True),
      forward(model, masked(model, index.params, params), (8, 8, 1), True),
      rtol=2e-4,
      atol=2e-4,
  )
  assert index.params['one']['gate'][0].tolist() == [2, 3, 4]
  assert index.params['two']['unit']['conv']['kernel'][2].tolist() == [2, 3, 4]
  moments = index.stats['two']['unit']['norm']
  assert moments['mean'][0].tolist() == moments['var'][0].tolist() == [2, 3, 4]


def test_a_declaration_that_does_not_fit_is_refused():
  class Forgets(Gated):
    slices = Slices(('features',), dict(unit=('x', 'y')))

  with pytest.raises(ValueError, match='slices of Forgets do not name its p'):
    cut(gated(Forgets(6)), 0.5)

  class Mistakes(Gated):
    slices = Slices(('features',), dict(unit=('x', 'y'), gate=('x', '*')))

  with pytest.raises(ValueError, match="Mistakes a leaf of 'gate' has the"):
    cut(gated(Mistakes(6)), 0.5)


def test_heads_are_narrowed_with_the_channels_that_reach_them():
  exit_blocks = (
      Block('exit/conv', Gated(4)), Block('exit/flat', Flatten()),
      Block('exit', Linear(CLASSES)),
  )  # fmt: skip
  model = gated().with_heads(Head('one', exit_blocks))
  small, index = cut(model, 0.5, index_of=window(1))
  assert small.head_names == ('exit', 'head')
  own = index.params['exit/conv']
  assert own['unit']['conv']['kernel'][2].tolist() == [1, 2, 3]
  assert own['unit']['conv']['kernel'][3].tolist() == [1, 2]
  rows, classes = index.params['exit']['kernel']
  assert classes is None
  assert rows.tolist() == [4 * p + c for p in range(16) for c in (1, 2)]
  # The trunk's index does not change.
  alone = cut(gated(), 0.5, index_of=window(1))[1].params
  assert_index(alone, {name: index.params[name] for name in alone})


def assert_index(got, want):
  def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda x: type(x) is tuple)

  assert len(leaves(got)) == len(leaves(want)) > 0
  for a, b in zip(leaves(got), leaves(want)):
    for one, two in zip(a, b, strict=True):
      np.testing.assert_array_equal(one, two)


def test_attention_rolls_inside_each_head():
  model = create('mini_vit4', (8, 8, 1), CLASSES, width=2)
  _, index = cut(model, 0.25, index_of=window(60))
  inside = [60, 61, 62, 63, *range(12)]  # 16 of 64.
  heads = index.params['encoder00']['out']['kernel'][0]
  assert heads.tolist() == inside + [64 + i for i in inside]
  qkv = index.params['encoder00']['qkv']['kernel'][1]
  assert qkv.tolist() == [128 * j + i for j in range(3) for i in heads.tolist()]


def test_a_rule_may_be_traced_and_its_windows_cover_all_channels():
  """FedRolex: in K rounds each of K channels is held as often as any other."""
  model = create('mlp', (2, 2, 1), CLASSES, hidden=6)
  nothing = zeros(model.abstract_variables.params)

  @jax.jit
  def held(shift):
    rule = lambda size, kept: (shift + jnp.arange(kept)) % size  # noqa: E731
    level = make_level(model, Fraction(1, 3), rule)
    ones = jax.tree.map(
        lambda s: jnp.ones(s.shape), level.model.abstract_variables.params
    )
    return scatter_add(nothing, level.index, ones)

  total = jax.tree.map(lambda *leaves: sum(leaves), *map(held, range(6)))
  assert total['stem']['linear']['bias'].tolist() == [2.0] * 6
  assert total['head']['bias'].tolist() == [6.0] * CLASSES
  # In a square layer only entries near the diagonal are ever held.
  counts = total['layer1']['linear']['kernel']
  assert counts[0].tolist() == [2.0, 1.0, 0.0, 0.0, 0.0, 1.0]


def test_levels_keep_the_share_rounded_up():
  model = create('mlp', (2, 2, 1), CLASSES, hidden=10)
  for rate, width in ((Fraction(1, 3), 4), (Fraction(3, 10), 3)):
    level = make_level(model, rate)
    assert level.rate == float(rate)
    assert level.model.blocks[0].module.features == width
    assert level.index['stem']['linear']['bias'][0].tolist() == [*range(width)]
