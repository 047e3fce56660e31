import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.models import layers


@pytest.mark.parametrize(
    ('channels', 'width', 'want'),
    [
        (64, 1 / 6, 10),
        (64, 1 / 3, 21),
        (100, 0.29, 29),
        (3, 1 / 3, 1),
        (16, 0.01, 1),
        (16, 2, 32),
    ],
)
def test_scale_channels_rounds_down_but_never_to_zero(channels, width, want):
  assert layers.scale_channels(channels, width) == want


@pytest.mark.parametrize('width', [0, -1, float('nan'), float('inf'), 'x'])
def test_scale_channels_refuses(width):
  with pytest.raises(ValueError, match=f'^width must be .*, got {width!r}'):
    layers.scale_channels(64, width)


@pytest.mark.parametrize(
    ('ours', 'theirs'),
    [
        (
            layers.he_fan_out,
            nn.initializers.variance_scaling(2, 'fan_out', 'normal'),
        ),
        (
            layers.he_fan_in,
            nn.initializers.variance_scaling(2, 'fan_in', 'normal'),
        ),
        (layers.lecun_normal, nn.initializers.lecun_normal()),
        (layers.truncated_normal(0.3), nn.initializers.truncated_normal(0.3)),
        (
            layers.uniform_fan_in(72),
            nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform'),
        ),
        (
            layers.torch_uniform,
            nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform'),
        ),
        (layers.glorot_uniform, nn.initializers.glorot_uniform()),
    ],
)
def test_initialisers_have_the_distribution_of_flax(ours, theirs):
  shape = (3, 3, 8, 40)
  got = np.sort(ours(jax.random.key(0), shape).ravel())
  want = np.sort(theirs(jax.random.key(1), shape).ravel())
  # The error of a quantile of 2880 draws is below 0.1 deviations.
  quantiles = np.linspace(0.05, 0.95, 19)
  np.testing.assert_allclose(
      np.quantile(got, quantiles),
      np.quantile(want, quantiles),
      atol=0.15 * want.std(),
  )
  np.testing.assert_allclose(got.std(), want.std(), rtol=0.05)
  np.testing.assert_allclose(got[-1], want[-1], rtol=0.25)


def test_strided_convolution_is_padded_as_in_pytorch():
  # A kernel that is 1 in its centre picks the even pixels; with 'SAME' it
  # would pick the odd ones.
  x = jax.random.normal(jax.random.key(0), (1, 8, 8, 1))
  for kernel in (1, 3, 7):
    module = layers.conv_layer(
        1, kernel, 'conv', inputs=1, init='torch', stride=2
    )
    weight = jnp.zeros((kernel, kernel, 1, 1))
    weight = weight.at[kernel // 2, kernel // 2].set(1)
    y = module.apply({'params': {'kernel': weight}}, x)
    np.testing.assert_allclose(y, x[:, ::2, ::2], rtol=1e-6)


def test_subsample_and_pad():
  x = jax.random.normal(jax.random.key(0), (2, 5, 4, 3))
  y = layers.subsample_and_pad(x, 6, 2)
  assert y.shape == (2, 3, 2, 6)
  np.testing.assert_array_equal(y[..., 1:4], x[:, ::2, ::2])
  np.testing.assert_array_equal(y[..., :1], 0)
  np.testing.assert_array_equal(y[..., 4:], 0)


def test_linear_is_affine_and_starts_like_pytorch():
  x = jax.random.normal(jax.random.key(0), (5, 16))
  module = layers.Linear(300)
  params = module.init(jax.random.key(1), x)['params']
  for leaf in params.values():
    assert 0.23 < np.abs(leaf).max() <= 0.25
    assert leaf.min() < 0 < leaf.max()
  np.testing.assert_allclose(
      module.apply({'params': params}, x),
      np.asarray(x) @ np.asarray(params['kernel']) + np.asarray(params['bias']),
      rtol=1e-5,
      atol=1e-5,
  )
