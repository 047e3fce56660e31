"""Intercepted norms, however a module passes their arguments."""

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.engine.static_norm import check_static
from fedjax_het.models import BlockModel, layers
from fedjax_het.models.intercept import (
  batch_moments_as_stats,
  keeps_moments_of_batches,
  scaled_norm_inputs,
)
from fedjax_het.models.norm import norm_layer

X = jnp.array([[1.0, 3], [5, 4], [9, 9]])
CALLS = {
    'by position': lambda norm, x, train, mask: norm(x, train, mask),
    'one keyword': lambda norm, x, train, mask: norm(x, train, mask=mask),
    'keywords': lambda norm, x, train, mask: norm(mask=mask, train=train, x=x),
    'no mask': lambda norm, x, train, mask: norm(x[:2], train),
}


class Net(nn.Module):
  """A norm that is called in one of these ways."""

  call: str
  norm: str = 'batch'

  @nn.compact
  def __call__(self, x, train, mask):
    return CALLS[self.call](norm_layer(self.norm, 'norm'), x, train, mask)


@pytest.mark.parametrize('call', CALLS)
def test_moments_become_statistics(call):
  """Of 1, 5 and 3, 4; the third example is masked, or left out."""
  net, mask = Net(call), jnp.array([True, True, False])
  variables = net.init(jax.random.key(0), X, True, mask)
  with batch_moments_as_stats():
    _, got = net.apply(variables, X, True, mask, mutable=['batch_stats'])
  np.testing.assert_allclose(got['batch_stats']['norm']['mean'], [3, 3.5])
  np.testing.assert_allclose(got['batch_stats']['norm']['var'], [8, 0.5])


class Flax(nn.Module):
  """Flax's own norm, without the mask."""

  axis: int = -1

  @nn.compact
  def __call__(self, x, train, mask):
    return nn.BatchNorm(not train, name='norm', axis=self.axis)(x)


def test_moments_become_the_statistics_of_flax_s_own_norm():
  net, mask = Flax(), jnp.array([True, True, False])
  variables = net.init(jax.random.key(0), X, True, mask)
  with batch_moments_as_stats(mask):
    _, got = net.apply(variables, X, True, mask, mutable=['batch_stats'])
  np.testing.assert_allclose(got['batch_stats']['norm']['mean'], [3, 3.5])
  np.testing.assert_allclose(got['batch_stats']['norm']['var'], [8, 0.5])


class NnxNorm(nnx.Module):
  """A norm of nnx, which cannot be intercepted."""

  def __init__(self, rngs):
    self.norm = nnx.BatchNorm(2, rngs=rngs)

  def __call__(self, x, train, mask):
    return self.norm(x, use_running_average=not train)


@pytest.mark.parametrize(
    ('module', 'known'),
    [
        (Net('by position'), True),
        (Net('by position', 'batch_only'), True),
        (Flax(), True),
        (Flax(axis=1), False),
        (nnx.bridge.to_linen(NnxNorm), False),
    ],
)
def test_static_statistics_are_those_of_known_norms(module, known):
  model = BlockModel.from_module(module, (2, 2), 3, name='net')
  assert keeps_moments_of_batches(model) == known
  if not known:
    with pytest.raises(ValueError, match="'net' keeps statistics of other"):
      check_static(model)


@pytest.mark.parametrize('call', CALLS)
def test_inputs_are_scaled(call):
  net = Net(call, 'none')
  with scaled_norm_inputs(4):
    got = net.apply({}, X, True, None)
  np.testing.assert_array_equal(got, 4 * X[: len(got)])


def test_dropout_is_disabled():
  own = layers.Dropout(0.5, deterministic=False)
  layer = nn.Dropout(0.5)
  with batch_moments_as_stats():
    for got in (
        layer.apply({}, X, False),
        layer.apply({}, deterministic=False, inputs=X),
        own.apply({}, X),
        own.apply({}, x=X),
    ):
      np.testing.assert_array_equal(got, X)
