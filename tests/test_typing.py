"""The public API is annotated; mypy checks `public_api.py` against it."""

import inspect

import pytest

import fedjax_het


def functions(value):
  """A function itself, or the public methods that a library class defines."""
  if inspect.isfunction(value):
    return [value]
  if not inspect.isclass(value):
    return []
  members = (
      getattr(member, '__func__', member)
      for name, member in vars(value).items()
      if not name.startswith('_')
  )
  return [
      member
      for member in members
      if inspect.isfunction(member)
      and member.__module__.startswith('fedjax_het')
  ]


@pytest.mark.parametrize('name', fedjax_het.__all__)
def test_the_public_api_is_annotated(name):
  for function in functions(getattr(fedjax_het, name)):
    signature = inspect.signature(function)
    bare = [
        p.name
        for p in signature.parameters.values()
        # A config has no static types.
        if p.annotation is p.empty and p.name not in ('self', 'cls', 'config')
    ]
    assert not bare, f'{function.__qualname__}: {bare}'
    assert signature.return_annotation is not signature.empty, function
