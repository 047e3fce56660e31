"""A run's setting in words."""

from collections.abc import Mapping
import json
from typing import Any

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.engine.driver_kinds import driver_kind
from fedjax_het.engine.needs import needs_of
from fedjax_het.options import keyword_options


def setting(config: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
  """A run's setting in one sentence, for comparison with a paper's.

  Args:
    config: Its config as nested dicts.
    facts: Its facts.

  Returns:
    The sentence, with all options of the method that differ from the default.
  """
  local, groups = config['local'], facts['groups']
  section = dict(config['algorithm'])
  name = section.pop('name')
  models = ', '.join(
      f'{g["clients"]} {group} {_own_options(config, group)}'.strip()
      for group, g in groups.items()
  )
  options = {
      k: v for k, v in section.items() if v != _defaults(name).get(k)
  }
  optimizer = f'{local["optimizer"]} {local["learning_rate"]:g}'
  if local['schedule'] != 'constant':
    optimizer += f' ({local["schedule"]})'
  parts = [
      f'{sum(g["clients"] for g in groups.values())} clients ({models})',
      f'{facts["cohort_size"]} sampled',
      f'{config["num_rounds"]} rounds',
      f'{local["epochs"]} local epochs'
      if local.get('steps') is None
      else f'{local["steps"]} local steps',
      f'batch {local["batch_size"]}',
      optimizer,
      'models ' + _options(config['model']),
      'split ' + named(config['partition']),
      f'{name} {_options(options)}'.strip(),
      f'seed {config["seed"]}, sampling seed {config["sampling_seed"]}',
  ]
  # Configs of older runs have no clock.
  driver = driver_kind(config.get('clock', {}).get('mode', 'synchronous'))
  fleet = ', '.join(
      f'{kind["clients"]} {name}'
      for name, kind in config.get('devices', {}).items()
  )
  if driver.setting:
    parts.append(driver.setting)
  if fleet:
    parts.append(f'devices {fleet}')
  if config.get('validation') is not None:
    parts.append(f'{config["validation"]:.0%} of each client held out')
  if config['image_size'] is not None:
    parts.append(f'images resized to {config["image_size"]}')
  return ', '.join(parts)


def _own_options(config: Mapping[str, Any], group: str) -> str:
  """The options of the method that a group's config sets.

  They are not known of a method that a config file has registered elsewhere.
  """
  name = config['algorithm']['name']
  entry = config['groups'].get(group)
  if name not in ALGORITHMS or not isinstance(entry, Mapping):
    return ''
  known = needs_of(ALGORITHMS[name]).group_options
  return _options({k: v for k, v in entry.items() if k in known})


def _defaults(name: str) -> dict[str, Any]:
  """A method's default options, as they come back from JSON, if known."""
  if name not in ALGORITHMS:
    return {}
  defaults = {k: v for k, (_, v) in keyword_options(ALGORITHMS[name]).items()}
  return json.loads(json.dumps(defaults))


def _options(options: Mapping[str, Any]) -> str:
  return ' '.join(f'{k}={v}' for k, v in sorted(options.items()))


def named(section: Mapping[str, Any]) -> str:
  """A section's name and its other entries."""
  rest = {k: v for k, v in section.items() if k != 'name'}
  return f'{section["name"]} {_options(rest)}'
