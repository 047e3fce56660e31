"""What a round of FeDepth costs beside one of FedAvg, by memory budget.

  python -m benchmarks.depthwise_cost [--quick] [--epochs=N] [--output=FILE]

PreResNet-20 on 32x32x3 noise, two clients, four batches of 128 with SGD and
momentum, one epoch or N (the paper takes ten); FeDepth trains each stage for as
long. Every block has the same backward passes in both; FeDepth adds the forward
passes of the frozen blocks in front of a stage, once a step, or once an example
with `cache_prefix`. So one epoch is where a cache gains least: every example
passes each block one time more than in FedAvg. The rounds of all budgets are
run in turn in one process, and the least time of each counts. Beside it stands
the memory that XLA plans for a round's temporaries, of which activations are
the greatest part.
"""

import argparse
import dataclasses

import jax
import optax

from benchmarks import common, flops
from benchmarks.workloads.fedepth import stages_of
from fedjax_het.algorithms import fedavg, fedepth
from fedjax_het.engine.rounds import init_state, make_round
from fedjax_het.models import BlockModel, create

NUM_CLIENTS = 2
SHAPE = (32, 32, 3)
# Label: budget as a share of the whole model, and whether prefixes are cached.
FORMS = {
    'FeDepth, 1/2': ('1/2', False),
    'FeDepth, 1/3': ('1/3', False),
    'FeDepth, 1/6': ('1/6', False),
    'FeDepth, 1/6, cached': ('1/6', True),
}


def operations(model: BlockModel, batch_size: int) -> dict[str, float]:
  """Operations of an epoch of each form, as multiples of FedAvg's."""
  whole, found = flops.training_flops(model), {'FedAvg': 1.0}
  for label, (budget, cached) in FORMS.items():
    stages = stages_of(model, budget, batch_size)
    count = flops.cached_flops(stages) if cached else sum(
        map(flops.stage_flops, stages)
    )  # fmt: skip
    found[label] = count / whole
  return found


def sgd(learning_rate):
  """FeDepth's optimiser, without its weight decay."""
  return optax.sgd(learning_rate, momentum=0.9)


def compiled_round(make, federation, data):
  """A round to call again and again, and the bytes of its temporaries."""
  algorithm = make(federation)
  run_round = make_round(algorithm, federation, cohort_size=NUM_CLIENTS)
  keys = jax.random.split(jax.random.key(0))
  state = init_state(algorithm, federation, keys[0])
  compiled = run_round.lower(state, data, *keys).compile()

  def call():
    nonlocal state
    state, _ = jax.block_until_ready(compiled(state, data, *keys))

  return call, compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='fewer images')
  parser.add_argument('--epochs', type=int, default=1, help='local epochs')
  parser.add_argument('--output', help='JSON file to write')
  args = parser.parse_args()
  batch_size, steps, repetitions = (32, 2, 2) if args.quick else (128, 4, 8)
  local = common.local_training(sgd, batch_size=batch_size)
  federation, data = common.make_federation(
      create('preresnet20', SHAPE, 10, norm='batch_only'),
      NUM_CLIENTS,
      batch_size * steps,
      dataclasses.replace(local, epochs=args.epochs),
  )
  (group,) = federation.groups
  makers = {'FedAvg': fedavg}
  for label, (budget, cached) in FORMS.items():
    makers[label] = lambda federation, budget=budget, cached=cached: fedepth(
        federation, budgets=f'{group.name}:{budget}', cache_prefix=cached
    )
  calls, megabytes = {}, {}
  for label, make in makers.items():
    call, temporary = compiled_round(make, federation, data)
    call()
    calls[label], megabytes[label] = (call, repetitions), temporary / 2**20
    print(f'{label}: compiled', flush=True)
  seconds = common.interleave(calls)
  counted = operations(group.model, batch_size)
  ratios = {label: s / seconds['FedAvg'] for label, s in seconds.items()}
  rows = [
      [
          label,
          seconds[label],
          ratios[label],
          counted[label] if args.epochs == 1 else '-',
          megabytes[label],
          megabytes['FedAvg'] / megabytes[label],
      ]
      for label in makers
  ]
  header = ['round', 'seconds', 'of FedAvg', 'operations, of FedAvg',
            'temporaries, MB', 'less by']  # fmt: skip
  print(common.markdown(header, rows))
  suffix = '_quick' if args.quick else ''
  if args.epochs > 1:
    suffix = f'_epochs{args.epochs}{suffix}'
  common.write(
      args.output or common.RESULTS / f'depthwise_cost{suffix}.json',
      {
          'seconds': seconds,
          'times_fedavg': ratios,
          'operations_times_fedavg_one_epoch': counted,
          'temporary_megabytes': megabytes,
          'batch_size': batch_size,
          'steps_an_epoch': steps,
          'epochs': args.epochs,
          'clients': NUM_CLIENTS,
          'repetitions': repetitions,
      },
  )


if __name__ == '__main__':
  main()
