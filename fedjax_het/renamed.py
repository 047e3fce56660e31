"""Config entries that once had another name or place.

Stored configs and checkpoints of old runs are read with the new names
(`with_moved_entries`, `current_paths`). In a new config, and in a call of a
method's constructor, an old name raises an error that gives the new one.
"""

from collections.abc import Container, Iterable, Mapping
from fractions import Fraction
import re
import string
from typing import Any

# {old key: the new key, in words where it depends on the config}.
RENAMED = {
    'products': 'matmul_dtype',
    'convolutions': 'conv_backend',
    'algorithm.keep_optimizer': 'local.keep_optimizer',
    'algorithm.planner': 'algorithm.plan',
    'algorithm.budgets': 'groups.NAME.budget',
    'algorithm.rates': (
        'groups.NAME.rate, or algorithm.levels where clients draw their rates'
    ),
}
# {method: {its old option: the new one}}; other methods may use the old name.
_OPTIONS = {
    'fd': {'gamma': 'distill_weight'},
    'fedasync': {'rho': 'mu'},
    'fedet': {'lam': 'distill_weight'},
    'fedgen': {'generative_beta': 'distill_weight'},
    'fedgkt': {'alpha': 'distill_weight'},
    'fedhe': {'alpha': 'distill_weight'},
    'moon': {'mu': 'contrast_weight'},
    'scalefl': {'gamma': 'distill_weight'},
}
# Present names of the fields of states that were once called `weights`.
_FIELDS = ('model', 'small')
# {method: (old option, a string such as 'a:1 b:1/2'; new option of a group)}.
_SHARES = {
    'fedepth': ('budgets', 'budget'),
    'splitmix': ('budgets', 'budget'),
    'heterofl': ('rates', 'rate'),
}


def new_name(key: str, method: str = '') -> str:
  """The error message for a renamed key.

  Args:
    key: The key, such as 'algorithm.alpha'; or a method's option alone.
    method: The method of the config, or whose option it is; '' for none.

  Returns:
    The message; '' for a key that has not been renamed.
  """
  if key in RENAMED:
    return f'{key}: this entry is now called {RENAMED[key]}.'
  option = key.removeprefix('algorithm.')
  new = _OPTIONS.get(method, {}).get(option)
  if new is None:
    return ''
  new = key.removesuffix(option) + new
  return f'{key}: this option of {method} is now called {new}.'


def check_renamed(
    names: Iterable[str],
    known: Container[str],
    prefix: str = '',
    method: str = '',
) -> None:
  """Raises ValueError if an entry has been renamed.

  Args:
    names: Names of the entries that are given.
    known: Current names, which are always accepted.
    prefix: What stands before each name, such as 'algorithm.'.
    method: The method whose options they are; '' for other entries.

  Raises:
    ValueError: Naming the new entry.
  """
  for name in names:
    sentence = new_name(f'{prefix}{name}', method)
    if sentence and name not in known:
      raise ValueError(sentence)


def new_name_in(text: str) -> str:
  """The message of `new_name` for the key in an ml_collections error.

  Args:
    text: The text of ml_collections' error, which quotes the last part of the
      key first, and then the section, which begins with a method's name.

  Returns:
    The message; '' if the key has not been renamed.
  """
  quoted = re.search(r'Key "(\w+)" does not exist', text)
  if quoted is None:
    return ''
  option = quoted[1]
  found = [new_name(k) for k in RENAMED if k.rpartition('.')[2] == option]
  method = re.search(r'present: "{\W*name\W+(\w+)', text)
  if method:
    found.insert(0, new_name(f'algorithm.{option}', method[1]))
  return next(filter(None, found), '')


def with_moved_entries(stored: Mapping[str, Any]) -> dict[str, Any]:
  """A copy of a stored config with renamed and moved entries updated."""
  result = {
      key if '.' in RENAMED.get(key, '.') else RENAMED[key]: value
      for key, value in stored.items()
  }
  algorithm = stored.get('algorithm')
  if not isinstance(algorithm, Mapping):
    return result
  result['algorithm'] = algorithm = dict(algorithm)
  if 'keep_optimizer' in algorithm:  # It was once an option of two methods.
    keep = algorithm.pop('keep_optimizer')
    result['local'] = {'keep_optimizer': keep, **stored.get('local', {})}
  for old, new in _OPTIONS.get(algorithm.get('name'), {}).items():
    if old in algorithm:
      algorithm[new] = algorithm.pop(old)
  if 'planner' in algorithm:
    planner = algorithm.pop('planner')
    algorithm['plan'] = 'measured' if planner == 'xla' else planner
  if isinstance(algorithm.get('left_out'), str):  # Once names between spaces.
    algorithm['left_out'] = algorithm['left_out'].split()
  old, new = _SHARES.get(algorithm.get('name'), (None, None))
  if isinstance(algorithm.get(old), str):
    _move_shares(result, algorithm.pop(old), new)
  return result


def current_paths(
    stored: Iterable[str], wanted: Container[str]
) -> dict[str, str]:
  """The paths that a checkpoint's leaves have in this version.

  Args:
    stored: Paths of all leaves, such as 'server/weights/params/head/kernel'.
    wanted: Paths of the leaves of the run's state.

  Returns:
    {path in this version: path in the checkpoint}, with the field's present
    name for which all paths are wanted; if there is none, paths stay the same.
  """
  same = {path: path for path in stored}
  for field in _FIELDS:
    new = {
        re.sub('(^|/)weights/', rf'\g<1>{field}/', path, count=1): path
        for path in same
    }
    if all(path in wanted for path in new) and len(new) == len(same):
      return new
  return same


def _move_shares(config: dict[str, Any], text: str, option: str) -> None:
  """Moves shares such as 'a:1 b:1/2' to their present entries, in place.

  Args:
    config: A stored config; its sections are replaced, not changed.
    text: The shares, by group or, where clients draw theirs, by level.
    option: The groups' option that holds a share.
  """
  algorithm, groups = config['algorithm'], config.get('groups')
  shares = dict(
      item.strip().split(':', 1)
      for item in re.split(r'[,\s]+', text.strip())
      if ':' in item
  )
  odds = algorithm.get('odds')
  if odds:
    levels = string.ascii_lowercase[: len(odds)]
    if not shares:
      shares = {k: str(Fraction(1, 2**i)) for i, k in enumerate(levels)}
    algorithm['levels'] = [shares.get(level) for level in levels]
  elif isinstance(groups, Mapping):
    config['groups'] = {
        name: _with_option(entry, option, shares.get(name))
        for name, entry in groups.items()
    }


def _with_option(entry: Any, option: str, value: str | None) -> Any:
  """A group's entry with an option added, unless its value is None."""
  if value is None:
    return entry
  entry = dict(entry) if isinstance(entry, Mapping) else dict(clients=entry)
  return {**entry, option: value}
