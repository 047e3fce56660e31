"""A lower bound of the memory of a run, computed before it starts.

A process that exceeds memory is killed without a message, after minutes. The
bound counts the data, the states of clients and server, one client's parameters
with gradients and optimiser state, and the activations of one batch of training
or evaluation. A run that passes the check may still be too large.
"""

from collections.abc import Mapping
import math
import os
import pathlib

import jax
import jax.numpy as jnp

from fedjax_het.engine.driver_kinds import driver_kind
from fedjax_het.engine.traffic import full_bytes
from fedjax_het.models.blocks import BlockModel

# Copies of the images: batches and the whole while resizing, and on the device.
_COPIES = 3
# A lower bound of the numbers that an optimiser keeps for each parameter.
_SLOTS = {'adam': 2, 'adamw': 2, 'sgd': 0}


def available_bytes() -> int | None:
  """Bytes that this process can allocate on the device that computes.

  Returns:
    The memory limit of all accelerators; on a CPU, the smallest of the free
    memory of the machine, of the control group, and under the process' own
    limit. None if it is unknown.
  """
  if jax.default_backend() != 'cpu':
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    limits = [s['bytes_limit'] for s in stats if 'bytes_limit' in s]
    return sum(limits) if len(limits) == len(stats) else None
  found = []
  for line in _lines('/proc/meminfo'):
    if line.startswith('MemAvailable:'):
      found.append(1024 * int(line.split()[1]))
  limit, used, stat = (
      _lines(f'/sys/fs/cgroup/memory.{name}')
      for name in ('max', 'current', 'stat')
  )
  if limit and used and limit[0].isdigit():
    # Pages of files that were read count as used, but are freed on demand.
    files = [line for line in stat if line.startswith('inactive_file ')]
    cached = sum(int(line.split()[1]) for line in files)
    found.append(int(limit[0]) - int(used[0]) + cached)
  if pages := _lines('/proc/self/statm'):
    import resource  # Windows lacks it, and statm.

    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(pages[0].split()[0]) * os.sysconf('SC_PAGE_SIZE')
    if address_space != resource.RLIM_INFINITY:
      found.append(address_space - taken)
  return max(min(found), 0) if found else None


def _lines(path: str) -> list[str]:
  """The lines of a system file; [] if it cannot be read."""
  try:
    return pathlib.Path(path).read_text(encoding='utf-8').splitlines()
  except (OSError, ValueError):
    return []


def refuse_if_too_large(needs: Mapping[str, int], what: str) -> None:
  """Raises ValueError if `needs` exceed the available memory.

  Args:
    needs: {entry of the config: bytes that it determines}.
    what: Subject and verb of the message, such as 'the run needs'.

  Raises:
    ValueError: If they do; in one line that names the entry that needs the
      most.
  """
  available, total = available_bytes(), sum(needs.values())
  if available is None or total <= available:
    return
  entry = max(needs, key=lambda name: needs[name])
  raise ValueError(
      f'{entry}: {what} at least {_gigabytes(total)} of memory'
      + (f', {_gigabytes(needs[entry])} of it here' if len(needs) > 1 else '')
      + f', but {_gigabytes(available)} are available.'
  )


def _gigabytes(num_bytes: int) -> str:
  return f'{num_bytes / 1e9:,.2f} GB'


def check_images(num_images: int, pixel_bytes: int, size: int) -> None:
  """Raises ValueError if the resized images do not fit into memory.

  Args:
    num_images: Images of both splits.
    pixel_bytes: Bytes of a pixel, all channels together.
    size: The new height and width.

  Raises:
    ValueError: If they do not fit; names `image_size`.
  """
  need = _COPIES * num_images * pixel_bytes * size**2
  refuse_if_too_large(
      {f'image_size={size}': need}, 'the resized images need'
  )


def check_copies(data, num_devices: int) -> None:
  """Raises ValueError if a copy of the data on each device does not fit.

  Args:
    data: The clients' data, before it is placed.
    num_devices: Devices of this process that each take a copy.

  Raises:
    ValueError: If they do not fit; names `dataset`.
  """
  refuse_if_too_large(
      {'dataset': num_devices * full_bytes(data)},
      f'a copy of the data for each of {num_devices} devices needs',
  )


def check(experiment) -> None:
  """Raises ValueError if an experiment needs too much memory; computes nothing.

  Args:
    experiment: The result of `build`.

  Raises:
    ValueError: If it does; names the entry that needs the most.
  """
  refuse_if_too_large(lower_bound(experiment), 'the run needs')


def lower_bound(experiment) -> dict[str, int]:
  """A lower bound of the bytes of a run, by entry of the config.

  Args:
    experiment: The result of `build`; nothing is computed.

  Returns:
    {entry: bytes that it determines}.
  """
  config, algorithm = experiment.config, experiment.algorithm
  groups = experiment.federation.groups
  key = jax.random.key(0)
  dataset = experiment.dataset
  images = dataset.train_images.nbytes + dataset.test_images.nbytes
  # Every model is trained at some time, so the largest one counts.
  trained = [m for group in groups for m in algorithm.trained_models(group)]
  params = max(_params(model, config.local) for model in trained)
  data = 'dataset' if config.image_size is None else 'image_size'
  needs = {data: images, 'groups': params}
  kind = driver_kind(config.clock.mode, config.client_store)
  if kind.states_on_device or jax.default_backend() == 'cpu':
    needs['groups'] += sum(
        group.num_clients
        * full_bytes(
            jax.eval_shape(
                lambda key, group=group: algorithm.init_client(
                    group, jnp.int32(0), key
                ),
                key,
            )
        )
        for group in groups
    )
  needs['algorithm'] = full_bytes(jax.eval_shape(algorithm.init, key))
  size = config.local.batch_size
  training = size * max(map(_training, trained))
  tests = min(config.eval_batch_size, len(dataset.test_labels))
  testing = tests * max(_testing(group.model) for group in groups)
  # They do not happen at the same time, so the larger one counts.
  if training > testing:
    needs[f'local.batch_size={size}'] = training
  else:
    needs[f'eval_batch_size={config.eval_batch_size}'] = testing
  return needs


def _params(model: BlockModel, local) -> int:
  """Bytes of a model's parameters, their gradients and optimiser state."""
  slots = _SLOTS.get(local.optimizer, 0)
  return (2 + slots) * full_bytes(model.abstract_variables.params)


def _training(model: BlockModel) -> int:
  """Bytes of one example in training: the outputs of all blocks."""
  return 4 * sum(math.prod(shape) for shape in model.outputs.values())


def _testing(model: BlockModel) -> int:
  """Bytes of one example in inference: a block's input and its output."""
  sizes = (
      math.prod(before) + math.prod(model.outputs[name])
      for name, before in model.inputs.items()
  )
  return 4 * max(sizes)
