"""The clients' local training, as a config's `local` describes it."""

import functools

from fedjax_het.engine.types import LocalTraining
from fedjax_het.experiment import optimizers


def local_training(config) -> LocalTraining:
  """The clients' local training as the config's `local` describes it."""
  local = config.local
  return LocalTraining(
      functools.partial(optimizers.optimizer, local),
      optimizers.schedule(local, config.num_rounds),
      local.epochs,
      local.batch_size,
      local.drop_last,
      local.steps,
      drop_unused_weights=not optimizers.reads_params(local),
      keep_optimizer=local.keep_optimizer,
  )
