"""Compares the cost of a round of FeDepth and of FedAvg, by memory budget.

  python -m benchmarks.depthwise_cost [--quick] [--net=vit_mini12] [--epochs=N]
      [--output=FILE]

The model is PreResNet-20, or twelve encoder blocks of 64 features with patches
of 4, on random 32x32x3 images. Two clients train on four batches of 128, with
SGD and momentum, for one epoch or N (the paper uses ten). FeDepth trains each
stage for that many epochs. Both methods have the same backward passes per
block. FeDepth adds the forward passes of the frozen blocks before a stage, once
per step, or once per example with `cache_prefix`. The cache therefore gains
least with one epoch, when every example still passes each block once more than
in FedAvg. With `scan_stages`, equal stages are compiled once.

The rounds of all forms take turns in one process; the minimum time of each
counts. They also take turns at compilation, without the compilation cache. The
table also has the number of instructions of the compiled round and XLA's
temporary memory, most of which is activations.
"""

import argparse
import dataclasses
import time

import jax
import optax

from benchmarks import common, flops
from benchmarks.workloads.fedepth import stages_of
from fedjax_het.algorithms import fedavg, fedepth
from fedjax_het.engine.rounds import init_state, make_round
from fedjax_het.models import BlockModel, create
from fedjax_het.models.vit import vit

NUM_CLIENTS = 2
SHAPE = (32, 32, 3)
NETS = {
    'preresnet20': lambda: create('preresnet20', SHAPE, 10, norm='batch_only'),
    'vit_mini12': lambda: vit(SHAPE, 10, depth=12, variant='mini', patch=4),
}
# {label: (budget as a fraction of the whole model, options of `fedepth`)}.
FORMS = {
    'FeDepth, 1/2': ('1/2', dict(scan_stages=False)),
    'FeDepth, 1/3': ('1/3', dict(scan_stages=False)),
    'FeDepth, 1/6': ('1/6', dict(scan_stages=False)),
    'FeDepth, 1/6, scanned': ('1/6', dict(scan_stages=True)),
    'FeDepth, 1/6, cached': ('1/6', dict(cache_prefix=True)),
}


def operations(model: BlockModel, batch_size: int) -> dict[str, float]:
  """Operations of an epoch of each form, as multiples of FedAvg's."""
  whole, found = flops.training_flops(model), {'FedAvg': 1.0}
  for label, (budget, options) in FORMS.items():
    stages = stages_of(model, budget, batch_size)
    if 'cache_prefix' in options:
      count = flops.cached_flops(stages)
    else:
      count = sum(map(flops.stage_flops, stages))
    found[label] = count / whole
  return found


def sgd(learning_rate):
  """FeDepth's optimizer, without weight decay."""
  return optax.sgd(learning_rate, momentum=0.9)


class Form:
  """A round that can be compiled and called repeatedly.

  Attributes:
    trace_seconds: Minimum time of tracing and lowering so far.
    compile_seconds: Minimum time of compilation so far.
    instructions: Number of instructions of the compiled round.
    megabytes: Temporary memory of the compiled round.
  """

  def __init__(self, make, federation, data):
    self._make, self._federation, self._data = make, federation, data
    self._keys = jax.random.split(jax.random.key(0))
    self._state = init_state(make(federation), federation, self._keys[0])
    self.trace_seconds = self.compile_seconds = float('inf')

  def compile(self):
    # New functions, so that JAX does not use its cache.
    algorithm = self._make(self._federation)
    run_round = make_round(
        algorithm, self._federation, cohort_size=NUM_CLIENTS
    )
    start = time.perf_counter()
    lowered = run_round.lower(self._state, self._data, *self._keys)
    traced = time.perf_counter()
    self._compiled = lowered.compile()
    done = time.perf_counter()
    self.trace_seconds = min(self.trace_seconds, traced - start)
    self.compile_seconds = min(self.compile_seconds, done - traced)
    lines = self._compiled.as_text().splitlines()
    self.instructions = sum(' = ' in line for line in lines)
    memory = self._compiled.memory_analysis()
    self.megabytes = memory.temp_size_in_bytes / 2**20

  def __call__(self):
    self._state, _ = jax.block_until_ready(
        self._compiled(self._state, self._data, *self._keys)
    )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='fewer images')
  parser.add_argument('--net', choices=NETS, default='preresnet20')
  parser.add_argument('--epochs', type=int, default=1, help='local epochs')
  parser.add_argument('--output', help='JSON file to write')
  args = parser.parse_args()
  batch_size, steps, repetitions = (32, 2, 2) if args.quick else (128, 4, 8)
  local = common.local_training(sgd, batch_size=batch_size)
  federation, data = common.make_federation(
      NETS[args.net](),
      NUM_CLIENTS,
      batch_size * steps,
      dataclasses.replace(local, epochs=args.epochs),
  )
  (group,) = federation.groups
  makers = {'FedAvg': fedavg}
  for label, (budget, options) in FORMS.items():
    makers[label] = lambda federation, budget=budget, options=options: fedepth(
        common.with_options(federation, budget=budget), plan='paper', **options
    )
  forms = {
      label: Form(make, federation, data) for label, make in makers.items()
  }
  jax.config.update('jax_compilation_cache_dir', None)
  for _ in range(1 if args.quick else 3):
    for label, form in forms.items():
      form.compile()
      print(f'{label}: compiled', flush=True)
  for form in forms.values():
    form()
  calls = {label: (form, repetitions) for label, form in forms.items()}
  seconds = common.interleave(calls)
  counted = operations(group.model, batch_size)
  ratios = {label: s / seconds['FedAvg'] for label, s in seconds.items()}
  rows = [
      [
          label,
          seconds[label],
          ratios[label],
          counted[label] if args.epochs == 1 else '-',
          forms[label].megabytes,
          forms['FedAvg'].megabytes / forms[label].megabytes,
          forms[label].trace_seconds,
          forms[label].compile_seconds,
          forms[label].instructions,
      ]
      for label in makers
  ]
  header = ['round', 'seconds', 'of FedAvg', 'operations, of FedAvg',
            'temporaries, MB', 'less by', 'seconds of tracing',
            'of compiling', 'instructions']  # fmt: skip
  print(common.markdown(header, rows))
  suffix = '_quick' if args.quick else ''
  if args.net != 'preresnet20':
    suffix = f'_{args.net}{suffix}'
  if args.epochs > 1:
    suffix = f'_epochs{args.epochs}{suffix}'
  common.write(
      args.output or common.RESULTS / f'depthwise_cost{suffix}.json',
      {
          'seconds': seconds,
          'times_fedavg': ratios,
          'operations_times_fedavg_one_epoch': counted,
          **{
              key: {name: getattr(form, of) for name, form in forms.items()}
              for key, of in (
                  ('temporary_megabytes', 'megabytes'),
                  ('trace_seconds', 'trace_seconds'),
                  ('compile_seconds', 'compile_seconds'),
                  ('instructions', 'instructions'),
              )
          },
          'batch_size': batch_size,
          'steps_an_epoch': steps,
          'epochs': args.epochs,
          'clients': NUM_CLIENTS,
          'repetitions': repetitions,
      },
  )


if __name__ == '__main__':
  main()
