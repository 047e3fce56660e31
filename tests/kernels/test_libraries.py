"""The only module that knows the needs of a library of convolutions."""

import contextlib
import pathlib

import jax
import pytest

import fedjax_het
from fedjax_het.kernels import libraries


def refuse():
  raise ValueError("conv_backend='other' is not possible: it is not here.")


@pytest.fixture
def other(monkeypatch):
  library = libraries.LIBRARIES['onednn']._replace(
      title='Other', why_not=lambda: 'it is not here', check=refuse
  )
  monkeypatch.setitem(libraries.LIBRARIES, 'other', library)


def test_a_registered_library_is_asked(other):
  assert libraries.why_not('other') == 'it is not here'
  with pytest.raises(ValueError, match='it is not here'):
    libraries.check('other')
  assert libraries.uncacheable('other') == 'Other'


def test_xla_needs_nothing():
  assert libraries.why_not('xla') is libraries.uncacheable('xla') is None
  libraries.check('xla')
  assert isinstance(libraries.allowed_cache('xla'), contextlib.nullcontext)


def test_the_cache_is_off_where_programs_cannot_be_stored(other):
  folder = jax.config.jax_compilation_cache_dir
  with libraries.allowed_cache('other'):
    assert jax.config.jax_compilation_cache_dir is None
  assert jax.config.jax_compilation_cache_dir == folder


def test_nothing_else_asks_for_a_librarys_name():
  root = pathlib.Path(fedjax_het.__file__).parent
  asking = [
      path.name
      for path in root.rglob('*.py')
      if "== 'onednn'" in (text := path.read_text())
      or 'kernels.onednn import' in text
      or 'kernels import onednn' in text
  ]
  assert asking == ['libraries.py']
