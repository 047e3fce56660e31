"""A table's preview says which cells are to be run, and runs none."""

import json

import pytest

from fedjax_het.experiment import duration, sweep, sweep_preview, sweep_table
from fedjax_het.reporting import tables
from tests.experiment.tiny_runs import tiny_config


def config(algorithm='fedavg', rounds=6, **entries):
  return tiny_config(algorithm, num_rounds=rounds, backend='map', **entries)


def write_result(path, of, seed):
  cell = dict(
      row='Old', seed=seed, mean='groups', last=0.5, best=0.5, best_round=2,
      reached=None, round_seconds=1.0, hardware='', rounds=[2], accuracy=[0.5],
      config=json.loads(
          sweep_table.with_seed(of, seed, {}).to_json_best_effort()
      ),
  )  # fmt: skip
  path.parent.mkdir(parents=True)
  path.write_text(json.dumps(cell))


def test_states_and_times_of_cells(tmp_path, monkeypatch):
  timed = []

  def step(experiment, group, model):
    assert model is group.model
    timed.append(group.name)
    return 0.5

  monkeypatch.setattr(duration, '_step_seconds', step)
  table = sweep_table.Table(
      title='', setting='',
      rows={
          'Done': config(),
          'Copied': config(eval_every=2),
          'Begun': config(rounds=8),
          'New': config('fedprox'),
          'Slower': config(rounds=2).copy_and_resolve_references(),
          'Batched': config(rounds=3).copy_and_resolve_references(),
      },
      paper={}, seeds=(0,),
  )  # fmt: skip
  table.rows['Slower'].local.learning_rate = 1e-4
  table.rows['Batched'].backend = 'vmap'
  out, runs, other = (tmp_path / name for name in ('out', 'runs', 'other'))
  write_result(out / 'cells' / 'done-0.json', table.rows['Done'], 0)
  copied = other / 'cells' / 'any-0.json'
  write_result(copied, table.rows['Copied'], 0)
  begun = runs / 'begun-0'
  begun.mkdir(parents=True)
  (begun / 'metrics.jsonl').write_text(
      ''.join(f'{{"round": {n}, "split": "train"}}\n' for n in range(1, 6))
  )
  before = sorted(tmp_path.rglob('*'))
  text, blank, total, last = sweep_preview.lines(
      table, out, runs, reuse=[other]
  )
  assert sorted(tmp_path.rglob('*')) == before
  (job,) = [j for j in sweep.jobs(table, out, runs, {}) if j.row == 'New']
  once = sweep_preview._round_seconds(job)
  assert once > 0 and blank == '' and last == 'Nothing was run.'
  found = {line.split(',')[0]: line for line in text.splitlines()}
  assert 'has a result: 50.00 %' in found['Done']
  assert f'to be copied from {copied}' in found['Copied']
  words = found['Begun'].split()
  assert 'begun, 5 of 8 rounds' in found['Begun']
  assert words[-3:] == ['3', *tables.duration(3 * once).split()]
  assert 'not begun' in found['New']
  assert found['New'].split()[-3:] == ['6', *tables.duration(6 * once).split()]
  assert found['Slower'].split()[-3:] == [
      '2', *tables.duration(2 * once).split()
  ]
  assert found['Batched'].split()[-2:] == ['3', '-']
  assert total.startswith(
      f'4 cells to run: about {tables.duration(11 * once)} of plain local '
      'training on one device, without 1 whose backend'
  )
  # Cells of one setting are timed once.
  assert len(timed) == 2


def test_a_table_that_is_done_needs_no_time(tmp_path):
  table = sweep_table.Table(
      title='', setting='', rows={'Done': config()}, paper={}, seeds=(3,)
  )
  write_result(tmp_path / 'cells' / 'done-3.json', table.rows['Done'], 3)
  text, *rest = sweep_preview.lines(table, tmp_path, tmp_path / 'runs')
  assert 'has a result' in text and rest == ['', 'Nothing was run.']
  broken = tmp_path / 'cells' / 'done-3.json'
  broken.write_text('{')
  with pytest.raises(ValueError, match=r'done-3\.json is damaged'):
    next(sweep_preview.lines(table, tmp_path, tmp_path / 'runs'))
