"""Fed-ET's server: the large model, its classifier and its training."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.exchange import WeightExchange
from fedjax_het.aggregation.sharing import Sharing
from fedjax_het.algorithms.fedet.ensemble import Consensus
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.phases import passes
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.types import Federation, LocalTraining
from fedjax_het.models.blocks import BlockModel, Variables


class Server(NamedTuple):
  """Fed-ET's server state.

  Attributes:
    small: The union of the small models.
    model: Variables of the large model (W).
  """

  small: Variables
  model: Variables


def check_federation(federation: Federation) -> None:
  """Raises ValueError for a federation that the server cannot train with.

  Args:
    federation: The federation.

  Raises:
    ValueError: If a classifier differs from that of the server's model.
  """

  def shapes(model: BlockModel):
    params = model.abstract_variables.params
    return {n: jax.tree.map(jnp.shape, params[n]) for n in model.classifier}

  large = federation.server_model
  for group in federation.groups:
    if shapes(group.model) != shapes(large):
      raise ValueError(
          f'server_model={large.name!r} has the classifier {shapes(large)}, '
          f'group {group.name!r} {shapes(group.model)}; fedet needs one for '
          'all.'
      )


def with_common_classifier(exchange: WeightExchange) -> WeightExchange:
  """The exchange that averages the classifier over all architectures."""

  def shared_key(group, block):
    common = block in group.model.classifier
    return block if common else exchange.sharing.shared_key(group, block)

  local_stats = exchange.sharing.local_stats
  return exchange._replace(sharing=Sharing(shared_key, local_stats))


def copy_classifier(
    target: Variables, source: Variables, model: BlockModel
) -> Variables:
  """`target` with the classifier's parameters and statistics of `source`."""
  params, stats = (
      {**to, **{n: of[n] for n in model.classifier if n in of}}
      for to, of in zip(target, source, strict=True)
  )
  return Variables(params, stats)


def server_training(
    local: LocalTraining, epochs: int, batch_size: int, lr: float | None
) -> LocalTraining:
  """Whole passes over the public set with the clients' optimiser."""
  if lr is not None:
    local = dataclasses.replace(local, learning_rate=lambda round_num: lr)
  return passes(local, epochs, batch_size)


def server_loss(
    model: BlockModel,
    task: Task,
    consensus: Consensus,
    distill_weight: float,
) -> Callable[..., Any]:
  """The large model's loss on public examples, as `fit` takes it.

  Args:
    model: The large model.
    task: The task.
    consensus: The clients' predictions on the public examples.
    distill_weight: lam, the factor on the KL.

  Returns:
    The loss function.
  """

  def loss_fn(variables, batch, key):
    logits, stats = model.apply(
        variables, batch.x, train=True, mask=batch.mask, key=key
    )
    labels, diverse, disputed = jax.tree.map(
        lambda leaf: leaf[batch.position], consensus
    )
    # mean_b [CE(W(x), y^) + lam 1[D != {}] KL(s_div || W(x))].
    entropy = masked_mean(task.losses(logits, labels), batch.mask)
    gap = jnp.where(disputed, distillation(logits, diverse), 0.0)
    gap = masked_mean(gap, batch.mask)
    metrics = dict(server_entropy=entropy, server_diversity=gap)
    return entropy + distill_weight * gap, (stats, metrics)

  return loss_fn
