"""Products of operands rounded to bfloat16, in layers and whole models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.kernels.conv import conv
from fedjax_het.kernels.matmul_dtype import matmul, using_matmul_dtype
from fedjax_het.models import create


def draw(shape, seed):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), 'float32')


def rounded(x):
  """Rounds to the eight bits of bfloat16: to nearest, ties to even."""
  bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
  bits = bits + 0x7FFF + ((bits >> 16) & 1)
  return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


def value_and_gradients(fn, x, w, dy, matmul_dtype):
  with using_matmul_dtype(matmul_dtype):
    y, vjp = jax.vjp(fn, x, w)
    return y, *vjp(dy)


def test_a_matrix_product_and_its_gradients_round_operands_alone():
  x, w, dy = draw((2, 3, 40), 0), draw((40, 7), 1), draw((2, 3, 7), 2)
  y, d_x, d_w = value_and_gradients(jax.jit(matmul), x, w, dy, 'bfloat16')
  x, w, dy = map(rounded, (x, w, dy))
  for got, want in (
      (y, x @ w),
      (d_x, dy @ w.T),
      (d_w, np.einsum('abi,abj->ij', x, dy)),
  ):
    assert got.dtype == jnp.float32
    # Products of two such numbers are exact in float32; sums are not.
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('way', [
  'gemm', 'cropped', ('strips', 'gemm', 'strips')
])
@pytest.mark.parametrize('stride', [1, 2])
def test_a_convolution_of_products_rounds_operands_alone(way, stride):
  x, w = draw((2, 8, 8, 3), 0), draw((3, 3, 3, 5), 1)
  dy = draw((2, 8 // stride, 8 // stride, 5), 2)

  def run(x, w, lowering=way):
    padding = ((1, 1), (1, 1))
    return conv(x, w, (stride, stride), padding, lowering=lowering)

  got = value_and_gradients(jax.jit(run), x, w, dy, 'bfloat16')
  exact = map(jnp.asarray, map(rounded, (x, w, dy)))
  want = value_and_gradients(
      lambda x, w: run(x, w, 'gemm'), *exact, 'float32'
  )
  for a, b in zip(got, want):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  plain = value_and_gradients(run, x, w, dy, 'float32')
  assert all(np.any(np.abs(a - b) > 1e-4) for a, b in zip(got, plain))


@pytest.mark.parametrize('way', ['native', ('strips', 'native', 'rows')])
def test_on_a_cpu_other_convolutions_stay_as_they_are(way, monkeypatch):
  x, w, dy = draw((2, 8, 8, 3), 0), draw((3, 3, 3, 5), 1), draw((2, 8, 8, 5), 2)

  def run(x, w):
    return conv(x, w, lowering=way)

  got = value_and_gradients(run, x, w, dy, 'bfloat16')
  want = value_and_gradients(run, x, w, dy, 'float32')
  assert all(np.all(a == b) for a, b in zip(got, want))
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  got = value_and_gradients(run, x, w, dy, 'bfloat16')
  want = value_and_gradients(
      run, *map(jnp.asarray, map(rounded, (x, w, dy))), 'float32'
  )
  for a, b in zip(got, want):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    'name,options',
    [
        ('mlp', {}),
        ('mini_resnet6', dict(norm='group', width=0.25)),
        ('mini_vit4', {}),
    ],
)
def test_a_model_keeps_float32_and_is_near_to_itself(name, options):
  plain, narrow = (
      create(name, (8, 8, 1), 10, matmul_dtype=p, **options)
      for p in ('float32', 'bfloat16')
  )
  variables = plain.init(jax.random.key(0))
  x, labels = draw((16, 8, 8, 1), 3), jnp.arange(16) % 10

  def gradient(model):
    @jax.jit
    def run(params):
      logits, _ = model.apply(variables._replace(params=params), x, train=True)
      return CLASSIFICATION.loss(logits, labels)

    return jax.value_and_grad(run)(variables.params)

  (loss, grads), (want_loss, want) = gradient(narrow), gradient(plain)
  assert loss.dtype == jnp.float32 and loss != want_loss
  np.testing.assert_allclose(loss, want_loss, rtol=0.02)
  flat, want_flat = (
      jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])
      for tree in (grads, want)
  )
  assert flat.dtype == jnp.float32
  error = jnp.linalg.norm(flat - want_flat) / jnp.linalg.norm(want_flat)
  assert 0 < error < 0.1


def test_an_unknown_type_is_refused():
  with pytest.raises(ValueError, match='matmul_dtype'):
    create('mlp', (8, 8, 1), 10, matmul_dtype='float8')
