"""Helpers of the benchmarks: federations, timing, tables, files."""

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
from fedjax_het.experiment import tuned
from fedjax_het.models import BlockModel

RESULTS = pathlib.Path(__file__).parent / 'results'
BATCH_SIZE = 16
LEARNING_RATE = 1e-3


def random_images(num: int, shape: tuple[int, int, int]):
  """Random images and labels; time and memory do not depend on values.

  Args:
    num: Number of images.
    shape: (height, width, channels).

  Returns:
    uint8 images [num, H, W, C] and int32 labels [num] of 10 classes.
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
  """One local epoch, or `steps` steps, at a constant learning rate."""
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
  """A federation of clients with random images.

  Args:
    models: The architecture of all clients, or one per group; groups have equal
      sizes.
    num_clients: Number of clients of all groups.
    images_per_client: Images per client.
    local: Local training; None for an epoch with batch 16 and Adam 1e-3.

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
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
  """Minimum seconds of each program; the programs take turns.

  Other processes on the machine only add time, so the minimum is the best
  estimate. Taking turns exposes all programs to the same load.

  Args:
    programs: {name: (call that blocks until its work is done, repetitions)}.
    pause: Seconds before each call.
    clock: Returns seconds; `time.process_time` for CPU seconds of all threads.

  Returns:
    {name: seconds}.
  """
  best = dict.fromkeys(programs, float('inf'))
  for turn in range(max(times for _, times in programs.values())):
    for name, (call, times) in programs.items():
      if turn < times:
        time.sleep(pause)  # Lets the previous program's threads go idle.
        start = clock()
        call()
        best[name] = min(best[name], clock() - start)
  return best


def in_child(module: str, *args: str) -> dict[str, object]:
  """Runs `python -m module --child *args` and parses its last line as JSON."""
  child = subprocess.run(
      [sys.executable, '-m', module, '--child', *args],
      stdout=subprocess.PIPE,
      check=True,
      text=True,
  )
  return json.loads(child.stdout.splitlines()[-1])


def machine() -> dict[str, object]:
  """Hardware and versions, stored with results."""
  versions = {'python': platform.python_version()}
  for name in ('jax', 'jaxlib', 'flax', 'optax', 'torch'):
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = None
  return {
      'cpu': tuned.cpu_name(),
      'cpus': os.cpu_count(),
      'devices': [device.device_kind for device in jax.devices()],
      'system': platform.platform(),
      'load_average': os.getloadavg() if hasattr(os, 'getloadavg') else None,
      'versions': versions,
  }


def same_machine(found: Mapping[str, object]) -> bool:
  """Whether stored results are of this machine and these versions.

  Args:
    found: Results that `write` wrote.

  Returns:
    True if `machine()` differs from theirs only in the load.
  """
  now, then = machine(), found['machine']
  return all(then[k] == now[k] for k in now if k != 'load_average')


def markdown(header: list[str], rows: list[list[object]]) -> str:
  """A Markdown table; floats of 100 or more are rounded, others to 3 digits."""

  def cell(value):
    if not isinstance(value, float):
      return str(value)
    return f'{value:.0f}' if value >= 100 else f'{value:.3g}'

  lines = [header, ['---'] * len(header), *([cell(v) for v in r] for r in rows)]
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def write(path: str | pathlib.Path, results: Mapping[str, object]) -> None:
  """Writes results and `machine()` as JSON, and prints the path."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  text = json.dumps({'machine': machine(), **results}, indent=2)
  path.write_text(text + '\n')
  print(f'\nWritten to {path}')
