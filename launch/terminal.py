"""Flag parsing, --help and one-line errors, shared by the programs."""

from collections.abc import Callable, Sequence
import logging
import os
import pathlib
import re
import sys
from typing import NoReturn

from absl import app, flags
from absl import logging as absl_logging
import ml_collections
import tqdm

from . import stopping


class CommandError(ValueError):
  """A command line that cannot be understood."""


def line(error: BaseException | str) -> str:
  """An error's text on one line; an OSError without its number."""
  if isinstance(error, OSError) and error.strerror:
    place = f'{error.filename}: ' if error.filename else ''
    error = place + error.strerror
  return ' '.join(str(error).split())


def fail(error: BaseException | str, code: int = 2) -> NoReturn:
  """Prints an error on one line and ends the process."""
  print(f'Error: {as_started(line(error))}', file=sys.stderr)
  sys.exit(code)


def run(
    main: Callable,
    flags_parser: Callable,
    doc: str,
    more: Callable[[], str] = lambda: '',
) -> None:
  """Runs a program whose flags are defined, or prints its --help.

  Args:
    main: Called with the arguments that are not flags.
    flags_parser: Parses the command line.
    doc: The docstring of the program.
    more: Returns the text that --help prints after the flags.
  """
  # Hides XLA's messages on accelerators that it does not find.
  absl_logging.set_verbosity(absl_logging.WARNING)
  log = logging.getLogger('fedjax_het')
  log.handlers, log.propagate = [_Log()], False
  if _HELP & set(sys.argv[1:]):
    parts = as_started(doc).strip(), _flags(), more()
    show('\n\n'.join(filter(None, parts)))
    return
  try:
    with stopping.second_ends_at_once():
      app.run(main, flags_parser=flags_parser)
  except KeyboardInterrupt:
    print('Interrupted.', file=sys.stderr)
    sys.exit(130)


class _Log(logging.Handler):
  """Writes the library's messages without breaking a progress bar.

  A warning that was shown is not shown again, as for each cell of a sweep.
  """

  def __init__(self):
    super().__init__()
    self._shown = set()

  def emit(self, record):
    text = record.getMessage()
    if record.levelno >= logging.WARNING:
      if text in self._shown:
        return
      self._shown.add(text)
      text = f'Warning: {text}'
    tqdm.tqdm.write(text, file=sys.stderr)


_HELP = {'--help', '-help', '-h', '-?', '--helpshort', '--helpfull'}


def _flags() -> str:
  """The flags of this program, one line each."""
  lines = ['Flags:']
  for module, found in flags.FLAGS.flags_by_module_dict().items():
    if module == sys.argv[0] or module.startswith(f'{__package__}.'):
      for flag in sorted(found, key=lambda flag: flag.name):
        no = '[no]' * bool(flag.boolean)
        lines.append(f'  --{no}{flag.name}: {flag.help}{_default(flag)}')
  return '\n'.join(lines)


def _default(flag: flags.Flag) -> str:
  """The end of a flag's line: a default that is not empty or false."""
  quoted = flag.default_as_str
  if quoted in (None, "''", "'false'", "'None'"):
    return ''
  return f' Default: {quoted[1:-1]}.'


def show(text: str) -> None:
  """Prints a text; a reader such as `head` may stop before its end."""
  try:
    print(text, flush=True)
  except BrokenPipeError:
    # Python flushes again at exit, which would raise another error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def command(module: str) -> list[str]:
  """The words that start a program as this one was: -m or `fedjax-het`."""
  if __package__ == 'launch':
    return ['python', '-m', f'launch.{module}']
  return ['fedjax-het', module.replace('_', '-')]


def as_started(text: str) -> str:
  """Rewrites the commands in a text in the way this program was started.

  An argument of Python becomes an entry of the config. Programs that have a
  flag for it name the flag before they call this function.
  """
  text = text.replace('pass verify=False', 'set verify=False in the config')
  return re.sub(
      r'python -m launch\.(\w+)', lambda m: ' '.join(command(m[1])), text
  )


def read_flags(argv: Sequence[str]) -> list[str]:
  """absl's flags parser, which also rejects empty and repeated flags.

  Args:
    argv: The command line.

  Returns:
    The arguments that are not flags, the program's name first.

  Raises:
    CommandError: If a flag is unknown, wrong, empty or given twice on the
      command line, or a flagfile cannot be read; one line that names it.
  """
  return read_expanded(with_flagfiles(argv))


def read_expanded(argv: Sequence[str]) -> list[str]:
  """`read_flags` for a command line whose flagfiles are expanded."""
  # Folders may have names that are not UTF-8.
  if hasattr(sys.stdout, 'reconfigure'):
    sys.stdout.reconfigure(errors='backslashreplace')
  try:
    return flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as e:
    raise CommandError(line(e) + _entry_hint(e.flagname)) from e
  except flags.Error as e:
    raise CommandError(line(e)) from e


def _entry_hint(name: str) -> str:
  """The end of a message on an unknown flag that is an entry of the config."""
  config = flags.FLAGS['config'].value if 'config' in flags.FLAGS else {}
  known = isinstance(config, ml_collections.ConfigDict) and name in config
  return f'; did you mean --config.{name}?' if known else ''


def with_flagfiles(argv: Sequence[str]) -> list[str]:
  """Replaces the flagfiles of a command line by their contents.

  Args:
    argv: The command line.

  Returns:
    The command line without --flagfile.

  Raises:
    CommandError: If a flagfile cannot be read or has no name, or a flag is
      empty or given twice on the command line. A flag may be in a flagfile,
      too; the last one counts.
  """
  _check_flags(argv[1:], twice=False)
  try:
    argv = flags.FLAGS.read_flags_from_files(list(argv), force_gnu=False)
  except flags.Error as e:
    raise CommandError(line(e).removeprefix('ERROR:: ')) from e
  except UnicodeDecodeError as e:
    raise CommandError(f'The flagfile is not UTF-8 ({e}).') from e
  _check_flags(argv[1:], twice=True)
  return argv


def _check_flags(args: Sequence[str], *, twice: bool) -> None:
  """Raises CommandError for an empty or, unless `twice`, a repeated flag."""
  seen = set()
  for arg in args:
    if arg == '--':
      return
    match = re.fullmatch(r'--?([\w.]+)(=(.*))?', arg, re.DOTALL)
    if not match:
      continue
    name, equals, value = match.groups()
    if name not in flags.FLAGS and name.startswith('no'):
      name = name[2:]
    # Skips unknown flags, and values of the preceding flag.
    if name not in flags.FLAGS and name not in ('config', 'flagfile'):
      if not name.startswith('config.'):
        continue
    if name in seen and not twice:
      raise CommandError(f'--{name} is given twice.')
    seen.add(name)
    # The config's own check covers its entries.
    if equals and not value and not name.startswith('config.'):
      raise CommandError(
          f'--{name} is empty; give it a value, or leave it out.'
      )


def folder(flag: str, text: str) -> pathlib.Path:
  """The folder that a flag names; checks that it can be written to.

  Args:
    flag: The flag, for the error's text.
    text: Its value; ~ is the home folder.

  Returns:
    The path.

  Raises:
    CommandError: If it cannot be a folder or cannot be written to.
  """
  path = expanded(text, flag)
  try:
    there = next(p for p in (path, *path.parents) if os.path.lexists(p))
    if not there.is_dir():
      raise CommandError(f'{flag}={text}: {there} is a file, not a folder.')
    if not os.access(there, os.W_OK | os.X_OK):
      raise CommandError(f'{flag}={text}: {there} cannot be written.')
    path.exists()
  except OSError as e:  # Such as a name that is too long.
    raise CommandError(f'{flag}={text:.60}: {e.strerror}.') from e
  return path


def expanded(text: str, flag: str) -> pathlib.Path:
  """A path with ~ replaced by the home folder.

  Args:
    text: The path.
    flag: The flag that names it, for the error's text.

  Returns:
    The path.

  Raises:
    CommandError: If the home folder is unknown, or the path is an address such
      as gs://bucket/folder.
  """
  from fedjax_het.files import check_local

  try:
    check_local(text, flag)
  except ValueError as e:
    raise CommandError(str(e)) from e
  try:
    return pathlib.Path(text).expanduser()
  except RuntimeError as e:
    raise CommandError(
        f'{flag}={text}: the home folder of {text.split("/")[0]} is not known.'
    ) from e


def parse_flags(argv: Sequence[str]) -> list[str]:
  """absl's flags parser with one line per error, which allows only flags.

  It hides the information that JAX logs while it looks for accelerators.
  """
  absl_logging.set_verbosity(absl_logging.WARNING)
  try:
    rest = read_flags(argv)
  except CommandError as e:
    fail(e)
  if len(rest) > 1:
    fail(f'Unexpected argument {rest[1]!r}; options look like --out=DIR.')
  return rest
