"""What asynchronous rounds cost beside synchronous ones of as many visits.

  python -m benchmarks.async_cost [--quick] [--output=FILE]

Ten clients with a small convolutional net each train by FedAvg. Both drivers
run rounds of ten visits, in turn in one process; the asynchronous one serves
devices of three speeds, so it trains in several waves a round and calls the
server once for each upload.
"""

import argparse

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
  repetitions = 4 if args.quick else 3

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
  schedule = plan(fleet, NUM_CLIENTS * (repetitions + 3))
  events = asynchronous.round_events(schedule, federation, NUM_CLIENTS)
  by_clock = asynchronous.make_async_round(algorithm, federation, **options)

  states = {
      'synchronous': jax.tree.map(jax.numpy.copy, init),
      'asynchronous': asynchronous.init_async_state(
          algorithm, federation, init, data
      ),
  }

  def call(name, run_round):
    def one_round():
      state = states[name]
      who = key
      if name == 'asynchronous':
        who = events[int(state.round_num)]
      states[name], _ = jax.block_until_ready(
          run_round(state, data, key, who)
      )

    return one_round

  programs = {
      'synchronous': (call('synchronous', synchronous), repetitions),
      'asynchronous': (call('asynchronous', by_clock), repetitions),
  }
  for one_round, _ in programs.values():
    one_round()  # Compiles, and trains all clients' first visits.
  seconds = common.interleave(programs)
  timed = events[1 : 1 + repetitions]
  trained = [int(e.training[group.name].bounds[-1]) for e in timed]
  waves = [int(np.sum(e.wave)) for e in timed]
  ratio = seconds['asynchronous'] / seconds['synchronous']
  rows = [[name, seconds[name]] for name in programs]
  print(common.markdown(['driver', 'seconds a round'], rows))
  print(
      f'\n{ratio:.2f} times the synchronous round; clients trained in the '
      f'timed rounds {trained}, in {waves} waves.'
  )
  suffix = '_quick' if args.quick else ''
  common.write(
      args.output or common.RESULTS / f'async_cost{suffix}.json',
      {
          'seconds': seconds,
          'ratio': ratio,
          'trained': trained,
          'waves': waves,
          'model': model.name,
          'parameters': sum(
              leaf.size
              for leaf in jax.tree.leaves(model.abstract_variables.params)
          ),
          'clients': NUM_CLIENTS,
          'images': IMAGES,
          'repetitions': repetitions,
      },
  )


if __name__ == '__main__':
  main()
