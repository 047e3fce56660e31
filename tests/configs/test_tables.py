"""Every results table: each cell, at each scale, is a config that can run."""

import functools
import pathlib

import jax
import numpy as np
import pytest

from configs import tables
from fedjax_het.engine import rounds
from fedjax_het.experiment import check
from fedjax_het.experiment.build import build
from fedjax_het.reporting.results_table import cell_name, slug
from launch.table_files import find_table, names

FOLDER = pathlib.Path(tables.__file__).parent
SCALES = ('cpu', 'full', 'quick')
# Tables of the papers have all scales, the others only one.
PAPERS = [
    name
    for name in names()
    if 'SCALES' in (FOLDER / f'{name}.py').read_text()
]


@functools.cache
def found(name, scale=None):
  """A table, made once for all tests."""
  return find_table(name, scale).table


@functools.cache
def cells(name, scale=None):
  """{(row, column): config} of a table's cells."""
  table = found(name, scale)
  configs = {
      (row, column): table.config(row, column)
      for row in table.rows
      for column in table.columns
  }
  return {key: config for key, config in configs.items() if config is not None}


def test_the_tables_of_the_papers_have_all_scales():
  assert set(PAPERS) >= {
      'fedin_v1_table2', 'fedin_v2_table1', 'fedepth_table2', 'fedhe_section5'
  }
  for name in PAPERS:
    assert find_table(name).table == found(name, 'cpu')


@pytest.mark.parametrize('name', names())
def test_every_cell_can_be_run(name):
  for scale in SCALES if name in PAPERS else SCALES[:1]:
    table, configs = found(name, scale), cells(name, scale)
    for config in configs.values():
      check(config)
    # No two cells share a file, and every name is that of a row or column.
    assert len({cell_name(*key) for key in configs}) == len(configs)
    assert len({slug(row) for row in table.labels}) == len(table.labels)
    assert set(table.paper) <= set(table.labels)
    assert set(table.bars) <= set(table.rows)
    assert {row for row, _ in configs} == set(table.rows)
    assert {column for _, column in configs} == set(table.columns)
    assert not any(',' in label for label in (*table.labels, *table.columns))
  text = (FOLDER / f'{name}.py').read_text()
  assert f'--table={name}' in text or f'--table=configs/tables/{name}.' in text


VITS = 'fedin_v2_table2'
# Groups of Table 2 that are traced; others differ from them in depth or width
# only.
TRACED_GROUPS = ('vit_s8', 'vit_s9', 'all', 'a', 'e')


@pytest.fixture(scope='module')
def small_images(tmp_path_factory):
  """A file with images of Fashion-MNIST's size, 16 for each of 100 clients."""
  path = tmp_path_factory.mktemp('data') / 'small.npz'
  images = np.zeros((1600, 28, 28, 1), np.uint8)
  images[::2] = 255
  labels = np.arange(1600) % 10
  np.savez(
      path, x_train=images, y_train=labels, x_test=images, y_test=labels
  )
  return str(path)


@pytest.mark.parametrize('row', find_table(VITS).table.rows)
def test_a_round_of_vits_can_be_traced(row, small_images):
  """Nothing is compiled, so this shows shapes and types, not values."""
  config = found(VITS, 'cpu').config(row, 'fashion_mnist IID')
  config = config.copy_and_resolve_references()
  config.dataset, config.data_file = 'npz', small_images
  for name in set(config.groups) - set(TRACED_GROUPS):
    del config.groups[name]
  for name, entry in config.groups.items():
    if not isinstance(entry, int):
      config.groups[name].model = 'vit_s8'
  if row == 'HeteroFL':
    config.algorithm.update(levels=('1', '1/16'), odds=(1, 1))
  built = build(config)
  algorithm, groups = built.algorithm, built.federation.groups
  assert {group.model.name for group in groups} <= {'vit_s8', 'vit_s9'}
  assert algorithm.calibrate is None
  key = jax.random.key(0)
  before = jax.eval_shape(
      lambda key: rounds.init_state(algorithm, built.federation, key), key
  )
  run_round = rounds.make_round(
      algorithm, built.federation, cohort_size=10, backend='map'
  )
  after, reports = jax.eval_shape(run_round, before, built.data, key, key)
  assert jax.tree.map(_shape, after) == jax.tree.map(_shape, before)
  assert all('train_loss' in reports[group.name].metrics for group in groups)

  def predicted(state, group):
    client = jax.tree.map(lambda leaf: leaf[0], state.clients[group.name])
    model = algorithm.client_model(state.server, client, group)
    images = built.preprocess(built.dataset.test_images[:2])
    return algorithm.predict(group, model, images)

  for group in groups:
    outputs = jax.eval_shape(functools.partial(predicted, group=group), after)
    assert outputs.shape == (2, 10)


def _shape(leaf):
  return leaf.shape, leaf.dtype


@pytest.mark.parametrize('name', PAPERS)
def test_scales_differ_in_size_and_quick_needs_no_data(name):
  cpu, full, quick = (found(name, scale) for scale in SCALES)
  small, large, least = (cells(name, scale) for scale in SCALES)
  assert cpu.paper == full.paper and not quick.paper
  assert len({cpu.setting, full.setting, quick.setting}) == 3
  assert small.keys() == large.keys() >= least.keys()
  for key, config in least.items():
    assert (config.dataset, config.num_rounds) == ('digits', 2)
    assert {group.model for group in config.groups.values()} == {'mlp'}
    assert small[key].num_rounds < large[key].num_rounds
    assert small[key].dataset == large[key].dataset


@pytest.mark.parametrize('name', PAPERS)
def test_quick_cells_fit_the_digits(name):
  """Builds models, partition and batches, which `check` does not."""
  configs = cells(name, 'quick')
  for row in found(name, 'quick').rows:
    columns = [column for r, column in configs if r == row]
    for column in {columns[0], columns[-1]}:
      build(configs[row, column])


def test_fedins_table_1_is_the_papers():
  table = found('fedin_v2_table1', 'full')
  # Every row has the paper's numbers.
  for row in table.rows:
    assert all(table.target(row, column) for column in table.columns), row
  assert len(table.columns) == 8 and tuple(table.seeds) == (0, 1, 2)
  noise = table.config('FedIN +Noise', 'svhn_cropped non-IID')
  assert noise.algorithm.noise == 0.8 and noise.dataset == 'svhn_cropped'
  assert noise.partition.to_dict() == dict(
      name='dirichlet', seed=0, alpha=0.5, min_size=16
  )
  assert (noise.num_rounds, noise.local.epochs) == (500, 5)
  assert noise.target_accuracy == 0.8
  target = table.target('FedIN +Noise', 'svhn_cropped non-IID')
  assert (target.text, target.reached, target.level) == ('91.0 ± 1.5', 26, 80)
  assert table.target('FedAvg', 'cifar10 IID').text == '76.8'
  assert table.target('SCAFFOLD', 'cinic10 non-IID').text == '55.2 ± 3.1'
  assert table.config('FedAvg', 'cifar10 IID').partition.name == 'iid'
  widths = table.config('HeteroFL', 'cifar10 IID').groups
  assert widths.to_dict() == {'all': dict(model='resnet152', clients=100)}
  assert table.target('FedRolex', 'cifar10 non-IID').text == '68.0 ± 1.6'
  rolling = table.config('FedRolex', 'cifar10 IID').groups
  assert rolling.to_dict() == {
      name: dict(model='resnet152', clients=20, rate=rate)
      for name, rate in zip('abcde', ('1', '1/2', '1/4', '1/8', '1/16'))
  }


def test_fedins_other_tables():
  rest = found('fedin_v2_table4', 'full')
  assert len(rest.rows) == 10
  assert rest.target('SCAFFOLD', 'fashion_mnist non-IID').text == '86.3'
  for row in rest.rows:
    # Every row has the paper's numbers.
    assert all(rest.target(row, column) for column in rest.columns), row
    config = rest.config(row, 'fashion_mnist IID')
    assert config.algorithm.aggregation == 'architecture'
    # Eq. 21; not all methods have the option `weights`.
    assert config.algorithm.get('weights', 'data') == 'data'
  same = found('fedin_v2_table5a', 'full')
  config = same.config('FedIN', 'cifar10 non-IID')
  assert config.groups.to_dict() == dict(resnet18=100)
  assert 'five models' not in same.setting
  ablations = found('fedin_v2_table5b', 'full')
  assert not ablations.config('FedIN w/o IN', 'cifar10 IID').algorithm[
      'in_training'
  ]
  for scale in ('full', 'cpu'):
    numbers = found('fedin_v2_table6', scale)
    config = numbers.config('FedIN', 'non-IID 200 clients')
    assert set(config.groups.to_dict().values()) == {40}
    assert config.cohort_size == 20 and config.partition.alpha == 0.5
    config = numbers.config('FedAvg', 'IID 10 clients')
    assert set(config.groups.to_dict().values()) == {2}
    assert config.cohort_size == 1
  assert numbers.target('FedAvg', 'IID 10 clients').text == '79.3'


def test_fedins_sweeps_change_one_thing():
  noise = found('fedin_v2_table7', 'full')
  first = found('fedin_v2_table1', 'full')
  row = 'svhn_cropped non-IID'
  for level, other in (('+0.0 sigma', 'FedIN'), ('+0.8 sigma', 'FedIN +Noise')):
    assert noise.config(row, level) == first.config(other, row)
  for column, level in noise.axis[1].items():
    assert noise.config(row, column).algorithm.noise == level
  assert len(noise.columns) == len(noise.axis[1]) == 8
  sizes = found('fedin_v2_fig6c', 'full')
  pairs = found('fedin_v2_fig6d', 'full')
  assert sizes.config('HeteroFL', 'batch 8').groups.to_dict() == {
      'all': dict(model='resnet152', clients=100)
  }
  for size in (8, 16, 32, 64, 128):
    config = sizes.config('FedIN', f'batch {size}')
    assert config.local.batch_size == size
    assert config.algorithm.num_pairs is None  # One batch.
    config = pairs.config('FedIN', f'{size} pairs')
    assert (config.local.batch_size, config.algorithm.num_pairs) == (16, size)
    assert config.partition.min_size == 128
  # The search of the learning rate, at the paper's rate, is Table 1.
  rates = found('fedin_v2_rates', 'full')
  assert rates.labels == first.labels and list(rates.axis[1]) == [
      'rate 0.0003', 'rate 0.001', 'rate 0.003'
  ]  # fmt: skip
  for row in rates.rows:
    given = first.config(row, 'fashion_mnist non-IID')
    assert rates.config(row, 'rate 0.001') == given
    for column, rate in rates.axis[1].items():
      config = rates.config(row, column).copy_and_resolve_references()
      assert config.local.learning_rate == rate
      config.local.learning_rate = given.local.learning_rate
      assert config == given, (row, column)


def test_fedins_first_table_gives_each_row_its_own_meaning():
  table = found('fedin_v1_table2', 'full')
  assert table.labels == [
      'FedIN', 'FedAvg', 'FedAvg (model E)', 'FedAvg (shared parts)',
      'FedGKT-server', 'FedGKT-clients',
      'FedGKT-server (as FedIN)', 'FedGKT-clients (as FedIN)',
      'HeteroFL', 'HeteroFL (as FedIN)',
  ]  # fmt: skip
  assert set(table.notes) == set(table.labels) - {'FedIN'}
  assert table.target('FedGKT-clients', 'cifar10 non-IID').text == '39.96'
  for column in table.columns:
    of = {row: table.config(row, column) for row in table.rows}
    ours = of['FedIN'].local.to_dict()
    assert ours['optimizer'] == 'adam' and ours['drop_last']
    # One row trains as FedIN does, one as its authors' code. Only the latter
    # has the paper's number.
    for method in ('FedGKT-server', 'HeteroFL'):
      # FedGKT's clients keep their optimisers by default.
      kept = dict(keep_optimizer=method.startswith('FedGKT'))
      assert of[f'{method} (as FedIN)'].local.to_dict() == {**ours, **kept}
      assert table.target(f'{method} (as FedIN)', column) is None
      assert table.target(method, column) is not None
    own = of['HeteroFL'].local
    assert (own.optimizer, own.momentum, own.weight_decay) == ('sgd', 0.9, 5e-4)
    assert (own.batch_size, own.epochs, own.clip_norm) == (10, 5, 1.0)
    own = of['FedGKT-server'].local
    assert (own.optimizer, own.batch_size, own.epochs) == ('adam', 256, 1)
    # FedAvg has one global model; with shared parts it is FedIN without IN.
    for row, model in (('FedAvg', 'a'), ('FedAvg (model E)', 'e')):
      assert of[row].groups.to_dict() == {f'fedin_{model}': 10}
      assert of[row].local.to_dict() == ours
    parts = of['FedAvg (shared parts)']
    assert parts.algorithm.aggregation == 'ends'
    assert parts.groups.to_dict() == of['FedIN'].groups.to_dict()
    for config in of.values():
      assert config.num_rounds == 200
      assert config.partition == of['FedIN'].partition
    for row in ('FedGKT-server', 'FedGKT-server (as FedIN)'):
      assert of[row].algorithm.server_epochs == 10
  rates = {
      column: (config.local.learning_rate, config.local.lr_rounds)
      for column in table.columns
      for config in [table.config('HeteroFL', column)]
  }
  assert rates == {
      'cifar10 IID': (0.1, (151, 251)),
      'cifar10 non-IID': (0.1, (301, 501)),
      'fashion_mnist IID': (0.01, (101,)),
      'fashion_mnist non-IID': (0.01, (201,)),
  }


def test_tables_say_which_mean_their_paper_reports():
  """FedIN v1 averages over clients in unequal groups, v2 over groups."""
  means = {
      name: found(name).mean
      for name in names()
      if name.startswith('fedin')
  }
  assert {'fedin_v1_table2', 'fedin_v2_table1'} <= means.keys()
  for name, mean in means.items():
    want = 'clients' if name.startswith('fedin_v1') else 'groups'
    assert mean == want, name


@pytest.mark.parametrize('name', names())
def test_notes_and_means_are_of_rows_and_metrics(name):
  for scale in SCALES if name in PAPERS else SCALES[:1]:
    table = found(name, scale)
    assert table.mean in ('groups', 'clients')
    assert set(table.notes) <= set(table.labels)


def test_fedepths_tables_are_the_papers():
  table = found('fedepth_table2', 'full')
  keys = cells('fedepth_table2', 'full')
  # 18 rows of eight columns; masks of FedAvg and FeDepth in four of them.
  assert len(keys) == 18 * 8 + 4 * 4 == sum(
      table.target(*key) is not None for key in keys
  )
  config = table.config('m-FeDepth Surplus', 'cifar100 beta 30')
  assert config.dataset == 'cifar100' and config.algorithm.mkd_models == 2
  assert config.partition.labels_per_client == 30
  assert (config.validation, config.num_rounds) == (0.2, 500)
  config = table.config('FedAvg x1/8', 'cifar10 alpha 1.0')
  assert config.model.width == 1 / 8 and config.partition.alpha == 1.0
  config = table.config('HeteroFL Lack', 'cifar10 alpha 0.3')
  rates = {group.rate for group in config.groups.values()}
  assert config.algorithm.mask == 'none' and '1/8' in rates
  # The masked rows add the authors' mask and have the same paper targets.
  for label in (
      'HeteroFL', 'SplitMix', 'HeteroFL Lack', 'SplitMix Lack', 'FedAvg x1',
      'FedAvg x1/6', 'FeDepth', 'm-FeDepth',
  ):  # fmt: skip
    plain, masked = (
        table.config(name, 'cifar10 beta 2').to_dict()
        for name in (label, f'{label} masked')
    )
    assert masked['algorithm'].pop('mask') == 'batch'
    assert plain['algorithm'].pop('mask') == 'none' and masked == plain
    assert table.target(label, 'cifar10 beta 2') == table.target(
        f'{label} masked', 'cifar10 beta 2'
    )
  # A second model for all clients with a surplus, and the same paper targets.
  own, shared = ('FeDepth Surplus', 'FeDepth Surplus shared')
  column = 'cifar10 alpha 0.3'
  assert table.target(own, column) == table.target(shared, column)
  private, one = (table.config(n, column).to_dict() for n in (own, shared))
  assert private['algorithm'].pop('mkd_partners') == 'private'
  assert one['algorithm'].pop('mkd_partners') == 'shared' and private == one
  unequal = found('fedepth_table3', 'full')
  config = unequal.config('SplitMix', 'cifar10 alpha_u 0.3')
  assert config.partition.to_dict() == dict(
      name='dirichlet', seed=0, alpha=0.3, min_size=160
  )
  assert unequal.target('SplitMix', 'cifar10 alpha_u 0.3').text == '31.23'


def test_fedhes_table_has_no_average_of_different_models():
  table = found('fedhe_section5', 'full')
  assert table.config('FedAvg', 'mnist heterogeneous') is None
  config = table.config('FedAvg', 'cifar10 homogeneous')
  assert config.groups.to_dict() == dict(fedhe_cnn9=10)
  config = table.config('FedMD', 'cifar10 heterogeneous')
  assert config.algorithm.num_alignment == 10
  assert len(config.groups) == 10 and config.public_size == 5000
  assert table.target('FedHe', 'mnist heterogeneous').text == '98.5'


def test_rows_of_fedhes_tables_are_the_papers_or_say_otherwise():
  rows = found('fedhe_cifar10').rows
  options = {name: config.algorithm for name, config in rows.items()}
  assert options['FD'].space == 'prob'  # FD sends probabilities.
  assert options['FD with logits'].space == 'logit'
  assert options['FedMD'].num_alignment == 10
  assert options['FedMD aligned on 150'].num_alignment == 150
  assert options['FedHe'].plus_one and not options['FedHe as coded'].plus_one
  assert options['FedHe'].store != options['FedHe as coded'].store
  assert all(config.local.keep_optimizer for config in rows.values())


@pytest.mark.parametrize('scale', ['cpu', 'full'])
def test_no_two_rows_of_section_five_are_the_same_run(scale):
  """'cold' leaves out the public epochs at every scale."""
  runs = [
      (column, config.to_json_best_effort())
      for (_, column), config in cells('fedhe_section5', scale).items()
  ]
  assert len(set(runs)) == len(runs) > 0
