"""`launch.sweep` and `launch.report --table`: what they run and refuse."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from launch import table_files
from tests.fuzz import forks

ROOT = pathlib.Path(table_files.__file__).resolve().parents[1]


def launch(program, *args, cwd):
  """Runs a program as from the command line, in a new Python process."""
  return subprocess.run(
      [sys.executable, '-m', f'launch.{program}', *args],
      cwd=cwd,
      env=dict(os.environ, JAX_PLATFORMS='cpu', PYTHONPATH=str(ROOT)),
      capture_output=True,
      text=True,
      check=False,
  )


def fork(program, *args, cwd):
  """The same in a forked process, which has imported JAX already."""
  ended = forks.run(program, args, cwd)
  return subprocess.CompletedProcess(args, *ended)


def refused(done):
  assert done.returncode == 2, done.stderr
  assert done.stderr.startswith('Error: ') and done.stderr.count('\n') == 1
  return done.stderr.removeprefix('Error: ')


@pytest.mark.slow
def test_a_cell_of_a_papers_table_without_any_data(tmp_path):
  table = ('--table=fedin_v2_table1', '--scale=quick')
  cell = ('--rows=FedIN', '--cols=fashion_mnist_iid', '--seeds=4,')
  done = launch('sweep', *table, *cell, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  name = 'Cell 1 of 1, FedIN, fashion_mnist IID, seed 4: '
  assert lines[0] == f'{name}running' and lines[1].startswith(name)
  out = tmp_path / 'results' / 'fedin_v2_table1' / 'quick'
  assert lines[-1] == 'Table: results/fedin_v2_table1/quick/table.md'
  (path,) = (out / 'cells').iterdir()
  assert path.name == 'fedin-fashion_mnist_iid-4.json'
  result = json.loads(path.read_text())
  assert result['column'] == 'fashion_mnist IID' and result['seed'] == 4
  assert result['config']['partition'] == dict(name='iid', seed=4)
  # The report is the same table, with gaps; tiny runs have no paper's number.
  report = fork('report', *table, cwd=tmp_path)
  assert report.returncode == 0, report.stderr
  assert report.stdout in done.stdout
  assert report.stdout.startswith("FedIN v2, Table 1 (scale 'quick')\n")
  assert f'| {100 * result["last"]:.1f} |' in report.stdout
  assert 'last - paper' not in report.stdout
  assert (out / 'curves.png').exists()


def test_commands_refuse_in_one_line(tmp_path):
  done = fork('sweep', '--table=fedin_v2_table1', cwd=tmp_path)
  assert 'needs data_dir' in refused(done)
  done = fork('report', '--table=fashion_mnist', 'runs/x', cwd=tmp_path)
  assert refused(done) == (
      "Either a table or workdirs, got --table and 'runs/x'.\n"
  )
  done = fork('report', '--table=fedin_v2_table1', cwd=tmp_path)
  assert refused(done) == (
      'There is no result under results/fedin_v2_table1/cpu/cells yet.\n'
  )
  done = fork('sweep', '--reuse=absent', cwd=tmp_path)
  assert refused(done) == '--reuse=absent: there is no such folder.\n'
  done = fork('sweep', '--dry_run', '--render', cwd=tmp_path)
  assert refused(done).startswith('Only one of --render, --costs and ')
  for name in ('rows=FedIN', 'cols=x', 'seeds=1'):
    done = fork('sweep', '--render', f'--{name}', cwd=tmp_path)
    assert refused(done) == (
        '--render draws the whole table, so leave out '
        f'--{name.partition("=")[0]}.\n'
    )
  # Other rows cannot take this point.
  of_one = '--grid=algorithm.mu=0.1', '--rows=fedprox'
  done = fork('sweep', '--table=digits', *of_one, '--render', cwd=tmp_path)
  assert refused(done).startswith('There is no result under results/grid_')
  done = fork('report', 'runs/x', '--out=somewhere', cwd=tmp_path)
  assert refused(done).startswith('--out is for several runs, or for a table')
  done = fork('report', '--scale=cpu', 'runs/x', cwd=tmp_path)
  assert refused(done).startswith('--scale belongs to a results table')
  assert not (tmp_path / 'results').exists()


def test_results_of_no_cell_of_the_table_are_named(tmp_path, capsys):
  found = table_files.find_table('digits')
  stored = sorted((ROOT / 'results' / 'digits' / 'cells').iterdir())
  for path in (tmp_path / 'cells' / stored[0].name,
               tmp_path / 'cells' / 'other-0.json',
               tmp_path / 'cells' / 'later-0.json'):  # fmt: skip
    table_files.show(found, _copy(stored[0], path), [])
  first, second, third = capsys.readouterr().out.split('\nTable: ')[:3]
  assert 'Note' not in first
  cells = tmp_path / 'cells'
  one = f'Note: the table leaves out 1 of the results in {cells}, which are not'
  assert f'{one} of it: other-0.json\n' in second
  two = one.replace('1 of', '2 of')
  assert f'{two} of it: later-0.json, ...\n' in third


def _copy(source, path):
  """Copies a stored result; returns the folder of the results."""
  path.parent.mkdir(exist_ok=True)
  path.write_text(source.read_text())
  return path.parents[1]


def test_a_dry_run_lists_cells_and_writes_nothing(tmp_path):
  part = '--table=digits', '--rows=fedavg,fedin', '--seeds=1'
  done = fork('sweep', *part, '--dry_run', cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  first, head, rule, *cells, blank, total, last = done.stdout.splitlines()
  assert first == 'A local step of each setting is timed ...'
  assert head.split()[:2] == ['cell', 'state'] and not rule.strip('- ')
  assert [line.split()[0] for line in cells] == ['fedavg,', 'fedin,']
  assert all(' not begun ' in line for line in cells) and not blank
  assert total.startswith('2 cells to run: about ')
  assert last == 'Nothing was run.' and not [*tmp_path.iterdir()]


def test_a_dry_run_lists_cells_of_a_data_set_that_is_absent(tmp_path):
  part = '--table=fedhe_width', '--rows=Private', '--cols=width_1_8,width_1_4'
  done = fork('sweep', *part, '--dry_run', cwd=tmp_path)
  assert refused(done).startswith('cifar10 needs data_dir, a folder that holds')
  _, _, _, *cells, blank, total, last = done.stdout.splitlines()
  assert [line.split()[2:] for line in cells] == [
      [f'1/{width},', 'seed', '0', 'not', 'begun', '500', '-']
      for width in (8, 4)
  ]
  assert (total, last) == ('2 cells to run.', 'Nothing was run.')
  assert not blank and not [*tmp_path.iterdir()]


def error(function, *args):
  with pytest.raises(ValueError) as raised:
    function(*args)
  text = str(raised.value)
  assert '\n' not in text
  return text


def test_tables_are_found_by_name_and_by_path():
  by_name = table_files.find_table('fashion_mnist')
  by_path = table_files.find_table('configs/tables/fashion_mnist.py')
  assert by_name.name == by_path.name == 'fashion_mnist'
  assert list(by_name.table.rows) == list(by_path.table.rows)
  # A table of one scale has no subfolder for it.
  assert by_name.folder(None, 'results') == pathlib.Path(
      'results/fashion_mnist'
  )
  assert by_name.folder('o', 'results') == pathlib.Path('o')
  found = table_files.find_table('fedin_v2_table1', 'full')
  assert found.folder(None, 'runs') == pathlib.Path('runs/fedin_v2_table1/full')
  assert found.folder('o', 'results') == pathlib.Path('o/full')
  assert '_papers' not in table_files.names()


def test_unknown_tables_and_scales(tmp_path):
  text = error(table_files.find_table, 'fedin_v2_tabel1')
  assert text.startswith(
      "No results table 'fedin_v2_tabel1'; did you mean 'fedin_v2_table1'? "
      'There are digits, digits_clock, fashion_mnist, '
  )
  assert error(table_files.find_table, 'configs/tables/x.py').startswith(
      "No results table 'configs/tables/x.py'; there are digits, "
  )
  assert error(table_files.find_table, 'fedin_v2_table1', 'quik') == (
      "Unknown scale of fedin_v2_table1 'quik'; did you mean 'quick'? Known "
      'are cpu, full, quick.'
  )
  assert error(table_files.find_table, 'fashion_mnist', 'full') == (
      "Unknown scale of fashion_mnist 'full'; known are cpu."
  )
  path = tmp_path / 'mine.py'
  for contents, expected in (
      ('def get_table(:\n', f'{path}, line 1: '),
      ('x = 1\n', f'{path} has no function get_table.'),
      ('def get_table():\n  return absent\n', f"{path}: name 'absent' is not"),
  ):
    path.write_text(contents)
    assert error(table_files.find_table, str(path)).startswith(expected)


@pytest.mark.parametrize(
    ('text', 'seeds'),
    [('3', (0, 1, 2)), ('1', (0,)), ('0,1', (0, 1)), ('5,', (5,)),
     ('0,', (0,)), ('4, 2', (4, 2))],
)  # fmt: skip
def test_seeds(text, seeds):
  assert table_files.parse_seeds(text) == seeds


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('0', 'the seed 0 alone is --seeds=0, (with a comma) or --seeds=1'),
        ('x', '--seeds=x: write how many (--seeds=3 for 0, 1, 2) or which'),
        ('-1', '--seeds=-1: write how many'),
        ('1.5', '--seeds=1.5: write how many'),
        ('', '--seeds=: write how many'),
        (',', '--seeds=,: write how many'),
        ('1,1', '--seeds=1,1 names a seed twice.'),
        ('20240101', '--seeds=20240101 asks for more than 1,000 seeds; one s'),
        ('9' * 99, '99999 asks for more than 1,000 seeds'),
    ],
)
def test_wrong_seeds(text, expected):
  assert expected in error(table_files.parse_seeds, text)


def test_flags_choose_cells():
  table = table_files.find_table('fedin_v1_table2').table
  part = table_files.choose(
      table, '1,', ['fedin', 'FedGKT-clients'], ['fashion_mnist IID']
  )
  # FedGKT's clients are a view of the runs of its server.
  assert list(part.rows) == ['FedIN', 'FedGKT-server']
  assert part.columns == ('fashion_mnist IID',) and part.seeds == (1,)
  assert table_files.choose(table) == table
  # A label is itself, other first words are all labels that begin so.
  part = table_files.choose(table, None, ['FedAvg', 'FedGKT'], ['cifar10'])
  assert list(part.rows) == [
      'FedAvg', 'FedGKT-server', 'FedGKT-server (as FedIN)'
  ]  # fmt: skip
  assert part.columns == ('cifar10 IID', 'cifar10 non-IID')
  for words in ('cifar1', 'fed', '-'):
    assert 'Unknown column' in error(
        table_files.choose, table, None, None, [words]
    )
  assert error(table_files.choose, table, None, ['FedIM']).startswith(
      "Unknown row 'FedIM'; did you mean 'FedIN'? Known are FedIN, FedAvg, "
  )
  text = error(table_files.choose, table, None, None, ['cifar10_idd'])
  assert text.startswith("Unknown column 'cifar10_idd'; did you mean 'cifar10")
  assert error(table_files.choose, table, None, []).startswith(
      'Name at least one row: FedIN, '
  )
  quick = table_files.find_table('fedin_v2_table1', 'quick')
  assert 'cifar10 IID' in quick.merged
  for words in ('cifar10', 'cifar10_iid'):
    assert error(
        table_files.choose, quick.table, None, None, [words], quick.merged
    ).startswith(f'At this scale no column {words!r} is left, since cells ')
  assert 'Unknown column' in error(
      table_files.choose, quick.table, None, None, ['cifar1'], quick.merged
  )
  plain = table_files.find_table('fashion_mnist').table
  assert error(table_files.choose, plain, None, None, ['x']) == (
      'This table has no columns; leave --cols out.'
  )
  section = table_files.find_table('fedhe_section5').table
  assert error(
      table_files.choose, section, None, ['FedAvg'], ['mnist_heterogeneous']
  ) == 'The table has no cells in these rows and columns.'
