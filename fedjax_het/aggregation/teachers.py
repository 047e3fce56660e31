"""Logits of the received models on the public set, for servers that distil."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.exchange import WeightExchange, end_of
from fedjax_het.engine.phases import inference_logits
from fedjax_het.engine.types import Group, Received


def group_logits(
    exchange: WeightExchange, group: Group, server, received: Received, public
) -> jax.Array:
  """Logits of a group's clients on the public set, in eval mode.

  Each client's own model is applied with its running statistics, one after
  another. Padding slots are skipped.

  Args:
    exchange: The shared blocks.
    group: The group.
    server: The server's tree, see `end_of` for stale uploads.
    received: Their uploads; `kept` are whole `Delta`s.
    public: The public examples, P of them.

  Returns:
    [S, P, C], zeros in padding slots.
  """
  before = exchange.download(server, group)
  order = jnp.argsort(received.client_id)  # Padding slots are last.
  real = received.client_id < exchange.federation.num_clients

  def one(i, logits):
    slot = order[i]
    delta = jax.tree.map(lambda leaf: leaf[slot], received.kept)
    variables = exchange.sharing.join(group, (), end_of(before, delta))
    rows = inference_logits(group.model, variables, public)
    return logits.at[slot].set(rows)

  none = jnp.zeros((len(real), public.length, group.model.num_classes))
  return jax.lax.fori_loop(0, jnp.sum(real), one, none)


def teacher_logits(
    exchange: WeightExchange, server, received: Mapping[str, Received], public
) -> tuple[jax.Array, jax.Array]:
  """Logits of all clients of a cohort on the public set.

  Args:
    exchange: The shared blocks.
    server: As for `group_logits`.
    received: {group name: Received}; `kept` are whole `Delta`s, zeros in
      padding slots.
    public: The public examples, P of them.

  Returns:
    The logits, [S, P, C], and whose count, [S] bool: those of clients that took
    a step.
  """
  groups = exchange.federation.groups
  uploads = [received[group.name] for group in groups]
  logits = jnp.concatenate([
      group_logits(exchange, group, server, r, public)
      for group, r in zip(groups, uploads, strict=True)
  ])
  took_part = jnp.concatenate([r.kept.weight > 0 for r in uploads])
  return logits, took_part
