"""Cells of a table run once each, resume, and are shared by processes."""

import contextlib
import json
import pathlib
import re

import jax
import numpy as np
import pytest

from configs import common, fedavg, private
from fedjax_het.experiment import (
  costs,
  sweep,
  sweep_preview,
  sweep_table,
  switch,
)
from fedjax_het.experiment.runner import Result
from fedjax_het.experiment.workdir import lock, settle_config
from fedjax_het.reporting.summary import summarise
from launch import table_files
from tests.experiment.tiny_runs import compiled_once


def tiny(method, **partition):
  """Two rounds on the digits, with a checkpoint after each."""
  config = method.get_config('quick')
  config.checkpoint_every = 1
  config.compilation_cache = False
  config.partition.update(partition)
  return config


@pytest.fixture(scope='module', autouse=True)
def _programs(undrawn):
  with compiled_once():
    yield


@pytest.fixture(scope='module')
def table():
  return sweep_table.Table(
      title='Two methods',
      setting='Quick runs.',
      rows={'Private': tiny(private), 'FedAvg (x1)': tiny(fedavg)},
      paper={},
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


class Runs:
  """Replaces `run` and records what runs."""

  def __init__(self, monkeypatch):
    self.begun, self.finished, self.trained = [], [], []
    self.at = lambda name, round_num: None  # Called before a round is recorded.
    self._run = sweep.run
    monkeypatch.setattr(sweep, 'run', self)

  def __call__(self, config, workdir, observe=lambda row: None):
    self.begun.append(workdir.name)

    def watch(row):
      observe(row)
      if row['split'] == 'train':
        self.at(workdir.name, row['round'])
        self.trained.append((workdir.name, row['round']))

    result = self._run(config, workdir, observe=watch)
    self.finished.append(workdir.name)
    return result


@pytest.fixture
def fake(table, finished, monkeypatch):
  """Runs without training, which all have the result of one real run."""
  config = sweep_table.with_seed(table.rows['Private'], 0, {})
  result = sweep.run(config, finished[0] / 'runs' / 'private-0')
  rounds = [dict(split='train', round=1), dict(split='train', round=2)]

  def run(config, workdir, observe):
    with lock(workdir):
      settle_config(workdir, config)
      for row in rounds:
        observe(row)
    return result._replace(workdir=workdir)

  monkeypatch.setattr(sweep, 'run', run)
  return Runs(monkeypatch)


NAMES = ['private-0', 'fedavg_x1-0', 'private-3', 'fedavg_x1-3']


def without_times(cells):
  times = 'round_seconds', 'compile_seconds'
  return [
      {k: v for k, v in cell.items() if k not in times} for cell in cells
  ]


@pytest.mark.slow
def test_every_cell_runs_once(table, finished, monkeypatch):
  out, cells, lines = finished
  assert [(c['row'], c['seed']) for c in cells] == [
      ('Private', 0), ('FedAvg (x1)', 0), ('Private', 3), ('FedAvg (x1)', 3),
  ]  # fmt: skip
  assert [line for line in lines if line.endswith('running')] == [
      'Cell 1 of 4, Private, seed 0: running',
      'Cell 2 of 4, FedAvg (x1), seed 0: running',
      'Cell 3 of 4, Private, seed 3: running',
      'Cell 4 of 4, FedAvg (x1), seed 3: running',
  ]
  assert '(3 left, about 0:' in lines[1] and ' left' not in lines[-1]
  runs = Runs(monkeypatch)
  again = []
  same = sweep.run_cells(
      table, out / 'results', out / 'runs', announce=again.append
  )
  assert same == cells and not runs.begun
  assert all('skipped, has a result: ' in line for line in again)
  # A cell whose result is gone is taken from its finished workdir.
  path = out / 'results' / 'cells' / 'fedavg_x1-3.json'
  stored = path.read_text()
  path.unlink()
  sweep.run_cells(table, out / 'results', out / 'runs')
  assert runs.begun == ['fedavg_x1-3'] and not runs.trained
  assert json.loads(path.read_text()) == json.loads(stored)


@pytest.mark.slow
def test_interrupted_and_resumed_each_cell_runs_once(
    table, finished, tmp_path, monkeypatch
):
  runs = Runs(monkeypatch)
  one = table._replace(seeds=(0,))
  arguments = (one, tmp_path / 'results', tmp_path / 'runs')

  def interrupt(name, round_num):
    if (name, round_num) == ('fedavg_x1-0', 2):
      raise KeyboardInterrupt

  runs.at = interrupt
  with pytest.raises(KeyboardInterrupt):
    sweep.run_cells(*arguments)
  assert runs.finished == ['private-0']
  runs.at = lambda name, round_num: None
  cells = sweep.run_cells(*arguments)
  assert runs.finished == NAMES[:2]
  # No round runs twice, not even of the interrupted cell.
  assert sorted(runs.trained) == sorted(
      (name, round_num) for name in NAMES[:2] for round_num in (1, 2)
  )
  assert without_times(cells) == without_times(finished[1][:2])


@pytest.mark.slow
def test_interrupted_in_every_cell_each_runs_once(table, tmp_path, fake):
  arguments = (table, tmp_path / 'results', tmp_path / 'runs')
  for number, broken in enumerate(NAMES):

    def interrupt(name, round_num, broken=broken):
      if name == broken:
        raise KeyboardInterrupt

    fake.at = interrupt
    with pytest.raises(KeyboardInterrupt):
      sweep.run_cells(*arguments)
    assert fake.finished == NAMES[:number]
  fake.at = lambda name, round_num: None
  sweep.run_cells(*arguments)
  assert fake.finished == NAMES


def test_a_workdir_in_use_is_passed_over(table, tmp_path):
  """The lock is the one that `run` takes."""
  one = table._replace(rows={'Private': table.rows['Private']}, seeds=(0,))
  lines = []
  with lock(tmp_path / 'runs' / 'private-0'):
    cells = sweep.run_cells(
        one, tmp_path / 'results', tmp_path / 'runs', announce=lines.append
    )
  name = 'Cell 1 of 1, Private, seed 0: '
  assert not cells and lines == [
      f'{name}running',
      f'{name}another process runs it; going on',
      f'{name}still run by another process; no result yet',
  ]


@pytest.mark.slow
def test_cells_of_other_processes_are_left_to_them(table, tmp_path, fake):
  lines = []
  with contextlib.ExitStack() as others:
    others.enter_context(lock(tmp_path / 'runs' / 'private-0'))
    others.enter_context(lock(tmp_path / 'runs' / 'fedavg_x1-3'))
    cells = sweep.run_cells(
        table, tmp_path / 'results', tmp_path / 'runs', announce=lines.append
    )
  assert fake.finished == NAMES[1:3]
  assert lines[-2:] == [
      f'Cell {n} of 4, {name}: still run by another process; no result yet'
      for n, name in ((1, 'Private, seed 0'), (4, 'FedAvg (x1), seed 3'))
  ]
  assert [(c['row'], c['seed']) for c in cells] == [
      ('FedAvg (x1)', 0), ('Private', 3)
  ]  # fmt: skip


@pytest.mark.slow
def test_a_cell_that_another_process_gave_up_is_run_in_the_end(
    table, tmp_path, fake
):
  with contextlib.ExitStack() as other:
    other.enter_context(lock(tmp_path / 'runs' / 'private-0'))
    fake.at = lambda name, _: other.close() if name == 'private-3' else None
    cells = sweep.run_cells(table, tmp_path / 'results', tmp_path / 'runs')
  assert fake.finished == [*NAMES[1:], 'private-0'] and len(cells) == 4


@pytest.mark.slow
def test_a_cell_that_fails_does_not_end_the_sweep(table, tmp_path, fake):
  def fail(name, round_num):
    if name == 'private-0' and round_num == 2:
      raise FloatingPointError('Round 2: NaN.')

  fake.at = fail
  lines = []
  arguments = (table, tmp_path / 'results', tmp_path / 'runs')
  with pytest.raises(FloatingPointError) as error:
    sweep.run_cells(*arguments, announce=lines.append)
  assert str(error.value) == 'Private, seed 0: Round 2: NaN.'
  assert 'Cell 1 of 4, Private, seed 0: failed: Round 2: NaN. (3' in lines[1]
  assert fake.finished == NAMES[1:]
  assert len(sweep_table.read_cells(table, tmp_path / 'results')) == 3


def test_what_is_wrong_is_said_before_anything_runs(
    table, tmp_path, monkeypatch
):
  runs = Runs(monkeypatch)
  arguments = (tmp_path / 'results', tmp_path / 'runs')
  real = common.get_config('fedavg', 'quick,svhn_cropped')
  rows = dict(table.rows, Last=real)
  with pytest.raises(FileNotFoundError, match='svhn_cropped needs data_dir'):
    sweep.run_cells(table._replace(rows=rows), *arguments)
  wrong = tiny(fedavg)
  wrong.local.momentum = 0.9
  rows = dict(table.rows, Last=wrong)
  with pytest.raises(ValueError, match='are for the optimizer sgd'):
    sweep.run_cells(table._replace(rows=rows), *arguments)
  path = tmp_path / 'results' / 'cells' / 'fedavg_x1-3.json'
  path.parent.mkdir(parents=True)
  path.write_text('{"row": ')
  with pytest.raises(ValueError, match=r'fedavg_x1-3.json is damaged'):
    sweep.run_cells(table, *arguments)
  assert not runs.begun


def test_a_workdir_of_another_config_still_ends_the_sweep(table, tmp_path):
  workdir = tmp_path / 'runs' / 'private-0'
  workdir.mkdir(parents=True)
  (workdir / 'metrics.jsonl').write_text('')
  with pytest.raises(ValueError, match=r'holds metrics\.jsonl but no config'):
    sweep.run_cells(table, tmp_path / 'results', tmp_path / 'runs')


@pytest.mark.slow
def test_progress_is_shown_for_each_run(table, tmp_path, fake):
  class Progress:
    def __init__(self, num_rounds):
      self.log = [num_rounds]
      shown.append(self.log)

    def __call__(self, row):
      self.log.append((row['split'], row['round']))

    def close(self):
      self.log.append('closed')

  shown = []
  one = table._replace(rows={'Private': table.rows['Private']}, seeds=(0,))
  sweep.run_cells(
      one, tmp_path / 'results', tmp_path / 'runs', progress=Progress
  )
  ((first, *rows, last),) = shown
  assert first == 2 and last == 'closed'
  assert rows == [('train', 1), ('train', 2)]


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_cell_says_where_it_comes_from(finished):
  out, cells, _ = finished
  for cell in cells:
    assert cell['config']['num_rounds'] == 2
    assert {'jax', 'device', 'python', 'flax'} <= set(cell['versions'])
    assert re.search(r' \(cpu\), \d+ of \d+ cores, ', cell['hardware'])
    assert cell['hardware'].endswith("XLA's convolutions")
    # Cells of a table without columns have neither entry.
    assert 'column' not in cell and 'views' not in cell
  # No path of this machine is stored.
  stored = out / 'results' / 'cells' / 'private-0.json'
  assert str(out) not in stored.read_text()


@pytest.mark.slow
def test_a_table_with_columns_has_a_cell_for_each(tmp_path, fake):
  table = sweep_table.Table(
      title='Two splits',
      setting='Quick runs.',
      rows={
          'FedAvg': {'digits alpha 0.5': tiny(fedavg),
                     'digits alpha 5': tiny(fedavg, alpha=5.0)},
          'Private': {'digits alpha 5': tiny(private, alpha=5.0)},
      },
      paper={},
      seeds=(1,),
      columns=('digits alpha 0.5', 'digits alpha 5'),
  )  # fmt: skip
  lines = []
  cells = sweep.run_cells(
      table, tmp_path, tmp_path / 'runs', announce=lines.append
  )
  assert [(cell['column'], cell['row']) for cell in cells] == [
      ('digits alpha 0.5', 'FedAvg'),
      ('digits alpha 5', 'FedAvg'),
      ('digits alpha 5', 'Private'),
  ]
  assert lines[0] == 'Cell 1 of 3, FedAvg, digits alpha 0.5, seed 1: running'
  assert sorted(path.name for path in (tmp_path / 'cells').iterdir()) == [
      'fedavg-digits_alpha_0_5-1.json',
      'fedavg-digits_alpha_5-1.json',
      'private-digits_alpha_5-1.json',
  ]
  alphas = [cell['config']['partition']['alpha'] for cell in cells]
  assert alphas == [0.5, 5.0, 5.0]
  assert sweep_table.read_cells(table, tmp_path) == cells


@pytest.mark.slow
def test_all_seeds_that_are_there_are_read(table, finished):
  out, cells, _ = finished
  part = table._replace(seeds=(0,))
  found = sweep_table.read_cells(part, out / 'results')
  assert found == [cells[0], cells[2], cells[1], cells[3]]


@pytest.mark.slow
def test_a_wrong_option_of_any_cell_is_refused_before_the_first(
    table, tmp_path, monkeypatch
):
  """Names the cell; so does the preview."""
  runs = Runs(monkeypatch)
  wrong = table.rows['FedAvg (x1)'].copy_and_resolve_references()
  switch.algorithm(wrong, 'fedprox')
  wrong.algorithm.mu = -1.0
  table = table._replace(rows={**table.rows, 'Wrong': wrong})
  message = '^Cell Wrong, seed 0: algorithm: mu must be at least 0, got -1.0'
  places = tmp_path / 'out', tmp_path / 'runs'
  with pytest.raises(ValueError, match=message):
    sweep.run_cells(table, *places)
  with pytest.raises(ValueError, match=message):
    next(sweep_preview.lines(table, *places))
  assert not runs.begun and not [*tmp_path.rglob('*.json')]


def test_a_result_of_another_config_is_refused(table, finished):
  out, _, _ = finished
  rows = {'Private': table.rows['Private'].copy_and_resolve_references()}
  rows['Private'].num_rounds = 3
  with pytest.raises(ValueError, match='num_rounds is 2 there and 3 here'):
    sweep_table.read_cells(table._replace(rows=rows), out / 'results')


def test_a_result_of_other_data_is_refused_and_not_copied(
    tmp_path, monkeypatch
):
  """Of a user's file; it may have moved."""

  def made(name, seed):
    path, rng = tmp_path / f'{name}.npz', np.random.default_rng(seed)
    parts = {}
    for part in ('train', 'test'):
      parts[f'x_{part}'] = rng.normal(size=(240, 4))
      parts[f'y_{part}'] = np.arange(240) % 3
    np.savez(path, **parts)
    config = tiny(private)
    config.dataset, config.data_file = 'npz', str(path)
    config.num_rounds = 1
    return sweep_table.Table('', '', {'Private': config}, {}, (0,))

  place = tmp_path / 'results', tmp_path / 'runs'
  (cell,) = sweep.run_cells(made('a', 0), *place)
  assert isinstance(cell['data'], int) and 'data_file' not in cell['config']
  runs = Runs(monkeypatch)
  (again,) = sweep.run_cells(made('moved', 0), *place)
  assert again['data'] == cell['data'] and not runs.begun
  with pytest.raises(ValueError, match='is of other data than those of data_f'):
    sweep.run_cells(made('b', 1), *place)
  for name, seed, copied in (('a', 0, 1), ('b', 1, 0)):
    sweep.copy_cells(made(name, seed), tmp_path / name, [tmp_path / 'results'])
    assert len(list((tmp_path / name).rglob('*.json'))) == copied


def test_early_stopping_makes_another_cell_but_loggers_do_not(tmp_path):
  config = private.get_config()
  cell = dict(
      row='A', column='', seed=0, last=0.5, worst=None, best=0.5, best_round=2,
      reached=None, round_seconds=1.0, hardware='cpu', rounds=[0, 2],
      accuracy=[0.1, 0.5], config=json.loads(config.to_json_best_effort()),
  )  # fmt: skip
  path = tmp_path / 'a-0.json'

  def read(stored, wanted):
    cell['config']['callbacks'].update(stored)
    path.write_text(json.dumps(cell))
    changed = config.copy_and_resolve_references()
    changed.callbacks.update(wanted)
    return sweep_table.read_cell(path, changed)

  assert read(dict(csv=True, metric='loss'), {})['best'] == 0.5
  for stored, wanted in (
      (dict(patience=2), dict(patience=None)),
      (dict(patience=2), dict(patience=3)),
      (dict(patience=2, mode='min'), dict(patience=2, mode='max')),
      (dict(patience=None), dict(patience=2)),
  ):
    with pytest.raises(ValueError, match='another config: callbacks is'):
      read(stored, wanted)
  same = dict(patience=2, metric='loss', mode='min')
  assert read(same, dict(same, csv=True))['best'] == 0.5


@pytest.fixture
def unequal(table, tmp_path, monkeypatch):
  """A table of one row with groups of 4, 1 and 1 clients, and a folder."""
  config = table.rows['Private'].copy_and_resolve_references()
  config.groups.mlp2.clients, config.groups.mlp3.clients = 4, 1
  config.groups.mlp4.clients = 1
  config.target_accuracy = 0.48
  one = table._replace(rows={'Private': config}, seeds=(0,), mean='clients')

  def row(round_num, *groups):
    found = dict(zip(config.groups, groups, strict=True))
    return {
        'round': round_num, 'split': 'test', 'accuracy': sum(groups) / 3,
        'accuracy/clients': (4 * groups[0] + groups[1] + groups[2]) / 6,
        'accuracy/worst': min(groups),
        **{f'accuracy/{k}': v for k, v in found.items()},
        **{f'accuracy/{k}/models': [v] for k, v in found.items()},
    }  # fmt: skip

  def train(round_num, up, down):
    return dict(
        round=round_num, split='train', seconds=0.5 * round_num, bytes_up=up,
        bytes_down=down, nonfinite=[],
    )  # fmt: skip

  rows = [
      row(0, 0.0, 0.0, 0.0), train(1, 10, 100), row(1, 0.6, 0.3, 0.3),
      train(2, 20, 300), row(2, 0.3, 0.6, 0.9),
  ]  # fmt: skip
  rows[2]['accuracy/worst'], rows[4]['accuracy/worst'] = 0.25, 0.05

  def run(config, workdir):
    with lock(workdir):
      settle_config(workdir, config)
    summary = summarise(rows, config.target_accuracy)
    return Result(workdir, rows, {}, summary, None, True)

  monkeypatch.setattr(sweep, 'run', run)
  # Tracing the costs would take most of the time.
  each = dict.fromkeys(config.groups, 1)
  monkeypatch.setattr(
      sweep,
      'client_costs',
      lambda config: dict(client_memory=each, client_flops=each),
  )
  return one, tmp_path


def test_a_cell_holds_the_mean_that_its_table_reports(unequal):
  """The best round and the target's round refer to the same mean."""
  table, out = unequal
  (cell,) = sweep.run_cells(table, out / 'a', out / 'runs')
  assert cell['mean'] == 'clients'
  assert cell['accuracy'] == pytest.approx([0.0, 0.5, 0.45])
  assert cell['last'] == cell['accuracy'][-1]
  assert (cell['best_round'], cell['reached']) == (1, 1)
  # All else is of the last round, or of the whole run.
  assert cell['best'] == pytest.approx(0.5) and cell['worst'] == 0.05
  assert cell['models'] == dict(mlp2=[0.3], mlp3=[0.6], mlp4=[0.9])
  assert cell['groups'] == dict(
      mlp2=[0.0, 0.6, 0.3], mlp3=[0.0, 0.3, 0.6], mlp4=[0.0, 0.3, 0.9]
  )
  assert (cell['bytes_up'], cell['bytes_down']) == (30, 400)
  assert cell['round_seconds'] == 0.75
  (cell,) = sweep.run_cells(
      table._replace(mean='groups'), out / 'b', out / 'runs2'
  )
  assert cell['accuracy'] == pytest.approx([0.0, 0.4, 0.6])
  assert (cell['best_round'], cell['reached']) == (2, 2)


def test_a_result_of_another_mean_is_refused(unequal):
  """Unless all groups have one size: then both means are equal."""
  table, out = unequal
  path = out / 'cells' / 'private-0.json'
  (cell,) = sweep.run_cells(table, out, out / 'runs')
  assert sweep_table.read_cells(table, out) == [cell]
  del cell['mean']  # As in older cells.
  path.write_text(json.dumps(cell))
  assert sweep_table.read_cells(table._replace(mean='groups'), out) == [cell]
  with pytest.raises(ValueError) as error:
    sweep_table.read_cells(table, out)
  assert str(error.value) == (
      f'{path} holds the mean over groups, but the table reports that over '
      'clients; delete it to run the cell again.'
  )
  for group in table.rows['Private'].groups.values():
    group.clients = 2
  for group in cell['config']['groups'].values():
    group['clients'] = 2
  path.write_text(json.dumps(cell))
  assert sweep_table.read_cells(table, out) == [cell]


@pytest.mark.slow
def test_results_that_are_not_there(table, finished, tmp_path):
  out, cells, _ = finished
  with pytest.raises(FileNotFoundError, match='There is no result under '):
    sweep_table.read_cells(table, tmp_path)
  name = 'private-3.json'
  (tmp_path / 'cells').mkdir()
  stored = (out / 'results' / 'cells' / name).read_text()
  (tmp_path / 'cells' / name).write_text(stored)
  assert sweep_table.read_cells(table, tmp_path) == [cells[2]]


def test_costs_are_added_without_training(tmp_path):
  one = tiny(private)
  one.groups = dict(mlp=dict(clients=2))
  one.cohort_size = None
  table = sweep_table.Table(
      title='', setting='', rows={'Private': one}, paper={}, seeds=(0,),
  )  # fmt: skip
  config = sweep_table.with_seed(table.config('Private', ''), 2, {})
  old = dict(
      row='Private', seed=2, last=0.5, best=0.5, best_round=1, reached=None,
      round_seconds=1.0, hardware='', rounds=[1], accuracy=[0.5],
      config=json.loads(config.to_json_best_effort()),
  )  # fmt: skip
  path = tmp_path / 'cells' / 'private-2.json'
  path.parent.mkdir()
  path.write_text(json.dumps(old))
  lines = []
  assert costs.add_costs(table, tmp_path, announce=lines.append) == 1
  assert lines == ['private-2.json: added client_memory and client_flops']
  (new,) = sweep_table.read_cells(table, tmp_path)
  assert {name: new[name] for name in old} == old
  assert new['client_memory'].keys() == {*config.groups}
  assert min(new['client_memory'].values()) > 1000
  assert new['costs_added']['entries'] == ['client_memory', 'client_flops']
  assert costs.add_costs(table, tmp_path) == 0


def test_memory_is_freed_where_the_c_library_cannot_return_it(monkeypatch):
  """As on systems without glibc."""

  def refuse(name):
    raise TypeError(name)

  twice = jax.jit(lambda x: 2 * x)
  twice(1.0)
  monkeypatch.setattr(sweep.ctypes, 'CDLL', refuse)
  sweep._free_memory()
  assert twice._cache_size() == 0


def test_a_result_of_another_table_is_copied(tmp_path):
  """The table of ablations takes FedIN v2's cells, and nothing else."""
  results = pathlib.Path(__file__).parents[2] / 'results' / 'fedin_v2_table1'
  whole = table_files.find_table('fedin_v2_table5b').table
  rows = ['FedIN', 'FedIN w/o IN']
  part = table_files.choose(whole, '0,7', rows, ['cifar10_non_iid'])
  part = part._replace(
      rows=dict(zip(('Without', 'Whole'), part.rows.values(), strict=True))
  )
  lines = []
  sweep.copy_cells(part, tmp_path, [results], announce=lines.append)
  # Neither another seed nor another method.
  (file,) = tmp_path.rglob('*.json')
  assert file == tmp_path / 'cells' / 'whole-cifar10_non_iid-0.json'
  path = results / 'cpu' / 'cells' / 'fedin-cifar10_non_iid-0.json'
  assert json.loads(file.read_text()) == dict(
      json.loads(path.read_text()), row='Whole'
  )
  assert lines == [f'Whole, cifar10 non-IID, seed 0: copied from {path}']
  (cell,) = sweep_table.read_cells(part, tmp_path)
  # A result that the table has is not replaced.
  mine = json.dumps(dict(cell, last=0.5))
  file.write_text(mine)
  sweep.copy_cells(part, tmp_path, [results])
  assert file.read_text() == mine


def test_a_copied_result_has_the_place_and_mean_of_its_new_table(
    table, tmp_path
):
  source = tmp_path / 'source' / 'cells' / 'any-3.json'
  source.parent.mkdir(parents=True)
  config = sweep_table.with_seed(table.rows['Private'], 3, {})
  cell = dict(
      row='Old', column='old', seed=3, mean='groups', last=0.5, best=0.5,
      best_round=2, reached=None, round_seconds=1.0, hardware='', rounds=[2],
      accuracy=[0.5], config=json.loads(config.to_json_best_effort()),
  )  # fmt: skip
  source.write_text(json.dumps(cell))
  damaged = source.with_name('a-3.json')
  damaged.write_text('{"row": ')
  sweep.copy_cells(
      table._replace(mean='clients'), tmp_path / 'out', [tmp_path / 'source']
  )
  (file,) = (tmp_path / 'out').rglob('*.json')
  assert file.name == 'private-3.json'
  cell.pop('column')
  assert json.loads(file.read_text()) == dict(
      cell, row='Private', mean='clients'
  )
