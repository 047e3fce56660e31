"""Builds an experiment from a config, with all checks."""

from collections.abc import Callable
import functools
import logging
from typing import NamedTuple

import jax
import ml_collections
import numpy as np

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.data.federated import FederatedData, federate
from fedjax_het.data.sources import ENTRIES, Dataset, load_entries
from fedjax_het.data.splits import assign_devices, assign_groups
from fedjax_het.engine import placement
from fedjax_het.engine.client_flops import client_flops
from fedjax_het.engine.clock import Device
from fedjax_het.engine.driver_kinds import driver_kind
from fedjax_het.engine.mapping import client_mesh, resolve_backend
from fedjax_het.engine.needs import with_heads
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Group,
)
from fedjax_het.experiment import examples, footprint
from fedjax_het.experiment import form as form_lib
from fedjax_het.experiment.checks import check
from fedjax_het.experiment.config import (
  GroupSpec,
  ModelSpec,
  cohort_size,
  device_spec,
  group_spec,
  model_spec,
  needs_in,
)
from fedjax_het.experiment.local import local_training
from fedjax_het.kernels import libraries
from fedjax_het.models import BlockModel, constructor, create
from fedjax_het.options import INT32_MAX, keyword_options

_log = logging.getLogger(__name__)
# Warn if batch norm is applied to batches of fewer examples.
_FEW = 4
# Most classes that a warning lists.
_SHOWN = 10


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
    cohort_size: Clients per round.
    devices: The device of each client; None for synchronous rounds without
      virtual times.
    mesh: The mesh of devices for `shard_map`; None for other backends.
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


def build(
    config: ml_collections.ConfigDict,
    choose: Callable[[ml_collections.ConfigDict, Federation],
                     ml_collections.ConfigDict] | None = None,
    *,
    check_memory: bool = True,
) -> Experiment:
  """Turns a config into an experiment.

  Args:
    config: See `default_config`.
    choose: `(config, federation) -> config` with other values of `backend` and
      `conv_backend`, chosen for the federation; None leaves them.
    check_memory: Whether to raise an error if the experiment is too large for
      this machine; False if it is only inspected.

  Returns:
    The experiment.

  Raises:
    ValueError: If the config is wrong or does not fit the data; in one line
      that names the entry.
    FileNotFoundError: If the data set's files are missing.
  """
  check(config)
  resolve_backend(config.backend)  # Raises before data are read.
  groups = {name: group_spec(config, name) for name in config.groups}
  num_clients = sum(spec.clients for spec in groups.values())
  dataset = load_entries(*(config[entry] for entry in ENTRIES))
  dataset = examples.subset(config, dataset)
  if num_clients > len(dataset.train_labels):
    raise ValueError(
        f'groups hold {num_clients} clients, more than the '
        f'{len(dataset.train_labels)} training examples of {config.dataset}.'
    )
  _warn_of_empty_classes(dataset)
  dataset = examples.resize(dataset, config.image_size)
  parts, public = examples.assign(config, dataset.train_labels, num_clients)
  own_tests = examples.own_tests(config, dataset, parts)
  parts, validation = examples.hold_out(config, parts, dataset.train_labels)
  dataset = examples.with_noise(config, dataset)
  dataset = examples.augmented_once(config, dataset, parts)
  _check_sizes(config, parts)
  _warn_of_small_batches(config.local, groups.values(), parts)
  group_of = np.array(
      assign_groups(
          {name: spec.clients for name, spec in groups.items()},
          config.group_seed,
      )
  )
  federation = _federation(
      config, dataset, group_of, [len(part) for part in parts],
      0 if public is None else len(public),
  )  # fmt: skip
  _warn_of_integers(dataset, federation)
  if choose is not None:
    config = choose(config, federation)
    library = libraries.concrete(config.conv_backend)
    federation = form_lib.with_conv_backend(federation, library)
  mesh = None
  if resolve_backend(config.backend) == 'shard_map':
    mesh = client_mesh()
  federation, algorithm = _algorithm(config, federation)
  preprocess = examples.preprocess(config, dataset)
  data = federate(
      dataset.train_images,
      dataset.train_labels,
      parts,
      preprocess,
      public,
      num_classes=dataset.num_classes,
      public_labels=needs_in(config).public != 'unlabelled',
  )
  if mesh is not None:
    if check_memory:
      footprint.check_copies(data, len(mesh.local_devices))
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
      cohort_size(config),
      _devices(config, federation, algorithm, data),
      mesh,
      own_tests,
  )
  if check_memory:
    footprint.check(experiment)
  return experiment


def check_method(config: ml_collections.ConfigDict, dataset: Dataset) -> None:
  """Constructs the models and the method of a config, and nothing else.

  Args:
    config: A config that `check` accepts.
    dataset: Its data set, as it is stored.

  Raises:
    ValueError: If the method or a model refuses an option.
  """
  few = dataset._replace(
      train_images=dataset.train_images[:1], test_images=dataset.test_images[:1]
  )
  group_of = np.concatenate([
      np.repeat(name, group_spec(config, name).clients)
      for name in config.groups
  ])
  # The sizes do not matter to options.
  size = max(len(dataset.train_labels) // len(group_of), 1)
  _algorithm(config, _federation(
      config, examples.resize(few, config.image_size), group_of,
      [size] * len(group_of), config.public_size or 0,
  ))  # fmt: skip


def _federation(
    config, dataset: Dataset, group_of, sizes, num_public: int
) -> Federation:
  """Groups of the clients, by the name of each one's group, and local steps."""
  make, made = functools.partial(_make_model, config, dataset), []
  for name in config.groups:
    spec = group_spec(config, name)
    made.append(Group(
        name,
        make(f'groups.{name}', spec),
        np.flatnonzero(group_of == name).astype(np.int32),
        make(f'groups.{name}.partner', spec.partner),
        {**needs_in(config).group_options, **spec.method},
    ))  # fmt: skip
  return Federation(
      tuple(made),
      local_training(config),
      config.local_stats,
      np.array(sizes, np.int32),
      num_public,
      config.num_rounds,
      make('server_model', model_spec(config, config.server_model)),
  )


def _algorithm(
    config, federation: Federation
) -> tuple[Federation, FederatedAlgorithm]:
  """The federation with the heads that the method needs, and the method."""
  options = config.algorithm.to_dict()
  make = ALGORITHMS[options.pop('name')]
  with examples.naming('algorithm'):
    federation = with_heads(make, federation)
    algorithm = make(federation, **options)
    if not isinstance(algorithm, FederatedAlgorithm):
      raise ValueError(
          f'{config.algorithm.name} must return a FederatedAlgorithm, got '
          f'{algorithm!r:.80}.'
      )
    return federation, algorithm


def _devices(
    config,
    federation: Federation,
    algorithm: FederatedAlgorithm,
    data: FederatedData,
) -> tuple[Device, ...] | None:
  """The clients' devices, by default equal; None if no clock needs them."""
  if config.devices:
    kinds = {name: device_spec(config, name) for name in config.devices}
    kind_of = assign_devices(
        {name: number for name, (_, number) in kinds.items()},
        config.clock.device_seed,
    )
    clients = range(federation.num_clients)
    if config.clock.device_by_work:
      clients = _by_work(federation, algorithm, data)
    device_of = dict(zip(clients, kind_of, strict=True))
    return tuple(kinds[device_of[k]][0] for k in range(len(device_of)))
  if driver_kind(config.clock.mode).needs_devices:
    return (Device(),) * federation.num_clients
  return None


def _by_work(
    federation: Federation, algorithm: FederatedAlgorithm, data: FederatedData
) -> list[int]:
  """The clients of the group with the most operations of a visit first."""
  work = client_flops(algorithm, federation, data)
  if work is None:
    raise ValueError(
        'clock.device_by_work: the operations of a visit are not known in '
        'advance; set it to False.'
    )
  groups = sorted(federation.groups, key=lambda group: -work[group.name])
  return [int(k) for group in groups for k in group.client_ids]


def _make_model(
    config, dataset: Dataset, where: str, spec: ModelSpec | GroupSpec | None
) -> BlockModel | None:
  """The model at `where` in a config; None without a spec."""
  if spec is None:
    return None
  with examples.naming(where):
    model = create(
        spec.model,
        dataset.train_images.shape[1:],
        dataset.num_classes,
        matmul_dtype=config.matmul_dtype,
        conv_backend=libraries.concrete(config.conv_backend),
        **spec.options,
    )
    examples.check_tokens(model.vocabulary, dataset)
    return model


def _warn_of_empty_classes(dataset: Dataset) -> None:
  """Logs a warning if a class has no training example."""
  classes = range(dataset.num_classes)
  empty = sorted({*classes} - {*dataset.train_labels.tolist()})
  if not empty:
    return
  tested = int(np.isin(dataset.test_labels, empty).sum())
  shown = ', '.join(map(str, empty[:_SHOWN])) + ', ...' * (
      len(empty) > _SHOWN
  )
  _log.warning(
      '%d of %d classes have no training example (%s), and %d of %d test '
      'examples are of them; labels count from 0.',
      len(empty), dataset.num_classes, shown, tested,
      len(dataset.test_labels),
  )  # fmt: skip


def _check_sizes(config, parts) -> None:
  """Checks the clients' numbers of training examples against the batch."""
  sizes, batch = [len(part) for part in parts], config.local.batch_size
  largest = max(sizes)
  if batch > largest:
    raise ValueError(
        f'local.batch_size={batch} is larger than every client; the largest '
        f'has {largest} examples, so set it to {largest} or less.'
    )
  fewer = sum(size < batch for size in sizes)
  if fewer:
    _log.warning(
        '%d of %d clients have fewer examples than local.batch_size=%d, the '
        'smallest %d; a local step of theirs is on all they have.',
        fewer, len(sizes), batch, min(sizes),
    )  # fmt: skip
  steps = -(-largest // batch) * config.local.epochs
  if config.local.steps is None and steps > INT32_MAX:
    raise ValueError(
        f'local.epochs={config.local.epochs} makes {steps} steps of a visit, '
        f'more than the {INT32_MAX} that can be counted.'
    )


def _warn_of_integers(dataset: Dataset, federation: Federation) -> None:
  """Logs a warning if integers, which stay as they are, are no token ids."""
  dtype = dataset.train_images.dtype
  if dtype == np.uint8 or not np.issubdtype(dtype, np.integer):
    return
  if all(g.model.vocabulary is None for g in federation.groups):
    _log.warning(
        'The examples of %s are %s and are not normalised; save pixels as '
        'uint8 and measurements as floats.', dataset.name, dtype,
    )  # fmt: skip


def _warn_of_small_batches(local, groups, parts) -> None:
  """Logs a warning if batch norm is applied to batches of few examples.

  On 1x1 maps, a batch of two examples is always normalised to plus and minus
  one, and gradients are tens of times larger than usual.
  """
  none = (str, 'none')  # For models without the option.
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
  batch, sizes = local.batch_size, [len(part) for part in parts]
  # A client smaller than a batch takes a partial one even with `drop_last`.
  rests = [
      size % batch if not local.drop_last or size < batch else 0
      for size in sizes
  ]
  # With a fixed number of steps a visit may end before a partial batch.
  meets = [
      size
      for rest, size in zip(rests, sizes, strict=True)
      if 0 < rest < _FEW
      and (local.steps is None or local.steps > size // batch)
  ]
  if meets:
    _log.warning(
        'Batch norm needs batches of %d examples or more, but the last batch '
        'of %d of %d clients is smaller; %s.',
        _FEW, len(meets), len(parts),
        'local.drop_last leaves it out' if max(meets) >= batch else
        f'give each client at least {_FEW} examples',
    )  # fmt: skip
