"""Runs on several devices of one process: metrics, resuming, a warning."""

import importlib

import jax
import pytest

from fedjax_het import experiment
from fedjax_het.engine import mapping
from fedjax_het.experiment import programs
from fedjax_het.experiment.build import build
from tests.experiment.tiny_runs import tiny_config, without_seconds

pytestmark = pytest.mark.usefixtures('undrawn', 'users_generator')


def sharded(num_devices, monkeypatch):
  """Makes the backend `shard_map` use `num_devices` devices."""
  devices = jax.devices()[:num_devices]
  make = mapping.client_mesh
  monkeypatch.setattr(
      # The package also has a function `build`.
      importlib.import_module('fedjax_het.experiment.build'),
      'client_mesh',
      lambda: make(devices),
  )


def close(rows, want):
  assert len(rows) == len(want)
  for row, other in zip(rows, want, strict=True):
    assert row.keys() == other.keys()
    for key, value in row.items():
      if isinstance(value, float):
        assert value == pytest.approx(other[key], rel=1e-4), key
      elif key != 'nonfinite' and not key.endswith('/models'):
        assert value == other[key], key


@pytest.mark.slow
@pytest.mark.parametrize('name', ['private', 'fedin'])
def test_one_two_and_four_devices_give_the_same_metrics(
    name, tmp_path, monkeypatch
):
  # Not Adam, which amplifies rounding near zero to a whole step.
  config = tiny_config(
      name, num_rounds=2, backend='shard_map', local__optimizer='sgd'
  )
  runs = []
  for num in (1, 2, 4):
    sharded(num, monkeypatch)
    experiment.run(config, tmp_path / str(num))
    runs.append(without_seconds(tmp_path / str(num) / 'metrics.jsonl'))
  close(runs[1], runs[0])
  close(runs[2], runs[0])


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['synchronous', 'async'])
def test_goes_on_with_another_number_of_devices(mode, tmp_path, monkeypatch):
  config = tiny_config(
      'private',
      num_rounds=3,
      backend='shard_map',
      clock__mode=mode,
      local__optimizer='sgd',
  )
  with config.unlocked():
    config.groups.small.clients = 4  # A multiple of 4; `large` has 2.
  sharded(4, monkeypatch)
  whole = experiment.run(config, tmp_path / 'whole')
  experiment.run(config, tmp_path / 'parts', stop=lambda: True)
  sharded(2, monkeypatch)
  parts = experiment.run(config, tmp_path / 'parts')
  close(
      [dict(row, seconds=0.0) for row in parts.rows],
      [dict(row, seconds=0.0) for row in whole.rows],
  )
  assert parts.facts['program_memory']['arguments'] > 0


def test_warns_of_large_states_that_no_device_can_leave(monkeypatch, caplog):
  monkeypatch.setattr(programs, '_LARGE', 1000)
  config = tiny_config('private', backend='shard_map')
  with config.unlocked():
    config.groups.small.clients = 4
  programs.make_driver(build(config))
  # The build warns of small batches, too.
  *_, record = caplog.records
  assert record.getMessage().startswith(
      'The 2 clients of group large do not divide by 4 devices, so their '
  )
