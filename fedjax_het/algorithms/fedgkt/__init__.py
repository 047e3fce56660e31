"""FedGKT: clients and a training server that distil from each other.

A client's net is an extractor and a classifier. The server's net W_s takes the
extractor's features. In a round, with T the temperature and z_s the server's
logits of the client's own examples from the previous round,

  client:  CE(z_c, y) + alpha T^2 KL(softmax(z_s/T) || softmax(z_c/T));
  up:      features h, logits z_c and label y of every example, in eval mode;
  server:  CE(z_s, y) + T^2 KL(softmax(z_c/T) || softmax(z_s/T)) over batches
           of one client each, client after client, for E_s epochs;
  down:    z_s of the client's own examples.

Labels and features leave the device, so clients have less privacy than in
methods that send models. An upload is large: 16,395 numbers per example for a
feature map of 16x32x32. The authors' clients also upload the features of the
test images. Here evaluation computes them, and they are not counted as traffic.

Evaluation applies the server's net to a client's features ('FedGKT-server').
The view 'clients' evaluates the clients' nets alone, which are less accurate.

Choices that the sources leave open or hide:

- The client's net is the group's whole model, with `model.cut[0]` as the end of
  the extractor; nothing is pretrained. The server's net is the part behind the
  cut of one group's model or of `federation.server_model`.
- Logits are stored by an example's position in its client's own table. The
  authors' code stores them by batch number although its loader shuffles, so
  that clients distil from the logits of other images. Results differ.
- The server's loss is the paper's. The code has a weight for its cross-entropy
  (`server_alpha`), and its released command for ResNet-56 uses cross-entropy
  alone (`server_distillation=False`).
- The server sends the z_s that its last epoch computed in training mode, while
  parameters changed; `server_logits='eval'` computes them afterwards in eval
  mode.

References:
  He, Annavaram, Avestimehr, `Group Knowledge Transfer: Federated Learning of
  Large CNNs at the Edge <https://arxiv.org/abs/2007.14513>`_, NeurIPS 2020,
  Algorithm 1, Eq. 4 to 8.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.uploads import keep_latest
from fedjax_het.algorithms.fedgkt.server import (
  Server,
  choose_server,
  eval_logits,
  gather,
  server_loss,
  train_server,
)
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.local import (
  fit,
  init_optimizer,
  map_examples,
)
from fedjax_het.engine.needs import requires
from fedjax_het.engine.phases import passes
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Maybe,
  Uplink,
)
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.options import (
  at_least,
  between,
  not_negative,
  one_of,
)


def feature_shape(federation: Federation) -> tuple[int, ...]:
  """Shape of one example's features.

  Args:
    federation: The federation.

  Returns:
    The output shape of all groups' extractors.

  Raises:
    ValueError: If shapes differ; the message names groups and shapes.
  """
  shapes = {g.name: g.model.shapes[g.model.cut[0] - 1]
            for g in federation.groups}  # fmt: skip
  if len(set(shapes.values())) != 1:
    listed = ', '.join(
        f'{name} {"x".join(map(str, shape))}' for name, shape in shapes.items()
    )
    raise ValueError(
        'fedgkt needs features of one shape from all groups, got '
        f'{listed}; choose models whose extractors agree.'
    )
  return next(iter(shapes.values()))


def client_loss(
    model: BlockModel,
    task: Task,
    sent: Maybe,
    temperature: float,
    distill_weight: float,
) -> Callable[..., Any]:
  """The loss of a client, as `fit` takes it; `sent` has its examples' z_s."""

  def loss_fn(variables, batch, key):
    z_c, stats = model.apply(
        variables, batch.x, train=True, mask=batch.mask, key=key
    )
    # CE(z_c, y) + alpha T^2 KL(softmax(z_s/T) || softmax(z_c/T)), the KL only
    # for examples whose z_s the server has computed.
    gap = distillation(z_c, sent.value[batch.position], temperature)
    gap = jnp.where(sent.present[batch.position], gap, 0.0)
    loss = task.loss(z_c, batch.y, batch.mask)
    loss += distill_weight * masked_mean(gap, batch.mask)
    return loss, (stats, {})

  return loss_fn


def publish(model: BlockModel, variables: Variables, data, length: int):
  """`Maybe` of (h, z_c, y) of a client's examples, in eval mode; [M, ...]."""

  def outputs(batch):
    cut, mask = model.cut[0], batch.mask
    h, _ = model.apply(variables, batch.x, stop=cut, mask=mask)
    z_c, _ = model.apply(variables, h, start=cut, mask=mask)
    return h, z_c, batch.y

  rows = map_examples(outputs, data.replace(index=data.index[:length]))
  real = jnp.arange(length) < data.size
  rows = jax.tree.map(
      lambda a: jnp.where(jnp.expand_dims(real, range(1, a.ndim)), a, 0), rows
  )
  return Maybe(rows, real)


@requires(
    sizes=True, keep_optimizer=True, server_model=None, task='classification'
)
def fedgkt(
    federation: Federation,
    *,
    temperature: float = 3.0,
    distill_weight: float = 1.0,
    server_alpha: float = 1.0,
    server_distillation: bool = True,
    server_epochs: int = 10,
    server_batch_size: int | None = None,
    server_logits: str = 'train',
    server_group: str | None = None,
) -> FederatedAlgorithm:
  """FedGKT.

  The server keeps its optimiser's state, and so do clients unless
  `federation.local.keep_optimizer` is False. Both use the optimiser of
  `federation.local` with its learning rate of the round. In an asynchronous
  run the server trains once per upload, and a round is a number of uploads.

  Args:
    federation: Groups, local training, the clients' sizes, and optionally a
      `server_model`, whose part behind its cut is the server's net.
    temperature: T, between 1e-3 and 1e6.
    distill_weight: alpha above, the factor on the distillation in a client's
      loss.
    server_alpha: Weight of the cross-entropy in the server's loss.
    server_distillation: Whether the server distils; if not, its loss is the
      cross-entropy alone, of weight 1.
    server_epochs: E_s; with 0, clients only train locally. FedIN v1 takes 10,
      the authors' scripts 20 and 2.
    server_batch_size: The server's batch size; None for that of the clients.
    server_logits: 'train' or 'eval', the mode in which z_s is computed.
    server_group: Name of the group whose model gives the server's net; None
      for `federation.server_model`, or without one the group's model with the
      most blocks.

  Returns:
    The algorithm. Its client state is (variables, optimiser state); the pair
    (client's variables, server's variables) is evaluated. The server's metric
    is 'server_loss', its mean loss over all steps of a round.

  Raises:
    ValueError: If features differ in shape between groups or do not fit the
      server's net, sizes are unknown, or an option is out of range.
  """
  # Bounded, as the loss has the factor T^2 and logits are divided by T.
  between(1e-3, 1e6, temperature=temperature)
  one_of('server_logits', server_logits, ('train', 'eval'))
  not_negative(distill_weight=distill_weight, server_alpha=server_alpha)
  at_least(0, server_epochs=server_epochs)
  net = choose_server(federation, server_group, feature_shape(federation))
  local, length = federation.local, federation.max_examples
  keep_optimizer = local.keeps_optimizer(True)
  if server_batch_size is None:
    server_batch_size = local.batch_size
  at_least(1, server_batch_size=server_batch_size)
  server_local = passes(local, 1, min(server_batch_size, length))

  def init(key):
    variables = net.init(key)
    shape = (federation.num_clients, length)
    nothing = Maybe(
        jnp.zeros((*shape, federation.num_classes)), jnp.zeros(shape, bool)
    )
    opt_state = init_optimizer(local, variables.params)
    return Server(variables, opt_state, nothing)

  def init_client(group, client_id, key):
    del client_id
    variables = group.model.init(key)
    state = init_optimizer(local, variables.params) if keep_optimizer else None
    return variables, state

  def downlink(server, group, visit):
    return jax.tree.map(lambda leaf: leaf[visit.client_id], server.logits)

  def client_update(group, client, sent, data, visit):
    variables, opt_state = client
    variables, opt_state, metrics, _ = fit(
        client_loss(
            group.model, local.task, sent, temperature, distill_weight
        ),
        local,
        variables,
        data,
        visit,
        opt_state=opt_state,
    )
    message = publish(group.model, variables, data, length)
    client = variables, opt_state if keep_optimizer else None
    return client, Uplink((), message), metrics

  def loss_of_client(z_c):
    weight = server_alpha if server_distillation else None
    return server_loss(net, local.task, z_c, temperature, weight)

  def server_update(server, received, turn):
    if not server_epochs:
      return server, {}
    uploads = gather(received, federation.num_clients)
    server, logits, loss = train_server(
        server, uploads, server_local, server_epochs, turn, loss_of_client
    )
    if server_logits == 'eval':
      logits = eval_logits(net, server.net, uploads)
    store = keep_latest(server.logits, uploads.client_id, logits)
    return server._replace(logits=store), dict(server_loss=loss)

  def sent_shares(group, sizes):
    del group
    return sizes / length, sizes / length

  def predict(group, variables, x):
    own, tail = variables
    h, _ = group.model.apply(own, x, stop=group.model.cut[0])
    return net.apply(tail, h)[0]

  def predict_alone(group, variables, x):
    return group.model.apply(variables[0], x)[0]

  return FederatedAlgorithm(
      init=init,
      init_client=init_client,
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: (client[0], server.net),
      personal=True,
      predict=predict,
      views={'clients': predict_alone},
      sent_shares=sent_shares,
  )
