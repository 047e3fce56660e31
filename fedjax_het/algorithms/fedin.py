"""FedIN: federated intermediate-layers learning.

A client network is an extractor e, intermediate layers in, and a classifier c;
e and c have one architecture for everybody, in differs. Besides its weights a
client uploads pairs (s_in, s_out) = (input, output of in). One round:

  1. The server sends the shared weights and pairs S of other clients.
  2. For each minibatch the client takes
       G_loc = grad of CE + (mu/2) ||w - w_start||^2        (all layers)
       G_in  = grad of mean (f(s_in; w_in) - s_out)^2       (in only)
     and steps with G_loc on e and c, and on in with the combination
       exact:  Z = G_in if <G_in, G_loc> >= 0, else G_in - (b/a) G_loc
       fixed:  Z = G_in + (lam/2) G_loc
  3. It uploads weights and pairs; the server averages and stores.

Without pairs (the first round) the step is local training alone. For the
fixed rule minibatch and pairs take one pass through `in` together. The two
papers' settings are options: the defaults are those of the later version
('v2'); `aggregation='ends'`, `mu=0`, `lam=2`, `capture='training'` and more
pairs are those of the first ('v1').

References:
  Chan, Jiang, Deng, Ngai, `FedIN: Federated Intermediate Layers Learning for
  Model Heterogeneity <https://arxiv.org/abs/2304.00759>`_ (v1, Algorithm 1,
  Eq. 4-16), and the later journal version of the same title (v2, Eq. 3-21).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.exchange import make_exchange
from fedjax_het.aggregation.pairs import (
    Pairs,
    PairStore,
    check_pair_shapes,
    draw_pairs,
    empty_store,
    older,
    store_pairs,
)
from fedjax_het.algorithms.fedin_passes import (
    PLAIN,
    Features,
    feature_error,
    forward,
    in_loss,
)
from fedjax_het.engine.local import (
    proximal_gradient,
    shuffled_positions,
    train_epochs,
)
from fedjax_het.engine.options import (
  at_least,
  not_negative,
  one_of,
  positive,
)
from fedjax_het.engine.projection import project_gradient
from fedjax_het.engine.types import (
    FederatedAlgorithm,
    Federation,
    Maybe,
    Uplink,
)
from fedjax_het.models.blocks import Variables


class Server(NamedTuple):
  """FedIN's server: the shared weights and the latest pairs per client."""

  weights: Variables
  store: PairStore


class Downlink(NamedTuple):
  """What a client receives; `pairs` is a `Maybe` of `Pairs`."""

  weights: Variables
  pairs: Maybe


def _one_pass(rule: str, lam: float, num_pairs: int, batch_size: int) -> bool:
  """Whether one pass over batch and pairs gives Z.

  The fixed Z is (lam/2) times the gradient of L_loc + (2/lam) L_IN, which
  leaves the gradients of extractor and classifier as they are. The two parts
  of a batch are equally long.
  """
  return rule == 'fixed' and lam > 0 and num_pairs >= batch_size


def fedin(
    federation: Federation,
    *,
    in_training: bool = True,
    mu: float = 0.1,
    rule: str = 'fixed',
    lam: float = 1.0,
    scope: str = 'leaf',
    aggregation: str = 'layerwise',
    weights: str = 'uniform',
    num_pairs: int | None = None,
    max_pair_age: int | None = None,
    capture: str = 'final',
    noise: float = 0.0,
    noise_at: str = 'forward',
    clip: float | None = None,
    sigma: float = 0.0,
) -> FederatedAlgorithm:
  """FedIN in both published versions, with their ablations.

  Args:
    federation: Groups and local training. Extractors and classifiers must
      agree in shape where they are shared, features always.
    in_training: False leaves the IN loss (and the pairs) out: 'w/o IN'.
    mu: Proximal factor in the gradient (the paper prints mu/2 = 0.05); 0 is
      'w/o Prox' and v1.
    rule: 'fixed' or 'exact' combination of the gradients, see
      `project_gradient`; 'sequential' is 'w/o Opt': a full step with G_loc,
      then one on the intermediate layers alone with G_in.
    lam: lambda of the fixed rule: 1 in v2, 2 in v1.
    scope: 'leaf' or 'tree', the extent of the inner products of 'exact'.
    aggregation: 'layerwise' (v2 Eq. 19), 'architecture' (v2 Eq. 20), 'ends'
      (v1: extractor and classifier), 'none' (v1's 'w/o aggregation').
    weights: 'uniform', or 'data' for weights by number of examples (Eq. 21).
    num_pairs: Pairs that a client uploads and receives; at most one batch, or
      whole batches, which local steps take in turn. None for one batch (v2).
    max_pair_age: Server updates after which a client's pairs are no longer
      given out, 1 for those of the last round alone; None for pairs of any age
      (the papers). A client for whom no pairs are left trains on its own data
      alone, as all do in the first round. A round is one server update; where
      clients go at their own pace, each upload is one.
    capture: 'final' computes the pairs of one draw of examples with the
      trained weights (v2); 'training' keeps the last ones of the training
      forward passes (v1).
    noise: Feature noise in units of the features' standard deviation; v2's
      '+Noise' is 0.8.
    noise_at: 'forward' puts clipping and noise into the client's own forward
      passes (v2), 'upload' on the uploaded pairs only.
    clip: Largest L2 norm of an example's feature, before noise.
    sigma: Standard deviation of absolute noise on the features, such as
      `privacy.gaussian_sigma` gives for a `clip`; read there what that does
      and does not promise.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is out of range, or shapes that must agree differ.
  """
  local = federation.local
  one_of('rule', rule, ('fixed', 'exact', 'sequential'))
  one_of('scope', scope, ('leaf', 'tree'))
  one_of('capture', capture, ('final', 'training'))
  one_of('noise_at', noise_at, ('forward', 'upload'))
  not_negative(mu=mu, lam=lam, noise=noise, sigma=sigma)
  if clip is not None:
    positive(clip=clip)
  if num_pairs is None:
    num_pairs = local.batch_size
  _check_num_pairs(num_pairs, local.batch_size)
  if max_pair_age is not None:
    at_least(1, max_pair_age=max_pair_age)
  pair_shapes = check_pair_shapes(federation)
  exchange = make_exchange(federation, aggregation, weights)
  protect = Features(clip, noise, sigma)
  in_forward = protect if noise_at == 'forward' else PLAIN
  at_upload = protect if noise_at == 'upload' else PLAIN
  batch_size = min(local.batch_size, num_pairs)
  num_chunks = num_pairs // batch_size
  one_pass = in_training and _one_pass(rule, lam, num_pairs, local.batch_size)

  def init(key):
    store = empty_store(
        federation.num_clients if in_training else 0,
        num_pairs,
        pair_shapes,
        with_age=max_pair_age is not None,
    )
    return Server(exchange.init(key), store)

  def downlink(server, group, visit):
    sent = exchange.download(server.weights, group)
    if not in_training:
      return Downlink(sent, Maybe((), jnp.zeros((0,), bool)))
    pairs = draw_pairs(
        server.store,
        visit.client_id,
        num_pairs,
        visit.key,
        max_age=max_pair_age,
    )
    return Downlink(sent, pairs)

  def make_step(group, tx, anchor, sent):
    """One local step of the algorithm box, on (variables, optimiser, ...)."""
    model = group.model

    def local_loss(params, stats, batch, key, received=None):
      """CE, and (2/lam) L_IN on top where there are `received` pairs."""
      variables = Variables(params, stats)
      logits, pairs, stats, out = forward(
          model, variables, batch.x, batch.mask, key, in_forward, received
      )
      loss = total = local.task.loss(logits, batch.y, batch.mask)
      metrics = {'train_loss': loss}
      if received is not None:
        (_, s_out), present = received
        metrics['in_loss'] = feature_error(out, s_out, present)
        total = loss + (2 / lam) * metrics['in_loss']
      return total, (stats, pairs, metrics)

    def share_of_pairs(step_num):
      begin = (step_num % num_chunks) * batch_size
      return jax.tree.map(
          lambda a: jax.lax.dynamic_slice_in_dim(a, begin, batch_size),
          sent.pairs,
      )

    def in_gradient(params, stats, step_num, key):
      """G_in over the step's share of the pairs, and whether there is any."""
      pairs, mask = share_of_pairs(step_num)
      names = model.intermediate
      loss, grads = jax.value_and_grad(
          lambda middle: in_loss(
              model, Variables({**params, **middle}, stats), pairs, mask, key
          )
      )({name: params[name] for name in names})
      return loss, grads, jnp.any(mask)

    def step(carry, batch, step_num, key):
      (params, stats), opt_state, in_opt_state, buffer = carry
      key, in_key = jax.random.split(key)
      received = share_of_pairs(step_num) if one_pass else None
      grads, (new_stats, pairs, metrics) = jax.grad(local_loss, has_aux=True)(
          params, stats, batch, key, received
      )
      # G_loc; in one pass G_loc + (2/lam) G_in on the intermediate layers.
      grads = proximal_gradient(grads, params, anchor, mu)
      if one_pass:
        factor = jnp.where(jnp.any(received.present), lam / 2, 1.0)
        z = {name: grads[name] for name in model.intermediate}
        grads = {**grads, **jax.tree.map(lambda g: factor * g, z)}
      elif in_training and rule != 'sequential':
        metrics['in_loss'], g_in, some = in_gradient(
            params, stats, step_num, in_key
        )
        g_loc = {name: grads[name] for name in g_in}
        z = project_gradient(g_in, g_loc, rule=rule, lam=lam, scope=scope)
        grads = {**grads, **_select(some, z, g_loc)}
      updates, opt_state = tx.update(grads, opt_state, params)
      params = optax.apply_updates(params, updates)
      if in_training and rule == 'sequential':
        metrics['in_loss'], g_in, some = in_gradient(
            params, new_stats, step_num, in_key
        )
        middle = {name: params[name] for name in g_in}
        updates, moved = tx.update(g_in, in_opt_state, middle)
        stepped = optax.apply_updates(middle, updates)
        params = {**params, **_select(some, stepped, middle)}
        in_opt_state = _select(some, moved, in_opt_state)
      if buffer is not None:
        buffer = _write(buffer, pairs, batch.mask, step_num)
      carry = (Variables(params, new_stats), opt_state, in_opt_state, buffer)
      return carry, metrics

    return step

  def client_update(group, client, sent, data, visit):
    model = group.model
    whole = exchange.assemble(group, client, sent.weights)
    start = model.trim(whole) if local.drop_unused_weights else whole
    # Training takes the whole key, as the baselines do: same batches, same
    # draws. It splits it in two, which are the folds of 0 and 1.
    pair_key, noise_key = jax.random.split(jax.random.fold_in(visit.key, 2))
    tx = local.optimizer(local.learning_rate(visit.round_num))
    in_opt_state = buffer = None
    if in_training and rule == 'sequential':
      in_opt_state = tx.init({n: start.params[n] for n in model.intermediate})
    if in_training and capture == 'training':
      buffer = _empty_buffer(num_chunks, batch_size, pair_shapes)
    (end, _, _, buffer), metrics, num_steps = train_epochs(
        make_step(group, tx, start.params, sent),
        (start, tx.init(start.params), in_opt_state, buffer),
        data,
        visit.key,
        epochs=local.epochs,
        batch_size=local.batch_size,
        drop_last=local.drop_last,
    )
    own, delta = exchange.upload(
        group, whole, model.fill(end, whole), data.size, num_steps
    )
    if not in_training:
      return own, Uplink(delta), metrics
    if buffer is None:
      buffer = _final_pairs(
          model, end, data, pair_key, num_chunks, batch_size, in_forward
      )
    (s_in, s_out), mask = jax.tree.map(
        lambda a: a.reshape(num_pairs, *a.shape[2:]), buffer
    )
    in_key, out_key = jax.random.split(noise_key)
    pairs = Pairs(
        at_upload(in_key, s_in, mask), at_upload(out_key, s_out, mask)
    )
    return own, Uplink(delta, Maybe(pairs, mask)), metrics

  def server_update(server, received, turn):
    del turn
    store = server.store
    if in_training:
      for group in federation.groups:
        store = store_pairs(
            store, received[group.name].client_id, received[group.name].kept
        )
      store = older(store)
    return Server(exchange.collect(server.weights, received), store), {}

  return FederatedAlgorithm(
      init=init,
      init_client=lambda group, client_id, key: exchange.init_client(
          group, key
      ),
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: exchange.assemble(
          group, client, exchange.download(server.weights, group)
      ),
      personal=exchange.personal,
  )


def _select(condition, new, old):
  return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def _empty_buffer(num_chunks, batch_size, pair_shapes):
  pairs = Pairs(
      *(jnp.zeros((num_chunks, batch_size, *s)) for s in pair_shapes)
  )
  return pairs, jnp.zeros((num_chunks, batch_size), bool)


def _write(buffer, pairs, mask, step_num):
  """Puts the pairs of one training batch in the place of the oldest."""
  if mask is None:
    mask = jnp.ones(len(pairs.s_in), bool)
  place = step_num % buffer[1].shape[0]
  size = buffer[1].shape[1]
  return jax.tree.map(
      lambda all_, one: all_.at[place].set(jax.lax.stop_gradient(one[:size])),
      buffer,
      (pairs, mask),
  )


def _final_pairs(model, end, data, key, num_chunks, batch_size, protect):
  """Pairs of one random draw of examples under the trained weights."""
  order_key, key = jax.random.split(key)
  order = shuffled_positions(order_key, data)
  place = jnp.arange(num_chunks * batch_size).reshape(num_chunks, batch_size)

  def one(arg):
    place, key = arg
    mask = place < data.size
    batch = data.batch(order[jnp.minimum(place, len(order) - 1)], mask)
    _, pairs, _, _ = forward(model, end, batch.x, mask, key, protect)
    return pairs, mask

  return jax.lax.map(one, (place, jax.random.split(key, num_chunks)))


def _check_num_pairs(num_pairs: int, batch_size: int) -> None:
  if num_pairs < 1 or (num_pairs > batch_size and num_pairs % batch_size):
    raise ValueError(
        f'num_pairs must be between 1 and the batch size {batch_size}, or a '
        f'multiple of it, got {num_pairs}.'
    )
