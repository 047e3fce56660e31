"""Vision transformers start from files in the AugReg layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.models import create
from fedjax_het.models.pretrained import load_vit
from fedjax_het.models.vit import vit
from tests.models.augreg import DIM, HEADS, PATCH, augreg, save


def small(path, size=8, channels=3, depth=2):
  """ViT-T with one of its three heads."""
  return vit(
      (size, size, channels), 5, depth=depth, variant='t', patch=PATCH,
      width=0.34, pretrained=str(path),
  )  # fmt: skip


def reference(leaves, x, depth):
  """The class token's features, computed as in the published model."""

  def norm(x, name):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return x * leaves[f'{name}/scale'] + leaves[f'{name}/bias']

  batch = len(x)
  patches = [
      x[:, i : i + PATCH, j : j + PATCH]
      for i in range(0, x.shape[1], PATCH)
      for j in range(0, x.shape[2], PATCH)
  ]
  tokens = [np.broadcast_to(leaves['cls'][0, 0], (batch, DIM))] + [
      np.einsum('bijc,ijcd->bd', p, leaves['embedding/kernel'])
      + leaves['embedding/bias']
      for p in patches
  ]
  x = np.stack(tokens, 1)
  x = x + leaves['Transformer/posembed_input/pos_embedding']
  for i in range(depth):
    block = f'Transformer/encoderblock_{i}'
    attention = f'{block}/MultiHeadDotProductAttention_1'
    y = norm(x, f'{block}/LayerNorm_0')
    q, k, v = (
        np.einsum('btd,dhe->bthe', y, leaves[f'{attention}/{n}/kernel'])
        + leaves[f'{attention}/{n}/bias']
        for n in ('query', 'key', 'value')
    )
    scores = np.einsum('bthe,bshe->bhts', q, k) / np.sqrt(DIM // HEADS)
    weights = np.asarray(jax.nn.softmax(jnp.asarray(scores), axis=-1))
    y = np.einsum('bhts,bshe->bthe', weights, v)
    x = x + (
        np.einsum('bthe,hed->btd', y, leaves[f'{attention}/out/kernel'])
        + leaves[f'{attention}/out/bias']
    )
    y = norm(x, f'{block}/LayerNorm_2')
    y = y @ leaves[f'{block}/MlpBlock_3/Dense_0/kernel']
    y = y + leaves[f'{block}/MlpBlock_3/Dense_0/bias']
    y = np.asarray(jax.nn.gelu(jnp.asarray(y), approximate=False))
    y = y @ leaves[f'{block}/MlpBlock_3/Dense_1/kernel']
    x = x + y + leaves[f'{block}/MlpBlock_3/Dense_1/bias']
  return norm(x, 'Transformer/encoder_norm')[:, 0]


@pytest.mark.parametrize('depth', [2, 3])
def test_a_loaded_model_computes_what_the_published_one_does(tmp_path, depth):
  leaves = save(tmp_path / 'w.npz')
  model = small(tmp_path / 'w.npz', depth=depth)
  variables = model.init(jax.random.key(0))
  x = np.random.default_rng(1).normal(size=(2, 8, 8, 3)).astype(np.float32)
  with jax.numpy_rank_promotion('allow'):
    want = reference(leaves, x, depth)
    got = model.apply(variables, x, stop=len(model.blocks) - 1)[0]
  np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_the_head_is_drawn_and_everything_else_is_the_files(tmp_path):
  save(tmp_path / 'w.npz')
  model = small(tmp_path / 'w.npz')
  a, b = (model.init(jax.random.key(i)).params for i in (0, 1))
  for name in model.block_names:
    if name != 'head':
      jax.tree.map(np.testing.assert_array_equal, a[name], b[name])
  assert jnp.any(a['head']['kernel'] != b['head']['kernel'])


@pytest.mark.parametrize('prefix', ['opt/target/', 'target/', 'params/'])
def test_a_whole_training_state_gives_its_model(tmp_path, prefix):
  """The leaves have a prefix; those of the optimiser are ignored."""
  leaves = save(tmp_path / 'plain.npz')
  state = {prefix + name: leaf for name, leaf in leaves.items()}
  moments = {
      f'opt/state/param_states/{name}/grad_ema': np.zeros(3)
      for name in leaves
  }
  np.savez(tmp_path / 'state.npz', **state, **moments, **{'opt/state/step': 7})
  got, want = (
      small(tmp_path / f'{name}.npz').init(jax.random.key(0)).params
      for name in ('state', 'plain')
  )
  assert jax.tree.structure(got) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_positions_are_resized_and_the_class_tokens_stays(tmp_path):
  leaves = save(tmp_path / 'w.npz', patches=4)
  name = 'Transformer/posembed_input/pos_embedding'
  plane = np.array([[0.0, 1.0], [2.0, 3.0]]).reshape(1, 4, 1)
  leaves[name][:, 1:] = plane
  np.savez(tmp_path / 'w.npz', **leaves)
  got = small(tmp_path / 'w.npz', size=16).init(jax.random.key(0)).params
  position = np.asarray(got['embed']['position'])
  assert position.shape == (1, 17, DIM)
  np.testing.assert_array_equal(position[:, 0], leaves[name][:, 0])
  grid = position[0, 1:, 0].reshape(4, 4)
  # Pixel centres lie at halves, so from 0 to 1 the values are 0, .25, .75, 1.
  steps = np.array([0.0, 0.25, 0.75, 1.0])
  np.testing.assert_allclose(
      grid, 2 * steps[:, None] + steps[None], atol=1e-6
  )


def test_one_channel_takes_the_sum_over_three(tmp_path):
  leaves = save(tmp_path / 'w.npz')
  model = small(tmp_path / 'w.npz', channels=1)
  kernel = model.init(jax.random.key(0)).params['embed']['patch']['kernel']
  np.testing.assert_allclose(
      kernel, leaves['embedding/kernel'].sum(2).reshape(-1, DIM), rtol=1e-6
  )


def test_what_does_not_fit_is_refused(tmp_path):
  path = tmp_path / 'w.npz'
  with pytest.raises(FileNotFoundError, match='No pretrained weights at'):
    small(path)
  with pytest.raises(FileNotFoundError) as raised:  # In one line.
    small('\n')
  assert str(raised.value) == r"No pretrained weights at '\n'."
  path.write_bytes(b'not an archive')
  with pytest.raises(ValueError, match=r'is no readable \.npz file'):
    small(path)
  np.savez(path, weights=np.zeros(3))
  with pytest.raises(ValueError, match=r"lacks 'embedding/kernel'.*AugReg"):
    small(path)
  save(path, depth=1)
  with pytest.raises(ValueError, match="lacks 'Transformer/encoderblock_1/"):
    small(path)
  save(path, patches=5)
  with pytest.raises(ValueError, match='5 patches cannot be resized to 4'):
    small(path)
  with pytest.raises(ValueError, match=r'another architecture: .* is \('):
    leaves = augreg()
    leaves['embedding/bias'] = np.zeros(7, np.float32)
    np.savez(path, **leaves)
    small(path)


def test_blocks_of_a_wider_model_are_refused(tmp_path):
  save(tmp_path / 'w.npz')
  shapes = create('vit_t16', (8, 8, 3), 5, patch=PATCH).abstract_variables
  with pytest.raises(ValueError, match=r'embed.*\(64,\) there and \(192,\)'):
    load_vit(tmp_path / 'w.npz', shapes.params, (1, 64))


def test_another_division_into_heads_is_refused(tmp_path):
  """Its parameters have the same shapes."""
  save(tmp_path / 'w.npz')
  options = dict(depth=2, variant='mini', patch=PATCH)
  shape, path = (8, 8, 3), str(tmp_path / 'w.npz')
  vit(shape, 5, **options, pretrained=path)
  with pytest.raises(ValueError, match=r'\(1, 64\), and the model \(2, 32\)'):
    vit(shape, 5, **options, width=2.0, head_dim=32, pretrained=path)


def damaged_header(data):
  """Makes the header of the first array an invalid Python literal."""
  place = data.index(b"{'descr'")
  return data[:place] + b'{(((((((' + data[place + 8 :]


def no_header_at_all(data):
  return data.replace(b'\x93NUMPY', b'\x93NUMPX')


def unknown_compression(data):
  for signature, offset in ((b'PK\x03\x04', 8), (b'PK\x01\x02', 10)):
    place = data.index(signature) + offset
    data = data[:place] + b'\x63' + data[place + 1 :]
  return data


@pytest.mark.parametrize(
    'damage', [damaged_header, no_header_at_all, unknown_compression]
)
def test_damaged_archives_are_refused_in_one_line(tmp_path, damage):
  path = tmp_path / 'w.npz'
  save(path)
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(ValueError, match=r'w\.npz is no readable \.npz') as error:
    small(path)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('leaf', 'value', 'expected'),
    [
        ('cls', np.float32(np.nan), 'cls holds NaN or infinity'),
        ('embedding/kernel', np.float32(1), 'another architecture: embed'),
        ('Transformer/posembed_input/pos_embedding', np.ones(3), 'embed'),
        (
            'Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel',
            np.ones((0, 3)),
            'another architecture: encoder0',
        ),
    ],
)
def test_leaves_of_no_sense_are_refused(tmp_path, leaf, value, expected):
  path, leaves = tmp_path / 'w.npz', augreg()
  leaves[leaf] = value
  np.savez(path, **leaves)
  with pytest.raises(ValueError, match=expected) as error:
    small(path)
  assert str(path) in str(error.value)
