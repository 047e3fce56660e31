"""A server's step of averaging, then distillation of an ensemble.

The models of a cohort are averaged inside each architecture. Each average is
then a student of the cohort's ensemble on unlabelled public examples. FedDF and
FedAUX have this step and differ in the ensemble.

References:
  Lin, Kong, Stich, Jaggi, `Ensemble Distillation for Robust Model Fusion in
  Federated Learning <https://arxiv.org/abs/2006.07242>`_, NeurIPS 2020,
  Algorithm 3. Code: `epfml/federated-learning-public-code
  <https://github.com/epfml/federated-learning-public-code>`_.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.exchange import WeightExchange
from fedjax_het.aggregation.server import (
  Optimized,
  server_variables,
  state_of,
  with_state,
)
from fedjax_het.aggregation.uploads import clear_padding, sum_uploads
from fedjax_het.data.federated import Examples
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.local import fit
from fedjax_het.engine.task import masked_mean
from fedjax_het.engine.types import LocalTraining, Received, Turn
from fedjax_het.models.blocks import BlockModel, Variables

# The largest global norm of a student's gradient, from the code of FedDF.
CLIP_NORM = 5.0


def average_uploads(
    exchange: WeightExchange,
    server: Variables | Optimized,
    received: Mapping[str, Received],
) -> tuple[Variables | Optimized, dict[str, Received]]:
  """`WeightExchange.average` over uploads that the server keeps separately.

  Args:
    exchange: The shared blocks.
    server: The server's tree.
    received: {group name: Received}; `kept` are whole `Delta`s.

  Returns:
    The new server's tree, and the uploads with zeros in padding slots, as
    `teacher_logits` takes them.
  """
  received = {
      name: clear_padding(r, exchange.federation.num_clients)
      for name, r in received.items()
  }
  # x_p <- sum_{k in S_p} w_k x_k / sum_{k in S_p} w_k.
  fused = exchange.average(
      server, {name: sum_uploads(r.kept) for name, r in received.items()}
  )
  return fused, received


def student_loss(model: BlockModel, ensemble) -> Callable[..., Any]:
  """The loss of a student on public examples, as `fit` takes it.

  Args:
    model: The student's architecture.
    ensemble: [P, C], t.

  Returns:
    The loss function; labels are not read.
  """

  def loss_fn(variables, batch, key):
    logits, stats = model.apply(
        variables, batch.x, train=True, mask=batch.mask, key=key
    )
    # mean_d KL(softmax(t(d)) || softmax(f(x_p; d))).
    gap = distillation(logits, ensemble[batch.position])
    return masked_mean(gap, batch.mask), (stats, {})

  return loss_fn


def server_training(
    local: LocalTraining, steps: int, batch_size: int, lr: float
) -> LocalTraining:
  """N steps of a new Adam, whose rate falls to 0; gradients are clipped."""

  def optimizer(rate):
    return optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        # lr (1 + cos(pi j / N)) / 2 in step j = 0, ..., N - 1.
        optax.adam(optax.cosine_decay_schedule(rate, steps)),
    )

  return dataclasses.replace(
      local,
      optimizer=optimizer,
      learning_rate=lambda round_num: lr,
      batch_size=batch_size,
      steps=steps,
  )


def distil_averages(
    exchange: WeightExchange,
    training: LocalTraining,
    averages: Variables | Optimized,
    ensemble: jax.Array,
    some: jax.Array,
    public: Examples,
    turn: Turn,
) -> tuple[Variables | Optimized, jax.Array]:
  """Every architecture's average learns from the ensemble.

  Args:
    exchange: The shared blocks, no block of two groups.
    training: The server's training, see `server_training`.
    averages: The server's tree.
    ensemble: [P, C], t, logits of the public examples.
    some: [] bool, whether there is a teacher; without any there is no step.
    public: The public examples, P of them.
    turn: The server's turn.

  Returns:
    The new server's tree; the state of its optimiser is unchanged. The mean
    loss over steps and architectures, [] float32 in nats, NaN without a
    teacher.
  """
  public = public.replace(size=jnp.where(some, public.size, 0))

  def distil(group, start):
    """x_p after its N steps, and their mean loss."""
    model = group.model
    end, _, metrics, _ = fit(
        student_loss(model, ensemble),
        training,
        model.trim(start) if training.drop_unused_weights else start,
        public,
        turn,
    )
    return model.fill(end, start), metrics['train_loss']

  averaged = server_variables(averages)
  params, stats, losses = {}, {}, []
  for group in exchange.federation.groups:
    start = exchange.sharing.join(
        group, (), exchange.download(averaged, group)
    )
    end, loss = distil(group, start)
    shared, _ = exchange.sharing.split(group, end)
    params.update(shared.params)
    stats.update(shared.stats)
    losses.append(loss)
  opt_state = state_of(exchange.tx, averages, averaged.params)
  loss = jnp.where(some, jnp.mean(jnp.stack(losses)), jnp.nan)
  return with_state(Variables(params, stats), opt_state), loss
