"""Speeds measured on this machine, which `auto` follows on a CPU.

`experiment.tune` measures them. They are a file per machine and version of
jaxlib in the user's cache folder, or in the folder that `FEDJAX_HET_TUNED`
names.
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
  """

  date: str
  devices: int
  cases: dict[str, Case]


def cores() -> int:
  """Cores that this process may use, as XLA counts them."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def devices() -> int:
  """The most devices of a form: one per core, as far as memory allows."""
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
  folder = os.environ.get('FEDJAX_HET_TUNED') or user_folder('tuned')
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
  contents = dict(key=key(), **table._replace(cases=cases)._asdict())
  write_atomically(path, json.dumps(contents, indent=2) + '\n')
  return path


def read() -> Table | None:
  """The table of this machine, or None; a damaged one is warned of."""
  try:
    path = table_path()
    found = read_json(path, _ADVICE)
    if found.pop('key') != key():
      return None
    cases = {
        name: _case(**case) for name, case in found.pop('cases').items()
    }
    table = Table(cases=cases, **found)
    _check_positive(table.devices)
    return table
  except (FileNotFoundError, RuntimeError):
    return None
  except (KeyError, TypeError, AttributeError):
    _log.warning('%s is damaged; %s.', path, _ADVICE)
  except ValueError as e:
    _log.warning('%s', e)
  return None


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
  flag = 'xla_force_host_platform_device_count'
  asked = jax.config.jax_num_cpu_devices >= 0
  if not asked and flag not in os.environ.get('XLA_FLAGS', ''):
    with contextlib.suppress(RuntimeError):  # JAX has started.
      jax.config.update('jax_num_cpu_devices', number)
