"""Wheel and sdist: what they hold, and a run far away from the checkout."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
STUBS = {f'fedjax_het/{name}/__init__.py' for name in ('configs', 'launch')}
_NO_NETWORK = re.compile(
    r'No matching distribution|NewConnectionError|ConnectTimeout|ProxyError|'
    r'Temporary failure in name resolution|Connection (refused|reset)'
)


def call(*args, cwd, check=True):
  """Runs a program without the settings of the tests."""
  odd = ('PYTHONPATH', 'JAX_', 'XLA_FLAGS', 'PIP_NO_')
  done = subprocess.run(
      [str(arg) for arg in args],
      cwd=cwd,
      env={k: v for k, v in os.environ.items() if not k.startswith(odd)},
      capture_output=True,
      text=True,
      check=False,
  )
  assert done.returncode == 0 or not check, done.stdout + done.stderr
  return done


def pip_install(python, *what):
  """Installs from the index of pip; skips without network."""
  done = call(
      python, '-m', 'pip', 'install', '-q', '--retries=1', *what,
      cwd='/', check=False,
  )  # fmt: skip
  if done.returncode and (match := _NO_NETWORK.search(done.stderr)):
    pytest.skip(f'packages cannot be downloaded: {match[0]}')
  assert done.returncode == 0, done.stderr


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  """(Python of a new environment, sdist, wheel that was made of the sdist)."""
  folder = tmp_path_factory.mktemp('built')
  python = folder / 'venv' / 'bin' / 'python'
  call(sys.executable, '-m', 'venv', folder / 'venv', cwd=folder)
  pip_install(python, 'setuptools>=77')
  source, dist = folder / 'source', folder / 'dist'
  left_out = shutil.ignore_patterns(
      '.*', '__pycache__', '*.egg-info', 'build', 'dist', 'results', 'runs'
  )
  shutil.copytree(ROOT, source, ignore=left_out)
  code = f'import setuptools.build_meta as b; b.build_sdist({str(dist)!r})'
  call(python, '-c', code, cwd=source)
  (sdist,) = dist.glob('*.tar.gz')
  call(
      python, '-m', 'pip', 'wheel', sdist, '--no-deps', '--no-build-isolation',
      '-w', dist, cwd=folder,
  )  # fmt: skip
  (wheel,) = dist.glob('*.whl')
  return python, sdist, wheel


@pytest.mark.parametrize('folder', ['configs', 'launch', 'fedjax_het'])
def test_what_is_installed_imports_nothing_of_the_checkout(folder):
  """A wheel has no package `configs`: it is `fedjax_het.configs` there."""
  odd = re.compile(r'^\s*(from|import) (configs|launch|benchmarks)\b', re.M)
  for path in (ROOT / folder).rglob('*.py'):
    assert not odd.search(path.read_text()), path


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(built):
  _, sdist, wheel = built
  files = set(zipfile.ZipFile(wheel).namelist())
  code = {name for name in files if '.dist-info/' not in name}
  expected = {
      str(path.relative_to(ROOT))
      for path in (ROOT / 'fedjax_het').rglob('*.py')
  } | {
      f'fedjax_het/{path.relative_to(ROOT)}'
      for folder in ('configs', 'launch')
      for path in (ROOT / folder).rglob('*.py')
  }
  assert code == expected | {'fedjax_het/py.typed'}
  with zipfile.ZipFile(wheel) as archive:
    for stub in STUBS:
      assert b'__path__' not in archive.read(stub)
    (metadata,) = (name for name in files if name.endswith('/METADATA'))
    text = archive.read(metadata).decode()
  assert 'Requires-Dist: matplotlib\n' in text
  assert any(name.endswith('LICENSE') for name in files)
  with tarfile.open(sdist) as archive:
    names = {name.partition('/')[2] for name in archive.getnames()}
  assert names >= {'CHANGELOG.md', 'CITATION.cff', 'CONTRIBUTING.md', *STUBS}
  assert 'tests/test_packaging.py' in names


@pytest.mark.slow
def test_an_installed_wheel_runs_where_another_configs_folder_lies(
    built, tmp_path
):
  python, _, wheel = built
  pip_install(python, wheel)
  command = python.with_name('fedjax-het')
  for name in ('configs', 'launch'):
    (tmp_path / name).mkdir()
    (tmp_path / name / '__init__.py').write_text('raise RuntimeError("mine")')
  (tmp_path / 'mine.py').write_text(
      'from fedjax_het.configs import common\n\n\n'
      "def get_config(arg='quick'):\n"
      "  return common.get_config('fedin', arg)\n"
  )
  done = call(command, 'train', '--config=mine.py', '--workdir=w', cwd=tmp_path)
  assert done.stdout.splitlines()[-1] == 'Report: w/report.md'
  assert 'Unable to initialize backend' not in done.stderr
  assert (tmp_path / 'w' / 'curves.png').stat().st_size > 1000
  # What comes with the library is found, too, and so are its tables.
  for config in ('configs/fedin.py:quick', 'fedin:quick'):
    shown = call(
        command, 'train', f'--config={config}', '--print_config', cwd=tmp_path
    )
    assert '"num_rounds": 2' in shown.stdout
  wrong = call(command, 'sweep', '--table=none', cwd=tmp_path, check=False)
  assert wrong.returncode == 2 and 'fedin_v2_table1' in wrong.stderr
  helped = call(command, 'train', '--help', cwd=tmp_path)
  assert 'fedjax-het train' in helped.stdout
  assert 'python -m' not in helped.stdout
