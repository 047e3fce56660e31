"""A local step with products of float32 and of bfloat16 operands.

  python -m benchmarks.products [--models=resnet18,...] [--quick]
    [--output=FILE]

The nets, batches and optimisers of `benchmarks.nets`, each as an epoch of
one client of FedAvg; the two forms take turns, and the least time of each
counts. Beside it stands the memory that XLA plans. Hardware without products of
bfloat16 (on x86, `avx512_bf16` or `amx_bf16` in /proc/cpuinfo) has nothing to
gain. Let the machine be idle.
"""

from benchmarks import common, nets
from fedjax_het.models.products import PRODUCTS


def measure_net(name: str, steps: int, repetitions: int) -> dict[str, float]:
  """Milliseconds of a step, their ratio, and megabytes, by form."""
  forms = {
      products: nets.local_epoch(name, steps, products)
      for products in PRODUCTS
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
  args, names = nets.parse_args(__doc__.splitlines()[0])
  steps, repetitions = (2, 2) if args.quick else (nets.STEPS, 4)
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
