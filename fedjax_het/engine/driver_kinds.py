"""The kinds of driver, their properties, and the choice among them."""

from collections.abc import Callable
import functools
from typing import NamedTuple

from fedjax_het.engine.drivers import (
  Driver,
  Job,
  clock_driver,
  round_driver,
  streamed_driver,
)


class DriverKind(NamedTuple):
  """A kind of driver.

  Attributes:
    make: Makes the driver of a job.
    states_on_device: Whether the clients' states are in device memory; else
      they are in host memory.
    needs_devices: Whether each client needs a `clock.Device`.
    over_devices: Whether the clients of a round can be divided over devices.
    setting: Its words in a report's line of settings; '' for none.
  """

  make: Callable[[Job], Driver]
  states_on_device: bool = True
  needs_devices: bool = False
  over_devices: bool = False
  setting: str = ''


def driver_kind(
    clock_mode: str = 'synchronous', client_store: str = 'device'
) -> DriverKind:
  """The kind of driver that a config's entries select.

  Args:
    clock_mode: 'synchronous', or one of `tiers.UPLOAD_MODES`.
    client_store: 'device', or 'host' for clients' states in host memory, which
      works with synchronous rounds only.

  Returns:
    The kind.
  """
  if clock_mode != 'synchronous':
    make = functools.partial(clock_driver, mode=clock_mode)
    return DriverKind(make, needs_devices=True, setting=f'{clock_mode} clock')
  if client_store == 'host':
    return DriverKind(streamed_driver, states_on_device=False)
  return DriverKind(round_driver, over_devices=True)
