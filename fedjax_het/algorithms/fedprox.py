"""FedProx: federated averaging with a leash on every local step.

A client minimises L_k(w) + (mu/2) ||w - a||^2, a being the weights that it
received; the gradient is that of L_k plus mu (w - a). Norm statistics are not
leashed. Over several architectures the sum runs over the leaves a client owns.

References:
  Li et al., `Federated Optimization in Heterogeneous Networks
  <https://arxiv.org/abs/1812.06127>`_, MLSys 2020. FedIN v2 compares with
  mu = 0.1, which it prints as mu/2 = 0.05.
"""

from fedjax_het.aggregation.averaging import average_weights, model_training
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.engine.needs import requires
from fedjax_het.engine.options import not_negative
from fedjax_het.engine.types import FederatedAlgorithm, Federation


@requires(keep_optimizer=False)
def fedprox(
    federation: Federation,
    *,
    mu: float = 0.1,
    aggregation: str = 'layerwise',
    weights: str = 'uniform',
    server_lr: float = 1.0,
) -> FederatedAlgorithm:
  """Federated averaging with a proximal term.

  Args:
    federation: Groups and local training.
    mu: Strength of the leash, the factor in the gradient; 0 gives FedAvg bit
      for bit.
    aggregation: As for `fedavg`.
    weights: As for `fedavg`.
    server_lr: As for `fedavg`.

  Returns:
    The algorithm.

  Raises:
    ValueError: If `mu` is negative, an option is unknown, or shared blocks
      differ in shape.
  """
  not_negative(mu=mu)
  return average_weights(
      make_exchange(federation, aggregation, weights, server_lr),
      *model_training(federation.local, mu),
  )
