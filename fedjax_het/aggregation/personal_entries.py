"""Personal entries inside shared tensors, as masks.

FedDPA and FedSelect train some entries of every tensor for their client and the
others for all. A mask M is a tree of bool, True for personal entries.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.engine.local import fit_model
from fedjax_het.engine.types import Group, LocalTraining
from fedjax_het.models.blocks import BlockModel, Variables


class PersonalModel(NamedTuple):
  """A client's model, with the server's beside it.

  Attributes:
    params: Parameters of the client's own model.
    stats: Its running statistics.
    shared: `Variables` of the server's model, for `predict_shared`.
  """

  params: Any
  stats: Any
  shared: Variables


def predict_shared(group: Group, model: PersonalModel, x) -> jax.Array:
  """Logits of the server's model; one of an algorithm's `views`."""
  return group.model.apply(model.shared, x)[0]


def blend(mask, own, shared):
  """M own + (1 - M) shared, entry by entry."""
  return jax.tree.map(jnp.where, mask, own, shared)


def fraction(mask) -> jax.Array:
  """[] float32, the share of the entries that are True."""
  leaves = jax.tree.leaves(mask)
  number = sum(jnp.sum(leaf, dtype=jnp.float32) for leaf in leaves)
  return number / sum(leaf.size for leaf in leaves)


def masked(
    tx: optax.GradientTransformation, mask
) -> optax.GradientTransformation:
  """An optimiser that updates only the entries where a mask is True.

  Gradients and updates of the others are set to 0, so that neither weight decay
  nor momentum changes them.
  """

  def keep(tree):
    return jax.tree.map(lambda m, x: jnp.where(m, x, 0.0), mask, tree)

  def update(grads, state, params=None):
    updates, state = tx.update(keep(grads), state, params)
    return keep(updates), state

  return optax.GradientTransformation(tx.init, update)


def fit_masked(
    model: BlockModel,
    local: LocalTraining,
    start: Variables,
    data,
    visit,
    mask,
    *,
    opt_state: Any = None,
    grad_hook=lambda grads, params: grads,
) -> tuple[Variables, Any, dict[str, jax.Array], jax.Array]:
  """Trains the entries where a mask is True; the others do not change.

  Args:
    model: The architecture.
    local: As for `fit_model`; `drop_unused_weights` is ignored.
    start: Variables at the beginning.
    data: `ClientData`.
    visit: The client's turn.
    mask: {block: tree of bool}. If no entry is True, no step is taken.
    opt_state: As for `fit_model`; None initialises a new one.
    grad_hook: As for `fit_model`.

  Returns:
    As `fit_model`.
  """
  some = jnp.any(jnp.stack([jnp.any(leaf) for leaf in jax.tree.leaves(mask)]))
  local = dataclasses.replace(
      local, optimizer=lambda lr, tx=local.optimizer: masked(tx(lr), mask)
  )
  data = data.replace(size=jnp.where(some, data.size, 0))
  return fit_model(
      model, local, start, data, visit, opt_state=opt_state,
      grad_hook=grad_hook,
  )  # fmt: skip
