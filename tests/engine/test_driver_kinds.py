"""Properties of a run's driver that are known before it is made."""

import pytest

from fedjax_het.engine import drivers
from fedjax_het.engine.driver_kinds import driver_kind


@pytest.mark.parametrize(
    ('mode', 'store', 'want'),
    [
        ('synchronous', 'device', (True, False, True, '')),
        ('synchronous', 'host', (False, False, False, '')),
        ('async', 'device', (True, True, False, 'async clock')),
        ('sequential', 'device', (True, True, False, 'sequential clock')),
    ],
)
def test_a_kind_says_what_is_asked_of_it(mode, store, want):
  kind = driver_kind(mode, store)
  assert kind[1:] == want


def test_a_kind_makes_its_driver():
  assert driver_kind().make is drivers.round_driver
  assert driver_kind(client_store='host').make is drivers.streamed_driver
  make = driver_kind('async').make
  assert make.func is drivers.clock_driver
  assert make.keywords == dict(mode='async')
