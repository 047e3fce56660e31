"""The draws of FjORD's widths, and the loss of a local step.

References:
  Horvath et al., `FjORD <https://arxiv.org/abs/2102.13451>`_, NeurIPS 2021.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.nested_widths import Net, apply_net, nested
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.task import Task, masked_mean


def draw_width(key, number: int) -> jax.Array:
  """The width of one local step.

  Args:
    key: The step's random key.
    number: |P_k|.

  Returns:
    [] int32, a position in P_k; all are equally likely.
  """
  # p ~ U(P_k)
  return jax.random.randint(jax.random.fold_in(key, 1), (), 0, number)


def step_loss(
    nets: Sequence[Net], task: Task, alpha: float, temperature: float
) -> Callable[..., Any]:
  """The loss of one local step, as `fit` takes it.

  Args:
    nets: The client's nets, ascending.
    task: The task.
    alpha: The factor on KL, in [0, 1]; 0 for no teacher.
    temperature: T.

  Returns:
    The loss function. Its variables are the parameters of the last net and
    {net's name: running statistics}.
  """
  nets = nested(nets)

  def loss_fn(variables, batch, key):
    def apply(net, variables):
      """F_p(x), and the statistics, of which those of p are new."""
      logits, new = apply_net(net, variables, batch, key)
      return logits, {**variables.stats, net.name: new}

    def hard(logits):
      return task.loss(logits, batch.y, batch.mask)

    passes = [functools.partial(apply, net) for net in nets]
    drawn = draw_width(key, len(nets))
    metrics = dict(rate=jnp.array([float(net.rate) for net in nets])[drawn])
    if not alpha:
      # L = CE(F_p(x), y)
      logits, stats = jax.lax.switch(drawn, passes, variables)
      return hard(logits), (stats, metrics)
    teacher, stats = passes[-1](variables)
    # For p = p_k, F_p(x) is known.
    passes[-1] = lambda variables: (teacher, variables.stats)
    student, stats = jax.lax.switch(
        drawn, passes, variables._replace(stats=stats)
    )
    # T^2 KL(softmax(F_{p_k}(x) / T) || softmax(F_p(x) / T))
    soft = masked_mean(distillation(student, teacher, temperature), batch.mask)
    # L = CE(F_{p_k}(x), y) + (1 - alpha) CE(F_p(x), y) + alpha T^2 KL
    loss = hard(teacher) + (1 - alpha) * hard(student) + alpha * soft
    return loss, (stats, metrics)

  return loss_fn
