"""Private: every client trains its own model, without communication.

The lower bound that a federated method must beat (the baseline of that name
in FedMD and FedHe). All clients of an architecture start from equal parameters.

References:
  Li and Wang, `FedMD: Heterogenous Federated Learning via Model Distillation
  <https://arxiv.org/abs/1910.03581>`_, 2019.
"""

from fedjax_het.engine.local import fit_model, init_optimizer
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink


@requires(keep_optimizer=False)
def private(federation: Federation) -> FederatedAlgorithm:
  """Local training only.

  Args:
    federation: Groups and local training; the optimiser is reset in each visit
      unless `local.keep_optimizer` is True.

  Returns:
    The algorithm. Its client state is the client's whole model and the
    optimiser's state, or None if that is not kept.
  """
  local = federation.local
  keep = local.keeps_optimizer(False)

  def init_client(group, client_id, key):
    variables = group.model.init(key)
    return variables, init_optimizer(local, variables.params) if keep else None

  def client_update(group, client, sent, data, visit):
    del sent
    variables, opt_state = client
    end, opt_state, metrics, _ = fit_model(
        group.model, local, variables, data, visit, opt_state=opt_state
    )
    return (end, opt_state if keep else None), Uplink(()), metrics

  return FederatedAlgorithm(
      init=lambda key: (),
      init_client=init_client,
      downlink=lambda server, group, visit: (),
      client_update=client_update,
      server_update=lambda server, received, turn: (server, {}),
      client_model=lambda server, client, group: client[0],
      personal=True,
  )
