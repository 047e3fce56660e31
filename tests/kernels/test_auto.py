"""The table of the choices of `auto`, and the code that reads it."""

import jax
import jax.numpy as jnp
import pytest

from fedjax_het.engine.mapping import (
  Backend,
  batched_lowering,
  resolve_backend,
)
from fedjax_het.kernels.auto import (
  CHOICES,
  UNMEASURED,
  Choice,
  auto_choice,
  using_choice,
)
from fedjax_het.kernels.conv import conv
from fedjax_het.kernels.lowering import (
  as_lowering,
  choose_lowering,
  forced_lowering,
)

ROW = Choice('vmap', 4, 'gemm', 'native', 'a test')
LAYER = (16, 32, 32, 9 * 64)


def test_a_cpu_has_a_row():
  assert auto_choice() is CHOICES['cpu']
  assert resolve_backend('auto') == 'map'
  assert Backend('vmap').at_once == 16
  assert choose_lowering(LAYER) == ('native', 'native', 'rows')
  with batched_lowering():
    assert forced_lowering() == as_lowering('gemm')


def test_another_row_rules_mapping_chunk_and_lowerings():
  with using_choice(ROW):
    assert Backend.of('auto') == Backend('vmap')
    assert Backend.of('auto').at_once == 4
    assert Backend('vmap', 7).at_once == 7
    assert choose_lowering(LAYER) == as_lowering('gemm')
    with batched_lowering():
      assert forced_lowering() == as_lowering('native')
  assert resolve_backend('auto') == 'map'


def test_a_device_without_a_row_has_a_guess():
  assert auto_choice('a new chip') is UNMEASURED
  assert choose_lowering(LAYER, platform='gpu') == as_lowering('native')


@pytest.mark.parametrize('kind', CHOICES)
def test_rows_hold_what_the_engine_knows(kind):
  row = CHOICES[kind]
  assert row.backend in ('map', 'vmap') and row.chunk >= 1 and row.source
  for way in (row.lowering, row.batched_lowering):
    assert (way, kind) == ('by_layer', 'cpu') or as_lowering(way)


def test_a_program_is_traced_again_for_another_row():
  x, w = jnp.ones((1, 4, 4, 4)), jnp.ones((3, 3, 4, 4))
  jitted = jax.jit(conv)

  def native():
    return 'conv_general_dilated[' in str(jax.make_jaxpr(jitted)(x, w))

  assert not native()
  with using_choice(ROW._replace(lowering='native')):
    assert native()
  assert not native()
