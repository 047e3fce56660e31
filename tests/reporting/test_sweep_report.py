"""Results tables: our numbers, the paper's, their difference, and gaps."""

import csv

import pytest

from configs import fedavg, private
from fedjax_het.analysis import pictures
from fedjax_het.reporting import paper_targets, sweep_report
from fedjax_het.reporting.paper_targets import Target
from fedjax_het.reporting.results_table import Table

COLUMNS = ('digits IID', 'digits non-IID')


def config(method, target=0.7):
  made = method.get_config('quick')
  made.target_accuracy = target
  return made


@pytest.fixture
def table():
  return Table(
      title='Two methods',
      setting='Quick runs.',
      rows={'Private': config(private), 'FedAvg (x1)': config(fedavg)},
      paper={
          'FedAvg (x1)': Target('P, Table 1', 'FedAvg', '9 nets', 89.2, 1.1)
      },
      seeds=(0, 3),
  )


@pytest.fixture
def grid(table):
  """Two columns; no cell of FedAvg in the second."""
  rows = {
      'Private': dict.fromkeys(COLUMNS, table.rows['Private']),
      'FedAvg': {COLUMNS[0]: table.rows['FedAvg (x1)']},
  }
  late = Target('P, Table 1', 'Private', '9 nets', 60.0, None, 47, 85.0)
  paper = {
      'Private': {COLUMNS[0]: late},
      'FedAvg': {COLUMNS[0]: Target('P, Table 1', 'FedAvg', '9 nets', 60.5)},
  }
  return table._replace(rows=rows, paper=paper, columns=COLUMNS)


def cell(row, seed, last, column='', **more):
  """A result as `run_cells` writes it."""
  first = {'mlp2': [last - 0.1], 'mlp3': [last], 'mlp4': [last + 0.1] * 2}
  reached = 2 if last >= 0.7 else None
  made = dict(
      row=row, seed=seed, last=last, worst=last - 0.1, best=last + 0.05,
      best_round=1, validated=False, reached=reached, round_seconds=0.25,
      rounds=[0, 1, 2], accuracy=[0.1, last + 0.05, last], models=first,
      hardware='a cpu', config=dict(target_accuracy=0.7), **more,
  )  # fmt: skip
  return {**made, 'column': column} if column else made


@pytest.fixture
def cells():
  return [
      cell('Private', 0, 0.5), cell('Private', 3, 0.6),
      cell('FedAvg (x1)', 0, 0.8), cell('FedAvg (x1)', 3, 0.6),
  ]  # fmt: skip


def lines_of(text, label):
  """The cells of each Markdown line that begins with the label."""
  return [
      [part.strip() for part in line.strip('|').split('|')]
      for line in text.splitlines()
      if line.startswith(f'| {label} |')
  ]


def test_the_table_says_what_it_shows(table, cells, tmp_path):
  markdown = sweep_report.render(table, cells, tmp_path)
  text = (tmp_path / 'table.md').read_text()
  assert markdown in text and 'seeds 0, 3' in text and 'Quick runs.' in text
  header, _, private_row, fedavg_row = [
      [part.strip() for part in line.strip('|').split('|')]
      for line in markdown.splitlines()
  ]
  assert dict(zip(header, fedavg_row, strict=True)) == {
      'method': 'FedAvg (x1)',
      'seeds': '2',
      'last round': '70.0 ± 14.1',
      'best round': '75.0 ± 14.1',
      'worst model': '60.0 ± 14.1',
      'target in round': '2, -',
      'seconds a round': '0.2',
      'paper': '89.2 ± 1.1',
      'last - paper': '-19.2',
  }
  assert private_row[-2:] == ['-', '-']
  assert 'Our target: 70 %. The paper, P, Table 1: 9 nets.' in text
  assert '![Accuracy by round](curves.png)' in text
  assert (tmp_path / 'curves.png').stat().st_size > 1000


def test_seconds_of_compilation_are_shown_where_cells_have_them(
    table, cells, tmp_path
):
  cells[2]['compile_seconds'], cells[3]['compile_seconds'] = 8.04, 0.5
  markdown = sweep_report.render(table, cells, tmp_path)
  header = lines_of(markdown, 'method')[0]
  rows = lines_of(markdown, 'Private') + lines_of(markdown, 'FedAvg (x1)')
  assert [row[header.index('compilation, s')] for row in rows] == [
      '-', '0.5 to 8.0'
  ]  # fmt: skip


def test_the_table_says_which_mean_and_what_its_rows_are(
    table, cells, tmp_path
):
  sweep_report.render(table, cells, tmp_path)
  text = (tmp_path / 'table.md').read_text()
  assert 'on the whole test set, mean over groups; mean ±' in text
  notes = {'FedAvg (x1)': 'one net for everybody.'}
  table = table._replace(mean='clients', notes=notes)
  sweep_report.render(table, cells, tmp_path)
  text = (tmp_path / 'table.md').read_text()
  assert 'on the whole test set, mean over clients; mean ±' in text
  assert '\n- FedAvg (x1): one net for everybody.\n\n' in text


def test_missing_cells_leave_gaps(table, cells, tmp_path):
  markdown = sweep_report.render(table, cells[:1], tmp_path)
  assert lines_of(markdown, 'Private') == [
      ['Private', '1', '50.0', '55.0', '40.0', '-', '0.2', '-', '-']
  ]
  assert lines_of(markdown, 'FedAvg (x1)') == [
      ['FedAvg (x1)', '0', '-', '-', '-', '-', '-', '89.2 ± 1.1', '-']
  ]


def test_a_row_without_results_is_there_for_the_papers_number(
    table, cells, tmp_path
):
  found = table._replace(paper={})
  sweep_report.render(found, cells[:1], tmp_path)
  text = (tmp_path / 'table.md').read_text()
  assert lines_of(text, 'Private') and not lines_of(text, 'FedAvg (x1)')
  sweep_report.render(table, cells[:1], tmp_path)
  text = (tmp_path / 'table.md').read_text()
  assert len(lines_of(text, 'FedAvg (x1)')) == 1


def test_a_table_without_paper_says_nothing_of_one(grid, tmp_path):
  cells = [cell('Private', 0, 0.5, column) for column in COLUMNS]
  markdown = sweep_report.render(grid, cells, tmp_path)
  first, second = markdown.split(COLUMNS[1] + '\n\n')
  # A column has one if the paper has a number there.
  assert '| paper | last - paper |' in first and 'paper' not in second
  assert 'in brackets the paper' in (tmp_path / 'table.md').read_text()
  sweep_report.render(grid._replace(paper={}), cells, tmp_path)
  assert 'paper' not in (tmp_path / 'table.md').read_text()


def test_columns_have_a_part_each_and_one_for_all(grid, tmp_path):
  iid, skewed = COLUMNS
  cells = [
      cell('Private', 0, 0.5, iid), cell('Private', 0, 0.4, skewed),
      cell('Private', 1, 0.7, iid),
  ]  # fmt: skip
  markdown = sweep_report.render(grid, cells, tmp_path)
  text = (tmp_path / 'table.md').read_text()
  assert '| method | digits IID | digits non-IID |' in markdown
  overview, first, second = lines_of(text, 'Private')
  assert overview == ['Private', '60.0 ± 14.1 (60.0)', '40.0']
  assert first[-3:] == ['60.0', '+0.0', '47 (at 85 %)']
  # No number of the paper in the second column.
  assert second[1:3] == ['1', '40.0'] and len(second) == len(first) - 3
  # There is no cell of FedAvg in the second column, and no line.
  overview, first = lines_of(text, 'FedAvg')
  assert overview == ['FedAvg', '- (60.5)', '-']
  assert first[1] == '0' and first[-3:] == ['60.5', '-', '-']
  order = [text.index(f'## {column}\n') for column in COLUMNS]
  assert order == sorted(order)
  assert '(curves.png)' in text
  assert (tmp_path / 'curves.png').stat().st_size > 1000


def test_a_column_without_results_is_at_most_in_the_overview(grid, tmp_path):
  """It is there if the paper has a number for it."""
  sweep_report.render(grid, [cell('Private', 0, 0.5, COLUMNS[1])], tmp_path)
  text = (tmp_path / 'table.md').read_text()
  assert f'| method | {COLUMNS[0]} | {COLUMNS[1]} |' in text
  assert text.count(COLUMNS[0]) == 1 and f'## {COLUMNS[1]}' in text
  sweep_report.render(grid, [cell('Private', 0, 0.5, COLUMNS[0])], tmp_path)
  text = (tmp_path / 'table.md').read_text()
  assert f'| method | {COLUMNS[0]} |\n' in text
  assert COLUMNS[1] not in text and f'## {COLUMNS[0]}' in text


def test_without_matplotlib_there_is_a_table(
    table, cells, tmp_path, monkeypatch
):
  def missing(*args, **kwargs):
    raise ImportError('no matplotlib')

  monkeypatch.setattr(pictures, 'draw_curves', missing)
  sweep_report.render(table, cells, tmp_path)
  text = (tmp_path / 'table.md').read_text()
  assert 'No pictures' in text and 'curves.png' not in text


def test_families_are_means_over_their_groups(table, cells, tmp_path):
  families = {'both': ('mlp2', 'mlp3'), 'deep': ('mlp4',), 'none': ('x',)}
  sweep_report.render(table._replace(families=families), cells, tmp_path)
  text = (tmp_path / 'table.md').read_text()
  assert '| method | both | deep | none |' in text
  _, row = lines_of(text, 'Private')
  assert row == ['Private', '50.0 ± 7.1', '65.0 ± 7.1', '-']
  assert (tmp_path / 'models.png').stat().st_size > 1000


def test_a_view_is_a_row_of_the_same_runs(table, tmp_path):
  table = table._replace(
      rows={'Server': table.rows['Private'], 'Last': table.rows['Private']},
      paper={'Clients': Target('P', 'Clients', 's', 40.0)},
      views={'Clients': ('Server', 'clients')},
  )
  assert table.labels == ['Server', 'Clients', 'Last']
  assert table.config('Clients') is table.rows['Server']
  shown = cell('Server', 0, 0.9, views=dict(clients=[0.1, 0.72, 0.3]))
  markdown = sweep_report.render(table, [shown], tmp_path)
  assert lines_of(markdown, 'Server')[0][1:4] == ['1', '90.0', '95.0']
  assert lines_of(markdown, 'Clients') == [
      ['Clients', '1', '30.0', '72.0', '-', '1', '0.2', '40.0', '-10.0']
  ]


def test_other_models_of_the_same_runs_have_a_section(table, tmp_path):
  table = table._replace(
      rows=dict.fromkeys(('Server', 'Common', 'Plain'), table.rows['Private']),
      paper={},
      views={'Clients': ('Server', 'clients')},
  )
  cells = [
      cell('Server', 0, 0.9, views=dict(clients=[0.1, 0.2, 0.3])),
      cell('Common', 0, 0.5, views={'global': [0.1, 0.9, 0.6]}),
      cell('Common', 1, 0.6, views={'global': [0.1, 0.9, 0.7], 'new': [None]}),
      cell('Plain', 0, 0.5),
  ]
  sweep_report.render(table, cells, tmp_path)
  _, section = (tmp_path / 'table.md').read_text().split('## Other models\n')
  assert not lines_of(section, 'Server')  # Its view is a row of the table.
  assert lines_of(section, 'Common') == [
      ['Common', '55.0 ± 7.1', 'global', '2', '65.0 ± 7.1'],
      ['Common', '60.0', 'new', '1', 'not finite'],
  ]
  sweep_report.render(table, cells[:1], tmp_path)
  assert 'Other models' not in (tmp_path / 'table.md').read_text()


def test_long_runs_have_the_rounds_to_several_accuracies(table, tmp_path):
  def run(row, seed, accuracies):
    made = cell(row, seed, accuracies[-1])
    rounds = [5 * n for n in range(len(accuracies))]
    return {**made, 'rounds': rounds, 'accuracy': accuracies}

  # The first 70 % is a rounded float32.
  low = [0.1, 0.2, 0.69999999, 0.6, 0.7, 0.81, 0.79, 0.7, 0.6, 0.6]
  high = [0.1, None, 0.81, *[0.85] * 7]
  cells = [run('Private', 0, low), run('FedAvg (x1)', 0, high)]
  cells.append(run('FedAvg (x1)', 3, low))
  sweep_report.render(table, cells, tmp_path)
  text = (tmp_path / 'table.md').read_text()
  _, section = text.split(
      '## Last evaluations, and rounds to an accuracy\n'
  )
  head = '| method | mean of the last 5 | 70 % | 75 % | 80 % | 85 % |'
  assert head in section
  assert lines_of(section, 'Private')[0] == [
      'Private', '70.0', '10', '25', '25', '-'
  ]  # fmt: skip
  assert lines_of(section, 'FedAvg (x1)')[0] == [
      'FedAvg (x1)', '77.5 ± 10.6', '10, 10', '10, 25', '10, 25', '15, -'
  ]  # fmt: skip
  # The untrained round 0 is none of the last, and they are all finite.
  others = [run('Private', 0, low), run('FedAvg (x1)', 0, [0.1, 0.5, 0.7])]
  others.append(run('FedAvg (x1)', 3, high[:6]))
  sweep_report.render(table, others[:2], tmp_path)
  section = (tmp_path / 'table.md').read_text().split('## Last')[1]
  assert lines_of(section, 'FedAvg (x1)')[0][1] == '60.0'
  sweep_report.render(table, [others[0], others[2]], tmp_path)
  section = (tmp_path / 'table.md').read_text().split('## Last')[1]
  assert lines_of(section, 'FedAvg (x1)')[0][1] == 'not finite'
  short = [run('Private', 0, low[:9]), run('FedAvg (x1)', 0, [0.01] * 9)]
  sweep_report.render(table, short, tmp_path)
  assert 'rounds to' not in (tmp_path / 'table.md').read_text()
  poor = [run('Private', 0, [0.04] * 10)]
  sweep_report.render(table, poor, tmp_path)
  assert 'rounds to' not in (tmp_path / 'table.md').read_text()


def test_runs_with_a_clock_have_the_seconds_to_several_accuracies(
    table, tmp_path
):
  def run(row, seed, times, accuracies):
    made = cell(row, seed, accuracies[-1])
    clock = dict(virtual_times=times) if times else {}
    return {**made, 'rounds': [0, 1, 2], 'accuracy': accuracies, **clock}

  heading = '## Virtual seconds to an accuracy\n'
  # Round 0 may be at an accuracy, after pre-training.
  cells = [
      run('Private', 0, [0.0, 1499.6, 3000.0], [0.71, 0.8, 0.79]),
      run('Private', 3, [0.0, 10.0, 20.4], [0.1, None, 0.75]),
      run('FedAvg (x1)', 0, None, [0.1, 0.6, 0.9]),
  ]
  sweep_report.render(table, cells, tmp_path)
  _, section = (tmp_path / 'table.md').read_text().split(heading)
  head = '| method | last round | whole run | 65 % | 70 % | 75 % | 80 % |'
  assert head in section
  assert lines_of(section, 'Private')[0] == [
      'Private', '77.0 ± 2.8', '3,000, 20', '0, 20', '0, 20', '1,500, 20',
      '1,500, -',
  ]  # fmt: skip
  assert not lines_of(section.split('\n## ')[0], 'FedAvg (x1)')
  sweep_report.render(table, cells[2:], tmp_path)
  assert heading not in (tmp_path / 'table.md').read_text()


def test_what_is_not_finite_says_so(table, cells, tmp_path):
  cells[2]['last'] = None
  (row,) = lines_of(sweep_report.render(table, cells, tmp_path), 'FedAvg (x1)')
  assert row[2] == 'not finite' and row[-1] == 'not finite'


@pytest.mark.parametrize(
    ('target', 'text'),
    [
        (paper_targets.fedin_v1_table_2('FedIN', 'cifar10', False), '63.0'),
        (
            paper_targets.fedin_v2_table_1('HeteroFL', 'cinic10', False),
            '56.1 ± 2.1',
        ),
        (paper_targets.fedin_v2_table_4('FedProx', True), '83.4'),
        (paper_targets.fedin_v2_table_6('FedIN', 200, False), '72.2'),
        (paper_targets.fedhe('FedAvg', 'cifar10', True), 'almost 69'),
        (paper_targets.fedhe('FedMD', 'mnist', False), '98'),
        (
            paper_targets.fedepth('m-FeDepth Surplus', 'cifar100 beta 30'),
            '39.90',
        ),
        (paper_targets.fedepth('SplitMix', 'cifar10 alpha_u 0.3'), '31.23'),
    ],
)
def test_targets_stand_as_they_are_printed(target, text):
  assert target.text == text
  assert f'{target.accuracy:g}' in text or target.accuracy == float(text)


def test_the_paper_has_no_other_numbers():
  assert paper_targets.fedhe('FedAvg', 'mnist', False) is None
  assert paper_targets.fedhe('FD', 'mnist', True) is None
  assert paper_targets.fedepth('FedAvg x1', 'cifar10 alpha_u 0.3') is None
  # Clients of Table 3 hold unequal numbers of examples.
  unequal = paper_targets.fedepth('FeDepth', 'cifar10 alpha_u 0.3')
  assert 'on average 399 examples a client' in unequal.setting
  assert paper_targets.fedin_v1_table_2('FedIN', 'cinic10', True) is None
  assert paper_targets.fedin_v2_table_1('FedGKT', 'cifar10', True) is None
  reached = paper_targets.fedin_v2_table_1('HeteroFL', 'svhn_cropped', False)
  assert (reached.reached, reached.level) == (107, 80.0)


def test_groups_of_a_rows_models_are_rows_of_their_own(table, tmp_path):
  """Rows of group means; cells without curves of groups are left out."""
  views = {
      'two': ('Private', ('mlp2',)), 'rest': ('Private', ('mlp3', 'mlp4')),
  }  # fmt: skip
  groups = dict(mlp2=[0.1, 0.2, 0.3], mlp3=[0.0, 0.4, 0.5], mlp4=[0.0] * 3)
  cells = [cell('Private', 0, 0.5, groups=groups), cell('Private', 3, 0.6)]
  markdown = sweep_report.render(
      table._replace(views=views), cells, tmp_path
  )
  (two,), (rest,) = lines_of(markdown, 'two'), lines_of(markdown, 'rest')
  assert two[1:4] == ['1', '30.0', '20.0']  # Round 1, the best of the mean.
  assert rest[1:4] == ['1', '25.0', '20.0']


def test_an_order_that_is_not_the_papers_is_said(table, tmp_path):
  def paper(private, fedavg, nets=('9 nets', '9 nets')):
    return {
        label: Target('P, Table 1', label, setting, accuracy)
        for label, accuracy, setting in zip(
            table.rows, (private, fedavg), nets, strict=True
        )
    }

  cells = [cell('Private', 0, 0.5), cell('FedAvg (x1)', 0, 0.8)]
  said = (
      'The order differs from that of P, Table 1 (9 nets): here, from the '
      'best, FedAvg (x1), Private; there Private, FedAvg (x1).'
  )
  for numbers, differs in (
      (paper(70.0, 60.0), True),
      (paper(60.0, 70.0), False),
      (paper(60.0, 60.0), False),
      # Different nets are not compared.
      (paper(70.0, 60.0, ('9 nets', '1 net')), False),
  ):
    sweep_report.render(table._replace(paper=numbers), cells, tmp_path)
    text = (tmp_path / 'table.md').read_text()
    assert (said in text) == differs == ('order differs' in text)


def test_cells_with_own_tests_have_more_columns(table, cells, tmp_path):
  assert 'own test' not in sweep_report.render(table, cells, tmp_path)
  own = dict(accuracy=0.9, std=0.05, worst=0.7, p10=0.75)
  cells[0]['personal'] = own
  cells[1]['personal'] = {**own, 'accuracy': 0.8}
  markdown = sweep_report.render(table, cells, tmp_path, ['csv'])
  with open(tmp_path / 'cells.csv', newline='') as file:
    first, second, *others = csv.DictReader(file)
  assert first['personal_accuracy'] == '0.9' and first['personal_p10'] == '0.75'
  assert second['personal_accuracy'] == '0.8'
  assert all(row['personal_worst'] == '' for row in others)
  header = [part.strip() for part in markdown.splitlines()[0].split('|')]
  assert header[-5:-1] == [
      'own test: mean', 'own test: deviation', 'own test: worst',
      'own test: 10th percentile',
  ]  # fmt: skip
  (private_row,) = lines_of(markdown, 'Private')
  (fedavg_row,) = lines_of(markdown, 'FedAvg (x1)')
  assert private_row[-4:] == [
      '85.0 ± 7.1', '5.0 ± 0.0', '70.0 ± 0.0', '75.0 ± 0.0',
  ]
  assert fedavg_row[-4:] == ['-'] * 4
