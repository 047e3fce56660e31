"""Parameters that no example reaches, and training without them."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine import rounds
from fedjax_het.engine.types import Federation, Group
from fedjax_het.kernels.conv import conv
from fedjax_het.models import create
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.reach import used_parts
from tests.tiny import NUM_CLASSES, SHAPE, tiny_data, tiny_local


class Conv(nn.Module):
  """A 3x3 convolution; on the 2x2 images its stride leaves one pixel."""

  stride: int

  @nn.compact
  def __call__(self, x, train, mask):
    return jnp.tanh(
      nn.Conv(
        4,
        (3, 3),
        (self.stride,) * 2,
        ((1, 1), (1, 1)),
        conv_general_dilated=conv,
      )(x)
    )


class Head(nn.Module):
  """Flatten and a dense layer."""

  @nn.compact
  def __call__(self, x, train, mask):
    return nn.Dense(NUM_CLASSES)(x.reshape(len(x), -1))


def small_maps(depth=1) -> BlockModel:
  """A model whose kernels use 4 of 9 taps, then 1 of 9."""
  middle = [Block(f'mid{i}', Conv(1)) for i in range(depth)]
  return BlockModel(
    f'small{depth}',
    (Block('stem', Conv(2)), *middle, Block('head', Head())),
    SHAPE,
    NUM_CLASSES,
    (1, 1 + depth),
  )


def test_the_used_box_of_every_kernel():
  model = small_maps()
  trimmed = model.trim(model.init(jax.random.key(0))).params
  assert trimmed['stem'].params['Conv_0']['kernel'].shape == (2, 2, 1, 4)
  assert trimmed['mid0'].params['Conv_0']['kernel'].shape == (1, 1, 4, 4)
  assert trimmed['head']['Dense_0']['kernel'].shape == (4, NUM_CLASSES)


def test_leaves_that_are_used_as_a_whole_are_whole():
  class Twice(nn.Module):
    @nn.compact
    def __call__(self, x, train, mask):
      w = self.param('w', nn.initializers.ones, (3, 3))
      v = self.param('v', nn.initializers.ones, (4,))
      u = self.param('u', nn.initializers.ones, (4,))
      return x @ w[:, :2] + jnp.sum(w) + v[0] * v[2] + jnp.sum(u[1:2])

  parts = used_parts(Twice(), (1, 3))
  assert {path: (p.begin, p.sizes) for path, p in parts.items()} == {
    "['v']": ((0,), (3,)),
    "['u']": ((1,), (1,)),
  }


def test_what_training_alone_uses_is_used():
  class Deeper(nn.Module):
    @nn.compact
    def __call__(self, x, train, mask):
      w = self.param('w', nn.initializers.ones, (4,))
      v = self.param('v', nn.initializers.ones, (4,))
      used = w if train else w[:2]
      return x + jnp.sum(used) + jnp.sum(v[:3] if train else v[:2])

  (only,) = used_parts(Deeper(), (1, 3)).items()
  assert only[0] == "['v']" and only[1].sizes == (3,)


def test_where_training_needs_several_examples_all_is_used():
  class Pairs(nn.Module):
    @nn.compact
    def __call__(self, x, train, mask):
      w = self.param('w', nn.initializers.ones, (4,))
      return (x.reshape(2, -1) if train else x) + jnp.sum(w[:2])

  assert used_parts(Pairs(), (4, 3)) and used_parts(Pairs(), (1, 3)) == {}


def test_most_of_a_resnet_on_small_images_is_never_reached():
  model = create('resnet18', (32, 32, 3), 10)
  sizes = [
    sum(leaf.size for leaf in jax.tree.leaves(tree))
    for tree in (
      model.abstract_variables.params,
      jax.eval_shape(model.trim, model.abstract_variables).params,
    )
  ]
  # 3 kernels of 512 x 512 lose 8 taps, one of 256 x 512 loses 5.
  assert sizes[0] - sizes[1] == (3 * 8 * 512 + 5 * 256) * 512
  wide = create('resnet18', (224, 224, 3), 10)
  assert wide.trim(wide.abstract_variables) == wide.abstract_variables


def test_gradients_are_those_of_the_whole_and_zero_elsewhere():
  model = small_maps()
  start = model.init(jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (5, *SHAPE))

  @jax.jit
  def gradient(params):
    return jax.grad(
      lambda params: jnp.sum(
        model.apply(start._replace(params=params), x)[0] ** 2
      )
    )(params)

  whole = gradient(start.params)
  part = gradient(model.trim(start).params)
  zeros = jax.tree.map(jnp.zeros_like, start)
  filled = model.fill(start._replace(params=part), zeros).params
  jax.tree.map(np.testing.assert_array_equal, filled, whole)


@pytest.mark.parametrize(
  'name, options',
  [
    ('fedprox', dict(mu=0.5)),
    ('private', {}),
    ('fedin', {}),
    pytest.param(
        'fedin',
        dict(rule='exact', capture='training'),
        marks=pytest.mark.slow,
    ),
    pytest.param('fedin', dict(rule='sequential'), marks=pytest.mark.slow),
  ],
)
def test_training_without_them_is_the_same(name, options, monkeypatch):
  trimmed, trim = [], BlockModel.trim

  def counted(model, variables):
    trimmed.append(model.name)
    return trim(model, variables)

  monkeypatch.setattr(BlockModel, 'trim', counted)
  ids = np.arange(2)
  federation = Federation(
    tuple(Group(f'd{d}', small_maps(d), 2 * (d - 1) + ids) for d in (1, 2)),
    tiny_local(epochs=2),
  )
  data = tiny_data((5, 8, 6, 7))

  def models_after_two_rounds(drop_unused_weights):
    local = dataclasses.replace(
        federation.local, drop_unused_weights=drop_unused_weights
    )
    used = dataclasses.replace(federation, local=local)
    if name == 'fedin':
      algorithm = ALGORITHMS[name](used, num_pairs=4, **options)
    else:
      algorithm = ALGORITHMS[name](used, **options)
    run_round = rounds.make_round(algorithm, used, cohort_size=4)
    state = rounds.init_state(algorithm, used, jax.random.key(0))
    for _ in range(2):
      state, _ = run_round(state, data, jax.random.key(1), jax.random.key(2))
    return state

  want = models_after_two_rounds(False)
  assert not trimmed
  got = models_after_two_rounds(True)
  assert set(trimmed) == {'small1', 'small2'}
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
    (got.server, got.clients),
    (want.server, want.clients),
  )
