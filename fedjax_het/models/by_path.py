"""Model constructors by import path, such as 'my_file:net'."""

from collections.abc import Callable
import functools
import importlib
import importlib.util
import inspect
import pathlib
import re
import sys
from typing import Any

from fedjax_het.options import keyword_options


def is_path(name: Any) -> bool:
  """Whether a model's name is an import path, MODULE:FUNCTION."""
  return isinstance(name, str) and ':' in name


def title(name: str) -> str:
  """Maps an import path to a name: 'my_file:net' becomes 'my_file_net'."""
  place, _, function = name.partition(':')
  words = f'{place.removesuffix(".py")}:{function}'
  return re.sub(r'\W+', '_', words).strip('_')


def find(name: str) -> Callable[..., Any]:
  """Imports a constructor.

  Args:
    name: 'package.module:function' or 'folder/file.py:function'. A module that
      is a file in the current folder need not be on `sys.path`.

  Returns:
    The function.

  Raises:
    ValueError: If it cannot be imported, or cannot be called as
      `function(input_shape, num_classes, **options)`. The message is one line
      that names it.
  """
  try:
    found = imported(name)
    _check_call(found)
    return found
  except Exception as e:  # A user's code may raise any exception.
    text = ' '.join(str(e).split())
    raise ValueError(
        f'Model {name!r} cannot be used ({type(e).__name__}: {text:.200}).'
    ) from e


def imported(name: str) -> Callable[..., Any]:
  """Imports a function without a check of its parameters.

  Args:
    name: As for `find`.

  Returns:
    The function.

  Raises:
    Exception: Any exception of the module; an ImportError if the module or
      the function does not exist.
  """
  place, _, function = name.partition(':')
  file = pathlib.Path(place if place.endswith('.py') else f'{place}.py')
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


def _check_call(fn: Callable[..., Any]) -> None:
  """Raises TypeError unless `fn` has the parameters of a constructor."""
  if inspect.isclass(fn):
    raise TypeError('it is a class, not a function that returns a model')
  signature = inspect.signature(fn)
  try:
    signature.bind(None, None, **dict.fromkeys(keyword_options(fn)))
  except TypeError as e:
    raise TypeError(
        'it must take (input_shape, num_classes), and its options by keyword '
        f'alone, not {signature}'
    ) from e


@functools.cache
def _load(path: pathlib.Path):
  """Imports a file, only once, so that models built from it compare equal."""
  # Dataclasses, such as linen modules, look up their module by this name. It is
  # the path, because another module may have the file's own name.
  name = str(path)
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  try:
    spec.loader.exec_module(module)
  except BaseException:
    del sys.modules[name]
    raise
  return module
