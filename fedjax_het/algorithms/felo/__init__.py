"""Felo and Velo: clients exchange class means of features and of logits.

No parameters travel. f(x), the features, are the input of a model's last block,
of one width d for all clients; z(x) are its logits. A client keeps its model
and, unless `local.keep_optimizer` is False, its optimiser's state. One round:

  1. The server sends f_bar[y] and z_bar[y] for every class y that it knows.
  2. For a few minibatches (`local.steps`, 10 in the authors' code) the client
     steps with
       L = CE + alpha (MSE(f, f_bar[y]) + MSE(z, z_bar[y]))
     MSE is the mean over the batch and over the d or C dimensions.
  3. It sends the mean of its logits of each class, and its features. Both are
     those of the training passes, each before its step.
  4. The server stores both; z_bar[y] is the mean of all mean logits of y.
     Felo: f_bar[y] is the mean of the stored features of y.
     Velo: the server trains a conditional variational autoencoder (CVAE) on the
       stored features; f_bar[y] = decoder(eps_y, y), eps_y ~ N(0, I). One eps_y
       is drawn for each class and server update and used by all clients.

Before 5 % of the rounds clients train on the cross-entropy alone. Velo's server
then trains the CVAE, and again after every further 1 % of the rounds.

Felo needs only the mean of a client's features of each class and their number:
the mean weighted by these numbers is that of single features. So d + C + 1
numbers of a class travel up, and d + C down. Velo needs the features and labels
of single examples, `num_features` of the visit at most.

Where the paper is silent, its authors' code decides. We differ from the code:

- Its stores hold 50,000 mean logits per class, more than its runs send, and the
  last 5,000 features. Here z_bar is a running mean. Felo's features are those
  of the last `window` uploads of a class, 100 being about as many.
- Classes that the server does not know are masked; the code fails there.
- The code's CVAE is trained before a round, here after the previous one.

References:
  Chan and Ngai, `Exploiting Features and Logits in Heterogeneous Federated
  Learning <https://arxiv.org/abs/2210.15527>`_, Computer Networks.
"""

import jax.numpy as jnp
import numpy as np

from fedjax_het.aggregation.class_means import (
  ClassVectors,
  class_means,
  init_class_client,
)
from fedjax_het.aggregation.embeddings import embedding_width
from fedjax_het.algorithms.felo.client import (
  Targets,
  add_batch,
  client_loss,
  empty_record,
  make_upload,
)
from fedjax_het.algorithms.felo.cvae import CVAE, cvae_training, init_cvae
from fedjax_het.algorithms.felo.rings import empty_rings
from fedjax_het.algorithms.felo.server import (
  Generator,
  Server,
  add_logits,
  mean_features,
  store_uploads,
  train_and_generate,
  training_is_due,
)
from fedjax_het.engine.local import fit_and_record, visit_examples
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Maybe
from fedjax_het.options import at_least, between, not_negative, one_of, positive


@requires(keep_optimizer=True, task='classification', num_rounds=True)
def felo(
    federation: Federation,
    *,
    distill_weight: float = 0.5,
    logit_loss: str = 'mse',
    start: float = 0.05,
    window: int = 100,
    velo: bool = False,
    num_features: int = 500,
    capacity: int = 5000,
    label_size: int = 512,
    kl_reduction: str = 'sum',
    cvae_every: float = 0.01,
    cvae_epochs: int = 10,
    cvae_batch_size: int = 50,
    cvae_lr: float = 1e-3,
) -> FederatedAlgorithm:
  """Felo, or with `velo` its extension by a CVAE on the server.

  In an asynchronous run each upload is a server update, which draws new eps;
  the CVAE is trained at the end of a round.

  Args:
    federation: Groups and local training; the models must have the same number
      of outputs and features of one width. The authors' code trains 10
      minibatches of 50 per visit (`local.steps`).
    distill_weight: alpha, the factor on both distances; 0 is local training
      bit for bit.
    logit_loss: The distance of logits: 'mse', 'kl' for KL(softmax(z_bar) ||
      softmax(z)) / C, or 'none'.
    start: The share of all rounds before which nothing is sent to clients.
      Without `federation.num_rounds` it is 0.
    window: For Felo: the uploads of each class whose features are averaged.
    velo: Whether the server generates f_bar by its CVAE.
    num_features: For Velo, as all below: the features that a client sends, the
      last ones of its visit.
    capacity: The features that the server stores of each class, the last ones.
    label_size: The size of a label's embedding in the CVAE.
    kl_reduction: How the KL divergence of the CVAE's loss is reduced over the
      batch and the d latent dimensions: 'sum', which outweighs the mean squared
      error of the features, as in the authors' code, or 'mean'.
    cvae_every: The share of all rounds after which the CVAE is trained again;
      at least one round.
    cvae_epochs: Passes over the stored features in each training.
    cvae_batch_size: Features per step.
    cvae_lr: Adam's learning rate.

  Returns:
    The algorithm, whose server state is a `Server`. Metrics: 'cross_entropy',
    'feature_loss' and 'logit_loss', the terms of L before `distill_weight`, and
    their sum 'train_loss'. Velo's server has those of `train_cvae`.

  Raises:
    ValueError: If an option is unknown or out of range, or models differ in
      their number of outputs or the width of their features.
  """
  not_negative(distill_weight=distill_weight)
  one_of('logit_loss', logit_loss, ('mse', 'kl', 'none'))
  between(0, 1, start=start, cvae_every=cvae_every)
  one_of('kl_reduction', kl_reduction, ('sum', 'mean'))
  at_least(
      1, window=window, num_features=num_features, capacity=capacity,
      label_size=label_size, cvae_epochs=cvae_epochs,
      cvae_batch_size=cvae_batch_size,
  )  # fmt: skip
  positive(cvae_lr=cvae_lr)
  local, num_classes = federation.local, federation.num_classes
  width = embedding_width(federation, 'felo')
  num_rounds = federation.num_rounds or 0
  first = int(start * num_rounds)
  every = max(1, int(cvae_every * num_rounds))
  net = CVAE(width, num_classes, label_size)
  training = cvae_training(cvae_lr, cvae_epochs, cvae_batch_size)

  def init(key):
    logits = ClassVectors(
        jnp.zeros((num_classes, num_classes)), jnp.zeros(num_classes)
    )
    f = jnp.zeros(width)
    if not velo:
      row = ClassVectors(f, jnp.zeros(()))
      return Server(logits, empty_rings(num_classes, window, row), ())
    nothing = Maybe(
        jnp.zeros((num_classes, width)), jnp.zeros(num_classes, bool)
    )
    return Server(
        logits,
        empty_rings(num_classes, capacity, f),
        Generator(init_cvae(net, key), nothing),
    )

  def init_client(group, client_id, key):
    return init_class_client(group.model, local, key)

  def downlink(server, group, visit):
    features = server.generator.features if velo else (
        mean_features(server.store)
    )  # fmt: skip
    known = features.present & (server.logits.counts > 0)
    return Maybe(
        Targets(features.value, class_means(server.logits)),
        known & (visit.round_num >= first),
    )

  def client_update(group, client, sent, data, visit):
    model, begin = group.model, client.variables
    trim = local.drop_unused_weights and client.opt_state is None
    end, opt_state, metrics, _, record = fit_and_record(
        client_loss(model, local.task, sent, distill_weight, logit_loss),
        local,
        model.trim(begin) if trim else begin,
        data,
        visit,
        record=empty_record(
            num_classes, width, num_features if velo else None
        ),
        add=add_batch,
        opt_state=client.opt_state,
    )
    if client.opt_state is None:
      opt_state = None
    client = client._replace(
        variables=model.fill(end, begin), opt_state=opt_state
    )
    return client, make_upload(record), metrics

  def server_update(server, received, turn):
    server = server._replace(
        logits=add_logits(server.logits, received),
        store=store_uploads(server.store, received, federation.num_clients),
    )
    if not velo:
      return server, {}
    due = training_is_due(received, turn, first, every)
    generator, metrics = train_and_generate(
        server, net, due, training, kl_reduction, turn
    )
    return server._replace(generator=generator), metrics

  def sent_shares(group, sizes):
    del group
    sent = [visit_examples(local, int(size)) for size in sizes]
    return 1.0, np.minimum(sent, num_features) / num_features

  return FederatedAlgorithm(
      init=init,
      init_client=init_client,
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: client.variables,
      personal=True,
      sent_shares=sent_shares if velo else None,
  )
