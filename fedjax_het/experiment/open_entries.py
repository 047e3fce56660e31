"""Adds entries that a config may have but does not list.

A config lists only some options of models and groups, and some arguments of an
optimiser and a schedule; the others have their defaults. The command line may
set the others, too.
"""

import ast
from collections.abc import Mapping
from typing import Any

import ml_collections

from fedjax_het.experiment import optimizers
from fedjax_het.experiment.config import group_spec, needs_in
from fedjax_het.experiment.switch import entry_of
from fedjax_het.models import constructor
from fedjax_het.names import check_name
from fedjax_het.options import keyword_options

# Entries of a group besides the options of its model and of the method.
_OF_GROUP: dict[str, tuple[Any, Any]] = dict(model=(str, None))


def open_entry(
    config: ml_collections.ConfigDict,
    key: str,
    given: Mapping[str, str | None],
) -> None:
  """Adds an entry with its default if the config lacks it.

  The key may be `model.OPTION`, for an option of some group's model, or
  `groups.NAME.OPTION`, for an option of the group's model or of the method. A
  group given as a number of clients becomes a section. Other keys are ignored,
  and left to the check of the config.

  Args:
    config: The config, which is changed.
    key: Such as 'model.init'.
    given: {key: text} of all entries to set. If they set a group's model, its
      options are used.

  Raises:
    ValueError: If a group's model is unknown.
  """
  section, _, option = key.rpartition('.')
  group = section.removeprefix('groups.')
  if section == 'model':
    names, known = [*config.groups], {}
  elif group in config.groups:
    names = [group]
    options = needs_in(config).known_group_options()
    known = _OF_GROUP | {k: (kind, None) for k, (kind, _) in options.items()}
  else:
    return
  for name in names:
    model = given.get(f'groups.{name}.model') or group_spec(config, name).model
    known = keyword_options(constructor(model)) | known
  if option not in known:
    return
  with config.unlocked():
    if section == 'model':
      entries = config.model
    else:
      if not hasattr(config.groups[group], 'items'):
        clients = config.groups[group]
        del config.groups[group]
        config.groups[group] = ml_collections.ConfigDict(dict(clients=clients))
      entries = config.groups[group]
    if option not in entries:
      entries[option] = entry_of(*known[option])


def open_argument(
    config: ml_collections.ConfigDict,
    key: str,
    given: Mapping[str, str | None],
) -> None:
  """Adds `local.optimizer_args.NAME` or `local.schedule_args.NAME`.

  Its type is that of the given value. Other keys are ignored.

  Args:
    config: The config, which is changed.
    key: Such as 'local.optimizer_args.b1'.
    given: {key: text} of all entries to set. If they set an optimiser or a
      schedule, its arguments are used.

  Raises:
    ValueError: For an unknown optimiser, schedule or argument.
  """
  section, _, name = key.rpartition('.')
  if section not in ('local.optimizer_args', 'local.schedule_args'):
    return
  for entry in ('optimizer', 'schedule'):
    if text := given.get(f'local.{entry}'):
      config.local[entry] = text
  section = section.removeprefix('local.')
  known = optimizers.arguments(config.local)[section]
  check_name(f'argument of local.{section}', name, known)
  arguments = config.local[section]
  with arguments.unlocked(), arguments.ignore_type():
    arguments[name] = _literal(given[key])


def _literal(text: str | None) -> Any:
  """Parses a literal, such as a number or a boolean; else returns the text."""
  if text in ('true', 'false'):
    return text == 'true'
  try:
    return ast.literal_eval(text or '')
  except (SyntaxError, ValueError, MemoryError, RecursionError):
    return text
