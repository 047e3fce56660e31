"""FedProx: federated averaging with a proximal term in every local step.

A client minimises L_k(w) + (mu/2) ||w - a||^2, where a are the parameters that
it received, so its gradient is that of L_k plus mu (w - a). Running norm
statistics have no proximal term. With several architectures the norm is over
the leaves that a client owns.

References:
  Li et al., `Federated Optimization in Heterogeneous Networks
  <https://arxiv.org/abs/1812.06127>`_, MLSys 2020. FedIN v2 compares with
  mu = 0.1, which it prints as mu/2 = 0.05.
"""

import optax

from fedjax_het.aggregation.averaging import average_weights, model_training
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.server import takes_server_options
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation
from fedjax_het.options import not_negative


@requires(keep_optimizer=False)
@takes_server_options()
def fedprox(
    federation: Federation,
    *,
    mu: float = 0.1,
    aggregation: str = 'layerwise',
    weights: str = 'uniform',
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """Federated averaging with a proximal term.

  Args:
    federation: Groups and local training.
    mu: Strength of the proximal term, the factor in the gradient; 0 gives
      FedAvg bit for bit.
    aggregation: As for `fedavg`.
    weights: As for `fedavg`.
    tx: The server's optimiser, with the options of `fedavg`.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is unknown or out of range, or shared blocks differ
      in shape.
  """
  not_negative(mu=mu)
  return average_weights(
      make_exchange(federation, aggregation, weights, tx=tx),
      *model_training(federation.local, mu),
  )
