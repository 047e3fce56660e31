"""The entries that matter for a client, by its diagonal Fisher information."""

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import ClientData, FederatedData
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.static_norm import static_statistics
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.models.running_stats import with_running_stats


def own_statistics(
    model: BlockModel, local: LocalTraining, params, data: ClientData
):
  """Norm statistics over the examples of one client, {block: tree}."""
  one = FederatedData(
      data.images, data.labels, data.index[None], data.size[None],
      data.preprocess,
  )  # fmt: skip
  return static_statistics(model, params, one, batch_size=local.batch_size)


def fisher(
    model: BlockModel, task, local: LocalTraining, params, data: ClientData
):
  """The diagonal of the empirical Fisher information, in inference mode.

  Norms take the statistics of the client's examples, in batches of
  `local.batch_size`, whether the model keeps running statistics or not.

  Args:
    model: The architecture.
    task: Its `losses` are -log p(y | input).
    local: Local training.
    params: The parameters at which F is computed.
    data: The client's examples; nothing is augmented.

  Returns:
    F, a tree like the parameters: the mean over examples of squared gradients.
  """
  # A single example has no statistics of its own.
  model = with_running_stats(model)
  stats = {}
  if model.abstract_variables.stats:
    stats = own_statistics(model, local, params, data)

  def loss(params, i):
    batch = data.batch(i[None])
    outputs, _ = model.apply(Variables(params, stats), batch.x)
    return task.losses(outputs, batch.y)[0]

  def add(i, total):
    grads = jax.grad(loss)(params, i)
    return jax.tree.map(lambda t, g: t + jnp.square(g), total, grads)

  zeros = jax.tree.map(jnp.zeros_like, params)
  total = jax.lax.fori_loop(0, data.size, add, zeros)
  # F <- 1/n sum_i g_i^2.
  return jax.tree.map(lambda t: t / jnp.maximum(data.size, 1), total)


def personal_entries(information, threshold: float):
  """M: where F, scaled to [0, 1] in each tensor, exceeds tau.

  Args:
    information: F, {block: tree}.
    threshold: tau.

  Returns:
    {block: tree of bool}. In a constant tensor the scaled F is 0.
  """

  def mask(f):
    low, high = jnp.min(f), jnp.max(f)
    spread = jnp.where(high > low, high - low, 1.0)
    # (F - min F) / (max F - min F) > tau, without rounding errors above 1.
    return jnp.minimum((f - low) / spread, 1.0) > threshold

  return jax.tree.map(mask, information)
