"""FedFomo: a client mixes the models that lower its own validation loss.

There is no common model. The server stores theta_n, the latest model of every
client n that has sent one, and P[i, n], how much n has helped i so far. Client
i keeps b_i, the start of its last local training, and theta_i, the result. All
models start equal. L_i is the mean loss over held-out examples of client i. A
visit:

  1. Receive theta_n of at most M donors n.
  2. For i itself and for its donors
       w_n = (L_i(b_i) - L_i(theta_n)) / ||theta_n - b_i||,  a_n = max(w_n, 0)
     b_i <- b_i + sum_n a_n (theta_n - b_i) / sum_n a_n;
     b_i stays if no a_n is positive.
  3. theta_i <- local training from b_i on the examples that are not held out.
  4. Send theta_i and w. The server: P[i, n] <- P[i, n] + w_n.

After round t the server draws the next donors of every client i from all other
clients that have sent a model and share a block with i. Each of the M donors is
a random one with probability max(0, epsilon - decay t), else the one with the
largest P[i, n]; ties are broken at random.

In the paper a client trains, sends, and then mixes the models of the same
round. Here a visit has one exchange: a client mixes at the start of its next
visit, as in the authors' code. Evaluation uses the mix that a client would
compute at its next visit; `calibrate` passes the validation examples to it.
With all clients in every round this is the paper's sequence of models.

With several architectures, L_i(theta_n) is the loss of b_i with the common
blocks replaced by those of n, and the norm is over the common blocks. Each
block is mixed over its owners; with `mix='global'` all blocks have one sum of
a_n. Running statistics are mixed like the parameters of their block.

Left out from the authors' code: cluster means as further candidates, and
distances other than the Euclidean (L1, squared). The code divides the w of a
visit by |sum w| before they are added to P; here, as in the paper, it does not.

This file has more than 200 lines: a third explains the rule and the options.

References:
  Zhang et al., `Personalized Federated Learning with First Order Model
  Optimization <https://arxiv.org/abs/2012.08565>`_, ICLR 2021, Eq. 3 and 4.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.algorithms.fedfomo.mixing import (
  gains,
  mixed,
  stack,
  validation_losses,
)
from fedjax_het.algorithms.fedfomo.server import (
  Server,
  draw_donors,
  empty_models,
  make_tables,
  partners,
  put,
  take,
)
from fedjax_het.engine.held_out import hold_out
from fedjax_het.engine.local import fit_model, init_optimizer
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.models.blocks import Variables
from fedjax_het.options import at_least, between, not_negative, one_of


class Sent(NamedTuple):
  """The downlink.

  Attributes:
    donors: [M] int32, the donors' client ids; N for padding.
    models: The donors' models, `Variables` of {key: Maybe}, leaves [M, ...].
  """

  donors: jax.Array
  models: Variables


class Client(NamedTuple):
  """A client's id, b_i, theta_i, and its optimiser's state if that is kept."""

  client_id: jax.Array
  base: Variables
  trained: Variables
  opt_state: Any = None


class Upload(NamedTuple):
  """The uplink: theta_i by shared key, the donors and their w, both [M]."""

  model: Variables
  donors: jax.Array
  gains: jax.Array


def revise(group, task, client: Client, models: Variables, data, mix: str):
  """Step 2 of a visit.

  Args:
    group: The client's group.
    task: What it is trained for.
    client: The client.
    models: The donors' models, `Variables` of {block: Maybe}.
    data: The client's validation examples; without any, theta_i is the result.
    mix: As for `fedfomo`.

  Returns:
    The new b_i, and w of theta_i and the donors, [1 + M].
  """
  num = max([len(one.present) for one in models.params.values()], default=0)
  pairs = zip(client.base, client.trained, models, strict=True)
  models = Variables(*(stack(*trees, num) for trees in pairs))
  losses = validation_losses(group.model, task, models, data)
  w = gains(losses, models.params)
  own = jnp.arange(2 + num) == 1
  w = jnp.where(data.size > 0, w, own)
  return Variables(*(mixed(part, w, mix) for part in models)), w[1:]


@requires(keep_optimizer=False)
def fedfomo(
    federation: Federation,
    *,
    num_donors: int = 5,
    epsilon: float = 0.3,
    decay: float = 0.05,
    validation: float = 0.2,
    mix: str = 'block',
    aggregation: str = 'layerwise',
) -> FederatedAlgorithm:
  """FedFomo over clients of one or several architectures.

  Args:
    federation: Groups and local training; the optimiser is reset in each visit
      unless `local.keep_optimizer` is True.
    num_donors: M, the maximum number of models that a client downloads in a
      visit, at most the number of clients that share a block with it. With 0,
      local training is kept only if it lowers the validation loss.
    epsilon: Probability of a random donor in round 0.
    decay: Decrease of the probability per round.
    validation: Share of a client's examples that is held out.
    mix: 'block' or 'global', see above.
    aggregation: Which blocks are exchanged: 'layerwise' with all clients that
      own them, 'architecture' inside a group, 'ends', or 'none'.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is unknown or out of range, or shared blocks differ
      in shape.
  """
  at_least(0, num_donors=num_donors)
  between(0, 1, epsilon=epsilon)
  not_negative(decay=decay)
  between(0, 1, below=True, validation=validation)
  one_of('mix', mix, ('block', 'global'))
  sharing = make_exchange(federation, aggregation).sharing
  tables = make_tables(federation, sharing)
  num_clients, task = federation.num_clients, federation.task
  local = federation.local
  keep = local.keeps_optimizer(False)
  allowed = partners(tables, num_clients)
  num_donors = min(num_donors, int(allowed.sum(axis=1).max()))

  def init(key):
    return Server(
        empty_models(federation, sharing, tables),
        jnp.zeros(num_clients, bool),
        jnp.zeros((num_clients, num_clients)),
        jnp.full((num_clients, num_donors), num_clients, jnp.int32),
    )

  def init_client(group, client_id, key):
    start = group.model.init(key)
    state = init_optimizer(local, start.params) if keep else None
    return Client(jnp.asarray(client_id, jnp.int32), start, start, state)

  def send(server, group, client_id):
    donors = server.donors[client_id]
    if not num_donors:
      return Sent(donors, Variables({}, {}))
    mine = sharing.pick(group, server.models)
    parts = zip(mine, tables, strict=True)
    return Sent(donors, Variables(*(take(*part, donors) for part in parts)))

  def revised(group, client, sent, validation_data):
    models = sharing.join(group, (), sent.models)
    return revise(group, task, client, models, validation_data, mix)

  def client_update(group, client, sent, data, visit):
    training, held_out = hold_out(data, validation)
    base, w = revised(group, client, sent, held_out)
    end, state, metrics, _ = fit_model(
        group.model, local, base, training, visit, opt_state=client.opt_state
    )
    client = Client(client.client_id, base, end, state if keep else None)
    model, _ = sharing.split(group, end)
    # Number of donors with w_n > 0.
    metrics = dict(metrics, helpers=jnp.sum(w[1:] > 0))
    return client, Uplink((), Upload(model, sent.donors, w[1:])), metrics

  def server_update(server, received, turn):
    models, sent, affinity, *_ = server
    for group in federation.groups:
      ids, up = received[group.name].client_id, received[group.name].kept
      parts = zip(models, tables, up.model, strict=True)
      models = Variables(*(
          put(old, rows, ids, new) for old, rows, new in parts
      ))  # fmt: skip
      sent = sent.at[ids].set(True, mode='drop')
      # P[i, n] <- P[i, n] + w_n.
      affinity = affinity.at[ids[:, None], up.donors].add(
          up.gains, mode='drop'
      )
    # max(0, epsilon - decay t).
    chance = jnp.maximum(epsilon - decay * turn.round_num, 0.0)
    free = sent[None] & jnp.asarray(allowed)
    donors = draw_donors(turn.key, free, affinity, chance, num_donors)
    return Server(models, sent, affinity, donors), {}

  def client_model(server, client, group):
    if server.data is None:  # Not calibrated.
      return client.trained
    mine = server.data.client(client.client_id)
    sent = send(server, group, client.client_id)
    _, held_out = hold_out(mine, validation)
    return revised(group, client, sent, held_out)[0]

  return FederatedAlgorithm(
      init=init,
      init_client=init_client,
      downlink=lambda server, group, visit: send(
          server, group, visit.client_id
      ),
      client_update=client_update,
      server_update=server_update,
      client_model=client_model,
      personal=True,
      calibrate=lambda server, data: server._replace(data=data),
  )
