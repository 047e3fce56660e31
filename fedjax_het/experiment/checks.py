"""Refuses a config that cannot be run."""

import re

import ml_collections

from fedjax_het.algorithms import ALGORITHMS, KEEP_OPTIMIZER
from fedjax_het.data.partition import PARTITIONS
from fedjax_het.engine.asynchronous import check_backend
from fedjax_het.engine.mapping import TRACEABLE, resolve_backend
from fedjax_het.experiment.config import device_spec, group_spec
from fedjax_het.experiment.fields import (
  CLOCK,
  FIELDS,
  LOCAL,
  SECTIONS,
  SEED,
  Field,
  check_field,
)
from fedjax_het.models import MODELS, onednn
from fedjax_het.names import check_name, did_you_mean, shown
from fedjax_het.options import INT32_MAX, check_options, keyword_options

# Names that would be mistaken for another key of a metrics line.
_RESERVED = ('worst', 'mean')


def check(config: ml_collections.ConfigDict) -> None:
  """Refuses a config that cannot be run, before any data is read.

  Args:
    config: The config.

  Raises:
    ValueError: In one line that names the entry, its value and what is right.
  """
  _check_keys(config, (*FIELDS, *SECTIONS), '')
  for name, field in FIELDS.items():
    check_field(name, config[name], field)
  for name in SECTIONS:
    if not hasattr(config[name], 'items'):
      raise ValueError(f'{name} must be a section, got {shown(config[name])}.')
  _check_keys(config.local, LOCAL, 'local.')
  for name, field in LOCAL.items():
    check_field(f'local.{name}', config.local[name], field)
  _check_local(config.local)
  _check_section(config.algorithm, 'algorithm', ALGORITHMS)
  name = config.algorithm.name
  if config.local.keep_optimizer and name not in KEEP_OPTIMIZER:
    raise ValueError(
        f'local.keep_optimizer=True: {name} begins the '
        'optimiser anew in each visit; the methods that can keep it are '
        f'{", ".join(KEEP_OPTIMIZER)}.'
    )
  _check_section(config.partition, 'partition', PARTITIONS)
  check_field('partition.seed', config.partition.get('seed'), SEED)
  _check_groups(config)
  if config.conv_backend == 'onednn':
    onednn.check()
  if config.label_noise >= 1:
    raise ValueError(
        f'label_noise must be a share below 1, got {config.label_noise}.'
    )
  if config.target_accuracy is not None and config.target_accuracy > 1:
    raise ValueError(
        'target_accuracy must be a share of at most 1, got '
        f'{config.target_accuracy}; for percent divide by 100.'
    )
  total = sum(group_spec(config, name)[1] for name in config.groups)
  if config.cohort_size is not None and config.cohort_size > total:
    raise ValueError(
        f'cohort_size={config.cohort_size} is larger than the population of '
        f'{total} clients; it must be between 1 and {total}.'
    )
  _check_clock(config, total)
  _check_dispatch(config)


def _check_keys(section, known, prefix: str) -> None:
  for name in section:
    if name not in known:
      raise ValueError(
          f'Unknown config key {prefix}{name}{did_you_mean(name, known)}; '
          f'known are {", ".join(known)}.'
      )
  for name in known:
    if name not in section:
      raise ValueError(
          f'The config lacks {prefix}{name}; begin with default_config().'
      )


def _check_local(local) -> None:
  """What entries of `local` demand of each other."""
  for item in local.lr_rounds:
    check_field('local.lr_rounds', item, Field(1, int, low=1))
  if bool(local.lr_rounds) != (local.schedule == 'step'):
    raise ValueError(
        f'local.lr_rounds={tuple(local.lr_rounds)} does not fit '
        f'local.schedule={local.schedule!r}; step needs rounds, the others '
        'none.'
    )
  if local.optimizer != 'sgd' and (local.momentum or local.nesterov):
    raise ValueError(
        'local.momentum and local.nesterov are for the optimizer sgd, got '
        f'{local.optimizer!r}.'
    )
  if local.momentum >= 1:
    raise ValueError(f'local.momentum must be below 1, got {local.momentum}.')
  if local.nesterov and not local.momentum:
    raise ValueError('local.nesterov needs local.momentum above 0.')


def _check_clock(config, num_clients: int) -> None:
  """The entries of `clock` and `devices`, and whether they can run."""
  _check_keys(config.clock, CLOCK, 'clock.')
  for name, field in CLOCK.items():
    check_field(f'clock.{name}', config.clock[name], field)
  fleet = {name: device_spec(config, name) for name in config.devices}
  number = sum(clients for _, clients in fleet.values())
  if fleet and number != num_clients:
    raise ValueError(
        f'devices are for {number} clients, but groups hold {num_clients}.'
    )
  if fleet and all(device.drop_out == 1 for device, _ in fleet.values()):
    raise ValueError(
        'devices: drop_out is 1 for every client, so no upload would arrive.'
    )
  if config.clock.mode != 'synchronous':
    check_backend(config.backend)
    uploads = config.num_rounds * (config.cohort_size or num_clients)
    if uploads > INT32_MAX:
      raise ValueError(
          f'num_rounds={config.num_rounds} makes {uploads} uploads, more than '
          f'the {INT32_MAX} that clock.mode={config.clock.mode!r} can count.'
      )
    if config.client_store == 'host':
      raise ValueError(
          "client_store='host' is for synchronous rounds: what is in flight "
          f'between clients and server under clock.mode={config.clock.mode!r} '
          'lies on the device.'
      )


def _check_dispatch(config) -> None:
  """Whether several rounds fit into one program."""
  if config.rounds_per_dispatch == 1:
    return
  if config.client_store == 'host':
    raise ValueError(
        f'rounds_per_dispatch={config.rounds_per_dispatch} does not fit '
        "client_store='host', which brings clients from the host every round."
    )
  if resolve_backend(config.backend) not in TRACEABLE:
    raise ValueError(
        f'rounds_per_dispatch={config.rounds_per_dispatch} does not fit '
        f'backend={config.backend!r}, which runs from Python; use auto or one '
        f'of {", ".join(TRACEABLE)}.'
    )


def _check_section(section, where: str, table) -> None:
  """A section of a name out of `table` and the options of that entry."""
  name = section.get('name')
  check_name(where, name, table)
  known = keyword_options(table[name])
  given = {k: v for k, v in section.items() if k != 'name'}
  if 'seed' in known:  # It has a range of its own.
    given.pop('seed', None)
  check_options(where, given, known, f'{where} {name!r}')


def _check_groups(config) -> None:
  """Names, models, client counts and model options."""
  if not config.groups:
    raise ValueError('groups is empty; name at least one model.')
  used = set()
  for name in config.groups:
    if not re.fullmatch(r'[\w.-]+', name) or name in _RESERVED:
      raise ValueError(
          f'A group cannot be called {name!r}; use letters, digits and _.-, '
          f'and not {" or ".join(_RESERVED)}.'
      )
    model, clients, given = group_spec(config, name)
    check_name(f'model of groups.{name}', model, MODELS)
    check_field(f'groups.{name}', clients, Field(1, int, low=1))
    known = keyword_options(MODELS[model])
    check_options(f'groups.{name}', given, known, f'model {model!r}')
    used |= set(known)
  for name in config.model:
    if name not in used:
      raise ValueError(
          f'model.{name}: none of the models has an option {name!r}'
          f'{did_you_mean(name, used)}; they take '
          f'{", ".join(sorted(used))}.'
      )
