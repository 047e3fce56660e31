"""Personalised evaluation of a run: its lines, report and tables."""

import json
import shutil

import jax
import numpy as np
import pytest

from fedjax_het import experiment, load_run
from fedjax_het.data import sources, splits
from fedjax_het.engine.evaluate import Scores
from fedjax_het.engine.own_test import OwnScores
from fedjax_het.experiment import personal
from fedjax_het.experiment.workdir import settle_config
from fedjax_het.reporting import comparison, tables
from tests.experiment.tiny_runs import tiny_config, without_seconds

pytestmark = pytest.mark.usefixtures('undrawn')


def scores(accuracy, size, first=0):
  accuracy = np.array(accuracy, np.float32)
  ids = first + np.arange(len(accuracy))
  own = OwnScores(
      ids, np.array(size), {'accuracy': accuracy}, 2 * accuracy
  )
  return Scores(ids, {'accuracy': accuracy}, accuracy, own=own)


def test_statistics_over_clients_by_hand():
  row = personal.entries({
      'a': scores([0.5, 1.0, 0.0, 0.75], [2, 10, 0, 4]),
      'b': scores([0.25], [4], first=4),
  })
  # Client 2 has no test example and is not counted.
  assert row['personal/clients/a'] == [0.5, 1.0, None, 0.75]
  assert row['personal/clients/b'] == [0.25]
  values = dict(
      accuracy=0.625,  # (0.5 + 1 + 0.75 + 0.25) / 4
      std=np.sqrt((0.125**2 + 0.375**2) / 2),
      worst=0.25,
      p10=0.25 + 0.3 * 0.25,  # Position 0.1 x 3 of the sorted values.
      pooled=(1 + 10 + 3 + 1) / 20,
      loss=1.25,
  )
  for name, value in values.items():
    np.testing.assert_allclose(row[f'personal/{name}'], value, rtol=1e-6)
  assert row['personal/accuracy/a'] == 0.75
  assert row['personal/worst/a'] == 0.5
  assert row['personal/std/b'] == 0
  assert len(row) == 3 * len(values) + 2
  assert personal.entries({'a': scores([1.0], [1])._replace(own=None)}) == {}


def test_a_group_without_test_examples_has_no_numbers():
  row = personal.entries({'a': scores([0.5], [2]), 'b': scores([0.0], [0])})
  assert row['personal/accuracy'] == row['personal/accuracy/a'] == 0.5
  assert row['personal/accuracy/b'] is None
  assert row['personal/clients/b'] == [None]


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """A run without and one with personalised evaluation."""
  folder = tmp_path_factory.mktemp('runs')
  config = tiny_config('private', num_rounds=2)
  config.groups.large.depth = 2  # One shape: less to compile.
  with jax.default_prng_impl('threefry2x32'):  # With it they learn enough.
    plain = experiment.run(config, folder / 'plain')
    config.personal_test = True
    return plain, experiment.run(config, folder / 'own')


def test_all_else_stays_bit_for_bit(runs):
  plain, own = (
      without_seconds(result.workdir / 'metrics.jsonl') for result in runs
  )
  for row in own:
    found = [key for key in row if key.startswith('personal/')]
    assert len(found) == (20 if row['split'] == 'test' else 0)
    for key in found:
      row.pop(key)
  assert own == plain


def test_clients_are_tested_on_examples_assigned_like_their_own(runs):
  _, own = runs
  config = tiny_config('private')
  built = experiment.build(config)
  assert built.own_tests is None
  data = sources.load('digits')
  want = splits.split_like(
      data.train_labels, built.parts, data.test_labels, seed=0
  )
  config.personal_test = True
  built = experiment.build(config)
  for got, part in zip(built.own_tests, want, strict=True):
    np.testing.assert_array_equal(got, part)
  last = own.summary.last
  clients = [
      *last['personal/clients/large'], *last['personal/clients/small']
  ]
  assert len(clients) == 5
  # Clients have few classes, on which they are better than on all ten.
  assert last['personal/accuracy'] > last['accuracy/clients'] + 0.05
  pooled = np.average(clients, weights=[len(part) for part in want])
  np.testing.assert_allclose(last['personal/pooled'], pooled, rtol=1e-6)


def test_a_stored_run_can_be_tested_so_later(runs):
  plain, own = runs
  run = load_run(plain.workdir)
  for entries, result in (({}, plain), (dict(personal_test=True), own)):
    row, last = run.evaluate(**entries), result.summary.last
    assert {**row, 'seconds': 0} == {**last, 'seconds': 0}
  row = run.evaluate(eval_clients_per_group=1)
  assert row['models/large'] == row['models/small'] == 1
  for entries, message in (
      (dict(batch_size=7), "Unknown entry 'batch_size'; did you mean 'eval_b"),
      (dict(eval_batch_size=0), 'eval_batch_size must be at least 1, got 0'),
      (dict(personal_test='yes'), 'personal_test must be True or False'),
  ):
    with pytest.raises(ValueError, match=message):
      run.evaluate(**entries)


def test_norms_may_take_the_statistics_of_a_clients_own_examples(tmp_path):
  digits = sources.load('digits')
  # Each client is tested on twenty images of two digits.
  tests = [
      np.flatnonzero(digits.test_labels // 2 == k)[:20].tolist()
      for k in range(5)
  ]
  train = [list(range(k, 1200, 5)) for k in range(5)]
  file = tmp_path / 'parts.json'
  file.write_text(json.dumps(dict(train=train, test=tests)))
  config = tiny_config(model__norm='batch_only', local__epochs=5)
  config.partition = dict(name='file', seed=0, file=str(file))
  experiment.run(config, tmp_path / 'run')
  run = load_run(tmp_path / 'run')
  row = run.evaluate(personal_test=True)
  for group, clients in run.groups.items():
    apply, variables = run.model(group)
    mine = [tests[client] for client in clients]

    def right(rows, apply=apply, variables=variables):
      outputs = apply(variables, digits.test_images[np.array(rows)])
      return outputs.argmax(axis=1) == digits.test_labels[np.array(rows)]

    alone = np.array([right(rows) for rows in mine])
    np.testing.assert_allclose(
        row[f'personal/clients/{group}'], alone.mean(axis=1), rtol=1e-6
    )
    # In a batch with the others' images the same ones get other answers.
    assert np.any(right(np.concatenate(mine)) != alone.ravel())


def test_report_terminal_and_comparison_show_it(runs, tmp_path):
  plain, own = runs
  text = (own.workdir / 'report.md').read_text()
  assert '## Each client on its own test examples' in text
  mean = tables.percent(own.summary.last['personal/accuracy'])
  table = tables.personal(own.summary, own.facts)
  assert table[-1][:3] == ['all clients', '5', mean]
  assert [row[0] for row in table[1:3]] == ['large', 'small']
  assert f'own test examples, last round: mean {mean}' in repr(own)
  assert 'own test' not in (plain.workdir / 'report.md').read_text()
  assert tables.personal(plain.summary, plain.facts) == []
  table = comparison.compare([plain.workdir, own.workdir])
  assert f'| mean {mean}, standard' in table
  other = tmp_path / 'other'
  shutil.copytree(own.workdir, other)
  stored = json.loads((other / 'config.json').read_text())
  (other / 'config.json').write_text(json.dumps({**stored, 'seed': 7}))
  table = comparison.compare([own.workdir, other])
  shown = f'{100 * own.summary.last["personal/accuracy"]:.1f}'
  assert f'| mean {shown} ± 0.0 %, standard' in table.splitlines()[-1]
  assert 'own test' not in comparison.compare([plain.workdir])


def test_a_file_gives_the_partition_and_the_tests(tmp_path):
  file = tmp_path / 'parts.json'
  train = [list(range(k, 1200, 5)) for k in range(5)]
  test = [[0, 1], [2], [], [3, 4, 5], [0]]
  file.write_text(json.dumps(dict(train=train, test=test)))
  config = tiny_config('fedmd', personal_test=True, public_size=200)
  config.partition = dict(name='file', seed=0, file=str(file))
  built = experiment.build(config)
  assert [part.tolist() for part in built.parts] == train
  assert [part.tolist() for part in built.own_tests] == test
  # The public set is drawn from examples that the file does not list.
  public = np.asarray(built.data.public)
  assert len(set(public)) == 200 and public.min() >= 1200
  config.public_size = 242
  public = np.asarray(experiment.build(config).data.public)
  assert public.tolist() == list(range(1200, 1442))
  for changes, message in (
      (dict(public_size=243), 'public_size: .* leaves 242 examples'),
      (dict(train_size=1000), 'train_size=1000: a partition by file'),
  ):
    wrong = config.copy_and_resolve_references()
    wrong.update(changes)
    with pytest.raises(ValueError, match=message):
      experiment.build(wrong)


def test_a_partition_by_file_needs_one():
  config = tiny_config('private')
  config.partition = dict(name='file', seed=0)
  with pytest.raises(ValueError, match=r'^partition\.file is missing; '):
    experiment.check(config)
  config.partition = dict(name='file', seed=0, file='none.json')
  experiment.check(config)
  with pytest.raises(FileNotFoundError, match='no such partition file'):
    experiment.build(config)


def test_where_files_lie_and_what_is_tested_may_change(tmp_path):
  config = tiny_config('private')
  config.partition = dict(name='file', seed=0, file='a.json')
  settle_config(tmp_path, config)
  config.partition.file = 'elsewhere/a.json'
  config.personal_test = True
  settle_config(tmp_path, config)
  config.partition = dict(name='iid', seed=0)
  with pytest.raises(ValueError, match=r"partition\.name is 'file' there"):
    settle_config(tmp_path, config)
