"""Every wrong config is refused with its own line."""

import json
import pathlib

import ml_collections
import pytest

from fedjax_het import algorithms, experiment
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.experiment.config import default_config
from fedjax_het.experiment.optimizers import OPTIMIZERS
from fedjax_het.experiment.stored_config import with_new_entries
from tests.experiment.tiny_runs import tiny_config


def message(config, call=experiment.check):
  with pytest.raises(ValueError) as error:
    call(config)
  text = str(error.value)
  assert '\n' not in text
  return text


def test_the_table_of_algorithms_holds_every_module_of_its_folder():
  folder = pathlib.Path(algorithms.__file__).parent
  paths = [*folder.glob('[a-z]*.py'), *folder.glob('[a-z]*/__init__.py')]
  modules = set()
  for path in paths:
    name = path.parent.name if path.stem == '__init__' else path.stem
    # Helper modules have no constructor of their own name.
    if f'def {name}(' in path.read_text():
      modules.add(name)
  assert modules == {
      constructor.__module__.rpartition('.')[2]
      for constructor in ALGORITHMS.values()
  }


@pytest.mark.parametrize('name', ALGORITHMS)
def test_default_config_of_every_algorithm_is_right(name):
  config = experiment.default_config(name)
  experiment.check(config)
  assert config.is_locked
  # It survives JSON, so a workdir can store it.
  assert json.loads(json.dumps(config.to_dict()))['algorithm']['name'] == name


@pytest.mark.parametrize(
    ('change', 'expected'),
    [
        (dict(seed=-1), 'seed must be at least 0, got -1.'),
        (dict(num_rounds=0), 'num_rounds must be at least 1, got 0.'),
        (
            dict(dataset='digit'),
            "Unknown dataset 'digit'; did you mean 'digits'? Known are",
        ),
        (
            dict(backend='vmpa'),
            "Unknown backend 'vmpa'; did you mean 'vmap'? Known are auto, "
            'loop, map, vmap, shard_map, pmap.',
        ),
        (dict(nonfinite='ignore'), "Unknown nonfinite 'ignore'; known are"),
        (
            dict(cohort_size=6),
            'cohort_size=6 is more than the 5 clients of all groups; set it to '
            '5 or less.',
        ),
        (
            dict(target_accuracy=90.0),
            'target_accuracy must be a share of at most 1, got 90.0; for '
            'percent divide by 100.',
        ),
        (
            dict(local__learning_rate=0.0),
            'local.learning_rate must be above 0, got 0.0.',
        ),
        (
            dict(local__learning_rate=float('nan')),
            'local.learning_rate must be a finite number, got nan.',
        ),
        (
            dict(local__optimizer='sdg'),
            "Unknown local.optimizer 'sdg'; did you mean 'sgd'? Known are "
            f'{", ".join(OPTIMIZERS)}.',
        ),
        (
            dict(local__momentum=0.9),
            'local.momentum and local.nesterov are for the optimizer sgd, got '
            "'adam'.",
        ),
        (
            dict(local__schedule='step'),
            "local.lr_rounds=() does not fit local.schedule='step'; step needs "
            'rounds, the others none.',
        ),
        (
            dict(local__lr_rounds=(0,), local__schedule='step'),
            'local.lr_rounds must be at least 1, got 0.',
        ),
        (
            dict(partition__name='dirichlt'),
            "Unknown partition 'dirichlt'; did you mean 'dirichlet'? Known",
        ),
        (
            dict(partition__name='iid'),
            "partition.alpha: partition 'iid' has no option 'alpha'; it takes",
        ),
        (
            dict(partition__seed=-1),
            'partition.seed must be at least 0, got -1.',
        ),
        (
            dict(groups=dict(clients=5)),
            "A group cannot be called 'clients'; use letters, digits and _.-, "
            'and none of worst, mean, clients.',
        ),
        (
            dict(groups__small__clients=0),
            'groups.small.clients must be at least 1, got 0.',
        ),
        (
            dict(groups__small__model='mpl'),
            "Unknown model of groups.small 'mpl'; did you mean 'mlp'? Known",
        ),
        (
            dict(algorithm__name='fedinn'),
            "Unknown algorithm 'fedinn'; did you mean 'fedin'? Known are",
        ),
    ],
)
def test_refuses_values(change, expected):
  config = tiny_config()
  for name, value in change.items():
    *path, key = name.split('__')
    section = config
    for part in path:
      section = section[part]
    section[key] = value
  assert message(config).startswith(expected)


@pytest.mark.parametrize(
    ('name', 'value', 'expected'),
    [
        ('num_rounds', True, 'num_rounds must be an integer, got True.'),
        ('num_rounds', 2.5, 'num_rounds must be an integer, got 2.5.'),
        ('tensorboard', 1, 'tensorboard must be True or False, got 1.'),
        ('dataset', 3, 'dataset must be a string, got 3.'),
        (
            'cohort_size',
            'all',
            "cohort_size must be an integer or None, got 'all'.",
        ),
        ('local', 3, 'local must be a section, got 3.'),
        (
            'groups',
            dict(worst=3),
            "A group cannot be called 'worst'; use letters, digits and _.-, "
            'and none of worst, mean, clients.',
        ),
        ('groups', {}, 'groups is empty; name at least one model.'),
        (
            'groups',
            {'a/b': 3},
            "A group cannot be called 'a/b'; use letters, digits and _.-, and "
            'none of worst, mean, clients.',
        ),
        (
            'groups',
            dict(mlp=True),
            'groups.mlp must be an integer, got True.',
        ),
        (
            'groups',
            dict(mlp=dict(clients=2, dpth=3)),
            "groups.mlp.dpth: model 'mlp' has no option 'dpth'; did you mean "
            "'depth'? It takes depth, hidden, norm, init.",
        ),
        (
            'model',
            dict(widht=2.0),
            "model.widht: none of the models has an option 'widht'; they take "
            'depth, hidden, init, norm. To leave all of them out: '
            'config.model = {}.',
        ),
        (
            'model',
            dict(hidden=True),
            'groups.large.hidden must be an integer, got True.',
        ),
        (
            'algorithm',
            dict(name='fedavg', mu=0.1),
            "algorithm.mu: algorithm 'fedavg' has no option 'mu'; it takes "
            'aggregation, weights, mask, server_lr, server_optimizer, '
            'server_momentum, server_eps.',
        ),
        (
            'algorithm',
            dict(name='fedprox', mu='0.1'),
            "algorithm.mu must be a finite number, got '0.1'.",
        ),
    ],
)
def test_refuses_what_a_locked_config_would_not_hold(name, value, expected):
  # A config made by hand, without the types that a ConfigDict enforces.
  plain = tiny_config().to_dict()
  plain[name] = value
  assert message(ml_collections.ConfigDict(plain)) == expected


def test_refuses_unknown_and_missing_keys():
  plain = tiny_config().to_dict()
  unknown = ml_collections.ConfigDict({**plain, 'num_round': 3})
  assert message(unknown).startswith(
      "Unknown config key num_round; did you mean 'num_rounds'? Known are"
  )
  del plain['local']['epochs']
  missing = ml_collections.ConfigDict(plain)
  assert message(missing) == (
      'The config lacks local.epochs; begin with default_config().'
  )


def test_model_options_go_to_the_models_that_have_them():
  config = tiny_config()
  config.groups = ml_collections.ConfigDict(
      dict(mlp=2, resnet10=dict(clients=1, width=0.125))
  )
  config.model = ml_collections.ConfigDict(
      dict(hidden=8, width=0.25, norm='group')
  )
  from fedjax_het.experiment.config import group_spec

  assert group_spec(config, 'mlp')[:3] == (
      'mlp', 2, dict(hidden=8, norm='group'),
  )  # fmt: skip
  assert group_spec(config, 'resnet10')[:3] == (
      'resnet10', 1, dict(width=0.125, norm='group'),
  )  # fmt: skip


def test_a_config_of_an_older_version_gets_the_defaults_of_what_is_new():
  """Stored entries stay, and chosen groups are not mixed with the defaults."""
  config = default_config('fedprox')
  config.local.epochs = 7
  config.groups = ml_collections.ConfigDict(dict(mlp=3))
  full = json.loads(json.dumps(config.to_dict()))
  old = json.loads(json.dumps(full))
  del old['public_size'], old['local']['steps'], old['algorithm']['server_lr']
  assert with_new_entries(old) == full
  assert with_new_entries(dict(algorithm=dict(name='gone')))['seed'] == 0


def test_cut_outs_of_older_versions_were_black():
  """The default has changed; configs without a cut-out are not affected."""
  config = default_config('fedavg')
  for augment, cutout in (('crop_flip_cutout', 'before'), ('none', 'after')):
    config.local.augment = augment
    old = json.loads(json.dumps(config.to_dict()))
    del old['local']['cutout']
    assert with_new_entries(old)['local']['cutout'] == cutout


def test_what_preresnets_of_older_versions_were():
  config = default_config('fedavg')
  config.groups = ml_collections.ConfigDict(
      dict(a=dict(model='preresnet20', clients=10))
  )
  new = json.loads(json.dumps(config.to_dict()))
  assert 'init' not in with_new_entries(new)['model']
  old = {**new, 'local': {k: v for k, v in new['local'].items()
                          if k != 'cutout'}}  # fmt: skip
  model = with_new_entries(old)['model']
  assert model['init'] == 'he_fan_out' and model['preact_shortcut'] is False
  old['groups'] = dict(mlp=10)
  assert 'init' not in with_new_entries(old)['model']


def test_whose_optimisers_stay_is_read_from_older_configs():
  """`keep_optimizer` was an option of two methods; others had no choice."""
  for name, stored, want in (
      ('private', True, True),
      ('private', False, False),
      ('fedmd', False, False),
      ('fedmd', None, True),
      ('fedhe', None, True),
      ('fedavg', None, False),
      ('fedin', None, False),
  ):
    old = json.loads(json.dumps(default_config(name).to_dict()))
    del old['local']['keep_optimizer']
    if stored is not None:
      old['algorithm']['keep_optimizer'] = stored
    new = with_new_entries(old)
    assert new['local']['keep_optimizer'] is want
    assert 'keep_optimizer' not in new['algorithm']


def test_a_stored_planner_is_a_plan():
  for planner, plan in (('paper', 'paper'), ('xla', 'measured')):
    stored = dict(algorithm=dict(name='fedepth', planner=planner, slack=0.1))
    section = with_new_entries(stored)['algorithm']
    assert (section['plan'], section['slack']) == (plan, 0.1)
    assert 'planner' not in section
    assert stored['algorithm']['planner'] == planner


@pytest.mark.parametrize(
    ('name', 'value', 'expected'),
    [
        ('seed', 2**32, 'seed must be at most 4294967295, got 4294967296.'),
        ('seed', 2**63, 'seed must be at most 4294967295, got 92233720368547'),
        ('sampling_seed', 2**63, 'sampling_seed must be at most 4294967295'),
        ('group_seed', 2**63, 'group_seed must be at most 4294967295'),
        ('clock.seed', 2**64, 'clock.seed must be at most 4294967295'),
        ('clock.device_seed', 2**64, 'clock.device_seed must be at most 42949'),
        ('partition.seed', 2**64, 'partition.seed must be at most 4294967295'),
        ('local.steps', 2**64, 'local.steps must be at most 2147483647, got 1'),
        ('local.lr_rounds', (2**40,), 'local.lr_rounds must be at most 214748'),
        ('num_rounds', 10**12, 'num_rounds must be at most 2147483647, got 1'),
        (
            'num_rounds',
            10**1000,
            'num_rounds must be at most 2147483647, got an integer of 3322 bit',
        ),
        ('model.hidden', 2**31, 'groups.large.hidden must be at most 21474836'),
        ('partition.min_size', 2**40, 'partition.min_size must be at most 214'),
        ('algorithm.mu', 1e300, 'algorithm.mu must be 0 or of a size between'),
        ('algorithm.mu', 1e-300, 'algorithm.mu must be 0 or of a size between'),
        ('local.learning_rate', 1e-46, 'local.learning_rate must be 0 or of a'),
        ('groups.small.model', ['mlp'], "Unknown model of groups.small ['mlp'"),
        ('clock.mode', {'a': {'b': 1}}, 'clock.mode must be a string, got a: '),
        ('dataset', 'x' * 9000, "Unknown dataset 'xxxxxxxxxxxxx"),
    ],
)
def test_refuses_what_no_array_holds(name, value, expected):
  config = tiny_config('fedprox')
  *path, key = name.split('.')
  section = config
  for part in path:
    section = section[part]
  with config.unlocked(), config.ignore_type():
    section[key] = value
    if key == 'lr_rounds':
      config.local.schedule = 'step'
  text = message(config)
  assert text.startswith(expected)
  assert len(text) < 600


def test_the_largest_seed_is_right():
  experiment.check(tiny_config(seed=2**32 - 1, partition__seed=2**32 - 1))


def test_refuses_more_uploads_than_can_be_counted():
  config = tiny_config(num_rounds=10**9, clock__mode='async')
  assert message(config).startswith(
      'num_rounds=1000000000 makes 4000000000 uploads, more than the 21474836'
  )
  config.num_rounds = 5 * 10**8
  experiment.check(config)
