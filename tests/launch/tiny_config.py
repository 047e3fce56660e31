"""Tiny dense nets whose clients have states, trained by `private` or `fedmd`.

Two devices divide the clients of the first group evenly, not of the second.
"""

import ml_collections

from tests.experiment.tiny_runs import tiny_config


def get_config(arg=''):
  """Variants: '', 'async' (the clock's mode), 'warm_up' (FedMD has one)."""
  if arg not in ('', 'async', 'warm_up'):
    raise ValueError(f'Unknown variant {arg!r}.')
  name = 'fedmd' if arg == 'warm_up' else 'private'
  config = tiny_config(name, num_rounds=4, backend='shard_map')
  config.groups = ml_collections.ConfigDict(
      dict(
          even=dict(model='mlp', depth=2, clients=4),
          odd=dict(model='mlp', depth=2, hidden=12, clients=3),
      )
  )
  config.model = ml_collections.ConfigDict(dict(hidden=8, norm='none'))
  config.cohort_size = 5
  if arg == 'async':
    config.clock.mode = 'async'
  return config
