"""FeDepth: clients train the full model in parts that fit their memory.

Clients with the same memory budget form a group. A budget gives a schedule of
stages g_1 .. g_J of the one model. A round:

  1. The server sends the whole model W.
  2. For j = 1 .. J a client takes local SGD steps on
       L(theta_{g_j}, phi),  logits = phi(adapt(z_j)),
       z_j = f_{g_j}(stop_gradient(z_{j-1})),  z_0 = x,
     from the server's theta_{g_j} and the head phi that stage j - 1 left.
  3. It uploads the blocks that it trained. With the whole model in one stage
     (J = 1), it is a client of FedAvg.
  4. The server moves each leaf by the mean change of the clients that trained
     it, weighted by their numbers of examples.

m-FeDepth (`heads='own'`): a stage that does not end at the last unit trains a
head of its own, of the width there. The server averages these heads over the
clients that trained them; inference uses the model's head. Partial training:
front blocks that do not fit are not trained. MKD: a client that can hold M
models trains the common model together with M - 1 further models, each on

  CE_m + 1 / (M - 1) sum_{m' != m} KL(h_m' || h_m),

with the gradient stopped at h_m'. The paper prints the mean of the CEs; the
authors' code gives every model its own loss, as here. Further models stay on
their client, as in the paper, or the server averages each over the clients that
trained it (`mkd_partners='shared'`); in the authors' code one network goes from
client to client.

Differences from the paper or its code:

- Frozen leaves do not move; in the code weight decay and momentum move them.
- A leaf is averaged over the clients that trained it; `dilute` averages as the
  code does.
- Each stage is a separate problem (Eq. 1) with a new optimiser. The code has
  one optimiser per visit, which carries the head's momentum from stage to
  stage.
- The stem of a ViT, its embeddings, is trained in the first stage only.

The only state is that of the server (and the models of MKD that stay). After a
device upgrade, build the algorithm and the round with a federation of the new
budgets and continue with

  rounds.init_state(new_algorithm, new_federation, key)._replace(
      round_num=state.round_num, server=state.server)

References:
  Zhang et al., `Memory-adaptive Depth-wise Heterogeneous Federated Learning
  <https://arxiv.org/abs/2303.04887>`_, Eq. 1 and Algorithm 1.
"""

from collections.abc import Container, Mapping
import dataclasses
from typing import Any, NamedTuple

import jax
import optax

from fedjax_het.aggregation.exchange import Delta, make_exchange
from fedjax_het.aggregation.label_masks import with_batch_mask
from fedjax_het.aggregation.server import (
  server_variables,
  state_of,
  takes_server_options,
  with_state,
)
from fedjax_het.algorithms.fedepth.mutual import (
  PARTNERS,
  init_server,
  make_partners,
  train_together,
  upload_partners,
)
from fedjax_het.depthwise.schedules import (
  Schedule,
  make_schedules,
  stage_figures,
)
from fedjax_het.depthwise.stages import (
  HEADS,
  PARTIAL,
  Stage,
  own_heads,
)
from fedjax_het.depthwise.training import share_out, take, train_stages
from fedjax_het.engine.needs import check_task, requires
from fedjax_het.engine.static_norm import check_static, static_statistics
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Group,
  LocalTraining,
  Uplink,
)
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.options import one_of


class Client(NamedTuple):
  """The client state.

  Attributes:
    own: Blocks and statistics that do not travel; empty without
      `Federation.local_stats`.
    partners: What stays of the M - 1 further models of MKD, `Variables` each,
      which are empty if these are shared; () without MKD.
  """

  own: Variables
  partners: tuple[Variables, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
  """Stages and settings of a group's visits.

  Attributes:
    group: The group; its model has the m-FeDepth heads that the stages train.
    local: Local training of a visit.
    stages: The stages in order.
    shares: Local training of each stage.
    num_models: M, the models that MKD trains instead of stages; 1 without MKD.
    scan: See `scan_stages` of `fedepth`.
    cache_prefix: As for `fedepth`.
  """

  group: Group
  local: LocalTraining
  stages: tuple[Stage, ...]
  shares: tuple[LocalTraining, ...]
  num_models: int
  scan: bool
  cache_prefix: bool

  @property
  def names(self) -> set[str]:
    """Names of all blocks that the stages train."""
    return {name for stage in self.stages for name in stage.names}


def make_plans(
    federation: Federation,
    schedules,
    epochs_mode: str,
    *,
    scan: bool,
    cache_prefix: bool,
) -> dict[str, Plan]:
  """{group: plan} for the given schedules; a ValueError names the group."""
  plans = {}
  for group in federation.groups:
    schedule = schedules[group.name]
    stages = schedule.stages
    try:
      shares = share_out(federation.local, len(stages), epochs_mode)
    except ValueError as e:
      raise ValueError(f'groups.{group.name}: {e}') from e
    names = {name for stage in stages for name in stage.names}
    plans[group.name] = Plan(
        with_own_heads(group, names),
        federation.local,
        stages,
        shares,
        schedule.num_models,
        scan,
        cache_prefix,
    )
  return plans


def schedule_facts(
    schedules: Mapping[str, Schedule], plan: str, federation: Federation
) -> dict[str, dict[str, Any]]:
  """The memory that the stages take; compiles each stage's step.

  Args:
    schedules: See `make_schedules`.
    plan: The option `plan` with which they were made.
    federation: The federation.

  Returns:
    {group: {plan, budget (MB or None), models, stages (see `stage_figures`)}}.
  """
  return {
      name: dict(
          plan=plan,
          budget=schedule.budget,
          models=schedule.num_models,
          stages=stage_figures(schedule, federation.local, federation.label),
      )
      for name, schedule in schedules.items()
  }


def with_own_heads(
    group: Group, names: Container[str] | None = None
) -> Group:
  """Attaches m-FeDepth's heads to a group's model: those in `names`, or all."""
  heads = [
      head
      for head in own_heads(group.model).values()
      if names is None or head.name in names
  ]
  return dataclasses.replace(group, model=group.model.with_heads(*heads))


def train(plan: Plan, start: Variables, partners, data, visit):
  """The client's part of a round.

  Args:
    plan: What to train.
    start: The model and the heads that the client received.
    partners: The further models of MKD.
    data: Its examples.
    visit: The visit.

  Returns:
    The model and the heads, the further models, metrics, number of steps.
  """
  if plan.num_models > 1:
    # CE_m + 1 / (M - 1) sum_{m' != m} KL(h_m' || h_m), for every m.
    return train_together(
        plan.group.model, plan.local, start, partners, data, visit
    )
  # For j = 1 .. J: SGD on L(theta_{g_j}, phi), logits = phi(adapt(z_j)),
  # z_j = f_{g_j}(stop_gradient(z_{j-1})).
  end, metrics, num_steps = train_stages(
      plan.stages,
      plan.shares,
      start,
      data,
      visit,
      scan=plan.scan,
      cache_prefix=plan.cache_prefix,
  )
  return end, (), metrics, num_steps


def calibrated(
    server: Variables, data, model: BlockModel, batch_size: int
) -> Variables:
  """The server's model with norm statistics over all clients' examples."""
  names = model.abstract_variables.params
  params = {name: server.params[name] for name in names}
  stats = static_statistics(model, params, data, batch_size=batch_size)
  return server._replace(stats={**server.stats, **stats})


@requires(group_options=dict(budget=None))
@takes_server_options()
def fedepth(
    federation: Federation,
    *,
    plan: str = 'measured',
    slack: float = 0.05,
    heads: str = 'shared',
    partial: str = 'frozen',
    dilute: bool = False,
    epochs_mode: str = 'per_stage',
    cache_prefix: bool = False,
    scan_stages: bool = True,
    mkd_models: int | None = None,
    mkd_partners: str = 'private',
    weights: str = 'data',
    mask: str = 'none',
    calibrate: bool = False,
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """FeDepth, m-FeDepth, partial training and MKD.

  Args:
    federation: Groups of one model, one for each budget, and local training.
      (Models that share blocks by name work, too.) `Group.options['budget']`
      is a group's memory: a share of what training the whole model takes, such
      as '1/6' or 0.5, or an amount at the batch size of local training, such
      as '38.68MB' (of 2^20 bytes). With '' or None the group trains the whole
      model.
    plan: The memory estimate. 'measured' is the compiler's figure for a stage's
      whole step with XLA's convolutions (which is compiled here, and cached).
      'paper' is the paper's estimate per block, with which a device may exceed
      its budget, see `launch.plan_memory`. A share is one of the whole model by
      this estimate.
    slack: With plan='paper', the share by which a stage may exceed the budget;
      the paper's schedules need 5 %. With 'measured' no stage may exceed it.
    heads: 'shared', or 'own' for m-FeDepth.
    partial: Treatment of front blocks that are not trained: 'frozen' or
      'bypass', see `depthwise.make_stages`.
    dilute: Whether a client that did not train a block of its model counts,
      with no change, in that block's mean, as in the authors' code.
    epochs_mode: 'per_stage' gives each stage all epochs (or steps) of local
      training, 'split' shares them out.
    cache_prefix: Whether a stage computes the outputs of its frozen blocks for
      the client's examples once, instead of in every step. Results are the
      same if norms do not use batch statistics and data are not augmented,
      else see `depthwise.stage_inputs`. These outputs take memory beyond the
      budget: one for each of a client's examples.
    scan_stages: Whether consecutive equal stages are one `jax.lax.scan` instead
      of a program each, see `depthwise.training`; ignored with `cache_prefix`.
    mkd_models: M for the groups whose budget holds M whole models; None for
      no distillation.
    mkd_partners: Where the M - 1 further models are: 'private' for models of
      each client, 'shared' for models that the server averages over the clients
      that trained them.
    weights: The averaging coefficients: 'data' for the number of examples (the
      paper), or 'uniform'.
    mask: As for `fedavg`; the authors' programs have 'batch' by default, their
      example commands 'none'.
    calibrate: Whether running statistics of norms are estimated on all
      clients' examples before each evaluation, see `static_statistics`,
      instead of averaged over the clients that trained the block.
    tx: The server's optimiser, with the options of `fedavg`.

  Returns:
    The algorithm. Its server state is that of FedAvg, with m-FeDepth's heads
    and shared partners ('partner1/BLOCK') as further blocks.

  Raises:
    ValueError: If an option is unknown or out of range, a budget cannot be
      read or does not hold the last block, no budget holds M models, there is
      nothing to calibrate, or shapes do not fit.
  """
  one_of('heads', heads, HEADS)
  one_of('partial', partial, PARTIAL)
  one_of('epochs_mode', epochs_mode, ('per_stage', 'split'))
  one_of('mkd_partners', mkd_partners, PARTNERS)
  federation = with_batch_mask('fedepth', federation, mask)
  if mkd_models is not None:  # The KL is between class probabilities.
    check_task('fedepth with mkd_models', 'classification', federation)
  if calibrate:
    _check_calibration(federation)
  schedules = make_schedules(
      federation,
      plan=plan,
      slack=slack,
      heads=heads,
      partial=partial,
      mkd_models=mkd_models,
  )
  plans = make_plans(
      federation,
      schedules,
      epochs_mode,
      scan=scan_stages,
      cache_prefix=cache_prefix,
  )
  holders = federation
  if heads == 'own':
    groups = tuple(map(with_own_heads, federation.groups))
    holders = dataclasses.replace(federation, groups=groups)
  exchange = make_exchange(holders, 'layerwise', weights, tx=tx)
  rich = {name for name, mine in plans.items() if mine.num_models > 1}
  partners = make_partners(exchange, rich, mkd_models or 1, mkd_partners)

  def partners_of(group):
    return partners if group.name in rich else ()

  def init_client(group, client_id, key):
    mine = jax.random.fold_in(key, client_id)
    own = exchange.init_client(plans[group.name].group, key)
    kept = tuple(
        partner.init_client(group, jax.random.fold_in(mine, m))
        for m, partner in enumerate(partners_of(group), 1)
    )
    return Client(own, kept)

  def downlink(server, group, visit):
    del visit
    return exchange.download(server, plans[group.name].group), tuple(
        partner.download(server, group) for partner in partners_of(group)
    )

  def client_update(group, client, sent, data, visit):
    mine, theirs = plans[group.name], partners_of(group)
    model, others = sent
    start = exchange.assemble(mine.group, client.own, model)
    before = tuple(
        partner.assemble(group, kept, other)
        for partner, kept, other in zip(
            theirs, client.partners, others, strict=True
        )
    )
    end, after, metrics, num_steps = train(mine, start, before, data, visit)
    own, delta = exchange.upload(mine.group, start, end, data.size, num_steps)
    if not dilute:
      change, stats = take(Variables(*delta[:2]), mine.names)
      delta = Delta(change, stats, delta.weight)
    kept, delta = upload_partners(
        theirs, group, before, after, data.size, num_steps, delta
    )
    return Client(own, kept), Uplink(delta), metrics

  def server_update(server, received, turn):
    del turn
    return exchange.collect(server, received), {}

  def client_model(server, client, group):
    sent = exchange.download(server, group)
    return exchange.assemble(group, client.own, sent)

  def calibrate_fn(server, data):
    model, variables = federation.groups[0].model, server_variables(server)
    opt_state = state_of(tx, server, variables.params)
    ready = calibrated(variables, data, model, federation.local.batch_size)
    return with_state(ready, opt_state)

  return FederatedAlgorithm(
      init=lambda key: init_server(exchange, partners, key),
      init_client=init_client,
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=client_model,
      personal=exchange.personal,
      one_model=exchange.one_model,
      calibrate=calibrate_fn if calibrate else None,
      trained_models=lambda group: (
          (plans[group.name].group.model,) * plans[group.name].num_models
      ),
      facts=lambda: dict(
          schedules=schedule_facts(schedules, plan, federation)
      ),
  )


def _check_calibration(federation: Federation) -> None:
  first, *others = federation.groups
  if not first.model.abstract_variables.stats:
    raise ValueError(
        f'calibrate=True: the norms of {first.model.name} keep no running '
        "statistics; use norm='batch', or calibrate=False."
    )
  check_static(first.model)
  odd = [group.name for group in others if group.model != first.model]
  if odd or federation.local_stats:
    what = f'group {odd[0]!r} has another' if odd else 'statistics are local'
    raise ValueError(f'calibrate=True needs one model for all clients: {what}.')
