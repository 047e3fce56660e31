"""FedAsync: the server mixes every upload into its model on arrival.

A client that downloaded x_tau minimises L_k(w) + (mu/2) ||w - x_tau||^2 and
returns w. With k the number of server updates since its download, not counting
dropped uploads, the server moves every leaf that the client owns,

  alpha_t = alpha s(k)          x <- (1 - alpha_t) x + alpha_t w

where s is

  constant     1
  polynomial   (k + 1)^-a
  hinge        1 if k <= b, else 1 / (a (k - b) + 1)

Running norm statistics are mixed in the same way. With several architectures k
counts all updates, including those by clients that own other leaves. alpha_t
does not depend on the number of examples, so fast clients have more influence.

In synchronous rounds, uploads are mixed one by one in ascending client id with
k = 0, so the last one counts most. The paper's simulated staleness and its
halving of alpha after 800 updates are left out.

References:
  Xie, Koyejo and Gupta, `Asynchronous Federated Optimization
  <https://arxiv.org/abs/1903.03934>`_, 2019, Algorithm 1 and Section 6.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.averaging import (
  model_training,
  own_blocks,
  trained_clients,
)
from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.engine.needs import requires
from fedjax_het.engine.types import FederatedAlgorithm, Federation, Uplink
from fedjax_het.models.blocks import Variables
from fedjax_het.options import (
  at_least,
  between,
  not_negative,
  one_of,
)


class Sent(NamedTuple):
  """What a client sends.

  Attributes:
    w: Its model, not the change, by shared key.
    weight: [] float32, 0 after a visit without a step.
  """

  w: Variables
  weight: jax.Array


STALENESS = ('constant', 'polynomial', 'hinge')


def staleness_factor(k, kind: str, a: float, b: float):
  """s(k), the factor on the mixing coefficient of a stale upload.

  Args:
    k: Server updates since the download, any shape, integer.
    kind: 'constant', 'polynomial' or 'hinge'.
    a: Decay of the latter two.
    b: Staleness up to which 'hinge' keeps the full coefficient.

  Returns:
    float32 in (0, 1], 1 for k = 0, of the shape of `k`.
  """
  k = jnp.asarray(k, jnp.float32)
  if kind == 'constant':
    return jnp.ones_like(k)
  if kind == 'polynomial':
    # s(k) = (k + 1)^-a.
    return (k + 1.0) ** -a
  # s(k) = 1 if k <= b, else 1 / (a (k - b) + 1).
  return 1.0 / (a * jnp.maximum(k - b, 0.0) + 1.0)


def mix(x, w, alpha_t):
  """Moves `x` towards `w`, for the keys that `w` has.

  Args:
    x: {shared key: tree of arrays}.
    w: The same for some of the keys.
    alpha_t: [] float32 in [0, 1].

  Returns:
    (1 - alpha_t) x + alpha_t w; `x` bit for bit where they agree, where `w`
    lacks the key, or for alpha_t = 0.
  """
  # x <- (1 - alpha_t) x + alpha_t w.
  moved = {
      key: jax.tree.map(lambda old, new: old + alpha_t * (new - old), x[key], t)
      for key, t in w.items()
  }
  return {**x, **moved}


@requires(keep_optimizer=False)
def fedasync(
    federation: Federation,
    *,
    alpha: float = 0.6,
    staleness: str = 'polynomial',
    a: float | None = None,
    b: float = 4.0,
    max_staleness: int | None = None,
    mu: float = 0.005,
    aggregation: str = 'layerwise',
) -> FederatedAlgorithm:
  """FedAsync over clients of one or several architectures.

  Args:
    federation: Groups and local training.
    alpha: Mixing coefficient of a fresh upload, in (0, 1].
    staleness: 'constant', 'polynomial' or 'hinge', the decay of the coefficient
      with staleness.
    a: Decay of the latter two; None for the paper's 0.5 and 10.
    b: Staleness up to which 'hinge' keeps the full coefficient.
    max_staleness: Uploads with a larger staleness are dropped: they neither
      move the model nor make others staler. None for no limit.
    mu: rho of the paper, strength of the proximal term around the downloaded
      model, the factor in the gradient.
    aggregation: The blocks that are shared, as for `fedavg`.

  Returns:
    The algorithm. The server keeps the uploads of all clients of a round, so
    the memory of a synchronous round grows with the cohort.

  Raises:
    ValueError: If an option is out of range, or shared blocks differ in shape.
  """
  one_of('staleness', staleness, STALENESS)
  between(0, 1, above=True, alpha=alpha)
  if a is None:
    a = 10.0 if staleness == 'hinge' else 0.5
  not_negative(a=a, b=b, mu=mu)
  if max_staleness is not None:
    at_least(0, max_staleness=max_staleness)
  exchange = make_exchange(federation, aggregation)

  def send(group, start, end, size, num_steps):
    del start
    w, own = exchange.sharing.split(group, end)
    return own, Uplink((), Sent(w, exchange.coefficient(size, num_steps)))

  train, keep = model_training(federation.local, mu)
  init_client, client_update = trained_clients(exchange, train, keep, send)

  def server_update(server, received, turn):
    del turn
    groups = [received[group.name] for group in federation.groups]
    ids, k, trained = (
        jnp.concatenate(parts)
        for parts in zip(
            *((r.client_id, r.staleness, r.kept.weight) for r in groups),
            strict=True,
        )
    )
    # alpha_t = alpha s(k); 0 for dropped uploads and visits without a step.
    alpha_t = alpha * staleness_factor(k, staleness, a, b)
    alpha_t = jnp.where(trained > 0, alpha_t, 0.0)
    if max_staleness is not None:
      alpha_t = jnp.where(k <= max_staleness, alpha_t, 0.0)
    # Ends of the groups' slots on the concatenated axis.
    ends = jnp.cumsum(jnp.array([len(r.client_id) for r in groups]))
    order = jnp.argsort(ids)  # Padding slots are last.

    def taker(number):
      whole = groups[number].kept.w
      begin = ends[number] - len(groups[number].client_id)

      def take(server, slot):
        params, stats = jax.tree.map(lambda leaf: leaf[slot - begin], whole)
        return Variables(
            mix(server.params, params, alpha_t[slot]),
            mix(server.stats, stats, alpha_t[slot]),
        )

      return take

    takers = [taker(number) for number in range(len(groups))]

    def one(i, server):
      slot = order[i]
      number = jnp.searchsorted(ends, slot, side='right')
      return jax.lax.switch(number, takers, server, slot)

    arrived = jnp.sum(ids < federation.num_clients)
    return jax.lax.fori_loop(0, arrived, one, server), {}

  return FederatedAlgorithm(
      init=exchange.init,
      init_client=init_client,
      downlink=lambda server, group, visit: exchange.download(server, group),
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: exchange.assemble(
          group, own_blocks(client), exchange.download(server, group)
      ),
      personal=exchange.personal,
      one_model=exchange.one_model,
      max_staleness=max_staleness,
  )
