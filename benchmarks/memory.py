"""Peak memory of a round with a cohort of 10 and of 1,000 small clients.

  python -m benchmarks.memory [--output=FILE]

The population (1,000 clients) and the data set are the same; only the cohort
grows. Each round runs in a separate process, which reports its peak resident
memory before compilation and at the end, and XLA's planned memory of the round
(arguments, results and temporaries). FedAvg only sums uploads. FedIN also
stores the uploaded features, the only part that grows with its cohort.
"""

import argparse
import json

from benchmarks import common
from benchmarks.peak import MEGABYTE, peak_bytes

NUM_CLIENTS = 1000
COHORTS = (10, 1000)
ALGORITHMS = ('fedavg', 'fedin')
# The small clients: a dense net and their number of images.
INPUT_SHAPE = (28, 28, 1)
OPTIONS = dict(depth=3, hidden=64)
IMAGES = 20


def measure(name: str, cohort_size: int, num_clients: int) -> dict[str, float]:
  """Runs two rounds and measures them, in MB.

  Args:
    name: A key of the library's `ALGORITHMS`.
    cohort_size: Clients per round.
    num_clients: Number of all clients.

  Returns:
    'before': peak resident memory before compilation; 'peak': at the end;
    'xla': bytes of the compiled round.
  """
  import jax  # Imported in child processes only.

  from fedjax_het.algorithms import ALGORITHMS as library
  from fedjax_het.engine.rounds import init_state, make_round
  from fedjax_het.models import create

  model = create('mlp', INPUT_SHAPE, 10, **OPTIONS)
  federation, data = common.make_federation(model, num_clients, IMAGES)
  algorithm = library[name](federation)
  run_round = make_round(algorithm, federation, cohort_size=cohort_size)
  keys = jax.random.split(jax.random.key(0))
  state = jax.block_until_ready(init_state(algorithm, federation, keys[0]))
  before = peak_bytes()
  compiled = run_round.lower(state, data, *keys).compile()
  for _ in range(2):
    state, _ = jax.block_until_ready(compiled(state, data, *keys))
  memory = compiled.memory_analysis()
  xla = (
      memory.argument_size_in_bytes
      + memory.output_size_in_bytes
      + memory.temp_size_in_bytes
      - memory.alias_size_in_bytes
  )
  return {
      'before': before / MEGABYTE,
      'peak': peak_bytes() / MEGABYTE,
      'xla': xla / MEGABYTE,
  }


def measure_alone(
    name: str, cohort_size: int, num_clients: int = NUM_CLIENTS
) -> dict[str, float]:
  """Runs `measure` in a separate process."""
  return common.in_child(
      'benchmarks.memory', name, str(cohort_size), str(num_clients)
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--output', help='JSON file to write')
  parser.add_argument('--child', nargs=3, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.child:
    name, *sizes = args.child
    print(json.dumps(measure(name, *map(int, sizes))))
    return
  results, rows = {}, []
  for name in ALGORITHMS:
    results[name] = {cohort: measure_alone(name, cohort) for cohort in COHORTS}
    small, large = (results[name][cohort] for cohort in COHORTS)
    rows += [
        [name, key, small[key], large[key], large[key] / small[key]]
        for key in ('peak', 'xla')
    ]
  header = ['algorithm', 'memory']
  header += [f'cohort {cohort}, MB' for cohort in COHORTS] + ['ratio']
  print(common.markdown(header, rows))
  common.write(
      args.output or common.RESULTS / 'memory.json', {'megabytes': results}
  )


if __name__ == '__main__':
  main()
