"""HeteroFL's clients: their widths, fixed or drawn, and their training.

The client side of `heterofl`. `fixed_widths` and `drawn_widths` both return
`Widths` and train by `train_level`.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.aggregation.narrow_training import (
  holders,
  mark_rows,
  train_narrow,
  weighted_change,
)
from fedjax_het.aggregation.slicing import Level, extract, scatter_add
from fedjax_het.engine.types import LocalTraining, Maybe, Uplink, values_of


class Sent(NamedTuple):
  """The uplink: changes, and who holds what.

  Attributes:
    change: Tree of `Maybe`: weight * (after - before).
    number: [levels] float32, the client's weight at its level, else 0.
    owned: [levels, C] float32, the same for head rows of labels that it owns.
  """

  change: Any
  number: jax.Array
  owned: jax.Array


class Plan(NamedTuple):
  """Settings of a run.

  Attributes:
    levels: The widths that clients train.
    left_out: Whether each level is left out of the mean.
    of_classes: {block: tree of bool}, see `slicing.class_leaves`.
    local: Local training.
    scaler: As for `heterofl`.
    mask: As for `heterofl`.
    weights: As for `heterofl`.
  """

  levels: Sequence[Level]
  left_out: Sequence[bool]
  of_classes: Any
  local: LocalTraining
  scaler: bool
  mask: str
  weights: str


class Widths(NamedTuple):
  """The width at which each client trains.

  Attributes:
    downlink: As in `FederatedAlgorithm`.
    client_update: As there.
    add: `(total, count, group, sent) -> (total, count)`: adds a group's changes
      and their weights to full-width trees of sums over groups.
    largest: `(group) -> Level`, the widest that its clients train.
  """

  downlink: Callable[..., Any]
  client_update: Callable[..., Any]
  add: Callable[..., Any]
  largest: Callable[..., Level]


def fixed_widths(plan: Plan, level_of: Mapping[str, int]) -> Widths:
  """Every client has the width of its group.

  Args:
    plan: The plan, with one level for each group.
    level_of: {group name: position of its level}.

  Returns:
    The functions.
  """

  def downlink(server, group, visit):
    del visit
    return extract(server.params, plan.levels[level_of[group.name]].index)

  def client_update(group, client, params, data, visit):
    up, metrics = train_level(plan, level_of[group.name], params, data, visit)
    return client, Uplink(_marked(plan, up)), metrics

  def add(total, count, group, sent):
    change, number, owned = sent
    i = level_of[group.name]
    index = plan.levels[i].index
    held = holders(plan.levels[i].model, number[i], owned[i])
    return (
        scatter_add(total, index, values_of(change)),
        scatter_add(count, index, held),
    )

  def largest(group):
    return plan.levels[level_of[group.name]]

  return Widths(downlink, client_update, add, largest)


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
    level, params = sent[0], values_of(sent[1])

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
    total = jax.tree.map(jnp.add, total, values_of(change))
    for i, level in enumerate(plan.levels):
      held = holders(level.model, number[i], owned[i])
      count = scatter_add(count, level.index, held)
    return total, count

  def largest(group):
    del group
    return max(plan.levels, key=lambda level: level.rate)

  return Widths(downlink, client_update, add, largest)


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
  level = plan.levels[i]
  end, rows, metrics, num_steps = train_narrow(
      level.model, level.rate, plan.local, start, data, visit,
      scaler=plan.scaler, mask=plan.mask,
  )  # fmt: skip
  if plan.left_out[i]:
    end, num_steps = start, 0
  amount = data.size if plan.weights == 'data' else 1
  weight = jnp.where(num_steps > 0, amount, 0).astype(jnp.float32)
  # w_k (theta_k - theta); of the head, only the rows of labels in Y_k.
  change = weighted_change(level.model, start, end, weight, rows)
  here = (jnp.arange(len(plan.levels)) == i) * weight
  return Sent(change, here, here[:, None] * rows[None]), metrics


def held_numbers(levels: Sequence[Level], params, level):
  """Whether the slice of a level holds each entry of the parameters.

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


def _marked(plan, up, present=None):
  """Marks what is sent; of the head, only the rows of owned labels."""
  owned = jnp.sum(up.owned, axis=0) > 0
  change = mark_rows(up.change, plan.of_classes, owned, present)
  return up._replace(change=change)


def _zeros(tree):
  return jax.tree.map(jnp.zeros_like, tree)
