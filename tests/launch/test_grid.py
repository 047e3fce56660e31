"""Searches over entries of a config: points, rows, and wrong grids."""

import math
import pathlib
import subprocess

import pytest

from fedjax_het import experiment
from launch import grid, table_files
from launch.terminal import CommandError
from tests.fuzz import forks


def find(text, samples=None, seed=0):
  config = experiment.default_config('fedin')
  return grid.find(config, text, samples, seed).table


def test_a_grid_has_a_row_for_each_combination():
  table = find('local.learning_rate=1e-3,1; algorithm.mu=0,0.5;'
               'local.optimizer=adam')  # fmt: skip
  assert [*table.rows] == [
      f'learning_rate={rate} mu={mu} optimizer=adam'
      for rate in (0.001, 1.0)
      for mu in (0.0, 0.5)
  ]
  config = table.config('learning_rate=1.0 mu=0.5 optimizer=adam')
  assert (config.local.learning_rate, config.algorithm.mu) == (1.0, 0.5)
  # The config itself does not change, and entries that are None have types.
  assert find('cohort_size=2,3').config('cohort_size=3').cohort_size == 3
  assert experiment.default_config('fedin').cohort_size is None
  assert find('local.drop_last=true').config('drop_last=True').local.drop_last


def test_every_row_of_a_table_gets_the_same_search():
  found = table_files.find_table('fedin_v2_table4', 'quick')
  text = 'local.learning_rate=1e-3,1e-2'
  table = grid.of_table(found, text, None, 0).table
  assert len(table.columns) == 2 * len(found.table.columns)
  assert table.rows.keys() == found.table.rows.keys() and not table.paper
  for row in table.rows:
    first, *_, last = (table.config(row, column) for column in table.columns)
    rates = first.local.learning_rate, last.local.learning_rate
    assert rates == (1e-3, 1e-2)
  # A column of the table means all of its points.
  part = table_files.choose(table, columns=['fashion_mnist_iid'])
  assert part.columns == table.columns[:2]
  one = grid.of_table(table_files.find_table('digits'), text, None, 0)
  assert one.name == 'grid_digits'
  assert one.table.axis == (
      'local.learning_rate',
      {'learning_rate=0.001': 1e-3, 'learning_rate=0.01': 1e-2},
  )
  with pytest.raises(CommandError, match='Unknown config key'):
    grid.of_table(found, 'algorithm.mu=0,1', None, 0)
  signs = 'local.learning_rate=1e-16,1e+16'
  with pytest.raises(CommandError, match='some columns differ in signs alone'):
    grid.of_table(found, signs, None, 0)
  # A row that is not searched need not have the entry.
  text = 'algorithm.noise=0.1,0.2'
  some = grid.of_table(found, text, None, 0, ['fedin']).table
  assert list(some.rows) == ['FedIN']
  first, second, *_ = some.rows['FedIN'].values()
  assert (first.algorithm.noise, second.algorithm.noise) == (0.1, 0.2)
  for rows, message in (
      (['FedIN', 'FedAvg'], 'Unknown config key algorithm.noise'),
      (['FedIM'], "Unknown row 'FedIM'; did you mean 'FedIN'"),
  ):
    with pytest.raises((CommandError, ValueError), match=message):
      grid.of_table(found, text, None, 0, rows)


def test_points_are_drawn_evenly_in_the_logarithm():
  table = find('local.learning_rate=1e-4..1e-2; local.epochs=1,2', 200)
  rates = [c.local.learning_rate for c in table.rows.values()]
  assert len(rates) == 200 and 1e-4 <= min(rates) < max(rates) <= 1e-2
  below = sum(rate < 1e-3 for rate in rates) / 200  # 1/2 up to 5 deviations.
  assert abs(below - 0.5) < 5 * math.sqrt(0.25 / 200)
  assert {c.local.epochs for c in table.rows.values()} == {1, 2}
  epochs = 'local.epochs=1,2,3'
  assert [*find(epochs, 2, 1).rows] == [*find(epochs, 2, 1).rows]
  assert len(find(epochs, 9).rows) == 3  # There are no more.


def test_entries_that_a_config_does_not_list_can_be_searched():
  """As --config sets them: arguments of optax, options of models."""
  text = 'local.optimizer_args.b1=0,0.9; groups.mini_resnet6.width=0.5,2.0'
  rows = find(text).rows
  assert [*rows] == [
      f'b1={b1} width={width}' for b1 in (0, 0.9) for width in (0.5, 2.0)
  ]
  config = rows['b1=0.9 width=0.5']
  assert config.local.optimizer_args.to_dict() == {'b1': 0.9}
  assert config.groups.mini_resnet6.width == 0.5
  experiment.check(config)
  drawn = find('local.optimizer_args.b1=0.5..0.9', 2).rows.values()
  assert all(0.5 <= c.local.optimizer_args.b1 <= 0.9 for c in drawn)
  with pytest.raises(CommandError, match="'b3'"):
    find('local.optimizer_args.b3=1')


def test_methods_and_partitions_can_be_searched():
  table = find('algorithm.name=fedavg,fedprox; partition.name=iid,dirichlet')
  config = table.config('algorithm=fedprox partition=iid')
  assert (config.algorithm.name, config.partition.name) == ('fedprox', 'iid')
  assert 'mu' in config.algorithm and 'alpha' not in config.partition
  experiment.check(config)


@pytest.mark.parametrize(
    ('text', 'samples', 'expected'),
    [
        ('', None, '--grid names no entry'),
        ('local.learning_rate', None, 'is not KEY=VALUE,VALUE'),
        ('local.learning_rat=1', None, "did you mean 'learning_rate'?"),
        ('local=1', None, '--grid: local is a section'),
        ('local.epochs=1.5', None, 'must be of type int'),
        ('local.epochs=1;local.epochs=2', None, 'names local.epochs twice'),
        ('local.learning_rate=1..2', None, 'needs --samples=N.'),
        ('local.learning_rate=2..1', 3, 'needs 0 < LOW < HIGH.'),
        ('local.learning_rate=a..b', 3, "'a' is no number."),
        ('local.epochs=1', 0, '--samples must be 1 to 1000'),
        ('num_rounds=' + '1,' * 2000 + '1', None, 'has 2001 points'),
        ('seed=0,1', None, '--seeds=N sets seed.'),
        (
            'algorithm.name=fedavg;algorithm.noise=1',
            None,
            '--grid: algorithm=fedavg noise=1.0: ',
        ),
    ],
)
def test_wrong_grids_are_one_line(text, samples, expected):
  with pytest.raises(CommandError) as error:
    find(text, samples)
  assert expected in str(error.value) and '\n' not in str(error.value)


def test_a_seed_of_its_own_is_not_replaced_without_a_word():
  config = experiment.default_config('fedin')
  config.seed = 3
  assert grid.find(config, 'algorithm.mu=0', None, 0).table.seeds == (3,)
  for section, key in ((config, 'sampling_seed'), (config.partition, 'seed')):
    section[key] = 7
    with pytest.raises(CommandError, match=f'{key} out and give --seeds=7,'):
      grid.find(config, 'algorithm.mu=0', None, 0)
    section[key] = 3


@pytest.mark.slow
def test_the_command_runs_and_resumes_a_grid(tmp_path):
  args = ['--config=configs/fedavg.py:quick', '--config.num_rounds=1',
          '--grid=local.learning_rate=1e-3,1e-2']  # fmt: skip
  done = forks.run('sweep', args, tmp_path)
  assert done.code == 0, done.err
  out = tmp_path / 'results' / 'grid_fedavg'
  assert '| learning_rate=0.01 | 1 |' in (out / 'table.md').read_text()
  again = forks.run('sweep', [*args, '--formats=csv'], tmp_path)
  assert again.out.count('skipped, has a result') == 2
  assert len((out / 'cells.csv').read_text().splitlines()) == 3


def test_results_that_git_tracks_are_not_changed_by_default(
    tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  found = table_files.Found(None, 'mine', '')
  where = tmp_path / 'results' / 'mine'
  where.mkdir(parents=True)
  (where / 'table.md').write_text('x')
  assert table_files.results_folder(found, None) == pathlib.Path('results/mine')
  for command in (['init', '-q'], ['add', 'results']):
    subprocess.run(['git', *command], cwd=tmp_path, check=True)
  with pytest.raises(ValueError, match='change them by --out=results/mine'):
    table_files.results_folder(found, None)
  assert table_files.results_folder(found, 'results/mine')
