"""HeteroFL: nested widths of one model, averaged number by number.

All groups hold the full model; client k trains its first ceil(rho_k d) of the
d channels of every hidden layer. One round:

  1. The client receives its slice of theta.
  2. It trains with three additions: activations are multiplied by 1 / rho_k
     in front of every norm (Scaler, in training only); norms keep no running
     statistics (static batch norm); logits of labels that it does not own are
     set to 0, not to -inf: they stay in the softmax (masked loss).
  3. For every number j, over the holders H_j of the round,
       theta_j <- (1 / |H_j|) sum_{k in H_j} theta_kj,
     unchanged if nobody holds it. Head rows count for owners of the label.

Evaluated is the full-width model. With the norm policy 'batch' its statistics
are collected before every evaluation by a pass over all training data; with
'batch_only' each test batch is normalised by its own.

The paper averages values; here the change from theta is averaged, which is the
same and equals FedAvg bit for bit where all rates are 1. With batch norm the
Scaler only rescales epsilon. Its "local" evaluation on the clients' own test
shards is left out.

References:
  Diao, Ding, Tarokh, `HeteroFL: Computation and Communication Efficient
  Federated Learning for Heterogeneous Clients
  <https://arxiv.org/abs/2010.01264>`_, ICLR 2021.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
import functools
import math
import string
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.aggregation.slicing import (
  extract,
  mean_change,
  narrow,
  scatter_add,
  width_index,
  without_running_stats,
)
from fedjax_het.data.federated import ClientData
from fedjax_het.engine.local import fit
from fedjax_het.engine.needs import requires
from fedjax_het.engine.options import at_least, not_negative, one_of, shares
from fedjax_het.engine.static_norm import static_statistics
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Maybe,
  Uplink,
)
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.models.intercept import scaled_norm_inputs
from fedjax_het.names import check_name

MASKS = ('client', 'batch', 'none')


class Level(NamedTuple):
  """One width.

  Attributes:
    rate: rho, the share of the channels.
    model: The narrow model.
    index: Which numbers of the full parameters it holds.
  """

  rate: float
  model: BlockModel
  index: Any


class Server(NamedTuple):
  """The full-width parameters; statistics by rate, for evaluation only."""

  params: dict[str, Any]
  stats: dict[str, Any]


class Sent(NamedTuple):
  """The uplink: changes, and who holds what.

  Attributes:
    change: Tree of `Maybe`: weight * (after - before).
    number: [levels] float32, the client's weight at its level.
    owned: [levels, C] float32, the same for the rows of labels that it owns.
  """

  change: Any
  number: jax.Array
  owned: jax.Array


def owned_labels(data: ClientData, num_classes: int) -> jax.Array:
  """[C] bool: the labels of which a client has an example, Y_k."""
  real = jnp.arange(len(data.index)) < data.size
  labels = data.labels[data.index]
  return jnp.zeros(num_classes, bool).at[labels].max(real)


def masked_logits(logits, batch, owned, mask: str):
  """Logits with those of absent labels set to 0.

  Args:
    logits: [B, C].
    batch: The minibatch.
    owned: [C] bool, the client's labels.
    mask: 'client' keeps the client's labels, 'batch' those of the minibatch
      (the code of SplitMix and FeDepth), 'none' all.

  Returns:
    [B, C].
  """
  if mask == 'none':
    return logits
  if mask == 'batch':
    owned = jax.nn.one_hot(batch.y, logits.shape[1], dtype=bool)
    if batch.mask is not None:
      owned = owned & batch.mask[:, None]
    owned = jnp.any(owned, axis=0)
  return jnp.where(owned[None], logits, 0.0)


def one_model(federation: Federation, method: str) -> BlockModel:
  """The model that all groups hold; a ValueError if they differ."""
  first, *others = federation.groups
  for group in others:
    if group.model != first.model:
      raise ValueError(
          f'{method} takes its widths from one full model, but the groups '
          f'{first.name!r} ({first.model.name}) and {group.name!r} '
          f'({group.model.name}) hold different ones.'
      )
  return first.model


def make_level(model: BlockModel, rate: Fraction) -> Level:
  """The width `rate` of a model, ceil(rate * K) of K channels."""
  small = narrow(model, lambda k: math.ceil(rate * k))
  return Level(float(rate), small, width_index(model, small).params)


@requires(one_model=True, group_options=dict(rate=None))
def heterofl(
    federation: Federation,
    *,
    rates: str = '',
    odds: tuple = (),
    scaler: bool = True,
    mask: str = 'client',
    weights: str = 'uniform',
    left_out: str = '',
    calibrate_batches: int | None = None,
    views: bool = False,
) -> FederatedAlgorithm:
  """HeteroFL with fixed or dynamic widths.

  Args:
    federation: Groups, all of one model, and local training. The paper clips
      gradients at a global norm of 1: `local.clip_norm`.
    rates: Width of each group by name, such as 'a:1 b:1/2'; '' for 1, 1/2,
      1/4, ... in the order of the names.
    odds: With one number per rate, widths are dynamic: at every visit a client
      draws its rate with these odds, whatever its group, and the names in
      `rates` are a, b, c, ... () for fixed widths.
    scaler: Whether activations are multiplied by 1 / rate in training.
    mask: 'client' for the masked loss and head rows of owned labels, 'batch'
      for a loss masked by the labels of the minibatch, 'none'.
    weights: 'uniform' for the paper's mean over holders, 'data' for one
      weighted by the number of examples.
    left_out: Widths that are not aggregated, by their names in `rates`, such
      as 'a b'; '' for none. Their clients take part and train as ever, but
      count as if they had not taken a step.
    calibrate_batches: Most batches of static batch norm's pass; None for all
      training data.
    views: Whether every narrower width is evaluated too.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is out of range, or groups hold different models.
  """
  groups, local = federation.groups, federation.local
  one_of('mask', mask, MASKS)
  one_of('weights', weights, ('uniform', 'data'))
  if calibrate_batches is not None:
    at_least(1, calibrate_batches=calibrate_batches)
  full, num_classes = one_model(federation, 'HeteroFL'), federation.num_classes
  names = [group.name for group in groups]
  if len(odds) > len(string.ascii_lowercase):
    raise ValueError(f'odds names {len(odds)} levels; there are 26, a to z.')
  if odds:
    names = string.ascii_lowercase[: len(odds)]
    not_negative(**{f'odds[{i}]': share for i, share in enumerate(odds)})
    if sum(odds) <= 0:
      raise ValueError(
          f'odds must be at least 0, and not only zeros, got {tuple(odds)}.'
      )
  chosen = shares('rates', rates, names)
  for name in left_out.split():
    check_name('left_out', name, names)
  levels = [make_level(full, chosen[name]) for name in names]
  level_of = {name: i for i, name in enumerate(names)}
  head = full.block_names[-1]
  full_rate = _name(1.0)
  evaluated = {full_rate: make_level(full, Fraction(1))}
  if views:
    evaluated.update((_name(level.rate), level) for level in levels)

  def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)

  def init(key):
    variables = full.init(key)
    # Never used: norms get theirs in `calibrate`.
    stats = {
        name: zeros(level.model.abstract_variables.stats)
        for name, level in evaluated.items()
    }
    return Server(variables.params, stats)

  def downlink(server, group, visit):
    if not odds:
      return extract(server.params, levels[level_of[group.name]].index)
    logits = jnp.log(jnp.asarray(odds, jnp.float32))
    level = jax.random.categorical(visit.key, logits)
    held = _held(levels, server.params, level)
    return level, jax.tree.map(Maybe, server.params, held)

  def train(i, start, data, visit):
    """Local training at level i: its change and how much it counts."""
    rate, model, _ = levels[i]
    model = without_running_stats(model)
    owned = owned_labels(data, num_classes)

    def loss_fn(variables, batch, key):
      with scaled_norm_inputs(1 / rate if scaler else 1):
        logits, stats = model.apply(
            variables, batch.x, train=True, mask=batch.mask, key=key
        )
      logits = masked_logits(logits, batch, owned, mask)
      return local.task.loss(logits, batch.y, batch.mask), (stats, {})

    end, _, metrics, num_steps = fit(
        loss_fn, local, Variables(start, {}), data, visit
    )
    if names[i] in left_out.split():
      end, num_steps = Variables(start, {}), 0
    amount = data.size if weights == 'data' else 1
    weight = jnp.where(num_steps > 0, amount, 0).astype(jnp.float32)
    rows = owned if mask == 'client' else jnp.ones_like(owned)

    def of_owned(leaf):  # Classes are the last axis of the head's leaves.
      return jnp.where(jnp.broadcast_to(rows, leaf.shape), leaf, 0.0)

    change = jax.tree.map(lambda a, b: weight * (a - b), end.params, start)
    change[head] = jax.tree.map(of_owned, change[head])
    here = (jnp.arange(len(levels)) == i) * weight
    return Sent(change, here, here[:, None] * rows[None]), metrics

  def client_update(group, client, sent, data, visit):
    if not odds:
      up, metrics = train(level_of[group.name], sent, data, visit)
      present = jax.tree.map(lambda leaf: jnp.bool_(True), up.change)
    else:
      level, params = sent
      params = jax.tree.map(lambda m: m.value, params, is_leaf=_is_maybe)

      def at_level(i, params):
        index = levels[i].index
        up, metrics = train(i, extract(params, index), data, visit)
        whole = scatter_add(zeros(params), index, up.change)
        return up._replace(change=whole), metrics

      branches = [
          functools.partial(at_level, i) for i in range(len(levels))
      ]
      up, metrics = jax.lax.switch(level, branches, params)
      present = _held(levels, params, level)
      metrics['rate'] = jnp.array([level.rate for level in levels])[level]
    owned = jnp.sum(up.owned, axis=0) > 0
    present[head] = jax.tree.map(
        lambda leaf, here: here & jnp.broadcast_to(owned, leaf.shape),
        up.change[head],
        present[head],
    )
    return client, Uplink(
        up._replace(change=jax.tree.map(Maybe, up.change, present))
    ), metrics

  def server_update(server, received, turn):
    del turn
    total = count = zeros(server.params)
    for group in groups:
      change, number, owned = received[group.name].summed
      change = jax.tree.map(lambda m: m.value, change, is_leaf=_is_maybe)
      if odds:
        total = jax.tree.map(jnp.add, total, change)
      else:
        index = levels[level_of[group.name]].index
        total = scatter_add(total, index, change)
      for i, level in enumerate(levels):
        if odds or i == level_of[group.name]:
          count = scatter_add(
              count, level.index, _holders(level, number[i], owned[i])
          )
    params = mean_change(server.params, total, count)
    return server._replace(params=params), {}

  def calibrate(server, data):
    stats = {
        name: static_statistics(
            level.model,
            extract(server.params, level.index),
            data,
            batch_size=local.batch_size,
            num_batches=calibrate_batches,
        )
        for name, level in evaluated.items()
    }
    return server._replace(stats=stats)

  def predict_with(name) -> Callable[..., jax.Array]:
    level = evaluated[name]

    def predict(group, server, x):
      del group
      params = extract(server.params, level.index)
      variables = Variables(params, server.stats[name])
      return level.model.apply(variables, x)[0]

    return predict

  return FederatedAlgorithm(
      init=init,
      init_client=lambda group, client_id, key: (),
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: server,
      one_model=True,
      predict=predict_with(full_rate),
      views={n: predict_with(n) for n in evaluated if n != full_rate},
      calibrate=calibrate if full.abstract_variables.stats else None,
  )


def _name(rate: float) -> str:
  return f'rate_{rate:.4g}'


def _is_maybe(x) -> bool:
  return isinstance(x, Maybe)


def _holders(level: Level, number, owned):
  """How much counts for every number of a narrow model."""
  params = level.model.abstract_variables.params
  head = level.model.block_names[-1]
  return {
      name: jax.tree.map(
          lambda s, n=owned if name == head else number: jnp.broadcast_to(
              n, s.shape
          ),
          tree,
      )
      for name, tree in params.items()
  }


def _held(levels: Sequence[Level], params, level):
  """For every number whether the level with a traced place holds it."""

  def held(leaf, *choices):
    inside = jnp.ones(leaf.shape, bool)
    for axis, size in enumerate(leaf.shape):
      members = np.ones((len(levels), size), bool)
      for row, axes in zip(members, choices, strict=True):
        if axes[axis] is not None:
          row[:] = False
          row[axes[axis]] = True
      shape = [1] * leaf.ndim
      shape[axis] = size
      inside &= jnp.asarray(members)[level].reshape(shape)
    return inside

  return jax.tree.map(held, params, *(level.index for level in levels))
