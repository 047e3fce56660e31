"""Wheel and sdist: their contents, and a run outside the checkout."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.launch.test_first_minutes import ASKED_COMMANDS
from tests.test_site import load_file

ROOT = pathlib.Path(__file__).resolve().parents[1]
STUBS = {f'fedjax_het/{name}/__init__.py' for name in ('configs', 'launch')}
# Prints `fedjax-het NAME --help` for each argument, and imports but once.
HELP = '''
import os, sys
from fedjax_het.launch import cli
for name in sys.argv[1:]:
  if not os.fork():
    sys.argv = ['fedjax-het', name, '--help']
    sys.exit(cli.main())
  assert os.wait()[1] == 0, name
'''
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
  """Installs from pip's index; skips the test without network."""
  done = call(
      python, '-m', 'pip', 'install', '-q', '--retries=1', *what,
      cwd='/', check=False,
  )  # fmt: skip
  if done.returncode and (match := _NO_NETWORK.search(done.stderr)):
    pytest.skip(f'packages cannot be downloaded: {match[0]}')
  assert done.returncode == 0, done.stderr


def borrow_packages(python):
  """Lets an environment import what this one has, but for the checkout.

  A path in a .pth file comes after the environment's own packages, and .pth
  files there, such as that of an editable installation, are not read.
  """
  (own,) = python.parents[1].glob('lib/*/site-packages')
  names = 'site-packages', 'dist-packages'
  ours = [path for path in sys.path if path.endswith(names)]
  (own / 'borrowed.pth').write_text('\n'.join(ours) + '\n')


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  """(Python of a new environment, sdist, wheel built from the sdist)."""
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


def metadata(folder, monkeypatch):
  """The arguments that a folder's setup.py passes to `setup`."""
  setuptools = pytest.importorskip('setuptools')
  said = {}
  monkeypatch.setattr(setuptools, 'setup', said.update)
  monkeypatch.chdir(folder)
  code = compile((folder / 'setup.py').read_text(), 'setup.py', 'exec')
  exec(code, dict(__file__=str(folder / 'setup.py')))
  return said


@pytest.mark.parametrize(
    'line', ['', 'repository-code: "https://github.com/a/b/"']
)
def test_all_addresses_follow_from_one_line(line, tmp_path, monkeypatch):
  (tmp_path / 'fedjax_het').mkdir()
  files = 'README.md', 'setup.py', 'CITATION.cff', 'fedjax_het/__init__.py'
  for name in files:
    shutil.copy(ROOT / name, tmp_path / name)
  citation = (tmp_path / 'CITATION.cff').read_text() + f'{line}\n'
  (tmp_path / 'CITATION.cff').write_text(citation)
  address = line and 'https://github.com/a/b'
  said = metadata(tmp_path, monkeypatch)
  urls, text = said['project_urls'], said['long_description']
  assert all(url.startswith(address) for url in urls.values())
  assert bool(urls) == bool(line)
  assert not re.search(r'\]\((?!https?://)', text)
  kept = f'[Tutorial]({address}/blob/HEAD/docs/tutorial.md)' in text
  pictured = f']({address}/raw/HEAD/docs/images/round.svg)' in text
  assert kept == pictured == bool(line)
  hooks = load_file(ROOT / 'docs' / 'site_hooks.py')
  monkeypatch.setattr(hooks, 'ROOT', tmp_path)
  assert hooks.repository() == address
  nbformat = pytest.importorskip('nbformat')
  pytest.importorskip('nbclient')
  run = load_file(ROOT / 'colabs' / 'run.py')
  stored = nbformat.read(ROOT / 'colabs' / 'quickstart.ipynb', as_version=4)
  before = stored.cells[0].source
  badge = 'google.com/github/a/b/blob/main/colabs/quickstart.ipynb'
  for _ in range(2):  # A second time changes nothing.
    run.with_badge(stored, 'quickstart.ipynb', citation)
    assert stored.cells[0].source.count(badge) == bool(line)
  run.with_badge(stored, 'quickstart.ipynb', '')
  assert stored.cells[0].source == before


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
  data = {'py.typed', 'experiment/reference_speeds.json'}
  assert code == expected | {f'fedjax_het/{name}' for name in data}
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
  """And so does what is installed from the sdist."""
  python, sdist, wheel = built
  pip_install(python, '--no-deps', wheel)
  borrow_packages(python)
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
  # The library's own configs and tables are found, too.
  config = '--config=configs/fedin.py:quick'
  shown = call(command, 'train', config, '--print_config', cwd=tmp_path)
  assert '"num_rounds": 2' in shown.stdout
  wrong = call(command, 'sweep', '--table=none', cwd=tmp_path, check=False)
  assert wrong.returncode == 2 and 'fedin_v2_table1' in wrong.stderr
  helped = call(python, '-c', HELP, *ASKED_COMMANDS, cwd=tmp_path).stdout
  for name in ASKED_COMMANDS:
    assert f'fedjax-het {name}' in helped, name
  assert 'python -m' not in helped

  # The sdist, in place of the wheel.
  pip_install(
      python, '--no-deps', '--no-build-isolation', '--force-reinstall', sdist
  )
  (origin,) = python.parents[1].glob('lib/*/site-packages/*/direct_url.json')
  assert sdist.name in origin.read_text()
  done = call(command, 'train', '--config=fedin:quick', cwd=tmp_path)
  assert done.stdout.splitlines()[-1].startswith('Report: runs/')
