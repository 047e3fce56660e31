"""Changes the method or the partition of a config."""

from collections.abc import Callable, Mapping
import inspect
from typing import Any

import ml_collections

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.data.partition import PARTITIONS
from fedjax_het.engine.needs import needs_of
from fedjax_het.experiment.config import (
  algorithm_config,
  group_spec,
  needs_in,
)
from fedjax_het.experiment.fields import Field, plain
from fedjax_het.names import check_name
from fedjax_het.options import keyword_options


def partition(config: ml_collections.ConfigDict, name: str) -> list[str]:
  """Changes the partition of a config, and keeps the options that both have.

  Args:
    config: The config, which is changed.
    name: A key of `PARTITIONS`.

  Returns:
    The entries that are dropped, such as 'partition.alpha'.

  Raises:
    ValueError: If the name is unknown.
  """
  check_name('partition', name, PARTITIONS)
  known = keyword_options(PARTITIONS[name])
  old = config.partition.to_dict()
  del old['name']
  kept, dropped = _divide(old, known)
  entries = {option: entry_of(*known[option]) for option in known} | kept
  section = ml_collections.ConfigDict(dict(name=name, **entries))
  config.partition = section.lock()
  return [f'partition.{option}' for option in dropped]


def algorithm(config: ml_collections.ConfigDict, name: str) -> list[str]:
  """Changes the method of a config.

  Options that differ from the old method's defaults are kept if the new one
  has them. Group options, partners and a server's model that the new method
  does not take are dropped. `local.keep_optimizer` becomes the new default if
  it was the old one.

  Args:
    config: The config, which is changed.
    name: A key of `ALGORITHMS`.

  Returns:
    The entries that are dropped, such as 'algorithm.mu'.

  Raises:
    ValueError: If the name is unknown.
  """
  check_name('algorithm', name, ALGORITHMS)
  before, after = needs_in(config), needs_of(ALGORITHMS[name])
  old = config.algorithm.to_dict()
  defaults = algorithm_config(old.pop('name')).to_dict()
  given = {k: v for k, v in old.items() if v != defaults.get(k)}
  section = algorithm_config(name)
  kept, options = _divide(given, section)
  dropped = [f'algorithm.{option}' for option in options]
  dropped += _drop_from_groups(config, after.group_options, after.partner)
  with section.ignore_type():
    section.update(kept)
  config.algorithm = section.lock()
  if config.server_model is not None and after.server_model is False:
    config.server_model = None
    dropped.append('server_model')
  if config.local.keep_optimizer == bool(before.keep_optimizer):
    config.local.keep_optimizer = bool(after.keep_optimizer)
  return dropped


def entry_of(kind: Any, default: Any) -> Any:
  """The config's entry for an option that is not given.

  Args:
    kind: The option's type, or Any.
    default: Its default.

  Returns:
    The default, or a placeholder for a value of the type.
  """
  default = None if default is inspect.Parameter.empty else default
  return plain(Field(default, object if kind is Any else kind))


def _divide(
    options: Mapping[str, Any], known: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
  """The given options that are known, and the names of the others."""
  options = {k: v for k, v in options.items() if v is not None}
  kept = {name: value for name, value in options.items() if name in known}
  return kept, [name for name in options if name not in known]


def _drop_from_groups(
    config, known: Mapping[str, Any], partner: bool | None
) -> list[str]:
  """Removes options from groups that a new method does not have.

  It has the options `known`. If `partner` is False, partners are removed, too.
  Returns the entries that are removed.
  """
  dropped = []
  for group in config.groups:
    spec = group_spec(config, group)
    odd = [option for option in spec.method if option not in known]
    if spec.partner is not None and partner is False:
      odd.append('partner')
    for option in odd:
      with config.unlocked():
        del config.groups[group][option]
    dropped += [f'groups.{group}.{option}' for option in odd]
  return dropped


# {entry: function that changes it}, for overrides on the command line.
SWITCHES: dict[str, Callable[[Any, str], list[str]]] = {
    'partition.name': partition,
    'algorithm.name': algorithm,
}
