"""The report shows the metrics, with the paper's numbers beside them."""

from importlib import import_module
import json
import pathlib
import re
import shutil

import pytest

from fedjax_het import experiment
from fedjax_het.analysis import pictures
from fedjax_het.renamed import with_moved_entries
from fedjax_het.reporting import (
  paper_targets,
  report,
  report_pictures,
  run_files,
  setting,
  tables,
)
from fedjax_het.reporting.summary import summarise
from tests.experiment.tiny_runs import tiny_config


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  folder = tmp_path_factory.mktemp('runs') / 'w'
  experiment.run(tiny_config(num_rounds=2, target_accuracy=0.99), folder)
  return folder


def cells(text, first):
  """The cells of the Markdown line whose first cell is `first`."""
  (line,) = [x for x in text.splitlines() if x.startswith(f'| {first} |')]
  return [cell.strip() for cell in line.strip('|').split('|')]


def test_report_shows_the_numbers_of_the_metrics(workdir):
  text = (workdir / 'report.md').read_text()
  config, facts, rows = report.read_run(workdir)
  summary = summarise(rows)
  accuracy = text[text.index('## Accuracy') : text.index('## Who holds')]
  for name, group in facts['groups'].items():
    row = cells(accuracy, name)
    assert row[1] == str(group['clients'])
    assert row[2] == f'{group["parameters"]:,}'
    assert row[3] == tables.percent(summary.last[f'accuracy/{name}'])
  mean = cells(accuracy, 'mean over groups')
  assert mean[3] == tables.percent(summary.last['accuracy'])
  assert mean[4] == tables.percent(summary.last['accuracy/worst'])
  assert 'last round (2)' in accuracy and 'mean accuracy of 99.00 %' in accuracy
  assert 'not reached' in accuracy
  traffic = text[text.index('## Communication') : text.index('## Memory')]
  assert cells(traffic, 'all')[4:] == [
      f'{summary.bytes_up:,}',
      f'{summary.bytes_down:,}',
  ]
  each = int(cells(traffic, 'small')[2].replace(',', ''))
  # Parameters, statistics and the averaging weight, 4 bytes each.
  small = facts['groups']['small']
  assert each == 4 * (small['parameters'] + small['statistics'] + 1)
  memory = text[text.index('## Memory') :]
  assert 'not the activations' in memory
  assert cells(memory, 'small')[1] == f'{small["parameters"]:,}'
  assert 'XLA' in memory
  assert config['partition']['name'] in text
  # Every picture that the text shows exists.
  shown = re.findall(r'!\[[^]]*\]\(([^)]*)\)', text)
  assert shown == [
      'curves.png', 'confusion.png', 'partition.png', 'classes.png',
  ]  # fmt: skip
  for name in shown:
    assert (workdir / name).read_bytes()[1:4] == b'PNG'
  # The papers do not use digits.
  assert 'Beside the paper' not in text


def test_bytes_of_a_visit_and_what_all_clients_keep():
  facts = dict(
      groups=dict(
          a=dict(parameters=8, statistics=2, client_bytes=10**6, clients=3)
      ),
      server_bytes=5 * 10**6,
  )
  rows = [
      {'split': 'train', 'clients': 2, 'bytes_up': 10, 'bytes_down': 20,
       'clients/a': 2, 'bytes_up/a': 10, 'bytes_down/a': 20},
      {'split': 'train', 'clients': 3, 'bytes_up': 20, 'bytes_down': 30,
       'clients/a': 3, 'bytes_up/a': 20, 'bytes_down/a': 30},
  ]  # fmt: skip
  _, group, every = tables.communication(rows, facts)
  assert group == ['a', '5', '6', '10', '30', '50']
  assert every == ['all', *group[1:]]
  _, group, server = tables.memory(facts)
  assert group[4:] == [tables.megabytes(1e6), tables.megabytes(3e6)]
  assert server[-1] == tables.megabytes(5e6) != group[5]


def test_report_works_without_matplotlib(workdir, monkeypatch):
  def missing(*args, **kwargs):
    raise ImportError('no matplotlib')

  monkeypatch.setattr(pictures, 'draw_partition', missing)
  text = report.write_report(workdir).read_text()
  assert '](' not in text and 'No pictures: matplotlib cannot' in text
  assert '## Memory' in text


def test_comparison(workdir, tmp_path):
  table = experiment.write_comparison([workdir, workdir], tmp_path / 'out')
  assert table.count(str(workdir)) == 2
  assert (tmp_path / 'out' / 'comparison.png').exists()
  assert table in (tmp_path / 'out' / 'comparison.md').read_text()


@pytest.mark.parametrize('paths, names', [
    (['runs/long_path/w'], ['w']),
    (['runs/a/w', 'runs/b/w'], ['a/w', 'b/w']),
    (['/x/runs/a', '/x/runs/b'], ['a', 'b']),
    (['/x/runs', '/x/runs/a'], ['runs', 'runs/a']),
    (['/x/a', '/y/a'], ['x/a', 'y/a']),
    (['/x/a', '/x/a'], ['a', 'a']),
])  # fmt: skip
def test_names_leave_out_what_all_paths_share(paths, names):
  found = run_files.short_names([pathlib.Path(path) for path in paths])
  assert found == names


def test_curves_of_a_comparison_have_short_names(
    workdir, tmp_path, monkeypatch
):
  drawn = []
  monkeypatch.setattr(
      pictures, 'draw_curves', lambda panels, *_, **__: drawn.append(panels)
  )
  monkeypatch.setattr(pictures, 'draw_trade_off', lambda *_, **__: None)
  other = shutil.copytree(workdir, tmp_path / 'deep' / 'other')
  config = json.loads((other / 'config.json').read_text())
  config['algorithm']['name'] = 'fedprox'
  (other / 'config.json').write_text(json.dumps(config))
  table = experiment.write_comparison([workdir, other], tmp_path / 'out')
  assert str(workdir) in table and str(other) in table
  ((panel,),) = [panels.values() for panels in drawn]
  assert [*panel] == run_files.short_names([workdir, other])
  assert not {str(workdir), str(other)} & {*panel}


def test_bytes_of_a_comparison_are_of_a_client(workdir, tmp_path, monkeypatch):
  drawn = []
  monkeypatch.setattr(pictures, 'draw_curves', lambda *args, **kwargs: None)
  monkeypatch.setattr(
      pictures, 'draw_trade_off', lambda *args, **kwargs: drawn.append(args)
  )
  table = experiment.write_comparison([workdir], tmp_path / 'out')
  summary = summarise(report.read_run(workdir)[2])
  up, down = summary.bytes_up / 5, summary.bytes_down / 5  # Five clients.
  row = dict(zip(cells(table, 'run'), cells(table, workdir), strict=True))
  assert row['up, a client'] == tables.megabytes(up)
  assert row['down, a client'] == tables.megabytes(down)
  ((panels, _, xlabel, _),) = drawn
  ((costs, _),) = next(iter(panels.values())).values()
  assert costs == [pytest.approx(up + down)] and 'by a client' in xlabel


def test_refuses_what_is_no_run(workdir, tmp_path):
  with pytest.raises(FileNotFoundError, match='is not a workdir'):
    report.write_report(tmp_path)
  (tmp_path / 'config.json').write_text((workdir / 'config.json').read_text())
  with pytest.raises(FileNotFoundError, match='its run has not begun'):
    report.write_report(tmp_path)


@pytest.mark.parametrize(
    ('name', 'contents'),
    [
        ('config.json', '{}'),
        ('config.json', '{"target_accuracy": null, "algorithm": 3}'),
        ('facts.json', '{}'),
        ('facts.json', '[]'),
        ('facts.json', '{"groups": '),
        ('facts.json', '[' * 5000),
        ('metrics.jsonl', '{"round": 0, "split": "test"}\n'),
        ('metrics.jsonl', 'x\n'),
    ],
)
def test_refuses_damaged_files_in_one_line(workdir, tmp_path, name, contents):
  folder = tmp_path / 'w'
  shutil.copytree(workdir, folder)
  (folder / name).write_text(contents)
  (folder / 'report.md').unlink()
  (folder / 'curves.png').unlink()
  for make in (
      lambda: report.write_report(folder),
      lambda: experiment.write_comparison([workdir, folder], tmp_path / 'out'),
  ):
    if name == 'facts.json' and contents == '{}':
      continue  # A comparison needs no facts.
    with pytest.raises(ValueError) as error:
      make()
    assert str(folder) in str(error.value) and '\n' not in str(error.value)
  assert not (folder / 'report.md').exists()
  assert not (folder / 'curves.png').exists()
  assert not (tmp_path / 'out').exists()


def config_of(algorithm, dataset, partition, groups=None, **options):
  config = experiment.default_config(algorithm).to_dict()
  config['dataset'] = dataset
  config['partition'] = dict(name=partition, seed=0, alpha=0.5)
  config['algorithm'].update(options)
  if groups is not None:
    config['groups'] = groups
  return config


@pytest.mark.parametrize(
    ('config', 'expected'),
    [
        # v2 Table 1, and Table 6 where its number of clients fits.
        (
            config_of('fedin', 'cifar10', 'dirichlet'),
            [('Table 1', 74.8, 2.3, 54), ('Table 6', 76.7, None, None)],
        ),
        (
            config_of('fedin', 'cifar10', 'dirichlet', noise=0.8),
            [('Table 1', 77.3, 2.5, 52)],
        ),
        (
            config_of('fedin', 'fashion_mnist', 'iid', noise=0.8),
            [('Table 1', 91.3, None, None)],
        ),
        (
            config_of('fedavg', 'svhn_cropped', 'dirichlet'),
            [('Table 1', 84.3, 1.2, 82)],
        ),
        (
            config_of('fedprox', 'cinic10', 'dirichlet', {'resnet10': 100}),
            [('Table 1', 57.5, 2.3, 98)],
        ),
        (
            config_of('fedin', 'cifar10', 'iid', {'resnet10': 100}),
            [('Table 1', 80.5, None, None), ('Table 6', 80.5, None, None)],
        ),
        (
            config_of('scaffold', 'cifar10', 'dirichlet'),
            [('Table 1', 67.9, 1.7, 120)],
        ),
        (
            config_of('fednova', 'cifar10', 'dirichlet'),
            [('Table 1', 61.4, 2.5, 229)],
        ),
        (
            config_of('fednova', 'fashion_mnist', 'iid',
                      aggregation='architecture'),
            [('Table 4', 84.2, None, None)],
        ),
        (config_of('fednova', 'cifar10', 'iid', server_momentum=0.9), []),
        (config_of('fedin', 'cifar10', 'iid', server_momentum=0.9), []),
        (
            config_of('moon', 'cifar10', 'dirichlet'),
            [('Table 1', 67.4, 1.8, 129)],
        ),
        (
            config_of('incoavg', 'svhn_cropped', 'iid'),
            [('Table 1', 90.0, None, None)],
        ),
        (
            config_of('fedrolex', 'cinic10', 'iid'),
            [('Table 1', 68.7, None, None)],
        ),
        # Another server optimiser than the paper's.
        (config_of('fedavg', 'cifar10', 'iid', server_momentum=0.9), []),
        (config_of('fedprox', 'cifar10', 'iid', server_optimizer='adam'), []),
        # v2 Table 2.
        (
            config_of('fedin', 'cinic10', 'dirichlet', {'vit_s8': 3}),
            [('Table 2', 87.3, 1.7, 14)],
        ),
        # v2 Table 4.
        (
            config_of(
                'fedprox', 'fashion_mnist', 'iid', aggregation='architecture'
            ),
            [('Table 4', 83.4, None, None)],
        ),
        # v1 Table II.
        (
            config_of(
                'fedin',
                'fashion_mnist',
                'dirichlet',
                aggregation='ends',
                mu=0.0,
            ),
            [('Table II', 88.28, None, None)],
        ),
        (
            config_of('fedavg', 'cifar10', 'iid', {'fedin_a': 10}),
            [('Table II', 76.43, None, None)],
        ),
        (
            config_of('heterofl', 'cifar10', 'iid', {'fedin_a': 10}),
            [('Table II', 81.23, None, None)],
        ),
        # FedIN without IN training, which is no row of that table.
        (config_of('fedavg', 'cifar10', 'iid', aggregation='ends'), []),
        # Ablations and settings without a printed number.
        (config_of('fedin', 'cifar10', 'iid', in_training=False), []),
        (config_of('fedin', 'cifar10', 'iid', mu=0.0), []),
        (config_of('fedin', 'cifar10', 'iid', rule='sequential'), []),
        (config_of('fedin', 'cifar10', 'iid', noise=0.5), []),
        (config_of('fedin', 'cifar10', 'shards'), []),
        (
            config_of('fedin', 'cifar10', 'dirichlet')
            | dict(partition=dict(name='dirichlet', seed=0, alpha=0.1)),
            [],
        ),
        (config_of('private', 'cifar10', 'iid'), []),
        # FedHe's words, for its nets and IID clients alone.
        (
            config_of('fedmd', 'mnist', 'iid', {'fedhe_cnn9': 10}),
            [('sections V-C to V-E', 97.9, None, None)],
        ),
        (config_of('fedmd', 'mnist', 'iid', {'fedhe_cnn8': 10}), []),
        (config_of('fedmd', 'mnist', 'dirichlet', {'fedhe_cnn9': 10}), []),
        (config_of('fedasync', 'mnist', 'iid', {'fedhe_cnn9': 10}), []),
        (config_of('fedin', 'digits', 'iid'), []),
    ],
)
def test_paper_targets(config, expected):
  got = [
      (t.source.partition(', ')[2], t.accuracy, t.spread, t.reached)
      for t in paper_targets.find(config)
  ]
  assert got == expected


@pytest.mark.parametrize(
    ('name', 'paper'),
    [('fedepth_table2', 'FeDepth'), ('fedepth_table3', 'FeDepth'),
     ('fedhe_section5', 'FedHe')],
)  # fmt: skip
def test_a_run_finds_what_its_papers_table_prints(name, paper):
  table = import_module(f'fedjax_het.configs.tables.{name}').get_table('full')
  cells = 0
  for label, configs in table.rows.items():
    for column, config in configs.items():
      expected = table.paper.get(label, {}).get(column)
      got = [
          target
          for target in paper_targets.find(config.to_dict())
          if target.source.startswith(paper)
      ]
      if expected is not None:
        assert got == [expected], (label, column)
        cells += 1
      else:  # None but a variant of the method, such as 'FedHe as coded'.
        assert all(label.startswith(f'{target.method} ') for target in got)
  assert cells >= 12


@pytest.mark.parametrize(
    ('algorithm', 'groups', 'model', 'options'),
    [
        # Another net, budgets of no scenario, a width of no row.
        ('fedepth', {'preresnet20': dict(budget='1/2')}, {}, {}),
        ('fedepth', {'preresnet20': dict(budget='38.68MB')}, {}, {}),
        ('fedepth', {'preresnet20': dict(budget=None)}, {}, {}),
        ('fedepth', {'mini_resnet8': dict(budget='1')}, {}, {}),
        ('heterofl', {'preresnet20': 3}, {}, {}),
        ('heterofl', {'preresnet20': dict(clients=3)}, {}, {}),
        ('fedavg', {'preresnet20': 3}, dict(width=0.7), {}),
        ('fedavg', {'preresnet20': 3}, {}, dict(server_momentum=0.9)),
        ('fedavg', {'preresnet20': 3}, {}, dict(aggregation='none')),
        ('scaffold', {'preresnet20': 3}, {}, {}),
    ],
)
def test_other_settings_have_no_number_of_fedepth(
    algorithm, groups, model, options
):
  config = config_of(algorithm, 'cifar10', 'dirichlet_balanced', groups,
                     **options)  # fmt: skip
  config['partition']['alpha'] = 0.3
  config['model'] = dict(width=1.0) | model
  assert paper_targets.find(config) == []


def test_paper_numbers_stand_beside_our_setting(workdir, tmp_path):
  for path in workdir.iterdir():
    if path.is_file():
      (tmp_path / path.name).write_bytes(path.read_bytes())
  config = json.loads((tmp_path / 'config.json').read_text())
  config['dataset'] = 'cifar10'
  config['target_accuracy'] = 0.001  # Reached in round 0.
  (tmp_path / 'config.json').write_text(json.dumps(config))
  path = tmp_path / 'metrics.jsonl'
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  for row in rows:
    if row['split'] == 'test':
      row['accuracy'], row['accuracy/clients'] = 0.5, 0.625
  path.write_text('\n'.join(map(json.dumps, rows)) + '\n')
  text = report.write_report(tmp_path).read_text()
  beside = text[text.index('## Beside the paper') :]
  assert '65.7 ± 1.8 %' in beside and '109 (at 60 %)' in beside
  assert '100 clients, 10 sampled' in beside
  ours = cells(beside, '**this run**')
  assert '5 clients (2 large, 3 small), 4 sampled, 2 rounds' in ours[-1]
  assert 'seed 0' in ours[-1]
  assert ours[-2] == '0 (at 0.1 %)'
  both = '50.00 % over groups, 62.50 % over clients'
  assert ours[-3] == f'last {both}, best {both}'


def test_metrics_of_the_servers_training_stand_in_the_report(
    workdir, tmp_path
):
  for path in workdir.iterdir():
    if path.is_file():
      shutil.copy(path, tmp_path)
  _, _, rows = report.read_run(workdir)
  assert tables.server(rows) == []
  assert "server's own training" not in (workdir / 'report.md').read_text()
  train = [row for row in rows if row['split'] == 'train']
  train[0]['server'] = dict(loss=1.25, odd=None)
  train[1]['server'] = dict(loss=0.123456, late=3.0)
  path = tmp_path / 'metrics.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  text = report.write_report(tmp_path).read_text()
  text = text[text.index("server's own training") :]
  assert cells(text, 'metric')[1:] == ['round 1', 'round 2']
  assert cells(text, 'loss')[1:] == ['1.25', '0.1235']
  assert cells(text, 'odd')[1:] == ['-', '-']  # Not measured.
  assert cells(text, 'late')[1:] == ['-', '3']


def test_further_models_stand_below_the_table():
  evaluated = dict(split='test', round=1, accuracy=0.5)
  row = evaluated | {
      'views/clients': 0.4, 'views/clients/mlp2': 0.3, 'views/bases_2': None,
  }  # fmt: skip
  train = dict(split='train', bytes_up=0, bytes_down=0, seconds=1.0)
  summary = summarise([train | dict(nonfinite=[]), row])
  lines = tables.totals(summary, None)
  assert lines[:2] == [
      "view 'clients', last round: 40.00 % (mean over clients)",
      "view 'bases_2', last round: not finite (mean over clients)",
  ]
  assert len(tables.totals(summarise([evaluated]), None)) == len(lines) - 2


def test_tables():
  table = [['a', 'b'], ['x', '10'], ['long', '2']]
  assert tables.as_text(table) == (
      'a      b\n----  --\nx     10\nlong   2'
  )  # fmt: skip
  assert tables.as_markdown(table) == (
      '| a | b |\n| --- | ---: |\n| x | 10 |\n| long | 2 |'
  )
  assert tables.percent(None) == 'not finite'
  assert tables.percent(0.91236) == '91.24 %'
  assert tables.megabytes(0) == '0.00 MB'
  assert tables.megabytes(1234) == '0.00123 MB'
  assert tables.megabytes(12_345_678) == '12.35 MB'


def test_stages_stand_beside_their_budget():
  facts = dict(schedules=dict(
      poor=dict(plan='measured', budget=2.0, models=1, stages=[
          dict(blocks=['stem', 'unit0'], paper=1.0, measured=1.951),
          dict(blocks=['unit1'], paper=0.5, measured=1.5),
      ]),
      rich=dict(plan='measured', budget=None, models=2, stages=[
          dict(blocks=['stem', 'unit1'], paper=4.0, measured=6.0),
      ]),
  ))  # fmt: skip
  assert tables.schedules(facts) == [
      ['group', 'budget', 'stage', 'paper', 'compiler'],
      ['poor', '2.00', '1: stem to unit0', '1.00', '1.95'],
      ['', '', '2: unit1', '0.50', '1.50'],
      ['rich', '-', '1: stem to unit1, 2 models', '4.00', '6.00'],
  ]


def test_options_stand_in_the_setting_where_they_are_not_defaults():
  """Options of the method and its groups, from a new and an old config."""
  config = config_of(
      'heterofl', 'digits', 'dirichlet', dict(a=dict(model='mlp', clients=2),
      b=dict(model='mlp', clients=3)), mask='batch',
  )  # fmt: skip
  config = json.loads(json.dumps(config))
  facts = dict(groups=dict(a=dict(clients=2), b=dict(clients=3)), cohort_size=5)
  assert '5 clients (2 a, 3 b), 5 sampled' in setting.setting(config, facts)
  assert f', {config["local"]["epochs"]} local epochs, ' in setting.setting(
      config, facts
  )
  config['local']['steps'] = 3
  text = setting.setting(config, facts)
  assert ', 3 local steps, ' in text and 'epochs' not in text
  config['algorithm'].update(rates='a:1 b:1/2', left_out='a b')
  text = setting.setting(with_moved_entries(config), facts)
  assert '5 clients (2 a rate=1, 3 b rate=1/2), 5 sampled' in text
  assert ", heterofl left_out=['a', 'b'] mask=batch, seed 0" in text
  # All options of a method that a config file has registered elsewhere.
  config['algorithm'] = dict(name='mine', share=0.5)
  text = setting.setting(config, facts)
  assert '5 clients (2 a, 3 b), ' in text and ', mine share=0.5, ' in text


def test_the_mean_over_groups_is_a_curve_where_there_are_several():
  rows = [{'split': 'test', 'round': 0, 'accuracy': 0.5, 'accuracy/a': 0.5}]
  assert [*report_pictures._curves(rows, dict(groups=dict(a={})))] == ['a']
  rows[0]['accuracy/b'] = 0.5
  curves = report_pictures._curves(rows, dict(groups=dict(a={}, b={})))
  assert [*curves] == ['a', 'b', 'mean over groups']
