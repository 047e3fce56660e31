"""One row of `benchmarks.peers`: a program on a task, in its own process."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from benchmarks import peak
from benchmarks.peers import environments, meter
from fedjax_het.experiment import tuned

ROOT = pathlib.Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.5
# Keeps peers from sending usage statistics.
_QUIET = dict(
    FLWR_TELEMETRY_ENABLED='0',
    RAY_USAGE_STATS_ENABLED='0',
    WANDB_MODE='disabled',
)
_LIBRARY = 'benchmarks.peers.library'


class Program(NamedTuple):
  """A program that runs a task.

  Attributes:
    module: The module that is started with `python -m`.
    peer: Key of `environments.REQUIREMENTS`; None for this environment.
    overrides: Config entries, for the library's forms by hand.
    device_per_core: Whether JAX has a device per core, for the same forms.
    algorithms: Methods that it has; None for all.
    tuned: Whether the library uses what `fedjax-het tune` has measured.
  """

  module: str
  peer: str | None = None
  overrides: dict[str, str] = {}
  device_per_core: bool = False
  algorithms: tuple[str, ...] | None = None
  tuned: bool = False


def _library(device_per_core=False, **overrides) -> Program:
  return Program(_LIBRARY, None, overrides, device_per_core)


# The library with default options, the baseline, and the peers.
DEFAULT, TUNED, YARDSTICK = 'default', 'tuned', 'torch'
# What runs a second time, with the programs that the first has compiled.
TWICE = DEFAULT, TUNED
_PEERS = {
    name: Program(f'benchmarks.peers.with_{name}', name, algorithms=('fedavg',))
    for name in environments.REQUIREMENTS
}
_BY_HAND = {
    'cpu': {
        'onednn': _library(backend='map', conv_backend='onednn'),
        'shard_map': _library(True, backend='shard_map'),
        'shard_map-onednn': _library(
            True, backend='shard_map', conv_backend='onednn'
        ),
    },
    'other': {
        'map': _library(backend='map'),
        'vmap': _library(backend='vmap'),
    },
}


def by_hand(platform: str) -> dict[str, Program]:
  """The library's forms by hand on 'cpu', 'gpu' or 'tpu'."""
  return _BY_HAND['cpu' if platform == 'cpu' else 'other']


def programs(platform: str) -> dict[str, Program]:
  """All programs, in the order in which they are run.

  PyTorch and the peers compute on the CPU; on other platforms only the library
  is run.
  """
  others = {YARDSTICK: Program('benchmarks.peers.eager'), **_PEERS}
  return {
      **(others if platform == 'cpu' else {}),
      DEFAULT: _library(),
      **({TUNED: _library()._replace(tuned=True)} if platform == 'cpu' else {}),
      **by_hand(platform),
  }


class Failed(Exception):
  """A program cannot be measured; the message says why."""


def _environment(cache: str, speeds: str | None) -> dict[str, str]:
  """Variables of a child.

  Args:
    cache: Folder of compiled programs.
    speeds: Folder of what `fedjax-het tune` has measured; None for none.

  Returns:
    All variables.
  """
  env = dict(os.environ)
  env.pop('JAX_COMPILATION_CACHE_DIR', None)
  env.pop('FEDJAX_HET_TUNED', None)
  if speeds is not None:
    env['FEDJAX_HET_TUNED'] = speeds
  path = os.pathsep.join(filter(None, (str(ROOT), env.get('PYTHONPATH'))))
  return env | _QUIET | dict(
      PYTHONPATH=path, XDG_CACHE_HOME=cache, **{meter.STARTED: str(time.time())}
  )


def _watch(child: subprocess.Popen, limit: float) -> tuple[dict, bool]:
  """Waits for a child for at most `limit` seconds, then kills it.

  Returns:
    {process: peak bytes} of the child and its descendants, and whether the
    child was killed.
  """
  peaks: dict[int, int] = {}
  ends = time.monotonic() + limit
  try:
    while child.poll() is None and time.monotonic() < ends:
      peak.note_peaks(child.pid, peaks)
      try:
        child.wait(_POLL_SECONDS)
      except subprocess.TimeoutExpired:
        pass
    return peaks, child.poll() is None
  finally:
    if child.poll() is None:
      for pid in (*peak.descendants(child.pid), child.pid):
        try:
          os.kill(pid, signal.SIGKILL)
        except OSError:
          pass
      child.wait()


def run_child(
    python: str,
    module: str,
    task: pathlib.Path,
    cache: str,
    limit: float,
    speeds: str | None = None,
) -> dict[str, Any]:
  """Runs a program on a task.

  Args:
    python: The interpreter.
    module: The module that it runs.
    task: The task's file.
    cache: Folder of compiled programs.
    limit: Largest number of seconds.
    speeds: See `speeds_of`.

  Returns:
    The program's result, with the peak memory of all of its processes.

  Raises:
    Failed: If the program fails or is too slow; the message has its last line.
  """
  out = pathlib.Path(meter.read(str(task)).out)
  out.unlink(missing_ok=True)
  with tempfile.TemporaryFile('w+') as log:
    child = subprocess.Popen(
        [python, '-m', module, str(task)],
        cwd=ROOT, env=_environment(cache, speeds), stdout=log, stderr=log,
        text=True,
    )  # fmt: skip
    peaks, late = _watch(child, limit)
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()]
  result = json.loads(out.read_text()) if out.is_file() else {}
  if late and len(result.get('round_seconds', ())) < 2:
    raise Failed(f'stopped after {limit:.0f} s, before the end of round 2')
  if not late and (child.returncode or not result):
    raise Failed(f'failed: {"".join(lines[-1:])[:300]}')
  if not result.get('round_seconds'):
    raise Failed('ended before the end of a round')
  peaks.pop(child.pid, None)
  result['peak_megabytes'] += sum(peaks.values()) / peak.MEGABYTE
  return result


def check(
    result: dict[str, Any], parameters: int, images: int, most: int
) -> None:
  """Raises Failed unless a program did the task's work.

  Args:
    result: From `run_child`.
    parameters: Number of parameters of the task's models.
    images: Images of a round, each once per epoch.
    most: The same if every client fills its last minibatch.
  """
  if result['parameters'] != parameters:
    raise Failed(
        f'its models have {result["parameters"]:,} parameters instead of '
        f'{parameters:,}'
    )
  for found in result['images']:
    if not images <= found <= most:
      raise Failed(
          f'it trains on {found:,} images a round instead of {images:,}'
      )


def summarise(result: dict[str, Any], images: int) -> dict[str, Any]:
  """Adds the speed of the fastest round after the first."""
  first, *later = result['round_seconds']
  seconds = min(later, default=None)
  return result | dict(
      first_round=first,
      seconds_per_round=seconds,
      images_per_second=images / seconds if seconds else None,
  )


def speeds_of(program: Program) -> str | None:
  """The folder of this machine's speeds, for a program that uses them."""
  if not program.tuned:
    return None
  if tuned.read() is None:
    raise Failed('this machine was not measured; `fedjax-het tune` does so')
  return str(tuned.table_path().parent)


def find_python(
    program: Program, root: pathlib.Path, install: bool
) -> tuple[str, dict[str, str]]:
  """The interpreter of a program and the versions in its environment."""
  if program.peer is None:
    return sys.executable, {}
  if not install and environments.find(program.peer, root) is None:
    raise Failed('not installed; it is in a run without --quick')
  try:
    made = environments.make(program.peer, root)
  except environments.CannotInstall as e:
    raise Failed(f'cannot be installed: {e}') from e
  return made['python'], made['versions']
