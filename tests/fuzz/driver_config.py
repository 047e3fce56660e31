"""A tiny run under each driver, for the command line."""

import ml_collections

from tests.experiment.tiny_runs import tiny_config

# The drivers differ in how they store states and run rounds.
DRIVERS = ('synchronous', 'host', 'dispatch', 'async', 'sequential', 'tiers')


def get_config(arg='synchronous'):
  """Variants: 'DRIVER' or 'DRIVER,ROUNDS'; ROUNDS is 4 by default."""
  driver, _, num_rounds = arg.partition(',')
  if driver not in DRIVERS:
    raise ValueError(f'Unknown driver {driver!r}.')
  # Clients of `private` keep states between their visits.
  config = tiny_config('private', num_rounds=int(num_rounds or 4))
  config.groups = ml_collections.ConfigDict(
      dict(small=dict(model='mlp', depth=2, clients=4))
  )
  config.model = ml_collections.ConfigDict(dict(hidden=4, norm='none'))
  config.cohort_size = 2
  config.local.steps = 2
  config.checkpoint_every = 1
  if driver == 'host':
    config.client_store = 'host'
  elif driver == 'dispatch':
    config.rounds_per_dispatch = 3
    config.checkpoint_every = 4
    config.eval_every = 2
  elif driver != 'synchronous':
    config.clock.mode = driver
  return config
