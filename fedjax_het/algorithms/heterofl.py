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

A client's width is its group's (`fixed_widths`), or it draws one at every visit
(`drawn_widths`): then it is sent its level besides, and its change travels in
leaves of full size, of which only its slice is counted.

The full-width model is evaluated. With the norm policy 'batch' its statistics
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

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.aggregation.label_masks import (
  MASKS,
  masked_logits,
  owned_labels,
)
from fedjax_het.aggregation.slicing import (
  Level,
  extract,
  make_level,
  mean_change,
  one_model,
  scatter_add,
  without_running_stats,
)
from fedjax_het.engine.local import fit
from fedjax_het.engine.needs import requires
from fedjax_het.engine.static_norm import static_statistics
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  LocalTraining,
  Maybe,
  Uplink,
)
from fedjax_het.models.blocks import Variables
from fedjax_het.models.intercept import scaled_norm_inputs
from fedjax_het.names import check_name
from fedjax_het.options import (
  at_least,
  group_shares,
  halvings,
  not_negative,
  one_of,
  share,
)


class Server(NamedTuple):
  """The full-width parameters; statistics by rate, for evaluation only."""

  params: dict[str, Any]
  stats: dict[str, Any]


class Sent(NamedTuple):
  """The uplink: changes and their weights.

  Attributes:
    change: Tree of `Maybe`: weight * (after - before).
    number: [levels] float32, the client's weight at its level.
    owned: [levels, C] float32, the same for the rows of labels that it owns.
  """

  change: Any
  number: jax.Array
  owned: jax.Array


class Plan(NamedTuple):
  """What is fixed for a run.

  Attributes:
    levels: The widths that clients train.
    left_out: For each level whether it is left out of the mean.
    head: Name of the classifier's block.
    num_classes: C.
    local: Local training.
    scaler: As for `heterofl`, like the others.
    mask: See there.
    weights: See there.
  """

  levels: Sequence[Level]
  left_out: Sequence[bool]
  head: str
  num_classes: int
  local: LocalTraining
  scaler: bool
  mask: str
  weights: str


class Widths(NamedTuple):
  """Who trains at which width.

  Attributes:
    downlink: As in `FederatedAlgorithm`.
    client_update: As there.
    add: `(total, count, group, sent) -> (total, count)` of full-width trees:
      adds a group's changes, and their weights, to those of other groups.
  """

  downlink: Callable[..., Any]
  client_update: Callable[..., Any]
  add: Callable[..., Any]


@requires(one_model=True, group_options=dict(rate=None))
def heterofl(
    federation: Federation,
    *,
    levels: tuple = (),
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
      gradients at a global norm of 1: `local.clip_norm`. A group's option
      `rate` is its width, such as '1/2'; without any, widths are 1, 1/2, 1/4,
      ... in the order of the groups' names.
    levels: Widths that clients draw from, such as ('1', '1/2'); () for 1, 1/2,
      1/4, ..., one for each of `odds`.
    odds: With one number per level, widths are dynamic: at every visit a client
      draws its level with these odds, whatever its group. () for fixed widths.
    scaler: Whether activations are multiplied by 1 / rate in training.
    mask: 'client' for the masked loss and head rows of owned labels, 'batch'
      for a loss masked by the labels of the minibatch, 'none'.
    weights: 'uniform' for the paper's mean over holders, 'data' for one
      weighted by the number of examples.
    left_out: Widths that are not aggregated, separated by spaces: names of
      groups, or shares as in `levels`; '' for none. Their clients take part and
      train as ever, but count as if they had not taken a step.
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
  full = one_model(federation, 'HeteroFL')
  given = {group.name: group.options for group in groups}
  rates = level_rates(given, levels, odds)
  for name in left_out.split():
    check_name('left_out', name, rates)
  plan = Plan(
      levels=[make_level(full, rate) for rate in rates.values()],
      left_out=[name in left_out.split() for name in rates],
      head=full.block_names[-1],
      num_classes=federation.num_classes,
      local=local,
      scaler=scaler,
      mask=mask,
      weights=weights,
  )
  if odds:
    widths = drawn_widths(plan, odds)
  else:
    widths = fixed_widths(plan, {name: i for i, name in enumerate(rates)})
  full_rate = _name(1.0)
  evaluated = {full_rate: make_level(full, Fraction(1))}
  if views:
    evaluated.update((_name(level.rate), level) for level in plan.levels)

  def init(key):
    variables = full.init(key)
    # Never used: norms get theirs in `calibrate`.
    stats = {
        name: _zeros(level.model.abstract_variables.stats)
        for name, level in evaluated.items()
    }
    return Server(variables.params, stats)

  def server_update(server, received, turn):
    del turn
    total = count = _zeros(server.params)
    for group in groups:
      total, count = widths.add(
          total, count, group, received[group.name].summed
      )
    # theta_j <- theta_j + sum_{k in H_j} (theta_kj - theta_j) / |H_j|
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

  predictions = {
      name: functools.partial(_predict, name, level)
      for name, level in evaluated.items()
  }
  return FederatedAlgorithm(
      init=init,
      init_client=lambda group, client_id, key: (),
      downlink=widths.downlink,
      client_update=widths.client_update,
      server_update=server_update,
      client_model=lambda server, client, group: server,
      one_model=True,
      predict=predictions.pop(full_rate),
      views=predictions,
      calibrate=calibrate if full.abstract_variables.stats else None,
  )


def level_rates(
    groups: Mapping[str, Mapping[str, Any]], levels: tuple, odds: tuple
) -> dict[str, Fraction]:
  """The widths that clients train, by the names that `left_out` knows.

  Args:
    groups: {group name: the group's options}.
    levels: As for `heterofl`.
    odds: As for `heterofl`.

  Returns:
    {group name, or share as in `levels`: rate}.

  Raises:
    ValueError: If a rate or the odds are out of range, or do not fit together.
  """
  if not odds:
    if levels:
      raise ValueError(
          f'levels={tuple(levels)} are drawn with odds; give one number of '
          'odds for each, or a rate to each group for fixed widths.'
      )
    return group_shares('rate', groups)
  not_negative(**{f'odds[{i}]': odd for i, odd in enumerate(odds)})
  if sum(odds) <= 0:
    raise ValueError(
        f'odds must be at least 0, and not only zeros, got {tuple(odds)}.'
    )
  for name, options in groups.items():
    if options.get('rate', '') not in ('', None):
      raise ValueError(
          f'groups.{name}.rate is for fixed widths; with odds clients draw '
          'from levels.'
      )
  if not levels:
    return halvings(str(Fraction(1, 2**i)) for i in range(len(odds)))
  rates = {
      str(level): share(f'levels[{i}]', level) for i, level in enumerate(levels)
  }
  if not len(rates) == len(levels) == len(odds):
    raise ValueError(
        f'levels must be {len(odds)} different shares, one for each of odds, '
        f'got {tuple(levels)}.'
    )
  return rates


def fixed_widths(plan: Plan, level_of: Mapping[str, int]) -> Widths:
  """Every client has the width of its group.

  Args:
    plan: The plan; a group has a level of its own.
    level_of: {group name: position of its level}.

  Returns:
    The functions.
  """

  def downlink(server, group, visit):
    del visit
    return extract(server.params, plan.levels[level_of[group.name]].index)

  def client_update(group, client, params, data, visit):
    up, metrics = train_level(plan, level_of[group.name], params, data, visit)
    present = jax.tree.map(lambda leaf: jnp.bool_(True), up.change)
    return client, Uplink(_marked(plan, up, present)), metrics

  def add(total, count, group, sent):
    change, number, owned = sent
    i = level_of[group.name]
    index = plan.levels[i].index
    held = holders(plan, i, number[i], owned[i])
    return (
        scatter_add(total, index, _values(change)),
        scatter_add(count, index, held),
    )

  return Widths(downlink, client_update, add)


def drawn_widths(plan: Plan, odds: Sequence[float]) -> Widths:
  """Every client draws its width at every visit.

  Args:
    plan: The plan.
    odds: One number for each level, at least 0.

  Returns:
    The functions.
  """

  def downlink(server, group, visit):
    del group
    # P(level i) = odds_i / sum_j odds_j
    logits = jnp.log(jnp.asarray(odds, jnp.float32))
    level = jax.random.categorical(visit.key, logits)
    held = held_numbers(plan.levels, server.params, level)
    return level, jax.tree.map(Maybe, server.params, held)

  def client_update(group, client, sent, data, visit):
    del group
    level, params = sent[0], _values(sent[1])

    def at_level(i, params):
      index = plan.levels[i].index
      up, metrics = train_level(plan, i, extract(params, index), data, visit)
      whole = scatter_add(_zeros(params), index, up.change)
      return up._replace(change=whole), metrics

    branches = [
        functools.partial(at_level, i) for i in range(len(plan.levels))
    ]
    up, metrics = jax.lax.switch(level, branches, params)
    rates = jnp.array([level.rate for level in plan.levels])
    metrics['rate'] = rates[level]
    present = held_numbers(plan.levels, params, level)
    return client, Uplink(_marked(plan, up, present)), metrics

  def add(total, count, group, sent):
    del group
    change, number, owned = sent
    total = jax.tree.map(jnp.add, total, _values(change))
    for i, level in enumerate(plan.levels):
      held = holders(plan, i, number[i], owned[i])
      count = scatter_add(count, level.index, held)
    return total, count

  return Widths(downlink, client_update, add)


def train_level(plan: Plan, i: int, start, data, visit):
  """Local training at one width.

  Args:
    plan: The plan.
    i: Position of the level.
    start: The narrow parameters, {block name: tree}.
    data: The client's examples.
    visit: The visit.

  Returns:
    `Sent` with a narrow tree of plain changes, and metrics.
  """
  level, local = plan.levels[i], plan.local
  model = without_running_stats(level.model)
  owned = owned_labels(data, plan.num_classes)

  def loss_fn(variables, batch, key):
    # Scaler: x <- x / rho in front of every norm.
    with scaled_norm_inputs(1 / level.rate if plan.scaler else 1):
      logits, stats = model.apply(
          variables, batch.x, train=True, mask=batch.mask, key=key
      )
    # z_c <- 0 for c not in Y_k.
    logits = masked_logits(logits, batch, owned, plan.mask)
    return local.task.loss(logits, batch.y, batch.mask), (stats, {})

  end, _, metrics, num_steps = fit(
      loss_fn, local, Variables(start, {}), data, visit
  )
  if plan.left_out[i]:
    end, num_steps = Variables(start, {}), 0
  amount = data.size if plan.weights == 'data' else 1
  weight = jnp.where(num_steps > 0, amount, 0).astype(jnp.float32)
  rows = owned if plan.mask == 'client' else jnp.ones_like(owned)

  def of_owned(leaf):  # Classes are the last axis of the head's leaves.
    return jnp.where(jnp.broadcast_to(rows, leaf.shape), leaf, 0.0)

  # Delta_k = w_k (theta_k - theta); of the head only the rows in Y_k.
  change = jax.tree.map(lambda a, b: weight * (a - b), end.params, start)
  change[plan.head] = jax.tree.map(of_owned, change[plan.head])
  here = (jnp.arange(len(plan.levels)) == i) * weight
  return Sent(change, here, here[:, None] * rows[None]), metrics


def holders(plan: Plan, i: int, number, owned):
  """sum_{k in H_j} w_k for every number j of one level's narrow model.

  Args:
    plan: The plan.
    i: Position of the level.
    number: [] float32, the sum of its clients' weights.
    owned: [C] float32, the same over the owners of each label.

  Returns:
    A tree like the level's parameters.
  """
  params = plan.levels[i].model.abstract_variables.params
  return {
      name: jax.tree.map(
          lambda s, n=owned if name == plan.head else number: jnp.broadcast_to(
              n, s.shape
          ),
          tree,
      )
      for name, tree in params.items()
  }


def held_numbers(levels: Sequence[Level], params, level):
  """Whether the slice of a level holds a number.

  Args:
    levels: All levels.
    params: The full parameters.
    level: [] int32, position of one level, maybe traced.

  Returns:
    A tree of bool arrays like the parameters.
  """

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


def _marked(plan, up, present):
  """The uplink with what is sent marked: of the head the owned rows alone."""
  owned = jnp.sum(up.owned, axis=0) > 0
  present[plan.head] = jax.tree.map(
      lambda leaf, here: here & jnp.broadcast_to(owned, leaf.shape),
      up.change[plan.head],
      present[plan.head],
  )
  return up._replace(change=jax.tree.map(Maybe, up.change, present))


def _predict(name, level, group, server, x):
  """Logits of one width of the server's model."""
  del group
  params = extract(server.params, level.index)
  return level.model.apply(Variables(params, server.stats[name]), x)[0]


def _name(rate: float) -> str:
  return f'rate_{rate:.4g}'


def _zeros(tree):
  return jax.tree.map(jnp.zeros_like, tree)


def _values(tree):
  """A tree of `Maybe` without what is sent."""
  return jax.tree.map(
      lambda m: m.value, tree, is_leaf=lambda x: isinstance(x, Maybe)
  )
