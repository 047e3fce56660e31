"""FedAvg over clients of one or several architectures.

A client of the cohort trains what it was sent for some epochs; the server
moves every leaf l by the mean change of the clients k that own it,

  x_l <- x_l + server_lr * sum_k p_k (y_kl - x_l),

p_k uniform or proportional to the number of examples. With one architecture
this is the original method. With another server optimiser the mean change is
the gradient, negated, of a step of FedAvgM ('sgd' with momentum), FedAdam,
FedYogi or FedAdagrad: see `fedjax_het/aggregation/server.py`.

References:
  McMahan et al., `Communication-Efficient Learning of Deep Networks from
  Decentralized Data <https://arxiv.org/abs/1602.05629>`_, AISTATS 2017. The
  layer-wise mean over architectures is the one of FedIN v2 (Eq. 19), the mean
  inside an architecture its Eq. 20 and 21.
"""

import optax

from fedjax_het.aggregation.averaging import average_weights, model_training
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.server import takes_server_options
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation


@requires(keep_optimizer=False)
@takes_server_options()
def fedavg(
    federation: Federation,
    *,
    aggregation: str = 'layerwise',
    weights: str = 'uniform',
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """Federated averaging.

  Args:
    federation: Groups and local training.
    aggregation: 'layerwise' averages a block over all clients that own it,
      'architecture' only inside a group, 'ends' only extractor and
      classifier, 'classifier' only that, 'none' nothing.
    weights: The averaging coefficients p_k: 'uniform', or 'data' for the
      number of examples (the original paper).
    tx: The server's step, plain averaging in the paper. Its options are
      `server_optimizer`: 'sgd', 'adam', 'yogi' or 'adagrad'; `server_lr`, its
      learning rate: the steps of the adaptive ones are about as large as it,
      0.001 to 0.1; `server_momentum`, beta: None for 0.9 with 'adam' and
      'yogi', else 0; `server_eps`, tau, added to the root of the second moment.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is unknown or out of range, or shared blocks differ
      in shape.
  """
  return average_weights(
      make_exchange(federation, aggregation, weights, tx=tx),
      *model_training(federation.local),
  )
