"""Compares a local step with float32 and with bfloat16 operands.

  python -m benchmarks.matmul_dtype [--models=resnet18,...] [--quick]
    [--output=FILE]

It measures an epoch of one FedAvg client for each model of `benchmarks.nets`.
The two forms take turns; the minimum time of each counts. The table also has
XLA's planned memory. Hardware without bfloat16 products (on x86, `avx512_bf16`
or `amx_bf16` in /proc/cpuinfo) gains nothing. Let the machine be idle.
"""

from benchmarks import common, nets
from fedjax_het.kernels.matmul_dtype import MATMUL_DTYPES


def measure_net(name: str, steps: int, repetitions: int) -> dict[str, float]:
  """Milliseconds per step, their ratio, and megabytes, by dtype."""
  forms = {
      dtype: nets.local_epoch(name, steps, dtype)
      for dtype in MATMUL_DTYPES
  }
  for form in forms.values():
    form.call()
  seconds = common.interleave(
      {dtype: (form.call, repetitions) for dtype, form in forms.items()}
  )
  steps_ms = {f'{p}, ms': 1e3 * seconds[p] / steps for p in MATMUL_DTYPES}
  wide, narrow = (seconds[dtype] for dtype in MATMUL_DTYPES)
  memory = {f'{p}, MB': forms[p].megabytes for p in MATMUL_DTYPES}
  return {**steps_ms, 'times as fast': wide / narrow, **memory}


def main() -> None:
  args, names = nets.parse_args(__doc__.splitlines()[0])
  steps, repetitions = (2, 2) if args.quick else (nets.STEPS, 4)
  found = {name: measure_net(name, steps, repetitions) for name in names}
  header = ['a local step', *next(iter(found.values()))]
  rows = [[name, *row.values()] for name, row in found.items()]
  print(common.markdown(header, rows))
  suffix = '_quick' if args.quick else ''
  path = args.output or common.RESULTS / f'matmul_dtype{suffix}.json'
  common.write(path, {'nets': found})


if __name__ == '__main__':
  main()
