"""FLOPs of a visit: the products of every pass, times loop iterations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.algorithms import fedavg, feddpa, fedprox
from fedjax_het.engine.client_flops import client_flops
from fedjax_het.models.flops import product_flops
from tests.tiny import tiny_data, tiny_federation, tiny_local

# In 2 epochs with batches of 4 the clients take 4, 2, 6 and 4 steps.
SIZES = (5, 3, 12, 8)
STEPS = dict(tiny1=(4 + 6) / 2, tiny3=(2 + 4) / 2)


def found(make, **options):
  local = dataclasses.replace(tiny_local(), batch_size=4, epochs=2)
  federation = tiny_federation((1, 3), norm=False, local=local)
  algorithm = make(federation, **options)
  return client_flops(algorithm, federation, tiny_data(SIZES))


def test_training_is_two_products_per_layer_and_a_third_behind_the_first():
  counts = found(fedavg)
  for name, depth in dict(tiny1=1, tiny3=3).items():
    stem, rest = 4 * 4, depth * 4 * 4 + 4 * 3
    assert counts[name] == STEPS[name] * 4 * 2 * (2 * stem + 3 * rest)


def test_methods_that_compute_more_cost_more():
  base = found(fedavg)
  assert found(fedprox) == base
  # Two phases a visit, and the Fisher information of each example.
  counts = found(feddpa)
  assert all(counts[name] > 2 * base[name] for name in base)


def test_what_the_server_computes_for_a_client_does_not_count():
  def with_products(federation):
    algorithm = fedavg(federation)

    def downlink(server, group, visit):
      sent = algorithm.downlink(server, group, visit)
      return jax.tree.map(lambda leaf: leaf * jnp.vdot(leaf, leaf), sent)

    return algorithm._replace(downlink=downlink)

  assert found(with_products) == found(fedavg)


def test_of_what_is_not_known_the_most_counts():
  x = np.zeros((4, 4), np.float32)

  def choose(x):
    last = jnp.where(x[0, 0] > 1, 5, 2)
    return jax.lax.cond(
        x[0, 0] > 0,
        lambda: x @ x,
        lambda: jax.lax.fori_loop(0, last, lambda _, c: c @ x, x),
    )

  assert product_flops(choose, x) == 5 * 2 * 64
  with pytest.raises(ValueError, match='while'):
    product_flops(
        lambda x: jax.lax.fori_loop(
            0, jnp.int32(x[0, 0]), lambda _, c: c @ x, x
        ),
        x,
    )


def test_a_loop_may_be_as_long_as_a_scanned_number():
  x = np.zeros((4, 4), np.float32)

  def scanned(x):
    def body(carry, i):
      return jax.lax.fori_loop(0, i, lambda _, c: c @ x, carry), None

    # The second time its `arange` is a program that was counted before.
    first, _ = jax.lax.scan(body, x, jnp.arange(4))
    return jax.lax.scan(body, first, jnp.arange(4))

  assert product_flops(scanned, x) == 2 * (0 + 1 + 2 + 3) * 2 * 64


def test_gradients_of_a_strided_convolution_are_as_large_as_the_convolution():
  x, w = np.zeros((2, 8, 8, 3), np.float32), np.zeros((3, 3, 3, 5), np.float32)

  def conv(x, w):
    return jax.lax.conv_general_dilated(
        x, w, (2, 2), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )

  once = product_flops(conv, x, w)
  both = product_flops(
      lambda x, w: jax.vjp(conv, x, w)[1](conv(x, w)), x, w
  )
  assert once > 0 and both == 4 * once  # Two forward passes, two gradients.
