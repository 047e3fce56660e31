"""Runs whose server trains: its metrics in the rows, and its NaN."""

import logging

import jax.numpy as jnp
import pytest

from fedjax_het import experiment
from fedjax_het.algorithms import ALGORITHMS
from tests.experiment.tiny_runs import tiny_config

pytestmark = pytest.mark.usefixtures('undrawn')


@pytest.fixture
def trains(monkeypatch):
  """Gives 'private' a server that counts, and is NaN in update `broken`."""
  make = ALGORITHMS['private']

  def patch(broken=-1):
    def trained(federation):
      def server_update(server, received, turn):
        bad = turn.round_num == broken
        count = jnp.where(bad, jnp.nan, server + 1)
        return count, dict(loss=1 / count)

      algorithm = make(federation)
      return algorithm._replace(
          init=lambda key: jnp.float32(0), server_update=server_update
      )

    monkeypatch.setitem(ALGORITHMS, 'private', trained)

  return patch


@pytest.mark.parametrize(
    'changes,losses',
    [
        (dict(), [1, 1 / 2]),
        (dict(client_store='host'), [1, 1 / 2]),
        (dict(rounds_per_dispatch=2, eval_every=2), [1, 1 / 2]),
        # Four uploads a round: the mean over four updates of the server.
        (
            dict(clock__mode='sequential'),
            [
                sum(1 / n for n in range(1, 5)) / 4,
                sum(1 / n for n in range(5, 9)) / 4,
            ],
        ),
    ],
)
def test_every_driver_reports_them(changes, losses, trains, tmp_path):
  trains()
  config = tiny_config('private', num_rounds=2, **changes)
  config.groups.large.depth = 2  # One shape: less to compile.
  rows = experiment.run(config, tmp_path / 'w').rows
  train = [row for row in rows if row['split'] == 'train']
  assert [row['server'] for row in train] == [
      {'loss': pytest.approx(loss)} for loss in losses
  ]
  assert not any('server' in row for row in rows if row['split'] == 'test')


def test_rows_of_other_methods_have_no_such_entry(tmp_path):
  config = tiny_config('private', num_rounds=1)
  rows = experiment.run(config, tmp_path / 'w').rows
  assert not any('server' in row for row in rows)


def test_nan_in_the_servers_training_ends_the_run(trains, tmp_path):
  trains(broken=2)
  config = tiny_config('private', nonfinite='raise')
  config.groups.large.depth = 2
  expected = "^Round 3: the server's update holds NaN or infinity. Lower the"
  with pytest.raises(FloatingPointError, match=expected):
    experiment.run(config, tmp_path / 'w')


def test_nan_of_a_generator_ends_the_run(tmp_path):
  """FedGen's clients stay finite: they begin without a generator."""
  config = tiny_config('fedgen', num_rounds=2, nonfinite='raise')
  config.groups.large.depth = 2
  config.algorithm.update(
      generator_lr=1e38, server_steps=3, hidden=4, noise_size=2
  )
  expected = "^Round 1: the server's update holds NaN or infinity. Lower the"
  with pytest.raises(FloatingPointError, match=expected) as error:
    experiment.run(config, tmp_path / 'w')
  assert '\n' not in str(error.value)


def test_or_is_dropped_with_a_warning(trains, tmp_path, caplog):
  trains(broken=2)
  config = tiny_config('private', nonfinite='drop')
  config.groups.large.depth = 2
  with caplog.at_level(logging.WARNING):
    result = experiment.run(config, tmp_path / 'w')
  assert result.finished and float(result.state.server) == 3
  losses = [r['server']['loss'] for r in result.rows if r['split'] == 'train']
  assert losses == [1, 1 / 2, None, pytest.approx(1 / 3)]
  messages = [record.getMessage() for record in caplog.records]
  assert [m for m in messages if m.startswith('Round')] == [
      "Round 3: the server's update holds NaN or infinity; the server keeps "
      'its last state.'
  ]


def test_a_warm_up_needs_the_clients_on_the_device(monkeypatch, tmp_path):
  make = ALGORITHMS['private']

  def warmed(federation):
    algorithm = make(federation)
    return algorithm._replace(warm_up=algorithm.client_update)

  monkeypatch.setitem(ALGORITHMS, 'private', warmed)
  config = tiny_config('private', client_store='host')
  with pytest.raises(ValueError, match="client_store='host' does not fit a"):
    experiment.run(config, tmp_path / 'w')
  assert not (tmp_path / 'w').exists()
