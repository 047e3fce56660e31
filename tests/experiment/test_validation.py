"""Runs whose clients hold out examples, on which the best round is chosen."""

import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.reporting.summary import summarise
from tests.experiment.test_runner import Killed, killed_at
from tests.experiment.tiny_runs import tiny_config, without_seconds

pytestmark = pytest.mark.usefixtures('undrawn')


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp('runs') / 'whole'
  return experiment.run(tiny_config(num_rounds=2, validation=0.2), folder)


def test_clients_train_on_the_others():
  built = experiment.build(tiny_config(validation=0.2))
  before = experiment.build(tiny_config())
  everything = np.sort(np.concatenate([*built.parts, built.validation]))
  np.testing.assert_array_equal(
      everything, np.sort(np.concatenate(before.parts))
  )
  for kept, part in zip(built.parts, before.parts, strict=True):
    assert len(part) - len(kept) == len(part) // 5
    assert set(kept) <= set(part)
  sizes = built.federation.sizes.tolist()
  assert sizes == [len(part) for part in built.parts]
  assert before.validation is None


def test_validation_rows_stand_before_test_rows(whole):
  assert [(row['round'], row['split']) for row in whole.rows] == [
      (0, 'validation'),
      (0, 'test'),
      (1, 'train'),
      (1, 'validation'),
      (1, 'test'),
      (2, 'train'),
      (2, 'validation'),
      (2, 'test'),
  ]
  validation, test = whole.rows[-2:]
  assert validation.keys() == test.keys()
  assert validation['accuracy'] != test['accuracy']
  assert whole.summary.validated and whole.summary.last is test
  report = (whole.workdir / 'report.md').read_text()
  assert 'on the examples that clients have held out' in report
  assert 'optimistic' not in report and '20% of each client held out' in report


def test_the_accuracy_is_that_on_the_held_out_examples(whole):
  # The last models' accuracy, computed without the evaluation program.
  built = experiment.build(tiny_config(num_rounds=2, validation=0.2))
  images = built.dataset.train_images[built.validation]
  labels = built.dataset.train_labels[built.validation]
  for group in built.federation.groups:
    model = built.algorithm.client_model(whole.state.server, (), group)
    logits = built.algorithm.predict(group, model, built.preprocess(images))
    accuracy = float(np.mean(np.argmax(logits, -1) == labels))
    row = whole.rows[-2][f'accuracy/{group.name}']
    assert row == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.slow
def test_a_killed_run_resumes_exactly(whole, tmp_path):
  config = tiny_config(num_rounds=2, validation=0.2, checkpoint_every=1)
  with pytest.raises(Killed):  # Between a validation row and its test row.
    experiment.run(config, tmp_path, observe=killed_at(6))
  experiment.run(config, tmp_path)
  rows = without_seconds(tmp_path / 'metrics.jsonl')
  assert rows == without_seconds(whole.workdir / 'metrics.jsonl')


def test_the_best_round_is_chosen_on_validation():
  def rows(num, validation, test):
    return [
        dict(round=num, split='validation', accuracy=validation),
        dict(round=num, split='test', accuracy=test),
    ]

  history = [*rows(0, 0.1, 0.2), *rows(1, 0.8, 0.6), *rows(2, 0.7, 0.9)]
  best = summarise(history).best
  assert best == dict(round=1, split='test', accuracy=0.6)
  history += rows(3, None, 0.95)
  assert summarise(history).best['round'] == 1


@pytest.mark.parametrize(
    ('share', 'match'),
    [
        (1.0, 'validation: fraction must be at least 0 and below 1, got 1.0'),
        (0.0, 'validation must be above 0, got 0.0'),
        (1e-4, 'validation=0.0001 holds out no example'),
    ],
)
def test_shares_that_leave_nothing_are_refused(share, match):
  with pytest.raises(ValueError, match=match):
    experiment.build(tiny_config(validation=share))
