"""Model constructors by import path, such as 'my_file:net'."""

from collections.abc import Callable
import functools
import importlib
import importlib.util
import pathlib
from typing import Any


def is_path(name: Any) -> bool:
  """Whether a model's name is an import path, MODULE:FUNCTION."""
  return isinstance(name, str) and ':' in name


def function_of(name: str) -> str:
  """The function's name, the last part of an import path."""
  return name.rpartition(':')[2]


def find(name: str) -> Callable[..., Any]:
  """Imports a constructor.

  Args:
    name: 'package.module:function' or 'folder/file.py:function'. A module that
      is a file in the current folder need not be on the path.

  Returns:
    The function.

  Raises:
    ValueError: If it cannot be imported; in one line that names it.
  """
  place, _, function = name.partition(':')
  file = pathlib.Path(place if place.endswith('.py') else f'{place}.py')
  try:
    if not place or not function:
      raise ImportError('it must be MODULE:FUNCTION or FILE.py:FUNCTION')
    if file.is_file():
      module = _load(file.resolve())
    elif place.endswith('.py'):
      raise ImportError(f'{place} is no file')
    else:
      module = importlib.import_module(place)
    found = getattr(module, function, None)
    if not callable(found):
      raise ImportError(f'{place} has no function {function}')
    return found
  except Exception as e:  # Whatever the user's code does.
    text = ' '.join(str(e).split())
    raise ValueError(
        f'Model {name!r} cannot be imported ({type(e).__name__}: {text:.200}).'
    ) from e


@functools.cache
def _load(path: pathlib.Path):
  """A file as a module; always the same one, so that models stay equal."""
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module
