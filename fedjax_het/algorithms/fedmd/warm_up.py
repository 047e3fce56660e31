"""FedMD's warm-up: training on the public set, then on the client's data."""

from typing import Any, NamedTuple

import jax

from fedjax_het.algorithms.fedmd.early_stopping import fit_until
from fedjax_het.data.federated import ClientData
from fedjax_het.engine.local import init_optimizer
from fedjax_het.engine.types import LocalTraining, Visit
from fedjax_het.models.blocks import BlockModel, Variables


class Phase(NamedTuple):
  """A phase of the warm-up with early stopping.

  Attributes:
    local: Optimiser, batch size and the maximum number of epochs.
    patience: Epochs without a gain after which the phase ends; 0 for never.
    min_delta: Accuracy in [0, 1] that a gain must exceed.
  """

  local: LocalTraining
  patience: int
  min_delta: float


def pretrain_and_transfer(
    model: BlockModel,
    variables: Variables,
    data: ClientData,
    visit: Visit,
    pretrain: Phase,
    transfer: Phase,
) -> tuple[Variables, Any, dict[str, jax.Array]]:
  """Trains a client's model before round 1.

  Args:
    model: The client's architecture.
    variables: Its initial variables.
    data: The client's data, with public examples.
    visit: The visit.
    pretrain: Training on the public set.
    transfer: Training on the client's own data.

  Returns:
    The variables, the optimiser's state after the transfer, and the metrics.
  """

  def train(variables, phase, data, number):
    return fit_until(
        model,
        phase.local,
        variables,
        data,
        visit._replace(key=jax.random.fold_in(visit.key, number)),
        init_optimizer(phase.local, variables.params),
        patience=phase.patience,
        min_delta=phase.min_delta,
    )

  variables, _, public, _ = train(variables, pretrain, data.of_public(), 2)
  variables, opt_state, own, _ = train(variables, transfer, data, 3)
  metrics = dict(own, pretrain_loss=public['train_loss'])
  return variables, opt_state, metrics
