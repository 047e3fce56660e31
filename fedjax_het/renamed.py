"""Config entries that once had another name or place."""

from collections.abc import Mapping
from typing import Any

# {name in older versions: name in this one}, of a config's plain entries.
RENAMED = dict(products='matmul_dtype', convolutions='conv_backend')


def with_moved_entries(stored: Mapping[str, Any]) -> dict[str, Any]:
  """A stored config whose entries have the places and names of this version."""
  result = {RENAMED.get(key, key): value for key, value in stored.items()}
  algorithm = stored.get('algorithm')
  if not isinstance(algorithm, Mapping):
    return result
  result['algorithm'] = algorithm = dict(algorithm)
  if 'keep_optimizer' in algorithm:  # Once an option of two methods.
    keep = algorithm.pop('keep_optimizer')
    result['local'] = {'keep_optimizer': keep, **stored.get('local', {})}
  if 'planner' in algorithm:  # FeDepth's `plan`.
    planner = algorithm.pop('planner')
    algorithm['plan'] = 'measured' if planner == 'xla' else planner
  return result
