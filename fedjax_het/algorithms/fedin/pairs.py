"""FedIN's store of feature pairs: the latest of every client."""

from collections.abc import Iterable
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.engine.types import Federation, Maybe, Received
from fedjax_het.models.adapt import Identity

_log = logging.getLogger(__name__)


class Pairs(NamedTuple):
  """Inputs and outputs of the intermediate layers, s_in and s_out.

  Attributes:
    s_in: [..., *input shape of the intermediate layers] float32.
    s_out: [..., *their output shape] float32.
  """

  s_in: jax.Array
  s_out: jax.Array


class PairStore(NamedTuple):
  """The latest pairs of N clients, P each.

  Attributes:
    pairs: `Pairs` [N, P, ...].
    filled: [N, P] bool, whether a client has sent the pair.
    age: [N] int32, server updates since a client's pairs were stored, see
      `older`; None without `max_pair_age`.
  """

  pairs: Pairs
  filled: jax.Array
  age: jax.Array | None = None


def check_pair_shapes(federation: Federation) -> tuple[tuple[int, ...], ...]:
  """The shapes of s_in and s_out, which all groups must share.

  Logs a warning if an extractor is the identity.

  Args:
    federation: The federation.

  Returns:
    Per-example shapes of s_in and s_out.

  Raises:
    ValueError: If two groups differ; the message names them.
  """
  seen = {}
  for group in federation.groups:
    first, last = group.model.cut
    shapes = group.model.shapes
    if all(
        isinstance(block.module, Identity)
        for block in group.model.blocks[:first]
    ):
      _log.warning(
          'The extractor of group %s is the identity: its clients send their '
          'raw inputs. Give the model a cut, see BlockModel.from_module.',
          group.name,
      )
    seen[group.name] = (shapes[first - 1], shapes[last - 1])
  (first_name, expected), *others = seen.items()
  for name, shapes in others:
    if shapes != expected:
      raise ValueError(
          f'Features must agree, but (s_in, s_out) is {shapes} in group '
          f'{name!r} and {expected} in group {first_name!r}; choose models '
          'whose extractors have one output shape, and whose classifiers have '
          'one input shape.'
      )
  return expected


def empty_store(
    num_clients: int, num_pairs: int, shapes, *, with_age: bool = False
) -> PairStore:
  """A store without pairs.

  Args:
    num_clients: N.
    num_pairs: P.
    shapes: Per-example shapes of s_in and s_out.
    with_age: Whether it records the age of pairs.

  Returns:
    The store, all entries unfilled.
  """
  leading = (num_clients, num_pairs)
  return PairStore(
      Pairs(*(jnp.zeros((*leading, *shape)) for shape in shapes)),
      jnp.zeros(leading, bool),
      jnp.zeros(num_clients, jnp.int32) if with_age else None,
  )


def after_update(store: PairStore, received: Iterable[Received]) -> PairStore:
  """The store after a server update: adds new pairs, then increments ages.

  Args:
    store: The store.
    received: The groups' uploads; `kept` are `Maybe`s of pairs.

  Returns:
    The new store.
  """
  for group in received:
    store = store_pairs(store, group.client_id, group.kept)
  return older(store)


def older(store: PairStore) -> PairStore:
  """Increments the age of all pairs.

  Called once per update, after its pairs are stored. The pairs of round r then
  have age 1 in round r + 1. If a random tenth of the clients takes part in each
  round, pairs are ten rounds old on average.

  Args:
    store: The store.

  Returns:
    The new store; the same one if it records no ages.
  """
  if store.age is None:
    return store
  return store._replace(age=store.age + 1)


def store_pairs(store: PairStore, client_id, uploaded: Maybe) -> PairStore:
  """Replaces the pairs of the clients that have sent some.

  Args:
    store: The store.
    client_id: [slots] int32; ids outside 0..N-1 are ignored.
    uploaded: `Maybe` of `Pairs` [slots, P, ...] with its mask [slots, P].

  Returns:
    The new store.
  """
  age = None if store.age is None else jnp.zeros_like(client_id)
  return jax.tree.map(
      lambda old, new: old.at[client_id].set(new, mode='drop'),
      store,
      PairStore(uploaded.value, uploaded.present, age),
  )


def draw_pairs(
    store: PairStore,
    client_id,
    num_pairs: int,
    key,
    *,
    max_age: int | None = None,
) -> Maybe:
  """Draws pairs for one client, uniformly without replacement.

  Pairs of other clients come first; the client's own pairs are added only if
  there are too few. (FedIN v1 draws from the whole store of its ten clients,
  including a client's own pairs; v2 speaks of other clients' pairs.)

  Args:
    store: The store.
    client_id: [] int32, the receiver.
    num_pairs: M, how many to draw.
    key: A random key.
    max_age: Pairs older than this many server updates are left out, including
      the client's own; None for pairs of any age.

  Returns:
    `Maybe` of `Pairs` [M, ...]; its mask [M] is False where the store had no
    pairs left.
  """
  num_clients, size = store.filled.shape
  filled = store.filled
  if max_age is not None:
    filled = filled & (store.age <= max_age)[:, None]
  filled = filled.reshape(-1)
  owner = jnp.repeat(jnp.arange(num_clients), size)
  score = jax.random.uniform(key, filled.shape)
  # The largest scores are drawn: others in (1, 2], own in (0, 1], unfilled -1.
  score = jnp.where(owner == client_id, 1.0 - score, 2.0 - score)
  count = min(num_pairs, filled.size)
  _, chosen = jax.lax.top_k(jnp.where(filled, score, -1.0), count)
  chosen = jnp.concatenate(
      [chosen, jnp.zeros(num_pairs - count, chosen.dtype)]
  )
  present = filled[chosen] & (jnp.arange(num_pairs) < count)
  pairs = jax.tree.map(
      lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[chosen], store.pairs
  )
  return Maybe(pairs, present)
