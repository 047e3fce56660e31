"""FedGen's server: how it trains the generator on the clients' classifiers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.exchange import WeightExchange
from fedjax_het.algorithms.fedgen.generator import (
  Generator,
  draw_labels,
  draw_noise,
  generate,
)
from fedjax_het.algorithms.fedgen.uploads import Heads, sent_heads
from fedjax_het.data.federated import InMemory
from fedjax_het.engine.local import fit
from fedjax_het.engine.task import Task
from fedjax_het.engine.types import LocalTraining, Received, Turn
from fedjax_het.models.blocks import Variables


def label_weights(counts, took_part) -> jax.Array:
  """omega_k(y) = c_k[y] / sum_j c_j[y] over the clients that took part.

  Args:
    counts: [S, C], c_k.
    took_part: [S] bool.

  Returns:
    [S, C]; rows of the others are 0.
  """
  # omega_k(y) = c_k[y] / sum_j c_j[y].
  counts = jnp.where(took_part[:, None], counts, 0.0)
  return counts / jnp.maximum(jnp.sum(counts, axis=0), 1.0)[None]


class Ensemble(NamedTuple):
  """The clients' classifiers of a round, which train the generator.

  Attributes:
    heads: The classifiers of each group, S in all.
    omega: [S, C], see `label_weights`.
    labels: [C] bool, the classes that some client has trained on.
  """

  heads: list[Heads]
  omega: jax.Array
  labels: jax.Array


def make_ensemble(
    exchange: WeightExchange, model: Variables, uploads: Mapping[str, Received]
) -> Ensemble:
  """The ensemble of all clients that took a step.

  Args:
    exchange: The shared blocks.
    model: The server's tree, see `end_of` for stale uploads.
    uploads: {group: Received}, with zeros in padding slots.

  Returns:
    The ensemble.
  """
  groups = exchange.federation.groups
  kept = [uploads[group.name].kept for group in groups]
  counts = jnp.concatenate([k.counts for k in kept])
  took_part = jnp.concatenate([k.classifier.weight > 0 for k in kept])
  # c_k[y] = 1 + real examples of y.
  labels = jnp.any(took_part[:, None] & (counts > 1), axis=0)
  heads = [
      sent_heads(exchange, group, model, uploads[group.name])
      for group in groups
  ]
  return Ensemble(heads, label_weights(counts, took_part), labels)


def diversity_loss(noise, z) -> jax.Array:
  """exp(-mean_{b,b'} d_eps(b, b') d_z(b, b')), in (0, 1].

  Args:
    noise: [B, m]; d_eps is the mean of squared differences.
    z: [B, d]; d_z is the mean of absolute differences.

  Returns:
    A scalar, 1 where all outputs are equal.
  """
  # L_div = exp(-mean_{b,b'} d_eps(b, b') d_z(b, b'))
  d_eps = jnp.mean((noise[:, None] - noise[None]) ** 2, axis=2)
  d_z = jnp.mean(jnp.abs(z[:, None] - z[None]), axis=2)
  return jnp.exp(-jnp.mean(d_eps * d_z))


def head_logits(heads: Sequence[Heads], z) -> jax.Array:
  """[S, B, C]: logits of all groups' classifiers for z [B, d]."""

  def logits(one: Heads):
    return jax.vmap(
        lambda params: one.model.apply(
            Variables(params, {}), z, start=one.model.cut[1]
        )[0]
    )(one.params)

  return jnp.concatenate([logits(one) for one in heads])


def generator_loss(
    net: Generator, task: Task, heads: Sequence[Heads], omega, eta: float
) -> Callable[..., Any]:
  """The generator's loss, as `fit` takes it, on batches of (noise, label).

  Args:
    net: G.
    task: The task.
    heads: The classifiers, constant.
    omega: [S, C], see `label_weights`.
    eta: Weight of the diversity loss.

  Returns:
    The loss function.
  """

  def loss_fn(variables, batch, key):
    del key
    z, stats = generate(net, variables, batch.x, batch.y, train=True)
    # sum_k mean_b omega_k(y_b) CE(H_k(G(y_b)), y_b) + eta L_div
    losses = jax.vmap(task.losses, (0, None))(head_logits(heads, z), batch.y)
    teacher = jnp.sum(jnp.mean(omega[:, batch.y] * losses, axis=1))
    diversity = diversity_loss(batch.x, z)
    metrics = dict(teacher_loss=teacher, diversity_loss=diversity)
    return teacher + eta * diversity, (stats, metrics)

  return loss_fn


def generator_training(
    task: Task, learning_rate: float, decay: float, l2: float, batch_size: int
) -> LocalTraining:
  """Adam with an L2 term; `decay` is the factor on its rate per round."""
  return LocalTraining(
      lambda rate: optax.chain(
          optax.add_decayed_weights(l2), optax.adam(rate)
      ),
      # 3e-4 0.98^t.
      lambda round_num: learning_rate * decay**round_num,
      epochs=1,
      batch_size=batch_size,
      task=task,
  )


def train_generator(
    net: Generator,
    variables: Variables,
    opt_state: Any,
    loss_fn: Callable[..., Any],
    local: LocalTraining,
    qualified,
    steps: int,
    turn: Turn,
) -> tuple[Variables, Any, dict[str, jax.Array]]:
  """Trains the generator on labels that some client has trained on.

  Args:
    net: G.
    variables: Its variables.
    opt_state: Its optimiser's state.
    loss_fn: See `generator_loss`.
    local: See `generator_training`.
    qualified: [C] bool, the labels to draw; with none there is no step.
    steps: Minibatches.
    turn: The server's turn.

  Returns:
    The variables, the optimiser's state, and the metrics, NaN without a step.
  """
  if not steps:
    return variables, opt_state, {}
  num = steps * local.batch_size
  keys = jax.random.split(jax.random.fold_in(turn.key, 2))
  # y uniform over the qualified labels.
  drawn = InMemory(
      draw_noise(keys[0], num, net.noise_size),
      draw_labels(keys[1], qualified, num),
      jnp.where(jnp.any(qualified), num, 0),
  )
  # G <- Adam on sum_k mean_b omega_k(y_b) CE(H_k(G(y_b)), y_b) + eta L_div.
  variables, opt_state, metrics, num_steps = fit(
      loss_fn, local, variables, drawn, turn, opt_state=opt_state
  )
  metrics['generator_loss'] = metrics.pop('train_loss')
  return variables, opt_state, {
      name: jnp.where(num_steps > 0, value, jnp.nan)
      for name, value in metrics.items()
  }  # fmt: skip
