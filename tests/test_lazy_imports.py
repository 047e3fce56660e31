"""`import fedjax_het` is quick; its names come with their first use."""

import pkgutil
import subprocess
import sys
import typing

import pytest

import fedjax_het as fh

# Ctrl-C while JAX is imported by what the argument names.
INTERRUPTED = """
import importlib.abc, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder(importlib.abc.MetaPathFinder):
  def find_spec(self, name, path, target=None):
    if name == 'jax':
      signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ['fedjax-het', *sys.argv[1:]]
from fedjax_het.launch import cli
cli.main()
"""


def _python(code: str, *args: str) -> subprocess.CompletedProcess:
  return subprocess.run(
      [sys.executable, '-c', code, *args], text=True, capture_output=True
  )


def test_the_import_leaves_jax_alone():
  done = _python(
      'import sys, fedjax_het as fh\n'
      'assert fh.__version__ and "run" in dir(fh)\n'
      'print(sorted({"jax", "flax", "matplotlib"} & set(sys.modules)))\n'
  )
  assert (done.stdout, done.stderr) == ('[]\n', '')


def test_every_name_is_there():
  assert all(getattr(fh, name) is not None for name in fh.__all__)
  assert fh.partition is fh.data.partition.partition
  assert typing.get_type_hints(fh.run)
  with pytest.raises(AttributeError, match="no attribute 'rum'"):
    fh.rum  # noqa: B018


def test_every_subpackage_is_an_attribute():
  """All but the folders that a checkout has at the top level."""
  found = {found.name for found in pkgutil.iter_modules(fh.__path__)
           if found.ispkg} - {'configs', 'launch'}  # fmt: skip
  done = _python(
      'import sys, fedjax_het as fh\n'
      'for name in sys.argv[1:]:\n'
      '  assert getattr(fh, name).__name__ == f"fedjax_het.{name}"\n',
      *found,
  )
  assert found and not done.returncode, done.stderr


@pytest.mark.parametrize(
    'args', [['train'], ['sweep', '--table=digits', '--scale=quick']]
)
def test_ctrl_c_during_imports_is_one_line(args):
  done = _python(INTERRUPTED, *args)
  assert (done.returncode, done.stderr) == (130, '\nInterrupted.\n')
