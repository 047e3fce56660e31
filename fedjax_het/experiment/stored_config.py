"""Conversion of configs stored by older versions."""

from collections.abc import Mapping
import json
from typing import Any

from fedjax_het.algorithms import ALGORITHMS
from fedjax_het.experiment.config import default_config
from fedjax_het.renamed import with_moved_entries


def older_entries(stored: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Values of missing entries whose default has changed since.

  Args:
    stored: A config as plain JSON values, maybe of an older version.

  Returns:
    {section: {entry: value}}, for entries whose default differs from what
    versions without them did. Entries without effect in this config are left
    out.
  """
  local = stored.get('local')
  if not isinstance(local, Mapping) or 'cutout' in local:
    return {}  # Its version had these entries.
  older = {}
  if local.get('augment') == 'crop_flip_cutout':
    older['local'] = dict(cutout='before')
  groups = stored.get('groups')
  models = {
      entry.get('model', name) if isinstance(entry, Mapping) else name
      for name, entry in (
          groups.items() if isinstance(groups, Mapping) else ()
      )
  }
  if 'preresnet20' in models:
    older['model'] = dict(
        init='he_fan_out', preact_shortcut=False, head_relu=True
    )
  return older


def with_new_entries(stored: Mapping[str, Any]) -> dict[str, Any]:
  """The config with missing entries set to their defaults.

  Args:
    stored: A config as plain JSON values, maybe of an older version.

  Returns:
    The config with missing entries set to their defaults or to `older_entries`.
  """
  stored = with_moved_entries(stored)
  name = stored.get('algorithm', {}).get('name')
  # If the method was removed, its options are unknown.
  default = default_config(name if name in ALGORITHMS else 'private')
  full = json.loads(json.dumps(default.to_dict()))
  result, older = {**full, **stored}, older_entries(stored)
  for section in ('local', 'algorithm', 'clock', 'callbacks'):
    result[section] = {
        **full[section], **older.get(section, {}), **stored.get(section, {})
    }  # fmt: skip
  result['model'] = {**older.get('model', {}), **result['model']}
  return result
