"""Checks of a config before a run."""

from collections.abc import Mapping
import inspect
import re
from typing import Any

import ml_collections

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.data import own_files, sources
from fedjax_het.data.partition import PARTITIONS
from fedjax_het.engine.asynchronous import check_backend
from fedjax_het.engine.mapping import TRACEABLE
from fedjax_het.engine.needs import check_one_model, needs_of
from fedjax_het.engine.tiers import check_tiers
from fedjax_het.experiment import optimizers
from fedjax_het.experiment.config import (
  GroupSpec,
  ModelSpec,
  cohort_size,
  device_spec,
  group_spec,
  model_spec,
  needs_in,
)
from fedjax_het.experiment.fields import (
  CALLBACKS,
  CLOCK,
  FIELDS,
  LOCAL,
  SECTIONS,
  SEED,
  Field,
  check_field,
)
from fedjax_het.kernels import libraries
from fedjax_het.models import (
  MODELS,
  by_path,
  constructor,
  model_options,
)
from fedjax_het.names import check_name, nearest, shown, suggest
from fedjax_het.options import (
    INT32_MAX,
    check_options,
    keyword_options,
)
from fedjax_het.renamed import check_renamed

# Group names that would clash with other keys of a metrics line.
_RESERVED = ('worst', 'mean', 'clients')


def check_is_config(config) -> None:
  """Raises ValueError if `config` is not a ConfigDict."""
  if not isinstance(config, ml_collections.ConfigDict):
    raise ValueError(
        "The config must be a ConfigDict, such as default_config('fedavg') "
        f'returns, got {shown(config)}.'
    )


def check(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError if a config cannot be run; reads no data.

  Args:
    config: The config.

  Raises:
    ValueError: In one line that names the entry, its value and what is allowed.
  """
  check_is_config(config)
  _check_keys(config, (*FIELDS, *SECTIONS), '')
  for name, field in FIELDS.items():
    check_field(name, config[name], field)
  for name in SECTIONS:
    if not hasattr(config[name], 'items'):
      raise ValueError(f'{name} must be a section, got {shown(config[name])}.')
  sources.check_name(config.dataset, 'dataset')
  if config.data_file is not None and config.dataset != own_files.NPZ:
    raise ValueError(
        f'data_file is for dataset={own_files.NPZ!r}, got dataset='
        f'{config.dataset!r}.'
    )
  _check_keys(config.local, LOCAL, 'local.')
  for name, field in LOCAL.items():
    check_field(f'local.{name}', config.local[name], field)
  _check_local(config.local)
  _check_section(config.algorithm, 'algorithm', ALGORITHMS)
  _check_section(config.partition, 'partition', PARTITIONS)
  check_field('partition.seed', config.partition.get('seed'), SEED)
  _check_groups(config)
  _check_needs(config)
  libraries.check(config.conv_backend)
  total = sum(group_spec(config, name).clients for name in config.groups)
  if config.cohort_size is not None:
    if config.cohort_size > total:
      raise ValueError(
          f'cohort_size={config.cohort_size} is more than the {total} clients '
          f'of all groups; set it to {total} or less.'
      )
  _check_clock(config, total)
  _check_callbacks(config.callbacks)
  _check_dispatch(config)


def _check_keys(section, known, prefix: str) -> None:
  check_renamed(section, known, prefix)
  for name in section:
    if name not in known:
      raise ValueError(
          f'Unknown config key {prefix}{name}{suggest(name, known)}'
      )
  for name in known:
    if name not in section:
      raise ValueError(
          f'The config lacks {prefix}{name}; begin with default_config().'
      )


def _check_local(local) -> None:
  """Checks entries of `local` against each other."""
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
  if local.nesterov and not local.momentum:
    raise ValueError('local.nesterov needs local.momentum above 0.')
  optimizers.check(local)


def _check_clock(config, num_clients: int) -> None:
  """Checks the entries of `clock` and `devices`."""
  _check_keys(config.clock, CLOCK, 'clock.')
  for name, field in CLOCK.items():
    check_field(f'clock.{name}', config.clock[name], field)
  if config.clock.device_by_work and config.clock.device_seed is not None:
    raise ValueError(
        'clock.device_by_work orders the clients by their work, and '
        'clock.device_seed at random; set one of them.'
    )
  for name, unset in dict(device_by_work=False, device_seed=None).items():
    if not config.devices and config.clock[name] is not unset:
      raise ValueError(
          f'clock.{name}={config.clock[name]} says which client has which '
          'device, but the config has no devices.'
      )
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
    if config.clock.mode == 'tiers':
      sizes = [group_spec(config, name).clients for name in config.groups]
      check_tiers(sizes, cohort_size(config))
    uploads = config.num_rounds * cohort_size(config)
    if uploads > INT32_MAX:
      raise ValueError(
          f'num_rounds={config.num_rounds} makes {uploads} uploads, more than '
          f'the {INT32_MAX} that clock.mode={config.clock.mode!r} can count.'
      )
    if config.client_store == 'host':
      raise ValueError(
          "client_store='host' is for synchronous rounds: what is in flight "
          f'between clients and server under clock.mode={config.clock.mode!r} '
          'is on the device.'
      )


def _check_callbacks(section) -> None:
  """Checks the entries of `callbacks`."""
  _check_keys(section, CALLBACKS, 'callbacks.')
  for name, field in CALLBACKS.items():
    check_field(f'callbacks.{name}', section[name], field)
  rounds = section.profile
  for number in rounds:
    check_field('callbacks.profile', number, Field(1, int, low=1))
  if len(rounds) not in (0, 2) or list(rounds) != sorted(rounds):
    raise ValueError(
        'callbacks.profile must be a first and a last round, such as (2, 4), '
        f'got {shown(rounds)}.'
    )


def _check_dispatch(config) -> None:
  """Checks whether one program can run several rounds."""
  if config.rounds_per_dispatch == 1:
    return
  if config.client_store == 'host':
    raise ValueError(
        f'rounds_per_dispatch={config.rounds_per_dispatch} does not fit '
        "client_store='host', which brings clients from the host every round."
    )
  # Resolving 'auto' would start the devices, whose number may still be set.
  if config.backend not in ('auto', *TRACEABLE):
    raise ValueError(
        f'rounds_per_dispatch={config.rounds_per_dispatch} does not fit '
        f'backend={config.backend!r}, which runs from Python; use auto or one '
        f'of {", ".join(TRACEABLE)}.'
    )


def _check_section(section, where: str, table) -> None:
  """Checks a section: `name`, a key of `table`, and that entry's options."""
  name = section.get('name')
  check_name(where, name, table)
  known = keyword_options(table[name])
  given = {k: v for k, v in section.items() if k != 'name'}
  check_renamed(given, known, f'{where}.', name)
  if 'seed' in known:  # `check` checks its range.
    given.pop('seed', None)
  for option in _missing(given, known):
    if option != 'seed':
      raise ValueError(
          f'{where}.{option} is missing; {where} {name!r} needs it, such as '
          f'--config.{where}.{option}=VALUE.'
      )
  check_options(where, given, known, f'{where} {name!r}')


def _missing(given: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
  """Names of the `known` options that have no default and are not given."""
  return [
      option
      for option, (_, default) in known.items()
      if default is inspect.Parameter.empty and given.get(option) in (None, '')
  ]


def _check_groups(config) -> None:
  """Checks the groups: names, models, client counts and all options."""
  if not config.groups:
    raise ValueError('groups is empty; name at least one model.')
  used = set()
  for name in config.groups:
    if not re.fullmatch(r'[\w.-]+', name) or name in _RESERVED:
      raise ValueError(
          f'A group cannot be called {name!r}; use letters, digits and _.-, '
          f'and none of {", ".join(_RESERVED)}.'
      )
    spec, where = group_spec(config, name), f'groups.{name}'
    method = needs_in(config).known_group_options()
    used |= _check_model(where, spec, config.algorithm.name, method)
    section = hasattr(config.groups[name], 'items')
    number = f'{where}.clients' if section else where
    check_field(number, spec.clients, Field(1, int, low=1))
    check_options(where, spec.method, method, '')
    if spec.partner is not None:
      used |= _check_model(f'{where}.partner', spec.partner)
  server = model_spec(config, config.server_model)
  if server is not None:
    used |= _check_model('server_model', server)
  for name in config.model:
    if name not in used:
      text = suggest(name, sorted(used), 'they take')
      if nearest(name, used) is None:
        text += ' To leave all of them out: config.model = {}.'
      raise ValueError(
          f'model.{name}: none of the models has an option {name!r}{text}'
      )


def _check_model(
    where: str,
    spec: GroupSpec | ModelSpec,
    algorithm: str = '',
    method: Mapping[str, Any] | None = None,
) -> set[str]:
  """Checks a model's name and options; returns the names of its options.

  `method` holds the options of `algorithm` that the same section may have.
  """
  method = method or {}
  if by_path.is_path(spec.model):
    try:
      known = keyword_options(constructor(spec.model))
    except ValueError as e:
      raise ValueError(f'{where}: {e}') from e
  else:
    check_name(f'model of {where}', spec.model, MODELS)
    known = keyword_options(MODELS[spec.model])
  whose = f'model {spec.model!r}'
  if method:
    whose += f' with algorithm {algorithm!r}'
  check_options(where, spec.options, {**known, **method}, whose)
  for option in _missing(spec.options, known):
    raise ValueError(f'{where}.{option} is missing; {whose} needs it.')
  return {*known}


def _check_needs(config) -> None:
  """Checks what the algorithm needs of the federation, see `Needs`."""
  name, needs = config.algorithm.name, needs_in(config)
  if config.local.keep_optimizer and needs.keep_optimizer is None:
    can = [
        name for name, constructor in ALGORITHMS.items()
        if needs_of(constructor).keep_optimizer is not None
    ]  # fmt: skip
    raise ValueError(
        f'local.keep_optimizer=True: {name} begins the optimiser anew in each '
        f'visit; the methods that can keep it are {", ".join(can)}.'
    )
  if needs.public is not None and config.public_size is None:
    raise ValueError(
        f'public_size: {name} needs a public set; set its number of examples, '
        'such as --config.public_size=100.'
    )
  _check_given(
      'server_model', config.server_model, needs.server_model,
      f'{name} needs a model of the server; set its name, such as '
      '--config.server_model=resnet18.',
      f'{name} has no model of the server; leave it out.',
  )  # fmt: skip
  for group in config.groups:
    _check_given(
        f'groups.{group}.partner', group_spec(config, group).partner,
        needs.partner,
        f'{name} needs a second model on each client; set its name, such as '
        f"groups.{group}=dict(clients=4, partner='mlp').",
        f'{name} has no second model on a client; leave it out.',
    )  # fmt: skip
  if needs.one_model:
    specs = {name: group_spec(config, name) for name in config.groups}
    models = {
        group: (spec.model, {**model_options(spec.model), **spec.options})
        for group, spec in specs.items()
    }
    check_one_model(name, models, needs.group_options)


def _check_given(
    key: str, value: Any, needed: bool | None, lacks: str, useless: str
) -> None:
  """Raises ValueError if a value is missing, or given and not needed."""
  if needed and value is None:
    raise ValueError(f'{key}: {lacks}')
  if needed is False and value is not None:
    raise ValueError(f'{key}: {useless}')
