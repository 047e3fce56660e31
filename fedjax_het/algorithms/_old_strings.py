"""TEMPORARY: group options as the strings of constructors that take strings.

Delete this file, and its three lines in `__init__.py`, when `fedepth`,
`splitmix` and `heterofl` read `Group.options` themselves.
"""

import functools
import inspect

from fedjax_het.engine.needs import needs_of


def _listed(federation, option, separator):
  given = {
      group.name: group.options.get(option) for group in federation.groups
  }
  return separator.join(
      f'{name}:{value}' for name, value in given.items() if value is not None
  )


def _adapted(constructor, option, text_of, **more):
  """The constructor without its option `option`, which `text_of` makes."""

  @functools.wraps(constructor)
  def made(federation, **options):
    mine = {name: options.pop(name, default) for name, default in more.items()}
    text = text_of(federation, options, **mine)
    return constructor(federation, **{option: text}, **options)

  signature = inspect.signature(constructor)
  parameters = [p for n, p in signature.parameters.items() if n != option]
  parameters += [
      inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
      for name, default in more.items()
  ]
  made.__signature__ = signature.replace(parameters=parameters)
  made.needs = needs_of(constructor)
  return made


def budgets_text(federation, options=None):
  """'group:budget,...' of those that have one."""
  del options
  return _listed(federation, 'budget', ',')


def _rates(federation, options, levels):
  if not options.get('odds'):
    return _listed(federation, 'rate', ' ')
  letters = 'abcdefghijklmnopqrstuvwxyz'
  return ' '.join(f'{k}:{v}' for k, v in zip(letters, levels, strict=False))


def adapted(name, constructor):
  """The constructor as it will be."""
  if name == 'fedepth':
    return _adapted(constructor, 'budgets', budgets_text)
  if name == 'splitmix':
    return _adapted(
        constructor, 'budgets', lambda f, o: _listed(f, 'budget', ' ')
    )
  return _adapted(constructor, 'rates', _rates, levels=())
