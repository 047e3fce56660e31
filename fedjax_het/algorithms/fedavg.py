"""FedAvg over clients of one or several architectures.

A client of the cohort trains what it was sent for some epochs; the server
moves every leaf l by the mean change of the clients k that own it,

  x_l <- x_l + server_lr * sum_k p_k (y_kl - x_l),

p_k uniform or proportional to the number of examples. With one architecture
this is the original method.

References:
  McMahan et al., `Communication-Efficient Learning of Deep Networks from
  Decentralized Data <https://arxiv.org/abs/1602.05629>`_, AISTATS 2017. The
  layer-wise mean over architectures is the one of FedIN v2 (Eq. 19), the mean
  inside an architecture its Eq. 20 and 21.
"""

from fedjax_het.aggregation.averaging import average_weights, model_training
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation


@requires(keep_optimizer=False)
def fedavg(
    federation: Federation,
    *,
    aggregation: str = 'layerwise',
    weights: str = 'uniform',
    server_lr: float = 1.0,
) -> FederatedAlgorithm:
  """Federated averaging.

  Args:
    federation: Groups and local training.
    aggregation: 'layerwise' averages a block over all clients that own it,
      'architecture' only inside a group, 'ends' only extractor and
      classifier, 'none' nothing.
    weights: 'uniform', or 'data' for weights proportional to the number of
      examples (the original paper).
    server_lr: Factor on the mean change; 1 in the paper.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is unknown, or shared blocks differ in shape.
  """
  return average_weights(
      make_exchange(federation, aggregation, weights, server_lr),
      *model_training(federation.local),
  )
