"""A lower bound of the memory of a run, computed before it starts.

A process that exceeds memory is killed without a message, after minutes. What
is counted here is a lower bound: data, what clients and server keep, one
client's training and one batch of the evaluation, as if nothing else took any
memory. A run that passes may still be too large.
"""

from collections.abc import Mapping
import math
import os
import pathlib

import jax
import jax.numpy as jnp

from fedjax_het.engine.driver_kinds import driver_kind
from fedjax_het.models.blocks import BlockModel

# Copies of the images: in batches and whole while resizing, then on the device.
_COPIES = 3
# Numbers that an optimiser keeps for each parameter, at least.
_SLOTS = {'adam': 2, 'adamw': 2, 'sgd': 0}


def available_bytes() -> int | None:
  """Bytes that this process may still take, on the device that computes.

  Returns:
    What the accelerators hold; on a CPU the least of the free memory of the
    machine, of the control group, and of the process' own limit. None where
    nothing says so.
  """
  if jax.default_backend() != 'cpu':
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    limits = [s['bytes_limit'] for s in stats if 'bytes_limit' in s]
    return sum(limits) if len(limits) == len(stats) else None
  found = []
  for line in _lines('/proc/meminfo'):
    if line.startswith('MemAvailable:'):
      found.append(1024 * int(line.split()[1]))
  limit, used = (
      _lines(f'/sys/fs/cgroup/memory.{name}') for name in ('max', 'current')
  )
  if limit and used and limit[0].isdigit():
    found.append(int(limit[0]) - int(used[0]))
  if pages := _lines('/proc/self/statm'):
    import resource  # Not on Windows, nor is that file.

    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(pages[0].split()[0]) * os.sysconf('SC_PAGE_SIZE')
    if address_space != resource.RLIM_INFINITY:
      found.append(address_space - taken)
  return max(min(found), 0) if found else None


def _lines(path: str) -> list[str]:
  """The lines of a file of the system; none where it is not there."""
  try:
    return pathlib.Path(path).read_text(encoding='utf-8').splitlines()
  except (OSError, ValueError):
    return []


def refuse_if_too_large(needs: Mapping[str, int], what: str) -> None:
  """Raises ValueError for needs that exceed the memory.

  Args:
    needs: Bytes by the entry of the config that rules them.
    what: What needs them, for the message.

  Raises:
    ValueError: In one line that names the entry that needs the most.
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
  """Raises an error for a data set that does not fit when it is resized.

  Args:
    num_images: Of both splits.
    pixel_bytes: Bytes of a pixel, all channels together.
    size: The new height and width.

  Raises:
    ValueError: Naming `image_size`.
  """
  need = _COPIES * num_images * pixel_bytes * size**2
  refuse_if_too_large(
      {f'image_size={size}': need}, 'the resized images need'
  )


def check(experiment) -> None:
  """Raises ValueError if an experiment needs too much memory; computes nothing.

  Args:
    experiment: The result of `build`.

  Raises:
    ValueError: Naming the entry that needs the most.
  """
  refuse_if_too_large(lower_bound(experiment), 'the run needs')


def lower_bound(experiment) -> dict[str, int]:
  """Bytes that a run needs at least, by the entry of the config behind them.

  Args:
    experiment: The result of `build`; nothing is computed.

  Returns:
    {entry: bytes}.
  """
  config, algorithm = experiment.config, experiment.algorithm
  groups = experiment.federation.groups
  key = jax.random.key(0)
  dataset = experiment.dataset
  images = dataset.train_images.nbytes + dataset.test_images.nbytes
  # One client's training is as large as that of the largest model.
  params = max(_params(group.model, config.local) for group in groups)
  needs = dict(image_size=images, groups=params)
  kind = driver_kind(config.clock.mode, config.client_store)
  if kind.states_on_device or jax.default_backend() == 'cpu':
    needs['groups'] += sum(
        group.num_clients
        * _bytes(
            jax.eval_shape(
                lambda key, group=group: algorithm.init_client(
                    group, jnp.int32(0), key
                ),
                key,
            )
        )
        for group in groups
    )
  needs['algorithm'] = _bytes(jax.eval_shape(algorithm.init, key))
  size = config.local.batch_size
  training = size * max(_training(group.model) for group in groups)
  tests = min(config.eval_batch_size, len(dataset.test_labels))
  testing = tests * max(_testing(group.model) for group in groups)
  # They do not happen at the same time.
  if training > testing:
    needs[f'local.batch_size={size}'] = training
  else:
    needs[f'eval_batch_size={config.eval_batch_size}'] = testing
  return needs


def _bytes(tree) -> int:
  return sum(
      math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
      for leaf in jax.tree.leaves(tree)
  )


def _params(model: BlockModel, local) -> int:
  """Bytes of a model's parameters, their gradients and optimiser state."""
  slots = _SLOTS.get(local.optimizer, 0)
  return (2 + slots) * _bytes(model.abstract_variables.params)


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
