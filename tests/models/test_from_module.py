"""Users' linen modules as models, given directly or by import path."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het import experiment, models
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine.types import Federation, Group
from fedjax_het.models.blocks import BlockModel
from tests.experiment.tiny_runs import tiny_config
from tests.tiny import tiny_local

SHAPE = (4, 4, 1)


class Net(nn.Module):
  """A dense layer with batch norm and dropout; logits if `out` is given."""

  features: int = 6
  out: int | None = None

  @nn.compact
  def __call__(self, x, train: bool = True):
    x = nn.Dense(self.features)(x.reshape(x.shape[0], -1))
    x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
    x = nn.Dropout(0.5, deterministic=not train)(x)
    return x if self.out is None else nn.Dense(self.out)(x)


class Maps(nn.Module):

  @nn.compact
  def __call__(self, x):
    return nn.Conv(2, (3, 3))(x)


def batch(num=3):
  return jax.random.normal(jax.random.key(1), (num, *SHAPE))


def test_a_module_is_a_trunk_and_a_head():
  model = BlockModel.from_module(Net(), SHAPE, 3)
  assert model.name == 'net'
  assert model.block_names == ('net_input', 'net_trunk', 'net_head')
  variables = model.init(jax.random.key(0))
  logits, _ = model.apply(variables, batch())
  inner = dict(
      params=variables.params['net_trunk']['module'],
      batch_stats=variables.stats['net_trunk']['module'],
  )
  features = Net().apply(inner, batch(), train=False)
  head = variables.params['net_head']
  want = features @ head['kernel'] + head['bias'][None]
  np.testing.assert_allclose(logits, want, rtol=1e-6)


def test_maps_are_flattened_before_the_head():
  model = BlockModel.from_module(Maps(), SHAPE, 3)
  assert model.outputs['maps_trunk'] == (32,)
  assert model.outputs['maps_head'] == (3,)


def test_training_is_told_to_the_module():
  model = BlockModel.from_module(Net(), SHAPE, 3)
  variables = model.init(jax.random.key(0))

  def train(seed):
    return model.apply(
        variables, batch(), train=True, key=jax.random.key(seed)
    )

  (first, stats), (same, _), (other, _) = train(2), train(2), train(3)
  np.testing.assert_array_equal(first, same)
  assert np.any(first != other)  # Dropout is on.
  old, new = (
      s['net_trunk']['module']['BatchNorm_0']['mean']
      for s in (variables.stats, stats)
  )
  assert np.any(old != new)


@pytest.mark.parametrize(
    ('name', 'inside'),
    [
        ('train', True),
        ('training', True),
        ('is_training', True),
        ('deterministic', False),
        ('use_running_average', False),
    ],
)
def test_other_names_of_the_switch(name, inside):
  names = dict(nn=nn)
  exec(
      'class Switched(nn.Module):\n'
      '  @nn.compact\n'
      f'  def __call__(self, x, *, {name}):\n'
      f'    return x.reshape(x.shape[0], -1) * (2.0 if {name} else 3.0)\n',
      names,
  )
  model = BlockModel.from_module(names['Switched'](), SHAPE, 16, head=False)
  variables = model.init(jax.random.key(0))
  for train in (True, False):
    y, _ = model.apply(variables, batch(), train=train)
    factor = 2.0 if train == inside else 3.0
    np.testing.assert_allclose(y, factor * batch().reshape(3, -1))


class OfABlock(nn.Module):

  @nn.compact
  def __call__(self, x, train, mask):
    x = x.reshape(x.shape[0], -1)
    return x if mask is None else jnp.where(mask[:, None], x, 7.0)


class Attention(nn.Module):

  @nn.compact
  def __call__(self, x, mask=None, train=False):
    assert mask is None
    return x.reshape(x.shape[0], -1)


@pytest.mark.parametrize(
    ('module', 'padded'), [(OfABlock(), True), (Attention(), False)]
)
def test_a_mask_is_given_to_modules_of_a_blocks_form_alone(module, padded):
  model = BlockModel.from_module(module, SHAPE, 16, head=False)
  mask = jnp.array([True, False, True])
  variables = model.init(jax.random.key(0))
  y, _ = model.apply(variables, batch(), train=True, mask=mask)
  want = np.array(batch().reshape(3, -1))
  if padded:
    want[1] = 7.0
  np.testing.assert_array_equal(y, want)


def test_modules_by_name_are_cut():
  modules = dict(stem=Net(8), middle=Net(8), last=Net(5))
  model = BlockModel.from_module(modules, SHAPE, 3, name='mine')
  assert model.block_names == ('stem', 'middle', 'last', 'mine_head')
  assert model.extractor == ('stem',) and model.classifier == ('mine_head',)
  assert model.intermediate == ('middle', 'last')
  model = BlockModel.from_module(modules, SHAPE, 5, head=False, cut=(1, 2))
  assert model.intermediate == ('middle',) and model.classifier == ('last',)


class Cached(nn.Module):

  @nn.compact
  def __call__(self, x):
    self.variable('cache', 'x', lambda: x)
    return x.reshape(x.shape[0], -1)


def test_wrong_modules_are_refused_in_one_line():
  for modules, options, message in (
      (Net(), dict(head=False), r'output of an example has shape \(6,\), exp'),
      (3, {}, "'net_trunk' must be a flax.linen module, got int"),
      (Cached(), {}, "'cached_trunk' keeps cache"),
      (dict(a=Net(4), b=Net(3)), dict(head=False), r'cut \(1, 1\) must'),
      (nn.Conv(2, (3, 3), kernel_init=None), {}, 'does not take an input'),
      (dict(a=Net(), a_head=Net()), dict(name='a'), 'repeats a block name'),
  ):
    with pytest.raises(ValueError, match=message) as error:
      BlockModel.from_module(modules, SHAPE, 3, **options)
    assert '\n' not in str(error.value)


def test_raw_inputs_under_fedin_are_warned_of(caplog):
  def federation(model):
    group = Group('mine', model, np.arange(2))
    return Federation((group,), tiny_local())

  with caplog.at_level(logging.WARNING):
    ALGORITHMS['fedin'](federation(BlockModel.from_module(Net(), SHAPE, 3)))
  assert 'group mine is the identity: its clients send their raw' in caplog.text
  caplog.clear()
  named = dict(stem=Net(8), last=Net(5))
  ALGORITHMS['fedin'](federation(BlockModel.from_module(named, SHAPE, 3)))
  assert not caplog.text


FILE = '''
from __future__ import annotations

import flax.linen as nn

class Net(nn.Module):
  features: int

  @nn.compact
  def __call__(self, x):
    return nn.relu(nn.Dense(self.features)(x.reshape(x.shape[0], -1)))

def net(input_shape, num_classes, *, features: int = 8):
  return Net(features)

def wrong(input_shape, num_classes):
  return 3

def any_tuple(input_shape: tuple, num_classes):
  return Net(4)

def images(input_shape: tuple[int, int, int], num_classes):
  return Net(4)

def by_position(input_shape, num_classes, features):
  return Net(features)

def unknown_type(input_shape: Shape, num_classes):
  return Net(4)

def sized(input_shape, num_classes, *, sizes: tuple[int, ...]):
  return Net(sizes[0])
'''


@pytest.fixture
def my_file(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'my_file.py').write_text(FILE)


def test_a_model_by_import_path_trains_and_is_read_back(my_file, tmp_path):
  config = tiny_config('fedavg', num_rounds=1)
  config.groups = dict(
      small=dict(model='my_file:net', clients=3),
      large=dict(model='my_file.py:net', clients=2, features=16),
  )
  config.model = {}
  result = experiment.run(config, tmp_path / 'run')
  assert result.facts['groups']['large']['parameters'] == 64 * 16 + 16 + 170
  run = experiment.load_run(tmp_path / 'run')
  apply, variables = run.model('small')
  assert {*variables.params} == {
      'my_file_net_input', 'my_file_net_trunk', 'my_file_net_head'
  }
  assert apply(variables, np.zeros((2, 8, 8, 1), np.uint8)).shape == (2, 10)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (dict(model='my_file:nett'), 'my_file has no function nett'),
        (dict(model='no_file:net'), "Model 'no_file:net' cannot be used"),
        (dict(model='no.py:net'), r'no\.py is no file'),
        (dict(model='my_file:'), 'it must be MODULE:FUNCTION'),
        (dict(model='my_file:Net'), 'it is a class, not a function'),
        (dict(model='my_file:by_position'), 'must take .input_shape, num_cl'),
        (dict(model='my_file:unknown_type'), "name 'Shape' is not defined"),
        (dict(model='builtins:max'), 'no signature found'),
        (dict(model='my_file:sized'), r'mine\.sizes is missing'),
        (dict(model='my_file:sized', sizes=3), r'must be tuple\[int, \.\.\.\]'),
        (dict(model='my_file:net', width=2), "has no option 'width'; it takes"),
        (dict(model='my_file:net', features=0.5), 'features must be an int'),
    ],
)
def test_wrong_import_paths_are_refused(my_file, changes, message):
  config = tiny_config('fedavg')
  config.groups = dict(mine=dict(clients=5, **changes))
  config.model = {}
  with pytest.raises(ValueError, match=message) as error:
    experiment.check(config)
  assert 'groups.mine' in str(error.value) and '\n' not in str(error.value)


def test_what_a_constructor_returns_is_checked(my_file):
  with pytest.raises(ValueError, match='a BlockModel or a flax'):
    models.create('my_file:wrong', SHAPE, 3)
  with pytest.raises(ValueError, match="'my_file:sized' needs the option 'siz"):
    models.create('my_file:sized', SHAPE, 3)
  model = models.create('my_file:net', (7,), 3, features=4)
  assert model.name == 'my_file_net_features4' and model.input_shape == (7,)
  models.create('my_file:any_tuple', (7,), 3)
  with pytest.raises(ValueError, match=r'must be \(height, width, channels\)'):
    models.create('my_file:images', (7,), 3)


def test_functions_of_one_name_in_two_files_are_two_architectures(
    my_file, tmp_path
):
  (tmp_path / 'other.py').write_text(FILE.replace('nn.relu', 'nn.tanh'))
  mine, other = (
      models.create(f'{file}:net', (7,), 3) for file in ('my_file', 'other')
  )
  assert not {*mine.block_names} & {*other.block_names}
