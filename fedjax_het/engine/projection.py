"""FedIN's gradient divergence projection, also as an optax transformation.

FedIN trains the intermediate layers with two gradients: G_in, of the loss on
other clients' features, and G_local, of the client's own loss. It uses the
gradient closest to G_in with a nonnegative inner product with G_local,

    min_Z ||G_in - Z||_F^2   subject to   <Z, G_local> >= 0.

With a = <G_local, G_local> and b = <G_local, G_in>, the dual problem
max_{lam >= 0} -(lam^2 / 4) a - lam b has lam* = max(0, -2 b / a), and
Z = G_in + (lam / 2) G_local for that lam.
"""

import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.names import check_name
from fedjax_het.options import not_negative


def project_gradient(
    g_in: Any,
    g_local: Any,
    *,
    rule: str = 'exact',
    lam: float | jax.Array = 1.0,
    scope: str = 'leaf',
) -> Any:
  """Combines the gradients of the IN loss and of the local loss.

  The rule 'exact' solves the problem: Z = G_in if <G_in, G_local> >= 0, else
  G_in - (b / a) G_local (v1 Eq. 15, v2 Eq. 12). The papers'
  experiments use the rule 'fixed': Z = G_in + (lam / 2) G_local with a constant
  lam (v1 Eq. 16 with lam = 2, v2 Eq. 13 with lam = 1). The fixed Z violates the
  constraint exactly if lam < -2 b / a, and differs from G_in even if the two
  gradients agree.

  A pure, jitted function; it can be called inside `jit`, `vmap` or `scan`.

  Args:
    g_in: Pytree of gradients of the IN loss, floating leaves of any shape.
      A list or tuple is a pytree, not an array.
    g_local: Pytree of gradients of the local loss; same tree and shapes.
    rule: 'exact' or 'fixed'.
    lam: Scalar, finite and >= 0, may be traced; used by 'fixed' only.
    scope: Scope of the inner products of 'exact': 'leaf' has one constraint
      per leaf (the papers' "each gradient matrix"), 'tree' has one constraint
      on all leaves. Not used by 'fixed'.

  Returns:
    Z, with the tree, shapes and dtypes of `g_in` (integer leaves become
    float32). Sums of products are in float32, or float64 for float64 leaves.
    G_local = 0 gives Z = G_in. NaNs in either gradient propagate to Z.

  Raises:
    ValueError: If the trees or shapes differ, or `rule`, `scope` or `lam` is
      not one of the above.

  Example:
    >>> project_gradient(jnp.array([-1., 1.]), jnp.array([1., 0.]))
    Array([0., 1.], dtype=float32)

  References:
    Chan et al., `FedIN <https://arxiv.org/abs/2304.00759>`_, 2023 (v1), and
    the later journal version of the same title (v2).
  """
  _check_options(rule, lam, scope)
  _check_same_shapes(g_in, g_local)
  return _project(g_in, g_local, lam, rule=rule, scope=scope)


def gradient_divergence_projection(
    *,
    rule: str = 'exact',
    lam: float | jax.Array = 1.0,
    scope: str = 'leaf',
) -> optax.GradientTransformationExtraArgs:
  """`project_gradient` as an optax transformation.

  The input updates are the gradients of the IN loss; the local gradients are
  the extra argument `local_grads`. Put it first in a chain, so that the
  optimizer receives Z:

      tx = optax.chain(
          gradient_divergence_projection(rule='fixed', lam=1.0),
          optax.adam(1e-3),
      )
      updates, state = tx.update(g_in, state, params, local_grads=g_local)

  If only some leaves are intermediate layers, pass the local gradients of the
  other leaves as updates and mask those leaves:

      optax.masked(
          gradient_divergence_projection(), mask,
          mask_compatible_extra_args=True,
      )

  Args:
    rule: See `project_gradient`.
    lam: See `project_gradient`.
    scope: See `project_gradient`.

  Returns:
    A stateless transformation. Its `update` raises ValueError if `local_grads`
    is missing or differs from the updates in structure or shapes.
  """
  _check_options(rule, lam, scope)

  def update_fn(updates, state, params=None, *, local_grads=None, **extra_args):
    del params, extra_args
    if local_grads is None:
      raise ValueError(
          'gradient_divergence_projection needs the local gradients: call '
          'update(g_in, state, params, local_grads=g_local).'
      )
    projected = project_gradient(
        updates, local_grads, rule=rule, lam=lam, scope=scope
    )
    return projected, state

  return optax.GradientTransformationExtraArgs(
      lambda params: optax.EmptyState(), update_fn
  )


@functools.partial(jax.jit, static_argnames=('rule', 'scope'))
def _project(g_in, g_local, lam, *, rule, scope):
  treedef = jax.tree.structure(g_in)
  g_in = [jnp.asarray(g) for g in jax.tree.leaves(g_in)]
  g_local = [jnp.asarray(g) for g in jax.tree.leaves(g_local)]
  wide = [
      (_widen(x, x, y), _widen(y, x, y))
      for x, y in zip(g_in, g_local, strict=True)
  ]
  combined = _RULES[rule](wide, lam, scope)
  return treedef.unflatten(
      z.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else z
      for z, x in zip(combined, g_in, strict=True)
  )


def _exact(pairs, lam, scope):
  del lam
  groups = [[pair] for pair in pairs] if scope == 'leaf' else [pairs]
  return [z for group in groups if group for z in _project_half_space(group)]


def _fixed(pairs, lam, scope):
  del scope
  # Z = G_in + (lam / 2) G_local.
  return [x + (jnp.asarray(lam) / 2).astype(y.dtype) * y for x, y in pairs]


_RULES = {'exact': _exact, 'fixed': _fixed}
_SCOPES = ('leaf', 'tree')


def _project_half_space(pairs):
  """Projects the first of each pair, with one constraint over all pairs."""
  # Z is invariant to the scale of G_local. Dividing by its largest entry
  # prevents underflow of `a` near convergence, and overflow.
  largest = functools.reduce(
      jnp.maximum, [jnp.max(jnp.abs(y), initial=0) for _, y in pairs]
  )
  largest = jnp.where(largest > 0, largest, 1)
  pairs = [(x, y / largest.astype(y.dtype)) for x, y in pairs]
  # Not `vdot`, whose inputs a TPU rounds to bfloat16.
  # a = <G_local, G_local>, b = <G_local, G_in>.
  a = sum(jnp.sum(y * y) for _, y in pairs)
  b = sum(jnp.sum(x * y) for x, y in pairs)
  # Z = G_in + (lam / 2) G_local with lam = max(0, -2 b / a).
  half_lam = jnp.where(b >= 0, 0, -b / jnp.where(a > 0, a, 1))
  return [x + half_lam.astype(y.dtype) * y for x, y in pairs]


def _widen(value, *like):
  return value.astype(jnp.result_type(jnp.float32, *like))


def _check_options(rule, lam, scope):
  check_name('rule', rule, _RULES)
  check_name('scope', scope, _SCOPES)
  if jnp.shape(lam):
    raise ValueError(f'lam must be a scalar, but has shape {jnp.shape(lam)}.')
  if isinstance(lam, numbers.Real):
    not_negative(lam=lam)


def _check_same_shapes(g_in, g_local):
  if jax.tree.structure(g_in) != jax.tree.structure(g_local):
    names_in, names_local = _leaf_names(g_in), _leaf_names(g_local)
    odd = sorted(names_in ^ names_local)
    what = (
        f'leaf {odd[0] or "(the root)"} is in only one of them'
        if odd
        else 'their containers are of different types'
    )
    raise ValueError(f'g_in and g_local are different trees: {what}.')
  flat_in = jax.tree_util.tree_leaves_with_path(g_in)
  for (path, x), y in zip(flat_in, jax.tree.leaves(g_local), strict=True):
    if jnp.shape(x) != jnp.shape(y):
      raise ValueError(
          f'g_in and g_local differ in shape at leaf '
          f'{jax.tree_util.keystr(path) or "(the root)"}: '
          f'{jnp.shape(x)} and {jnp.shape(y)}.'
      )


def _leaf_names(tree):
  paths = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path) for path, _ in paths}
