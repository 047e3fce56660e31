"""Runs on the virtual clock: rows, resuming, reports and refused configs."""

import ml_collections
import numpy as np
import pytest

from fedjax_het import experiment
from fedjax_het.algorithms import ALGORITHMS, private
from fedjax_het.experiment.config import cohort_size
from tests.experiment.test_config import message
from tests.experiment.tiny_runs import (
    tiny_config,
    without_pictures,
    without_seconds,
)

FLEET = dict(
    fast=dict(clients=3, examples_per_second=1000.0, drop_out=0.3),
    slow=dict(clients=2, examples_per_second=100.0, jitter=0.1, pause=0.2),
)


def clock_config(algorithm='fedasync', mode='async', devices=FLEET, **changes):
  config = tiny_config(algorithm, clock__mode=mode, **changes)
  config.devices = ml_collections.ConfigDict(devices)
  return config


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  folder = tmp_path_factory.mktemp('runs') / 'whole'
  return experiment.run(clock_config(), folder)


def test_rows_carry_virtual_time(finished):
  train = [row for row in finished.rows if row['split'] == 'train']
  tests = [row for row in finished.rows if row['split'] == 'test']
  assert tests[0]['virtual_time'] == 0.0
  times = [row['virtual_time'] for row in train]
  assert times == [row['virtual_time'] for row in tests[1:]]
  assert np.all(np.diff(times, prepend=0.0) > 0)
  assert all(row['clients'] == 4 and row['staleness'] >= 0 for row in train)
  assert max(row['staleness'] for row in train) > 0
  summary = finished.summary
  assert summary.virtual_time == times[-1]
  assert summary.lost == sum(row['lost'] for row in train) > 0
  # A lost visit costs the model twice, down and up, and one coefficient up.
  sizes = {
      4 * (2 * (g['parameters'] + g['statistics']) + 1)
      for g in finished.facts['groups'].values()
  }
  for row in train:
    a, b = sorted(sizes)
    costs = {i * a + (row['lost'] - i) * b for i in range(row['lost'] + 1)}
    assert row['bytes_lost'] in costs
  assert tests[-1]['accuracy'] > tests[0]['accuracy']


@pytest.mark.slow
def test_stopped_after_every_round_it_ends_alike(finished, tmp_path):
  folder, count = tmp_path / 'w', 0
  config = clock_config(checkpoint_every=100)
  with without_pictures():
    while not experiment.run(config, folder, stop=lambda: True).finished:
      count += 1
      if count == 2:  # A longer plan begins with the shorter one.
        config.num_rounds = 3
        assert experiment.run(config, folder).finished
        config.num_rounds = 4
  assert count >= 2
  want = without_seconds(finished.workdir / 'metrics.jsonl')
  assert without_seconds(folder / 'metrics.jsonl') == want


@pytest.mark.slow
def test_tiers_stop_after_every_round_and_end_alike(tmp_path):
  """A round is one of a group; without a number it has the smallest's size."""
  config = clock_config('fedat', 'tiers', cohort_size=None, num_rounds=6)
  sizes = [group.clients for group in config.groups.values()]
  assert cohort_size(config) == min(sizes) < sum(sizes)
  with without_pictures():
    whole = experiment.run(config, tmp_path / 'whole')
    while not experiment.run(
        config, tmp_path / 'w', stop=lambda: True
    ).finished:
      pass
  want = without_seconds(tmp_path / 'whole' / 'metrics.jsonl')
  assert without_seconds(tmp_path / 'w' / 'metrics.jsonl') == want
  train = [row for row in whole.rows if row['split'] == 'train']
  assert all(row['clients'] == min(sizes) for row in train)
  assert np.all(np.diff([row['virtual_time'] for row in train]) >= 0)
  # Each round is of one group, and both have some.
  trained = [
      {name for name in config.groups if row[f'clients/{name}']}
      for row in train
  ]
  assert all(len(names) == 1 for names in trained)
  assert set.union(*trained) == set(config.groups)
  assert 'tiers clock' in (whole.workdir / 'report.md').read_text()


def test_reports_show_virtual_time(finished, tmp_path):
  text = (finished.workdir / 'report.md').read_text()
  assert '(times.png)' in text and 's of virtual time' in text
  assert 'async clock, devices 3 fast, 2 slow' in text
  assert (finished.workdir / 'times.png').exists()
  other = experiment.run(
      clock_config('fedavg', 'synchronous', num_rounds=2), tmp_path / 'sync'
  )
  train = [row for row in other.rows if row['split'] == 'train']
  assert 'staleness' not in train[0]
  # Four of five clients include a slow one, of 100 examples per second.
  assert train[0]['virtual_time'] > 1.0
  # Meanwhile fast clients upload several times.
  assert finished.rows[1]['virtual_time'] < train[0]['virtual_time']
  folders = [finished.workdir, tmp_path / 'sync']
  table = experiment.write_comparison(folders, tmp_path / 'out')
  assert f'{other.summary.virtual_time:,.1f} s' in table
  assert (tmp_path / 'out' / 'times.png').exists()
  assert '(times.png)' in (tmp_path / 'out' / 'comparison.md').read_text()


@pytest.mark.slow
def test_warm_up_comes_before_an_asynchronous_run(tmp_path, monkeypatch):
  def warmed(federation):
    algorithm = private(federation)
    return algorithm._replace(warm_up=algorithm.client_update)

  monkeypatch.setitem(ALGORITHMS, 'private', warmed)
  result = experiment.run(
      clock_config('private', 'sequential', num_rounds=1), tmp_path / 'w'
  )
  splits = [row['split'] for row in result.rows]
  assert splits == ['warm_up', 'test', 'train', 'test']
  assert result.rows[0]['clients'] == 5 and result.rows[2]['clients'] == 4
  assert result.rows[2]['staleness'] == 0
  assert result.rows[1]['virtual_time'] == 0
  # The first round starts from the models of the warm-up.
  assert result.rows[2]['loss'] < result.rows[0]['loss']


@pytest.mark.parametrize(
    ('config', 'expected'),
    [
        (
            clock_config(mode='asynch'),
            "Unknown clock.mode 'asynch'; did you mean 'async'? Known are "
            'synchronous, async, sequential, tiers.',
        ),
        (
            clock_config(mode='tiers'),
            "clock.mode='tiers' draws a cohort from one group: cohort_size "
            'must be at most 2, the clients of the smallest group, got 4.',
        ),
        (
            clock_config(clock__seed=-1),
            'clock.seed must be at least 0, got -1.',
        ),
        (
            clock_config(backend='loop'),
            "backend='loop' cannot run asynchronous rounds; use auto or one of "
            'map, vmap, shard_map.',
        ),
        (
            clock_config(devices=dict(a=dict(clients=4))),
            'devices are for 4 clients, but groups hold 5.',
        ),
        (
            clock_config(devices=dict(a=dict(clients=5, drop_out=1.0))),
            'devices: drop_out is 1 for every client, so no upload would '
            'arrive.',
        ),
        (
            clock_config(devices=dict(a=dict(clients=5, up=0.0))),
            'devices.a: up of a device must be above 0, got 0.0.',
        ),
        (
            clock_config(devices=dict(a=dict(clients=5, pauze=1.0))),
            "devices.a.pauze: a device has no option 'pauze'; did you mean "
            "'pause'? It takes examples_per_second, up, down, latency, "
            'pause, jitter, drop_out, flops_per_second.',
        ),
        (
            clock_config(devices=dict(a=dict(clients=5, up='fast'))),
            "devices.a.up must be a finite number, got 'fast'.",
        ),
        (
            clock_config(devices=dict(a=5)),
            'devices.a must be a section, got 5.',
        ),
    ],
)
def test_wrong_clocks_are_refused(config, expected):
  assert message(config) == expected


@pytest.mark.parametrize('mode', ['async', 'sequential'])
def test_a_hundred_million_rounds_begin_at_once(tmp_path, mode):
  """Only rounds that run are planned, and none are stacked."""
  config = tiny_config('private', num_rounds=10**8, clock__mode=mode)
  config.rounds_per_dispatch = config.checkpoint_every = 10**6
  config.eval_every = 2
  config.model.norm = 'none'
  seen = []
  result = experiment.run(
      config, tmp_path, observe=seen.append, stop=lambda: len(seen) > 3
  )
  assert not result.finished and result.summary.rounds < 10
