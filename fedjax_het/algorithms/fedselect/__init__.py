"""FedSelect: clients grow sets of personal entries, those that change most.

Client k keeps its whole model w_k, the parameters r_k at the last growth of its
masks, two masks M and M' (True for personal entries, empty at first) and the
number v of its earlier visits. A visit:

  1. Receive x.  w <- M' w_k + (1 - M') x,  M' <- M.  If v = 0: r_k <- w.
     So an entry is received once more after it has become personal.
  2. E pairs of epochs: the first trains the entries with M = 1, the second
     those with M = 0. Each half has its own optimiser, which is kept during
     the visit. While M is empty, the first half is skipped.
  3. w_k <- w. Send M, and w where M = 0. The server, entry by entry:
       x <- x + sum_k (1 - M_k) (w_k - x) / sum_k (1 - M_k),
     which keeps x where no client shares.
  4. In the visits v = R, 2 R, ..., in each tensor whose personal share is at
     most a limit: of its f entries that are not personal,
     f - round((1 - p) f) become personal, those with the largest |w - r_k|
     (if equal, the first). Then r_k <- w.
  5. v <- v + 1

Kernels and the scales of norms have masks, in blocks that travel and in those
that do not; biases are always shared. Running statistics are averaged, or stay
on the client, as in other methods. The clients' models w_k are evaluated, and x
as the view 'global'.

In the authors' code masks grow every third round, with the same clients in all
rounds. Here cohorts are sampled, so growth counts a client's visits, and r_k
begins with its first one. That code only has SGD, so it does not show whether
the halves share moments. It makes all entries at or above a cut-off personal,
which are more if changes are equal, and trains in inference mode after its
first evaluation. Neither is done here.

The module exceeds 200 lines with its docstrings; its code has about 110.

References:
  Tamirisa et al., `FedSelect: Personalized Federated Learning with Customized
  Selection of Parameters for Fine-Tuning <https://arxiv.org/abs/2404.02478>`_,
  CVPR 2024, Algorithms 1 and 2.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.exchange import Delta, make_exchange
from fedjax_het.aggregation.personal_entries import (
  PersonalModel,
  blend,
  fit_masked,
  fraction,
  predict_shared,
)
from fedjax_het.aggregation.server import (
  server_step,
  server_variables,
  state_of,
  takes_server_options,
  weighted_mean,
  with_state,
)
from fedjax_het.algorithms.fedselect.growth import grow, packed
from fedjax_het.engine.local import init_optimizer
from fedjax_het.engine.needs import requires
from fedjax_het.engine.rows import put_row, take_row
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Maybe,
  Uplink,
)
from fedjax_het.models.blocks import Variables
from fedjax_het.options import at_least, between


class Client(NamedTuple):
  """The client state.

  Attributes:
    variables: w_k, and its running statistics.
    reference: r_k, parameters.
    mask: M, {block: tree of bool}: personal in the next training.
    trained: M', the same: personal in the last training.
    visits: [] int32, v.
  """

  variables: Variables
  reference: Any
  mask: Any
  trained: Any
  visits: jax.Array


class Sent(NamedTuple):
  """The summed uplink.

  Attributes:
    entries: {key: tree of Maybe}, w - x where it is shared, else 0; the sum of
      `present` counts the senders of each entry.
    stats: `Delta` of the running statistics that travel.
  """

  entries: Any
  stats: Delta


def alternate(model, local, start: Variables, data, visit, mask):
  """Step 2: pairs of a personal and a shared epoch.

  Args:
    model: The architecture.
    local: How to train; `epochs` is the number of pairs. With `steps`, a
      single pair with that many steps in each half.
    start: Variables at the beginning.
    data: The client's examples.
    visit: The visit.
    mask: M.

  Returns:
    Variables at the end, the mean loss and the number of steps.
  """
  pairs = local.epochs if local.steps is None else 1
  one = dataclasses.replace(local, epochs=1)

  def epoch(carry, turn):
    w, states = carry
    half, key = turn
    # M in the first half of a pair, 1 - M in the second.
    part = jax.tree.map(lambda m: m ^ (half == 1), mask)
    w, state, metrics, num = fit_masked(
        model, one, w, data, visit._replace(key=key), part,
        opt_state=take_row(states, half),
    )  # fmt: skip
    return (w, put_row(states, half, state)), (num * metrics['train_loss'], num)

  state = init_optimizer(local, start.params)
  states = jax.tree.map(lambda s: jnp.stack([s, s]), state)
  keys = [
      jax.random.fold_in(key, number)
      for key in jax.random.split(visit.key, pairs)
      for number in (1, 0)
  ]
  turns = jnp.tile(jnp.arange(2), pairs), jnp.stack(keys)
  (w, _), (loss, num) = jax.lax.scan(epoch, (start, states), turns)
  num = jnp.sum(num)
  return w, jnp.sum(loss) / jnp.maximum(num, 1), num


@requires()
@takes_server_options()
def fedselect(
    federation: Federation,
    *,
    growth: float = 0.25,
    limit: float = 0.8,
    period: int = 3,
    aggregation: str = 'layerwise',
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """FedSelect over clients of one or several architectures.

  Args:
    federation: Groups and local training; `local.epochs` is E, the pairs of
      epochs.
    growth: p in [0, 1]; 0 for no personal entry.
    limit: Tensors with a larger personal share do not grow.
    period: R, visits from one growth to the next.
    aggregation: As for `fedavg`. All clients have the same weight.
    tx: The server's optimiser, with the options of `fedavg`.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is unknown or out of range, or shared blocks differ
      in shape.
  """
  between(0, 1, growth=growth, limit=limit)
  at_least(1, period=period)
  exchange = make_exchange(federation, aggregation, tx=tx)
  local = federation.local

  def init_client(group, client_id, key):
    w = group.model.init(key)
    nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, bool), w.params)
    return Client(w, w.params, nothing, nothing, jnp.int32(0))

  def upload(group, x, w, mask, size, num):
    """Step 3: the upload."""
    _, delta = exchange.upload(group, x, w, size, num)
    p = delta.weight
    mask, _ = exchange.sharing.split(group, mask)
    # (1 - M) (w - x), and 1 - M; both 0 without a step.
    entries = jax.tree.map(
        lambda m, change: Maybe(jnp.where(m, 0.0, change), p * ~m),
        mask, delta.change,
    )  # fmt: skip
    # The server reads M from `present`; the packed bits only count as traffic.
    return Uplink(Sent(entries, delta._replace(change={})), packed(mask))

  def client_update(group, client, sent, data, visit):
    w_k, reference, mask, trained, visits = client
    x = exchange.assemble(group, w_k, sent)
    # w <- M' w_k + (1 - M') x.
    start = Variables(blend(trained, w_k.params, x.params), x.stats)
    reference = jax.tree.map(
        lambda w, r: jnp.where(visits == 0, w, r), start.params, reference
    )
    w, loss, num = alternate(group.model, local, start, data, visit, mask)
    uplink = upload(group, x, w, mask, data.size, num)
    grown, reference_now = jax.lax.cond(
        (visits > 0) & (visits % period == 0),
        lambda: (grow(mask, w.params, reference, growth, limit), w.params),
        lambda: (mask, reference),
    )
    metrics = dict(train_loss=loss, personal_share=fraction(mask))
    return Client(w, reference_now, grown, mask, visits + 1), uplink, metrics

  def server_update(server, received, turn):
    def part(field, entries):
      return jax.tree.map(
          lambda entry: getattr(entry, field),
          entries,
          is_leaf=lambda node: isinstance(node, Maybe),
      )

    sent = [received[g.name].summed.entries for g in federation.groups]
    # sum_k (1 - M_k) (w_k - x) / sum_k (1 - M_k), 0 where no client shares.
    mean, some = weighted_mean(
        (part('value', one), part('present', one)) for one in sent
    )
    server = exchange.collect(server, received, lambda summed: summed.stats)
    params, stats = server_variables(server)
    params, opt_state = server_step(
        tx, params, state_of(tx, server, params), mean, some
    )
    return with_state(Variables(params, stats), opt_state), {}

  return FederatedAlgorithm(
      init=exchange.init,
      init_client=init_client,
      downlink=lambda server, group, visit: exchange.download(server, group),
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: PersonalModel(
          *client.variables,
          exchange.assemble(
              group, client.variables, exchange.download(server, group)
          ),
      ),
      personal=True,
      views={'global': predict_shared},
  )
