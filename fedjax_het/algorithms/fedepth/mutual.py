"""Deep mutual learning of several models on one client's data.

References:
  Zhang et al., `Deep Mutual Learning <https://arxiv.org/abs/1706.00384>`_,
  CVPR 2018; MKD of FeDepth (arXiv 2303.04887).
"""

from collections.abc import Container, Sequence

import jax

from fedjax_het.aggregation.exchange import Delta, WeightExchange
from fedjax_het.aggregation.server import (
  init_server_step,
  server_variables,
  with_state,
)
from fedjax_het.aggregation.sharing import Sharing
from fedjax_het.data.federated import Examples
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.task import Task, masked_mean
from fedjax_het.engine.together import fit_together
from fedjax_het.engine.types import Group, LocalTraining, Visit
from fedjax_het.models.blocks import BlockModel, Variables

PARTNERS = ('private', 'shared')


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
    start: The common model.
    partners: The M - 1 further models.
    data: The client's examples.
    visit: The visit; its key seeds batches and dropout.

  Returns:
    The common model, the further ones, {'train_loss': task loss of the common
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


def make_partners(
    exchange: WeightExchange,
    holders: Container[str],
    num_models: int,
    kept: str,
) -> tuple[WeightExchange, ...]:
  """How each of the M - 1 models beside the common one is kept.

  Args:
    exchange: That of the common model.
    holders: Names of the groups whose clients train M models.
    num_models: M.
    kept: 'private': they stay on their client, and nothing is exchanged.
      'shared': the server averages each over the clients that train it, under
      names of its own, 'partner1/BLOCK'.

  Returns:
    The exchange of every partner.
  """

  def named(m: int) -> WeightExchange:
    def key(group: Group, block: str) -> str | None:
      travels = kept == 'shared' and group.name in holders
      return f'partner{m}/{block}' if travels else None

    sharing = Sharing(key, exchange.sharing.local_stats)
    return exchange._replace(sharing=sharing)

  return tuple(named(m) for m in range(1, num_models))


def init_server(
    exchange: WeightExchange, partners: Sequence[WeightExchange], key
):
  """The server's tree: the common model and the partners that are shared.

  Args:
    exchange: That of the common model.
    partners: Those of the partners.
    key: A random key; partner m's is `fold_in(key, m)`.

  Returns:
    As `exchange.init`, with further blocks.
  """
  params, stats = server_variables(exchange.init(key))
  for m, partner in enumerate(partners, 1):
    more = server_variables(partner.init(jax.random.fold_in(key, m)))
    params, stats = {**params, **more.params}, {**stats, **more.stats}
  opt_state = init_server_step(exchange.tx, params)
  return with_state(Variables(params, stats), opt_state)


def upload_partners(
    partners: Sequence[WeightExchange],
    group: Group,
    before: Sequence[Variables],
    after: Sequence[Variables],
    size: jax.Array,
    num_steps: jax.Array,
    delta: Delta,
) -> tuple[tuple[Variables, ...], Delta]:
  """Splits the partners into what stays and what travels.

  Args:
    partners: Their exchanges.
    group: The client's group.
    before: The partners at the start of the visit.
    after: The partners at its end.
    size: As for `WeightExchange.upload`.
    num_steps: The same.
    delta: The uplink of the common model.

  Returns:
    What stays, for each partner; the uplink with further blocks.
  """
  kept = []
  for partner, old, new in zip(partners, before, after, strict=True):
    own, more = partner.upload(group, old, new, size, num_steps)
    kept.append(own)
    delta = Delta(
        {**delta.change, **more.change},
        {**delta.stats, **more.stats},
        delta.weight,
    )
  return tuple(kept), delta
