"""A task's own metric, where smaller is better, up to the report."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.algorithms import private
from fedjax_het.analysis import pictures
from fedjax_het.data.federated import federate
from fedjax_het.engine import rounds
from fedjax_het.engine.evaluate import make_evaluate
from fedjax_het.engine.task import Task
from fedjax_het.experiment import metrics
from fedjax_het.reporting import comparison, report
from tests.reporting.test_report import cells
from tests.tiny import SHAPE, preprocess, tiny_federation, tiny_local

LISTS = [[0, 1, 2], [], [3, 4], [5]]


def error(outputs, labels):
  return outputs[:, 0] - labels


def squared(outputs, labels):
  return jnp.square(error(outputs, labels))


REGRESSION = Task(
    'regression',
    squared,
    {'mse': squared, 'mae': lambda z, y: jnp.abs(error(z, y))},
    larger_is_better=False,
)


@pytest.fixture(scope='module')
def found():
  """Rows of models whose outputs are 2, then 0, then 1; labels are 0 to 5."""
  federation = tiny_federation(
      (1,), per_group=4, norm=False, local=tiny_local(task=REGRESSION)
  )
  algorithm = private(federation)
  images = np.zeros((6, *SHAPE), np.uint8)
  labels = np.arange(6, dtype=np.float32)
  evaluate = make_evaluate(
      algorithm, federation, images, labels, preprocess,
      own_tests=federate(images, labels, LISTS, preprocess, allow_empty=True),
  )  # fmt: skip
  state = rounds.init_state(algorithm, federation, jax.random.key(0))

  def of_output(value):
    clients = jax.tree.map(jnp.zeros_like, state.clients)
    for variables, _ in clients.values():
      head = variables.params['head']['Dense_0']
      head['bias'] = jnp.full_like(head['bias'], value)
    return state._replace(clients=clients)

  return federation, [
      metrics.test_row(
          number, jax.device_get(evaluate(of_output(value))), federation, 0.0
      )
      for number, value in enumerate([2, 0, 1])
  ]


def test_lines_have_the_tasks_metrics(found):
  federation, (_, zeros, ones) = found
  row = json.loads(json.dumps(zeros))
  assert not any('accuracy' in key for key in row)
  group = federation.groups[0].name
  for name, value in dict(mse=55 / 6, mae=2.5, loss=55 / 6).items():
    assert row[name] == row[f'{name}/{group}'] == pytest.approx(value)
  assert row['mse/clients'] == row['mse/worst'] == row['mse']
  own = {k.removeprefix('personal/'): v for k, v in row.items() if 'pers' in k}
  by_client = [np.mean(np.square(mine)) for mine in LISTS if mine]
  assert own['mse'] == pytest.approx(np.mean(by_client))
  assert own['worst'] == 25
  assert own['p90'] == pytest.approx(np.percentile(by_client, 90))
  assert 'p10' not in own and ones['personal/worst'] == 16


def write_run(folder, found, **facts):
  federation, rows = found
  config = experiment.default_config('private').to_dict()
  config |= dict(target_accuracy=5.5, num_rounds=2)
  group = dict(clients=4, parameters=1, statistics=0, client_bytes=4)
  facts = dict(
      groups={one.name: group for one in federation.groups},
      group_of=[one.name for one in federation.groups] * 4,
      partition=[[1, 2]] * 4, cohort_size=4, test_examples=6, server_bytes=0,
      versions=dict(jax='', platform='', device=''),
      metric=federation.task.main._asdict(),
  ) | facts  # fmt: skip
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(config))
  (folder / 'facts.json').write_text(json.dumps(facts))
  lines = [json.dumps(row) + '\n' for row in rows]
  (folder / 'metrics.jsonl').write_text(''.join(lines))
  return folder


def test_the_report_has_the_tasks_metric(found, tmp_path, monkeypatch):
  drawn = []

  def draw(series, path, label, *args, percent, **options):
    del series, path, args, options
    drawn.append((label, percent))

  for name in ('draw_curves', 'draw_strips'):
    monkeypatch.setattr(pictures, name, draw)
  for name in ('draw_partition', 'draw_heat_maps', 'draw_trade_off'):
    monkeypatch.setattr(pictures, name, lambda *a, **k: None)
  folder = write_run(tmp_path / 'w', found)
  text = report.write_report(folder).read_text()
  assert 'ccuracy' not in text and '## Mse' in text
  assert 'the lowest mean test mse' in text
  # Means of squares: 19/6 with outputs 2, 55/6 with 0, 31/6 with 1.
  mean = cells(text, 'mean over groups')
  assert mean[3:] == ['5.167', '5.167', '3.167']
  assert 'best round (0)' in text
  assert 'mean mse of 5.5: reached in round 0' in text
  assert cells(text, 'all clients')[2:5] == ['7.722', '6.319', '16']
  assert '90th percentile' in text
  run = experiment.load_run(folder)
  assert run.summary.best['round'] == 0 and '5.167' in repr(run)
  assert '5.167' in comparison.write_comparison([folder], tmp_path / 'out')
  labels = 'Test mse', 'Mse', 'Mean test mse'
  assert drawn == [(label, False) for label in labels]


def test_runs_of_different_metrics_are_not_compared(found, tmp_path):
  one = write_run(tmp_path / 'a', found)
  metric = dict(name='mae', larger_is_better=False)
  two = write_run(tmp_path / 'b', found, metric=metric)
  with pytest.raises(ValueError, match=r'measured by mse, but .* by mae: '):
    comparison.write_comparison([one, two], tmp_path / 'out')
  assert not (tmp_path / 'out').exists()
