"""The benchmark of lowerings times and names the right passes and choices."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import lowerings, nets
from fedjax_het.kernels import conv as conv_lib
from fedjax_het.models import create

SMALL = lowerings.Layer((5, 5, 2), (3, 3, 2, 4), (1, 1), 'SAME')
STRIDED = SMALL._replace(strides=(2, 2), padding=((1, 1), (1, 1)))


@pytest.mark.parametrize('name', ['resnet10', 'preresnet20', 'fedhe_cnn9'])
def test_every_convolution_of_a_net_is_found(name):
  model = create(name, nets.INPUT_SHAPE, 10)
  params = jax.tree.leaves(model.abstract_variables.params)
  kernels = sorted(leaf.shape for leaf in params if leaf.ndim == 4)
  layers = lowerings.layers_of(model)
  found = [layer.kernel for layer, n in layers.items() for _ in range(n)]
  assert sorted(found) == kernels


def test_chosen_is_what_conv_takes(monkeypatch):
  taken, choose = [], conv_lib.choose_lowering

  def recording(*args, **kwargs):
    taken.append(choose(*args, **kwargs))
    return taken[-1]

  monkeypatch.setattr(conv_lib, 'choose_lowering', recording)
  model = create('resnet18', nets.INPUT_SHAPE, 10)
  layers = lowerings.layers_of(model)
  taken.clear()
  for layer in layers:
    jax.eval_shape(
        functools.partial(
            conv_lib.conv, window_strides=layer.strides, padding=layer.padding
        ),
        jax.ShapeDtypeStruct((16, *layer.images), jnp.float32),
        jax.ShapeDtypeStruct(layer.kernel, jnp.float32),
    )
  assert taken == [lowerings.chosen_lowering(layer, 16) for layer in layers]
  assert len(set(taken)) > 1


@pytest.mark.usefixtures('not_stored')
@pytest.mark.parametrize('layer', [SMALL, STRIDED], ids=['1', '2'])
@pytest.mark.parametrize('kind', lowerings.WAYS)
def test_a_pass_is_the_one_that_it_is_called(kind, layer):
  x = jax.random.normal(jax.random.key(0), (3, *layer.images))
  w = jax.random.normal(jax.random.key(1), layer.kernel)

  def forward(x, w):
    return lax.conv_general_dilated(
        x,
        w,
        layer.strides,
        layer.padding,
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )

  y, vjp = jax.vjp(forward, x, w)
  dy = jnp.cos(y)
  want = dict(zip(lowerings.WAYS, (y, *vjp(dy)), strict=True))[kind]
  for way in lowerings.WAYS[kind]:
    got = lowerings.pass_of(layer, kind, way)(x, w, dy)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_a_loop_runs_as_often_as_it_is_told():
  calls = []

  def count(x):
    jax.debug.callback(lambda: calls.append(0))
    return x + 1

  call = lowerings.looped(count, (jnp.zeros(()),))
  jax.effects_barrier()
  calls.clear()
  call(5)
  jax.effects_barrier()
  assert len(calls) == 5


def test_summary_weighs_layers_by_their_number():
  rows = [
      {'count': 2, 'chosen': 'gemm', 'chosen_onednn': 'native',
       'operations': 3000,
       'milliseconds': {'native': 1.0, 'gemm': 3.0, 'strips': 4.0}},
      {'count': 1, 'chosen': 'native', 'chosen_onednn': 'gemm',
       'operations': 4000,
       'milliseconds': {'native': 5.0, 'gemm': 6.0, 'strips': 2.0}},
  ]  # fmt: skip
  assert lowerings.summary(rows, {'xla': 20.0, 'onednn': 9.0}, peak=2e6) == {
      'chosen': 11.0,
      'chosen, oneDNN': 8.0,
      'fastest': 4.0,
      'native alone': 7.0,
      'gemm alone': 12.0,
      'at the peak': 5.0,
      'local step': 20.0,
      'local step, oneDNN': 9.0,
  }


@pytest.mark.usefixtures('not_stored')
def test_equal_programs_have_one_time(monkeypatch):
  monkeypatch.setattr(lowerings, 'CALL_SECONDS', 0.0)
  found, _ = lowerings.measure(STRIDED, 2, 1)
  assert found['forward']['strips'] == found['forward']['gemm']
  assert found['d_input']['cropped'] == found['d_input']['gemm']
  assert found['d_weight']['rows'] == found['d_weight']['gemm']
  assert found['d_weight']['gemm'] != found['d_weight']['native']


@pytest.mark.usefixtures('not_stored')
def test_slow_ways_are_not_repeated(monkeypatch):
  repeated = []

  def interleave(calls, pause):
    repeated.append(sorted(calls))
    return {way: 1.0 + 9.0 * (way == 'gemm') for way in calls}

  monkeypatch.setattr(lowerings.common, 'interleave', interleave)
  found, _ = lowerings.measure(SMALL, 2, 1, slowest=5.0)
  turns = [ways for ways in repeated if len(ways) > 1]
  assert turns and not any('gemm' in ways for ways in turns)
  assert found['forward']['gemm'] == 1e4
