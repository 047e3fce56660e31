"""FedH2L's local step: a local and a global gradient that do not conflict."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.fedh2l.seeds import EMPTY, Seeds, draw_seeds
from fedjax_het.data.federated import InMemory
from fedjax_het.engine.distill import distillation
from fedjax_het.engine.local import map_examples, model_loss
from fedjax_het.engine.projection import project_gradient
from fedjax_het.engine.task import Task
from fedjax_het.engine.types import LocalTraining, Maybe
from fedjax_het.models.blocks import BlockModel, Variables

UPDATES = ('sum', 'alternate')


class Sent(NamedTuple):
  """The downlink, for K clients of S slots.

  `seeds.present` says what is sent now. A client has received the rest before
  and stored it, so it may read all of `seeds.value`.

  Attributes:
    seeds: `Maybe` of `Seeds` [K, S, ...].
    log_p: `Maybe` of [T, K S, C], log P_j on all seeds, with a row for each
      teacher (T = K), or with the owner of each seed as its teacher (T = 1).
  """

  seeds: Maybe
  log_p: Maybe


class Setting(NamedTuple):
  """The options of `fedh2l` that a step depends on."""

  distill_weight: float
  project: bool
  update: str


def log_posteriors(
    model: BlockModel, variables: Variables, seeds: Seeds
) -> Maybe:
  """log P_i: log softmax of a model on seeds, in inference mode.

  Args:
    model: The architecture.
    variables: Its variables.
    seeds: [M, ...].

  Returns:
    `Maybe` of [M, C]; the logarithm does not underflow.
  """

  def outputs(batch):
    real = batch.mask & (batch.y != EMPTY)
    logits, _ = model.apply(variables, batch.x, mask=real)
    return jax.nn.log_softmax(logits)

  examples = InMemory(*seeds, jnp.int32(len(seeds.y)))
  real = seeds.y != EMPTY
  rows = map_examples(outputs, examples)
  return Maybe(jnp.where(real[:, None], rows, 0.0), real)


def seed_loss(
    model: BlockModel, task: Task, sent: Sent, distill_weight: float
) -> Callable[..., Any]:
  """L_glob on a minibatch of the others' seeds.

  Args:
    model: The client's architecture.
    task: The task.
    sent: The downlink.
    distill_weight: lambda, the factor on the KL divergence.

  Returns:
    `(variables, index, weight, key) -> (loss, (stats, metrics))`, with `index`
    and `weight` of `draw_seeds`. The loss is 0 without a seed.
  """
  x, y = sent.seeds.value.flat()

  def loss_fn(variables, index, weight, key):
    z, stats = model.apply(
        variables, x[index], train=True, mask=weight > 0, key=key
    )

    def mean(values):
      total = jnp.sum(weight)
      values = jnp.where(weight > 0, values, 0.0)
      return jnp.sum(weight * values) / jnp.where(total > 0, total, 1.0)

    # KL(P_j || softmax f_i), the mean over the teachers that have sent P_j.
    known = sent.log_p.present[:, index]
    log_p = sent.log_p.value[:, index]
    gap = jax.vmap(distillation, in_axes=(None, 0))(z, log_p)
    gap = jnp.sum(jnp.where(known, gap, 0.0), axis=0)
    kl = mean(gap / jnp.maximum(jnp.sum(known, axis=0), 1))
    # L_glob = mean over j != i, over S_j, of CE + lambda KL.
    ce = mean(task.example_losses(z, y[index], weight > 0))
    metrics = dict(seed_loss=ce, distillation_loss=kl)
    return ce + distill_weight * kl, (stats, metrics)

  return loss_fn


def make_step(
    model: BlockModel,
    local: LocalTraining,
    tx: optax.GradientTransformation,
    sent: Sent,
    client_id: jax.Array,
    setting: Setting,
) -> Callable[..., Any]:
  """A local step, as `train_epochs` takes it.

  Args:
    model: The client's architecture.
    local: Local training.
    tx: The optimiser.
    sent: The downlink.
    client_id: [] int32, i.
    setting: The options.

  Returns:
    `((variables, opt_state), batch, step, key) -> (carry, metrics)`.
  """
  of_batch = model_loss(model, local.task)
  of_seeds = seed_loss(model, local.task, sent, setting.distill_weight)
  labels = sent.seeds.value.y
  num = min(local.batch_size, labels.size)

  def gradient(loss_fn, params, stats, *args):
    return jax.value_and_grad(
        lambda params: loss_fn(Variables(params, stats), *args), has_aux=True
    )(params)

  def descend(grads, params, opt_state):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def step(carry, batch, step_num, key):
    del step_num
    (params, stats), opt_state = carry
    draw_key, seed_key = jax.random.split(jax.random.fold_in(key, 1))
    # g_l: gradient of L_loc.
    (loss, (stats, _)), g_l = gradient(of_batch, params, stats, batch, key)
    if setting.update == 'alternate':
      params, opt_state = descend(g_l, params, opt_state)
    # g_g: gradient of L_glob.
    index, weight = draw_seeds(draw_key, labels, client_id, num)
    (_, (stats, metrics)), g_g = gradient(
        of_seeds, params, stats, index, weight, seed_key
    )
    # z = g_g, minus (<g_l, g_g> / ||g_l||^2) g_l where <g_l, g_g> < 0.
    z = project_gradient(g_g, g_l, scope='tree') if setting.project else g_g
    if setting.update == 'sum':
      params, opt_state = descend(
          jax.tree.map(jnp.add, g_l, z), params, opt_state
      )
    else:
      # Without seeds nothing moves a second time.
      params, opt_state = jax.tree.map(
          lambda new, old: jnp.where(weight[0] > 0, new, old),
          descend(z, params, opt_state),
          (params, opt_state),
      )
    conflict = optax.tree.vdot(g_l, g_g) < 0
    metrics = dict(
        metrics, train_loss=loss, conflicts=conflict.astype(jnp.float32)
    )
    return (Variables(params, stats), opt_state), metrics

  return step
