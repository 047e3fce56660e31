"""Fed-ET: small models of the clients teach a large model of the server.

The server holds unlabelled public examples x, a large model W and the small
models, one for each architecture. All models have a classifier ('representation
layers') of one shape. In a round, with s_k(x) the logits of client k's model
after its training, in eval mode, and v_k(x) their variance over the classes,

  down:    the client's small model;
  client:  local training;
  up:      the small model;
  server:  averages the small models, the classifier over all of them, and
           copies the classifier into W; then on the public examples

             s(x) = sum_k alpha_k s_k(x),  alpha_k = v_k / sum_j v_j,
             y^(x) = argmax s(x),  D(x) = {k : argmax s_k(x) != y^(x)},
             s_div(x) = the same weighted mean over D(x),
             W <- steps on  CE(W(x), y^)
                            + lam 1[D(x) != {}] KL(s_div(x) || W(x)),

           and copies W's classifier back into the small models.

Neither public examples nor logits travel: an upload is as large as FedAvg's.
The server keeps the models of the whole cohort until it has averaged them.

The small models are evaluated, and W as the view 'server'.

Choices that the sources leave open or hide (there is no official code):

- The classifier is the model's own, such as the last linear layer.
- The server has the clients' optimiser. It is reset in every round, as it is
  in every visit of a client.
- Public examples are part of the training set, without labels; the paper takes
  another data set. They are never augmented.
- Small models are averaged layer-wise, as in FedIN v2; 'architecture' averages
  inside each architecture, as in the paper.
- W is a separate tree, even if it has the blocks of the small models.

Longer than 200 lines because of its docstrings.

References:
  Cho, Manoel, Joshi, Sim, Dimitriadis, `Heterogeneous Ensemble Knowledge
  Transfer for Training Large Models in Federated Learning
  <https://arxiv.org/abs/2204.12703>`_, IJCAI 2022.
"""

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.averaging import (
  model_training,
  own_blocks,
  trained_clients,
)
from fedjax_het.aggregation.ensemble_distillation import average_uploads
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.server import (
  server_variables,
  state_of,
  takes_server_options,
  with_state,
)
from fedjax_het.aggregation.teachers import teacher_logits
from fedjax_het.algorithms.fedet.ensemble import find_consensus
from fedjax_het.algorithms.fedet.server import (
  Server,
  check_federation,
  copy_classifier,
  server_loss,
  server_training,
  with_common_classifier,
)
from fedjax_het.engine.local import fit
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.options import at_least, not_negative, one_of


@requires(
    public='unlabelled',
    server_model=True,
    keep_optimizer=False,
    local_stats=False,  # The server evaluates the models of clients.
    task='classification',
)
@takes_server_options()
def fedet(
    federation: Federation,
    *,
    distill_weight: float = 0.05,
    server_epochs: int = 1,
    server_batch_size: int = 128,
    distill_lr: float | None = None,
    aggregation: str = 'layerwise',
    weights: str = 'uniform',
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """Fed-ET.

  In an asynchronous run the server trains once per upload. The consensus is
  that of a single model: the server's plus the client's change.

  Args:
    federation: Groups, local training, a public set, and the `server_model`,
      whose classifier has the shape of the groups'.
    distill_weight: lam above, the factor on the KL from the clients that
      disagree.
    server_epochs: Passes over the public set in a round.
    server_batch_size: Batch size of these passes.
    distill_lr: Learning rate of these passes; None for that of the clients in
      the round.
    aggregation: 'layerwise' or 'architecture', as for `fedavg`; the classifier
      is averaged over all architectures.
    weights: As for `fedavg`.
    tx: The server's optimiser of the small models, with the options of
      `fedavg`.

  Returns:
    The algorithm. Its server state is a `Server`; the pair (small model, large
    model) is evaluated. The server's metrics are 'server_loss',
    'server_entropy', 'server_diversity' and 'disputed', the share of the public
    examples on which a client disagrees with the consensus.

  Raises:
    ValueError: If an option is unknown or out of range, there is no public set
      or classifiers differ in shape.
  """
  not_negative(distill_weight=distill_weight)
  at_least(0, server_epochs=server_epochs)
  at_least(1, server_batch_size=server_batch_size)
  if distill_lr is not None:
    not_negative(distill_lr=distill_lr)
  one_of('aggregation', aggregation, ('layerwise', 'architecture'))
  check_federation(federation)
  exchange = with_common_classifier(
      make_exchange(federation, aggregation, weights, tx=tx)
  )
  large = federation.server_model
  training = server_training(
      federation.local,
      server_epochs,
      min(server_batch_size, federation.num_public),
      distill_lr,
  )

  def init(key):
    small = exchange.init(key)
    # A round donates its state, so no array may be in it twice.
    copy = jax.tree.map(jnp.copy, server_variables(small))
    return Server(small, copy_classifier(large.init(key), copy, large))

  def send(group, start, end, size, num_steps):
    own, delta = exchange.upload(group, start, end, size, num_steps)
    return own, Uplink((), delta)

  train, keep = model_training(federation.local)
  init_client, client_update = trained_clients(exchange, train, keep, send)

  def teach(server, model, received, turn):
    """W after its steps on the public examples, and the metrics."""
    public = turn.public.unaugmented()
    start = large.trim(model) if training.drop_unused_weights else model
    logits, took_part = teacher_logits(
        exchange, server.small, received, public
    )
    consensus, some = find_consensus(logits, took_part), jnp.any(took_part)
    end, _, metrics, _ = fit(
        server_loss(large, federation.task, consensus, distill_weight),
        training,
        start,
        public.replace(size=jnp.where(some, public.size, 0)),
        turn,
    )
    metrics['server_loss'] = metrics.pop('train_loss')
    metrics['disputed'] = jnp.mean(consensus.disputed, dtype=jnp.float32)
    return large.fill(end, model), {
        name: jnp.where(some, value, jnp.nan)
        for name, value in metrics.items()
    }  # fmt: skip

  def server_update(server, received, turn):
    small, received = average_uploads(exchange, server.small, received)
    averaged = server_variables(small)
    model, metrics = copy_classifier(server.model, averaged, large), {}
    if server_epochs:
      model, metrics = teach(server, model, received, turn)
    opt_state = state_of(tx, small, averaged.params)
    back = copy_classifier(averaged, model, large)
    return Server(with_state(back, opt_state), model), metrics

  def client_model(server, client, group):
    sent = exchange.download(server.small, group)
    small = exchange.assemble(group, own_blocks(client), sent)
    return small, server.model

  return FederatedAlgorithm(
      init=init,
      init_client=init_client,
      downlink=lambda server, group, visit: (
          exchange.download(server.small, group)
      ),
      client_update=client_update,
      server_update=server_update,
      client_model=client_model,
      predict=lambda group, variables, x: (
          group.model.apply(variables[0], x)[0]
      ),
      views={'server': lambda group, variables, x: (
          large.apply(variables[1], x)[0]
      )},
  )
