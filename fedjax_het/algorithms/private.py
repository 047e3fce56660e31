"""Private: every client trains its own model alone, and nothing travels.

The lower bound that a federated method must beat (the baseline of that name
in FedMD and FedHe). All clients of an architecture start from equal weights.

References:
  Li and Wang, `FedMD: Heterogenous Federated Learning via Model Distillation
  <https://arxiv.org/abs/1910.03581>`_, 2019.
"""

from fedjax_het.engine.local import (
  fit,
  init_optimizer,
  model_loss,
  train_model,
)
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink


def private(
    federation: Federation, *, keep_optimizer: bool = False
) -> FederatedAlgorithm:
  """Local training only.

  Args:
    federation: Groups and local training.
    keep_optimizer: Whether the optimiser's state stays between visits, as with
      methods that exchange no weights; else it begins anew in every visit.

  Returns:
    The algorithm; its client state is the client's whole model and, if that is
    kept, its optimiser's state (None if not).
  """
  local = federation.local

  def init_client(group, client_id, key):
    variables = group.model.init(key)
    if not keep_optimizer:
      return variables, None
    return variables, init_optimizer(local, variables.params)

  def client_update(group, client, sent, data, visit):
    del sent
    variables, opt_state = client
    if keep_optimizer:
      end, opt_state, metrics, _ = fit(
          model_loss(group.model), local, variables, data, visit,
          opt_state=opt_state,
      )  # fmt: skip
    else:
      end, metrics, _ = train_model(group.model, local, variables, data, visit)
    return (end, opt_state), Uplink(()), metrics

  return FederatedAlgorithm(
      init=lambda key: (),
      init_client=init_client,
      downlink=lambda server, group, visit: (),
      client_update=client_update,
      server_update=lambda server, received, key: server,
      client_model=lambda server, client, group: client[0],
      personal=True,
  )
