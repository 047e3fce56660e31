"""Compares convolution and max pooling with XLA's."""

import threading

import flax.linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.kernels import conv as conv_lib
from fedjax_het.kernels import lowering, products, taps
from fedjax_het.kernels import materialise as materialise_lib
from fedjax_het.kernels.conv import conv
from fedjax_het.kernels.lowering import (
  choose_lowering,
  conv_lowering,
  forced_lowering,
)
from fedjax_het.kernels.materialise import apart, materialise
from fedjax_het.kernels.pooling import max_pool
from tests.kernels.convolutions import assert_same, draw, value_and_gradients

DIMS = ('NHWC', 'HWIO', 'NHWC')
WAYS = ('native', 'gemm', 'cropped')
STRIPS = ('strips', 'gemm', 'strips')
MIXED = ('native', 'gemm', 'cropped')
ROWS = ('native', 'native', 'rows')


def _reference(x, w, strides, padding):
  return lax.conv_general_dilated(
    x, w, strides, padding, dimension_numbers=DIMS
  )


# A list of fixed shapes: padding of one axis, strides that do not divide the
# map, a stride above the kernel, maps of one pixel, negative padding.
CASES = [
  # size, kernel, strides, padding
  ((5, 6), (1, 1), (1, 1), 'SAME'),
  ((5, 6), (1, 1), (2, 2), 'VALID'),
  ((7, 8), (2, 2), (2, 2), 'VALID'),
  ((7, 8), (2, 3), (1, 2), 'SAME'),
  ((8, 7), (3, 3), (1, 1), 'SAME'),
  ((8, 7), (3, 3), (2, 2), ((1, 1), (1, 1))),
  ((9, 9), (3, 3), (2, 1), 'VALID'),
  ((9, 8), (2, 2), (3, 3), 'SAME'),
  ((9, 6), (5, 5), (2, 2), ((2, 2), (0, 3))),
  ((10, 9), (7, 7), (2, 2), ((3, 3), (3, 3))),
  ((1, 1), (3, 3), (1, 1), ((1, 1), (1, 1))),
  ((2, 2), (3, 3), (2, 2), ((1, 1), (1, 1))),
  ((1, 4), (5, 3), (1, 1), ((4, 2), (1, 1))),
  ((8, 8), (3, 3), (1, 2), ((-1, 0), (0, -2))),
]


@pytest.mark.parametrize('way', [*WAYS, STRIPS])
@pytest.mark.parametrize('size, kernel, strides, padding', CASES)
def test_value_and_gradients_are_those_of_lax(
  size, kernel, strides, padding, way
):
  x, w = draw((2, *size, 3), 0), draw((*kernel, 3, 4), 1)
  got = value_and_gradients(
    lambda x, w: conv(x, w, strides, padding, lowering=way), x, w
  )
  want = value_and_gradients(
    lambda x, w: _reference(x, w, strides, padding), x, w
  )
  assert_same(got, want)


@pytest.mark.parametrize('cached_images', [0, 1, 2.5, 9])
@pytest.mark.parametrize('size, kernel, strides, padding', [
  case for case in CASES if case[2] == (1, 1)
])
def test_rows_give_the_gradient_of_lax(
  size, kernel, strides, padding, cached_images, monkeypatch
):
  """The gradient takes 1, 1, 2 or all of the six images at once."""
  x, w = draw((6, *size, 3), 0), draw((*kernel, 3, 4), 1)
  image = 4 * size[0] * size[1] * 4
  monkeypatch.setattr(products, '_CACHED_BYTES', int(cached_images * image))
  got = value_and_gradients(
    lambda x, w: conv(x, w, strides, padding, lowering=ROWS), x, w
  )
  want = value_and_gradients(
    lambda x, w: _reference(x, w, strides, padding), x, w
  )
  assert_same(got, want)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
  st.tuples(st.integers(1, 8), st.integers(1, 8)),
  st.tuples(st.integers(1, 5), st.integers(1, 5)),
  st.tuples(st.integers(1, 3), st.integers(1, 3)),
  st.tuples(*(st.tuples(st.integers(0, 5), st.integers(0, 5)),) * 2),
  st.tuples(
    st.sampled_from((*WAYS, 'strips')),
    st.sampled_from(WAYS),
    st.sampled_from((*WAYS, 'strips')),
  ),
)
def test_any_geometry(size, kernel, strides, padding, lowering):
  padding = tuple(  # Padding for at least one output.
    (low, max(high, k - n - low))
    for n, k, (low, high) in zip(size, kernel, padding, strict=True)
  )
  x, w = draw((1, *size, 2), 0), draw((*kernel, 2, 1), 1)
  got = value_and_gradients(
    lambda x, w: conv(x, w, strides, padding, lowering=lowering), x, w
  )
  want = value_and_gradients(
    lambda x, w: _reference(x, w, strides, padding), x, w
  )
  assert_same(got, want)


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize(
  'dtype, unit', [('bfloat16', 2**-8), ('float16', 2**-11)]
)
def test_low_precision_rounds_once(way, dtype, unit):
  x, w = draw((2, 8, 8, 32), 0, dtype), draw((3, 3, 32, 8), 1, dtype) / 16
  got = value_and_gradients(
    lambda x, w: conv(x, w, (2, 2), 'SAME', lowering=way), x, w
  )
  wide = [jnp.asarray(a, jnp.float32) for a in (x, w)]
  y, vjp = jax.vjp(lambda x, w: _reference(x, w, (2, 2), 'SAME'), *wide)
  want = y, *vjp(draw(y.shape, 2, dtype).astype(jnp.float32))
  for a, b in zip(got, want, strict=True):
    assert a.dtype == dtype
    a, b = np.asarray(a, np.float32), np.asarray(b)
    bound = 2 * unit * np.maximum(np.abs(b), np.abs(b).mean())
    assert np.all(np.abs(a - b) <= bound)


@pytest.mark.parametrize('way', [*WAYS, MIXED, ROWS, STRIPS])
def test_under_vmap_over_images_and_kernels(way):
  xs, ws = draw((3, 2, 6, 6, 4), 0), draw((3, 3, 3, 4, 5), 1)

  def gradients(x, w):
    return value_and_gradients(
      lambda x, w: conv(x, w, (2, 2), 'SAME', lowering=way), x, w
    )

  want = [gradients(x, w) for x, w in zip(xs, ws, strict=True)]
  want = jax.tree.map(lambda *a: jnp.stack(a), *want)
  assert_same(jax.jit(jax.vmap(gradients))(xs, ws), want)
  shared = jax.vmap(gradients, in_axes=(0, None))(xs, ws[0])
  assert_same([a[0] for a in shared], [a[0] for a in want])


@pytest.mark.parametrize('way', [*WAYS, ROWS, STRIPS])
def test_descent_in_a_scan_follows_lax(way):
  x, w = draw((2, 6, 6, 3), 0), draw((3, 3, 3, 3), 1) / 3

  def descend(conv_fn):
    def step(w, _):
      def loss(w):
        return jnp.mean(conv_fn(jnp.tanh(conv_fn(x, w)), w) ** 2)

      return w - 0.1 * jax.grad(loss)(w), None

    return jax.jit(lambda w: lax.scan(step, w, length=4)[0])(w)

  got = descend(lambda x, w: conv(x, w, (1, 1), 'SAME', lowering=way))
  want = descend(lambda x, w: _reference(x, w, (1, 1), 'SAME'))
  assert_same([got], [want])
  assert np.abs(np.asarray(want - w)).max() > 1e-3


def test_only_input_and_kernel_are_kept_for_the_backward_pass():
  x, w = draw((2, 8, 8, 4), 0), draw((3, 3, 4, 4), 1)
  _, vjp = jax.vjp(lambda x, w: conv(x, w, lowering='gemm'), x, w)
  kept = [leaf for leaf in jax.tree.leaves(vjp) if hasattr(leaf, 'shape')]
  assert sum(leaf.size for leaf in kept) <= x.size + w.size


@pytest.mark.usefixtures('optimised')
def test_large_slices_are_not_held_for_the_backward_pass(monkeypatch):
  w, x = jnp.zeros((6, 3, 3, 8, 8)), jnp.zeros((16, 64, 64, 8))

  def temporary():  # In units of one layer's slices.
    def loss(w):
      y = x
      for kernel in w:
        y = jnp.tanh(conv(y, kernel, lowering='gemm'))
      return jnp.sum(y)

    program = jax.jit(jax.grad(loss)).lower(w).compile()
    return program.memory_analysis().temp_size_in_bytes / (9 * x.nbytes)

  assert temporary() < 5
  monkeypatch.setattr(products, 'LARGE_BYTES', 1 << 40)
  assert temporary() > 6  # Without the limit, XLA holds them.


@pytest.mark.parametrize(
  'options',
  [
    dict(feature_group_count=2),
    dict(rhs_dilation=(2, 2)),
    dict(lhs_dilation=(2, 1), padding=((1, 1), (1, 1))),
    dict(dimension_numbers=('NHWC', 'OHWI', 'NHWC')),
  ],
)
def test_everything_else_goes_to_lax(options):
  channels = 2 if 'feature_group_count' in options else 4
  x, w = draw((2, 8, 8, 4), 0), draw((3, 3, channels, 4), 1)
  if 'dimension_numbers' in options:
    w = draw((4, 3, 3, 4), 1)
  arguments = dict(window_strides=(1, 1), padding='SAME') | options
  got = conv(x, w, **arguments)
  want = lax.conv_general_dilated(
    x, w, **(dict(dimension_numbers=DIMS) | arguments)
  )
  np.testing.assert_array_equal(got, want)


def test_wider_result_goes_to_lax():
  x, w = draw((2, 5, 5, 4), 0, 'bfloat16'), draw((3, 3, 4, 2), 1, 'bfloat16')
  got = conv(x, w, padding='VALID', preferred_element_type=jnp.float32)
  assert got.dtype == jnp.float32
  want = _reference(*(a.astype(jnp.float32) for a in (x, w)), (1, 1), 'VALID')
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_one_dimension_goes_to_lax():
  x, layer = draw((2, 8, 4), 0), {'features': 3, 'kernel_size': (3,)}
  want, variables = nn.Conv(**layer).init_with_output(jax.random.key(0), x)
  got = nn.Conv(**layer, conv_general_dilated=conv).apply(variables, x)
  np.testing.assert_array_equal(got, want)


def test_flax_calls_it():
  x = draw((2, 8, 8, 3), 0)
  layer = dict(features=5, kernel_size=(3, 3), strides=(2, 2), padding=1)
  variables = nn.Conv(**layer).init(jax.random.key(0), x)
  ours = nn.Conv(**layer, conv_general_dilated=conv)
  assert_same(
    [ours.apply(variables, x)], [nn.Conv(**layer).apply(variables, x)]
  )


def _count(primitive, x, w):
  def loss(x, w):
    return jnp.sum(conv(x, w) ** 2)

  jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(x, w)
  return str(jaxpr).count(primitive)


def test_forced_lowering_reaches_a_jitted_function_traced_before():
  x, w = draw((1, 4, 4, 4), 0), draw((3, 3, 4, 4), 1)
  jitted = jax.jit(conv)

  def count():
    jaxpr = jax.make_jaxpr(jax.vmap(jitted))(x[None], w[None])
    return str(jaxpr).count('conv_general_dilated[')

  assert count() == 0
  with conv_lowering('native'):
    assert count() == 1
  assert count() == 0


def test_forced_lowering_is_read_at_trace_time_and_per_thread():
  x, w = draw((1, 4, 4, 4), 0), draw((3, 3, 4, 4), 1)
  seen = []
  with conv_lowering('native'):
    assert _count('conv_general_dilated[', x, w) == 3
    with conv_lowering('gemm'):
      assert _count('conv_general_dilated[', x, w) == 0
      assert _count('dot_general[', x, w) == 3
    assert _count('conv_general_dilated[', x, w) == 3
    thread = threading.Thread(
      target=lambda: seen.append(forced_lowering())
    )
    thread.start()
    thread.join()
  assert seen == [None]
  with conv_lowering('gemm'), pytest.raises(RuntimeError):
    raise RuntimeError
  assert forced_lowering() is None


@pytest.mark.parametrize('batch', [1, 16, 1024])
@pytest.mark.parametrize('size', [(1, 1), (8, 8), (32, 32)])
def test_no_native_kernel_gradient_on_cpu(batch, size):
  patches = (batch, *size, 9 * 64)
  assert choose_lowering(patches, platform='cpu').d_weight != 'native'
  assert set(choose_lowering(patches, platform='gpu')) == {'native'}


@pytest.mark.parametrize(
    ('lowering', 'message'),
    [
        ('gem', "Unknown lowering of forward 'gem'; did you mean 'gemm'"),
        ('rows', "Unknown lowering of forward 'rows'"),
        ('strips', "Unknown lowering of d_input 'strips'"),
        (('rows', 'gemm', 'gemm'), "Unknown lowering of forward 'rows'"),
        (('gemm',) * 4, 'A lowering must be one name or three'),
    ],
)
def test_unknown_lowering_is_refused(lowering, message):
  with pytest.raises(ValueError, match=message):
    with conv_lowering(lowering):
      pass


def test_channel_mismatch_is_refused():
  with pytest.raises(ValueError, match='4 channels'):
    conv(jnp.ones((1, 3, 3, 4)), jnp.ones((3, 3, 2, 4)))
  with pytest.raises(ValueError, match='one rank'):
    conv(jnp.ones((3, 3, 4)), jnp.ones((3, 3, 4, 4)))


@pytest.mark.parametrize(
  'size, window, strides, padding',
  [
    ((8, 8), (3, 3), (2, 2), ((1, 1), (1, 1))),
    ((7, 9), (3, 3), (2, 2), 'SAME'),
    ((8, 7), (2, 2), (2, 2), 'VALID'),
    ((5, 5), (2, 3), (1, 1), 'SAME'),
    ((9, 7), (2, 2), (3, 3), 'VALID'),
  ],
)
def test_max_pool_and_its_gradient(size, window, strides, padding):
  # Small integers: many ties, whose gradient goes to the first maximum.
  x = jnp.asarray(
    np.random.default_rng(0).integers(0, 3, (2, *size, 3)), jnp.float32
  )
  want, want_vjp = jax.vjp(
    lambda x: nn.max_pool(x, window, strides, padding), x
  )
  got, vjp = jax.vjp(lambda x: max_pool(x, window, strides, padding), x)
  np.testing.assert_array_equal(got, want)
  dy = draw(want.shape, 1)
  assert_same(vjp(dy), want_vjp(dy), 1e-6)
  batched = jax.vmap(lambda x: max_pool(x, window, strides, padding))(x[None])
  np.testing.assert_array_equal(batched[0], want)


@pytest.mark.parametrize('way', [None, *WAYS, STRIPS])
def test_an_empty_batch_has_gradients(way):
  x, w = jnp.zeros((0, 6, 6, 2)), jnp.ones((3, 3, 2, 4))
  value, grads = jax.value_and_grad(
      lambda x, w: conv(x, w, lowering=way).sum(), (0, 1)
  )(x, w)
  assert value == 0 and grads[0].shape == x.shape and not grads[1].any()


def test_windows_that_cannot_be_are_refused():
  x = jnp.zeros((1, 20, 20, 1))
  assert max_pool(x, (16, 16)).shape == (1, 5, 5, 1)
  with pytest.raises(ValueError, match='17 x 16 has more than 256 positions'):
    max_pool(x, (17, 16))
  match = 'kernel of 4 x 3 does not fit on an image of 7 x 1 with the padding'
  with pytest.raises(ValueError, match=match):
    conv(jnp.zeros((2, 7, 1, 2)), jnp.zeros((4, 3, 2, 4)), (2, 2), 'VALID')


def test_max_pool_of_a_map_of_one_pixel():
  x = draw((2, 1, 1, 3), 0)
  y, vjp = jax.vjp(lambda x: max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1))), x)
  np.testing.assert_array_equal(y, x)
  np.testing.assert_array_equal(vjp(x)[0], x)


@pytest.mark.parametrize(
  'size, share', [(1, 0), (2, 20 / 36), (4, 44 / 144), (8, 92 / 576)]
)
def test_share_of_padding(size, share):
  """For n > 1, (3 n - 2)^2 of the 9 n^2 pixels under 3x3 taps are real."""
  geometry = taps.resolve_padding(
    'SAME', (size, size), (3, 3), (1, 1)
  )
  _, geometry = taps.busy_taps(geometry, (size, size))
  np.testing.assert_allclose(
    taps.padding_share(geometry, (size, size)), share, atol=1e-12
  )


def test_wide_layers_on_small_maps_are_cropped():
  def chosen(size, channels, share, batch=32):
    return choose_lowering(
      (batch, size, size, 9 * channels),
      platform='cpu',
      channels=(channels, channels),
      padding_share=share,
    )

  assert set(chosen(2, 256, 20 / 36)) == {'cropped'}
  assert set(chosen(8, 64, 92 / 576)) == {'gemm'}
  assert set(chosen(2, 64, 20 / 36)) == {'gemm'}
  assert set(chosen(2, 16, 20 / 36, batch=4096)) == {'gemm'}
  assert set(chosen(8, 64, 0.0)) == {'gemm'}


@pytest.mark.parametrize('limit', [0, 1 << 30])
@pytest.mark.parametrize(
  'way, strides',
  [(STRIPS, (1, 1)), ('gemm', (1, 1)), ('gemm', (2, 2))],
)
def test_large_slices_are_not_stored_for_the_gradient(
  way, strides, limit, monkeypatch
):
  """They depend on the output's gradient; the result is the same."""
  monkeypatch.setattr(products, 'LARGE_BYTES', limit)
  x, w = draw((2, 6, 7, 3), 0), draw((3, 3, 3, 4), 1)

  @jax.jit
  def d_weight(dy):
    return jax.vjp(lambda w: conv(x, w, strides, lowering=way), w)[1](dy)[0]

  y, vjp = jax.vjp(lambda w: _reference(x, w, strides, 'SAME'), w)
  dy = draw(y.shape, 2)
  assert_same([d_weight(dy)], vjp(dy))
  assert ('= abs ' in str(jax.make_jaxpr(d_weight)(dy))) == (limit == 0)


def test_thin_layers_take_strips():
  def chosen(channels, batch=32, strides=(1, 1), taps=9, size=32):
    patches = (batch, size, size, taps * channels[0])
    return choose_lowering(patches, strides, platform='cpu', channels=channels)

  assert chosen((3, 16), batch=128) == ('strips', 'native', 'strips')
  assert chosen((3, 16), batch=10) == ('strips', 'gemm', 'strips')
  assert chosen((3, 64), batch=10) == ('gemm', 'gemm', 'strips')
  assert chosen((8, 16), batch=128) == ('native', 'native', 'rows')
  assert chosen((16, 16), batch=8) == ('gemm', 'gemm', 'gemm')
  assert set(chosen((32, 16), batch=4)) == {'gemm'}
  assert set(chosen((3, 16), size=4)) == {'gemm'}
  assert set(chosen((3, 16), size=8)) == {'gemm'}
  assert set(chosen((3, 16), taps=1)) == {'gemm'}
  assert chosen((16, 16)) == ('native', 'native', 'rows')
  assert chosen((16, 16), strides=(2, 2)) == ('native', 'gemm', 'gemm')
  assert chosen((128, 256), strides=(2, 2)) == ('gemm',) * 3


@pytest.mark.parametrize('num_out, length', [(1, 8), (6, 4), (16, 2), (40, 1)])
def test_strips_are_one_product_for_several_outputs(num_out, length):
  """A map of 8 columns is cut into 8 / s strips; the kernel has s O columns."""
  x, w = draw((2, 5, 8, 3), 0), draw((3, 3, 3, num_out), 1)
  jaxpr = jax.make_jaxpr(
    lambda x, w: conv(x, w, lowering=('strips', 'gemm', 'gemm'))
  )(x, w)
  shape = f'f32[2,5,{8 // length},{length * num_out}] = dot_general'
  assert shape in str(jaxpr)


@pytest.mark.parametrize('width', [1, 4, 5, 7, 9, 11])
@pytest.mark.parametrize('num_out', [1, 4, 16])
def test_strips_cover_every_width(width, num_out):
  x, w = draw((2, 4, width, 2), 0), draw((3, 5, 2, num_out), 1)
  got = value_and_gradients(lambda x, w: conv(x, w, lowering=STRIPS), x, w)
  want = value_and_gradients(
    lambda x, w: _reference(x, w, (1, 1), 'SAME'), x, w
  )
  assert_same(got, want)


def test_every_known_way_has_an_entry_in_the_tables_of_passes():
  assert set(conv_lib.FORWARD) == set(lowering._FORWARD_WAYS)
  assert set(conv_lib.D_INPUT) == set(lowering._D_INPUT_WAYS)
  assert set(conv_lib.D_WEIGHT) == set(lowering._D_WEIGHT_WAYS)


def test_what_products_read_many_times_is_computed_once(monkeypatch):
  """XLA fuses a producer into every tap, but not into a conditional."""
  monkeypatch.setattr(materialise_lib, '_LEAST', 4 * 8 * 8 * 8)
  x = draw((4, 8, 8, 8), 0)

  def grad(way, taps):
    def loss(w):
      return jnp.sum(conv(jnp.sin(x * w[0, 0, 0, 0]), w, lowering=way) ** 2)

    return str(jax.make_jaxpr(jax.grad(loss))(draw((taps, taps, 8, 32), 1)))

  assert grad('gemm', 5).count('cond[') == 3 * (jax.default_backend() == 'cpu')
  assert 'cond[' not in grad('native', 5)
  assert 'cond[' not in grad('gemm', 3)  # Few taps: not worth it.


@pytest.mark.skipif(jax.default_backend() != 'cpu', reason='for CPUs')
@pytest.mark.parametrize('least, sines', [(1, 1), (1 << 30, 2)])
def test_xla_writes_it_once(least, sines, monkeypatch):
  """Small arrays are not materialised, and XLA computes them twice."""
  monkeypatch.setattr(materialise_lib, '_LEAST', least)

  @jax.jit
  def taps_of_a_product(x):
    x = jnp.pad(materialise(jnp.sin(x) * x), ((0, 0), (0, 2)))
    return sum(x[:, i : i + 512] for i in range(3))

  compiled = taps_of_a_product.lower(draw((64, 512), 0)).compile()
  assert compiled.as_text().count(' sine(') == sines


@pytest.mark.skipif(jax.default_backend() != 'cpu', reason='for CPUs')
@pytest.mark.parametrize('least, sines', [(1, 1), (1 << 30, 2)])
def test_a_function_apart_reads_its_operand(least, sines, monkeypatch):
  """Where the arrays are small XLA computes the operand again in it."""
  monkeypatch.setattr(materialise_lib, '_LEAST', least)

  @jax.jit
  def two_readers(x):
    x = jnp.sin(x) * x
    transposed = apart(lambda x: x.T.reshape(-1), x)
    return x[::-1], transposed

  x = draw((64, 512), 0)
  assert two_readers.lower(x).compile().as_text().count(' sine(') == sines
  product = jnp.sin(x) * x
  np.testing.assert_allclose(two_readers(x)[1], product.T.ravel(), rtol=1e-5)


@pytest.mark.parametrize('first', [0.0, jnp.nan, -jnp.inf])
def test_apart_changes_nothing(first, monkeypatch):
  """Value, gradient and batches are those of the function."""
  monkeypatch.setattr(materialise_lib, '_LEAST', 1)
  x, y = draw((3, 4), 0).at[0, 0].set(first), draw((4, 3), 1)

  def fn(x, y):
    return x.T * y

  def split(x, y):
    return apart(fn, x, y)

  np.testing.assert_array_equal(split(x, y), fn(x, y))
  np.testing.assert_array_equal(
      jax.vmap(split)(x[None], y[None]), fn(x, y)[None]
  )
  grads, expected = (
      jax.grad(lambda *a, f=f: jnp.sum(f(*a)), (0, 1))(x, y)
      for f in (split, fn)
  )
  jax.tree.map(np.testing.assert_array_equal, grads, expected)


@pytest.mark.parametrize('first', [0.0, jnp.nan, -jnp.inf])
def test_materialise_changes_nothing(first, monkeypatch):
  monkeypatch.setattr(materialise_lib, '_LEAST', 1)
  x = draw((3, 4), 0).at[0, 0].set(first)
  y, vjp = jax.vjp(materialise, x)
  np.testing.assert_array_equal(y, x)
  np.testing.assert_array_equal(vjp(x)[0], x)
  np.testing.assert_array_equal(jax.vmap(materialise)(x), x)
  assert materialise(x[:0]).shape == (0, 4)
