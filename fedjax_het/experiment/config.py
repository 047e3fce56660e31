"""What an experiment's config holds, and its defaults."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import ml_collections

from fedjax_het.algorithms import ALGORITHMS, KEEP_OPTIMIZER
from fedjax_het.engine import clock as clock_lib
from fedjax_het.experiment.fields import (
  CLOCK,
  FIELDS,
  LOCAL,
  Field,
  check_field,
  plain,
)
from fedjax_het.models import MODELS
from fedjax_het.names import check_name, shown
from fedjax_het.options import check_options, keyword_options


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
  check_options('algorithm', options, known, f'algorithm {name!r}')
  values = {k: plain(Field(d, kind)) for k, (kind, d) in known.items()}
  section = ml_collections.ConfigDict(dict(name=name, **values))
  section.update(options)
  return section


def default_config(algorithm: str = 'fedin') -> ml_collections.ConfigDict:
  """The default experiment: a method on the embedded digits, 10 clients.

  Args:
    algorithm: A key of `ALGORITHMS`.

  Returns:
    A locked config. `groups` maps each group's name to its number of clients,
    the name being the model, or to a section of `model`, `clients` and model
    options; `model` holds the options of all models that have them;
    `partition` holds a form's name, its own seed and its options; `devices`
    maps the name of each kind of device to a section of `clients` and fields
    of `Device`, and is empty for equal ones.
  """
  config = {name: plain(field) for name, field in FIELDS.items()}
  config['local'] = {name: plain(field) for name, field in LOCAL.items()}
  config['local']['keep_optimizer'] = KEEP_OPTIMIZER.get(algorithm, False)
  config['clock'] = {name: plain(field) for name, field in CLOCK.items()}
  config['devices'] = {}
  config['partition'] = dict(name='dirichlet', seed=0, alpha=0.5, min_size=16)
  config['groups'] = dict(mini_resnet6=4, mini_resnet8=3, mini_resnet10=3)
  config['model'] = dict(width=1.0, norm='batch')
  config['algorithm'] = algorithm_config(algorithm)
  return ml_collections.ConfigDict(config).lock()


def group_spec(config, name: str) -> tuple[str, int, dict[str, Any]]:
  """One group as (model, number of clients, options of the model).

  Args:
    config: The config.
    name: A key of `config.groups`.

  Returns:
    The model's options are those of `config.model` that it has, and the
    group's own.
  """
  entry = config.groups[name]
  entry = dict(entry) if isinstance(entry, Mapping) or hasattr(
      entry, 'to_dict'
  ) else dict(clients=entry)
  model, clients = entry.pop('model', name), entry.pop('clients', None)
  if model not in [*MODELS]:  # A list: what is no name may not be hashable.
    return model, clients, entry
  known = keyword_options(MODELS[model])
  common = {k: v for k, v in config.model.items() if k in known}
  return model, clients, {**common, **entry}


def device_spec(config, name: str) -> tuple[clock_lib.Device, int]:
  """One kind of device and its number of clients.

  Args:
    config: The config.
    name: A key of `config.devices`.

  Returns:
    The device and the number.

  Raises:
    ValueError: If an entry is unknown or out of its range, naming it.
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
