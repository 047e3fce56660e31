"""Times a local step of every net, with each backend of convolutions.

  python -m benchmarks.local_step [--models=resnet18,...] [--quick]
    [--output=FILE]

A local step is that of a FedAvg client: batch, forward pass, gradients and
optimiser, in the compiled loop of a round. The backends take turns; the least
time of each counts. Let the machine be idle.
"""

import jax

from benchmarks import common, nets
from benchmarks.lowerings import local_steps


def main() -> None:
  args, names = nets.parse_args(__doc__.splitlines()[0])
  # The compilation cache does not support oneDNN's convolutions.
  jax.config.update('jax_compilation_cache_dir', None)
  found = {}
  for name in names:
    found[name], _ = local_steps(name, 2 if args.quick else 8)
    print(f'{name}: done', flush=True)
  header = ['a local step, ms', *next(iter(found.values()))]
  rows = [[name, *steps.values()] for name, steps in found.items()]
  print(common.markdown(header, rows))
  suffix = '_quick' if args.quick else ''
  path = args.output or common.RESULTS / f'local_step{suffix}.json'
  common.write(path, {'milliseconds': found})


if __name__ == '__main__':
  main()
