"""The flag `--config=FILE[:variants]` and the overrides of its entries."""

import ast
from collections.abc import Iterator, Sequence
import os
import pathlib
import re
import sys
from typing import Any, NamedTuple

from absl import flags
import ml_collections
from ml_collections import config_flags

from . import python_files
from .terminal import CommandError

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_DEFAULT = _ROOT / 'configs' / 'fedin.py'
# Files of configs/ that hold no experiment.
_PARTS = ('__init__', 'common', 'fedhe_setting', 'widths')
_OVERRIDE = re.compile(r'--?(?P<no>no)?config\.(?P<key>[^=]*)(=(?P<value>.*))?')
_BOOLEANS = dict.fromkeys(('true', 't', '1'), True) | dict.fromkeys(
    ('false', 'f', '0'), False
)
_PARSERS = {
    int: ('an integer', int),
    float: ('a finite number', float),
    bool: ('true or false', lambda text: _BOOLEANS[text.lower()]),
}


class _Override(NamedTuple):
  """An override of the command line.

  Attributes:
    key: The entry.
    value: The text after the equals sign; None without an equals sign.
    after: The next argument, which may be the value; None if there is none.
  """

  key: str
  value: str | None
  after: str | None

  def text(self, kind: Any = None) -> str | None:
    """The value; only a boolean may have none."""
    return self.after if self.value is None and kind is not bool else self.value


class _Parser(flags.ArgumentParser):
  """Parses FILE[:variants] and the overrides in `sys.argv` into a config."""

  def parse(self, argument):
    return _load(argument, _overrides(sys.argv))[0].lock()

  def flag_type(self):
    return 'config file'


def define():
  """Defines the flag; returns its holder."""
  # Defining the flag reads the flagfiles in sys.argv, so these are hidden.
  argv, sys.argv = sys.argv, sys.argv[:1]
  try:
    holder = config_flags.DEFINE_config_file(
        'config', None,
        'FILE[:variant,...], or the name of a file of configs; fedin by '
        'default. --config.KEY=VALUE sets an entry.',
    )  # fmt: skip
  finally:
    sys.argv = argv
  flags.FLAGS['config'].parser = _Parser()
  return holder


def experiments() -> list[str]:
  """Names of the configs that come with the library."""
  files = (_ROOT / 'configs').glob('*.py')
  return sorted(path.stem for path in files if path.stem not in _PARTS)


def variants(name: str) -> list[str]:
  """The variants of one of `experiments`, without those that all have."""
  module = python_files.load(_ROOT / 'configs' / f'{name}.py', 'get_config')
  return [*getattr(module, 'VARIANTS', {})]


def with_config(argv: Sequence[str]) -> list[str]:
  """Moves the config to the front, as one argument with an existing path.

  Args:
    argv: The command line without flagfiles.

  Returns:
    The same with --config=PATH[:variants] first.

  Raises:
    CommandError: If there is no such file.
  """
  specs, rest, args = [], [], iter(argv[1:])
  for arg in args:
    if re.fullmatch(r'--?config', arg):
      specs.append(next(args, ''))
    elif re.match(r'--?config=', arg):
      specs.append(arg.split('=', 1)[1])
    else:
      rest.append(arg)
  if '' in specs:
    raise CommandError('--config needs a file, --config=FILE.')
  # The last one counts, from a flagfile or the command line.
  spec = specs[-1] if specs else str(_DEFAULT)
  name, colon, variants = spec.partition(':')
  return [argv[0], f'--config={find(name)}{colon}{variants}', *rest]


def find(name: str) -> pathlib.Path:
  """The path of a config file.

  Args:
    name: A path, or the name of one of `experiments`.

  Returns:
    The path.

  Raises:
    CommandError: If there is no such file.
  """
  # The library's own experiments are found from any folder.
  paths = [pathlib.Path(name), _ROOT / name]
  if name in experiments():
    paths.append(_ROOT / 'configs' / f'{name}.py')
  path = next((path for path in paths if os.path.isfile(path)), None)
  if path is None:
    raise CommandError(f'No config file {name!r}{_configs_hint(name)}')
  return path


def _configs_hint(name: str) -> str:
  """The end of a message on a config that does not exist."""
  from fedjax_het.names import nearest

  known = experiments()
  close = nearest(pathlib.Path(name).stem, known)
  names = ', '.join(f'configs/{name}.py' for name in known)
  if close is None:
    return f'; there are {names}.'
  return f'; did you mean {close!r}? There are {names}.'


def check(argv: Sequence[str]) -> list[str]:
  """Checks the config file and the overrides of a command line.

  Args:
    argv: What `with_config` returns.

  Returns:
    Notes on entries that another method or partition dropped, one line each.

  Raises:
    CommandError: If the file is wrong, or an override has an unknown key or a
      value of the wrong type.
  """
  overrides = _overrides(argv)
  config, notes = _load(argv[1].split('=', 1)[1], overrides)
  for override in overrides:
    _check_override(config, override)
  return notes


def _overrides(argv: Sequence[str]) -> list[_Override]:
  """The overrides of a command line."""
  return [
      _Override(match['key'], match['value'], after)
      for arg, after in zip(argv, [*argv[1:], None], strict=True)
      if (match := _OVERRIDE.fullmatch(arg))
  ]


def _load(spec: str, overrides: Sequence[_Override]) -> tuple[Any, list[str]]:
  """The config of a file, with the method and partition of the overrides.

  Args:
    spec: FILE[:variants].
    overrides: The overrides of the command line.

  Returns:
    The config, and notes on entries that were dropped.

  Raises:
    CommandError: If the file or an override is wrong; the text is one line.
  """
  name, colon, variants = spec.partition(':')
  try:
    module = python_files.load(name, 'get_config')
    config = python_files.call(
        module, 'get_config', *([variants] if colon else [])
    )
    if not isinstance(config, ml_collections.ConfigDict):
      raise ValueError(
          f'{name}: get_config returns {type(config).__name__}, not a '
          'ConfigDict.'
      )
    notes = [*_switched(config, overrides)]
    _open(config, overrides)
    return config, notes
  except ValueError as e:
    raise CommandError(str(e)) from e


def _switched(config, overrides: Sequence[_Override]) -> Iterator[str]:
  """Changes method and partition as the overrides say; yields notes."""
  from fedjax_het.experiment.switch import SWITCHES

  for override in overrides:
    key, name = override.key, override.text()
    section = key.partition('.')[0]
    if key not in SWITCHES or not name or section not in config:
      continue
    if name != config[section].get('name'):
      dropped = SWITCHES[key](config, name)
      if dropped:
        yield f'{section} {name} does not take {", ".join(dropped)}: left out.'


def _open(config, overrides: Sequence[_Override]) -> None:
  """Adds entries that only the overrides name.

  These are options of models and groups, and arguments of optimisers and
  schedules.
  """
  from fedjax_het.experiment import open_entries

  given = {override.key: override.text() for override in overrides}
  for key in given:
    open_entries.open_entry(config, key, given)
    open_entries.open_argument(config, key, given)


def _check_override(config, override: _Override) -> None:
  """Raises CommandError for an unknown key or an invalid value."""
  from fedjax_het.names import suggest
  from fedjax_het.renamed import new_name

  section, path = config, override.key.split('.')
  for depth, name in enumerate(path):
    known = list(section) if hasattr(section, 'keys') else []
    if name not in known:
      where = '.'.join(path[: depth + 1])
      method = section.get('name') if path[0] == 'algorithm' and known else ''
      sentence = new_name(where, method)
      if sentence:
        raise CommandError(f'--config.{sentence}')
      hint = suggest(name, known) if known else '.'
      raise CommandError(f'Unknown config key {where}{hint}')
    kind = section.get_type(name)
    section = section[name]
  value = override.text(kind)
  if kind in _PARSERS and value is not None:
    words, parse = _PARSERS[kind]
    try:
      parse(value)
    except (ValueError, KeyError):
      raise CommandError(
          f'{override.key} must be {words}, got {value!r}.'
      ) from None
  if isinstance(section, ml_collections.ConfigDict) and not _is_dict(value):
    raise CommandError(
        f'{override.key} is a section; '
        f'{_section_hint(override.key, section, value)}'
    )


def _section_hint(key: str, section, value: str | None) -> str:
  """A hint on how to set an entry of a section, with the nearest name."""
  from fedjax_het.algorithms import ALGORITHMS
  from fedjax_het.data.partition import PARTITIONS
  from fedjax_het.names import nearest

  known = dict(algorithm=ALGORITHMS, partition=PARTITIONS).get(key)
  close = nearest(value, known or ())
  if close is not None and close != value:
    return f'did you mean {close!r}? Set --config.{key}.name={close}'
  if known is None:
    names = []
    while isinstance(section, ml_collections.ConfigDict):
      names.append(next(iter(section), 'KEY'))
      section = section.get(names[-1])
    entry = f'{".".join(names)}=VALUE'
  else:
    entry = f'name={close or next(iter(known))}'
  return f'set its entries, such as --config.{key}.{entry}'


def _is_dict(text: str | None) -> bool:
  """Whether a text is the literal of a Python dictionary."""
  try:
    return isinstance(ast.literal_eval(text or ''), dict)
  except (SyntaxError, ValueError, MemoryError, RecursionError):
    return False
