"""SplitMix: a wide model split into thin ones; each client trains some of them.

The server holds B = 1 / r independent thin nets ("bases"), each with floor(r K)
of the K channels of every layer. One round:

  1. Client k with budget R_k gets m_k = floor(R_k / r) distinct bases. The
     first comes from a queue, which is shuffled again when all bases have been
     assigned, so that first choices are balanced; the others are random.
  2. It trains each of them alone, on the same minibatches. Outputs of
     convolutions are multiplied by 1 / r in training only, and logits of labels
     absent from the minibatch are set to 0. If a norm directly behind a
     convolution cancels the factor and its output enters a sum, as in the stem
     of PreResNet-20, the norm's output is multiplied, too. With batch
     statistics, a net is then the same function in training and in testing if
     a norm follows the last convolution. Other nets are refused, unless the
     factor is asked for in testing, too, which is an option of ours.
  3. Base b becomes the mean over its trainers, weighted by their numbers of
     examples,
       theta_b <- sum_{k trains b} n_k theta_kb / sum_{k trains b} n_k;
     a base without trainers keeps its value.

The prediction is the mean of the bases' logits. With the norm policy 'batch'
statistics are estimated again, as the net is tested, before every
evaluation; with 'batch_only' (the paper's default) each test batch is
normalised by its own statistics.

The queue continues from round to round. Within a round, clients take from it in
the order of their ids; in the authors' code, in the order of sampling. Kernels
are drawn by the model's own initialiser and, except in the stem, multiplied by
sqrt(r), as if their layers were of full width.

References:
  Hong et al., `Efficient Split-Mix Federated Learning for On-Demand and
  In-Situ Customization <https://arxiv.org/abs/2203.09747>`_, ICLR 2022.
"""

from collections.abc import Callable
from fractions import Fraction
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.aggregation.label_masks import (
  MASKS,
  masked_task,
  owned_labels,
)
from fedjax_het.aggregation.server import (
  init_server_step,
  server_step,
  takes_server_options,
)
from fedjax_het.aggregation.slicing import (
  mean_over_holders,
  narrow,
)
from fedjax_het.engine.local import fit
from fedjax_het.engine.needs import requires
from fedjax_het.engine.static_norm import static_statistics
from fedjax_het.engine.task import Task
from fedjax_het.engine.types import (
  FederatedAlgorithm,
  Federation,
  Maybe,
  Uplink,
)
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.models.intercept import (
  scaled_behind_norms,
  scaled_layers,
  scaled_outputs,
)
from fedjax_het.models.running_stats import without_running_stats
from fedjax_het.options import at_least, group_shares, one_of


class Server(NamedTuple):
  """The bases and the seed of the queue of first choices.

  Attributes:
    bases: `Variables`, leaves [B, ...]; statistics are for evaluation only.
    queue: [] uint32, the seed of the queue's shuffles.
    opt_state: {block: the server optimiser's state}; no array by default.
  """

  bases: Variables
  queue: jax.Array
  opt_state: dict[str, Any]


class Sent(NamedTuple):
  """The uplink, by base.

  Attributes:
    change: `Maybe` of parameters [B, ...], weight * (after - before).
    weight: [B] float32, the client's number of examples for each base that it
      trained, else 0.
  """

  change: Maybe
  weight: jax.Array


def bases_of(budget: Fraction, num_bases: int) -> int:
  """m = floor(R / r), in exact arithmetic.

  Args:
    budget: R, a share of the full width.
    num_bases: B = 1 / r.

  Returns:
    How many bases the budget affords.

  Raises:
    ValueError: If it affords none.
  """
  # m = floor(R / r).
  number = math.floor(budget * num_bases)
  if not number:
    raise ValueError(
        f'A budget of {budget} affords no base of width 1/{num_bases}; it must '
        'be at least that.'
    )
  return number


def first_choice(queue, turn, num_bases: int) -> jax.Array:
  """The base at the head of the queue.

  Args:
    queue: [] uint32, the seed of its shuffles.
    turn: [] int32, the number of earlier first choices.
    num_bases: B; the queue is shuffled again after B first choices.

  Returns:
    [] int32.
  """
  key = jax.random.fold_in(jax.random.key(queue), turn // num_bases)
  order = jax.random.permutation(key, num_bases).astype(jnp.int32)
  return order[turn % num_bases]


def choose_bases(key, first, num_bases: int, number: int) -> jax.Array:
  """The distinct bases of one client.

  Args:
    key: A random key of the client.
    first: [] int32, its first choice.
    num_bases: B.
    number: m, how many.

  Returns:
    [m] int32: the first choice, then others, uniform without replacement.
  """
  score = jax.random.uniform(key, (num_bases,)).at[first].set(2.0)
  return jax.lax.top_k(score, number)[1]


def draw_base(base: BlockModel, key, factor: float) -> Variables:
  """Draws a base; kernels of convolutions as in a layer of full width.

  So is the classifier's; the stem's kernels are not, whose input has all of its
  channels. Other dense layers are drawn as the thin model draws them, as their
  outputs are not multiplied either.

  Args:
    base: The thin model.
    key: A random key.
    factor: 1 / r, or 1 for kernels as the thin model draws them.

  Returns:
    Its variables.
  """
  variables = base.init(key)
  if factor == 1:
    return variables
  stem, *_, head = base.block_names
  layers = scaled_layers(base)

  def scaled(path, leaf):
    *layer, name = (part.key for part in path)
    inner = (tuple(layer) in layers and layer[0] != stem) or layer[0] == head
    # W <- sqrt(r) W
    return leaf * factor**-0.5 if inner and name == 'kernel' else leaf

  return variables._replace(
      params=jax.tree.map_with_path(scaled, variables.params)
  )


def base_loss(
    base: BlockModel, task: Task, factor: float, owned, mask: str
) -> Callable[..., Any]:
  """The loss of a base, as `fit` takes it.

  Args:
    base: The thin model.
    task: The task.
    factor: 1 / r, or 1 for outputs as they are.
    owned: [C] bool, the client's labels.
    mask: As for `masked_task`.

  Returns:
    The loss function.
  """

  masked = masked_task(task, mask, owned)

  def loss_fn(variables, batch, key):
    # conv(x) <- conv(x) / r
    with scaled_outputs(factor):
      logits, stats = base.apply(
          variables, batch.x, train=True, mask=batch.mask, key=key
      )
    return masked.loss(logits, batch.y, batch.mask), (stats, {})

  return loss_fn


@requires(
    one_model=True,
    group_options=dict(budget=None),
    local_stats=False,
    task='classification',
)
@takes_server_options()
def splitmix(
    federation: Federation,
    *,
    num_bases: int = 4,
    rescale: bool = True,
    rescale_test: bool = False,
    mask: str = 'batch',
    calibrate_batches: int | None = None,
    views: bool = False,
    tx: optax.GradientTransformation,
) -> FederatedAlgorithm:
  """SplitMix.

  Args:
    federation: Groups, all of one model, and local training. A group's option
      `budget` is the share of the full width that it affords, such as '1/2'.
      If no group has one, budgets are 1, 1/2, 1/4, ... in the order of the
      groups' names.
    num_bases: B; a base has floor(K / B) of K channels.
    rescale: Whether outputs of convolutions are multiplied by 1 / r in
      training, and kernels drawn as for the full width.
    rescale_test: Whether outputs of convolutions are multiplied in testing,
      too, if `rescale`. The authors' code does not do it; where a norm follows
      the last convolution it changes nothing, and others need it.
    mask: As for `heterofl`; 'batch' in the paper's code where labels are
      skewed.
    calibrate_batches: As for `heterofl`.
    views: Whether ensembles of each group's number of bases are evaluated too.
    tx: The server's optimiser, applied to the mean over trainers, with the
      options of `fedavg`.

  Returns:
    The algorithm.

  Raises:
    ValueError: If an option is out of range, groups hold different models, a
      budget affords no base, a base has no channel, the model of
      several bases has pretrained parameters, or the factor of `rescale` would
      reach the classifier in training only.
  """
  groups, local = federation.groups, federation.local
  one_of('mask', mask, MASKS)
  model, num_classes = groups[0].model, federation.num_classes
  at_least(1, num_bases=num_bases)
  if calibrate_batches is not None:
    at_least(1, calibrate_batches=calibrate_batches)
  budgets = group_shares('budget', {g.name: g.options for g in groups})
  afforded = {}
  for name, budget in budgets.items():
    try:
      afforded[name] = bases_of(budget, num_bases)
    except ValueError as e:
      raise ValueError(f'groups.{name}: {e}') from e
  if model.pretrained and num_bases > 1:
    raise ValueError(
        'SplitMix trains bases of a fraction of the width from the start, but '
        f'{model.name} has pretrained parameters of the full width; leave '
        'them out.'
    )
  unequal = rescale and not rescale_test and num_bases > 1
  if unequal and scaled_behind_norms(model):
    raise ValueError(
        f'SplitMix with rescale: in {model.name!r} no norm follows the last '
        'convolution, so its classifier would see other features in training '
        'than in testing; use norms (model.norm, model.final_norm), '
        'algorithm.rescale=False or algorithm.rescale_test=True.'
    )
  base = model
  if num_bases > 1:
    base = narrow(model, lambda k: k // num_bases)
  trained = without_running_stats(base)
  factor = num_bases if rescale else 1
  factor_of_test = factor if rescale_test else 1
  predict = functools.partial(_predict, base, factor_of_test)

  def init(key):
    # The first base is drawn with the key that FedAvg uses.
    keys = [key, *(jax.random.fold_in(key, b) for b in range(1, num_bases))]
    drawn = [draw_base(base, key, factor) for key in keys]
    bases = jax.tree.map(lambda *leaves: jnp.stack(leaves), *drawn)
    queue = jax.random.bits(key, dtype=jnp.uint32)
    return Server(bases, queue, init_server_step(tx, bases.params))

  def downlink(server, group, visit):
    first = first_choice(server.queue, visit.turn, num_bases)
    chosen = choose_bases(visit.key, first, num_bases, afforded[group.name])
    params = jax.tree.map(lambda leaf: leaf[chosen], server.bases.params)
    return chosen, params

  def client_update(group, client, sent, data, visit):
    del group
    chosen, start = sent
    owned = owned_labels(data, num_classes)
    loss_fn = base_loss(trained, local.task, factor, owned, mask)

    def train(params):  # The same key, so the same minibatches.
      end, _, metrics, num_steps = fit(
          loss_fn, local, Variables(params, {}), data, visit
      )
      # Delta_kb = n_k (theta_kb - theta_b)
      weight = jnp.where(num_steps > 0, data.size, 0).astype(jnp.float32)
      change = jax.tree.map(lambda a, b: weight * (a - b), end.params, params)
      return change, weight, metrics

    change, weight, metrics = jax.lax.map(train, start)
    place = functools.partial(_place, chosen, num_bases)
    weight = place(weight)
    change = Maybe(jax.tree.map(place, change), weight > 0)
    metrics = jax.tree.map(lambda m: jnp.mean(m, axis=0), metrics)
    return client, Uplink(Sent(change, weight)), metrics

  def server_update(server, received, turn):
    del turn
    change, weight = None, 0.0
    for group in groups:
      sent = received[group.name].summed
      new = sent.change.value
      change = new if change is None else jax.tree.map(jnp.add, change, new)
      weight = weight + sent.weight

    count = jax.tree.map(
        lambda x: jnp.broadcast_to(
            weight.reshape((-1,) + (1,) * (x.ndim - 1)), x.shape
        ),
        change,
    )
    # D_b = sum_k Delta_kb / sum_k n_k
    mean, some = mean_over_holders(change, count)
    # theta_b <- theta_b + D_b, or another step of the server.
    params, opt_state = server_step(
        tx, server.bases.params, server.opt_state, mean, some
    )
    bases = server.bases._replace(params=params)
    return server._replace(bases=bases, opt_state=opt_state), {}

  def calibrate(server, data):
    def statistics(params):
      with scaled_outputs(factor_of_test):
        return static_statistics(
            base,
            params,
            data,
            batch_size=local.batch_size,
            num_batches=calibrate_batches,
        )

    stats = jax.lax.map(statistics, server.bases.params)
    return server._replace(bases=server.bases._replace(stats=stats))

  def sent_shares(group, sizes):
    del sizes
    return 1.0, afforded[group.name] / num_bases

  return FederatedAlgorithm(
      init=init,
      init_client=lambda group, client_id, key: (),
      downlink=downlink,
      client_update=client_update,
      server_update=server_update,
      client_model=lambda server, client, group: server.bases,
      one_model=True,
      predict=functools.partial(predict, num_bases),
      views={
          f'bases_{m}': functools.partial(predict, m)
          for m in sorted({*afforded.values()} if views else ())
      },
      calibrate=calibrate if base.abstract_variables.stats else None,
      sent_shares=sent_shares,
      trained_models=lambda group: (base,) * afforded[group.name],
  )


def _place(chosen, num_bases, part):
  """Scatters [m, ...] of the chosen bases into [B, ...] zeros."""
  whole = jnp.zeros((num_bases, *part.shape[1:]), part.dtype)
  return whole.at[chosen].set(part)


def _predict(base, factor, number, group, bases, x):
  """Logits of the first `number` bases, averaged."""
  del group
  first = jax.tree.map(lambda leaf: leaf[:number], bases)
  with scaled_outputs(factor):
    logits = jax.lax.map(lambda one: base.apply(one, x)[0], first)
  # z = (1 / m) sum_b z_b
  return jnp.mean(logits, axis=0)
