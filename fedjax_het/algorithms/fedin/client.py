"""FedIN's clients: their local training and the pairs that they upload."""

import jax

from fedjax_het.algorithms.fedin.capture import (
  empty_buffer,
  final_pairs,
  protect_upload,
)
from fedjax_het.algorithms.fedin.passes import Features
from fedjax_het.algorithms.fedin.steps import Carry, Setting, make_step
from fedjax_het.engine.local import train_epochs
from fedjax_het.engine.types import LocalTraining, Maybe, Visit
from fedjax_het.models.blocks import BlockModel, Variables


def train(
    model: BlockModel,
    local: LocalTraining,
    start: Variables,
    pairs: Maybe,
    data,
    visit: Visit,
    setting: Setting,
) -> tuple[Carry, dict[str, jax.Array], jax.Array]:
  """Local steps with G_loc, and with Z on the intermediate layers.

  Args:
    model: The client's architecture.
    local: Local training.
    start: w_start, the variables at the beginning.
    pairs: `Maybe` of the `Pairs` that the client has received.
    data: The client's examples.
    visit: The visit.
    setting: The options.

  Returns:
    The `Carry` after the local steps, the metrics, the number of steps.
  """
  tx = local.optimizer(local.learning_rate(visit.round_num))
  carry = Carry(start, tx.init(start.params))
  if setting.in_training and setting.rule == 'sequential':
    middle = {name: start.params[name] for name in model.intermediate}
    carry = carry._replace(in_opt_state=tx.init(middle))
  if setting.in_training and setting.captured is not None:
    buffer = empty_buffer(setting.sizes, setting.captured)
    carry = carry._replace(buffer=buffer)
  return train_epochs(
      make_step(model, local.task, tx, start.params, pairs, setting),
      carry,
      data,
      visit.key,
      epochs=local.epochs,
      batch_size=local.batch_size,
      drop_last=local.drop_last,
      steps=local.steps,
  )


def pairs_to_upload(
    model: BlockModel,
    trained: Carry,
    data,
    visit: Visit,
    setting: Setting,
    at_upload: Features,
) -> Maybe:
  """The pairs of the training passes, or of a pass after training.

  Args:
    model: The client's architecture.
    trained: The `Carry` after the local steps, see `train`.
    data: The client's examples.
    visit: The visit.
    setting: The options.
    at_upload: Clipping and noise of the uploaded pairs.

  Returns:
    `Maybe` of `Pairs` [N B, ...].
  """
  # Training splits `visit.key` itself, so batches are those of the baselines.
  # The two parts equal the folds of 0 and 1; the fold of 2 is independent.
  pair_key, noise_key = jax.random.split(jax.random.fold_in(visit.key, 2))
  pairs = trained.buffer
  if pairs is None:
    pairs = final_pairs(
        model, trained.variables, data, pair_key, setting.sizes,
        setting.protect,
    )  # fmt: skip
  return protect_upload(pairs, noise_key, at_upload)
