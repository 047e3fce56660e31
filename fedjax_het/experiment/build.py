"""Builds an experiment from a config, with all checks."""

from collections.abc import Callable, Iterator
import contextlib
import functools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.data import partition_file
from fedjax_het.data.federated import (
  FederatedData,
  crop_flip,
  cut_out,
  federate,
)
from fedjax_het.data.partition import partition
from fedjax_het.data.preprocess import make_preprocess
from fedjax_het.data.sources import ENTRIES, Dataset, load_entries
from fedjax_het.data.splits import (
  assign_groups,
  split_like,
  split_public,
  split_validation,
  with_wrong_labels,
)
from fedjax_het.engine import placement
from fedjax_het.engine.clock import Device
from fedjax_het.engine.mapping import client_mesh, resolve_backend
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Group,
)
from fedjax_het.experiment import footprint
from fedjax_het.experiment.checks import check
from fedjax_het.experiment.config import (
  GroupSpec,
  ModelSpec,
  device_spec,
  group_spec,
  model_spec,
  needs_in,
)
from fedjax_het.experiment.local import local_training
from fedjax_het.experiment.tensorboard import check_installed
from fedjax_het.models import BlockModel, constructor, create
from fedjax_het.options import INT32_MAX, keyword_options

_log = logging.getLogger(__name__)
# Batches of fewer examples are warned of where batch norm meets them.
_FEW = 4


class Experiment(NamedTuple):
  """The parts of a run.

  Attributes:
    config: The config, frozen.
    dataset: The data set on the host, resized if the config says so.
    parts: The training examples of each client.
    validation: Held-out examples of all clients together, or None.
    federation: Groups and local training.
    algorithm: The method.
    data: The federated data on the device.
    preprocess: Maps stored test examples to model inputs.
    cohort_size: Clients a round.
    devices: The device of each client; None for synchronous rounds of which
      no virtual time is asked.
    mesh: The devices that share the run; None for the default one, or where
      the backend finds them itself.
    own_tests: Test examples of each client, for `personal_test`; None without
      it.
  """

  config: ml_collections.FrozenConfigDict
  dataset: Dataset
  parts: list[np.ndarray]
  validation: np.ndarray | None
  federation: Federation
  algorithm: FederatedAlgorithm
  data: FederatedData
  preprocess: Callable[..., jax.Array]
  cohort_size: int
  devices: tuple[Device, ...] | None = None
  mesh: jax.sharding.Mesh | None = None
  own_tests: list[np.ndarray] | None = None


def build(config: ml_collections.ConfigDict) -> Experiment:
  """Turns a config into an experiment.

  Args:
    config: See `default_config`.

  Returns:
    The experiment.

  Raises:
    ValueError: If anything in the config, or in how it fits the data, is
      wrong; in one line that names the entry.
    FileNotFoundError: If the data set's files are not there.
  """
  check(config)
  mesh = None
  if resolve_backend(config.backend) == 'shard_map':
    mesh = client_mesh()
  if config.tensorboard:
    check_installed()
  groups = {name: group_spec(config, name) for name in config.groups}
  num_clients = sum(spec.clients for spec in groups.values())
  dataset = load_entries(*(config[entry] for entry in ENTRIES))
  dataset = _spoil(config, dataset)
  if num_clients > len(dataset.train_labels):
    raise ValueError(
        f'groups hold {num_clients} clients, more than the '
        f'{len(dataset.train_labels)} training examples of {config.dataset}.'
    )
  dataset = _resize(dataset, config.image_size)
  parts, public = _assign(config, dataset.train_labels, num_clients)
  own_tests = _own_tests(config, dataset, parts)
  parts, validation = _hold_out(config, parts, dataset.train_labels)
  _check_batch_size(config, parts)
  _warn_of_small_batches(config.local, groups.values(), parts)
  group_of = np.array(
      assign_groups(
          {name: spec.clients for name, spec in groups.items()},
          config.group_seed,
      )
  )
  make = functools.partial(_make_model, config, dataset)
  made = []
  for name, spec in groups.items():
    members = np.flatnonzero(group_of == name).astype(np.int32)
    made.append(Group(
        name,
        make(f'groups.{name}', spec),
        members,
        make(f'groups.{name}.partner', spec.partner),
        {**needs_in(config).group_options, **spec.method},
    ))  # fmt: skip
  federation = Federation(
      tuple(made),
      local_training(config),
      config.local_stats,
      np.array([len(part) for part in parts], np.int32),
      0 if public is None else len(public),
      config.num_rounds,
      make('server_model', model_spec(config, config.server_model)),
  )
  options = config.algorithm.to_dict()
  with _naming('algorithm'):
    algorithm = ALGORITHMS[options.pop('name')](federation, **options)
  preprocess = _preprocess(config, dataset)
  data = federate(
      dataset.train_images,
      dataset.train_labels,
      parts,
      preprocess,
      public,
      num_classes=dataset.num_classes,
  )
  if mesh is not None:
    data = placement.put(data, placement.everywhere(mesh))
  experiment = Experiment(
      ml_collections.FrozenConfigDict(config),
      dataset,
      parts,
      validation,
      federation,
      algorithm,
      data,
      preprocess,
      config.cohort_size or num_clients,
      _devices(config, num_clients),
      mesh,
      own_tests,
  )
  footprint.check(experiment)
  return experiment


def _spoil(config, dataset: Dataset) -> Dataset:
  """Applies `train_size` and `label_noise`."""
  images, labels = dataset.train_images, dataset.train_labels
  if config.train_size is not None and config.train_size != len(labels):
    if config.train_size > len(labels):
      raise ValueError(
          f'train_size={config.train_size} is more than the {len(labels)} '
          f'training examples of {config.dataset}.'
      )
    seed = config.partition.seed
    used, _ = split_public(labels, config.train_size, seed=seed)
    images, labels = images[used], labels[used]
  if config.label_noise:
    labels = with_wrong_labels(
        labels,
        config.label_noise,
        dataset.num_classes,
        seed=config.partition.seed,
    )
  return dataset._replace(train_images=images, train_labels=labels)


def _assign(config, labels, num_clients: int):
  """Training examples of each client, and of the public set or None."""
  by_file = config.partition.name == 'file'
  if by_file and config.train_size is not None:
    raise ValueError(
        f'train_size={config.train_size}: a partition by file names examples '
        'of the whole training set; leave it out.'
    )
  assign = functools.partial(
      partition, num_clients=num_clients, **config.partition.to_dict()
  )
  if config.public_size is None or by_file:
    with _naming('partition'):
      parts = assign(labels)
    if config.public_size is None:
      return parts, None
    with _naming('public_size'):
      return parts, _public_of_rest(config, labels, parts)
  with _naming('public_size'):
    public, private = split_public(
        labels, config.public_size, seed=config.partition.seed
    )
  with _naming('partition'):
    parts = assign(labels[private])
  return [private[part] for part in parts], public


def _public_of_rest(config, labels, parts) -> np.ndarray:
  """A public set of examples that no client has."""
  rest = np.setdiff1d(np.arange(len(labels)), np.concatenate(parts))
  rest, size = rest.astype(np.int32), config.public_size
  if size > len(rest):
    raise ValueError(
        f'{config.partition.file} leaves {len(rest)} examples to nobody, of '
        f'which a public set of {size} cannot be taken.'
    )
  if size == len(rest):
    return rest
  return rest[split_public(labels[rest], size, seed=config.partition.seed)[0]]


def _own_tests(config, dataset: Dataset, parts):
  """The test examples of each client, where the config asks for them."""
  if not config.personal_test:
    return None
  if config.partition.name == 'file':
    with _naming('partition'):
      listed = partition_file.own_tests(
          config.partition.file, len(parts), len(dataset.test_labels)
      )
    if listed is not None:
      return listed
  return split_like(
      dataset.train_labels,
      parts,
      dataset.test_labels,
      seed=config.partition.seed,
  )


def _hold_out(config, parts, labels):
  """Training parts, and all validation parts as one or None."""
  if config.validation is None:
    return parts, None
  with _naming('validation'):
    parts, held_out = split_validation(
        parts, config.validation, seed=config.partition.seed, labels=labels
    )
  held_out = np.concatenate(held_out)
  if not len(held_out):
    raise ValueError(
        f'validation={config.validation} holds out no example: no client has '
        f'as many as {1 / config.validation:.0f}.'
    )
  return parts, held_out


def _devices(config, num_clients: int) -> tuple[Device, ...] | None:
  """The clients' devices; equal ones if the config names none."""
  if config.devices:
    kinds = {name: device_spec(config, name) for name in config.devices}
    kind_of = assign_groups(
        {name: number for name, (_, number) in kinds.items()},
        config.clock.device_seed,
    )
    return tuple(kinds[name][0] for name in kind_of)
  if config.clock.mode == 'synchronous':
    return None
  return (Device(),) * num_clients


def _make_model(
    config, dataset: Dataset, where: str, spec: ModelSpec | GroupSpec | None
) -> BlockModel | None:
  """The model that stands at `where` in a config; None for none."""
  if spec is None:
    return None
  with _naming(where):
    return create(
        spec.model,
        dataset.train_images.shape[1:],
        dataset.num_classes,
        matmul_dtype=config.matmul_dtype,
        conv_backend=config.conv_backend,
        **spec.options,
    )


@contextlib.contextmanager
def _naming(section: str) -> Iterator[None]:
  """Says in which section of the config a ValueError has its cause."""
  try:
    yield
  except ValueError as e:
    raise ValueError(f'{section}: {e}') from e


def _check_batch_size(config, parts) -> None:
  sizes = [len(part) for part in parts]
  smallest = int(np.argmin(sizes))
  if config.local.batch_size > sizes[smallest]:
    raise ValueError(
        f'local.batch_size={config.local.batch_size} is larger than client '
        f'{smallest}, which has {sizes[smallest]} examples; set '
        f'local.batch_size to at most {sizes[smallest]}, or '
        'partition.min_size (where the partition has one) to at least '
        f'{config.local.batch_size}.'
    )
  steps = -(-max(sizes) // config.local.batch_size) * config.local.epochs
  if config.local.steps is None and steps > INT32_MAX:
    raise ValueError(
        f'local.epochs={config.local.epochs} makes {steps} steps of a visit, '
        f'more than the {INT32_MAX} that can be counted.'
    )


def _warn_of_small_batches(local, groups, parts) -> None:
  """Warns, in one line, where batch norm meets batches of a few examples.

  On 1x1 maps a batch of two examples is normalised to plus and minus one,
  whatever it holds, and gradients are tens of times as long as usual.
  """
  none = (str, 'none')  # Of models without the option.
  norms = {
      spec.options.get(
          'norm', keyword_options(constructor(spec.model)).get('norm', none)[1]
      )
      for spec in groups
  }
  if not any(norm.startswith('batch') for norm in norms):
    return
  if local.batch_size < _FEW:
    _log.warning(
        'Batch norm meets batches of local.batch_size=%d: its statistics need '
        '%d examples or more.', local.batch_size, _FEW,
    )  # fmt: skip
    return
  if local.drop_last:
    return
  rests = [len(part) % local.batch_size for part in parts]
  # With a fixed number of steps a visit may end before a partial batch.
  meets = sum(
      0 < rest < _FEW
      and (local.steps is None or local.steps > len(part) // local.batch_size)
      for rest, part in zip(rests, parts, strict=True)
  )
  if meets:
    _log.warning(
        'Batch norm meets batches below %d examples: those with which %d of %d '
        'clients end an epoch; local.drop_last=True leaves them out.',
        _FEW, meets, len(parts),
    )  # fmt: skip


def _resize(dataset: Dataset, size: int | None) -> Dataset:
  """Resizes all images bilinearly to `size` x `size`; pixels are rounded."""
  shape, dtype = dataset.train_images.shape[1:], dataset.train_images.dtype
  if size is None or shape[:2] == (size, size):
    return dataset
  if len(shape) != 3 or dtype not in (np.uint8, np.float32):
    raise ValueError(
        f'image_size={size} is for images [height, width, channels] of pixels '
        f'or floats, but the examples of {dataset.name} are {shape} {dtype}.'
    )
  num, channels = len(dataset.train_labels), shape[2]
  numbers = channels * dtype.itemsize
  footprint.check_images(num + len(dataset.test_labels), numbers, size)
  # Images of one batch are floats; large ones are resized one by one.
  step = 1000 if size <= 256 else max(1, 1000 * 256**2 // size**2)

  @jax.jit
  def resize(images):
    shape = (len(images), size, size, images.shape[3])
    resized = jax.image.resize(images.astype(jnp.float32), shape, 'linear')
    if images.dtype == jnp.uint8:
      resized = jnp.round(resized)
    return resized.astype(images.dtype)

  def all_of(images):
    batches = [images[i : i + step] for i in range(0, len(images), step)]
    return np.concatenate([np.asarray(resize(batch)) for batch in batches])

  return dataset._replace(
      train_images=all_of(dataset.train_images),
      test_images=all_of(dataset.test_images),
  )


def _preprocess(config, dataset: Dataset) -> Callable[..., jax.Array]:
  """Maps stored examples to model inputs, as the config asks for it."""
  features = dataset.train_images
  plain = not len(dataset.mean)  # Integers or bools.
  if config.local.augment != 'none' and (plain or features.ndim != 4):
    raise ValueError(
        f'local.augment={config.local.augment!r} is for images [height, width, '
        f'channels], but the examples of {config.dataset} are '
        f'{features.shape[1:]} {features.dtype}.'
    )
  mean, std = dataset.mean, dataset.std
  if config.normalise == 'half':
    mean = std = (0.5,) * len(mean)
  augmentation = _augmentation(config.local)
  return make_preprocess(features, mean, std, *augmentation)


_cut_out = functools.partial(cut_out, side=16)


def _crop_flip_cutout(key, images):
  return _cut_out(key, crop_flip(key, images))


def _augmentation(local):
  """Augmentations of images before and after they are normalised."""
  if local.augment != 'crop_flip_cutout':
    return {'none': None, 'crop_flip': crop_flip}[local.augment], None
  if local.cutout == 'before':
    return _crop_flip_cutout, None
  return crop_flip, _cut_out
