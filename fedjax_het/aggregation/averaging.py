"""Federated averaging of parameters, for any local training."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_het.aggregation.exchange import WeightExchange
from fedjax_het.engine.local import fit_model, init_optimizer
from fedjax_het.engine.types import FederatedAlgorithm, LocalTraining, Uplink
from fedjax_het.models.blocks import Variables
from fedjax_het.options import not_negative


class Client(NamedTuple):
  """State of a client that keeps its optimizer state.

  Attributes:
    own: The blocks that are not shared.
    opt_state: The optimiser's state over the whole model.
  """

  own: Variables
  opt_state: Any


def own_blocks(client: Client | Variables) -> Variables:
  """The blocks that are not shared, with or without an optimizer state."""
  return client.own if isinstance(client, Client) else client


def model_training(
    local: LocalTraining, mu: float = 0.0
) -> tuple[Callable[..., Any], bool]:
  """Local training of the whole model on the task's loss.

  Args:
    local: How to train.
    mu: Strength of a proximal term, see `train_model`.

  Returns:
    `train` and `keep` as `average_weights` takes them; the optimiser is reset
    in each visit unless `local.keep_optimizer` is True.

  Raises:
    ValueError: If `mu` is negative or not finite.
  """
  not_negative(mu=mu)
  keep = local.keeps_optimizer(False)

  def train(group, start, data, visit, opt_state=None):
    end, opt_state, metrics, num_steps = fit_model(
        group.model, local, start, data, visit, opt_state=opt_state, mu=mu
    )
    return (end, *(opt_state,) * keep, metrics, num_steps)

  return train, keep


def trained_clients(
    exchange: WeightExchange,
    train: Callable[..., Any],
    keep: bool,
    send: Callable[..., tuple[Variables, Uplink]],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """`init_client` and `client_update` of clients that train what they receive.

  Args:
    exchange: Which blocks are shared.
    train: As for `average_weights`.
    keep: As for `average_weights`.
    send: `(group, start, end, size, num_steps) -> (own blocks, uplink)`.

  Returns:
    `init_client` and `client_update` of a `FederatedAlgorithm`.
  """
  local = exchange.federation.local

  def init_client(group, client_id, key):
    del client_id
    own = exchange.init_client(group, key)
    if not keep:
      return own
    return Client(own, init_optimizer(local, group.model.init(key).params))

  def client_update(group, client, sent, data, visit):
    own, *state = client if keep else (client,)
    start = exchange.assemble(group, own, sent)
    end, *state, metrics, num_steps = train(group, start, data, visit, *state)
    own, uplink = send(group, start, end, data.size, num_steps)
    return Client(own, *state) if keep else own, uplink, metrics

  return init_client, client_update


def average_weights(
    exchange: WeightExchange, train: Callable[..., Any], keep: bool = False
) -> FederatedAlgorithm:
  """Clients train the received model; the server averages the changes.

  Args:
    exchange: Which blocks are shared and how they are averaged.
    train: `(group, start, data, visit) -> (end, metrics, num_steps)`, the
      local training of one client; `start` and `end` are `Variables`.
    keep: Whether clients keep their optimizer states: `train` then takes the
      state as a fifth argument and returns the new one after `end`.

  Returns:
    The algorithm. Its server state is the union of the shared blocks, with the
    state of the server's optimiser if that has any. Its client state is the
    blocks that are not shared, or a `Client`.
  """

  def send(group, start, end, size, num_steps):
    own, delta = exchange.upload(group, start, end, size, num_steps)
    return own, Uplink(delta)

  init_client, client_update = trained_clients(exchange, train, keep, send)
  return FederatedAlgorithm(
      init=exchange.init,
      init_client=init_client,
      downlink=lambda server, group, visit: exchange.download(server, group),
      client_update=client_update,
      server_update=lambda server, received, turn: (
          exchange.collect(server, received), {}
      ),
      client_model=lambda server, client, group: exchange.assemble(
          group, own_blocks(client), exchange.download(server, group)
      ),
      personal=exchange.personal,
      one_model=exchange.one_model,
  )
