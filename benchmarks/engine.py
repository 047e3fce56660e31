"""Speed, compilation and memory of the engine, PyTorch and naive JAX.

  python -m benchmarks.engine [--workloads=a,b,...] [--forms=shard_map,PyTorch]
    [--quick] [--output=FILE]

Workloads; `--workloads` selects some, or a case such as `fedin/resnet10`:

  a, fedin: rounds of FedIN v2, ResNet10 to 26, 32x32x3, batch 16, Adam.
  b, fedepth: rounds of FeDepth by budget, PreResNet-20, batch 128, SGD.
  c, fedhe: a visit of FedHe's ten CNNs.
  d, simulation: the CIFAR-10 benchmark of simulators, 50 of 1,000 clients.
  e, many: ten thousand small clients in one cohort.

Forms take turns in one process. The minimum time of each counts, after a first
call that is not timed. Slow forms have fewer steps and repetitions.

  map, vmap: whole rounds of the library with that backend; 'auto' is one of
    them. shard_map: the same over two virtual devices, in a separate process.
    Only the first of several cases has `vmap`; quick runs have only 'auto'.
    ', oneDNN' means `config.conv_backend='onednn'`; it is omitted if oneDNN is
    unavailable, for models without convolutions, and in quick runs except for
    the simulators' model.
  PyTorch: one client after another, eagerly. PyTorch vmap: all clients of an
    architecture, by `torch.func` over stacked models. PyTorch FedAvg: epochs of
    the full model instead of FeDepth's stages. Omitted if PyTorch is not
    installed or the library does not run on a CPU.
  naive JAX: `vmap` of `scan` over native convolutions. Quick runs omit FedIN's,
    which compiles slowly.

`--forms` selects forms besides that of 'auto'; those with oneDNN belong to
their backend. With the full sizes, each case also says which form a run of a
hundred rounds takes by itself: by the speeds that `fedjax-het tune` has
measured here, and without these (`experiment.predict`).

The fraction of peak is the operations per second of training (three times the
matrix products of a forward pass), relative to large float32 products timed in
the same turns. Peak memory is XLA's planned memory of a round (arguments,
results and temporaries). For PyTorch it is the increase of resident memory of a
separate process; for two cohort sizes it is the peak of a separate process. Let
the machine be idle.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import json
import os
import pathlib

import jax
import numpy as np

from benchmarks import common, engine_table, memory, programs
from benchmarks.workloads import WORKLOADS
from benchmarks.workloads.base import BACKENDS, Case, torch
from fedjax_het.engine.mapping import resolve_backend
from fedjax_het.experiment import tuned
from fedjax_het.experiment.predict import fastest, predict
from fedjax_het.kernels.libraries import title, why_not

# Of a run that chooses a form.
NUM_ROUNDS = 100
LETTERS = dict(zip('abcde', WORKLOADS, strict=True))
NUM_DEVICES = 2


def choose(text: str | None, quick: bool) -> list[str]:
  """'workload/case' for each part of 'a,fedepth,fedin/resnet10'."""
  chosen: list[str] = []
  for part in (text or ','.join(WORKLOADS)).split(','):
    name, _, case = part.strip().partition('/')
    name = LETTERS.get(name, name)
    workload = WORKLOADS.get(name)
    if workload is None or (case and case not in workload.cases):
      known = [f'{k} ({v})' for k, v in LETTERS.items()]
      raise ValueError(
          f'Unknown workload {part.strip()!r}; known are {", ".join(known)}, '
          'or one case, such as fedin/resnet10.'
      )
    cases = workload.quick if quick else workload.cases
    chosen += [f'{name}/{c}' for c in ((case,) if case else cases)]
  return chosen


def _row(case: Case, program: programs.Program, seconds: float, peak: float):
  """The results of one form; `peak` is operations per second."""
  per_image = seconds / program.num_images
  flops = program.flops or case.flops
  rounds = program.compilations
  return {
      'images_per_second': 1 / per_image,
      'seconds_per_round': per_image * case.num_images,
      'compile_seconds': program.compile_seconds,
      'compilations_after_round_2': None if rounds is None else sum(rounds[2:]),
      'peak_megabytes': program.megabytes,
      'flops_per_image': flops,
      'share_of_product_peak': flops / per_image / peak,
      'images_per_call': program.num_images,
  }


def onednn_forms(case: Case, auto: str) -> list[str]:
  """Names of the forms with oneDNN's convolutions.

  Args:
    case: The case.
    auto: The backend that 'auto' selects.

  Returns:
    The backends other than `vmap`, with ', oneDNN'; none if oneDNN is
    unavailable or the case does not use it.
  """
  if why_not('onednn') or not case.onednn:
    return []
  backends = dict.fromkeys((auto, *case.backends))
  return [f'{b}, oneDNN' for b in backends if b != 'vmap']


def chosen(task: programs.Round) -> dict[str, str]:
  """The forms that a run takes by itself.

  Args:
    task: The round.

  Returns:
    {'tuned' or 'untuned': name of a form}, as far as there are speeds.
  """
  federation = dataclasses.replace(
      task.federation, sizes=np.asarray(task.data.sizes)
  )
  found = {}
  for name, table in dict(
      tuned=tuned.read(), untuned=tuned.reference()
  ).items():
    if table is None:
      continue
    seconds = predict(federation, task.cohort_size, NUM_ROUNDS, table)
    form = fastest(seconds, {1, table.devices})
    backend = 'shard_map' if form.devices > 1 else resolve_backend('auto')
    library = title(form.conv_backend)
    found[name] = backend + (f', {library}' if library != 'XLA' else '')
  return found


def measure(
    case: Case, repetitions: int, pause: float = 0.3
) -> dict[str, object]:
  """Times all forms of a case that run in this process.

  Args:
    case: The case.
    repetitions: Repetitions of 'auto' and of eager PyTorch; other backends
      have at most two, slow references one less.
    pause: Seconds before each call.

  Returns:
    'forms', the rows by name, and the settings of the measurement.
  """
  auto, few = resolve_backend('auto'), min(repetitions, 2)
  forms, task = {}, case.task()
  for name in dict.fromkeys((auto, *case.backends, *onednn_forms(case, auto))):
    backend, _, library = name.partition(', ')
    if backend != 'shard_map':
      program = programs.library(
          task, backend, case.num_images, library.lower() or 'xla'
      )
      forms[name] = program, repetitions if backend == auto else few
  for name, reference in case.references.items():
    if 'PyTorch' not in name or jax.default_backend() == 'cpu':
      program = reference.make(reference.steps)
      times = min(few, repetitions - 1) if reference.slow else repetitions
      forms[name] = program, 1 if reference.once else times
  for name, (program, _) in forms.items():
    if name not in case.references or not case.references[name].once:
      program.call()
  multiply, flops = programs.matrix_product()
  calls = {name: (program.call, times) for name, (program, times)
           in forms.items()}  # fmt: skip
  calls = {'product': (multiply, repetitions), **calls}
  seconds = common.interleave(calls, pause)
  peak = flops / seconds['product']
  return {
      'forms': {
          name: _row(case, program, seconds[name], peak)
          for name, (program, _) in forms.items()
      },
      'auto': auto,
      'images_per_round': case.num_images,
      'product_gflops_per_second': peak / 1e9,
      'repetitions': {name: times for name, (_, times) in forms.items()},
  }


def measure_alone(name: str, form: str, scale: str) -> dict[str, object]:
  """Measures `shard_map`, or PyTorch's memory, in a separate process.

  Args:
    name: 'workload/case'.
    form: 'shard_map', 'shard_map, oneDNN' or the name of a reference.
    scale: Scale of the case.

  Returns:
    A row without fraction of peak, or only 'peak_megabytes'.
  """
  backend, _, library = form.partition(', ')
  if backend == 'shard_map':
    jax.config.update('jax_num_cpu_devices', NUM_DEVICES)
  workload, _, case_name = name.partition('/')
  case = WORKLOADS[workload].make(case_name, scale)
  if backend != 'shard_map':
    before = memory.peak_bytes()
    case.references[form].make(2).call()
    return {'peak_megabytes': (memory.peak_bytes() - before) / memory.MEGABYTE}
  program = programs.library(
      case.task(), backend, case.num_images, library.lower() or 'xla'
  )
  program.call()
  seconds = common.interleave({form: (program.call, 2)})[form]
  return _row(case, program, seconds, float('inf'))


def add_measured_alone(result, name: str, scale: str, case: Case) -> None:
  """Adds measurements of separate processes to a `result` of `measure`."""
  forms = result['forms']

  def alone(form):
    return common.in_child('benchmarks.engine', name, form, scale)

  names = (*case.backends, *onednn_forms(case, result['auto']))
  on_cpu = jax.default_backend() == 'cpu'
  for form in [n for n in names if on_cpu and 'shard_map' in n]:
    row = forms[form] = alone(form)
    rate = row['flops_per_image'] * row['images_per_second'] / 1e9
    row['share_of_product_peak'] = rate / result['product_gflops_per_second']
  if scale == 'full':
    for form in [form for form in forms if 'PyTorch' in form]:
      forms[form].update(alone(form))
  if case.cohorts:
    peak = functools.partial(
        memory.measure_alone, 'fedavg', num_clients=case.cohorts[-1]
    )
    with concurrent.futures.ThreadPoolExecutor() as pool:
      small, large = pool.map(peak, case.cohorts)
    result['cohort_megabytes'] = {
        str(cohort): found
        for cohort, found in zip(case.cohorts, (small, large), strict=True)
    }
    result['cohort_peak_ratio'] = large['peak'] / small['peak']


def earlier(path: pathlib.Path, scale: str) -> dict[str, dict]:
  """Results in a file, if machine and scale are the same."""
  if not path.is_file():
    return {}
  found = json.loads(path.read_text())
  if common.same_machine(found) and found['scale'] == scale:
    return found['cases']
  print(f'{path.name} is of another machine, version or scale: begun anew.')
  return {}


def run_case(
    name: str,
    scale: str,
    repetitions: int,
    all_backends: bool = False,
    forms: list[str] | None = None,
) -> dict[str, object]:
  """Measures 'workload/case'; only `forms` and that of 'auto', if given."""
  workload, _, case_name = name.partition('/')
  load = os.getloadavg()[0] if hasattr(os, 'getloadavg') else None
  case = WORKLOADS[workload].make(case_name, scale)
  if all_backends:
    case = case._replace(backends=BACKENDS)
  if forms is not None:
    case = case._replace(
        backends=tuple(b for b in case.backends if b in forms),
        references={n: r for n, r in case.references.items() if n in forms},
    )
  result = measure(case, repetitions, 0.1 if scale == 'quick' else 0.3)
  add_measured_alone(result, name, scale, case)
  if scale == 'full':
    result['chosen'] = chosen(case.task())
  now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
  return result | dict(load_average_before=load, time=now)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='small cases')
  parser.add_argument('--workloads', help='such as a,b or fedin/resnet10')
  parser.add_argument('--repetitions', type=int, help='at least 2')
  parser.add_argument(
      '--all-backends', action='store_true', help='not of few cases alone'
  )
  parser.add_argument('--forms', help='such as shard_map,PyTorch')
  parser.add_argument('--output', help='JSON file to write or to add to')
  parser.add_argument('--child', nargs=3, help=argparse.SUPPRESS)
  args = parser.parse_args()
  # Compilation is measured without the cache, which does not support oneDNN.
  jax.config.update('jax_compilation_cache_dir', None)
  if args.child:
    print(json.dumps(measure_alone(*args.child)))
    return
  repetitions = args.repetitions or (2 if args.quick else 3)
  try:
    chosen = choose(args.workloads, args.quick)
    if repetitions < 2:
      raise ValueError(f'--repetitions={repetitions} must be at least 2.')
  except ValueError as e:
    parser.error(str(e))
  if torch is None or jax.default_backend() != 'cpu':
    print('PyTorch is not installed, or the library does not run on a CPU: its '
          'forms are left out (`pip install torch==2.13.0`).')
  scale = 'quick' if args.quick else 'full'
  suffix = '_quick' if args.quick else ''
  path = pathlib.Path(args.output or common.RESULTS / f'engine{suffix}.json')
  cases = earlier(path, scale)
  for name in chosen:
    cases[name] = run_case(
        name,
        scale,
        repetitions,
        args.all_backends,
        args.forms.split(',') if args.forms else None,
    )
    print(f'{name}: done', flush=True)
    common.write(path, {'cases': cases, 'scale': scale})
  touched = {name.partition('/')[0] for name in chosen}
  print(engine_table.report(cases, touched))


if __name__ == '__main__':
  main()
