"""What asynchronous rounds cost beside synchronous ones of as many visits.

  python -m benchmarks.async_cost [--quick] [--output=FILE]

Ten clients with a small convolutional net each train by FedAvg. Both drivers
run rounds of ten uploads, in turn in one process; the asynchronous one serves
devices of three speeds, and calls the server once for each upload. How many
clients train in one of its rounds changes from round to round, so times are
taken over several rounds and divided by the visits that were trained in them.
"""

import argparse
import time

import jax
import numpy as np

from benchmarks import common
from fedjax_het.algorithms import fedavg
from fedjax_het.engine import asynchronous, rounds
from fedjax_het.engine.clock import Device, Fleet, plan
from fedjax_het.models import create

NUM_CLIENTS = 10
SPEEDS = (1000.0,) * 5 + (400.0,) * 3 + (100.0,) * 2  # Examples a second.
IMAGES = 150  # A visit is three minibatches of 50 in FedHe's setting.


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='a dense net')
  parser.add_argument('--output', help='JSON file to write')
  args = parser.parse_args()
  shape = (28, 28, 1)
  if args.quick:
    model = create('mlp', shape, 10, depth=3, hidden=64)
  else:
    model = create('simple_cnn', shape, 10)
  federation, data = common.make_federation(model, NUM_CLIENTS, IMAGES)
  repetitions, block = 4, 20 if args.quick else 4  # A block is so many rounds.

  algorithm, key = fedavg(federation), jax.random.key(1)
  init = rounds.init_state(algorithm, federation, jax.random.key(0))
  options = dict(cohort_size=NUM_CLIENTS)
  synchronous = rounds.make_round(algorithm, federation, **options)
  devices = [Device(speed, jitter=0.1) for speed in SPEEDS]
  (group,) = federation.groups
  down, up = rounds.message_bytes(algorithm, group, data)
  fleet = Fleet(
      devices, [IMAGES] * NUM_CLIENTS, [down] * NUM_CLIENTS, [up] * NUM_CLIENTS
  )
  schedule = plan(fleet, NUM_CLIENTS * (repetitions * block + 1))
  events = asynchronous.round_events(schedule, federation, NUM_CLIENTS)
  by_clock = asynchronous.make_async_round(algorithm, federation, **options)

  states = {
      'synchronous': jax.tree.map(jax.numpy.copy, init),
      'asynchronous': asynchronous.init_async_state(
          algorithm, federation, init, data
      ),
  }

  drivers = {'synchronous': synchronous, 'asynchronous': by_clock}

  def run(name, num_rounds):
    """Seconds for each visit that was trained."""
    trained, begin = 0, time.perf_counter()
    for _ in range(num_rounds):
      who, number = key, NUM_CLIENTS
      if name == 'asynchronous':
        who = events[int(states[name].round_num)]
        number = who.training[group.name].bounds[-1]
      states[name], _ = jax.block_until_ready(
          drivers[name](states[name], data, key, who)
      )
      trained += int(number)
    return (time.perf_counter() - begin) / trained

  for name in drivers:
    run(name, 1)  # Compiles, and trains all clients' first visits.
  seconds = dict.fromkeys(drivers, float('inf'))
  for _ in range(repetitions):
    for name in drivers:
      seconds[name] = min(seconds[name], run(name, block))
  waves = float(np.mean([np.sum(e.wave) for e in events[1:]]))
  ratio = seconds['asynchronous'] / seconds['synchronous']
  rows = [[name, seconds[name]] for name in drivers]
  print(common.markdown(['driver', 'seconds a visit'], rows))
  print(
      f'\n{ratio:.2f} times a synchronous visit; {waves:.1f} waves for ten '
      'uploads.'
  )
  suffix = '_quick' if args.quick else ''
  common.write(
      args.output or common.RESULTS / f'async_cost{suffix}.json',
      {
          'seconds_a_visit': seconds,
          'ratio': ratio,
          'waves_a_round': waves,
          'model': model.name,
          'parameters': sum(
              leaf.size
              for leaf in jax.tree.leaves(model.abstract_variables.params)
          ),
          'clients': NUM_CLIENTS,
          'images': IMAGES,
          'repetitions': repetitions,
          'rounds_a_repetition': block,
      },
  )


if __name__ == '__main__':
  main()
