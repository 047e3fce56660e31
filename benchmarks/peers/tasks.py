"""The work on which published programs report, with its exact shapes.

  a        pfl-research's CIFAR-10 benchmark of simulators: 50 of 1,000 clients
  b        PFLlib: FedAvg, its CNN, ten of 100 clients
  c-local  HtFLlib: local training of its CNN and of ResNet-18, 20 clients
  c-fd     the same with federated distillation
  d        InCo, of FedIN's authors: ResNet10 to 26, two clients each
  e        NIID-Bench: simple-CNN, ten clients by Dirichlet 0.5, ten epochs

References:
  Granqvist et al., `pfl-research <https://arxiv.org/abs/2404.06430>`_, 2024.
  Zhang et al., `PFLlib <https://arxiv.org/abs/2312.04992>`_, 2025.
  Zhang et al., `HtFLlib <https://arxiv.org/abs/2506.03954>`_, 2025.
  Chan et al., `InCo <https://openreview.net/forum?id=Cc0qk6r4Nd>`_, 2024.
  Li et al., `NIID-Bench <https://arxiv.org/abs/2102.02079>`_, 2022.
"""

import json
import math
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import common
from benchmarks.peers.nets import FEDAVG_CNN, layers_of
from fedjax_het.data.partition import partition
from fedjax_het.data.preprocess import statistics
from fedjax_het.data.sources import load
from fedjax_het.models import create

SHAPE, NUM_CLASSES = (32, 32, 3), 10
# Test examples; no program evaluates in a timed round.
_NUM_TEST = 64


class Work(NamedTuple):
  """A setting of a published program.

  Attributes:
    models: Architectures, each with the same number of clients.
    clients: Number of all clients.
    images: Images per client, an average with `alpha`.
    cohort: Clients per round.
    local: Entries of a config's `local`.
    algorithm: Key of the library's `ALGORITHMS`.
    alpha: Parameter of the Dirichlet partition; None for equal sizes.
    width: Multiplies the models' channels.
  """

  models: tuple[str, ...]
  clients: int
  images: int
  cohort: int
  local: dict[str, Any]
  algorithm: str = 'fedavg'
  alpha: float | None = None
  width: float = 1.0

  @property
  def images_per_round(self) -> int:
    """Images of a round, each once per epoch."""
    return self.cohort * self.images * self.local['epochs']


def _local(batch_size: int, learning_rate: float, **more) -> dict[str, Any]:
  """Entries of a config's `local`; one epoch of plain SGD unless given."""
  local = dict(batch_size=batch_size, learning_rate=learning_rate)
  plain = dict(
      optimizer='sgd', epochs=1, momentum=0.0, weight_decay=0.0, augment='none'
  )
  return local | plain | more


_RESNETS = tuple(f'resnet{depth}' for depth in (10, 14, 18, 22, 26))
_HTFL = Work((FEDAVG_CNN, 'resnet18'), 20, 100, 20, _local(10, 0.01))
WORKS = {
    'a': Work(('dropout_cnn',), 1000, 50, 50, _local(10, 0.1)),
    'b': Work((FEDAVG_CNN,), 100, 450, 10, _local(10, 0.005)),
    'c-local': _HTFL._replace(algorithm='private'),
    'c-fd': _HTFL._replace(algorithm='fd'),
    'd': Work(
        _RESNETS,
        10,
        256,
        10,
        _local(64, 1e-3, optimizer='adam', augment='crop_flip_cutout'),
        'incoavg',
    ),
    'e': Work(
        ('simple_cnn',),
        10,
        5000,
        10,
        _local(
            64,
            0.01,
            epochs=10,
            momentum=0.9,
            weight_decay=1e-5,
            augment='crop_flip',
        ),
        alpha=0.5,
    ),
}
# Smaller values for a quick run.
_QUICK = {
    'a': dict(clients=8, images=20, cohort=4, width=1 / 8),
    'b': dict(clients=4, images=20, cohort=2, width=1 / 8),
    'c-local': dict(clients=4, images=10, cohort=4, width=1 / 16),
    'c-fd': dict(clients=4, images=10, cohort=4, width=1 / 16),
    'd': dict(models=_RESNETS[:2], clients=4, images=8, cohort=4,
              width=1 / 16),
    'e': dict(clients=4, images=40, cohort=4, width=1 / 2),
}  # fmt: skip


def work(
    name: str, quick: bool = False, most_epochs: int | None = None
) -> Work:
  """One of `WORKS`, optionally with small sizes or fewer local epochs."""
  found = WORKS[name]
  if quick:
    found = found._replace(**_QUICK[name])
    batch_size = min(found.local['batch_size'], 8)
    found = found._replace(local=found.local | dict(batch_size=batch_size))
    most_epochs = 2
  if most_epochs is not None:
    epochs = min(found.local['epochs'], most_epochs)
    found = found._replace(local=found.local | dict(epochs=epochs))
  return found


def num_parameters(found: Work) -> int:
  """Number of parameters of all architectures together, from shapes only."""
  return sum(
      math.prod(leaf.shape)
      for name in found.models
      for leaf in jax.tree.leaves(
          create(
              name, SHAPE, NUM_CLASSES, width=found.width
          ).abstract_variables.params
      )
  )


def _images(num: int, data_dir: str | None):
  """Random images and labels, or those of CIFAR-10."""
  if data_dir is None:
    return common.random_images(num, SHAPE)
  data = load('cifar10', data_dir)
  return data.train_images[:num], data.train_labels[:num]


def _parts(found: Work, labels: np.ndarray) -> list[np.ndarray]:
  if found.alpha is None:
    order = np.random.default_rng(0).permutation(len(labels))
    return np.split(order, found.clients)
  # NIID-Bench repeats the draw until each client has ten examples.
  return partition(
      labels, found.clients, seed=0, alpha=found.alpha, min_size=10
  )


def write_data(
    found: Work, folder: pathlib.Path, data_dir: str | None
) -> dict[str, Any]:
  """Writes the images and the partition that all programs read.

  Args:
    found: The work.
    folder: An empty folder.
    data_dir: Folder of CIFAR-10; None for random images.

  Returns:
    The entries of a task, see `write_task`.
  """
  images, labels = _images(found.clients * found.images, data_dir)
  mean, std = statistics(images)
  test = slice(None, _NUM_TEST)
  data, parts = folder / 'data.npz', folder / 'parts.json'
  # The test set has all classes, since its labels set their number.
  np.savez(
      data,
      x_train=images,
      y_train=labels,
      x_test=images[test],
      y_test=np.resize(np.arange(NUM_CLASSES), len(labels[test])),
  )
  listed = [part.tolist() for part in _parts(found, labels)]
  parts.write_text(json.dumps(listed))
  return dict(
      found._asdict(),
      data=str(data),
      parts=str(parts),
      input_shape=SHAPE,
      layers=[layers_of(n, NUM_CLASSES, found.width) for n in found.models],
      mean=mean,
      std=std,
  )


def write_task(
    entries: dict[str, Any], folder: pathlib.Path, **more
) -> pathlib.Path:
  """Writes a program's task, which `meter.read` reads.

  The entries `path` and `out` (the file of the result) are added.

  Args:
    entries: From `write_data`.
    folder: Folder of the file.
    **more: `seconds`, `max_rounds` and the program's own entries.

  Returns:
    The file.
  """
  path = folder / 'task.json'
  task = dict(entries, **more, path=str(path), out=str(folder / 'result.json'))
  path.write_text(json.dumps(task))
  return path
