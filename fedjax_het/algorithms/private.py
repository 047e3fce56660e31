"""Private: every client trains its own model alone, and nothing travels.

The lower bound that a federated method must beat (the baseline of that name
in FedMD and FedHe). All clients of an architecture start from equal weights.

References:
  Li and Wang, `FedMD: Heterogenous Federated Learning via Model Distillation
  <https://arxiv.org/abs/1910.03581>`_, 2019.
"""

from fedjax_het.engine.local import train_model
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink


def private(federation: Federation) -> FederatedAlgorithm:
  """Local training only.

  Args:
    federation: Groups and local training.

  Returns:
    The algorithm; its client state is the client's whole model.
  """

  def client_update(group, client, sent, data, visit):
    del sent
    end, metrics, _ = train_model(
        group.model, federation.local, client, data, visit
    )
    return end, Uplink(()), metrics

  return FederatedAlgorithm(
      init=lambda key: (),
      init_client=lambda group, client_id, key: group.model.init(key),
      downlink=lambda server, group, visit: (),
      client_update=client_update,
      server_update=lambda server, received, key: server,
      client_model=lambda server, client, group: client,
      personal=True,
  )
