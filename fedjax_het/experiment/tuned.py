"""Measured speeds, which `auto` follows on a CPU.

`experiment.tune` measures those of this machine. They are a file per machine
and version of jaxlib in the user's cache folder, or in the folder that
`FEDJAX_HET_TUNED` names. Until then the library's own measurements on another
machine are used, unless `FEDJAX_HET_TUNED` is set.
"""

import contextlib
import json
import logging
import math
import os
import pathlib
import platform
from typing import Any, NamedTuple
import zlib

import jax
import jaxlib.version

from fedjax_het.experiment.cache import user_folder
from fedjax_het.files import read_json, write_atomically

_log = logging.getLogger(__name__)
# Another format is another file, so that old ones are not read.
_FORMAT = 1
FOLDER = 'FEDJAX_HET_TUNED'
# An older way to set JAX's number of CPU devices.
DEVICES_FLAG = 'xla_force_host_platform_device_count'
# What `fedjax-het tune` has stored on a machine of two cores.
_REFERENCE = pathlib.Path(__file__).with_name('reference_speeds.json')
# Each device has a copy of the data.
_MOST_DEVICES = 16
_ADVICE = 'it is ignored; `fedjax-het tune` measures again'


class Net(NamedTuple):
  """What is known of a net's speed without measuring it.

  Attributes:
    work: Multiplications of one example, about.
    kernels: Number of kernels, to which compilation is proportional.
    width: Geometric mean of their output channels or features.
    convolutional: Whether convolutions of several taps are most of the work.
  """

  work: float
  kernels: int
  width: float
  convolutional: bool


class Row(NamedTuple):
  """A form in which a net was trained.

  Attributes:
    conv_backend: Library of its convolutions.
    devices: Over how many devices its clients were divided.
    images_per_second: Of all devices together.
    compile_seconds: Of its program.
  """

  conv_backend: str
  devices: int
  images_per_second: float
  compile_seconds: float


class Case(NamedTuple):
  """The forms of one net.

  Attributes:
    net: The net.
    rows: What was measured.
  """

  net: Net
  rows: tuple[Row, ...]


class Table(NamedTuple):
  """The speeds of a machine.

  Attributes:
    date: When they were measured, such as 2026-01-31.
    devices: The most devices of a form.
    cases: {name of a net: its forms}.
    machine: The other machine that was measured; '' for this one.
  """

  date: str
  devices: int
  cases: dict[str, Case]
  machine: str = ''


def cores() -> int:
  """Cores that this process may use, as XLA counts them."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def devices() -> int:
  """The most devices of a form: one per core, but few enough for memory."""
  return min(cores(), _MOST_DEVICES)


def cpu_name() -> str:
  """The processor's name."""
  info = pathlib.Path('/proc/cpuinfo')
  lines = info.read_text().splitlines() if info.is_file() else []
  names = [line.split(':')[1].strip() for line in lines if 'model name' in line]
  return names[0] if names else platform.processor()


def key() -> dict[str, Any]:
  """What speeds depend on; a table of another key is not used."""
  return dict(
      format=_FORMAT,
      jaxlib=jaxlib.version.__version__,
      cpu=cpu_name(),
      cores=cores(),
  )


def table_path() -> pathlib.Path:
  """The file of this machine's table, there or not.

  Raises:
    RuntimeError: If there is no home folder.
  """
  folder = os.environ.get(FOLDER) or user_folder('tuned')
  name = zlib.crc32(json.dumps(key()).encode())
  return pathlib.Path(folder) / f'{name:08x}.json'


def write(table: Table) -> pathlib.Path:
  """Stores a table of this machine.

  Args:
    table: The table.

  Returns:
    Its file.

  Raises:
    OSError: If it cannot be written.
    RuntimeError: If there is no home folder.
  """
  path = table_path()
  path.parent.mkdir(parents=True, exist_ok=True)
  cases = {
      name: dict(
          net=case.net._asdict(), rows=[row._asdict() for row in case.rows]
      )
      for name, case in table.cases.items()
  }
  contents = dict(
      key=key(), date=table.date, devices=table.devices, cases=cases
  )
  write_atomically(path, json.dumps(contents, indent=2) + '\n')
  return path


def read() -> Table | None:
  """The table of this machine, or None; a damaged one is warned of."""
  try:
    path = table_path()
    measured, table = _parse(**read_json(path, _ADVICE))
    return table if measured == key() else None
  except (FileNotFoundError, RuntimeError):
    return None
  except (KeyError, TypeError, AttributeError):
    _log.warning('%s is damaged; %s.', path, _ADVICE)
  except ValueError as e:
    _log.warning('%s', e)
  return None


def reference() -> Table | None:
  """Speeds of another machine, for one that has no table of its own.

  Its forms on two devices stand for as many as this machine uses: their speed
  relative to one device is taken to be the same.

  Returns:
    The speeds; None on one core, or if `FEDJAX_HET_TUNED` is set.
  """
  number = devices()
  if number == 1 or os.environ.get(FOLDER):
    return None
  measured, table = _parse(**json.loads(_REFERENCE.read_text()))

  def here(row):
    return row._replace(devices=number) if row.devices > 1 else row

  cases = {
      name: case._replace(rows=tuple(map(here, case.rows)))
      for name, case in table.cases.items()
  }
  machine = f'{measured["cpu"]}, {measured["cores"]} cores'
  return Table(table.date, number, cases, machine)


def _parse(key, date, devices, cases) -> tuple[dict[str, Any], Table]:
  """What a file holds; TypeError if it is none of tables."""
  _check_positive(devices)
  found = {name: _case(**case) for name, case in cases.items()}
  return key, Table(date, devices, found)


def _case(net, rows) -> Case:
  """A case of JSON; TypeError if it is none."""
  case = Case(Net(**net), tuple(Row(**row) for row in rows))
  _check_positive(case.net.work, case.net.kernels, case.net.width)
  for row in case.rows:
    _check_positive(*row[1:])
  return case


def _check_positive(*numbers: Any) -> None:
  """Raises TypeError unless all are positive numbers."""
  for number in numbers:
    if not isinstance(number, int | float) or not 0 < number < math.inf:
      raise TypeError(f'{number!r} is no positive number')


def start_devices(number: int) -> None:
  """Has JAX start with so many CPU devices.

  Nothing happens if JAX has started, or if the user has set their number.

  Args:
    number: How many.
  """
  asked = jax.config.jax_num_cpu_devices >= 0
  if not asked and DEVICES_FLAG not in os.environ.get('XLA_FLAGS', ''):
    with contextlib.suppress(RuntimeError):  # JAX has started.
      jax.config.update('jax_num_cpu_devices', number)
