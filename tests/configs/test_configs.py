"""Every experiment file: its variants fit together, and `quick` runs."""

import importlib.util
import pathlib

import jax
import numpy as np
import pytest

from configs import common
from configs.tables import fedepth_fig2, fedepth_fig3
from fedjax_het import experiment
from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine.needs import needs_of
from fedjax_het.engine.rounds import init_state, make_round
from fedjax_het.experiment.build import build
from fedjax_het.experiment.config import cohort_size, group_spec, model_spec
from fedjax_het.models import create
from tests.models.augreg import PATCH, save

FOLDER = pathlib.Path(common.__file__).parent
METHODS = sorted(
    path.stem
    for path in FOLDER.glob('*.py')
    if path.stem != 'common' and 'def get_config(' in path.read_text()
)
# Methods whose quick run is not marked slow.
OFTEN = ('fedavg', 'fedin')


def load(name):
  spec = importlib.util.spec_from_file_location(name, FOLDER / f'{name}.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def one_model(name):
  """Whether all groups of a method must have the same architecture."""
  return needs_of(ALGORITHMS[name]).one_model


def num_params(spec):
  """The parameters of a model for CIFAR-10."""
  return create(spec.model, (32, 32, 3), 10, **spec.options).num_params


def group_options(config):
  """{group: its options of the method}."""
  return {name: group_spec(config, name).method for name in config.groups}


def variants_of(name):
  return [
      *common.DATA,
      *common.SETTINGS,
      *common.SPLITS,
      *common.MODELS,
      *common.SIZES,
      *common.CLOCKS,
      *getattr(load(name), 'VARIANTS', {}),
  ]


def test_there_is_a_file_for_every_algorithm():
  assert METHODS == sorted(ALGORITHMS)


@pytest.mark.parametrize('name', METHODS)
def test_the_docstring_says_how_to_run_it(name):
  doc = load(name).get_config.__doc__
  assert 'python -m launch.train' in doc


@pytest.mark.parametrize('name', METHODS)
def test_every_variant_is_a_valid_config_of_its_own(name):
  module = load(name)
  plain = module.get_config().to_dict()
  experiment.check(module.get_config())
  for variant in variants_of(name):
    config = module.get_config(variant)
    experiment.check(config)
    # The clocks that they have by default.
    if (name, variant) not in (('fedasync', 'async'), ('fedat', 'tiers')):
      assert config.to_dict() != plain, variant
    assert config.algorithm.name == name
    if variant in common.SIZES:
      continue
    # The size is applied last, wherever it stands in the argument.
    for arg in (f'quick,{variant}', f'{variant},quick'):
      quick = module.get_config(arg)
      experiment.check(quick)
      assert quick.num_rounds == 2


def test_variants_compose():
  get_config = load('fedin').get_config
  config = get_config('iid,noise,fashion_mnist,wo_prox,v2')
  assert config.partition.to_dict() == dict(name='iid', seed=0)
  assert config.algorithm.noise == 0.8 and config.algorithm.mu == 0.0
  assert config.dataset == 'fashion_mnist' and config.num_rounds == 500
  assert config.target_accuracy == 0.85


def test_the_papers_settings():
  v1 = load('fedin').get_config('v1')
  assert v1.groups.to_dict() == dict(
      fedin_a=2, fedin_b=1, fedin_c=2, fedin_d=2, fedin_e=3
  )
  assert (v1.dataset, v1.num_rounds, v1.local.epochs) == ('cifar10', 200, 5)
  assert (v1.local.schedule, v1.local.lr_rounds) == ('step', (25,))
  assert (v1.algorithm.lam, v1.algorithm.mu) == (2.0, 0.0)
  assert v1.algorithm.aggregation == 'ends' and v1.cohort_size is None
  fashion = load('fedin').get_config('fashion_mnist,v1')
  assert (fashion.local.epochs, fashion.local.lr_rounds) == (1, (60,))
  v2 = load('fedin').get_config('v2')
  assert sum(v2.groups.to_dict().values()) == 100 and v2.cohort_size == 10
  assert (v2.num_rounds, v2.local.epochs, v2.local.batch_size) == (500, 5, 16)
  assert (v2.algorithm.lam, v2.algorithm.mu) == (1.0, 0.1)
  assert v2.algorithm.num_pairs is None  # One batch.
  assert (v1.algorithm.num_pairs, v1.algorithm.max_pair_age) == (1024, None)
  # As the authors' loaders do; the default experiment keeps all examples.
  assert v1.local.drop_last and v2.local.drop_last
  assert not load('fedin').get_config().local.drop_last
  # Every method of a comparison has the same setting.
  for name in METHODS:
    other = load(name).get_config('v2').to_dict()
    mine = v2.to_dict()
    # FedMD needs a public set, Fed-ET a server model, FedAsync the asynchronous
    # clock.
    own_entries = [
        'algorithm', 'public_size', 'server_model', 'clock', 'devices'
    ]  # fmt: skip
    # Methods that need one architecture define their own groups.
    own_entries += ['groups'] if one_model(name) else []
    for own in own_entries:
      del other[own], mine[own]
    # The default of `keep_optimizer` depends on the method.
    del other['local']['keep_optimizer'], mine['local']['keep_optimizer']
    assert other == mine


def test_the_server_of_fedet_has_the_largest_model():
  for variants in ('', 'v1', 'v2', 'quick', 'fedhe', 'text'):
    config = load('fedet').get_config(variants)
    sizes = [num_params(group_spec(config, name)) for name in config.groups]
    server = num_params(model_spec(config, config.server_model))
    assert server == max(sizes), variants
  assert load('fedet').get_config().server_model == 'mini_resnet10'


def test_the_setting_of_fedhe():
  config = load('fedhe').get_config('fedhe')
  assert config.groups.to_dict() == {f'fedhe_cnn{i}': 1 for i in range(10)}
  local = config.local
  assert (local.steps, local.batch_size, local.learning_rate) == (3, 50, 1e-3)
  assert (config.num_rounds, config.cohort_size) == (5000, None)
  assert config.partition.name == 'iid' and config.dataset == 'mnist'
  one = load('fedhe').get_config('homogeneous,fedhe,cifar10,dirichlet,cpu')
  assert one.groups.to_dict() == dict(fedhe_cnn9=10)
  assert one.dataset == 'cifar10' and one.partition.alpha == 0.5
  assert one.num_rounds < 1000 and one.model.width < 1
  for name in METHODS:
    keeps = load(name).get_config('fedhe').local.keep_optimizer
    assert keeps == (needs_of(ALGORITHMS[name]).keep_optimizer is not None)


@pytest.mark.parametrize('size', ['', 'quick', 'v2'])
def test_the_clocks_share_one_fleet(size):
  get_config = load('fedavg').get_config
  configs = [get_config(f'{mode},{size}') for mode in common.CLOCKS]
  assert [c.clock.mode for c in configs] == list(common.CLOCKS)
  counts = [
      [kind.clients for kind in config.devices.values()] for config in configs
  ]
  want = {'': [5, 3, 2], 'quick': [3, 1, 2], 'v2': [50, 30, 20]}[size]
  assert counts == [want] * len(common.CLOCKS)
  # A cohort of tiers is of one group.
  smallest = {'': 3, 'quick': 2, 'v2': 20}[size]
  tiers = get_config(f'tiers,{size}')
  assert cohort_size(tiers) == min(smallest, 10)
  assert tiers.clock.device_seed is None
  assert all(c.clock.device_seed == 0 for c in configs[:-1])


@pytest.mark.parametrize('name', METHODS)
@pytest.mark.parametrize('mode', ['synchronous', 'async'])
def test_speeds_in_operations_are_in_the_ratio_of_those_in_examples(name, mode):
  get_config = load(name).get_config
  config, other = get_config(f'flops,{mode}'), get_config(mode)
  experiment.check(config)
  assert config.clock.device_seed is None and config.clock.device_by_work
  for kind, device in config.devices.items():
    # The fastest trains a ResNet10 on 1,000 digits a second.
    given = other.devices[kind].to_dict()
    rate = given.pop('examples_per_second')
    assert device.to_dict() == dict(given, flops_per_second=2e7 * rate)


def test_speeds_need_a_clock():
  with pytest.raises(ValueError, match='it needs a clock: synchronous, async'):
    load('fedavg').get_config('flops')


def test_fedepths_setting_and_budgets():
  """Four groups of 25 clients, with the budgets of each variant."""
  config = load('fedepth').get_config('fedepth')
  assert [group['clients'] for group in config.groups.values()] == [25] * 4
  assert config.partition.to_dict() == dict(
      name='dirichlet_balanced', seed=0, alpha=0.3
  )
  assert (config.dataset, config.cohort_size) == ('cifar10', 10)
  assert (config.num_rounds, config.local.epochs) == (500, 10)
  local = config.local
  assert (local.batch_size, local.learning_rate) == (128, 0.1)
  assert (local.momentum, local.weight_decay) == (0.9, 5e-4)
  wanted = dict(
      fedepth={'1/6', '1/3', '1/2', '1'},
      lack={'1/8', '1/6', '1/2', '1'},
      surplus={'1/6', '1/3', '1/2', '2'},
  )
  for name, budgets in wanted.items():
    config = load('fedepth').get_config(f'fedepth,{name}')
    assert {own['budget'] for own in group_options(config).values()} == budgets
    assert (config.algorithm.mkd_models == 2) == (name == 'surplus')
  config = load('fedavg').get_config('fedepth,beta')
  assert config.algorithm.weights == 'data'
  assert config.partition.labels_per_client == 2


def test_fedepths_fine_tuning():
  for variant, model in (('vit', 'vit_t16'), ('vit_s', 'vit_s12')):
    config = load('fedepth').get_config(f'{variant},fedepth')
    shares = dict(x1_6='1/6', x1_3='1/3', x1_2='1/2', x1='1')
    assert config.groups.to_dict() == {
        name: dict(model=model, clients=25, budget=share)
        for name, share in shares.items()
    }
    assert (config.image_size, config.model.patch) == (224, 16)
    assert (config.num_rounds, config.normalise) == (100, 'half')
    local = config.local
    assert (local.learning_rate, local.schedule) == (5e-4, 'cosine')


def test_fedavg_beside_fedepths_fine_tuning():
  """Pretrained ViT-T/16, and a width of 33 of 192 features from scratch."""
  fedavg, fedepth = load('fedavg'), load('fedepth')
  whole, thin = (
      fedavg.get_config(f'fedepth,{name}') for name in ('vit', 'vit_sixth')
  )
  theirs = fedepth.get_config('fedepth,vit')
  for config in (whole, thin):
    assert config.local.to_dict() == theirs.local.to_dict()
    for name in theirs.groups:
      mine, other = group_spec(config, name), group_spec(theirs, name)
      assert mine[:2] == other[:2]
    assert (config.num_rounds, config.image_size) == (100, 224)
  assert whole.model.to_dict() == theirs.model.to_dict()
  assert 'pretrained' not in thin.model
  spec = group_spec(thin, 'x1_6')
  model = create(spec.model, (224, 224, 3), 10, **spec.options)
  assert model.shapes[0] == (197, 33)


def test_schedules_of_the_papers_setting_are_the_papers():
  for variants, plan in (
      ('', 'measured'),
      ('quick', 'measured'),
      ('vit_mini', 'measured'),
      ('fedepth', 'paper'),
  ):
    config = load('fedepth').get_config(variants)
    assert config.algorithm.plan == plan


@pytest.mark.slow
def test_fine_tuning_begins_with_a_file_or_says_what_differs(tmp_path):
  path = tmp_path / 'w.npz'
  config = load('fedepth').get_config('vit_mini')
  config.model.patch, config.model.pretrained = PATCH, str(path)
  leaves = save(path, depth=4)
  for group in build(config).federation.groups:
    bias = group.model.pretrained['encoder03']['out']['bias']
    name = 'encoderblock_3/MultiHeadDotProductAttention_1/out/bias'
    np.testing.assert_array_equal(bias, leaves[f'Transformer/{name}'])
  config.model.patch = 2
  with pytest.raises(ValueError) as error:
    build(config)
  assert str(error.value) == (
      f"groups.x1: {path} is of another architecture: embed['patch']['kernel'] "
      'is (48, 64) there and (4, 64) in the model.'
  )


def test_fedepths_case_studies():
  """One setting: Fig. 2 leaves out widths, Fig. 3 varies the bases' width."""
  widths = dict(eighth='1/8', quarter='1/4', half='1/2', full='1')
  rows = fedepth_fig2.get_table().rows
  left_out = {
      name: {widths[n] for n in config.algorithm.left_out}
      for name, config in rows.items()
  }
  assert left_out.pop('1 alone') == {'1/8', '1/4', '1/2'}
  assert left_out.pop('all widths') == set()
  assert left_out == {f'without {width}': {width} for width in widths.values()}
  bases = fedepth_fig3.get_table().rows
  for number, (name, config) in zip((16, 8, 4, 2), bases.items(), strict=True):
    assert name == f'bases of 1/{number}'
    assert config.algorithm.num_bases == number
    assert group_options(config) == dict(
        thin=dict(budget=f'1/{number}'), full=dict(budget='1')
    )
    assert [group.clients for group in config.groups.values()] == [50, 50]
  for config in rows.values():
    assert [group.clients for group in config.groups.values()] == [25] * 4
    assert group_options(config) == {
        name: dict(rate=rate) for name, rate in widths.items()
    }
  for config in (*rows.values(), *bases.values()):
    models = {group.model for group in config.groups.values()}
    assert models == {'preresnet20'} and config.cohort_size == 10
    assert (config.partition.name, config.partition.labels_per_client) == (
        'beta', 3
    )
    assert config.algorithm.mask == 'batch'


def test_widths_take_the_place_of_a_settings_models():
  v1 = load('heterofl').get_config('v1')
  assert v1.groups.to_dict() == {
      letter: dict(model='fedin_a', clients=clients, rate=rate)
      for letter, clients, rate in zip(
          'abcde', (4, 2, 2, 1, 1), ('1', '1/2', '1/4', '1/8', '1/16')
      )
  }
  for arg, model in (('', 'mini_resnet10'), ('homogeneous', 'resnet18')):
    groups = load('splitmix').get_config(arg).groups.to_dict().values()
    assert {group['model'] for group in groups} == {model}
  quick = load('heterofl').get_config('quick').groups.a
  assert (quick.model, quick.depth, quick.clients) == ('mlp', 4, 2)
  v2 = load('heterofl').get_config('v2')
  assert v2.groups.to_dict() == dict(all=dict(model='resnet26', clients=100))
  assert v2.algorithm.odds == (1, 1, 1, 1, 1)
  assert v2.algorithm.levels == ('1', '1/2', '1/4', '1/8', '1/16')
  shares = dict(sixth='1/6', third='1/3', half='1/2', full='1')
  for name, option in (('heterofl', 'rate'), ('splitmix', 'budget')):
    fair = load(name).get_config('v2,fair')
    assert fair.groups.to_dict() == {
        level: {'model': 'resnet26', 'clients': 25, option: share}
        for level, share in shares.items()
    }
  assert fair.algorithm.num_bases == 6
  assert load('splitmix').get_config('lack').algorithm.num_bases == 8


def test_fedrolex_as_coded():
  code, plain = (load('fedrolex').get_config(arg) for arg in ('code', ''))
  assert (code.algorithm.direction, plain.algorithm.direction) == (-1, 1)
  assert (code.local.clip_norm, code.model.norm) == (1.0, 'batch_only')


def test_unknown_variants_are_refused_with_the_list():
  with pytest.raises(ValueError) as error:
    load('fedin').get_config('wo_inn')
  assert str(error.value).startswith(
      "Unknown variant 'wo_inn'; did you mean 'wo_in'? Known are mnist, "
  )
  with pytest.raises(ValueError, match='iid and shards exclude each other'):
    load('fedin').get_config('shards,iid')


@pytest.mark.usefixtures('undrawn')
@pytest.mark.parametrize('name', [
    pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow)
    for name in METHODS
])  # fmt: skip
def test_quick_runs_end_to_end(name, tmp_path):
  config = load(name).get_config('quick')
  config.compilation_cache = False
  result = experiment.run(config, tmp_path)
  assert result.finished and result.summary.rounds == 2
  assert 0 < result.summary.last['accuracy'] < 1
  assert set(result.facts['groups']) == set(config.groups)
  models = {group['model'] for group in result.facts['groups'].values()}
  assert len(models) == (1 if one_model(name) else 3)
  assert (tmp_path / 'report.md').exists()


@pytest.mark.parametrize(
    'variant', [v for v in load('fedin').VARIANTS if v != 'wo_in']
)
def test_every_variant_of_fedin_can_be_traced(variant):
  """`tests/algorithms/test_fedin.py` tests what the options do."""
  built = build(load('fedin').get_config(f'quick,{variant}'))
  run_round = make_round(
      built.algorithm, built.federation, cohort_size=built.cohort_size
  )
  key = jax.random.key(0)
  state = jax.eval_shape(
      lambda: init_state(built.algorithm, built.federation, key)
  )
  _, reports = jax.eval_shape(run_round, state, built.data, key, key)
  assert all('in_loss' in report.metrics for report in reports.values())


@pytest.mark.slow
@pytest.mark.usefixtures('undrawn')
@pytest.mark.parametrize('name', ['fashion_mnist', 'mnist', 'cifar10'])
def test_quick_runs_on_real_data(name, real_data, tmp_path):
  config = load('fedin').get_config(f'quick,{name}')
  config.data_dir = str(real_data)
  config.compilation_cache = False
  config.num_rounds = 1
  config.partition.min_size = 64
  config.local.batch_size = 64
  result = experiment.run(config, tmp_path)
  assert result.facts['test_examples'] == 10_000
