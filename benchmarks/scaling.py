"""Memory, time and load balance by number of clients, cohort and devices.

  python -m benchmarks.scaling [--parts=memory,...] [--quick] [--output=FILE]

Memory: XLA's planned bytes per device for a round of private training, in which
every client stores a dense model. The programs are compiled for virtual devices
and not run. Time: minimum seconds of a round of FedAvg on one device, with up
to a million clients of one image each. Balance: local steps of the busiest
device relative to the mean, for clients of unequal sizes that are assigned in
turn or longest first, as the mean over random cohorts. Outside: minimum
milliseconds of rounds whose visits do not train, so that all time is spent on
the cohort, the states, the messages and the server step. Every client stores
1 kB; 'resident' is the increase of the process' memory by all states and the
rounds; 'computed' is the number from docs/scaling.md.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from benchmarks.idle_rounds import outside_part
from fedjax_het.algorithms import fedavg, private
from fedjax_het.data.partition import partition
from fedjax_het.data.sources import load
from fedjax_het.engine import balance, mapping, placement, rounds
from fedjax_het.engine.local import visit_steps
from fedjax_het.models import create

MEGABYTE = 2**20
SHAPE = (8, 8, 1)


def _keys():
  return jax.random.split(jax.random.key(0))


def planned(num_clients: int, cohort_size: int, devices: int, hidden: int):
  """Megabytes per device: client states, arguments, and the rest."""
  model = create('mlp', SHAPE, 10, depth=3, hidden=hidden)
  federation, data = common.make_federation(model, num_clients, 2)
  algorithm = private(federation)
  mesh = mapping.client_mesh(jax.devices()[:devices])
  run_round = rounds.make_round(
      algorithm,
      federation,
      cohort_size=cohort_size,
      backend=mapping.Backend('shard_map', mesh=mesh),
  )
  shapes = jax.eval_shape(
      lambda: rounds.init_state(algorithm, federation, _keys()[0])
  )
  state = jax.tree.map(
      lambda where, part: jax.tree.map(
          lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
          part,
      ),
      rounds.state_shardings(federation, mesh),
      shapes,
  )
  data = placement.put(data, placement.everywhere(mesh))
  memory = run_round.lower(state, data, *_keys()).compile().memory_analysis()
  row = sum(
      leaf.size * leaf.dtype.itemsize
      for leaf in jax.tree.leaves(shapes.clients)
  )
  besides = memory.temp_size_in_bytes + memory.output_size_in_bytes
  return dict(
      table=row / MEGABYTE,
      arguments=memory.argument_size_in_bytes / MEGABYTE,
      besides=(besides - memory.alias_size_in_bytes) / MEGABYTE,
  )


def memory_part(quick: bool):
  """Rows of clients, cohort, devices and megabytes."""
  num, hidden = (64, 16) if quick else (1024, 600)
  rows = []
  for cohort_size in (num // 16, num):
    for devices in (1, 2, 4):
      found = planned(num, cohort_size, devices, hidden)
      rows.append([num, cohort_size, devices, *found.values()])
  return rows


def _repeat(run_round, state, data):
  """A call that runs one more round."""
  keys = _keys()

  def call():
    nonlocal state
    state, _ = jax.block_until_ready(run_round(state, data, *keys))

  return call


def time_part(quick: bool):
  """Rows of clients, cohort and seconds."""
  sizes = (100, 1000) if quick else (100, 10_000, 1_000_000)
  cohorts = (10, 20) if quick else (10, 100, 1000)
  cases = [(num, cohorts[0]) for num in sizes]
  cases += [(sizes[1], size) for size in cohorts[1:]]
  programs = {}
  for num_clients, cohort_size in cases:
    model = create('mlp', SHAPE, 10, depth=2, hidden=32)
    federation, data = common.make_federation(model, num_clients, 1)
    algorithm = fedavg(federation)
    run_round = rounds.make_round(
        algorithm, federation, cohort_size=cohort_size, backend='map'
    )
    state = rounds.init_state(algorithm, federation, _keys()[0])
    call = _repeat(run_round, state, data)
    call()  # Compiles.
    programs[num_clients, cohort_size] = call, 3 if quick else 20
  seconds = common.interleave(programs)
  return [[*case, seconds[case]] for case in cases]


def _loads(kind: str, num: int) -> np.ndarray:
  """Local steps of one epoch of batch 16."""
  model = create('mlp', SHAPE, 10, depth=2, hidden=2)
  local = common.make_federation(model, 1, 1)[0].local
  if kind == 'equal':
    sizes = np.full(num, 160)
  elif kind == 'digits, Dirichlet 0.5':
    labels = load('digits', None).train_labels
    parts = partition(labels, num, seed=0, alpha=0.5, min_size=1)
    sizes = np.array([len(part) for part in parts])
  else:
    sizes = np.random.default_rng(0).lognormal(5, 1, num).astype(int) + 1
  return np.asarray(visit_steps(local, sizes))


def balance_part(quick: bool):
  """Rows of sizes, devices, and relative work of the busiest device."""
  num, cohort_size, draws = 100, 32, 20 if quick else 500
  rng = np.random.default_rng(1)
  cohorts = [rng.permutation(num)[:cohort_size] for _ in range(draws)]
  rows = []
  for kind in ('equal', 'digits, Dirichlet 0.5', 'lognormal, sigma 1'):
    loads = jnp.asarray(_loads(kind, num)[np.array(cohorts)])
    for devices in (2, 4, 8):

      def greedy(load, devices=devices):
        who = balance.assign(load, cohort_size, devices)
        return load[who.slot].reshape(devices, -1).sum(1).max()

      in_turn = loads.reshape(draws, -1, devices).sum(1).max(1)
      mean = loads.sum(1) / devices
      rows.append([
          kind,
          devices,
          float(jnp.mean(in_turn / mean)),
          float(jnp.mean(jax.jit(jax.vmap(greedy))(loads) / mean)),
          float(jnp.mean(jnp.maximum(mean, loads.max(1)) / mean)),
      ])
  return rows


PARTS = {
    'memory': (
        memory_part,
        ['clients', 'cohort', 'devices', 'all states, MB',
         'arguments, MB a device', 'other, MB a device'],
    ),
    'time': (time_part, ['clients', 'cohort', 'seconds a round']),
    'balance': (
        balance_part,
        ['sizes', 'devices', 'in turn', 'longest first', 'lower bound'],
    ),
    'outside': (
        outside_part,
        ['clients', 'cohort', 'states on', 'drawing, ms', 'a round, ms',
         'states, MB a device', 'computed, MB a device', 'resident, MB'],
    ),
}  # fmt: skip


def main() -> None:
  jax.config.update('jax_num_cpu_devices', 4)
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='small cases')
  parser.add_argument(
      '--parts', default=','.join(PARTS), help=f'of {", ".join(PARTS)}'
  )
  parser.add_argument('--output', help='JSON file to write')
  args = parser.parse_args()
  results = {}
  for name in args.parts.split(','):
    part, header = PARTS[name]
    rows = part(args.quick)
    print(f'\n{name}\n{common.markdown(header, rows)}', flush=True)
    results[name] = [dict(zip(header, row)) for row in rows]
  if args.output:
    common.write(args.output, results)


if __name__ == '__main__':
  main()
