"""Compares the cost per visit of asynchronous and synchronous rounds.

  python -m benchmarks.async_cost [--quick] [--output=FILE]

There are two cases with ten clients: one architecture, a small convolutional
model trained by FedAvg, and ten architectures, the CNNs of FedHe at an eighth
of their width. Both drivers run rounds of ten uploads, in turn in one process.
The asynchronous driver has devices of three speeds and calls the server once
per upload. The number of clients that train varies between its rounds, so times
are over several rounds, divided by the number of visits trained.
"""

import argparse
import dataclasses
import time

import jax
import numpy as np

from benchmarks import common
from fedjax_het.algorithms import fedavg, fedhe
from fedjax_het.engine import asynchronous, rounds, visits
from fedjax_het.engine.clock import Device, Fleet, plan
from fedjax_het.engine.events import round_events
from fedjax_het.engine.types import Group
from fedjax_het.models import create

NUM_CLIENTS = 10
NETS = range(10)
SHAPE = (28, 28, 1)
SPEEDS = (1000.0,) * 5 + (400.0,) * 3 + (100.0,) * 2  # Examples a second.
IMAGES = 150  # A visit is three minibatches of 50 in FedHe's setting.


def one_architecture(quick: bool):
  """FedAvg, ten clients with one model."""
  if quick:
    model = create('mlp', SHAPE, 10, depth=3, hidden=64)
  else:
    model = create('simple_cnn', SHAPE, 10)
  federation, data = common.make_federation(model, NUM_CLIENTS, IMAGES)
  return fedavg(federation), federation, data


def ten_architectures(quick: bool):
  """FedHe, one client per model; three minibatches of 50 per visit."""
  if quick:
    models = [create('mlp', SHAPE, 10, depth=2, hidden=8 + i) for i in NETS]
  else:
    models = [create(f'fedhe_cnn{i}', SHAPE, 10, width=0.125) for i in NETS]
  federation, data = common.make_federation(models[0], NUM_CLIENTS, IMAGES)
  federation = dataclasses.replace(
      federation,
      groups=tuple(
          Group(f'net{i}', model, np.array([i], np.int32))
          for i, model in enumerate(models)
      ),
      local=dataclasses.replace(federation.local, steps=3, batch_size=50),
  )
  return fedhe(federation), federation, data


def compare(algorithm, federation, data, repetitions: int, block: int):
  """Times both drivers.

  Args:
    algorithm: The method.
    federation: Ten clients.
    data: Their examples.
    repetitions: Repetitions; the minimum time counts.
    block: Rounds per repetition.

  Returns:
    {driver: seconds per trained visit}, and the mean number of waves per round.
  """
  key, options = jax.random.key(1), dict(cohort_size=NUM_CLIENTS)
  init = rounds.init_state(algorithm, federation, jax.random.key(0))
  messages = np.zeros((NUM_CLIENTS, 2), np.int64)
  for group in federation.groups:
    messages[group.client_ids] = visits.message_bytes(algorithm, group, data)
  fleet = Fleet(
      [Device(speed, jitter=0.1) for speed in SPEEDS],
      [IMAGES] * NUM_CLIENTS,
      *messages.T.tolist(),
  )
  schedule = plan(fleet, NUM_CLIENTS * (repetitions * block + 1))
  events = round_events(schedule, federation, NUM_CLIENTS)
  drivers = {
      'synchronous': rounds.make_round(algorithm, federation, **options),
      'asynchronous': asynchronous.make_async_round(
          algorithm, federation, **options
      ),
  }
  states = {
      'synchronous': jax.tree.map(jax.numpy.copy, init),
      'asynchronous': asynchronous.init_async_state(
          algorithm, federation, init, data
      ),
  }

  def run(name, num_rounds):
    """Seconds per trained visit."""
    trained, begin = 0, time.perf_counter()
    for _ in range(num_rounds):
      who, number = key, NUM_CLIENTS
      if name == 'asynchronous':
        who = events[int(states[name].round_num)]
        number = sum(turns.bounds[-1] for turns in who.training.values())
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
  return seconds, float(np.mean([np.sum(e.wave) for e in events[1:]]))


FORMS = {
    'FedAvg, one architecture': one_architecture,
    'FedHe, ten architectures': ten_architectures,
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='dense nets')
  parser.add_argument('--output', help='JSON file to write')
  args = parser.parse_args()
  repetitions, block = 4, 20 if args.quick else 4  # A block is so many rounds.
  rows, results = [], {}
  for name, make in FORMS.items():
    seconds, waves = compare(*make(args.quick), repetitions, block)
    ratio = seconds['asynchronous'] / seconds['synchronous']
    rows.append([name, *(1e3 * s for s in seconds.values()), ratio, waves])
    results[name] = dict(
        seconds_a_visit=seconds, ratio=ratio, waves_a_round=waves
    )
    print(f'{name}: done', flush=True)
  header = ['ten clients', 'synchronous, ms a visit', 'asynchronous', 'ratio']
  print(common.markdown([*header, 'waves for ten uploads'], rows))
  suffix = '_quick' if args.quick else ''
  common.write(
      args.output or common.RESULTS / f'async_cost{suffix}.json',
      {
          'forms': results,
          'images': IMAGES,
          'repetitions': repetitions,
          'rounds_a_repetition': block,
      },
  )


if __name__ == '__main__':
  main()
