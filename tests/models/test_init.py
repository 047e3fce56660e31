"""Initialisation of every family: the option `init` and its defaults."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.models import MODELS, create, layers, model_options
from fedjax_het.models.preresnet import PreactBlock

SHAPE = (32, 32, 3)
# The scheme in the code of each family's paper, for its smallest member.
DEFAULTS = dict(
    preresnet20='torch',
    fedin_e='torch',
    simple_cnn='torch',
    resnet10='he_fan_out',
    resnet14_mnist='he_fan_out',
    mini_resnet6='he_fan_out',
    fedhe_cnn5='lecun',
    dropout_cnn='glorot',
    vit_t16='truncated',
    mlp='he_fan_in',
)


def drawn(name, blocks, **options):
  """{path: leaf} of some blocks' initial parameters."""
  model = create(name, SHAPE, 10, **options)
  params = model.init(jax.random.key(0), blocks).params
  return {
      jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(leaf)
      for path, leaf in jax.tree.leaves_with_path(params)
  }


def test_every_model_has_the_option():
  for name in MODELS:
    assert model_options(name)['init'] in layers.INITS


@pytest.mark.parametrize('name', DEFAULTS)
def test_the_default_is_that_of_the_papers_code(name):
  assert model_options(name)['init'] == DEFAULTS[name]
  # Models are equal if their modules are.
  another = 'glorot' if DEFAULTS[name] == 'torch' else 'torch'
  got = create(name, SHAPE, 10)
  assert got == create(name, SHAPE, 10, init=DEFAULTS[name])
  assert got != create(name, SHAPE, 10, init=another)


def standard_deviation(init, shape):
  """Standard deviation of kernels [..., I, O], by the scheme's definition."""
  fan_in, fan_out = (math.prod(shape) // n for n in (shape[-1], shape[-2]))
  return dict(
      torch=math.sqrt(1 / (3 * fan_in)),
      he_fan_out=math.sqrt(2 / fan_out),
      he_fan_in=math.sqrt(2 / fan_in),
      lecun=math.sqrt(1 / fan_in),
      glorot=math.sqrt(2 / (fan_in + fan_out)),
      # A normal of deviation 0.02, truncated at two deviations.
      truncated=0.02 * 0.8796,
  )[init]


@pytest.mark.parametrize('init', layers.INITS)
def test_a_scheme_draws_every_hidden_layer(init):
  # With a bias: a convolution, dense layers, attention.
  for name, block in (
      ('fedhe_cnn5', 'unit2'), ('mlp', 'layer1'), ('vit_t16', 'encoder00')
  ):  # fmt: skip
    for path, leaf in drawn(name, {block}, init=init).items():
      if path.endswith('kernel'):
        want = standard_deviation(init, leaf.shape)
        np.testing.assert_allclose(leaf.std(), want, rtol=0.1, err_msg=path)
      elif path.endswith('bias') and 'norm' not in path:
        assert np.any(leaf) == (init == 'torch'), path


def test_preresnet_starts_as_pytorch_does_with_a_bias_of_zero():
  """He normal by fan-out, the former default, draws sqrt(6) larger kernels."""
  leaves = drawn('preresnet20', {'stem', 'stage2_block0', 'head'})
  for path, leaf in leaves.items():
    if path.endswith('kernel'):
      bound = 1 / math.sqrt(math.prod(leaf.shape[:-1]))
      assert 0.9 * bound < np.abs(leaf).max() <= bound, path
  np.testing.assert_array_equal(leaves['head/bias'], 0)


def test_conv_biases_of_fedins_nets_follow_the_fan_in():
  leaf = drawn('fedin_e', {'stage3_block0'})['stage3_block0/conv1/bias']
  fan_in = 256  # Stage 2's channels, 1x1.
  assert 0.8 / math.sqrt(fan_in) < np.abs(leaf).max() <= 1 / math.sqrt(fan_in)


def test_an_unknown_scheme_is_refused():
  for name in DEFAULTS:
    with pytest.raises(ValueError, match="Unknown init 'kaiming'"):
      create(name, SHAPE, 10, init='kaiming')


@pytest.mark.parametrize('preact', [True, False])
def test_the_shortcut_takes_u_or_x(preact):
  """With zero kernels a block is relu(norm(x)), or x itself."""
  block = PreactBlock(4, norm='none', preact=preact)
  x = jax.random.normal(jax.random.key(0), (2, 8, 8, 4))
  variables = jax.tree.map(jnp.zeros_like, block.init(jax.random.key(1), x))
  want = nn.relu(x) if preact else x
  np.testing.assert_array_equal(block.apply(variables, x), want)


def test_a_head_without_relu_lets_negative_features_through():
  x = jax.random.normal(jax.random.key(1), (8, 8, 8, 1))
  outputs = []
  for relu in (True, False):
    model = create('preresnet20', (8, 8, 1), 3, num_blocks=1, head_relu=relu)
    variables = model.init(jax.random.key(0))
    pool = len(model.blocks) - 1
    outputs.append(model.apply(variables, x, stop=pool)[0])
  assert outputs[0].min() >= 0 > outputs[1].min()
