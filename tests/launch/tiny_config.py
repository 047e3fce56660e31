"""Private training of tiny dense nets: every client has a state.

Two devices divide the one group's clients, and not the other's.
"""

import ml_collections

from tests.experiment.tiny_runs import tiny_config


def get_config():
  config = tiny_config('private', num_rounds=4, backend='shard_map')
  config.groups = ml_collections.ConfigDict(
      dict(
          even=dict(model='mlp', depth=2, clients=4),
          odd=dict(model='mlp', depth=2, hidden=12, clients=3),
      )
  )
  config.model = ml_collections.ConfigDict(dict(hidden=8, norm='none'))
  config.cohort_size = 5
  return config
