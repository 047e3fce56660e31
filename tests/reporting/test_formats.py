"""CSV and LaTeX, repetitions of a run, and the tables in `results/`."""

import csv
import json
import pathlib
import re
import shutil

import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.analysis import pictures
from fedjax_het.experiment import sweep_table
from fedjax_het.reporting import comparison, results_table, sweep_report, tables
from launch import table_files
from tests.experiment.tiny_runs import tiny_config

ROOT = pathlib.Path(table_files.__file__).parents[1]
RESULTS = ROOT / 'results'
SHIPPED = sorted(
    path.parent.relative_to(RESULTS).as_posix()
    for pattern in ('*/table.md', '*/cpu/table.md')
    for path in RESULTS.glob(pattern)
)


def test_latex_and_csv_hold_the_same_cells():
  table = [['method', 'a_b & c'], ['x', '70.0 ± 1.5'], ['y', '9 %']]
  assert tables.as_latex(table).splitlines() == [
      r'\begin{tabular}{lr}',
      r'\toprule',
      r'method & a\_b \& c \\',
      r'\midrule',
      r'x & 70.0 $\pm$ 1.5 \\',
      r'y & 9 \% \\',
      r'\bottomrule',
      r'\end{tabular}',
  ]
  assert [*csv.reader(tables.as_csv(table).splitlines())] == table
  with pytest.raises(ValueError, match="Unknown format 'pfd'; did you mean"):
    tables.check_formats(['csv', 'pfd'])


@pytest.fixture(scope='module')
def seeds(tmp_path_factory):
  """Three workdirs: one run, and copies with other seeds and accuracies."""
  folder = tmp_path_factory.mktemp('runs')
  experiment.run(tiny_config(num_rounds=1), folder / '0')
  for seed in (1, 2):
    shutil.copytree(folder / '0', folder / str(seed))
    path = folder / str(seed) / 'config.json'
    config = json.loads(path.read_text())
    config['seed'] = config['partition']['seed'] = seed
    path.write_text(json.dumps(config))
    path = folder / str(seed) / 'metrics.jsonl'
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
      if row['split'] == 'test':  # The best round is the first.
        row['accuracy'] = 0.1 * seed + 0.3 * (row['round'] == 0)
        row['accuracy/worst'] = 0.01 * seed
    path.write_text('\n'.join(map(json.dumps, rows)) + '\n')
  return [folder / str(seed) for seed in range(3)]


def test_runs_that_differ_in_seeds_have_a_mean(seeds, tmp_path, monkeypatch):
  drawn = {}
  monkeypatch.setattr(
      pictures, 'draw_curves',
      lambda panels, path, *args, **kw: drawn.update({path.name: panels}),
  )  # fmt: skip
  text = experiment.write_comparison(seeds[1:], tmp_path, ['csv', 'tex', 'pdf'])
  (line,) = (x for x in text.splitlines() if x.startswith('| mean of 2'))
  found = [part.strip() for part in line.strip('|').split('|')]
  assert found[4] == '1, 2' and found[6] == '15.0 ± 7.1 %'
  assert found[7:9] == ['1.5 ± 0.7 %', '45.0 ± 7.1 %']
  assert 'seed' not in found[3]
  ((title, series),) = drawn['comparison.pdf'].items()
  assert title.startswith('digits, dirichlet') and 'seed' not in title
  (curve,) = series.values()
  assert [row[-1] for row in curve[1]] == pytest.approx([0.1, 0.2])
  with open(tmp_path / 'comparison.csv', newline='') as file:
    assert len([*csv.reader(file)]) == 4
  assert r'15.0 $\pm$ 7.1 \%' in (tmp_path / 'comparison.tex').read_text()


def test_times_and_bytes_of_seeds_are_one_curve(seeds, tmp_path, monkeypatch):
  drawn = {}

  def draw(panels, path, *args, looks, **kwargs):
    drawn[path.name] = panels, looks

  monkeypatch.setattr(pictures, 'draw_curves', draw)
  monkeypatch.setattr(pictures, 'draw_trade_off', draw)
  folders = []
  for seed in (1, 2):
    for rate in (0.1, 0.2):
      folder = shutil.copytree(seeds[seed], tmp_path / f'{seed}_{rate}')
      config = json.loads((folder / 'config.json').read_text())
      config['local']['learning_rate'] = rate
      (folder / 'config.json').write_text(json.dumps(config))
      path = folder / 'metrics.jsonl'
      rows = [json.loads(line) for line in path.read_text().splitlines()]
      for row in rows:
        row['virtual_time'] = 10.0 * seed * row['round']
        if row['split'] == 'train':
          row['bytes_up'], row['bytes_down'] = 500 * seed, 0
      path.write_text('\n'.join(map(json.dumps, rows)) + '\n')
      folders.append(folder)
  experiment.write_comparison(folders, tmp_path / 'out')
  for name in ('comparison.png', 'times.png', 'bytes.png'):
    panels, looks = drawn[name]
    (series,) = panels.values()
    assert len(series) == 2 and len({looks[label] for label in series}) == 2
  (series,) = drawn['times.png'][0].values()
  for times, values in series.values():
    assert times[-1] == 15.0 and np.shape(values) == (2, len(times))
  (series,) = drawn['bytes.png'][0].values()
  number = 5  # Clients.
  for sent, last in series.values():
    assert sent == [500 / number, 1000 / number]
    assert last == pytest.approx([0.1, 0.2])


def test_other_differences_and_equal_seeds_are_no_repetition(seeds, tmp_path):
  assert 'mean of' not in comparison.compare([seeds[1], seeds[1]])
  other = tmp_path / 'other'
  shutil.copytree(seeds[2], other)
  config = json.loads((other / 'config.json').read_text())
  config['local']['epochs'] += 1
  (other / 'config.json').write_text(json.dumps(config))
  assert 'mean of' not in comparison.compare([seeds[1], other])
  # Early stopping is a difference, and a logger is none.
  config['local']['epochs'] -= 1
  for callbacks, word in ((dict(csv=True), True), (dict(patience=2), False)):
    config['callbacks'].update(callbacks)
    (other / 'config.json').write_text(json.dumps(config))
    assert ('mean of' in comparison.compare([seeds[1], other])) == word
  # So are other data in a file of the same kind.
  config['callbacks'].update(patience=None)
  (other / 'config.json').write_text(json.dumps(config))
  facts = json.loads((other / 'facts.json').read_text())
  for data, word in ((facts['data'], True), (facts['data'] + 1, False)):
    (other / 'facts.json').write_text(json.dumps(dict(facts, data=data)))
    assert ('mean of' in comparison.compare([seeds[1], other])) == word
  # So are two runs of one seed.
  config = json.loads((seeds[1] / 'config.json').read_text())
  config['callbacks'].update(csv=True)
  (other / 'config.json').write_text(json.dumps(config))
  assert 'mean of' not in comparison.compare([seeds[1], other])


def test_a_band_ends_with_the_run_that_stopped_first(
    seeds, tmp_path, monkeypatch
):
  drawn = []
  monkeypatch.setattr(
      pictures, 'draw_curves', lambda panels, *args, **kw: drawn.append(panels)
  )
  path = seeds[2] / 'metrics.jsonl'
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  last = max(row['round'] for row in rows if row['split'] == 'test')
  kept = [json.dumps(row) for row in rows if row['round'] < last]
  path.write_text('\n'.join(kept) + '\n')
  experiment.write_comparison(seeds[1:], tmp_path)
  ((curve,),) = (series.values() for series in drawn[0].values())
  assert len(curve[1]) == 2 and max(curve[0]) < last


@pytest.mark.parametrize('where', SHIPPED)
def test_shipped_tables_are_as_the_report_renders_them(
    where, tmp_path, monkeypatch
):
  for draw in ('draw_curves', 'draw_dots', 'draw_trade_off'):
    monkeypatch.setattr(pictures, draw, lambda *args, **kwargs: None)
  # If a table has several scales, its results have a subfolder for each.
  name = where.split('/')[0]
  table = table_files.find_table(name).table
  cells = sweep_table.read_cells(table, RESULTS / where)
  formats = ('csv', 'tex')
  sweep_report.render(table, cells, tmp_path, formats)
  stored = (RESULTS / where / 'table.md').read_text()
  command = f'python -m launch.report --table={name} --out=results/{name}'
  assert (tmp_path / 'table.md').read_text() == stored, command
  page = (ROOT / 'docs' / 'metrics.md').read_text()
  for picture in re.findall(r'\]\((\w+\.png)\)', stored):
    assert (RESULTS / where / picture).exists() and f'`{picture}`' in page
  with open(tmp_path / 'cells.csv', newline='') as file:
    rows = [*csv.DictReader(file)]
  assert [float(row['last']) for row in rows] == [c['last'] for c in cells]


def test_quick_tables_run_each_distinct_config_once():
  table = table_files.find_table('fedin_v2_table1', 'quick').table
  full = table_files.find_table('fedin_v2_table1', 'full').table
  found = [
      table.config(row, column)
      for row in table.rows
      for column in table.columns
      if table.config(row, column) is not None
  ]
  texts = set()
  for config in found:
    entries = config.to_dict()
    del entries['target_accuracy']
    texts.add(repr(entries))
  assert len(texts) == len(found) < len(full.rows) * len(full.columns) / 3
  assert set(table.rows) <= set(full.rows) and len(table.seeds) == 1
  assert not table.paper
  plain = full._replace(columns=('',), rows=dict(a=found[0], b=found[0]))
  assert [*results_table.distinct(plain).rows] == ['a']
