"""A tiny federation of dense models, shared by many tests."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.data.federated import federate
from fedjax_het.engine.traffic import full_bytes
from fedjax_het.engine.types import (
    Federation,
    Group,
    LocalTraining,
    Received,
    Turn,
    Visit,
)
from fedjax_het.models import create
from fedjax_het.models.blocks import Block, BlockModel
from fedjax_het.models.norm import BatchNorm

NUM_CLASSES = 3
SHAPE = (2, 2, 1)


class Dense(nn.Module):
  """Flatten, dense layer, optional batch norm, optional ReLU."""

  features: int
  norm: bool = False
  relu: bool = True

  @nn.compact
  def __call__(self, x, train, mask):
    x = nn.Dense(self.features)(x.reshape(x.shape[0], -1))
    if self.norm:
      x = BatchNorm()(x, train, mask)
    return nn.relu(x) if self.relu else x


def tiny_model(depth: int, *, width=4, norm=True) -> BlockModel:
  """A dense model with `depth` intermediate layers."""
  middle = [Block(f'mid{i}', Dense(width, norm)) for i in range(depth)]
  blocks = [
      Block('stem', Dense(width, norm)),
      *middle,
      Block('head', Dense(NUM_CLASSES, relu=False)),
  ]
  return BlockModel(
      f'tiny{depth}', tuple(blocks), SHAPE, NUM_CLASSES, (1, 1 + depth)
  )


SIZES = (5, 8, 3, 7, 8, 6)


def tiny_data(sizes=SIZES, seed=0, public=0):
  """Separable random examples assigned to clients of the given sizes.

  Another `public` examples form the public set.
  """
  rng = np.random.default_rng(seed)
  own, sizes = len(sizes), (*sizes, public)
  labels = rng.integers(0, NUM_CLASSES, sum(sizes))
  means = rng.integers(40, 215, (NUM_CLASSES, *SHAPE))
  images = means[labels] + rng.integers(-30, 30, (len(labels), *SHAPE))
  parts = np.split(np.arange(len(labels)), np.cumsum(sizes)[:-1])
  return federate(
      images.astype(np.uint8),
      labels,
      parts[:own],
      preprocess,
      parts[own] if public else None,
  )


def preprocess(images, key=None):
  """Maps uint8 to [-1, 1]."""
  del key
  return images.astype(jnp.float32) / 127.5 - 1.0


def tiny_federation(
    depths=(1, 2, 3), per_group=2, *, local=None, norm=True, **kwargs
) -> Federation:
  """Groups 'tiny1', 'tiny2', ... with interleaved client ids."""
  groups = tuple(
      Group(
          f'tiny{depth}',
          tiny_model(depth, norm=norm),
          np.arange(per_group) * len(depths) + i,
      )
      for i, depth in enumerate(depths)
  )
  return Federation(groups, local or tiny_local(), **kwargs)


def one_model_federation(
    norm=True, num_groups=3, per_group=2, depth=2, **kwargs
):
  """Groups as in `tiny_federation`, all with the library's `mlp`."""
  norm = 'batch' if norm else 'none'
  model = create('mlp', SHAPE, NUM_CLASSES, hidden=8, depth=depth, norm=norm)
  groups = tuple(
      Group(f'tiny{i + 1}', model, np.arange(per_group) * num_groups + i)
      for i in range(num_groups)
  )
  return Federation(groups, kwargs.pop('local', None) or tiny_local(), **kwargs)


def with_group_options(federation, **options) -> Federation:
  """Sets options of the groups; each option has one value per group."""
  groups = tuple(
      dataclasses.replace(
          group, options={name: values[i] for name, values in options.items()}
      )
      for i, group in enumerate(federation.groups)
  )
  return dataclasses.replace(federation, groups=groups)


def momentum(lr):
  """SGD with momentum; its state is one tree, less to compile than Adam's."""
  return optax.sgd(lr, momentum=0.9)


def tiny_local(tx=momentum, lr=1e-2, epochs=2, batch_size=4, **kwargs):
  """Local training with a constant learning rate."""
  return LocalTraining(tx, lambda round_num: lr, epochs, batch_size, **kwargs)


def bytes_of_a_visit(algorithm, group, data, client_id=1) -> tuple[int, int]:
  """Bytes down and up of a client's visit, with all optional parts."""

  def messages(key):
    visit = Visit(jnp.int32(client_id), jnp.int32(0), key)
    sent = algorithm.downlink(algorithm.init(key), group, visit)
    client = algorithm.init_client(group, client_id, key)
    _, uplink, _ = algorithm.client_update(
        group, client, sent, data.client(client_id), visit
    )
    return sent, uplink

  sent, uplink = jax.eval_shape(messages, jax.random.key(0))
  return full_bytes(sent), full_bytes(uplink)


def uploads_of(algorithm, federation, server, data, key, round_num=0):
  """{group: Received} of all clients, as the engine would gather it."""
  received = {}
  for group in federation.groups:

    @jax.jit
    def update(i, group=group):
      visit = Visit(i, jnp.int32(round_num), jax.random.fold_in(key, i))
      own = algorithm.init_client(group, i, key)
      sent = algorithm.downlink(server, group, visit)
      return algorithm.client_update(
          group, own, sent, data.client(i), visit
      )[1]

    ids = jnp.asarray(group.client_ids)
    uplinks = [jax.device_get(update(i)) for i in ids]
    rows = jax.tree.map(lambda *rows: np.stack(rows), *uplinks)
    summed = jax.tree.map(lambda leaf: leaf.sum(0), rows.summed)
    summed, kept = jax.tree.map(jnp.asarray, (summed, rows.kept))
    received[group.name] = Received(summed, kept, ids)
  return received


def server_step(algorithm, server, received, key=None, round_num=0):
  """The server's state after one update."""
  key = jax.random.key(0) if key is None else key
  turn = Turn(jnp.int32(round_num), key)
  update = jax.jit(lambda *args: algorithm.server_update(*args, turn)[0])
  return update(server, received)
