"""Runs of a method with a warm-up: its row, and exact resuming."""

import jax
import pytest

from fedjax_het import experiment
from tests.experiment.test_runner import Killed, killed_at
from tests.experiment.tiny_runs import (
    compiled_once,
    tiny_config,
    without_seconds,
)

pytestmark = pytest.mark.usefixtures('undrawn')


def config(**changes):
  changes = dict(num_rounds=2, **changes)
  return tiny_config('fedmd', algorithm__num_alignment=20, **changes)


@pytest.fixture(scope='module', autouse=True)
def _programs():
  with compiled_once():
    yield


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  return experiment.run(config(), tmp_path_factory.mktemp('runs') / 'whole')


@pytest.mark.slow
def test_the_warm_up_is_a_row_of_its_own(whole):
  order = [(row['round'], row['split']) for row in whole.rows]
  assert order == [
      (0, 'warm_up'),
      (0, 'test'),
      (1, 'train'),
      (1, 'test'),
      (2, 'train'),
      (2, 'test'),
  ]
  warm = whole.rows[0]
  # All five clients take part, though a cohort has four. Each sends logits and
  # gets a seed, both with the number of the subset.
  seed = jax.random.key_data(jax.random.key(0)).nbytes
  up, down = 4 * (20 * 10 + 1), seed + 4
  assert warm['clients'] == 5 and whole.rows[2]['clients'] == 4
  assert warm['bytes_up'] == 5 * up
  assert warm['bytes_down'] == 5 * down
  assert whole.rows[2]['bytes_down'] == 4 * (down + 4 * 20 * 10)
  assert whole.summary.bytes_up == (5 + 4 + 4) * up
  assert whole.summary.rounds == 2
  assert whole.rows[2]['digest_loss'] > 0


@pytest.mark.slow
@pytest.mark.parametrize('row_number', [1, 3])
def test_a_run_killed_before_its_next_checkpoint_warms_up_again(
    row_number, whole, tmp_path
):
  with pytest.raises(Killed):
    experiment.run(config(), tmp_path, observe=killed_at(row_number))
  resumed = experiment.run(config(), tmp_path)
  assert resumed.finished
  rows = without_seconds(tmp_path / 'metrics.jsonl')
  assert rows == without_seconds(whole.workdir / 'metrics.jsonl')
  assert [row['split'] for row in rows].count('warm_up') == 1


def test_a_public_set_that_leaves_no_training_set_is_refused():
  with pytest.raises(ValueError, match='public_size: A public set of 5000 ex'):
    experiment.build(config(public_size=5000))
  message = 'public_size=1441 leaves 1 of 1442 training examples to 5 clients'
  with pytest.raises(ValueError, match=message):
    experiment.build(config(public_size=1441))
  with pytest.raises(ValueError, match='public_size: fedmd needs a public set'):
    experiment.build(config(public_size=None))
