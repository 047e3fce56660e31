"""The clients' local training, as a config's `local` describes it."""

from typing import Any

import jax.numpy as jnp
import optax

from fedjax_het.engine.types import LocalTraining


def local_training(config) -> LocalTraining:
  """The clients' local training as the config's `local` describes it."""
  local = config.local

  def optimizer(learning_rate: Any) -> optax.GradientTransformation:
    steps = []
    if local.clip_norm is not None:
      steps.append(optax.clip_by_global_norm(local.clip_norm))
    if local.weight_decay and local.optimizer != 'adamw':
      steps.append(optax.add_decayed_weights(local.weight_decay))
    steps.append(_OPTIMIZERS[local.optimizer](local, learning_rate))
    return optax.chain(*steps) if len(steps) > 1 else steps[0]

  return LocalTraining(
      optimizer,
      _SCHEDULES[local.schedule](local, config.num_rounds),
      local.epochs,
      local.batch_size,
      local.drop_last,
      local.steps,
      drop_unused_weights=not local.weight_decay,
      keep_optimizer=local.keep_optimizer,
  )


_OPTIMIZERS = {
    'adam': lambda local, rate: optax.adam(rate),
    'adamw': lambda local, rate: optax.adamw(
        rate, weight_decay=local.weight_decay
    ),
    'sgd': lambda local, rate: optax.sgd(
        rate, local.momentum or None, local.nesterov
    ),
}


def _constant(local, num_rounds):
  del num_rounds
  return lambda round_num: local.learning_rate


def _step(local, num_rounds):
  del num_rounds
  drops = jnp.asarray(sorted(local.lr_rounds), jnp.int32)
  return lambda round_num: local.learning_rate * local.lr_factor ** jnp.sum(
      round_num + 1 >= drops
  ).astype(jnp.float32)


def _cosine(local, num_rounds):
  return optax.cosine_decay_schedule(local.learning_rate, num_rounds)


_SCHEDULES = {'constant': _constant, 'step': _step, 'cosine': _cosine}
