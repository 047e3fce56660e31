"""A table's cells run once each, go on when interrupted, and are rendered."""

import json
import pathlib

import numpy as np
import pytest

from configs import fedavg, private, tables
from fedjax_het.experiment import sweep
from fedjax_het.experiment.config import check
from launch import sweep as launch_sweep

TABLES = [
    path
    for path in sorted(pathlib.Path(tables.__file__).parent.glob('*.py'))
    if path.stem != '__init__'
]


@pytest.fixture(scope='module')
def table():
  return sweep.Table(
      title='Two methods',
      setting='Quick runs.',
      rows={
          'Private': private.get_config('quick'),
          'FedAvg (x1)': fedavg.get_config('quick'),
      },
      paper={'FedAvg (x1)': '89.2 ± 1.1'},
      seeds=(0, 3),
  )


@pytest.fixture(scope='module')
def finished(table, tmp_path_factory):
  out = tmp_path_factory.mktemp('table')
  lines = []
  cells = sweep.run_cells(
      table, out / 'results', out / 'runs', announce=lines.append
  )
  return out, cells, lines


def test_every_cell_runs_once(table, finished):
  out, cells, lines = finished
  assert [(c['row'], c['seed']) for c in cells] == [
      ('Private', 0), ('FedAvg (x1)', 0), ('Private', 3), ('FedAvg (x1)', 3),
  ]  # fmt: skip
  assert sum('running' in line for line in lines) == 4
  again = []
  same = sweep.run_cells(
      table, out / 'results', out / 'runs', announce=again.append
  )
  assert same == cells and not any('running' in line for line in again)
  # A cell whose result is gone is taken from its finished workdir.
  path = out / 'results' / 'cells' / 'fedavg_x1-3.json'
  stored = path.read_text()
  path.unlink()
  sweep.run_cells(table, out / 'results', out / 'runs')
  assert json.loads(path.read_text()) == json.loads(stored)


def test_seeds_rule_training_partition_and_sampling(finished):
  _, cells, _ = finished
  for cell in cells:
    config = cell['config']
    seeds = {
        config['seed'],
        config['sampling_seed'],
        config['partition']['seed'],
    }
    assert seeds == {cell['seed']}
  assert cells[0]['accuracy'] != cells[2]['accuracy']


def test_the_table_says_what_it_shows(table, finished):
  out, cells, _ = finished
  markdown = sweep.render(table, cells, out / 'results')
  text = (out / 'results' / 'table.md').read_text()
  assert markdown in text and 'seeds 0, 3' in text and 'Quick runs.' in text
  mean = 50 * (cells[1]['last'] + cells[3]['last'])
  assert f'| FedAvg (x1) | 2 | {mean:.1f} ± ' in markdown
  assert '| 89.2 ± 1.1 |' in markdown
  assert (out / 'results' / 'curves.png').stat().st_size > 1000
  # No path of the machine is kept.
  stored = out / 'results' / 'cells' / 'private-0.json'
  assert str(out) not in stored.read_text()


def test_families_are_means_over_their_groups(table, finished, tmp_path):
  _, cells, _ = finished
  families = {'both': ('mlp2', 'mlp3'), 'deep': ('mlp4',), 'none': ('x',)}
  sweep.render(table._replace(families=families), cells, tmp_path)
  text = (tmp_path / 'table.md').read_text()
  assert '| method | both | deep | none |' in text
  deep = [100 * np.mean(c['models']['mlp4']) for c in (cells[0], cells[2])]
  spread = f'{np.mean(deep):.1f} ± {np.std(deep, ddof=1):.1f}'
  (row,) = (x for x in text.splitlines() if x.startswith('| Private | ') and
            x.count('|') == 5)  # fmt: skip
  assert row.endswith(f'| {spread} | - |')
  assert (tmp_path / 'models.png').stat().st_size > 1000


def test_a_result_of_another_config_is_refused(table, finished):
  out, _, _ = finished
  rows = {'Private': table.rows['Private'].copy_and_resolve_references()}
  rows['Private'].num_rounds = 3
  with pytest.raises(ValueError, match='num_rounds is 2 there and 3 here'):
    sweep.read_cells(table._replace(rows=rows), out / 'results')


def test_missing_results_are_named(table, tmp_path):
  with pytest.raises(FileNotFoundError, match="No result of 'Private'"):
    sweep.read_cells(table, tmp_path)


def test_flags_choose_cells(table):
  part = launch_sweep.choose(table, ['1'], ['FedAvg (x1)'])
  assert part.seeds == (1,) and list(part.rows) == ['FedAvg (x1)']
  with pytest.raises(ValueError, match="Unknown row 'FedIM'; known are Priv"):
    launch_sweep.choose(table, None, ['FedIM'])
  with pytest.raises(ValueError, match='seeds must be integers'):
    launch_sweep.choose(table, ['x'], None)


@pytest.mark.parametrize('path', TABLES, ids=lambda path: path.stem)
def test_every_table_is_of_configs_that_can_be_run(path):
  table = launch_sweep.load_table(str(path))
  for config in table.rows.values():
    check(config)
  assert set(table.paper) | set(table.bars) <= set(table.rows)
  assert len({sweep._slug(row, 0) for row in table.rows}) == len(table.rows)
  assert f'--table=configs/tables/{path.name}' in path.read_text()


def test_tables_load_and_unknown_ones_are_refused():
  table = launch_sweep.load_table('configs/tables/fashion_mnist.py')
  assert len(table.rows) == 6 and set(table.paper) <= set(table.rows)
  with pytest.raises(FileNotFoundError, match=r'No table file .* there are'):
    launch_sweep.load_table('configs/tables/x.py')
