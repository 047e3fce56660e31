"""Python files that users write: configs and results tables."""

import importlib.util
import os
import pathlib
import sys
from types import ModuleType
from typing import Any

from .terminal import line

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def load(path: str | pathlib.Path, function: str) -> ModuleType:
  """Imports a file as a module; converts errors to one line.

  Args:
    path: The file. It can import files beside it. In a checkout it can `import
      configs` of the library; `import fedjax_het.configs` works everywhere.
    function: Name of a function that it must have.

  Returns:
    The module.

  Raises:
    ValueError: If it is not a Python file, fails, or lacks the function.
  """
  # Dataclasses, which linen modules are, look their module up by its name. It
  # is the path, as another module may have the file's own name.
  name = os.path.realpath(path)
  folders = [str(_ROOT)] if (_ROOT / 'fedjax_het').is_dir() else []
  # At the end, so that no file of a user hides a module of a library.
  for folder in (os.path.dirname(name), *folders):
    if folder not in sys.path:
      sys.path.append(folder)
  spec = importlib.util.spec_from_file_location(name, path)
  if spec is None:
    raise ValueError(f'{path} is no Python file.')
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  try:
    spec.loader.exec_module(module)
  except SyntaxError as e:
    where = f', line {e.lineno}' if e.lineno else ''
    raise ValueError(f'{path}{where}: {e.msg}.') from e
  except (Exception, SystemExit) as e:
    raise ValueError(f'{path}: {_text(e)}') from e
  if not callable(getattr(module, function, None)):
    raise ValueError(f'{path} has no function {function}.')
  return module


def call(module: ModuleType, function: str, *args: str) -> Any:
  """Calls a function of a module from `load`.

  Args:
    module: The module.
    function: Name of the function.
    *args: Its arguments.

  Returns:
    Its value.

  Raises:
    ValueError: If it fails; its own ValueErrors pass unchanged.
  """
  try:
    return getattr(module, function)(*args)
  except ValueError:
    raise
  except (Exception, SystemExit) as e:
    # The usual cause is an entry that a locked config does not have.
    raise ValueError(f'{module.__file__}: {_text(e)}') from e


def _text(error: BaseException) -> str:
  """An error's text, after the error's type if the text needs it."""
  from fedjax_het.renamed import new_name_in

  plain = (AttributeError, ImportError, KeyError, NameError, TypeError)
  kind = '' if isinstance(error, plain) else f'{type(error).__name__}: '
  text = line(error)
  return new_name_in(text) or kind + text
