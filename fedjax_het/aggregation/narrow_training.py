"""The client's part of width-slicing methods: training, upload, holders.

HeteroFL and FedRolex train a narrow model with the same three additions: a
Scaler, norms without running statistics and a masked loss. `slicing` defines
which entries a narrow model holds.

References:
  Diao et al., `HeteroFL <https://arxiv.org/abs/2010.01264>`_, ICLR 2021.
"""

import jax
import jax.numpy as jnp

from fedjax_het.aggregation.label_masks import masked_task, owned_labels
from fedjax_het.aggregation.slicing import class_leaves
from fedjax_het.data.federated import ClientData
from fedjax_het.engine.local import fit
from fedjax_het.engine.types import LocalTraining, Maybe, Visit
from fedjax_het.models.blocks import BlockModel, Variables
from fedjax_het.models.intercept import scaled_norm_inputs
from fedjax_het.models.running_stats import without_running_stats


def train_narrow(
    model: BlockModel,
    rate: float,
    local: LocalTraining,
    start,
    data: ClientData,
    visit: Visit,
    *,
    scaler: bool,
    mask: str,
):
  """Local training of a narrow model.

  Args:
    model: The narrow model; 'batch' norms take the statistics of the batch.
    rate: Its share of the channels.
    local: Local training.
    start: Its parameters, {block name: tree}.
    data: The client's examples.
    visit: The visit.
    scaler: Whether inputs of norms are multiplied by 1 / rate.
    mask: See `label_masks.masked_task`.

  Returns:
    The parameters at the end; [C] bool, the labels whose head rows the client
    trains (all of them unless `mask` is 'client'); metrics; the number of
    steps, [] int32.
  """
  model = without_running_stats(model)
  owned = owned_labels(data, model.num_classes)
  task = masked_task(local.task, mask, owned)

  def loss_fn(variables, batch, key):
    # Scaler: x <- x / rho in front of every norm.
    with scaled_norm_inputs(1 / rate if scaler else 1):
      logits, stats = model.apply(
          variables, batch.x, train=True, mask=batch.mask, key=key
      )
    return task.loss(logits, batch.y, batch.mask), (stats, {})

  end, _, metrics, num_steps = fit(
      loss_fn, local, Variables(start, {}), data, visit
  )
  rows = owned if mask == 'client' else jnp.ones_like(owned)
  return end.params, rows, metrics, num_steps


def weighted_change(model: BlockModel, start, end, weight, rows):
  """weight * (end - start), which is 0 in head rows that are not trained.

  Args:
    model: The narrow model.
    start: Parameters before training.
    end: Parameters after it.
    weight: [] float32, the client's coefficient in the mean.
    rows: [C] bool, as of `train_narrow`.

  Returns:
    A tree like `start`.
  """

  def of_leaf(before, after, of_classes):
    change = weight * (after - before)
    if not of_classes:
      return change
    return jnp.where(jnp.broadcast_to(rows, change.shape), change, 0.0)

  return jax.tree.map(of_leaf, start, end, class_leaves(model))


def mark_rows(change, of_classes, rows, present=None):
  """Marks what of a change is sent; of the head, only rows that are trained.

  Args:
    change: A tree of parameters' changes.
    of_classes: `class_leaves` of the model.
    rows: [C] bool, the labels whose head rows are sent.
    present: A tree of bool arrays like `change`, which of its entries can be
      sent; None for all.

  Returns:
    The tree with a `Maybe` for each leaf.
  """
  if present is None:
    present = jax.tree.map(lambda leaf: jnp.bool_(True), change)

  def marked(leaf, here, of_classes):
    if of_classes:
      here = here & jnp.broadcast_to(rows, leaf.shape)
    return Maybe(leaf, here)

  return jax.tree.map(marked, change, present, of_classes)


def holders(model: BlockModel, weight, row_weight):
  """sum_{k in H_j} w_k for every entry j of a narrow model's parameters.

  Args:
    model: The narrow model.
    weight: [] float32, the sum of its clients' weights.
    row_weight: [C] float32, the same sum over those that train each head row.

  Returns:
    A tree like the model's parameters.
  """
  return jax.tree.map(
      lambda leaf, of_classes: jnp.broadcast_to(
          row_weight if of_classes else weight, leaf.shape
      ),
      model.abstract_variables.params,
      class_leaves(model),
  )


def check_head_rows(model: BlockModel, mask: str) -> None:
  """Checks that the head rows of a label are known if they are masked.

  Args:
    model: The model.
    mask: See `label_masks.masked_task`.

  Raises:
    ValueError: If `mask` is 'client' and no layer is known as the classifier.
  """
  if mask == 'client' and not any(jax.tree.leaves(class_leaves(model))):
    raise ValueError(
        "mask='client' trains the classifier's rows of a client's own labels, "
        f'but in {model.name!r} no layer of the last block with parameters has '
        f"the outputs '*' and {model.num_classes} of them; declare it in "
        "slices, or set mask='batch' or 'none'."
    )
