"""A local step with products of float32 and of bfloat16 operands.

  python -m benchmarks.products [--models=resnet18,...] [--quick]
    [--output=FILE]

The nets, batches and optimisers of `benchmarks.lowerings`, each as an epoch of
one client of FedAvg; the two forms take turns, and the least time of each
counts. Beside it stands the memory that XLA plans. Hardware without products of
bfloat16 (on x86, `avx512_bf16` or `amx_bf16` in /proc/cpuinfo) has nothing to
gain. Let the machine be idle.
"""

import argparse

from benchmarks import common, programs
from benchmarks.lowerings import INPUT_SHAPE, NETS, STEPS
from fedjax_het.algorithms import fedavg
from fedjax_het.models import create
from fedjax_het.models.products import PRODUCTS


def local_epoch(name: str, products: str, steps: int) -> programs.Program:
  """One client's steps."""
  batch_size, optimizer = NETS[name]
  federation, data = common.make_federation(
      create(name, INPUT_SHAPE, 10, products=products),
      1,
      batch_size * steps,
      common.local_training(optimizer, batch_size=batch_size),
  )
  task = programs.Round(fedavg(federation), federation, data, 1)
  return programs.library(task, 'map', batch_size * steps)


def measure_net(name: str, steps: int, repetitions: int) -> dict[str, float]:
  """Milliseconds of a step, their ratio, and megabytes, by form."""
  forms = {
      products: local_epoch(name, products, steps) for products in PRODUCTS
  }
  for form in forms.values():
    form.call()
  seconds = common.interleave(
      {products: (form.call, repetitions) for products, form in forms.items()}
  )
  steps_ms = {f'{p}, ms': 1e3 * seconds[p] / steps for p in PRODUCTS}
  wide, narrow = (seconds[products] for products in PRODUCTS)
  memory = {f'{p}, MB': forms[p].megabytes for p in PRODUCTS}
  return {**steps_ms, 'times as fast': wide / narrow, **memory}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--models', help=f'of {", ".join(NETS)}; all by default')
  parser.add_argument('--quick', action='store_true', help='one small net')
  parser.add_argument('--output', help='JSON file to write')
  args = parser.parse_args()
  names = args.models.split(',') if args.models else list(NETS)
  if args.quick and not args.models:
    names = ['dropout_cnn']
  for name in names:
    if name not in NETS:
      parser.error(f'Unknown net {name!r}; known are {", ".join(NETS)}.')
  steps, repetitions = (2, 2) if args.quick else (STEPS, 4)
  found = {name: measure_net(name, steps, repetitions) for name in names}
  header = ['a local step', *next(iter(found.values()))]
  rows = [[name, *row.values()] for name, row in found.items()]
  print(common.markdown(header, rows))
  suffix = '_quick' if args.quick else ''
  common.write(
      args.output or common.RESULTS / f'products{suffix}.json', {'nets': found}
  )


if __name__ == '__main__':
  main()
