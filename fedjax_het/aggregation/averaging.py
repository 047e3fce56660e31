"""Federated averaging of weights around any way to train locally."""

from collections.abc import Callable
from typing import Any

from fedjax_het.aggregation.exchange import WeightExchange
from fedjax_het.engine.types import FederatedAlgorithm, Uplink


def average_weights(
    exchange: WeightExchange, train: Callable[..., Any]
) -> FederatedAlgorithm:
  """Clients train what they are sent; the server averages the changes.

  Args:
    exchange: Which blocks travel and how they are averaged.
    train: `(group, start, data, visit) -> (end, metrics, num_steps)`, the
      local training of one client; `start` and `end` are `Variables`.

  Returns:
    The algorithm. Its server state is the union of the shared blocks, its
    client state the blocks that do not travel.
  """

  def client_update(group, client, sent, data, visit):
    start = exchange.assemble(group, client, sent)
    end, metrics, num_steps = train(group, start, data, visit)
    own, delta = exchange.upload(group, start, end, data.size, num_steps)
    return own, Uplink(delta), metrics

  return FederatedAlgorithm(
      init=exchange.init,
      init_client=lambda group, client_id, key: exchange.init_client(
          group, key
      ),
      downlink=lambda server, group, visit: exchange.download(server, group),
      client_update=client_update,
      server_update=lambda server, received, key: exchange.collect(
          server, received
      ),
      client_model=lambda server, client, group: exchange.assemble(
          group, client, exchange.download(server, group)
      ),
      personal=exchange.personal,
  )
