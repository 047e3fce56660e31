"""The tasks that `benchmarks.accelerator` runs in child processes.

Arguments and results can be stored as JSON; a result is a dict. If it has a
`status`, this is 'skipped' or 'partial', and `error` says why.
"""

from collections.abc import Mapping
import importlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax

from benchmarks import common, programs
from benchmarks import memory as memory_lib
from benchmarks.accelerator import forms
from benchmarks.workloads import WORKLOADS
from benchmarks.workloads.base import Case, torch
from fedjax_het.kernels.auto import Choice, auto_choice, using_choice

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_POLL = 0.02
# Seconds between interrupting and killing a run.
_GRACE = 20.0


def device() -> dict[str, Any]:
  """The device that JAX computes on, the machine and the versions."""
  found = jax.devices()
  return dict(
      platform=found[0].platform,
      kind=found[0].device_kind,
      devices=len(found),
      machine=common.machine(),
  )


def run_quick(name: str) -> dict[str, Any]:
  """Runs the `quick` variant of an algorithm, with products in float32."""
  from fedjax_het import experiment

  config = importlib.import_module(f'configs.{name}').get_config('quick')
  if 'plan' in config.algorithm:
    # Measured costs, and so FeDepth's stages, depend on the backend.
    config.algorithm.plan = 'paper'
  with (
      tempfile.TemporaryDirectory() as folder,
      jax.default_matmul_precision('float32'),
  ):
    experiment.run(config, folder)
    rows = _lines(pathlib.Path(folder, 'metrics.jsonl'))
  return dict(
      rows=rows,
      jax=jax.__version__,
      device=jax.devices()[0].device_kind,
  )


def grid_cell(family: str, form, quick: bool) -> dict[str, Any]:
  """One cell of the grid, see `forms.measure_cell`."""
  return forms.measure_cell(family, forms.Form(*form), quick)


def _case(name: str, scale: str) -> Case:
  workload, _, case = name.partition('/')
  return WORKLOADS[workload].make(case, scale)


def library_form(
    case: str, form: str, scale: str, choice=None
) -> dict[str, Any]:
  """Times rounds of a workload by the library.

  Args:
    case: 'workload/case' of `benchmarks.workloads`.
    form: The backend.
    scale: Scale of the case.
    choice: The row of `kernels.auto` to use, as a list; None for the device's.

  Returns:
    images_per_second, compile_seconds, megabytes.
  """
  made = _case(case, scale)
  row = auto_choice() if choice is None else Choice(*choice)
  with using_choice(row):
    program = programs.library(made.task(), form, made.num_images)
    return _timed(program, program.call, scale)


def torch_form(
    case: str, form: str, scale: str, accelerated: bool
) -> dict[str, Any]:
  """Times the same training in PyTorch; JAX is on the CPU and computes nothing.

  Args:
    case: As in `library_form`.
    form: The name of a reference.
    scale: Scale of the case.
    accelerated: Whether it runs on the accelerator instead of the CPU.

  Returns:
    images_per_second, megabytes.
  """
  if torch is None:
    return _skipped('PyTorch is not installed')
  if accelerated and not torch.cuda.is_available():
    return _skipped('PyTorch sees no accelerator')
  made = _case(case, scale)
  wait = torch.cuda.synchronize if accelerated else lambda: None
  if accelerated:
    # As JAX's default: TF32 if the device has it.
    torch.set_float32_matmul_precision('high')
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.set_default_device('cuda')
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
  reference = made.references[form]
  program = reference.make(reference.steps)

  def call():
    program.call()
    wait()

  result = _timed(program, call, scale)
  if accelerated:
    result['megabytes'] = torch.cuda.max_memory_allocated() / 2**20
  return result


def _timed(program: programs.Program, call, scale: str) -> dict[str, Any]:
  seconds = forms.seconds_per_call(call, 1.0 if scale == 'full' else 0.05)
  return dict(
      images_per_second=program.num_images / seconds,
      compile_seconds=program.compile_seconds,
      megabytes=program.megabytes,
  )


def _skipped(why: str) -> dict[str, Any]:
  return dict(status='skipped', error=why)


def cohort_memory(name: str, cohort: int, clients: int) -> dict[str, Any]:
  """Peak memory of rounds of small clients, in MB.

  Args:
    name: A key of `ALGORITHMS`.
    cohort: Clients per round.
    clients: Number of all clients.

  Returns:
    'host': peak resident memory of the process; 'xla': planned memory of the
    round; 'device': the allocator's peak on the device, None if unknown.
  """
  found = memory_lib.measure(name, cohort, clients)
  stats = jax.local_devices()[0].memory_stats() or {}
  peak = stats.get('peak_bytes_in_use')
  return dict(
      host=found['peak'],
      xla=found['xla'],
      device=None if peak is None else peak / memory_lib.MEGABYTE,
  )


def first_round(config: str, empty: bool, folder: str) -> dict[str, Any]:
  """Seconds from the start of `launch.train` to the first round's line.

  Args:
    config: Its config, with variants.
    empty: Whether to empty the cache of compiled programs first.
    folder: Folder of the run and the cache.

  Returns:
    Seconds of a run of one round: 'first_round', until its line is written, and
    'whole', until the process ends.
  """
  place = pathlib.Path(folder)
  cache, workdir = place / 'cache', place / 'run'
  for path in (cache, workdir) if empty else (workdir,):
    shutil.rmtree(path, ignore_errors=True)
  env = {k: v for k, v in os.environ.items()
         if k != 'JAX_COMPILATION_CACHE_DIR'}  # fmt: skip
  metrics, first = workdir / 'metrics.jsonl', None
  begin = time.perf_counter()
  with subprocess.Popen(
      [
          sys.executable, '-m', 'launch.train', f'--config={config}',
          '--config.num_rounds=1', f'--workdir={workdir}',
      ],
      cwd=_ROOT,
      stdout=subprocess.DEVNULL,
      env={**env, 'XDG_CACHE_HOME': str(cache)},
  ) as run:  # fmt: skip
    while run.poll() is None:
      rounds = (line['split'] == 'train' for line in _lines(metrics))
      if first is None and any(rounds):
        first = time.perf_counter() - begin
      time.sleep(_POLL)
  whole = time.perf_counter() - begin
  if run.returncode:
    raise RuntimeError(f'launch.train ended with code {run.returncode}')
  return dict(first_round=first or whole, whole=whole)


def _lines(path: pathlib.Path) -> list[Mapping[str, Any]]:
  """The complete lines of a metrics.jsonl; [] if there is no file."""
  if not path.is_file():
    return []
  return [json.loads(line) for line in path.read_text().split('\n')[:-1]]


def table_cell(
    table: str,
    scale: str,
    row: str,
    column: str,
    data_dir: str | None,
    folder: str,
    seconds: float,
) -> dict[str, Any]:
  """Runs a cell of a results table for a limited time.

  Args:
    table: Name of the table.
    scale: One of its scales.
    row: A row, as `launch.sweep` names it.
    column: A column.
    data_dir: Folder of the data sets; None if the scale needs none.
    folder: Folder of results and runs; an interrupted run is resumed.
    seconds: The time limit.

  Returns:
    rounds (done), round_seconds (their median), accuracy (of the last
    evaluation); the status is 'partial' if the run was interrupted.
  """
  place = pathlib.Path(folder)
  command = [
      sys.executable, '-m', 'launch.sweep', f'--table={table}',
      f'--scale={scale}', f'--rows={row}', f'--cols={column}', '--seeds=1',
      f'--out={place / "results"}', f'--workdirs={place / "runs"}',
  ]  # fmt: skip
  if data_dir is not None:
    command.append(f'--data_dir={pathlib.Path(data_dir).absolute()}')
  with subprocess.Popen(
      command, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
      text=True,
  ) as run:  # fmt: skip
    ended = False
    try:
      _, errors = run.communicate(timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
      ended, errors = True, _interrupt(run)
  if run.returncode and not ended:
    words = errors.strip().splitlines() or [f'code {run.returncode}']
    raise RuntimeError(words[-1])
  lines = [  # [] if the run was interrupted while it compiled.
      line
      for path in place.glob('runs/**/metrics.jsonl')
      if path.parent.name != 'checkpoints'
      for line in _lines(path)
  ]
  rounds = [line for line in lines if line['split'] == 'train']
  tests = [line for line in lines if line['split'] == 'test']
  result = dict(
      rounds=len(rounds),
      round_seconds=_median([line['seconds'] for line in rounds]),
      accuracy=tests[-1]['accuracy'] if tests else None,
  )
  if ended and run.returncode:
    return dict(result, status='partial', error='the time was over')
  return result


def _interrupt(run: subprocess.Popen) -> str:
  """Interrupts a process, kills it if it takes long; returns its messages."""
  run.send_signal(signal.SIGINT)
  try:
    return run.communicate(timeout=_GRACE)[1]
  except subprocess.TimeoutExpired:
    run.kill()
    return run.communicate()[1]


def _median(numbers: list[float]) -> float | None:
  return sorted(numbers)[len(numbers) // 2] if numbers else None
