"""A preview says how long visits and rounds take on the virtual clock."""

import re

import pytest

from fedjax_het.experiment import preview
from tests.experiment.test_async_run import clock_config
from tests.experiment.tiny_runs import tiny_config

LINKS = dict(up=1e30, down=1e30, latency=0.0)


def clock_line(config):
  (line,) = (x for x in preview.lines(config) if x.startswith('Clock'))
  return line


def whole_run(line):
  return float(re.search(r'rounds take ([\d,.]+) s', line)[1].replace(',', ''))


def test_a_clock_has_the_seconds_of_visits_and_of_rounds(monkeypatch):
  """Five clients; the slowest, alone in the last group, decides a round."""
  config = clock_config(
      'fedavg', 'synchronous', cohort_size=5, num_rounds=4,
      devices=dict(
          fast=dict(clients=3, examples_per_second=1e6, **LINKS),
          slow=dict(clients=2, flops_per_second=1e3, **LINKS),
      ),
  )  # fmt: skip
  line = clock_line(config)
  *_, (number, unit) = re.findall(r' to ([\d.]+) (\w+) \(\w+\)', line)
  seconds = float(number) * dict(s=1, min=60, h=3600)[unit]
  assert whole_run(line) == pytest.approx(4 * seconds, rel=0.05)
  # A speed a hundred times higher shortens the visits by as much.
  config.devices.slow.flops_per_second = 1e5
  assert whole_run(clock_line(config)) == pytest.approx(
      whole_run(line) / 100, rel=0.01
  )
  monkeypatch.setattr(preview, '_PLANNED', 3)
  assert 'pauses; the first 3 rounds take ' in clock_line(config)


def test_without_a_clock_there_is_no_such_line():
  lines = preview.lines(tiny_config('fedavg'))
  assert not any('Clock' in line for line in lines)


def test_no_preview_of_devices_that_never_return():
  config = clock_config('fedavg', 'synchronous')
  config.devices.slow.drop_out = 1.0
  with pytest.raises(ValueError, match='never returns'):
    preview.lines(config)
