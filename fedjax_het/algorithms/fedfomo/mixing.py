"""How a client evaluates and mixes models."""

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import ClientData
from fedjax_het.engine.local import map_examples
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.types import Maybe
from fedjax_het.models.blocks import BlockModel, Variables


def stack(base, trained, received, num: int):
  """b_i, theta_i and the donors' theta_n as one array for each leaf.

  Args:
    base: {block: tree}, b_i.
    trained: {block: tree}, theta_i.
    received: {block: Maybe} of the blocks that travel, leaves [M, ...].
    num: Number of donors, M.

  Returns:
    {block: Maybe} with leaves [2 + M, ...]. A donor that lacks a block is not
    present there.
  """

  def one(name):
    absent = Maybe(
        jax.tree.map(
            lambda b: jnp.broadcast_to(b, (num, *b.shape)), base[name]
        ),
        jnp.zeros(num, bool),
    )
    value, present = received.get(name, absent)
    values = jax.tree.map(
        lambda b, own, other: jnp.concatenate([b[None], own[None], other]),
        base[name], trained[name], value,
    )  # fmt: skip
    return Maybe(values, jnp.concatenate([jnp.ones(2, bool), present]))

  return {name: one(name) for name in base}


def overlay(models, n):
  """{block: tree}: b_i with the blocks that candidate `n` of a `stack` has."""
  return {
      name: jax.tree.map(lambda v, p=p: jnp.where(p[n], v[n], v[0]), values)
      for name, (values, p) in models.items()
  }


def validation_losses(
    model: BlockModel, task: Task, models: Variables, data: ClientData
) -> jax.Array:
  """[2 + M], L_i of every candidate, in inference mode.

  Args:
    model: The client's architecture.
    task: The task.
    models: `Variables` of `stack`s.
    data: The validation examples.
  """

  def loss(n):
    variables = Variables(*(overlay(part, n) for part in models))

    def of_batch(batch):
      outputs, _ = model.apply(variables, batch.x, mask=batch.mask)
      return task.losses(outputs, batch.y)

    losses = map_examples(of_batch, data)
    return masked_mean(losses, jnp.arange(data.length) < data.size)

  num = len(next(iter(models.params.values())).present)
  return jax.lax.map(loss, jnp.arange(num))


def gains(losses, params) -> jax.Array:
  """Decrease of the loss per unit of distance.

  Args:
    losses: [2 + M], L_i of b_i, theta_i and the donors.
    params: A `stack` of parameters.

  Returns:
    w, [2 + M]; that of b_i is 0, as is that of a model whose loss or
    distance is not finite.
  """

  def squares(v):
    return jnp.sum(jnp.square(v - v[:1]).reshape(len(v), -1), axis=1)

  distance = jnp.sqrt(sum(
      jnp.where(present, squares(v), 0.0)
      for values, present in params.values()
      for v in jax.tree.leaves(values)
  ))  # fmt: skip
  # w_n = (L(b) - L(theta_n)) / ||theta_n - b||, 0 where theta_n is b.
  w = (losses[0] - losses) / jnp.where(distance > 0, distance, 1.0)
  # A model whose loss or distance overflows is no help either.
  return jnp.where((distance > 0) & jnp.isfinite(w), w, 0.0)


def mixed(models, w, mix: str):
  """b + sum_n a_n (theta_n - b) / sum_n a_n, with a_n = max(w_n, 0).

  Args:
    models: A `stack`.
    w: [2 + M], see `gains`.
    mix: 'block' for sums of a_n over those who hold the block, 'global' over
      all.

  Returns:
    {block: tree}; a model whose coefficient is 1 is copied bit for bit.
  """
  # a_n = max(w_n, 0)
  a = jnp.maximum(w, 0.0)

  def block(values, present):
    # a_n / sum_n a_n; the sum is over those who hold the block, or over all.
    held = jnp.where(present, a, 0.0)
    total = jnp.sum(held if mix == 'block' else a)
    share = held / jnp.where(total > 0, total, 1.0)
    best = jnp.argmax(share)

    def leaf(v):
      # b + sum_n a_n (theta_n - b) / sum_n a_n
      move = jnp.tensordot(share, v - v[:1], 1, precision='highest')
      return jnp.where(share[best] == 1, v[best], v[0] + move)

    return jax.tree.map(leaf, values)

  return {name: block(*one) for name, one in models.items()}
