"""Fed-ET's ensemble: what the clients' models agree on, example by example."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.exchange import WeightExchange, end_of
from fedjax_het.engine.local import map_examples
from fedjax_het.engine.types import Group, Received


class Consensus(NamedTuple):
  """Predictions of an ensemble on P examples.

  Attributes:
    labels: [P] int32, the pseudo-labels.
    diverse: [P, C], s_div, weighted mean logits of the models that disagree
      with the label; 0 where none does.
    disputed: [P] bool, whether any model disagrees (D(x) is not empty).
  """

  labels: jax.Array
  diverse: jax.Array
  disputed: jax.Array


def confidence_weights(logits, voters) -> jax.Array:
  """alpha_k(x) = v_k(x) / sum_j v_j(x), v_k the variance of the logits.

  Args:
    logits: [S, P, C]; the variance is over the classes.
    voters: [S, P] bool, the models in the sum.

  Returns:
    [S, P], 0 for the others; equal weights where all variances are 0.
  """
  # v_k = var_c s_k
  v = jnp.where(voters, jnp.var(logits, axis=2), 0.0)
  total = jnp.sum(v, axis=0)[None]
  equal = voters / jnp.maximum(jnp.sum(voters, axis=0), 1)[None]
  # alpha_k = v_k / sum_j v_j
  return jnp.where(total > 0, v / jnp.where(total > 0, total, 1.0), equal)


def find_consensus(logits, took_part) -> Consensus:
  """The weighted consensus, and the models that disagree with it.

  Args:
    logits: [S, P, C], s_k(x).
    took_part: [S] bool, whose logits count.

  Returns:
    The consensus.
  """

  def mean(voters):
    # s(x) = sum_k alpha_k(x) s_k(x).
    alpha = confidence_weights(logits, voters)[..., None]
    return jnp.sum(jnp.where(voters[..., None], alpha * logits, 0.0), axis=0)

  voters = jnp.broadcast_to(took_part[:, None], logits.shape[:2])
  # y^(x) = argmax s(x).
  labels = jnp.argmax(mean(voters), axis=1)
  # D(x) = {k : argmax s_k(x) != y^(x)}.
  others = voters & (jnp.argmax(logits, axis=2) != labels[None])
  return Consensus(labels, mean(others), jnp.any(others, axis=0))


def teacher_logits(
    exchange: WeightExchange, group: Group, small, received: Received, public
) -> jax.Array:
  """Logits of a group's clients on the public set, in eval mode.

  Each client's own model is applied with its running statistics, one after
  another. Padding slots are skipped.

  Args:
    exchange: The shared blocks.
    group: The group.
    small: The server's tree, see `end_of` for stale uploads.
    received: Their uploads; `kept` are whole `Delta`s.
    public: The public examples, P of them.

  Returns:
    [S, P, C], zeros in padding slots.
  """
  before = exchange.download(small, group)
  order = jnp.argsort(received.client_id)  # Padding slots are last.
  real = received.client_id < exchange.federation.num_clients

  def one(i, logits):
    slot = order[i]
    delta = jax.tree.map(lambda leaf: leaf[slot], received.kept)
    variables = exchange.sharing.join(group, (), end_of(before, delta))
    rows = map_examples(
        lambda batch: group.model.apply(
            variables, batch.x, mask=batch.mask
        )[0],
        public,
    )
    return logits.at[slot].set(rows)

  none = jnp.zeros((len(real), public.length, group.model.num_classes))
  return jax.lax.fori_loop(0, jnp.sum(real), one, none)


def clients_consensus(
    exchange: WeightExchange, small, received: Mapping[str, Received], public
) -> tuple[Consensus, jax.Array]:
  """The consensus of all clients that took a step.

  Args:
    exchange: The shared blocks.
    small: The server's tree, see `end_of` for stale uploads.
    received: {group name: Received}; `kept` are whole `Delta`s, zeros in
      padding slots.
    public: The public examples.

  Returns:
    The consensus, and whether there is such a client, [] bool.
  """
  groups = exchange.federation.groups
  uploads = [received[group.name] for group in groups]
  logits = jnp.concatenate([
      teacher_logits(exchange, group, small, r, public)
      for group, r in zip(groups, uploads, strict=True)
  ])
  took_part = jnp.concatenate([r.kept.weight > 0 for r in uploads])
  return find_consensus(logits, took_part), jnp.any(took_part)
