"""FedIN's local step: a gradient of two losses on the intermediate layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.fedin import capture
from fedjax_het.algorithms.fedin.passes import (
    Features,
    feature_error,
    forward,
    in_loss,
)
from fedjax_het.engine.local import proximal_gradient
from fedjax_het.engine.projection import project_gradient
from fedjax_het.engine.task import Task
from fedjax_het.engine.types import Maybe
from fedjax_het.models.adapt import Adapted
from fedjax_het.models.blocks import BlockModel, Variables

RULES = ('fixed', 'exact', 'sequential')
SCOPES = ('leaf', 'tree')


class Setting(NamedTuple):
  """The options that a step depends on.

  Attributes:
    in_training: As for `fedin`.
    mu: As for `fedin`.
    rule: As for `fedin`.
    lam: As for `fedin`.
    scope: As for `fedin`.
    protect: Clipping and noise in the client's own passes.
    one_pass: Whether batch and pairs take one pass, see `takes_one_pass`, if
      the model's norms can.
    sizes: How many pairs a client uploads and receives.
    captured: Shapes of the pairs to keep from the training passes; None for
      `capture='final'`.
  """

  in_training: bool
  mu: float
  rule: str
  lam: float
  scope: str
  protect: Features
  one_pass: bool
  sizes: capture.Sizes
  captured: tuple[tuple[int, ...], ...] | None = None


class Carry(NamedTuple):
  """The state of the local steps.

  Attributes:
    variables: The client's model.
    opt_state: The optimiser's state.
    in_opt_state: That of the second step for `rule='sequential'`; else None.
    buffer: The pairs of the last steps for `capture='training'`; else None.
  """

  variables: Variables
  opt_state: Any
  in_opt_state: Any = None
  buffer: Maybe | None = None


def takes_one_pass(
    rule: str, lam: float, num_pairs: int, batch_size: int
) -> bool:
  """Whether one pass over batch and pairs gives Z.

  The fixed Z is (lam/2) times the gradient of L_loc + (2/lam) L_IN. L_IN does
  not change the gradients of extractor and classifier. Both parts of a batch
  must have the same length, so a step needs a whole batch of pairs.
  """
  return rule == 'fixed' and lam > 0 and num_pairs >= batch_size


def _takes_two_parts(model: BlockModel) -> bool:
  """Whether the norms of the intermediate layers take batches of two parts.

  A user's module may have a norm that does not know of them.
  """
  blocks = model.blocks[slice(*model.cut)]
  return not any(isinstance(block.module, Adapted) for block in blocks)


def make_step(
    model: BlockModel,
    task: Task,
    tx: optax.GradientTransformation,
    anchor: Any,
    pairs: Maybe,
    setting: Setting,
) -> Callable[..., tuple[Carry, dict[str, jax.Array]]]:
  """A local step, as `train_epochs` takes it.

  Args:
    model: The client's architecture.
    task: The task.
    tx: The optimiser.
    anchor: w_start, the parameters that the client has received.
    pairs: `Maybe` of `Pairs` that it has received.
    setting: The options.

  Returns:
    `(carry, batch, step, key) -> (carry, metrics)`, where carry is a `Carry`.
  """
  one_pass = setting.one_pass and _takes_two_parts(model)
  setting = setting._replace(one_pass=one_pass)

  def step(carry, batch, step_num, key):
    variables, opt_state, in_opt_state, buffer = carry
    key, in_key = jax.random.split(key)
    share = _share(pairs, step_num, setting) if setting.in_training else None
    grads, stats, captured, metrics = _gradient(
        model, task, variables, batch, (key, in_key), share, anchor, setting
    )
    updates, opt_state = tx.update(grads, opt_state, variables.params)
    params = optax.apply_updates(variables.params, updates)
    if setting.in_training and setting.rule == 'sequential':
      params, in_opt_state, metrics['in_loss'] = _second_step(
          model, tx, Variables(params, stats), in_opt_state, share, in_key
      )
    if buffer is not None:
      buffer = capture.write(buffer, captured, batch.mask, step_num)
    return Carry(Variables(params, stats), opt_state, in_opt_state, buffer), (
        metrics
    )

  return step


def _share(pairs: Maybe, step_num, setting: Setting) -> Maybe:
  """The pairs of one step, [B, ...]; steps take the batches in turn."""
  num_chunks, batch_size = setting.sizes
  begin = (step_num % num_chunks) * batch_size
  return jax.tree.map(
      lambda a: jax.lax.dynamic_slice_in_dim(a, begin, batch_size), pairs
  )


def _gradient(model, task, variables, batch, keys, share, anchor, setting):
  """G_loc, with Z on the intermediate layers unless `rule='sequential'`.

  Returns:
    The gradient, the running statistics, the pairs of the pass, the metrics.
  """
  (params, old_stats), (key, in_key) = variables, keys
  received = share if setting.one_pass else None
  grads, (stats, captured, metrics) = jax.grad(
      lambda params: _local_loss(
          model, task, Variables(params, old_stats), batch, key, received,
          setting,
      ),
      has_aux=True,
  )(params)  # fmt: skip
  # G_loc = grad CE + mu (w - w_start).
  grads = proximal_gradient(grads, params, anchor, setting.mu)
  if setting.one_pass:
    # Z = (lam/2) (G_loc + (2/lam) G_in) = G_in + (lam/2) G_loc.
    factor = jnp.where(jnp.any(received.present), setting.lam / 2, 1.0)
    z = {
        name: jax.tree.map(lambda g: factor * g, grads[name])
        for name in model.intermediate
    }
    grads = {**grads, **z}
  elif setting.in_training and setting.rule != 'sequential':
    metrics['in_loss'], g_in = _in_gradient(model, variables, share, in_key)
    g_loc = {name: grads[name] for name in g_in}
    # fixed: Z = G_in + (lam/2) G_loc;
    # exact: Z = G_in, minus (b/a) G_loc where <G_in, G_loc> < 0.
    z = project_gradient(
        g_in, g_loc, rule=setting.rule, lam=setting.lam, scope=setting.scope
    )
    # Without pairs Z = G_loc.
    grads = {**grads, **_select(jnp.any(share.present), z, g_loc)}
  return grads, stats, captured, metrics


def _local_loss(model, task, variables, batch, key, received, setting):
  """CE, plus (2/lam) L_IN if there are `received` pairs."""
  logits, captured, stats, out = forward(
      model, variables, batch.x, batch.mask, key, setting.protect, received
  )
  loss = total = task.loss(logits, batch.y, batch.mask)
  metrics = {'train_loss': loss}
  if received is not None:
    (_, s_out), present = received
    metrics['in_loss'] = feature_error(out, s_out, present)
    total = loss + (2 / setting.lam) * metrics['in_loss']
  return total, (stats, captured, metrics)


def _in_gradient(model, variables, share, key):
  """L_IN and G_in = grad mean (f(s_in; w_in) - s_out)^2, for `in` alone."""
  params, stats = variables
  pairs, mask = share
  return jax.value_and_grad(
      lambda middle: in_loss(
          model, Variables({**params, **middle}, stats), pairs, mask, key
      )
  )({name: params[name] for name in model.intermediate})


def _second_step(model, tx, variables, opt_state, share, key):
  """'w/o Opt': a step with G_in on the intermediate layers alone.

  Returns:
    The parameters, the optimiser's state, L_IN.
  """
  params = variables.params
  loss, g_in = _in_gradient(model, variables, share, key)
  middle = {name: params[name] for name in g_in}
  updates, moved = tx.update(g_in, opt_state, middle)
  stepped = optax.apply_updates(middle, updates)
  # Without pairs nothing moves.
  some = jnp.any(share.present)
  params = {**params, **_select(some, stepped, middle)}
  return params, _select(some, moved, opt_state), loss


def _select(condition, new, old):
  return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
