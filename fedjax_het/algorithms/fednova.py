"""FedNova: averages changes divided by their effective numbers of steps.

Clients that take more local steps pull FedAvg's mean towards their own optimum.
Let a_k be the coefficients of the local gradients in (x - y_k) / lr, and
A_k = ||a_k||_1 the effective number of steps. One round, for every leaf l, with
p_k normalised over the clients of the cohort that own l:

  1. Clients train as in FedAvg, from x to y_k: Delta_k = y_k - x.
  2. tau_l = sum_k p_k A_k
  3. x_l <- x_l + sum_k p_k (tau_l / A_k) Delta_kl

The local learning rate cancels. With equal A_k this is FedAvg. Running
statistics become their plain mean; scaling their changes by tau_l / A_k could
make a variance negative.

A_k is measured: with an optimiser that is linear in the gradients, a constant
gradient of 1 moves a parameter by -lr A_k. This gives K for SGD, and (K - rho
(1 - rho^K) / (1 - rho)) / (1 - rho) with momentum rho. Adam is not linear; it
gives K up to rounding. Weight decay is part of the gradient, not of a_k.

With a proximal term the authors' code differs: with momentum it adds to A_k
twice per step, and its tau is the mean of K_k. Here tau is as above.

The optimiser is reset in each visit, because A_k assumes a new optimiser.

References:
  Wang, Liu, Liang, Joshi, Poor, `Tackling the Objective Inconsistency Problem
  in Heterogeneous Federated Optimization <https://arxiv.org/abs/2007.07481>`_,
  NeurIPS 2020. The means over the owners of a leaf are those of FedIN v2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.exchange import Delta, make_exchange
from fedjax_het.aggregation.server import takes_server_options, weighted_mean
from fedjax_het.engine.local import train_model, visit_steps
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.options import not_negative


class Sent(NamedTuple):
  """The uplink of one client, or a sum of them.

  Attributes:
    delta: As in FedAvg, but the trainable leaves hold p_k Delta_k / A_k.
    steps: [] float32, p_k A_k. A_k is relative to that of the largest client,
      or of one step if sizes are unknown.
  """

  delta: Delta
  steps: jax.Array


def effective_steps(
    tx: optax.GradientTransformation, num_steps, alpha=0.0
) -> jax.Array:
  """A = ||a||_1 of local steps, measured with a constant gradient of 1.

  Args:
    tx: The local optimiser with learning rate 1.
    num_steps: [] int32, K.
    alpha: lr times the strength of a proximal term.

  Returns:
    [] float32, 0 for no step.
  """
  zero = jnp.float32(0.0)

  def step(_, carry):
    moved, state = carry
    # g = 1 + mu (w - x), w - x = -lr A. Weight decay sees a parameter of 0.
    update, state = tx.update(1.0 + alpha * moved, state, zero)
    return moved + update, state

  moved, _ = jax.lax.fori_loop(0, num_steps, step, (zero, tx.init(zero)))
  return -moved


@requires()
@takes_server_options(server_momentum=0.0)
def fednova(
    federation: Federation,
    *,
    aggregation: str = 'layerwise',
    weights: str = 'uniform',
    mu: float = 0.0,
    min_steps: float = 0.0,
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """FedNova over clients of one or several architectures.

  Args:
    federation: Groups and local training. With `Federation.sizes`, tau / A_k
      is exactly 1 if all clients take as many steps as the largest.
    aggregation: As for `fedavg`.
    weights: The averaging coefficients p_k: 'uniform', or 'data' for the
      number of examples (the paper). Local steps are proportional to
      examples, so FedAvg with 'data' counts examples twice.
    mu: Strength of a proximal term, 0 or 0.005 in the paper.
    min_steps: Lower bound of A_k, in units of a single step, since a client's
      change is multiplied by tau / A_k. 0 for no bound (the paper).
    tx: The server's optimiser, with the options of `fedavg`. `server_momentum`
      is 0 or 0.9 in the paper, and 0 by default. The momentum sums changes,
      which contain the local learning rate.

  Returns:
    The algorithm. Server and clients hold what they hold in FedAvg.

  Raises:
    ValueError: If an option is unknown or out of range, or shared blocks differ
      in shape.
  """
  not_negative(mu=mu, min_steps=min_steps)
  exchange = make_exchange(federation, aggregation, weights, tx=tx)
  local = federation.local
  largest = 1
  if federation.sizes is not None:
    largest = max(int(visit_steps(local, federation.max_examples)), 1)

  def relative_steps(num_steps, round_num):
    """A_k divided by that of the largest client; the unit cancels."""
    tx, alpha = local.optimizer(1.0), mu * local.learning_rate(round_num)
    # In one `vmap`, so that equal numbers of steps have ratio exactly 1.
    numbers = jnp.stack([num_steps, largest, 1])
    steps = jax.vmap(lambda k: effective_steps(tx, k, alpha))(numbers)
    # The unit is a single step, which is not 1 with a clipped gradient.
    a, unit = jnp.maximum(steps[:2] / steps[2], min_steps)
    # A client without a step has p_k = 0; A_k = 1 avoids a division by 0.
    return jnp.where(num_steps > 0, a, unit) / unit

  def client_update(group, client, sent, data, visit):
    start = exchange.assemble(group, client, sent)
    end, metrics, num_steps = train_model(
        group.model, local, start, data, visit, mu=mu
    )
    own, delta = exchange.upload(group, start, end, data.size, num_steps)
    a = relative_steps(num_steps, visit.round_num)
    # p_k Delta_k / A_k, and p_k A_k.
    change = jax.tree.map(lambda change: change / a, delta.change)
    delta = delta._replace(change=change)
    return own, Uplink(Sent(delta, delta.weight * a)), metrics

  def server_update(server, received, turn):
    sent = [received[group.name].summed for group in federation.groups]

    def times_tau(mean, _):
      # tau_l = sum_k p_k A_k over the owners of l.
      tau, _ = weighted_mean(
          ({key: s.steps for key in s.delta.change}, s.delta.weight)
          for s in sent
      )
      # tau_l sum_k p_k Delta_kl / A_k.
      return {
          key: jax.tree.map(lambda d, t=tau[key]: t * d, tree)
          for key, tree in mean.items()
      }

    # x_l <- x_l + tau_l sum_k p_k Delta_kl / A_k; s <- sum_k p_k s_k.
    new = exchange.collect(server, received, lambda s: s.delta, times_tau)
    return new, {}

  return FederatedAlgorithm(
      init=exchange.init,
      init_client=lambda group, client_id, key: exchange.init_client(
          group, key
      ),
      downlink=lambda server, group, visit: exchange.download(server, group),
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: exchange.assemble(
          group, client, exchange.download(server, group)
      ),
      personal=exchange.personal,
      one_model=exchange.one_model,
  )
