"""Users' linen modules with `slices`, in methods over widths."""

import dataclasses
from fractions import Fraction

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_het.aggregation.slicing import (
  extract,
  make_level,
  narrow,
)
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.data.federated import federate
from fedjax_het.engine import rounds
from fedjax_het.engine.needs import with_heads
from fedjax_het.engine.types import Federation, Group
from fedjax_het.models import create
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.models.norm import norm_layer
from fedjax_het.models.running_stats import without_running_stats
from fedjax_het.models.slices import Slices
from tests.tiny import NUM_CLASSES, SHAPE, preprocess, tiny_data, tiny_local

KEYS = (jax.random.key(1), jax.random.key(2))


class Net(nn.Module):
  """Two linen convolutions, whose output is a map."""

  slices = Slices(('features',), dict(Conv_0=('x', 'h'), Conv_1=('h', 'y')))

  features: int

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Conv(self.features, (3, 3))(x))
    return nn.relu(nn.Conv(self.features, (3, 3))(x))


class Layer(nn.Module):
  """One dense layer on flattened inputs."""

  slices = Slices(('features',), dict(Dense_0=('x', 'y')), flattens=True)

  features: int

  @nn.compact
  def __call__(self, x, train: bool):
    return nn.relu(nn.Dense(self.features)(x.reshape(x.shape[0], -1)))


class Normed(nn.Module):
  """A library norm, with the field `norm` that width methods change."""

  slices = Slices((), dict(norm=('x', 'x')))

  norm: str = 'batch'

  @nn.compact
  def __call__(self, x, train, mask):
    return norm_layer(self.norm, 'norm')(x, train, mask)


class OwnNorm(nn.Module):
  """Running statistics without the field `norm`."""

  slices = Slices((), dict(BatchNorm_0=('x', 'x')))

  @nn.compact
  def __call__(self, x, train: bool):
    return nn.BatchNorm(use_running_average=not train)(x)


class Plain(nn.Module):

  @nn.compact
  def __call__(self, x):
    return nn.Dense(4)(x)


def layers(features):
  parts = ('stem', 'layer1', 'layer2')
  return {name: Layer(features) for name in parts} | dict(norm=Normed())


MODULES = [
    Net,
    layers,
    lambda features: Net(features, name='called'),
    lambda features: dict(maps=Net(features), layer=Layer(features)),
]


def model_of(modules):
  return BlockModel.from_module(modules, SHAPE, NUM_CLASSES, name='mine')


def federation(modules, **options):
  """A group of one client for each value of the options."""
  model = model_of(modules)
  groups = tuple(
      Group(
          f'group{i}',
          model,
          np.array([i]),
          options=dict(zip(options, values)),
      )
      for i, values in enumerate(zip(*options.values()))
  )
  return Federation(groups, tiny_local())


@pytest.mark.parametrize('modules', MODULES)
def test_a_narrow_copy_is_the_net_built_narrow_by_hand(modules):
  full, small = model_of(modules(6)), model_of(modules(3))
  level = make_level(full, Fraction(1, 2))
  assert level.model == small
  rng = np.random.default_rng(0)
  whole = jax.tree.map(
      lambda leaf: rng.normal(size=leaf.shape).astype(np.float32),
      full.abstract_variables.params,
  )
  cut = extract(whole, level.index)
  want = jax.tree.map(jnp.shape, small.abstract_variables.params)
  assert jax.tree.map(jnp.shape, cut) == want
  # The other channels of every leaf are zero; all classes are kept.
  masked = jax.tree.map(
      lambda axes, leaf: np.where(_held(axes, leaf), leaf, 0),
      level.index,
      whole,
      is_leaf=lambda x: type(x) is tuple,
  )
  x = rng.normal(size=(4, *SHAPE)).astype(np.float32)
  stats = [
      jax.tree.map(
          lambda leaf: np.ones(leaf.shape, np.float32),
          model.abstract_variables.stats,
      )
      for model in (full, small)
  ]
  got, _ = jax.jit(small.apply)(Variables(cut, stats[1]), x)
  same, _ = jax.jit(full.apply)(Variables(masked, stats[0]), x)
  np.testing.assert_allclose(got, same, rtol=1e-4, atol=1e-4)


def _held(axes, leaf):
  """A mask of the entries that a narrow leaf holds."""
  held = np.zeros(leaf.shape, bool)
  sets = (np.arange(n) if a is None else a for a, n in zip(axes, leaf.shape))
  held[np.ix_(*sets)] = True
  return held


def test_a_round_of_heterofl_trains_modules_of_users():
  mine = federation(Layer(4), rate=('1/2',))
  algorithm = ALGORITHMS['heterofl'](mine)
  state = rounds.init_state(algorithm, mine, KEYS[0])
  run_round = rounds.make_round(algorithm, mine, cohort_size=1, backend='map')
  before = jax.device_get(state.server.params)
  state, _ = run_round(state, tiny_data((5,)), *KEYS)
  old, new = (
      np.asarray(params['mine_trunk']['module']['Dense_0']['kernel'])
      for params in (before, state.server.params)
  )
  moved = np.any(old != new, axis=0)
  assert moved.tolist() == [True, True, False, False]


class Whole(nn.Module):
  """A hidden layer and the classifier in one module."""

  slices = Slices(
      ('features',),
      dict(Dense_0=('x', 'h'), Dense_1=('h', '*')),
      flattens=True,
  )

  features: int

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Dense(self.features)(x.reshape(x.shape[0], -1)))
    return nn.Dense(NUM_CLASSES)(x)


class Unnamed(Whole):
  slices = Whole.slices._replace(
      layers=dict(Dense_0=('x', 'h'), Dense_1=('h', 'y'))
  )


def whole_of(modules):
  """A model that ends in a user's classifier, of two clients of one width."""
  model = BlockModel.from_module(
      modules, SHAPE, NUM_CLASSES, name='mine', head=False
  )
  groups = (Group('group', model, np.arange(2), options=dict(rate='1')),)
  decayed = lambda lr: optax.chain(  # noqa: E731
      optax.add_decayed_weights(0.1), optax.sgd(lr)
  )
  return Federation(groups, tiny_local(decayed, 0.1, 1))


@pytest.mark.parametrize('name', ['heterofl', 'fedrolex'])
@pytest.mark.parametrize('wrapped', [False, True])
def test_the_rows_of_a_users_classifier_belong_to_the_owners_of_labels(
    name, wrapped
):
  modules = Whole(8)
  if wrapped:
    modules = dict(stem=Layer(4), middle=Layer(4), last=modules)
  mine = whole_of(modules)
  algorithm = ALGORITHMS[name](mine)
  run_round = rounds.make_round(algorithm, mine, cohort_size=2, backend='map')
  # Client 0 has label 0 alone, client 1 has label 1, and nobody has label 2.
  images = np.random.default_rng(0).integers(0, 256, (6, *SHAPE), np.uint8)
  labels = np.array([0, 0, 1, 1, 2, 2])

  def rows_after(*parts):
    """The change of the classifier's kernel, by label."""
    data = federate(images, labels, parts, preprocess, allow_empty=True)
    state = rounds.init_state(algorithm, mine, KEYS[0])
    before = jax.device_get(state.server.params)
    state, _ = run_round(state, data, *KEYS)
    change = jax.tree.map(lambda a, b: a - b, state.server.params, before)
    last = change['last' if wrapped else 'mine_trunk']['module']
    return np.asarray(last['Dense_1']['kernel']).T

  first, second = np.arange(2), np.arange(2, 4)
  both = rows_after(first, second)
  nobody = np.array([], int)
  assert np.all(both[2] == 0) and np.all(np.any(both[:2] != 0, axis=1))
  # Not divided by two: a row has one holder.
  np.testing.assert_allclose(
      both[0], rows_after(first, nobody)[0], rtol=1e-5, atol=1e-7
  )
  np.testing.assert_allclose(
      both[1], rows_after(nobody, second)[1], rtol=1e-5, atol=1e-7
  )


@pytest.mark.parametrize('name', ['heterofl', 'fedrolex'])
def test_without_a_known_classifier_labels_own_no_rows(name):
  mine, make = whole_of(Unnamed(8)), ALGORITHMS[name]
  with pytest.raises(ValueError, match="in 'mine' no layer of the last block"):
    make(mine)
  algorithm = make(mine, mask='none')
  run_round = rounds.make_round(algorithm, mine, cohort_size=2, backend='map')
  state = jax.eval_shape(
      lambda key: rounds.init_state(algorithm, mine, key), KEYS[0]
  )
  jax.eval_shape(run_round, state, tiny_data((5, 8)), *KEYS)


@pytest.mark.parametrize(
    ('name', 'groups', 'options'),
    [
        ('fedrolex', dict(rate=('1', '1/2')), {}),
        ('splitmix', dict(budget=('1', '1/2')), dict(num_bases=2)),
        ('scalefl', dict(rate=('1', '1/2'), exit=('1', '1/2')), {}),
    ],
)
def test_other_methods_over_widths_take_them(name, groups, options):
  make = ALGORITHMS[name]
  mine = with_heads(make, federation(layers(4), **groups))
  algorithm = make(mine, **options)
  state = jax.eval_shape(
      lambda key: rounds.init_state(algorithm, mine, key), KEYS[0]
  )
  run_round = rounds.make_round(algorithm, mine, cohort_size=2, backend='map')
  after, _ = jax.eval_shape(run_round, state, tiny_data((5, 8)), *KEYS)
  assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def test_a_module_without_slices_is_refused_by_its_class():
  for modules, block in (
      (Plain(), 'mine_trunk'),
      (dict(first=Layer(4), a=Plain()), 'a'),
  ):
    model = model_of(modules)
    with pytest.raises(ValueError, match=f"'{block}' is a Plain, .* slices="):
      narrow(model, lambda k: k // 2)


def test_running_statistics_are_refused_by_the_users_class():
  model = model_of(OwnNorm())
  with pytest.raises(ValueError, match='give OwnNorm a field norm'):
    without_running_stats(model)


class FlaxNormed(nn.Module):
  """A convolution with a norm of flax."""

  slices = Slices(
      ('features',), dict(Conv_0=('x', 'y'), LayerNorm_0=('y', 'y'))
  )

  features: int

  @nn.compact
  def __call__(self, x):
    return nn.relu(nn.LayerNorm()(nn.Conv(self.features, (3, 3))(x)))


def test_splitmix_refuses_convolutions_that_no_norm_follows():
  mine = federation(FlaxNormed(4), budget=('1', '1/2'))
  ALGORITHMS['splitmix'](mine, num_bases=2)
  mine = federation(Net(4), budget=('1', '1/2'))
  with pytest.raises(ValueError, match="in 'mine' no norm follows the last "):
    ALGORITHMS['splitmix'](mine, num_bases=2)
  ALGORITHMS['splitmix'](mine, num_bases=2, rescale=False)


class WrongOrder(Net):
  slices = Slices(('features',), dict(Conv_1=('h', 'y'), Conv_0=('x', 'h')))


class NoField(Net):
  slices = Slices(('width',), Net.slices.layers)


@pytest.mark.parametrize(
    ('net', 'message'),
    [
        (WrongOrder, "WrongOrder give 'Conv_1' the inputs 'h', which is"),
        (NoField, "NoField name the field 'width', which it does not"),
    ],
)
def test_wrong_slices_are_refused_in_one_line(net, message):
  with pytest.raises(ValueError, match=message) as error:
    make_level(model_of(net(4)), Fraction(1, 2))
  assert '\n' not in str(error.value)


def test_narrow_models_leave_pretrained_parameters_to_the_whole_one():
  model = create('mlp', SHAPE, NUM_CLASSES, hidden=8)
  values = model.init(jax.random.key(7)).params
  ready = dataclasses.replace(model, pretrained=values)
  narrow_model = make_level(ready, Fraction(1, 2)).model
  shape = narrow_model.abstract_variables.params['stem']['linear']['kernel']
  assert shape.shape == (4, 4)
  groups = (
      Group('a', ready, np.array([0, 1]), options=dict(rate='1')),
      Group('b', ready, np.array([2, 3]), options=dict(rate='1/2')),
  )
  federation = Federation(groups, tiny_local())
  for name, options in (
      ('heterofl', dict(levels=(), odds=())), ('fedrolex', {}),
  ):  # fmt: skip
    algorithm = ALGORITHMS[name](federation, **options)
    state = rounds.init_state(algorithm, federation, jax.random.key(0))
    got = algorithm.client_model(state.server, (), groups[0])
    jax.tree.map(np.testing.assert_array_equal, got.params, values)
  groups = tuple(dataclasses.replace(group, options={}) for group in groups)
  with pytest.raises(ValueError, match=r'SplitMix .* mlp2 has pretrained'):
    ALGORITHMS['splitmix'](Federation(groups, tiny_local()))
