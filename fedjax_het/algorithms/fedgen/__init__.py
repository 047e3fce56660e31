"""FedGen: the server trains a generator of features for the clients.

G maps noise and a label to an input of the classifier, so that the classifiers
of the clients recognise the label. Only the size of that input must be equal
for all clients; extractors may differ. In round t, with H_k the classifier of
client k and f_k its whole model,

  down:    the model as in FedAvg, G, and the classes that G was trained on, Y;
  client:  CE(f_k(x), y) + a_t (B_g/B) mean CE(H_k(G(y~)), y~)
             + b_t KL(softmax(H_k(G(y))) || softmax(f_k(x))),
           y~ uniform over Y; c_k[y] = 1 + real examples of y in the steps;
  up:      the change of the model, c_k;
  server:  G <- Adam on  sum_k mean omega_k(y) CE(H_k(G(y)), y) + eta L_div,
           omega_k(y) = c_k[y] / sum_j c_j[y], y uniform over the classes that
           some client of the round has trained on;
           then the mean of the models as in FedAvg.

a_t = max(1e-4, a 0.98^t), and likewise b_t. While Y is empty both terms are
absent, so the first round is that of FedAvg. On clients, G is in eval mode and
gets no gradient; extractors get none from a_t's term.

Choices that the sources leave open or hide:

- G's loss weights each example's loss of client k by omega_k(y). Eq. 4 has the
  loss of the clients' mean logits; the code multiplies mean loss and mean
  weight of a batch, by a product of shapes [B] and [B, 1].
- Noise is uniform on [0, 1), as in the authors' code; in the paper it is
  normal.
- Y is the set of classes that some client has ever trained on. The code knows
  the classes of all clients in advance.
- The paper's third term for G, a student's KL, is left out: its weight is 0 in
  all released settings.
- `aggregation='classifier'` is the paper's partial sharing: extractors stay on
  the clients. The released code for it sends nothing.
- Clients reset their optimiser in every visit; the server keeps the state of
  G's optimiser.
- The classifier is in eval mode on generated features.

This file has more than 200 lines: a third explains the rule and the options.

References:
  Zhu, Hong, Zhou, `Data-Free Knowledge Distillation for Heterogeneous Federated
  Learning <https://arxiv.org/abs/2105.10056>`_, ICML 2021, Algorithm 1, Eq. 4
  to 6.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.server import takes_server_options
from fedjax_het.aggregation.uploads import clear_padding
from fedjax_het.algorithms.fedgen.client import (
  Sent,
  client_loss,
  count_labels,
  strength,
)
from fedjax_het.algorithms.fedgen.generator import (
  Generator,
  init_generator,
  latent_size,
)
from fedjax_het.algorithms.fedgen.server import (
  generator_loss,
  generator_training,
  make_ensemble,
  train_generator,
)
from fedjax_het.algorithms.fedgen.uploads import (
  split_classifier,
  whole_delta,
)
from fedjax_het.engine.local import fit_and_record, init_optimizer
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation
from fedjax_het.models.blocks import Variables
from fedjax_het.options import at_least, between, not_negative, one_of

AGGREGATIONS = ('layerwise', 'architecture', 'ends', 'classifier')


class Server(NamedTuple):
  """FedGen's server state.

  Attributes:
    model: The union of the shared blocks of all models.
    generator: Variables of G.
    opt_state: The state of G's optimiser.
    known: [C] bool, the classes that some client has ever trained on (Y).
  """

  model: Variables
  generator: Variables
  opt_state: Any
  known: jax.Array


@requires(task='classification')
@takes_server_options()
def fedgen(
    federation: Federation,
    *,
    aggregation: str = 'layerwise',
    weights: str = 'uniform',
    generative_alpha: float = 10.0,
    distill_weight: float = 10.0,
    decay: float = 0.98,
    generated_batch_size: int | None = None,
    noise_size: int = 32,
    hidden: int = 512,
    eta: float = 1.0,
    server_steps: int = 50,
    server_batch_size: int | None = None,
    generator_lr: float = 3e-4,
    generator_l2: float = 1e-2,
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """FedGen, over clients of one or several architectures.

  In an asynchronous run the server trains G once per upload, on the server's
  classifier plus the client's change.

  Args:
    federation: Groups and local training.
    aggregation: As for `fedavg`, but classifiers must travel: 'layerwise',
      'architecture', 'ends' or 'classifier'.
    weights: As for `fedavg`; 'data' in the paper.
    generative_alpha: a, weight of the cross-entropy of generated features in
      round 0; 0 for no such term. With b = 0, too, the models are those of
      FedAvg bit for bit.
    distill_weight: b, the factor on the KL in round 0; 0 for no such term.
    decay: Factor on a_t, b_t and the generator's learning rate per round.
    generated_batch_size: B_g, generated features per step; None for the
      clients' batch size B.
    noise_size: m, length of the noise.
    hidden: h, units of the generator's hidden layer. The authors have 256 for
      MNIST, with features of size 32, and 512 for CIFAR.
    eta: Weight of the generator's diversity loss.
    server_steps: Minibatches of the generator's training in a round.
    server_batch_size: Labels per minibatch; None for B.
    generator_lr: Adam's learning rate in round 0.
    generator_l2: Factor of the L2 term, which is added to the gradient of all
      parameters of the generator.
    tx: The server's optimiser, with the options of `fedavg`.

  Returns:
    The algorithm. Its server state is a `Server`, its client state the blocks
    that do not travel. The server's metrics are 'generator_loss',
    'teacher_loss' and 'diversity_loss'.

  Raises:
    ValueError: If an option is unknown or out of range, or the inputs of the
      classifiers differ in size.
  """
  one_of('aggregation', aggregation, AGGREGATIONS)
  not_negative(
      generative_alpha=generative_alpha, distill_weight=distill_weight,
      eta=eta, generator_lr=generator_lr, generator_l2=generator_l2,
  )  # fmt: skip
  between(0, 1, above=True, decay=decay)
  local = federation.local
  if generated_batch_size is None:
    generated_batch_size = local.batch_size
  if server_batch_size is None:
    server_batch_size = local.batch_size
  at_least(
      1, noise_size=noise_size, hidden=hidden,
      generated_batch_size=generated_batch_size,
      server_batch_size=server_batch_size,
  )  # fmt: skip
  at_least(0, server_steps=server_steps)
  exchange = make_exchange(federation, aggregation, weights, tx=tx)
  net = Generator(
      latent_size(federation), federation.num_classes, noise_size, hidden
  )
  training = generator_training(
      local.task, generator_lr, decay, generator_l2, server_batch_size
  )

  def init(key):
    generator = init_generator(net, jax.random.fold_in(key, 2))
    return Server(
        exchange.init(key),
        generator,
        init_optimizer(training, generator.params),
        jnp.zeros(federation.num_classes, bool),
    )

  def downlink(server, group, visit):
    sent = exchange.download(server.model, group)
    return Sent(sent, server.generator, server.known)

  def client_update(group, client, sent, data, visit):
    model = group.model
    start = exchange.assemble(group, client, sent.model)
    a_t, b_t = (
        strength(first, decay, visit.round_num, sent.known)
        for first in (generative_alpha, distill_weight)
    )
    end, _, metrics, num_steps, counts = fit_and_record(
        client_loss(
            model, local.task, net, sent, a_t, b_t, generated_batch_size
        ),
        local,
        model.trim(start) if local.drop_unused_weights else start,
        data,
        visit,
        record=jnp.ones(model.num_classes),
        add=count_labels,
    )
    end = model.fill(end, start)
    own, delta = exchange.upload(group, start, end, data.size, num_steps)
    return own, split_classifier(exchange, group, delta, counts), metrics

  def server_update(server, received, turn):
    uploads = {
        name: clear_padding(r, federation.num_clients)
        for name, r in received.items()
    }
    heads, omega, labels = make_ensemble(exchange, server.model, uploads)
    # Train the generator first: averaging would make all classifiers equal.
    generator, opt_state, metrics = train_generator(
        net, server.generator, server.opt_state,
        generator_loss(net, local.task, heads, omega, eta),
        training, labels, server_steps, turn,
    )  # fmt: skip
    average = exchange.average(
        server.model, {name: whole_delta(r) for name, r in uploads.items()}
    )
    known = server.known | labels
    return Server(average, generator, opt_state, known), metrics

  return FederatedAlgorithm(
      init=init,
      init_client=lambda group, client_id, key: (
          exchange.init_client(group, key)
      ),
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: exchange.assemble(
          group, client, exchange.download(server.model, group)
      ),
      personal=exchange.personal,
      one_model=exchange.one_model,
  )
