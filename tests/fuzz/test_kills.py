"""Runs that are killed repeatedly at random end like an uninterrupted one.

A kill comes after a random number of operations on the workdir's files, or
after a random time. The first falls between the steps of writing a line, a copy
or a checkpoint, the second anywhere.
"""

import json
import os
import pathlib
import random
import signal
import sys
import time

import pytest

from tests.experiment.tiny_runs import without_seconds
from tests.fuzz import forks
from tests.fuzz.driver_config import DRIVERS, get_config

ROUNDS = 24
# Seconds after which a run counts as hanging, even on a slow machine.
HANG = 600
# File operations; a kill between two of them leaves a different state.
_OPERATIONS = (
    'open', 'os.rename', 'os.remove', 'os.mkdir', 'os.rmdir', 'os.truncate',
)  # fmt: skip


def _train(driver: str, workdir: str, last_operation: int | None) -> None:
  """Runs or resumes; kills itself after `last_operation` file operations."""
  left = last_operation

  def watch(event, args):
    nonlocal left
    if left is None or event not in _OPERATIONS:
      return
    if str(args[0]).startswith(workdir):
      left -= 1
      if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

  flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
  os.dup2(os.open(f'{workdir}.err', flags, 0o600), 2)
  import jax

  from fedjax_het import experiment

  jax.config.update('jax_disable_most_optimizations', True)
  jax.config.update('jax_compilation_cache_dir', f'{workdir}-xla')
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  sys.addaudithook(watch)
  experiment.run(get_config(f'{driver},{ROUNDS}'), workdir)


def _final(workdir: pathlib.Path) -> tuple[list, dict[str, int]]:
  """The rows of a finished run and the checksums of its last state."""
  notes = workdir / 'checkpoints' / str(ROUNDS) / 'notes' / 'metadata'
  sums = json.loads(notes.read_text())['checksums']
  return without_seconds(workdir / 'metrics.jsonl'), sums


def _kill_again_and_again(driver, folder, kills, seed):
  """Returns how many starts were killed, and the rounds done after each."""
  rng = random.Random(f'{driver}-{seed}')
  whole = folder / 'whole'
  process = forks.start(_train, driver, str(whole), None)
  process.join(HANG)
  assert process.exitcode == 0
  workdir, done, killed = folder / 'killed', [], 0
  # Share the compiled programs, so that kills hit the run, not the compiler.
  os.symlink(f'{whole}-xla', f'{workdir}-xla')
  starts = 0
  while killed < kills:
    starts += 1
    assert starts < 3 * kills
    by_file = rng.random() < 0.5
    count = rng.randint(1, 150) if by_file else None
    seconds = rng.uniform(0.0, 1.5)
    process = forks.start(_train, driver, str(workdir), count)
    if not by_file:
      _wait_for_lock(workdir, process)
      process.join(seconds)
      process.kill()
    process.join(HANG)
    assert process.exitcode in (0, -signal.SIGKILL)
    killed += process.exitcode == -signal.SIGKILL
    path = workdir / 'metrics.jsonl'
    done.append(path.read_bytes().count(b'"train"') if path.exists() else 0)
    if process.exitcode == 0:
      # The run ended before the kill; the next start has a new workdir.
      assert _final(workdir) == _final(whole)
      workdir = folder / f'killed{starts}'
      os.symlink(f'{whole}-xla', f'{workdir}-xla')
  process = forks.start(_train, driver, str(workdir), None)
  process.join(HANG)
  assert process.exitcode == 0
  assert _final(workdir) == _final(whole)
  for path in folder.glob('*.err'):
    assert 'Traceback' not in path.read_text()
  return killed, done


def _wait_for_lock(workdir, process):
  """Waits until the run has locked its workdir; before, it writes nothing."""
  end = time.monotonic() + 60
  size = workdir.joinpath('.lock')
  before = size.read_bytes() if size.exists() else b''
  while time.monotonic() < end and process.is_alive():
    if size.exists() and size.read_bytes() not in (b'', before):
      return
    time.sleep(0.005)


def test_two_kills(tmp_path):
  """The fast part: two kills of the synchronous driver."""
  killed, _ = _kill_again_and_again('synchronous', tmp_path, 2, seed=0)
  assert killed == 2


@pytest.mark.slow
@pytest.mark.parametrize('driver', DRIVERS)
def test_twenty_two_kills_of_a_driver(driver, tmp_path):
  killed, done = _kill_again_and_again(driver, tmp_path, 22, seed=1)
  print(f'{driver}: {killed} kills after {done} rounds')
  assert killed == 22
  assert len(set(done)) > 3  # The kills fell on different rounds.
