"""Sums of vectors by class, of which FedHe, FD and others exchange means."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.engine.local import fit, init_optimizer
from fedjax_het.engine.task import masked_mean
from fedjax_het.engine.types import LocalTraining, Visit
from fedjax_het.models.blocks import BlockModel, Variables


class ClassVectors(NamedTuple):
  """One vector per class, a sum or a mean, and its count.

  Attributes:
    vectors: [..., C, D] float32.
    counts: [..., C] float32, how many vectors were added or averaged. It is 0
      for a class without examples, and its vector is then zero.
  """

  vectors: jax.Array
  counts: jax.Array


class Client(NamedTuple):
  """The client state: variables of the model, and optimizer state.

  The optimizer state is None if `local.keep_optimizer` is False.
  """

  variables: Variables
  opt_state: Any


def init_class_client(
    model: BlockModel, local: LocalTraining, key, keep: bool = True
) -> Client:
  """A client's initial model, and its initial optimizer state if it is kept.

  Args:
    model: The architecture.
    local: How to train; `local.keep_optimizer` says whether the state is kept.
    key: A random key.
    keep: The method's default of that.

  Returns:
    The client.
  """
  variables = model.init(key)
  kept = local.keeps_optimizer(keep)
  state = init_optimizer(local, variables.params) if kept else None
  return Client(variables, state)


def class_sums(vectors, labels, num_classes: int, mask=None) -> ClassVectors:
  """Adds up vectors by class.

  Args:
    vectors: [B, D].
    labels: [B] int32.
    num_classes: C.
    mask: [B] bool, examples that count; None for all.

  Returns:
    Sums [C, D] and counts [C].
  """
  rows = jax.nn.one_hot(labels, num_classes)
  if mask is not None:
    rows = jnp.where(mask[:, None], rows, 0.0)
  # In full precision on every platform: these are sums, not activations.
  sums = jnp.matmul(rows.T, vectors, precision='highest')
  return ClassVectors(sums, jnp.sum(rows, axis=0))


def class_means(total: ClassVectors) -> jax.Array:
  """[..., C, D]: sums over counts, zero for a class without any."""
  return total.vectors / jnp.maximum(total.counts, 1.0)[..., None]


def fit_and_sum(
    model: BlockModel,
    local: LocalTraining,
    client: Client,
    data,
    visit: Visit,
    *,
    penalty: Callable[..., jax.Array],
    weight: float,
    name: str,
    output: Callable[[jax.Array], jax.Array] = lambda logits: logits,
) -> tuple[Client, dict[str, jax.Array], ClassVectors]:
  """Trains on cross-entropy plus a penalty, and adds up outputs by class.

  The sums are over the outputs of the training passes (with dropout and batch
  statistics, before each step), so they need no additional pass.

  Args:
    model: The architecture.
    local: How to train.
    client: The client at the beginning.
    data: Its examples.
    visit: Its visit.
    penalty: `(logits [B, C], labels [B]) -> [B]`, averaged over the batch.
    weight: Factor on the penalty; 0 leaves it out of the gradient.
    name: The penalty's name among the metrics.
    output: Maps logits [B, C] to what is added up, [B, D].

  Returns:
    The client at the end, the metrics 'train_loss', 'cross_entropy' and `name`
    as means over the steps, and the sums.
  """

  def loss_fn(variables, batch, key):
    logits, stats = model.apply(
        variables, batch.x, train=True, mask=batch.mask, key=key
    )
    logits = logits.astype(jnp.float32)
    loss = local.task.loss(logits, batch.y, batch.mask)
    extra = masked_mean(penalty(logits, batch.y), batch.mask)
    sums = class_sums(output(logits), batch.y, model.num_classes, batch.mask)
    metrics = {'cross_entropy': loss, name: extra, **sums._asdict()}
    # L = CE + weight * penalty.
    return loss + weight * extra if weight else loss, (stats, metrics)

  end, opt_state, metrics, num_steps = fit(
      loss_fn, local, client.variables, data, visit, opt_state=client.opt_state
  )
  if client.opt_state is None:
    opt_state = None
  # Undo the mean over steps that `fit` took; rounding makes counts exact.
  total = ClassVectors(
      metrics.pop('vectors') * num_steps,
      jnp.round(metrics.pop('counts') * num_steps),
  )
  return Client(end, opt_state), metrics, total
