"""FedGen's clients: their downlink and their loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.fedgen.generator import (
  Generator,
  draw_labels,
  draw_noise,
  generate,
)
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.models.blocks import BlockModel, Variables

# Lower bound of a_t and b_t.
_FLOOR = 1e-4
# A fold that dropout does not use: its folds are the blocks' positions.
_GENERATE = 2**31 - 1


class Sent(NamedTuple):
  """The downlink of a client.

  Attributes:
    model: The shared blocks of its model.
    generator: Variables of G.
    known: [C] bool, the classes that G was trained on (Y).
  """

  model: Variables
  generator: Variables
  known: jax.Array


def strength(start: float, decay: float, round_num, known) -> Any:
  """max(1e-4, start decay^t); 0 while no class is known; None if start is 0."""
  if not start:
    return None
  # a_t = max(1e-4, a 0.98^t).
  value = jnp.maximum(_FLOOR, start * decay**round_num)
  return jnp.where(jnp.any(known), value, 0.0)


def client_loss(
    model: BlockModel, task: Task, net: Generator, sent: Sent, a_t, b_t,
    num: int,
) -> Callable[..., Any]:  # fmt: skip
  """The loss of a client, as `fit_and_record` takes it, without outputs.

  Args:
    model: The client's model.
    task: The task.
    net: G.
    sent: The downlink of the client.
    a_t: Weight of the cross-entropy of generated features; None for no such
      term.
    b_t: Weight of the KL; None for no such term.
    num: Generated features per step, B_g.

  Returns:
    The loss function.
  """

  def loss_fn(variables, batch, key):
    keys = jax.random.split(jax.random.fold_in(key, _GENERATE), 3)

    def generated(key, labels):
      """H_k(G(y)), [B, C]."""
      noise = draw_noise(key, len(labels), net.noise_size)
      z, _ = generate(net, sent.generator, noise, labels)
      return model.apply(variables, z, start=model.cut[1])[0]

    logits, stats = model.apply(
        variables, batch.x, train=True, mask=batch.mask, key=key
    )
    loss = task.loss(logits, batch.y, batch.mask)
    metrics = dict(cross_entropy=loss)
    if a_t is not None:
      # + a_t B_g/B mean CE(H_k(G(y~)), y~).
      labels = draw_labels(keys[0], sent.known, num)
      extra = jnp.mean(task.losses(generated(keys[1], labels), labels))
      loss += a_t * (num / len(batch.y)) * extra
      metrics['generated_loss'] = extra
    if b_t is not None:
      # + b_t KL(softmax(H_k(G(y))) || softmax(f_k(x))).
      gap = distillation(logits, generated(keys[2], batch.y))
      gap = masked_mean(gap, batch.mask)
      loss += b_t * gap
      metrics['distillation_loss'] = gap
    return loss, (stats, metrics, ())

  return loss_fn


def count_labels(counts, outputs, batch):
  """c_k [C] with the real examples of a batch added."""
  del outputs
  return counts.at[batch.y].add(batch.mask.astype(jnp.float32))
