"""Training on a set of examples: minibatch loops and the proximal term.

The same functions train clients on their own data, and servers on the public
set or on what they have received.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_het.data.federated import Batch, Examples
from fedjax_het.engine.rows import take_row
from fedjax_het.engine.task import Task
from fedjax_het.engine.types import LocalTraining, Turn, Visit
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.options import INT32_MAX

# The most entries in the permutations of all epochs, 64 MB as int32.
_ORDERS = 1 << 24


def steps_per_epoch(size, batch_size: int, drop_last: bool):
  """Number of minibatches in one pass over `size` examples ([] int32).

  With `drop_last` the last partial batch is dropped, unless it is the only
  batch. Without examples the number is 0.
  """
  if isinstance(size, int):  # NumPy: `jnp` would trace it.
    whole, least = size // batch_size, int(size > 0)
    return max(whole, least) if drop_last else -(-size // batch_size)
  size = jnp.asarray(size)
  length = jnp.full_like(size, batch_size)
  # `//` handles signs, which XLA would repeat in every kernel that uses it.
  whole = jax.lax.div(size, length)
  if drop_last:
    return jnp.maximum(whole, jnp.minimum(size, 1))
  return whole + jnp.minimum(jax.lax.rem(size, length), 1)


def shuffled_positions(key, data: Examples) -> jax.Array:
  """[M] int32: the examples' positions in random order, padding last.

  The order does not depend on how far the table is padded.
  """
  places = jnp.arange(data.length)
  score = jax.random.uniform(key, places.shape)
  return jnp.argsort(jnp.where(places < data.size, score, 2.0)).astype(
      jnp.int32
  )


def train_epochs(
    step_fn: Callable[..., tuple[Any, dict[str, jax.Array]]],
    carry: Any,
    data: Examples,
    key: jax.Array,
    *,
    epochs: int,
    batch_size: int,
    drop_last: bool = False,
    steps: int | None = None,
) -> tuple[Any, dict[str, jax.Array], jax.Array]:
  """Runs a step over shuffled minibatches.

  The number of steps depends on the number of examples. Under `vmap`, clients
  that have finished keep their carry unchanged.

  Args:
    step_fn: `(carry, batch, step, key) -> (carry, metrics)`; `step` is []
      int32, `metrics` maps names to float arrays. `batch.mask` is False for
      the padding of a partial batch.
    carry: The loop carry, a pytree.
    data: The examples.
    key: A random key.
    epochs: Passes over the data; with 0 nothing changes.
    batch_size: Examples a step, B.
    drop_last: Whether to leave out the last partial batch. Fewer examples than
      a batch still make one partial batch in each pass.
    steps: Number of minibatches, over as many epochs as needed; None for
      `epochs` epochs.

  Returns:
    The carry, the mean of the metrics over the steps (0 without any) and the
    number of steps, [] int32.

  Raises:
    ValueError: If `epochs` make more steps than an int32 holds.
  """
  order_key, step_key = jax.random.split(key)
  per_epoch = steps_per_epoch(data.size, batch_size, drop_last)

  def shuffle(epoch):
    return shuffled_positions(jax.random.fold_in(order_key, epoch), data)

  most = steps_per_epoch(data.length, batch_size, drop_last)
  if steps is None and epochs * most > INT32_MAX:
    raise ValueError(
        f'{epochs} epochs of {most} steps are more than {INT32_MAX} steps.'
    )
  if steps is None and not 0 < epochs * data.length <= _ORDERS:
    # Too large to draw at once, or none: one permutation per epoch.
    orders, num_steps = None, epochs * per_epoch
  elif steps is None:
    orders = jax.vmap(shuffle)(jnp.arange(epochs))
    num_steps = epochs * per_epoch
  else:
    orders, num_steps = None, jnp.where(per_epoch > 0, steps, 0)

  def order_at(step, order):
    """The order of examples at `step`, given that of the step before."""
    epoch = jax.lax.div(step, per_epoch)
    if orders is not None:
      return take_row(orders, epoch)
    begins = jax.lax.rem(step, per_epoch) == 0
    return jax.lax.cond(begins, shuffle, lambda epoch: order, epoch)

  step_fn = jax.jit(step_fn)  # Jitted, so that it is traced only once.

  def batch_of(order, step, key):
    first = jax.lax.rem(step, per_epoch) * batch_size
    place = first + jnp.arange(batch_size)
    mask = place < data.size
    last = order.shape[0] - 1
    return data.batch(order[jnp.minimum(place, last)], mask, key)

  def body(step, state):
    carry, totals, order = state
    order = order_at(step, order)
    augment_key, key = jax.random.split(jax.random.fold_in(step_key, step))
    batch = batch_of(order, step, augment_key)
    carry, metrics = step_fn(carry, batch, step, key)
    return carry, jax.tree.map(jnp.add, totals, metrics), order

  no_order = jnp.zeros(data.length, jnp.int32)

  def first_metrics(carry):
    step = jnp.int32(0)
    batch = batch_of(no_order, step, step_key)
    return step_fn(carry, batch, step, step_key)[1]

  shapes = jax.eval_shape(first_metrics, carry)
  totals = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  # A Python 0 is weakly typed, so that the step would be traced twice.
  carry, totals, _ = jax.lax.fori_loop(
      jnp.int32(0), num_steps, body, (carry, totals, no_order)
  )
  means = jax.tree.map(lambda t: t / jnp.maximum(num_steps, 1), totals)
  return carry, means, num_steps


def map_examples(
    fn: Callable[..., Any], data: Examples, batch_size: int = 256
):
  """Applies a function to all examples, a batch at a time.

  A batch holds examples that are evenly spaced in the table, so that one of a
  table sorted by class has all classes. Its padding is masked.

  Args:
    fn: `(batch) -> tree` with leaves [B, ...]. A row may depend on the other
      examples of the batch, such as by a norm, if `batch.mask` is respected.
    data: The examples; nothing is augmented.
    batch_size: Largest batch, which bounds memory.

  Returns:
    The tree with leaves [M, ...], in the order of the table. Rows of padding
    are arbitrary.
  """
  most = data.length
  most_steps = -(-most // batch_size)
  size = -(-most // most_steps)
  steps = jnp.maximum(-(-data.size // size), 1)

  def one(i):
    place = i + steps * jnp.arange(size)
    mask = (i < steps) & (place < data.size)
    return fn(data.batch(jnp.where(mask, place, 0), mask))

  rows = jax.lax.map(one, jnp.arange(most_steps))
  place = jnp.arange(most)
  return jax.tree.map(lambda a: a[place % steps, place // steps], rows)


def proximal_gradient(grads, params, anchor, mu: float):
  """Adds the gradient of FedProx's proximal term (mu/2) ||params - anchor||^2.

  It is exactly zero at the anchor, and omitted from the program if `mu` is 0.

  Args:
    grads: Gradient tree of the task loss.
    params: The trainable leaves, same tree.
    anchor: The received leaves, same tree.
    mu: Strength, the factor in the gradient (the papers print mu/2).

  Returns:
    grads + mu (params - anchor).

  References:
    Li et al., `Federated Optimization in Heterogeneous Networks
    <https://arxiv.org/abs/1812.06127>`_, MLSys 2020, Algorithm 2.
  """
  if mu == 0:
    return grads
  # g <- g + mu (w - a)
  return jax.tree.map(lambda g, w, a: g + mu * (w - a), grads, params, anchor)


def visit_examples(local: LocalTraining, size: int) -> int:
  """Examples that a client of `size` examples trains on in one visit."""
  if local.steps is not None:
    if local.drop_last or size <= local.batch_size:
      return local.steps * min(local.batch_size, size)
    # The last batch of an epoch is a partial one.
    epochs, more = divmod(local.steps, -(-size // local.batch_size))
    return epochs * size + more * local.batch_size
  if local.drop_last and size >= local.batch_size:
    size -= size % local.batch_size
  return local.epochs * size


def visit_steps(local: LocalTraining, sizes):
  """Local steps in one visit of clients with `sizes` examples (int32)."""
  per_epoch = steps_per_epoch(sizes, local.batch_size, local.drop_last)
  if local.steps is None:
    return local.epochs * per_epoch
  return jnp.where(per_epoch > 0, local.steps, 0)


def init_optimizer(local: LocalTraining, params):
  """The initial optimizer state, for methods that keep it between visits."""
  return local.optimizer(local.learning_rate(jnp.int32(0))).init(params)


def fit(
    loss_fn: Callable[..., tuple[jax.Array, tuple[Any, dict[str, jax.Array]]]],
    local: LocalTraining,
    start: Variables,
    data: Examples,
    visit: Visit | Turn,
    *,
    opt_state: Any = None,
    grad_hook: Callable[[Any, Any], Any] = lambda grads, params: grads,
) -> tuple[Variables, Any, dict[str, jax.Array], jax.Array]:
  """Minimises a loss over minibatches.

  Args:
    loss_fn: `(variables, batch, key) -> (loss, (stats, metrics))`, where
      `stats` are the new running statistics and `metrics` maps names to float
      arrays.
    local: Epochs or steps, batch size, optimiser and learning rate. Use
      `dataclasses.replace(local, epochs=...)` for a phase with other epochs.
    start: Variables at the beginning.
    data: The examples.
    visit: The client's `Visit`, or the server's `Turn`.
    opt_state: The optimizer state; None initialises a new one.
    grad_hook: `(grads, params) -> grads`, modifies the gradient.

  Returns:
    Variables at the end, the optimiser's state, the metrics and 'train_loss'
    as means over the steps, and the number of steps ([] int32).
  """

  def no_outputs(variables, batch, key):
    loss, (stats, metrics) = loss_fn(variables, batch, key)
    return loss, (stats, metrics, ())

  *trained, _ = fit_and_record(
      no_outputs,
      local,
      start,
      data,
      visit,
      record=(),
      add=lambda record, outputs, batch: record,
      opt_state=opt_state,
      grad_hook=grad_hook,
  )
  return tuple(trained)


def fit_and_record(
    loss_fn: Callable[..., Any],
    local: LocalTraining,
    start: Variables,
    data: Examples,
    visit: Visit | Turn,
    *,
    record: Any,
    add: Callable[[Any, Any, Batch], Any],
    opt_state: Any = None,
    grad_hook: Callable[[Any, Any], Any] = lambda grads, params: grads,
) -> tuple[Variables, Any, dict[str, jax.Array], jax.Array, Any]:
  """`fit` that also records what the training passes compute.

  Args:
    loss_fn: `(variables, batch, key) -> (loss, (stats, metrics, outputs))`;
      `outputs` is any tree, such as the logits of the batch.
    local: As for `fit`.
    start: As for `fit`.
    data: As for `fit`.
    visit: As for `fit`.
    record: The record before the first step, any tree.
    add: `(record, outputs, batch) -> record`, called after every step.
    opt_state: As for `fit`.
    grad_hook: As for `fit`.

  Returns:
    The results of `fit`, and the record.
  """
  tx = local.optimizer(local.learning_rate(visit.round_num))

  def objective(params, stats, batch, key):
    return loss_fn(Variables(params, stats), batch, key)

  def step(carry, batch, step_num, key):
    del step_num
    (params, stats), opt_state, record = carry
    (loss, (stats, metrics, outputs)), grads = jax.value_and_grad(
        objective, has_aux=True
    )(params, stats, batch, key)
    updates, opt_state = tx.update(grad_hook(grads, params), opt_state, params)
    params = optax.apply_updates(params, updates)
    metrics = dict(metrics, train_loss=loss)
    record = add(record, outputs, batch)
    return (Variables(params, stats), opt_state, record), metrics

  if opt_state is None:
    opt_state = tx.init(start.params)
  (end, opt_state, record), metrics, num_steps = train_epochs(
      step,
      (start, opt_state, record),
      data,
      visit.key,
      epochs=local.epochs,
      batch_size=local.batch_size,
      drop_last=local.drop_last,
      steps=local.steps,
  )
  return end, opt_state, metrics, num_steps, record


def model_loss(model: BlockModel, task: Task) -> Callable[..., Any]:
  """The task's loss of a whole model in training mode, as `fit` takes it."""

  def loss_fn(variables, batch, key):
    outputs, stats = model.apply(
        variables, batch.x, train=True, mask=batch.mask, key=key
    )
    return task.loss(outputs, batch.y, batch.mask), (stats, {})

  return loss_fn


def train_model(
    model: BlockModel,
    local: LocalTraining,
    start: Variables,
    data: Examples,
    visit: Visit | Turn,
    *,
    mu: float = 0.0,
    grad_hook: Callable[[Any, Any], Any] | None = None,
) -> tuple[Variables, dict[str, jax.Array], jax.Array]:
  """Trains a model on a client's data, with a new optimizer state.

  Args:
    model: The architecture.
    local: Epochs, batch size, optimiser and learning rate.
    start: Variables at the beginning.
    data: The examples.
    visit: The client's `Visit`, or the server's `Turn`.
    mu: Strength of a proximal term around `start`, see `proximal_gradient`.
    grad_hook: `(grads, params) -> grads`, modifies the gradient. It disables
      `local.drop_unused_weights`, because it reads whole leaves.

  Returns:
    Variables at the end, {'train_loss': mean over steps}, number of steps.
  """
  end, _, metrics, num_steps = fit_model(
      model, local, start, data, visit, mu=mu, grad_hook=grad_hook
  )
  return end, metrics, num_steps


def fit_model(
    model: BlockModel,
    local: LocalTraining,
    start: Variables,
    data: Examples,
    visit: Visit | Turn,
    *,
    opt_state: Any = None,
    mu: float = 0.0,
    grad_hook: Callable[[Any, Any], Any] | None = None,
) -> tuple[Variables, Any, dict[str, jax.Array], jax.Array]:
  """`train_model` with an optimizer state that is kept between visits.

  Args:
    model: As for `train_model`.
    local: As for `train_model`.
    start: As for `train_model`.
    data: As for `train_model`.
    visit: As for `train_model`.
    opt_state: The optimizer state, from `init_optimizer` or an earlier visit.
      It disables `local.drop_unused_weights`. None initialises a new one.
    mu: As for `train_model`.
    grad_hook: As for `train_model`.

  Returns:
    Variables at the end, the optimiser's state, {'train_loss': mean over
    steps}, number of steps.
  """
  trim = local.drop_unused_weights and grad_hook is None and opt_state is None
  begin = model.trim(start) if trim else start

  def hook(grads, params):
    if grad_hook is not None:
      grads = grad_hook(grads, params)
    return proximal_gradient(grads, params, begin.params, mu)

  end, opt_state, metrics, num_steps = fit(
      model_loss(model, local.task),
      local,
      begin,
      data,
      visit,
      opt_state=opt_state,
      grad_hook=hook,
  )
  return model.fill(end, start), opt_state, metrics, num_steps
