"""The loss of SlimFL's local step, over all widths of a client.

References:
  Baek et al., `Joint Superposition Coding and Training for Federated Learning
  over Multi-Width Neural Networks <https://arxiv.org/abs/2112.02543>`_, INFOCOM
  2022. Yu, Huang, `Universally Slimmable Networks and Improved Training
  Techniques <https://arxiv.org/abs/1903.05134>`_, ICCV 2019.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedjax_het.aggregation.nested_widths import Net, apply_net, nested
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.options import positive


def factors_of(
    nets: Sequence[Net], rates: Sequence[Any], widths, width_weights
) -> dict[str, float]:
  """c_p of each net.

  Args:
    nets: The nets of P.
    rates: The widths, in the order of `widths`.
    widths: As for `slimfl`.
    width_weights: As for `slimfl`.

  Returns:
    {net's name: c_p}.

  Raises:
    ValueError: If there is not one number above 0 for each of `widths`.
  """
  if not width_weights:
    return {net.name: 1.0 for net in nets}
  if len(width_weights) != len(widths):
    raise ValueError(
        f'width_weights must have one number for each of widths='
        f'{tuple(widths)}, got {tuple(width_weights)}.'
    )
  positive(**{f'width_weights[{i}]': c for i, c in enumerate(width_weights)})
  given = dict(zip(rates, width_weights, strict=True))
  return {net.name: float(given[net.rate]) for net in nets}


def joint_loss(
    nets: Sequence[Net], task: Task, alpha: float, factors: Mapping[str, float]
) -> Callable[..., Any]:
  """The loss of one local step, as `fit` takes it.

  Args:
    nets: The client's nets, ascending.
    task: The task.
    alpha: The factor on KL, in [0, 1].
    factors: {net's name: c_p}.

  Returns:
    The loss function. Its variables are the parameters of the last net and
    {net's name: running statistics}.
  """
  *narrower, widest = nested(nets)

  def loss_fn(variables, batch, key):
    def hard(logits):
      return task.loss(logits, batch.y, batch.mask)

    stats = {}
    # L <- c_{p_k} CE(F_{p_k}(x), y)
    teacher, stats[widest.name] = apply_net(widest, variables, batch, key)
    loss = factors[widest.name] * hard(teacher)
    for net in narrower:
      student, stats[net.name] = apply_net(net, variables, batch, key)
      own = hard(student)
      if alpha:
        # KL(softmax(F_{p_k}(x)) || softmax(F_p(x))), constant in F_{p_k}.
        soft = masked_mean(distillation(student, teacher), batch.mask)
        own = (1 - alpha) * own + alpha * soft
      # L <- L + c_p L_p
      loss += factors[net.name] * own
    return loss, (stats, {})

  return loss_fn
