"""Checks the FedIN projection against closed forms and a separate solver."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import optimize

from fedjax_het.engine import projection

project = projection.project_gradient


def draw_pair(seed, shapes=((3, 2), (4,), ()), dtype=jnp.float32):
  """Two random trees over `shapes`."""
  rng = np.random.default_rng(seed)

  def tree():
    return {
        f'leaf{i}': jnp.asarray(rng.normal(size=shape), dtype)
        for i, shape in enumerate(shapes)
    }

  return tree(), tree()


def flat(tree):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def solve_quadratic_program(g_in, g_local):
  """min ||g_in - z||^2 with <z, g_local> >= 0, by sequential programming."""
  g_in, g_local = np.asarray(g_in, float), np.asarray(g_local, float)
  result = optimize.minimize(
      lambda z: np.sum((g_in - z) ** 2),
      np.zeros_like(g_in),
      jac=lambda z: 2 * (z - g_in),
      constraints={
          'type': 'ineq',
          'fun': lambda z: z @ g_local,
          'jac': lambda z: g_local,
      },
      method='SLSQP',
      options={'ftol': 1e-14, 'maxiter': 500},
  )
  assert result.success, result.message
  return result.x


def maximise_dual(g_in, g_local):
  """The multiplier lam* of the dual -(lam^2 / 4) a - lam b, by bisection."""
  a, b = g_local @ g_local, g_local @ g_in

  def slope(lam):
    return -lam / 2 * a - b

  low, high = 0.0, 4 * abs(b) / a + 1
  if slope(low) <= 0:
    return 0.0
  return optimize.bisect(slope, low, high, xtol=1e-13)


@pytest.mark.parametrize(
    'options, want',
    [
        (dict(rule='exact'), [0.0, 1.0]),
        (dict(rule='fixed', lam=2), [0.0, 1.0]),
        (dict(rule='fixed', lam=1), [-0.5, 1.0]),
    ],
)
def test_opposed_gradients(options, want):
  g_local, g_in = jnp.array([1.0, 0.0]), jnp.array([-1.0, 1.0])
  np.testing.assert_allclose(project(g_in, g_local, **options), want, atol=1e-7)


def test_agreeing_gradients():
  g_local, g_in = jnp.array([1.0, 2.0]), jnp.array([-3.0, 4.0])
  np.testing.assert_array_equal(project(g_in, g_local), g_in)
  fixed = project(g_in, g_local, rule='fixed', lam=2.0)
  np.testing.assert_allclose(fixed, [-2.0, 6.0])


def test_scope_decides_over_what_the_inner_product_runs():
  g_local = (jnp.array([1.0]), jnp.array([3.0]))
  g_in = (jnp.array([-2.0]), jnp.array([1.0]))
  per_leaf = project(g_in, g_local, scope='leaf')
  np.testing.assert_allclose(flat(per_leaf), [0.0, 1.0], atol=1e-7)
  whole = project(g_in, g_local, scope='tree')
  np.testing.assert_array_equal(flat(whole), [-2.0, 1.0])


@pytest.mark.parametrize('scope', ['leaf', 'tree'])
@pytest.mark.parametrize('rule', ['exact', 'fixed'])
def test_zero_local_gradient_leaves_g_in(rule, scope):
  g_in, g_local = draw_pair(0)
  g_local = jax.tree.map(jnp.zeros_like, g_local)
  got = project(g_in, g_local, rule=rule, scope=scope)
  np.testing.assert_array_equal(flat(got), flat(g_in))


def test_combination_is_the_gradient_of_the_summed_losses():
  def local_loss(w):
    return jnp.sum(jnp.sin(w) * w)

  def in_loss(w):
    return jnp.mean((w - 2.0) ** 2)

  w = jnp.arange(5.0)
  g_in, g_local = jax.grad(in_loss)(w), jax.grad(local_loss)(w)
  for lam in (1.0, 2.0):
    joint = jax.grad(lambda w, c=lam / 2: c * local_loss(w) + in_loss(w))(w)
    got = project(g_in, g_local, rule='fixed', lam=lam)
    np.testing.assert_allclose(got, joint, rtol=1e-6)


@pytest.mark.parametrize('seed', range(8))
def test_exact_solves_the_quadratic_program(seed):
  g_in, g_local = draw_pair(seed)
  whole = project(g_in, g_local, scope='tree')
  np.testing.assert_allclose(
      flat(whole), solve_quadratic_program(flat(g_in), flat(g_local)), atol=2e-6
  )
  per_leaf = project(g_in, g_local, scope='leaf')
  for name in g_in:
    x, y = np.ravel(g_in[name]), np.ravel(g_local[name])
    got = np.ravel(per_leaf[name])
    np.testing.assert_allclose(got, solve_quadratic_program(x, y), atol=2e-6)
    best = x + maximise_dual(x, y) / 2 * y
    np.testing.assert_allclose(got, best, atol=2e-6)


@pytest.mark.parametrize('scope', ['leaf', 'tree'])
def test_exact_is_feasible_and_idempotent(scope):
  for seed in range(20):
    g_in, g_local = draw_pair(seed)
    once = project(g_in, g_local, scope=scope)
    dots = jax.tree.map(lambda z, y: float(jnp.sum(z * y)), once, g_local)
    dots = list(dots.values())
    assert min(dots if scope == 'leaf' else [sum(dots)]) >= -1e-5
    twice = project(once, g_local, scope=scope)
    np.testing.assert_allclose(flat(twice), flat(once), atol=1e-6)


def test_fixed_is_infeasible_exactly_below_the_dual_solution():
  for seed in range(20):
    g_in, g_local = draw_pair(seed, shapes=((6,),))
    x, y = flat(g_in), flat(g_local)
    bound = -2 * (x @ y) / (y @ y)
    for lam in (0.5, 1.0, 2.0):
      z = flat(project(g_in, g_local, rule='fixed', lam=lam))
      assert (z @ y < 0) == (lam < bound)


def test_exact_does_not_depend_on_the_length_of_the_local_gradient():
  g_local, g_in = jnp.array([1.0, 0.0]), jnp.array([-1.0, 1.0])
  for length in (1e-25, 1e25):  # Their squares are out of float32's range.
    got = project(g_in, length * g_local)
    np.testing.assert_allclose(got, [0.0, 1.0], atol=1e-6)


def test_bfloat16_keeps_its_dtype_and_sums_in_float32():
  # 4,096 ones and one -1: b = -4,095 needs more than bfloat16's eight bits,
  # and so would a running sum of the squares, which stops at 256.
  g_local = jnp.ones(4097, jnp.bfloat16)
  g_in = jnp.full(4097, -1.0, jnp.bfloat16).at[0].set(1.0)
  got = project(g_in, g_local)
  assert got.dtype == jnp.bfloat16
  want = np.asarray(g_in, np.float32) + 4095 / 4097
  np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=1e-2)


def test_a_mixed_pair_of_dtypes_returns_the_dtype_of_g_in():
  g_in, g_local = jnp.array([-1.0, 1.0], jnp.float16), jnp.array([1.0, 0.0])
  assert project(g_in, g_local).dtype == jnp.float16
  assert project(g_in, g_local, rule='fixed').dtype == jnp.float16


def test_a_nan_is_not_swallowed():
  g_in, g_local = jnp.ones(2), jnp.array([jnp.nan, 1.0])
  assert jnp.isnan(project(g_in, g_local)).any()


@pytest.mark.parametrize('rule', ['exact', 'fixed'])
@pytest.mark.parametrize('scope', ['leaf', 'tree'])
def test_vmap_and_jit_agree_with_a_loop(rule, scope):
  pairs = [draw_pair(seed) for seed in range(4)]
  stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *pairs)
  lams = jnp.array([0.5, 1.0, 2.0, 4.0])

  @jax.jit
  def combine(pair, lam):
    return project(*pair, rule=rule, lam=lam, scope=scope)

  got = jax.vmap(combine)(stacked, lams)
  for i, pair in enumerate(pairs):
    want = project(*pair, rule=rule, lam=float(lams[i]), scope=scope)
    one = jax.tree.map(lambda x, i=i: x[i], got)
    np.testing.assert_allclose(flat(one), flat(want), atol=1e-6)


def test_an_empty_tree_stays_empty():
  assert project({}, {}, scope='tree') == {}
  assert project({'a': None}, {'a': None}) == {'a': None}


@pytest.mark.parametrize(
    'g_in, g_local, message',
    [
        ({'a': 1.0}, {'b': 1.0}, r"leaf \['a'\] is in only one"),
        ([1.0], (1.0,), 'containers'),
        ({'a': np.ones(2)}, {'a': np.ones(3)}, r"\['a'\]: \(2,\) and \(3,\)"),
        (np.ones((2, 1)), np.ones(2), 'root'),
    ],
)
def test_mismatching_trees_are_refused(g_in, g_local, message):
  with pytest.raises(ValueError, match=message) as error:
    project(g_in, g_local)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(rule='exakt'), "Unknown rule 'exakt'; did you mean 'exact'"),
        (dict(scope='layer'), "Unknown scope 'layer'.* leaf, tree"),
        (dict(rule='fixed', lam=-1.0), 'lam must be at least 0, got -1.0'),
        (dict(rule='fixed', lam=float('nan')), 'finite number'),
        (dict(rule='fixed', lam=np.ones(2)), r'scalar, but has shape \(2,\)'),
    ],
)
def test_unknown_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    project(jnp.ones(2), jnp.ones(2), **options)
  with pytest.raises(ValueError, match=message):
    projection.gradient_divergence_projection(**options)


def test_optax_chain_steps_with_the_projected_gradient():
  params, _ = draw_pair(0)
  g_in, g_local = draw_pair(1)
  tx = optax.chain(
      projection.gradient_divergence_projection(rule='fixed', lam=2.0),
      optax.adam(1e-2),
  )
  adam = optax.adam(1e-2)
  state, plain = tx.init(params), adam.init(params)
  for _ in range(2):
    got, state = jax.jit(tx.update)(g_in, state, params, local_grads=g_local)
    z = project(g_in, g_local, rule='fixed', lam=2.0)
    want, plain = adam.update(z, plain, params)
    np.testing.assert_allclose(flat(got), flat(want), rtol=1e-5)


def test_optax_mask_projects_the_intermediate_layers_only():
  grads = {'stem': jnp.array([-5.0]), 'in': jnp.array([-1.0, 1.0])}
  local = {'stem': jnp.array([7.0]), 'in': jnp.array([1.0, 0.0])}
  tx = optax.masked(
      projection.gradient_divergence_projection(),
      {'stem': False, 'in': True},
      mask_compatible_extra_args=True,
  )
  got, _ = tx.update(grads, tx.init(grads), local_grads=local)
  np.testing.assert_array_equal(got['stem'], [-5.0])
  np.testing.assert_allclose(got['in'], [0.0, 1.0], atol=1e-7)


def test_optax_update_asks_for_the_local_gradients():
  tx = projection.gradient_divergence_projection()
  with pytest.raises(ValueError, match='local_grads=g_local'):
    tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))
