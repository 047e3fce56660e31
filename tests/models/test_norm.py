import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.models.norm import (
    POLICIES,
    BatchNorm,
    GroupNorm,
    batch_moments,
    norm_layer,
)

MASK = jnp.array([True, False, True, True])


def images(channels=6, shape=(4, 3, 5), seed=0):
  key = jax.random.key(seed)
  return 2 * jax.random.normal(key, (*shape, channels)) + 1


def init(module, x):
  """Variables with random scale, shift and running statistics."""
  variables = module.init(jax.random.key(0), x, False, None)
  leaves, tree = jax.tree.flatten(variables)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  leaves = [
      jax.random.uniform(key, leaf.shape, minval=0.5, maxval=1.5)
      for key, leaf in zip(keys, leaves, strict=True)
  ]
  return jax.tree.unflatten(tree, leaves)


@pytest.mark.parametrize('shape', [(4,), (4, 3, 5)])
def test_moments_are_those_of_the_examples_that_count(shape):
  x = images(shape=shape)
  mean, var = batch_moments(x, MASK)
  real = np.asarray(x, np.float64)[np.array(MASK)].reshape(-1, 6)
  np.testing.assert_allclose(mean, real.mean(0), rtol=1e-5)
  np.testing.assert_allclose(var, real.var(0), rtol=1e-5)


def test_variance_survives_a_large_mean():
  # E[x^2] - E[x]^2 has an absolute error of 1e8 * 6e-8 here.
  x = 1e4 + jax.random.normal(jax.random.key(0), (64, 8, 8, 3))
  for mask in (None, jnp.arange(64) < 60):
    _, var = batch_moments(x, mask)
    keep = slice(0, 64 if mask is None else 60)
    exact = np.asarray(x, np.float64)[keep].reshape(-1, 3).var(0)
    np.testing.assert_allclose(var, exact, rtol=1e-4)


@pytest.mark.parametrize('mask', [None, MASK])
def test_batch_norm_equals_flax(mask):
  x = images()
  ours, theirs = BatchNorm(), nn.BatchNorm(momentum=0.9, epsilon=1e-5)
  variables = init(ours, x)
  wide = None if mask is None else mask[:, None, None, None]
  pick = jax.random.normal(jax.random.key(2), x.shape)

  def value(apply, params, x):
    tree = {**variables, 'params': params}
    y, new = apply(tree, x)
    return jnp.sum(pick * y), new['batch_stats']

  def run(apply):
    grad = jax.value_and_grad(value, argnums=(1, 2), has_aux=True)
    return jax.jit(grad, static_argnums=0)(apply, variables['params'], x)

  got = run(lambda v, x: ours.apply(v, x, True, mask, mutable='batch_stats'))
  want = run(
      lambda v, x: theirs.apply(
          v, x, use_running_average=False, mask=wide, mutable='batch_stats'
      )
  )
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5),
      got,
      want,
  )


def test_test_mode_uses_the_running_statistics():
  x = images()
  variables = init(BatchNorm(), x)
  y = BatchNorm().apply(variables, x, False, None)
  params, stats = variables['params'], variables['batch_stats']
  want = (x - stats['mean'][None, None, None]) / jnp.sqrt(
      stats['var'] + 1e-5
  )[None, None, None]
  want = want * params['scale'][None, None, None]
  want = want + params['bias'][None, None, None]
  np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)


def test_a_batch_of_masked_examples_changes_nothing_and_is_finite():
  x = images()
  variables = init(BatchNorm(), x)
  none = jnp.zeros(4, bool)

  def loss(params):
    y, new = BatchNorm().apply(
        {**variables, 'params': params}, x, True, none, mutable='batch_stats'
    )
    return jnp.sum(jnp.where(none[:, None, None, None], y, 0)), (y, new)

  grads, (y, new) = jax.grad(loss, has_aux=True)(variables['params'])
  assert np.isfinite(y).all()
  jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), grads)
  jax.tree.map(
      np.testing.assert_array_equal,
      new['batch_stats'],
      variables['batch_stats'],
  )


def test_masked_examples_may_hold_anything():
  x = images()
  poisoned = x.at[1].set(jnp.nan)
  variables = init(BatchNorm(), x)

  def run(x):
    return BatchNorm().apply(variables, x, True, MASK, mutable='batch_stats')

  (y, stats), (z, other) = run(x), run(poisoned)
  np.testing.assert_array_equal(y[MASK], z[MASK])
  jax.tree.map(np.testing.assert_array_equal, stats, other)


def test_a_part_of_masked_examples_leaves_deep_gradients_finite():
  """Each of 30 layers would divide the gradient by sqrt(eps) = 0.003."""
  x = jnp.concatenate([images(), jnp.zeros_like(images())])
  mask = jnp.stack([MASK, jnp.zeros(4, bool)])
  norm = BatchNorm()
  variables = init(norm, x)

  def loss(params):
    def layer(y, _):
      tree = {**variables, 'params': params}
      return norm.apply(tree, y, True, mask, mutable='batch_stats')[0], None

    y, _ = jax.lax.scan(layer, x, None, length=30)
    return jnp.sum(jnp.square(jnp.where(mask.reshape(8, 1, 1, 1), y, 0)))

  grads = jax.jit(jax.grad(loss))(variables['params'])
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
  mean, var = batch_moments(x, mask)
  np.testing.assert_array_equal(mean[1], 0)
  np.testing.assert_array_equal(var[1], 1)
  np.testing.assert_array_equal(mean[0], batch_moments(x[:4], MASK)[0])


@pytest.mark.parametrize('policy', POLICIES)
def test_parts_of_a_batch_are_normalised_apart(policy):
  """Each as in its own call; running statistics follow the first part."""
  x = jnp.concatenate([images(), 3 * images(seed=1) - 2])
  masks = jnp.stack([MASK, ~MASK])
  module = norm_layer(policy, 'norm')
  variables = init(module, x)

  def run(x, mask):
    return module.apply(variables, x, True, mask, mutable='batch_stats')

  y, stats = run(x, masks)
  first, want = run(x[:4], masks[0])
  second, _ = run(x[4:], masks[1])
  np.testing.assert_allclose(
      y, jnp.concatenate([first, second]), rtol=1e-5, atol=1e-6
  )
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), stats, want
  )
  if policy == 'batch':  # An empty first part has no effect.
    _, stats = run(x, jnp.stack([jnp.zeros(4, bool), MASK]))
    jax.tree.map(
        np.testing.assert_array_equal,
        stats['batch_stats'],
        variables['batch_stats'],
    )


def test_batch_only_has_no_statistics_and_one_mode():
  x = images()
  module = norm_layer('batch_only', 'norm')
  variables = module.init(jax.random.key(0), x, False, None)
  assert set(variables) == {'params'}
  test = module.apply(variables, x, False, MASK)
  np.testing.assert_array_equal(test, module.apply(variables, x, True, MASK))
  mean, var = batch_moments(test, MASK)
  np.testing.assert_allclose(mean, 0, atol=1e-6)
  np.testing.assert_allclose(var, 1, rtol=1e-4)


@pytest.mark.parametrize(
    ('channels', 'groups'), [(5, 1), (8, 4), (10, 2), (21, 3)]
)
def test_group_norm_takes_the_largest_divisor(channels, groups):
  x = images(channels)
  variables = init(GroupNorm(), x)
  theirs = nn.GroupNorm(groups, epsilon=1e-5, use_fast_variance=False)
  np.testing.assert_allclose(
      GroupNorm().apply(variables, x, True, MASK),
      theirs.apply(variables, x),
      rtol=1e-4,
      atol=1e-5,
  )


def test_leaf_names_do_not_depend_on_the_policy():
  x = images()
  for policy in POLICIES:
    module = norm_layer(policy, 'norm')
    variables = module.init(jax.random.key(0), x, False, None)
    want = set() if policy == 'none' else {'scale', 'bias'}
    assert set(variables.get('params', {})) == want
    assert set(variables.get('batch_stats', {})) == (
        {'mean', 'var'} if policy == 'batch' else set()
    )


def test_none_is_the_identity():
  x = images()
  y = norm_layer('none', 'norm').apply({}, x, True, MASK)
  np.testing.assert_array_equal(x, y)


def test_unknown_policy_is_refused():
  with pytest.raises(ValueError, match=r"'local'.*batch_only"):
    norm_layer('local', 'norm')
