"""Users' nnx modules as models, through flax's bridge to linen."""

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het import experiment, models
from fedjax_het.models.blocks import BlockModel, Variables
from tests.experiment.tiny_runs import tiny_config
from tests.test_docs import ROOT, examples

SHAPE = (4, 4, 1)


class Linen(nn.Module):

  @nn.compact
  def __call__(self, x, train):
    x = nn.Dense(6, name='dense')(x.reshape(x.shape[0], -1))
    return nn.relu(nn.BatchNorm(not train, name='norm')(x))


class Net(nnx.Module):

  def __init__(self, features, rate=0.0, *, rngs):
    self.dense = nnx.Linear(16, features, rngs=rngs)
    self.norm = nnx.BatchNorm(features, rngs=rngs)
    self.drop = nnx.Dropout(rate, rngs=rngs)

  def __call__(self, x):
    x = self.dense(x.reshape(x.shape[0], -1))
    return self.drop(nnx.relu(self.norm(x)))


def nnx_model(*args, **kwargs):
  module = nnx.bridge.to_linen(Net, *args, **kwargs)
  return BlockModel.from_module(module, SHAPE, 3, name='net')


def batch(num=8):
  return jax.random.normal(jax.random.key(1), (num, *SHAPE))


def test_it_trains_as_the_same_linen_module_does():
  model = nnx_model(6)
  same = BlockModel.from_module(Linen(), SHAPE, 3, name='net')
  variables = model.init(jax.random.key(0))
  assert jax.tree.structure(variables) == jax.tree.structure(
      same.init(jax.random.key(0))
  )
  labels = jnp.arange(8) % 3

  def steps(model):
    def loss(params, stats):
      logits, stats = model.apply(
          Variables(params, stats), batch(), train=True, key=jax.random.key(2)
      )
      picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
      return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked), stats

    @jax.jit
    def step(params, stats):
      grads, stats = jax.grad(loss, has_aux=True)(params, stats)
      return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), stats

    trained = variables
    for _ in range(3):
      trained = Variables(*step(*trained))
    return trained, model.apply(trained, batch())[0]

  mine, theirs = steps(model), steps(same)
  for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  for old, new in zip(jax.tree.leaves(variables), jax.tree.leaves(mine[0])):
    assert np.any(old != new)


def test_models_are_equal_and_drawn_by_the_key():
  model = nnx_model(6)
  assert model == nnx_model(6) and model != nnx_model(5)
  first, same, other = (
      model.init(jax.random.key(seed)).params['net_trunk']['module']['dense']
      for seed in (0, 0, 1)
  )
  np.testing.assert_array_equal(first['kernel'], same['kernel'])
  assert np.any(first['kernel'] != other['kernel'])


def test_dropout_follows_training_and_its_key():
  model = nnx_model(6, rate=0.5)
  variables = model.init(jax.random.key(0))

  def train(seed):
    return model.apply(
        variables, batch(), train=True, key=jax.random.key(seed)
    )[0]

  np.testing.assert_array_equal(train(2), train(2))
  assert np.any(train(2) != train(3))
  tested, _ = model.apply(variables, batch())
  alone, _ = nnx_model(6).apply(variables, batch())
  np.testing.assert_array_equal(tested, alone)


PAGE = ROOT / 'docs' / 'adding_a_model.md'
WRONG = '''
def wrong(input_shape, num_classes):
  return Net(64, 8, rngs=nnx.Rngs(0))
'''


def test_by_import_path(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'my_nnx.py').write_text(examples(PAGE)['nnx'] + WRONG)
  config = tiny_config('fedavg')
  config.groups = dict(
      small=dict(model='my_nnx:net', clients=3),
      large=dict(model='my_nnx:net', clients=2, features=16),
  )
  config.model = {}
  groups = experiment.build(config).federation.groups
  outputs = {group.name: group.model.shapes[1] for group in groups}
  assert outputs == dict(small=(8,), large=(16,))
  with pytest.raises(ValueError, match=r'got Net\. Wrap .*to_linen\(Net, \.'):
    models.create('my_nnx:wrong', (8, 8, 1), 10)


def test_what_is_not_wrapped_is_refused_with_the_remedy():
  made = Net(6, rngs=nnx.Rngs(0))
  for wrong in (made, Net):
    with pytest.raises(ValueError, match=r'Wrap the class, as nnx\.bridge\.to'):
      BlockModel.from_module(wrong, SHAPE, 3, name='net')
