"""FedGKT: clients and a training server that distil from each other.

A client's net is extractor, then classifier; the server's net W_s begins where
the extractor ends. In a round, with z_s the server's logits of the client's own
examples from the round before and T the temperature,

  client:  CE(z_c, y) + alpha T^2 KL(softmax(z_s/T) || softmax(z_c/T));
  up:      features h, logits z_c and label y of every example, in eval mode;
  server:  CE(z_s, y) + T^2 KL(softmax(z_c/T) || softmax(z_s/T)) over batches
           of one client each, client after client, for E_s epochs;
  down:    z_s of the client's own examples.

Labels and features leave the device: privacy is not that of methods that send
weights. The traffic is large too, 16,395 numbers an example for a feature map
of 16x32x32. The authors' clients also send the features of the test images,
which evaluation here composes and does not count.

What is tested is the server's net on a client's features ('FedGKT-server');
the view 'clients' are the clients' nets alone, which are far worse.

Choices where the sources leave or hide one:

- The client's net is the group's whole model, cut at `model.cut[0]`; nothing
  is pretrained. The server's net is what follows the cut in one group's model.
- An example is known by its place in its client's own table. The authors' code
  goes by batch number while its loader shuffles, so that clients distil from
  the logits of other images; results differ from its.
- The paper's loss on the server is the one above; the code weights its
  cross-entropy (`server_alpha`), and its released command for ResNet-56 takes
  that alone (`server_distillation=False`).
- z_s is what the last epoch computed in training mode, while weights changed;
  `server_logits='eval'` computes it afterwards in eval mode.

References:
  He, Annavaram, Avestimehr, `Group Knowledge Transfer: Federated Learning of
  Large CNNs at the Edge <https://arxiv.org/abs/2007.14513>`_, NeurIPS 2020,
  Algorithm 1, Eq. 4 to 8.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.data.federated import ClientData
from fedjax_het.engine.local import (
  fit,
  init_optimizer,
  map_examples,
  train_epochs,
)
from fedjax_het.engine.needs import requires
from fedjax_het.engine.options import (
  at_least,
  between,
  not_negative,
  one_of,
)
from fedjax_het.engine.task import masked_mean
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Group,
  Maybe,
  Uplink,
)
from fedjax_het.models.blocks import Variables


class Server(NamedTuple):
  """What the server keeps.

  Attributes:
    net: Variables of its net (W_s).
    opt_state: Its optimiser.
    logits: `Maybe` of [num_clients, M, C], z_s by client and by the example's
      place in the client's table.
    round_num: [] int32, rounds done.
  """

  net: Variables
  opt_state: Any
  logits: Maybe
  round_num: jax.Array


def distillation(student, teacher, temperature: float):
  """T^2 KL(softmax(teacher / T) || softmax(student / T)) of each example.

  Its gradient in the student's logits is T (p_student - p_teacher), of
  probabilities at that temperature.

  Args:
    student: [B, C] logits.
    teacher: [B, C] logits; nothing flows back into them.
    temperature: T, above 0.

  Returns:
    [B] in nats.

  References:
    Hinton, Vinyals, Dean, `Distilling the Knowledge in a Neural Network
    <https://arxiv.org/abs/1503.02531>`_, 2015.
  """
  log_p = jax.nn.log_softmax(jax.lax.stop_gradient(teacher) / temperature)
  log_q = jax.nn.log_softmax(student / temperature)
  return temperature**2 * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def feature_shape(federation: Federation) -> tuple[int, ...]:
  """Shape of one example's features.

  Args:
    federation: The federation.

  Returns:
    The shape that all groups' extractors have for output.

  Raises:
    ValueError: If they differ, naming groups and shapes.
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


def choose_server(federation: Federation, name: str | None) -> Group:
  """The group whose model the server's net is the tail of.

  Args:
    federation: The federation.
    name: Name of the group; None for the model with the most blocks, of
      several the first by name.

  Returns:
    The group.

  Raises:
    ValueError: If no group has that name.
  """
  groups = {group.name: group for group in federation.groups}
  if name is None:
    return min(
        groups.values(), key=lambda g: (-len(g.model.blocks), g.name)
    )
  one_of('server_group', name, tuple(groups))
  return groups[name]


def _as_it_is(x, key=None):
  del key
  return x


@requires(sizes=True, keep_optimizer=True)
def fedgkt(
    federation: Federation,
    *,
    temperature: float = 3.0,
    alpha: float = 1.0,
    server_alpha: float = 1.0,
    server_distillation: bool = True,
    server_epochs: int = 10,
    server_batch_size: int | None = None,
    server_logits: str = 'train',
    server_group: str | None = None,
) -> FederatedAlgorithm:
  """FedGKT.

  The server keeps its optimiser, and so do clients unless `keep_optimizer` of
  `federation.local` is False; both are of its kind and learning rate.

  Args:
    federation: Groups, local training, and the clients' sizes.
    temperature: T, between 1e-3 and 1e6.
    alpha: Weight of the distillation in a client's loss.
    server_alpha: Weight of the cross-entropy in the server's loss.
    server_distillation: Whether the server distils; if not, its loss is the
      cross-entropy alone, of weight 1.
    server_epochs: E_s; 0 leaves the clients to local training. FedIN v1 takes
      10, the authors' scripts 20 and 2.
    server_batch_size: Examples a step of the server; None for the clients'.
    server_logits: 'train' or 'eval', the mode in which z_s is computed.
    server_group: Name of the group whose model gives the server's net; None
      for the deepest.

  Returns:
    The algorithm. Its client state is (variables, optimiser); what is evaluated
    is the pair (client's variables, server's variables).

  Raises:
    ValueError: If features differ in shape between groups, sizes are unknown,
      or an option is out of range.
  """
  shape = feature_shape(federation)
  chief = choose_server(federation, server_group).model
  begin = chief.cut[0]
  length, num_classes = federation.max_examples, federation.num_classes
  num_clients, local = federation.num_clients, federation.local
  if server_batch_size is None:
    server_batch_size = local.batch_size
  at_least(1, server_batch_size=server_batch_size)
  # The loss has the factor T^2 and logits are divided by T.
  between(1e-3, 1e6, temperature=temperature)
  one_of('server_logits', server_logits, ('train', 'eval'))
  not_negative(alpha=alpha, server_alpha=server_alpha)
  at_least(0, server_epochs=server_epochs)

  def init(key):
    net = chief.init(key, chief.span(begin))
    store = Maybe(
        jnp.zeros((num_clients, length, num_classes)),
        jnp.zeros((num_clients, length), bool),
    )
    return Server(net, init_optimizer(local, net.params), store, jnp.int32(0))

  def init_client(group, client_id, key):
    del client_id
    variables = group.model.init(key)
    keep = local.keeps_optimizer(True)
    return variables, init_optimizer(local, variables.params) if keep else None

  def downlink(server, group, visit):
    return jax.tree.map(lambda leaf: leaf[visit.client_id], server.logits)

  def client_update(group, client, sent, data, visit):
    model, (variables, opt_state) = group.model, client

    def loss_fn(variables, batch, key):
      logits, stats = model.apply(
          variables, batch.x, train=True, mask=batch.mask, key=key
      )
      gap = distillation(logits, sent.value[batch.position], temperature)
      gap = jnp.where(sent.present[batch.position], gap, 0.0)
      loss = local.task.loss(logits, batch.y, batch.mask)
      return loss + alpha * masked_mean(gap, batch.mask), (stats, {})

    variables, opt_state, metrics, _ = fit(
        loss_fn, local, variables, data, visit, opt_state=opt_state
    )

    def publish(batch):
      h, _ = model.apply(variables, batch.x, stop=model.cut[0])
      z, _ = model.apply(variables, h, start=model.cut[0])
      real = batch.position < data.size
      return jax.tree.map(
          lambda a: jnp.where(jnp.expand_dims(real, range(1, a.ndim)), a, 0),
          (h, z, batch.y),
      )

    message = Maybe(
        map_examples(publish, data, length), jnp.arange(length) < data.size
    )
    if client[1] is None:
      opt_state = None
    return (variables, opt_state), Uplink((), message), metrics

  def gather(received):
    """(ids, features, logits, labels, sizes) of all slots, ids ascending."""
    ids = jnp.concatenate([r.client_id for r in received.values()])
    value, present = jax.tree.map(
        lambda *parts: jnp.concatenate(parts),
        *(r.kept for r in received.values()),
    )
    h, z, y = value
    sizes = jnp.where(ids < num_clients, jnp.sum(present, axis=1), 0)
    return ids, h.reshape(-1, length, *shape), z, y, sizes

  def train_net(server, slots, order, key):
    """E_s epochs; returns net, optimiser and z_s of all slots."""
    ids, h, z_c, y, sizes = slots
    tx = local.optimizer(local.learning_rate(server.round_num))

    def visit_slot(i, state, epoch_key):
      slot = order[i]
      teacher = z_c[slot]

      def step(carry, batch, step_num, key):
        del step_num
        (params, stats), opt_state, rows = carry

        def loss_fn(params):
          logits, new = chief.apply(
              Variables(params, stats), batch.x, start=begin, train=True,
              mask=batch.mask, key=key,
          )  # fmt: skip
          loss = local.task.loss(logits, batch.y, batch.mask)
          if server_distillation:
            gap = distillation(logits, teacher[batch.position], temperature)
            loss = server_alpha * loss + masked_mean(gap, batch.mask)
          return loss, (logits, new)

        grads, (logits, stats) = jax.grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        place = jnp.where(batch.mask, batch.position, length)
        rows = rows.at[place].set(logits, mode='drop')
        return (Variables(params, stats), opt_state, rows), {}

      net, opt_state, logits = state
      (net, opt_state, rows), _, _ = train_epochs(
          step,
          (net, opt_state, logits[slot]),
          ClientData(
              h[slot], y[slot], jnp.arange(length), sizes[slot], _as_it_is
          ),
          jax.random.fold_in(epoch_key, ids[slot]),
          epochs=1,
          batch_size=min(server_batch_size, length),
      )
      return net, opt_state, logits.at[slot].set(rows)

    def epoch(e, state):
      epoch_key = jax.random.fold_in(key, e)
      return jax.lax.fori_loop(
          0,
          jnp.sum(ids < num_clients),
          lambda i, state: visit_slot(i, state, epoch_key),
          state,
      )

    start = server.net, server.opt_state, jnp.zeros_like(z_c)
    return jax.lax.fori_loop(0, server_epochs, epoch, start)

  def server_update(server, received, turn):
    done = server._replace(round_num=server.round_num + 1)
    if not server_epochs:
      return done, {}
    slots = gather(received)
    ids, h, _, y, sizes = slots
    # By client and not by group; those that are none stand last.
    order = jnp.argsort(ids)
    net, opt_state, logits = train_net(server, slots, order, turn.key)
    if server_logits == 'eval':
      num = len(ids) * length
      rows = ClientData(
          h.reshape(num, *shape),
          y.reshape(num),
          jnp.arange(num),
          jnp.int32(num),
          _as_it_is,
      )
      logits = map_examples(
          lambda batch: chief.apply(net, batch.x, start=begin)[0], rows, num
      ).reshape(logits.shape)
    present = jnp.arange(length)[None] < sizes[:, None]
    return done._replace(
        net=net,
        opt_state=opt_state,
        logits=jax.tree.map(
            lambda old, new: old.at[ids].set(new, mode='drop'),
            server.logits,
            Maybe(logits, present),
        ),
    ), {}

  def predict(group, variables, x):
    own, net = variables
    h, _ = group.model.apply(own, x, stop=group.model.cut[0])
    return chief.apply(net, h, start=begin)[0]

  return FederatedAlgorithm(
      init=init,
      init_client=init_client,
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: (client[0], server.net),
      personal=True,
      predict=predict,
      views={
          'clients': lambda group, variables, x: group.model.apply(
              variables[0], x
          )[0]
      },
  )
