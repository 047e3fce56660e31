"""Virtual environments of the peers, one per peer, in a cache folder."""

import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

# {peer: requirements}. 'torch' becomes the version that runs here; 'torch==='
# selects the registry's own build of it, which torchvision needs. The last
# release of fedjax calls `jax.tree_map`, which later versions of jax lack.
REQUIREMENTS = {
    'flwr': ('flwr[simulation]', 'torch'),
    'pfl': ('pfl', 'torch'),
    'fluke': ('fluke-fl', 'torch==='),
    'fedjax': (
        'fedjax', 'jax==0.4.28', 'jaxlib==0.4.28', 'dm-haiku==0.0.12',
        'optax==0.2.2', 'numpy<2', 'scipy<1.14',
    ),
}  # fmt: skip
_DONE = 'installed.json'


class CannotInstall(Exception):
  """A peer cannot be installed; the message is what pip printed."""


def folder() -> pathlib.Path:
  """`fedjax_het/peers` in `$XDG_CACHE_HOME`, by default `~/.cache`."""
  parent = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(parent) / 'fedjax_het' / 'peers'


def requirements(peer: str) -> list[str]:
  """The packages to install for a peer."""
  try:
    # Leaves the local version, such as +cpu, to pip.
    version = importlib.metadata.version('torch').partition('+')[0]
  except importlib.metadata.PackageNotFoundError:
    version = None

  def exact(name):
    if name not in ('torch', 'torch==='):
      return name
    equal = '===' if name.endswith('===') else '=='
    return f'torch{equal}{version}' if version else 'torch'

  return [exact(name) for name in REQUIREMENTS[peer]]


def _what_pip_said(text: str) -> str:
  """The errors in pip's output or its last line, at most 500 characters."""
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  errors = [line for line in lines if line.lower().startswith('error')]
  said = ' '.join(errors or lines[-1:]) or 'nothing'
  return re.sub(r'\s+', ' ', said)[:500]


def find(peer: str, root: pathlib.Path) -> dict[str, object] | None:
  """The environment of a peer, see `make`; None if it has not been made."""
  path = root / peer / _DONE
  try:
    found = json.loads(path.read_text())
  except (OSError, ValueError):
    return None
  if found.get('requirements') != requirements(peer):
    return None
  return found


def make(
    peer: str, root: pathlib.Path, pip_options: tuple[str, ...] = ()
) -> dict[str, object]:
  """Makes the environment of a peer unless it exists.

  Args:
    peer: A key of `REQUIREMENTS`.
    root: Folder of all environments.
    pip_options: Additional options of `pip install`.

  Returns:
    'python', its interpreter; 'versions' {package: version}; 'requirements'.

  Raises:
    CannotInstall: If pip fails; the message is its output.
  """
  found = find(peer, root)
  if found is not None:
    return found
  place = root / peer
  shutil.rmtree(place, ignore_errors=True)
  place.parent.mkdir(parents=True, exist_ok=True)
  wanted = requirements(peer)
  made = subprocess.run(
      [sys.executable, '-m', 'venv', str(place)],
      capture_output=True, text=True,
  )  # fmt: skip
  if made.returncode:
    raise CannotInstall(_what_pip_said(made.stdout + made.stderr))
  python = str(next(place.glob('[bS]*/python*')))
  pip = [python, '-m', 'pip', '--no-input', '--disable-pip-version-check']
  done = subprocess.run(
      [*pip, 'install', '--quiet', *pip_options, *wanted],
      capture_output=True, text=True,
  )  # fmt: skip
  if done.returncode:
    shutil.rmtree(place, ignore_errors=True)
    raise CannotInstall(_what_pip_said(done.stderr))
  listed = subprocess.run(
      [*pip, 'list', '--format=json'],
      capture_output=True, text=True, check=True,
  )  # fmt: skip
  found = {
      'python': python,
      'requirements': wanted,
      'versions': {p['name']: p['version'] for p in json.loads(listed.stdout)},
  }
  (place / _DONE).write_text(json.dumps(found, indent=2) + '\n')
  return found
