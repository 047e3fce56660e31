"""Compares client states in host memory with client states on the device.

  python -m benchmarks.client_store [--quick] [--output=FILE]

Private training: every client stores a dense model of 0.9 million numbers
between visits. A round loads the states of its cohort, trains them for one
epoch of 20 random images, and stores them. Rounds of both stores take turns in
one process; the minimum time of each counts. Device memory is XLA's planned
arguments, results and temporaries of the round. On a CPU both stores are in the
same memory, so only this number shows the saving.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from fedjax_het.algorithms import private
from fedjax_het.engine.cohort import make_plan
from fedjax_het.engine.rounds import init_state, make_cohort_round, make_round
from fedjax_het.engine.streaming import init_streamed_state, make_streamed_round
from fedjax_het.models import create

SHAPE = (28, 28, 1)
IMAGES_PER_CLIENT = 20


def planned_megabytes(compiled) -> float:
  """XLA's planned memory of a program; reused memory counts once."""
  memory = compiled.memory_analysis()
  return (
      memory.argument_size_in_bytes
      + memory.output_size_in_bytes
      + memory.temp_size_in_bytes
      - memory.alias_size_in_bytes
  ) / 2**20


def measure(num_clients: int, cohort_size: int, repetitions: int):
  """Seconds per round and device megabytes of both stores."""
  model = create('mlp', SHAPE, 10, depth=3, hidden=600)
  federation, data = common.make_federation(
      model, num_clients, IMAGES_PER_CLIENT
  )
  algorithm = private(federation)
  keys = jax.random.split(jax.random.key(0))

  def repeat(run_round, state):
    def call():
      nonlocal state
      state, _ = jax.block_until_ready(run_round(state, data, *keys))

    return call, repetitions

  on_device = make_round(algorithm, federation, cohort_size=cohort_size)
  state = init_state(algorithm, federation, keys[0])
  on_device = on_device.lower(state, data, *keys).compile()
  calls = {'device': repeat(on_device, state)}
  streamed = make_streamed_round(
      algorithm, federation, cohort_size=cohort_size
  )
  host_state = init_streamed_state(algorithm, federation, keys[0])
  calls['host'] = repeat(streamed, host_state)
  shares = make_plan(federation, cohort_size)(jnp.int32(0), keys[1])
  rows = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct((cohort_size, *a.shape[1:]), a.dtype),
      host_state.clients,
  )
  cohort_program = jax.jit(
      make_cohort_round(algorithm, federation), donate_argnums=2
  )
  start = jnp.int32(0), host_state.server
  lowered = cohort_program.lower(start, shares, rows, data, keys[0])
  megabytes = {
      'device': planned_megabytes(on_device),
      # Plus the prefetched rows of the next cohort.
      'host': planned_megabytes(lowered.compile())
      + sum(r.size * r.dtype.itemsize for r in jax.tree.leaves(rows)) / 2**20,
  }
  for call, _ in calls.values():
    call()
  return common.interleave(calls), megabytes


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='fewer clients')
  parser.add_argument('--output', help='JSON file to write')
  args = parser.parse_args()
  populations = (20, 40) if args.quick else (50, 200, 400)
  cohort_size, repetitions = 10, 3 if args.quick else 8
  results, rows = {}, []
  for num_clients in populations:
    seconds, megabytes = measure(num_clients, cohort_size, repetitions)
    results[num_clients] = dict(seconds=seconds, device_megabytes=megabytes)
    rows.append([
        str(num_clients),
        *(seconds[name] for name in ('device', 'host')),
        seconds['host'] / seconds['device'],
        *(megabytes[name] for name in ('device', 'host')),
    ])
    print(f'{num_clients} clients: done', flush=True)
  header = [
      'clients', 'device, s a round', 'host, s a round', 'host : device',
      'device store, MB', 'host store, MB on the device',
  ]  # fmt: skip
  print(common.markdown(header, rows))
  suffix = '_quick' if args.quick else ''
  common.write(
      args.output or common.RESULTS / f'client_store{suffix}.json',
      {
          'stores': results,
          'cohort': cohort_size,
          'images_per_client': IMAGES_PER_CLIENT,
          'state_megabytes': sum(
              np.asarray(leaf).nbytes for leaf in _one_client()
          ) / 2**20,
          'repetitions': repetitions,
      },
  )  # fmt: skip


def _one_client():
  """The leaves of one client's state, filled with zeros."""
  model = create('mlp', SHAPE, 10, depth=3, hidden=600)
  variables = jax.eval_shape(model.init, jax.random.key(0))
  return [np.zeros(s.shape, s.dtype) for s in jax.tree.leaves(variables)]


if __name__ == '__main__':
  main()
