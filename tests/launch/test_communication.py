"""The communication command: FedHe's Tables III and IV, number by number."""

import pathlib

import jax
import pytest

from fedjax_het.experiment import footprint
from fedjax_het.experiment.build import build
from fedjax_het.experiment.overheads import count
from launch import communication, table_files
from tests.fuzz import forks

ROOT = pathlib.Path(communication.__file__).resolve().parents[1]


@pytest.fixture(scope='module')
def tables():
  """{title: {method: row}} for ten public examples."""
  with jax.default_prng_impl('threefry2x32'):  # Its seed is sent, too.
    return {
        title: {row.method: row for row in communication.rows(*rest, 10)}
        for title, *rest in communication.TABLES
    }


@pytest.mark.parametrize(
    ('title', 'twenty', 'ten'),
    [
        ('Table III, MNIST', 324_672, 307_392),
        ('Table IV, CIFAR-10', 326_976, 309_696),
    ],
)
def test_fedavg_sends_model_9_and_a_weight(tables, title, twenty, ten):
  paper = tables[title]['FedAvg, 20 outputs']
  assert (paper.down, paper.up) == (twenty, twenty + 1)
  assert paper.paper == f'{twenty:,}'
  honest = tables[title]['FedAvg, 10 outputs']
  assert (honest.down, honest.up) == (ten, ten + 1)


def test_class_means_are_the_same_on_both_data_sets(tables):
  for table in tables.values():
    assert (table['FedHe'].down, table['FedHe'].up) == (110, 110)
    assert (table['FD'].down, table['FD'].up) == (100, 100)


@pytest.mark.parametrize(
    ('title', 'each'),
    [('Table III, MNIST', 794), ('Table IV, CIFAR-10', 3082)],
)
def test_fedmd_grows_with_the_public_set(tables, title, each):
  logits = tables[title]['FedMD, logits']
  images = tables[title]['FedMD, logits and images']
  # Plus the subset's number, and down also the seed that draws the subset.
  assert (logits.down, logits.up) == (103, 101)
  assert images.up == 10 * each + 1
  assert images.paper == f'n x {each} = {10 * each:,}'


@pytest.mark.parametrize('title', [table[0] for table in communication.TABLES])
def test_reduced_rates_are_the_papers(tables, title):
  """97.6% and 90.6% for ten public examples, above 99.9% for FedHe."""
  table = tables[title]
  base = table['FedAvg, 20 outputs'].up
  fedmd = table['FedMD, logits and images']
  assert f'{100 * (1 - fedmd.up / base):.1f}%' == fedmd.paper_rate
  assert 1 - table['FedHe'].up / base > 0.999
  text = communication.render(title, list(table.values()), 10)
  rates = {line.split('|')[1].strip(): line.split('|')[5:7]
           for line in text.splitlines()[2:]}  # fmt: skip
  assert rates['FedHe'] == [' 99.97% ', ' 99.96% ']
  assert rates['FedAvg, 20 outputs'] == [' 0.00% ', ' - ']


@pytest.mark.slow
def test_the_command_prints_both_tables():
  done = forks.Begun(
      'communication', ['--num_public=5000'], ROOT,
      jax_default_prng_impl='threefry2x32',  # The users' seed, sent too.
  ).end()  # fmt: skip
  assert done.code == 0, done.err
  assert 'Table III, MNIST: ' in done.out
  assert 'Table IV, CIFAR-10: ' in done.out
  assert '| FedMD, logits and images | 50,003 | 3,970,001 |' in done.out


def test_mistakes_take_one_line():
  done = forks.run('communication', ['--num_public=0'], ROOT)
  assert done.code == 2
  assert done.err == (
      'Error: num_public must be at least 1 and at most 1000000, got 0.\n'
  )


def test_what_the_rows_of_a_table_hold_and_send():
  """As SCAFFOLD and MOON define them, in multiples of the model."""
  table = table_files.find_table('fedin_v2_table1', 'quick').table
  column = table.columns[-1]
  found = {}
  for row in ('FedAvg', 'SCAFFOLD', 'MOON'):
    experiment = build(table.config(row, column))
    found[row] = count(experiment)
  groups = experiment.federation.groups
  params = sum(
      4 * leaf.size * group.num_clients
      for group in groups
      for leaf in jax.tree.leaves(group.model.abstract_variables.params)
  ) / experiment.federation.num_clients
  plain, variates, moon = found.values()
  assert plain.model == variates.model == moon.model == plain.received
  assert plain.kept == 0 and plain.held == 2 * plain.model
  assert plain.sent == plain.received + 4  # The averaging weight.
  assert variates.received == plain.received + params
  assert variates.kept == params
  assert variates.sent == plain.sent + params
  assert moon.model <= moon.kept <= moon.model + 8
  assert (moon.sent, moon.received) == (plain.sent, plain.received)
  assert plain.server < variates.server < 2 * plain.server


def test_the_table_prints_what_is_counted():
  table = table_files.find_table('fedin_v2_table1', 'quick').table
  part = table_files.choose(table, None, ['FedFomo'])
  header, (_, *cells) = communication.overheads(part)
  found = count(build(table.config('FedFomo', table.columns[0])))
  want = (
      found.sent / 4e6, found.received / 4e6, *(
          size / 2**20 for size in (
              found.model, found.received, found.kept,
              found.model + found.received + found.kept, found.server,
          )
      ),
  )  # fmt: skip
  assert header[1:3] == ['sent, M', 'received, M'] and cells[0] != cells[1]
  assert cells == [f'{number:,.2f}' for number in want]


def test_the_table_of_what_is_held_has_the_papers_numbers_beside(monkeypatch):
  # Nothing runs, so rows that exceed this machine's memory are counted, too.
  monkeypatch.setattr(footprint, 'available_bytes', lambda: 1)
  table = table_files.find_table('fedin_v2_table1', 'quick').table
  part = table_files.choose(table, None, ['FedAvg', 'MOON'])
  header, *lines = communication.overheads(
      part._replace(overheads={'MOON': ('12.28', '705.0')})
  )
  assert header[-1] == 'paper: memory, MB'
  assert [line[0] for line in lines] == ['FedAvg', 'MOON']
  assert [line[-2:] for line in lines] == [['-', '-'], ['12.28', '705.0']]
  assert all(len(line) == len(header) for line in lines)
  full = table_files.find_table('fedin_v2_table1', 'full').table
  assert full.overheads['FedIN'] == ('12.35', '235.3')
  assert set(full.overheads) <= set(full.rows) and not table.overheads


def test_rows_without_a_cell_are_left_out():
  table = table_files.find_table('fedepth_nets', 'quick').table
  missing = next(
      column for column in table.columns
      if any(table.config(row, column) is None for row in table.rows)
  )  # fmt: skip
  part = table_files.choose(table, None, None, [missing])
  _, *lines = communication.overheads(part)
  assert [line[0] for line in lines] == [
      row for row in table.rows if table.config(row, missing) is not None
  ]


@pytest.mark.parametrize(
    ('args', 'error'),
    [
        (['--scale=quick'], '--scale belongs to a results table: --table='),
        (['--table=x', '--num_public=5'],
         "--num_public is of FedHe's tables; leave out --table."),
        (['--table=fedin_v2_table1', '--rows=FedAvg'], 'fashion_mnist needs'),
    ],
)  # fmt: skip
def test_mistakes_about_tables_take_one_line(args, error):
  done = forks.run('communication', args, ROOT)
  assert done.code == 2 and done.err.count('\n') == 1
  assert done.err.startswith(f'Error: {error}') or error in done.err
