"""Where a model is cut, the skip to the head, and stages of a schedule."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het.depthwise import stages
from fedjax_het.engine.task import CLASSIFICATION
from fedjax_het.models import Block, BlockModel, Variables, create
from tests.depthwise.nets import small_data, small_preresnet


@pytest.mark.parametrize(
    ('name', 'options', 'head'),
    [
        ('preresnet20', {}, 'pool'),
        ('vit_t16', dict(patch=8), 'token'),
        ('resnet10', {}, 'pool'),
        ('simple_cnn', {}, 'hidden1'),
        ('fedhe_cnn0', {}, 'flatten'),
        ('mlp', dict(depth=3), 'head'),
    ],
)
def test_the_head_begins_where_outputs_are_vectors(name, options, head):
  model = create(name, (32, 32, 3), 10, **options)
  assert model.block_names[stages.head_start(model)] == head


class Words(nn.Module):
  """[B, T, D] -> [B, T, 4]."""

  @nn.compact
  def __call__(self, x, train, mask):
    return nn.Dense(4)(x)


def test_the_head_of_a_model_of_sequences_is_its_last_block():
  blocks = tuple(Block(name, Words()) for name in ('stem', 'a', 'b', 'head'))
  model = BlockModel('sequences', blocks, (6, 4), 4, (1, 3))
  assert stages.head_start(model) == 3


@pytest.mark.parametrize(
    ('channels', 'size', 'first', 'stop'), [(16, 32, 24, 40), (32, 16, 16, 48)]
)
def test_adapt_puts_channels_in_the_middle(channels, size, first, stop):
  """The ones are exactly in channels 24..39, or 16..47, of 8x8x64."""
  y = stages.adapt(jnp.ones((2, size, size, channels)), (8, 8, 64))
  assert y.shape == (2, 8, 8, 64)
  assert np.all(y[..., first:stop] == 1)
  assert np.sum(y) == 2 * 8 * 8 * channels


def test_adapt_keeps_every_fourth_row_and_column():
  x = jnp.arange(32.0 * 32).reshape(1, 32, 32, 1)
  y = stages.adapt(x, (8, 8, 2))  # An odd extra channel goes last.
  np.testing.assert_array_equal(y[0, :, :, 0], x[0, ::4, ::4, 0])
  assert stages.adapt(x, (32, 32, 1)) is x
  odd = stages.adapt(x[:, :5, :5], (2, 2, 1))
  np.testing.assert_array_equal(odd[0, :, :, 0], x[0, :5:2, :5:2, 0][:2, :2])
  np.testing.assert_array_equal(
      stages.adapt(jnp.ones((1, 2)), (5,)), [[0, 1, 1, 0, 0]]
  )


@pytest.mark.parametrize('shape', [(8, 8, 3), (16, 16, 4), (8, 4)])
def test_adapt_refuses_what_it_would_have_to_invent(shape):
  with pytest.raises(ValueError, match=r'output of shape \(8, 8, 4\) cannot'):
    stages.adapt(jnp.ones((1, 8, 8, 4)), shape)


def test_the_stem_is_trained_in_the_first_stage_only():
  model = small_preresnet((2, 2, 4))
  first, second = stages.make_stages(model, [(0, 2), (2, 3)])
  assert first.names == ('stem', 'unit0', 'unit1', 'pool', 'head')
  assert second.frozen == (0, 1, 2)
  assert second.names == ('unit2', 'pool', 'head')
  # Before a frozen block it is frozen, too, ...
  first, second = stages.make_stages(model, [(1, 2), (2, 3)])
  assert (first.frozen, first.trained) == ((0, 1), (2,))
  # ... unless that block is bypassed.
  first, second = stages.make_stages(
      model, [(1, 2), (2, 3)], partial='bypass'
  )
  assert (first.frozen, first.trained) == ((), (0, 2))
  assert (second.frozen, second.trained) == ((0, 2), (3,))


def test_a_bypass_needs_equal_shapes():
  model = small_preresnet((2, 4, 4))
  with pytest.raises(ValueError, match="cannot go from stem, whose output is"):
    stages.make_stages(model, [(2, 3)], partial='bypass')
  with pytest.raises(ValueError, match='Unknown partial '):
    stages.make_stages(model, [(2, 3)], partial='skip')
  with pytest.raises(ValueError, match='Unknown heads '):
    stages.make_stages(model, [(2, 3)], heads='mine')


def test_narrower_own_heads_of_preresnet_hold_1788_parameters():
  model = create('preresnet20', (32, 32, 3), 10)
  heads = stages.own_heads(model)
  assert sorted(heads) == [*range(2, 10)]
  narrow = [heads[end] for end in range(2, 8)]
  params = model.with_heads(*narrow).abstract_variables.params
  total = sum(
      leaf.size
      for name, tree in params.items()
      if name not in model.block_names
      for leaf in jax.tree.leaves(tree)
  )
  assert total == 1788
  ends = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6), (6, 9)]
  made = stages.make_stages(model, ends, heads='own')
  assert made[4].names[-2:] == ('stage2_block2/pool', 'stage2_block2/head')
  assert made[5].names[-2:] == ('pool', 'head')
  # As wide as the last unit, but not the last stage.
  ends = [(0, 1), (5, 8), (8, 9)]
  made = stages.make_stages(model, ends, heads='own')
  assert made[1].names[-2:] == ('stage3_block1/pool', 'stage3_block1/head')
  assert made[2].names[-2:] == ('pool', 'head')


def test_an_own_head_is_a_norm_a_mean_and_a_linear_layer():
  """Without ReLU: BN - global mean - linear."""
  model = small_preresnet()
  (stage,) = stages.make_stages(model, [(0, 1)], heads='own')
  variables = stage.model.init(jax.random.key(0))
  x = jax.random.normal(jax.random.key(1), (4, 8, 8, 2))
  got, _ = stage.model.apply(variables, x, start=stage.head, train=True)
  mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
  pooled = ((x - mean[None, None, None]) / np.sqrt(var + 1e-5)[
      None, None, None
  ]).mean((1, 2))
  linear = variables.params['unit0/head']
  want = pooled @ linear['kernel'] + linear['bias'][None]
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_transformer_has_heads_for_all_units_but_the_last():
  model = create('vit_s8', (8, 8, 1), 3, width=0.2)
  assert sorted(stages.own_heads(model)) == [*range(2, 9)]


@pytest.mark.parametrize('heads', stages.HEADS)
def test_a_stage_of_a_transformer(heads):
  """Tokens go to the head unchanged; embeddings train in stage 1 only."""
  model = create('vit_s8', (8, 8, 1), 3, width=0.2)
  first, second, _ = stages.make_stages(
      model, [(0, 1), (1, 2), (2, 8)], heads=heads
  )
  head = ('token', 'head')
  if heads == 'own':
    head = tuple(f'encoder01/{name}' for name in head)
  assert first.names[:2] == ('embed', 'encoder00')
  assert second.names == ('encoder01', *head)
  variables = second.model.init(jax.random.key(0))
  batch = small_data().client(1).batch(jnp.arange(4))

  @jax.jit
  def run(variables):
    loss = stages.stage_loss(CLASSIFICATION, second, variables)
    return loss(second.pick(variables), batch, jax.random.key(0))[0]

  z, _ = model.apply(variables, batch.x, stop=3)
  token, linear = (variables.params[name] for name in head)
  z = (z - z.mean(-1, keepdims=True))[:, 0] / z.std(-1)[:, 0, None]
  z = z * token['norm']['scale'][None] + token['norm']['bias'][None]
  logits = z @ linear['kernel'] + linear['bias'][None]
  want = -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(4), batch.y])
  np.testing.assert_allclose(run(variables), want, rtol=1e-4)


@pytest.fixture(scope='module')
def net():
  model = small_preresnet()
  return model, model.init(jax.random.key(0)), small_data().client(1)


def test_gradients_stop_in_front_of_a_stage(net):
  model, variables, data = net
  batch = data.batch(jnp.arange(4))
  for span, moved in (((0, 1), 2 * [1] + 2 * [0] + 2 * [1]),
                      ((1, 2), [0, 0, 1, 0, 1, 1]),
                      ((2, 3), [0, 0, 0, 1, 1, 1])):  # fmt: skip
    (stage,) = stages.make_stages(model, [span])

    def loss(params, stage=stage):
      both = Variables(params, {})
      loss_fn = stages.stage_loss(CLASSIFICATION, stage, both)
      return loss_fn(both, batch, jax.random.key(0))[0]

    grads = jax.jit(jax.grad(loss))(variables.params)
    got = [
        int(any(np.any(leaf) for leaf in jax.tree.leaves(grads[name])))
        for name in model.block_names
    ]
    assert got == moved


def test_the_last_stage_is_the_whole_model(net):
  model, variables, data = net
  batch = data.batch(jnp.arange(4))
  logits, _ = model.apply(variables, batch.x, train=True)
  want = -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(4), batch.y])
  for spans in ([(0, 3)], [(2, 3)]):
    (stage,) = stages.make_stages(model, spans)
    got, _ = stages.stage_loss(CLASSIFICATION, stage, variables)(
        stage.pick(variables), batch, jax.random.key(0)
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_stage_inputs_have_the_batch_statistics_of_real_examples():
  """Nine examples and seven rows of padding in one batch."""
  model = small_preresnet(norm='batch_only')
  variables = model.init(jax.random.key(0))
  data = small_data().client(1)
  stage, _ = stages.make_stages(model, [(1, 2), (2, 3)])
  got = stages.stage_inputs(stage, variables, data, jax.random.key(3), 16)
  x = data.preprocess(data.images[data.index[:9]])
  want, _ = model.apply(variables, x, stop=2, train=True)
  np.testing.assert_allclose(got.at(jnp.arange(9)), want, rtol=1e-4, atol=1e-5)


def test_stage_inputs_are_the_frozen_blocks_outputs():
  model = small_preresnet(norm='group')
  variables = model.init(jax.random.key(0))
  data = small_data().client(1)  # Nine examples in a table of sixteen.
  first, second = stages.make_stages(model, [(1, 2), (2, 3)])
  key = jax.random.key(3)
  x = data.preprocess(data.images[data.index])
  got = stages.stage_inputs(first, variables, data, key, 4)
  want, _ = model.apply(variables, x, stop=2)
  examples = jnp.arange(9)
  np.testing.assert_allclose(
      got.at(examples), want[:9], rtol=1e-5, atol=1e-6
  )
  want, _ = model.apply(variables, x, stop=3)
  for before in (None, (first.frozen, got)):
    then = stages.stage_inputs(second, variables, data, key, 4, before)
    np.testing.assert_allclose(
        then.at(examples), want[:9], rtol=1e-5, atol=1e-6
    )


def test_batches_of_stage_inputs_have_keys_of_their_own(monkeypatch):
  """Nine examples in three batches, each augmented once."""

  def preprocess(images, key):
    return jnp.full(len(images), jax.random.bits(key))

  def apply_blocks(model, variables, x, positions, mask, key):
    return jnp.stack([x, jnp.full_like(x, jax.random.bits(key))], 1), None

  monkeypatch.setattr(stages, 'apply_blocks', apply_blocks)
  data = small_data().replace(preprocess=preprocess).client(1)
  (stage,) = stages.make_stages(small_preresnet(), [(1, 2)])
  got = stages.stage_inputs(stage, None, data, jax.random.key(3), 4)
  drawn = np.asarray(got.rows[:9])
  for i, row in enumerate(drawn):
    np.testing.assert_array_equal(row, drawn[i // 4 * 4])
  assert len(np.unique(drawn)) == 3 * 2
