"""The nets of FjORD's widths, and the loss of a local step.

References:
  Horvath et al., `FjORD <https://arxiv.org/abs/2102.13451>`_, NeurIPS 2021.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.slicing import extract, narrow, width_index
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.options import share


class Net(NamedTuple):
  """F_p, the net of one width.

  Attributes:
    name: Its name, such as 'rate_0.5'.
    rate: p, exact.
    model: The narrow model.
    index: Its entries in wider `Variables`, see `width_index`.
  """

  name: str
  rate: Fraction
  model: BlockModel
  index: Variables


def widths_of(
    largest: Mapping[str, Fraction], widths: Sequence[Any]
) -> list[Fraction]:
  """P, from the option `widths`.

  Args:
    largest: {group name: p_k}.
    widths: As for `fjord`.

  Returns:
    The widths, exact, in any order.

  Raises:
    ValueError: If a width cannot be read, a group's is missing, or one is
      larger than all of the groups'.
  """
  if not widths:
    return list(largest.values())
  found = [share(f'widths[{i}]', width) for i, width in enumerate(widths)]
  for name, rate in largest.items():
    if rate not in found:
      raise ValueError(
          f'groups.{name}.rate={rate} must be one of widths, got '
          f'{tuple(widths)}.'
      )
  if max(found) > max(largest.values()):
    raise ValueError(
        f'widths must be at most the largest rate of a group, '
        f'{max(largest.values())}, got {tuple(widths)}.'
    )
  return found


def make_nets(full: BlockModel, rates: Iterable[Fraction]) -> list[Net]:
  """The nets of the widths P, ascending.

  Args:
    full: The full model.
    rates: P.

  Returns:
    The nets, with their indices in the full model.

  Raises:
    ValueError: If two widths have one name, or a module cannot be narrowed.
  """
  nets, found = {}, sorted(set(rates))
  for rate in found:
    # ceil(p K) of the K channels of every layer.
    small = narrow(full, lambda k, rate=rate: math.ceil(rate * k))
    net = Net(f'rate_{float(rate):.4g}', rate, small, width_index(full, small))
    nets[net.name] = net
  if len(nets) < len(found):
    raise ValueError(
        f'The widths {[str(rate) for rate in found]} must differ in their '
        'first four digits.'
    )
  return list(nets.values())


def nested(nets: Sequence[Net]) -> list[Net]:
  """The same nets, with their indices in the last of them."""
  widest = nets[-1].model
  return [net._replace(index=width_index(widest, net.model)) for net in nets]


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
      params, stats = variables
      own = Variables(extract(params, net.index.params), stats[net.name])
      logits, new = net.model.apply(
          own, batch.x, train=True, mask=batch.mask, key=key
      )
      return logits, {**stats, net.name: new}

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
