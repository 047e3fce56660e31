"""Compares convolutions of jaxlib's oneDNN with matrix products."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.kernels import onednn
from fedjax_het.kernels.conv import conv
from fedjax_het.kernels.lowering import choose_lowering, using_conv_backend
from fedjax_het.kernels.onednn import no_compilation_cache
from fedjax_het.models import create
from tests.kernels.convolutions import assert_same, draw, value_and_gradients

# Programs with these calls cannot be stored in the tests' cache.
pytestmark = pytest.mark.usefixtures('not_stored')

needs_onednn = pytest.mark.skipif(
    onednn.why_not() is not None, reason=str(onednn.why_not())
)

CASES = [
    # size, kernel, strides, padding: as in `test_conv`, and padding that is
    # wider than the kernel, so that the gradient of the input crops one side.
    ((5, 6), (1, 1), (1, 1), 'SAME'),
    ((5, 6), (1, 1), (2, 2), 'VALID'),
    ((7, 8), (2, 3), (1, 2), 'SAME'),
    ((8, 7), (3, 3), (1, 1), 'SAME'),
    ((8, 7), (3, 3), (2, 2), ((1, 1), (1, 1))),
    ((9, 9), (3, 3), (2, 1), 'VALID'),
    ((9, 6), (5, 5), (2, 2), ((2, 2), (0, 3))),
    ((10, 9), (7, 7), (2, 2), ((3, 3), (3, 3))),
    ((1, 1), (3, 3), (1, 1), ((1, 1), (1, 1))),
    ((8, 8), (3, 3), (1, 2), ((-1, 0), (0, -2))),
    ((6, 6), (3, 3), (1, 1), ((3, 3), (4, 0))),
    ((6, 6), (3, 3), (1, 1), ((-1, 2), (2, -1))),
]


def calls(fn, *args):
  return str(jax.make_jaxpr(fn)(*args)).count('__onednn$convolution')


@needs_onednn
@pytest.mark.parametrize('part_bytes', [0, 1 << 20])
@pytest.mark.parametrize('size, kernel, strides, padding', CASES)
def test_value_and_gradients_are_those_of_products(
    size, kernel, strides, padding, part_bytes, monkeypatch
):
  """The kernel's gradient is of one image at a time, or of all at once."""
  monkeypatch.setattr(onednn, '_PART_BYTES', part_bytes)
  x, w = draw((4, *size, 3), 0), draw((*kernel, 3, 5), 1)

  def run(lowering):
    return value_and_gradients(
        lambda x, w: conv(x, w, strides, padding, lowering=lowering), x, w
    )

  assert_same(run('onednn'), run('gemm'))


@needs_onednn
@pytest.mark.parametrize(
    'strides, padding',
    [((1, 1), 'SAME'), ((2, 2), 'SAME'), ((1, 1), ((3, 3), (4, 0))),
     ((1, 1), ((-1, 2), (2, -1)))],
)  # fmt: skip
def test_gradients_of_gradients(strides, padding):
  x, w = draw((4, 6, 6, 3), 0), draw((3, 3, 3, 5), 1)

  def run(lowering):
    def loss(x, w):
      return jnp.sum(conv(x, w, strides, padding, lowering=lowering) ** 3)

    def steepness(x, w):
      return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1))(x, w))

    return jax.jit(jax.grad(steepness, (0, 1)))(x, w)

  for got, want in zip(run('onednn'), run('gemm'), strict=True):
    scale = float(jnp.abs(want).max())
    np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=1e-5)


@needs_onednn
def test_descent_in_a_scan_over_clients_follows_products():
  x, w = draw((3, 8, 6, 6, 4), 0), draw((3, 3, 4, 4), 1) / 6

  def train(lowering):
    def client(x):
      def step(w, _):
        def loss(w):
          return jnp.mean(conv(x, jnp.tanh(w), lowering=lowering) ** 2)

        return w - 0.1 * jax.grad(loss)(w), None

      return lax.scan(step, w, length=5)[0]

    return lax.map(client, x), jax.vmap(client)(x)

  one_by_one, at_once = jax.jit(train, static_argnums=0)('onednn')
  want, _ = jax.jit(train, static_argnums=0)('gemm')
  assert_same((one_by_one, at_once), (want, want), 1e-5)


@needs_onednn
def test_devices_call_it_at_the_same_time():
  """Many calls on four devices, which share the host's threads."""
  devices = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('clients',))
  x, w = draw((4, 8, 12, 12, 16), 0), draw((3, 3, 16, 16), 1) / 12

  def run(lowering):
    def client(x):
      return lax.fori_loop(
          0, 50, lambda _, x: jnp.tanh(conv(x, w, lowering=lowering)), x
      )

    spec = jax.sharding.PartitionSpec('clients')
    mapped = jax.shard_map(
        lambda x: lax.map(client, x), mesh=devices, in_specs=spec,
        out_specs=spec, check_vma=False,
    )  # fmt: skip
    return jax.jit(mapped)(x)

  assert_same([run('onednn')], [run('gemm')], 1e-3)


@needs_onednn
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_other_types_take_products(dtype):
  x, w = draw((2, 6, 6, 3), 0, dtype), draw((3, 3, 3, 5), 1, dtype)
  assert not calls(lambda x, w: conv(x, w, lowering='onednn'), x, w)
  got, want = (conv(x, w, lowering=way) for way in ('onednn', 'gemm'))
  np.testing.assert_array_equal(got, want)


@needs_onednn
def test_a_model_made_with_it_calls_it_and_computes_the_same():
  models = [
      create('preresnet20', (32, 32, 3), 10, conv_backend=c)
      for c in ('xla', 'onednn')
  ]
  variables, x = models[0].init(jax.random.key(0)), draw((4, 32, 32, 3), 1)

  def logits(model):
    return lambda v, x: model.apply(v, x)[0]

  xla, own = (calls(logits(model), variables, x) for model in models)
  assert xla == 0 and own > 0
  outputs = [jax.jit(logits(model))(variables, x) for model in models]
  assert_same(outputs[1:], outputs[:1], 1e-3)


@needs_onednn
def test_nobody_gets_it_unasked():
  x, w = draw((8, 32, 32, 16), 0), draw((3, 3, 16, 16), 1)
  assert not calls(conv, x, w)
  with using_conv_backend('xla'):
    assert not calls(conv, x, w)
  with using_conv_backend('onednn'):
    assert calls(conv, x, w)
  assert not calls(conv, x, w)


def test_it_is_chosen_where_it_was_measured_to_be_faster():
  def chosen(size, channels, taps=9, batch=16, **options):
    return choose_lowering(
        (batch, size, size, taps * channels[0]), platform='cpu',
        channels=channels, conv_backend='onednn', **options,
    )  # fmt: skip

  assert set(chosen(8, (64, 64))) == {'onednn'}
  assert chosen(2, (256, 256)) == ('gemm', 'gemm', 'onednn')
  assert chosen(8, (64, 128), strides=(2, 2)) == ('onednn', 'gemm', 'onednn')
  assert chosen(8, (3, 32)) == ('onednn', 'onednn', 'gemm')
  assert chosen(32, (3, 16), batch=128) == ('onednn', 'onednn', 'strips')
  for elsewhere in (
      chosen(1, (512, 512), taps=1),
      chosen(8, (64, 128), taps=1),
      chosen(8, (64, 64), dtype=jnp.bfloat16),
      choose_lowering((16, 8, 8, 576), platform='cpu', conv_backend='onednn'),
  ):
    assert 'onednn' not in elsewhere
  gpu = choose_lowering((16, 8, 8, 576), platform='gpu', channels=(64, 64),
                        conv_backend='onednn')  # fmt: skip
  assert set(gpu) == {'native'}


@pytest.mark.parametrize(
    'target, name, value, words',
    [
        (jax, 'default_backend', lambda: 'gpu', 'not on gpu'),
        (onednn.platform, 'system', lambda: 'Darwin', 'not on Darwin'),
        (onednn.platform, 'machine', lambda: 'aarch64', 'aarch64'),
        (onednn.jaxlib.version, '__version__', '0.99.0', 'not with 0.99.0'),
    ],
)
def test_elsewhere_it_is_refused(target, name, value, words, monkeypatch):
  monkeypatch.setattr(target, name, value)
  with pytest.raises(ValueError, match=words):
    create('mlp', (8, 8, 1), 10, conv_backend='onednn')
  create('mlp', (8, 8, 1), 10)


def test_an_unknown_library_is_refused():
  with pytest.raises(ValueError, match='conv_backend'):
    create('mlp', (8, 8, 1), 10, conv_backend='cudnn')


@needs_onednn
def test_a_program_that_would_be_stored_is_refused(tmp_path):
  x, w = draw((2, 6, 6, 3), 0), draw((3, 3, 3, 5), 1)
  jax.config.update('jax_compilation_cache_dir', str(tmp_path))
  with pytest.raises(ValueError, match='cannot be stored'):
    conv(x, w, lowering='onednn')


def test_the_cache_is_off_and_on_again(tmp_path):
  folder = jax.config.jax_compilation_cache_dir
  seconds = jax.config.jax_persistent_cache_min_compile_time_secs
  jax.config.update('jax_compilation_cache_dir', str(tmp_path))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  try:
    jax.jit(lambda x: x + 1)(jnp.zeros(3))
    stored = set(tmp_path.iterdir())
    assert stored
    with no_compilation_cache():
      jax.jit(lambda x: x + 2)(jnp.zeros(3))
    assert set(tmp_path.iterdir()) == stored
    jax.jit(lambda x: x + 3)(jnp.zeros(3))
    assert set(tmp_path.iterdir()) > stored
  finally:
    jax.config.update('jax_compilation_cache_dir', folder)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', seconds)
