"""The entries of an experiment's config, and their defaults."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import ml_collections

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine import clock as clock_lib
from fedjax_het.engine.needs import NOTHING, Needs, needs_of
from fedjax_het.experiment.fields import (
  CALLBACKS,
  CLOCK,
  FIELDS,
  LOCAL,
  Field,
  check_field,
  plain,
)
from fedjax_het.models import constructor
from fedjax_het.names import check_name, shown
from fedjax_het.options import check_options, keyword_options
from fedjax_het.renamed import check_renamed


def algorithm_config(name: str, **options) -> ml_collections.ConfigDict:
  """The `algorithm` section: a method and all of its options.

  Args:
    name: A key of `ALGORITHMS`.
    **options: Those that differ from the method's defaults.

  Returns:
    The section, in which each option can be overridden.

  Raises:
    ValueError: If the name or an option is unknown.
  """
  check_name('algorithm', name, ALGORITHMS)
  known = keyword_options(ALGORITHMS[name])
  check_renamed(options, known, 'algorithm.', name)
  check_options('algorithm', options, known, f'algorithm {name!r}')
  values = {k: plain(Field(d, kind)) for k, (kind, d) in known.items()}
  section = ml_collections.ConfigDict(dict(name=name, **values))
  section.update(options)
  return section


def _needed_entries(config, needs: Needs) -> dict[str, Any]:
  """Entries of the default experiment that an algorithm's `Needs` require."""
  groups, entries = config['groups'], {}
  if needs.public is not None:
    entries['public_size'] = 100
  if needs.server_model:
    field = FIELDS['server_model']._replace(default='mini_resnet10')
    entries['server_model'] = plain(field)
  if needs.one_model:
    groups = {
        name: dict(model='mini_resnet10', clients=clients)
        for name, clients in zip('abc', groups.values(), strict=True)
    }
  if needs.partner:
    groups = {
        name: {**_group_section(name, entry), 'partner': 'mini_resnet6'}
        for name, entry in groups.items()
    }
  return {**entries, 'groups': groups}


def default_config(algorithm: str = 'fedin') -> ml_collections.ConfigDict:
  """The default experiment: a method on the embedded digits, 10 clients.

  Args:
    algorithm: A key of `ALGORITHMS`.

  Returns:
    A locked config. `groups` maps each group's name to its number of clients
    (the name is then the model's), or to a section of `model`, `clients`, model
    options, the method's options of a group (`Needs.group_options`) and, for
    methods with a second model on each client, `partner`. A model such as
    `partner` or `server_model` is a name, or a section of `model` and options.
    `model` holds options for all models that have them; `partition` holds the
    partition's name, its seed and its options; `devices` maps the name of each
    kind of device to a section of `clients` and fields of `Device`, and is
    empty if all devices are equal.
  """
  config = {name: plain(field) for name, field in FIELDS.items()}
  config['local'] = {name: plain(field) for name, field in LOCAL.items()}
  if ':' in str(algorithm):
    name, variants = str(algorithm).split(':', 1)
    raise ValueError(
        f'default_config takes a method alone, {name!r}; for variants call '
        f'fedjax_het.configs.{name}.get_config({variants!r}).'
    )
  check_name('algorithm', algorithm, ALGORITHMS)
  needs = needs_of(ALGORITHMS[algorithm])
  config['local']['keep_optimizer'] = bool(needs.keep_optimizer)
  config['clock'] = {name: plain(field) for name, field in CLOCK.items()}
  config['callbacks'] = {name: plain(f) for name, f in CALLBACKS.items()}
  config['devices'] = {}
  config['partition'] = dict(name='dirichlet', seed=0, alpha=0.5, min_size=16)
  config['groups'] = dict(mini_resnet6=4, mini_resnet8=3, mini_resnet10=3)
  config.update(_needed_entries(config, needs))
  config['model'] = dict(width=1.0, norm='batch')
  config['algorithm'] = algorithm_config(algorithm)
  made = ml_collections.ConfigDict(config).lock()
  for section in ('optimizer_args', 'schedule_args'):
    made.local[section].unlock()  # Their keys are not fixed.
  return made


class ModelSpec(NamedTuple):
  """A model by name, with its options.

  Attributes:
    model: A key of `MODELS`, or an import path.
    options: The options of `config.model` that it has, and its own.
  """

  model: Any
  options: dict[str, Any]


class GroupSpec(NamedTuple):
  """The part of a config for one group.

  Attributes:
    model: A key of `MODELS`, or an import path.
    clients: Number of clients.
    options: Options of the model: those of `config.model` that it has, and
      the group's own.
    method: The options of the method that are given for this group.
    partner: The second model of each client, or None.
  """

  model: Any
  clients: Any
  options: dict[str, Any]
  method: dict[str, Any]
  partner: ModelSpec | None


def _is_section(value: Any) -> bool:
  return isinstance(value, Mapping) or hasattr(value, 'to_dict')


def _model_known(model: Any) -> dict[str, Any]:
  """Options of a model; {} for an unknown name."""
  try:
    return keyword_options(constructor(model))
  except ValueError:
    return {}


def _common(config, model: Any) -> dict[str, Any]:
  """The entries of `config.model` that a model has."""
  known = _model_known(model)
  return {k: v for k, v in config.model.items() if k in known}


def _group_section(name: str, entry: Any) -> dict[str, Any]:
  """A group's entry as a section, also if it is only a number of clients."""
  section = dict(entry) if _is_section(entry) else dict(clients=entry)
  return {'model': name, **section}


def model_spec(config, entry: Any) -> ModelSpec | None:
  """Reads an entry of a config that is a model, such as `server_model`.

  Args:
    config: The config.
    entry: The model's name, or a section of `model` and options; or None.

  Returns:
    The model; None if the entry is None.
  """
  if entry is None:
    return None
  own = dict(entry) if _is_section(entry) else dict(model=entry)
  model = own.pop('model', None)
  return ModelSpec(model, {**_common(config, model), **own})


def group_spec(config, name: str) -> GroupSpec:
  """Reads one group of a config; unknown options stay in `options`.

  Args:
    config: The config.
    name: A key of `config.groups`.

  Returns:
    Its model, clients, options and partner.
  """
  entry = _group_section(name, config.groups[name])
  clients, partner = entry.pop('clients', None), entry.pop('partner', None)
  known = _model_known(entry['model'])
  method = {
      option: entry.pop(option)
      for option in needs_in(config).group_options
      if option in entry and option not in known
  }
  model, options = model_spec(config, entry)
  return GroupSpec(
      model, clients, options, method, model_spec(config, partner)
  )


def cohort_size(config) -> int:
  """Clients per round; the entry may leave it open.

  Args:
    config: The config.

  Returns:
    `config.cohort_size`, else all clients, or, if a round is of one group, as
    many as the smallest group has.
  """
  if config.cohort_size is not None:
    return config.cohort_size
  sizes = [group_spec(config, name).clients for name in config.groups]
  return min(sizes) if config.clock.mode == 'tiers' else sum(sizes)


def needs_in(config) -> Needs:
  """The `Needs` of a config's algorithm; `NOTHING` for an unknown one."""
  name = config.algorithm.get('name')
  return needs_of(ALGORITHMS[name]) if name in [*ALGORITHMS] else NOTHING


def device_spec(config, name: str) -> tuple[clock_lib.Device, int]:
  """One kind of device and its number of clients.

  Args:
    config: The config.
    name: A key of `config.devices`.

  Returns:
    The device and the number.

  Raises:
    ValueError: If an entry is unknown or out of its range.
  """
  where = f'devices.{name}'
  if not hasattr(config.devices[name], 'items'):
    raise ValueError(
        f'{where} must be a section, got {shown(config.devices[name])}.'
    )
  entry = dict(config.devices[name])
  clients = entry.pop('clients', None)
  check_field(f'{where}.clients', clients, Field(1, int, low=1))
  known = {f.name: (f.type, f.default) for f in _DEVICE_FIELDS}
  check_options(where, entry, known, 'a device')
  try:
    return clock_lib.Device(**entry), clients
  except ValueError as e:
    raise ValueError(f'{where}: {e}') from e


_DEVICE_FIELDS = dataclasses.fields(clock_lib.Device)
