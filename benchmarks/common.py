"""What the benchmarks share: federations, timing, tables, files."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

import jax
import numpy as np
import optax

from fedjax_het.data.federated import FederatedData, Normalise, federate
from fedjax_het.engine.types import Federation, Group, LocalTraining
from fedjax_het.models import BlockModel

RESULTS = pathlib.Path(__file__).parent / 'results'
BATCH_SIZE = 16
LEARNING_RATE = 1e-3


def random_images(num: int, shape: tuple[int, int, int]):
  """Noise and labels, uint8 and int32: time and memory do not see the values.

  Args:
    num: Number of images.
    shape: (height, width, channels).

  Returns:
    Images [num, H, W, C] and labels [num] of 10 classes.
  """
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (num, *shape), np.uint8)
  return images, rng.integers(0, 10, num, np.int32)


def local_training(
    optimizer: Callable[..., optax.GradientTransformation] = optax.adam,
    learning_rate: float = LEARNING_RATE,
    batch_size: int = BATCH_SIZE,
    steps: int | None = None,
) -> LocalTraining:
  """One local epoch, or some steps, at a constant learning rate."""
  return LocalTraining(
      optimizer,
      lambda round_num: learning_rate,
      1,
      batch_size,
      steps=steps,
      drop_unused_weights=True,
  )


def make_federation(
    models: BlockModel | Sequence[BlockModel],
    num_clients: int,
    images_per_client: int,
    local: LocalTraining | None = None,
) -> tuple[Federation, FederatedData]:
  """Clients with noise for images.

  Args:
    models: The architecture of all clients, or several for as many equal
      groups.
    num_clients: Clients in all groups.
    images_per_client: Images of each.
    local: Their local training; None for an epoch of batch 16, Adam 1e-3.

  Returns:
    The federation and its data.
  """
  models = [models] if isinstance(models, BlockModel) else list(models)
  ids = np.split(np.arange(num_clients, dtype=np.int32), len(models))
  groups = tuple(map(Group, (model.name for model in models), models, ids))
  federation = Federation(groups, local or local_training())
  input_shape = models[0].input_shape
  images, labels = random_images(num_clients * images_per_client, input_shape)
  channels = input_shape[2]
  data = federate(
      images,
      labels,
      np.split(np.arange(len(images)), num_clients),
      Normalise((0.5,) * channels, (0.25,) * channels),
  )
  return federation, data


def with_options(federation: Federation, **options) -> Federation:
  """The federation with these options in all of its groups."""
  groups = tuple(
      dataclasses.replace(group, options=options)
      for group in federation.groups
  )
  return dataclasses.replace(federation, groups=groups)


def interleave(
    programs: Mapping[str, tuple[Callable[[], object], int]],
    pause: float = 0.3,
) -> dict[str, float]:
  """Least seconds of each program, their repetitions taken in turn.

  On a machine that others use too, every delay is somebody else's: the least
  of the times is the best estimate, and turns spread a busy minute over all.

  Args:
    programs: {name: (call that returns when its work is done, repetitions)}.
    pause: Seconds before each call.

  Returns:
    {name: seconds}.
  """
  best = dict.fromkeys(programs, float('inf'))
  for turn in range(max(times for _, times in programs.values())):
    for name, (call, times) in programs.items():
      if turn < times:
        time.sleep(pause)  # Lets the threads of the one before fall asleep.
        start = time.perf_counter()
        call()
        best[name] = min(best[name], time.perf_counter() - start)
  return best


def in_child(module: str, *args: str) -> dict[str, object]:
  """What `python -m module --child *args` prints last, read as JSON."""
  child = subprocess.run(
      [sys.executable, '-m', module, '--child', *args],
      stdout=subprocess.PIPE,
      check=True,
      text=True,
  )
  return json.loads(child.stdout.splitlines()[-1])


def machine() -> dict[str, object]:
  """Hardware and versions, for the record."""
  versions = {'python': platform.python_version()}
  for name in ('jax', 'jaxlib', 'flax', 'optax', 'torch'):
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = None
  return {
      'cpu': _cpu_name(),
      'cpus': os.cpu_count(),
      'devices': [device.device_kind for device in jax.devices()],
      'system': platform.platform(),
      'load_average': os.getloadavg() if hasattr(os, 'getloadavg') else None,
      'versions': versions,
  }


def _cpu_name() -> str:
  info = pathlib.Path('/proc/cpuinfo')
  lines = info.read_text().splitlines() if info.is_file() else []
  names = [line.split(':')[1].strip() for line in lines if 'model name' in line]
  return names[0] if names else platform.processor()


def markdown(header: list[str], rows: list[list[object]]) -> str:
  """A table; numbers are rounded to three digits or to whole ones."""

  def cell(value):
    if not isinstance(value, float):
      return str(value)
    return f'{value:.0f}' if value >= 100 else f'{value:.3g}'

  lines = [header, ['---'] * len(header), *([cell(v) for v in r] for r in rows)]
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def write(path: str | pathlib.Path, results: Mapping[str, object]) -> None:
  """Writes results, with the machine, as JSON and says where."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  text = json.dumps({'machine': machine(), **results}, indent=2)
  path.write_text(text + '\n')
  print(f'\nWritten to {path}')
