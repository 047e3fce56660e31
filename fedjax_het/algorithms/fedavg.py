"""FedAvg over clients of one or several architectures.

Each client of the cohort trains the model that it received for some epochs. The
server moves every trainable leaf l by the mean change over the clients k that
own it,

  x_l <- x_l + server_lr * sum_k p_k (y_kl - x_l),

with p_k uniform or proportional to the number of examples. Running statistics
become their mean. With one architecture this is the original method. Another
server optimiser takes the negated mean change as its gradient: FedAvgM ('sgd'
with momentum), FedAdam, FedYogi or FedAdagrad, see
`fedjax_het/aggregation/server.py`.

References:
  McMahan et al., `Communication-Efficient Learning of Deep Networks from
  Decentralized Data <https://arxiv.org/abs/1602.05629>`_, AISTATS 2017. The
  layer-wise mean over architectures is Eq. 19 of FedIN v2, the mean inside an
  architecture its Eq. 20 and 21.
"""

import optax

from fedjax_het.aggregation.averaging import average_weights, model_training
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.label_masks import with_batch_mask
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
    mask: str = 'none',
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """Federated averaging.

  Args:
    federation: Groups and local training.
    aggregation: 'layerwise' averages a block over all clients that own it,
      'architecture' only inside a group. 'ends' averages only extractor and
      classifier, 'classifier' only the classifier, 'none' nothing.
    weights: The averaging coefficients p_k: 'uniform', or 'data' for the
      number of examples (the original paper).
    mask: 'batch' sets the logits of labels absent from the minibatch to 0 in
      the loss, as FeDepth's authors do where clients hold a few labels.
    tx: The server's optimiser; plain averaging in the paper. Its options are
      `server_optimizer`: 'sgd', 'adam', 'yogi' or 'adagrad'; `server_lr`, its
      learning rate, which is about the step size of the adaptive optimisers
      (0.001 to 0.1); `server_momentum`, beta: None for 0.9 with 'adam' and
      'yogi', else 0; `server_eps`, tau, added to the root of the second moment.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is unknown or out of range, a mask has no classes,
      or shared blocks differ in shape.
  """
  federation = with_batch_mask('fedavg', federation, mask)
  return average_weights(
      make_exchange(federation, aggregation, weights, tx=tx),
      *model_training(federation.local),
  )
