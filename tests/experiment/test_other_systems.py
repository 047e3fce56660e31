"""Runs without POSIX modules and functions, as on Windows."""

import subprocess
import sys
import textwrap

import jax
import pytest

from tests.test_docs import ROOT

pytest.importorskip('filelock')
pytestmark = pytest.mark.slow

# Other libraries may need POSIX: modules are hidden from this package alone,
# and functions are deleted after the libraries are imported.
_TAKE_AWAY = '''
import asyncio, builtins, os, pathlib, signal, subprocess, sys, warnings
import jax, matplotlib.pyplot, optax, orbax.checkpoint, scipy.stats, sklearn
import tensorflow_datasets, tqdm, filelock

POSIX = {'fcntl', 'grp', 'pwd', 'resource', 'syslog', 'termios', 'tty'}
MINE = ('fedjax_het', 'launch', 'configs')
real_import = builtins.__import__

def guarded(name, globals=None, *args, **kwargs):
  mine = (globals or {}).get('__name__', '').split('.')[0] in MINE
  if mine and name.split('.')[0] in POSIX:
    raise ImportError(f'No module named {name!r}')
  return real_import(name, globals, *args, **kwargs)

builtins.__import__ = guarded
for module, names in (
    (os, 'fork geteuid getgid getpgid getuid killpg sched_getaffinity '
         'setsid statvfs sysconf uname wait3'),
    (signal, 'SIGALRM SIGHUP SIGKILL SIGPIPE SIGUSR1 alarm pause '
             'pthread_sigmask setitimer'),
):
  for name in names.split():
    delattr(module, name)
real_read = pathlib.Path.read_text
pathlib.Path.read_text = lambda self, *args, **kwargs: (
    missing() if str(self).startswith('/proc') else
    real_read(self, *args, **kwargs))

def missing():
  raise FileNotFoundError('no /proc')

# A file without an encoding is one of cp1252 there.
warnings.filterwarnings(
    'error', category=EncodingWarning, module='(fedjax_het|launch|configs)')
'''


def other_system(code, folder):
  """Runs code in a Python without POSIX modules and functions."""
  script = _TAKE_AWAY + textwrap.dedent(code)
  done = subprocess.run(
      [sys.executable, '-X', 'warn_default_encoding', '-c', script],
      cwd=folder,
      env={
          'PYTHONPATH': str(ROOT), 'PYTHONIOENCODING': 'cp1252',
          'JAX_PLATFORMS': 'cpu', 'HOME': str(folder),
          'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
          'JAX_COMPILATION_CACHE_DIR': jax.config.jax_compilation_cache_dir,
      },
      capture_output=True,
      encoding='cp1252',
      check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def test_the_command_trains_and_its_run_is_loaded(tmp_path):
  said = other_system(
      """
      from fedjax_het.launch import train
      sys.argv = ['train', '--config=fedin:quick', '--workdir=w']
      try:
        train.run()
      except SystemExit as e:
        assert not e.code, e.code
      import fedjax_het
      print(len(fedjax_het.load_run('w').rows))
      """,
      tmp_path,
  )
  assert 'Report: w' in said
  assert int(said.splitlines()[-1]) > 1


def test_every_module_imports_and_a_workdir_is_of_one_process(tmp_path):
  other_system(
      """
      import importlib, pkgutil
      import fedjax_het
      for found in pkgutil.walk_packages(fedjax_het.__path__, 'fedjax_het.'):
        # Programs define flags of the same names.
        if not found.name.startswith('fedjax_het.launch.'):
          importlib.import_module(found.name)
      from fedjax_het.launch import sweep, train
      from fedjax_het.experiment import footprint, workdir
      assert workdir.fcntl is None and footprint.available_bytes() is None
      folder = pathlib.Path('w')
      for _ in range(2):
        with workdir.lock(folder):
          try:
            with workdir.lock(folder):
              raise SystemExit('locked twice')
          except ValueError as e:
            assert f'in use by process {os.getpid()};' in str(e), e
      """,
      tmp_path,
  )
