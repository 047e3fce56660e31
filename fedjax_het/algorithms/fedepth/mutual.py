"""Deep mutual learning of several models on one client's data.

References:
  Zhang et al., `Deep Mutual Learning <https://arxiv.org/abs/1706.00384>`_,
  CVPR 2018; MKD of FeDepth (arXiv 2303.04887).
"""

import jax

from fedjax_het.data.federated import Examples
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.together import fit_together
from fedjax_het.engine.types import LocalTraining, Visit
from fedjax_het.models.blocks import BlockModel, Variables


def mutual_loss(
    task: Task, logits: tuple[jax.Array, ...], labels, mask=None
):
  """Sums the losses of all models: task loss plus mean KL from the others.

  Args:
    task: Supplies the loss on the labels.
    logits: [B, C] for each of M models.
    labels: [B] int32.
    mask: [B] bool, False for padding examples; None for no padding.

  Returns:
    A scalar. Teachers' logits have their gradient stopped, so the gradient of a
    model is that of its own loss.
  """
  # sum_m [CE(z_m, y) + 1 / (M - 1) sum_{n != m} KL(p_n || p_m)].
  loss = sum(task.loss(mine, labels, mask) for mine in logits)
  for m, mine in enumerate(logits):
    for n, other in enumerate(logits):
      if n != m:
        # 1 / (M - 1) sum_{n != m} KL(h_n || h_m), h_n detached.
        gap = masked_mean(distillation(mine, other), mask)
        loss += gap / (len(logits) - 1)
  return loss


def train_together(
    model: BlockModel,
    local: LocalTraining,
    start: Variables,
    partners: tuple[Variables, ...],
    data: Examples,
    visit: Visit,
) -> tuple[Variables, tuple[Variables, ...], dict[str, jax.Array], jax.Array]:
  """Trains M models by mutual distillation (MKD), one optimizer state each.

  Args:
    model: Architecture of all M models.
    local: Local training.
    start: The shared model.
    partners: The M - 1 private models.
    data: The client's examples.
    visit: The visit; its key seeds batches and dropout.

  Returns:
    The shared model, the private models, {'train_loss': task loss of the shared
    model}, number of steps.
  """
  models = (start, *partners)

  def loss_of(logits, batch):
    loss = mutual_loss(local.task, logits, batch.y, batch.mask)
    return loss, dict(first=local.task.loss(logits[0], batch.y, batch.mask))

  (end, *partners), _, metrics, num_steps = fit_together(
      (model,) * len(models), local, models, loss_of, data, visit
  )
  return end, tuple(partners), dict(train_loss=metrics['first']), num_steps
