"""Clients that minimise h_k (w - a_k)^2 / 2, run through the real engine."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.data.federated import federate
from fedjax_het.engine.task import Task
from fedjax_het.engine.types import (
  Federation,
  Group,
  LocalTraining,
  Received,
  Turn,
  Visit,
)
from fedjax_het.models.blocks import Block, BlockModel

RATE = 0.1
WEIGHTS = ('l1', 'l2')


class Curvature(nn.Module):
  """An image of one pixel h becomes the row (h, 0, 0)."""

  @nn.compact
  def __call__(self, x, train, mask):
    return jnp.pad(x.reshape(len(x), 1), ((0, 0), (0, len(WEIGHTS))))


class Weight(nn.Module):
  """Adds one scalar parameter, initialised to zero, to its own column."""

  column: int

  @nn.compact
  def __call__(self, x, train, mask):
    return x.at[:, self.column].add(
        self.param('w', nn.initializers.zeros, ())
    )


class Same(nn.Module):
  """The identity."""

  @nn.compact
  def __call__(self, x, train, mask):
    return x


def losses(outputs, labels):
  """h ((w_1 - a)^2 + (w_2 - a)^2) / 2 of each example, [B]."""
  gaps = outputs[:, 1:] - labels.astype(jnp.float32)[:, None]
  return 0.5 * outputs[:, 0] * jnp.sum(gaps**2, axis=1)


TASK = Task('quadratic', losses, {'loss': losses})


def model_of(owned) -> BlockModel:
  """A model with some of the parameters `WEIGHTS`."""
  blocks = [Block('stem', Curvature())]
  blocks += [Block(n, Weight(1 + WEIGHTS.index(n))) for n in owned]
  blocks += [Block('head', Same())]
  last = len(blocks) - 1
  return BlockModel('+'.join(owned), tuple(blocks), (1, 1, 1), 2, (1, last))


def quadratics(
    minima, *, curvature=1, sizes=1, owned='l1', epochs=2, batch_size=8,
    rate=RATE, tx=optax.sgd, **kwargs,
):  # fmt: skip
  """A federation of one client for each of the minima a_k, and its data.

  Args:
    minima: a_k, integers.
    curvature: h_k, integers, one for all clients or one for each.
    sizes: Numbers of (equal) examples, one for all clients or one for each; a
      client takes epochs * ceil(size / batch_size) steps.
    owned: Names of the parameters in `WEIGHTS` that a client owns, separated by
      spaces; one string for all clients or one for each.
    epochs: Local epochs.
    batch_size: Local batch size.
    rate: Learning rate.
    tx: Maps the learning rate to the local optimiser.
    **kwargs: For `Federation`.

  Returns:
    The federation, with one group for each value of `owned`, and the data.
  """
  num = len(minima)
  h, n = (np.broadcast_to(v, num) for v in (curvature, sizes))
  whose = np.broadcast_to(owned, num)
  local = LocalTraining(
      tx, lambda round_num: rate, epochs, batch_size, task=TASK
  )
  groups = tuple(
      Group(name.replace(' ', '+'), model_of(name.split()), np.flatnonzero(
          whose == name
      ))
      for name in sorted(set(whose.tolist()))
  )  # fmt: skip
  data = federate(
      np.repeat(h, n).astype(np.uint8).reshape(-1, 1, 1, 1),
      np.repeat(minima, n),
      np.split(np.arange(n.sum()), np.cumsum(n)[:-1]),
      lambda images, key=None: images.astype(jnp.float32),
  )
  return Federation(groups, local, **kwargs), data


def play(algorithm, federation, data, cohorts):
  """Runs rounds with given cohorts, for algorithms with a summed uplink.

  Args:
    algorithm: The algorithm.
    federation: The federation.
    data: Its data.
    cohorts: The client ids of each round.

  Yields:
    The server's state and {client id: its state} after each round.
  """
  key = jax.random.key(0)
  server, clients, updates = algorithm.init(key), {}, {}
  for group in federation.groups:
    updates[group.name] = jax.jit(
        functools.partial(algorithm.client_update, group)
    )
    for i in group.client_ids.tolist():
      clients[i] = algorithm.init_client(group, i, key)
  for number, cohort in enumerate(cohorts):
    received = {}
    for group in federation.groups:
      total = None
      for i in group.client_ids.tolist():
        visit = Visit(jnp.int32(i), jnp.int32(number), jax.random.key(i))
        args = (
            clients[i],
            algorithm.downlink(server, group, visit),
            data.client(i),
            visit,
        )
        if total is None:
          shapes = jax.eval_shape(updates[group.name], *args)[1].summed
          total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        if i in cohort:
          clients[i], uplink, _ = updates[group.name](*args)
          total = jax.tree.map(jnp.add, total, uplink.summed)
      received[group.name] = Received(total, None, None)
    turn = Turn(jnp.int32(number), key)
    server, _ = algorithm.server_update(server, received, turn)
    yield server, dict(clients)
