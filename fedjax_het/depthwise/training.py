"""Sequential training of a client's stages; equal stages are scanned.

Consecutive stages with equal modules and shapes, such as the encoder blocks of
a transformer, form a run. Their units are stacked on a leading axis [n, ...],
and `jax.lax.scan` trains stage i of the run: it applies the frozen rows 0 ..
i - 1 to the input of the run, in a loop of i steps, trains row i and writes it
back. The head is passed from stage to stage.
"""

from collections.abc import Container, Sequence
import dataclasses
import itertools

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import Examples
from fedjax_het.depthwise.stages import (
  Stage,
  apply_blocks,
  stage_inputs,
  stage_loss,
)
from fedjax_het.engine.local import fit
from fedjax_het.engine.rows import put_row, take_row
from fedjax_het.engine.types import LocalTraining, Visit
from fedjax_het.models.blocks import Variables


def take(variables: Variables, names: Container[str]) -> Variables:
  """The blocks of these names."""
  return Variables(*({n: t[n] for n in t if n in names} for t in variables))


def merge(old: Variables, new: Variables) -> Variables:
  """`old`, with its blocks replaced by those of `new`."""
  return Variables(*({**a, **b} for a, b in zip(old, new, strict=True)))


def share_out(
    local: LocalTraining, num_stages: int, epochs_mode: str
) -> tuple[LocalTraining, ...]:
  """The local training of each stage.

  Args:
    local: Local training of a visit.
    num_stages: Number of stages.
    epochs_mode: 'per_stage' gives each stage all epochs or steps, 'split'
      divides them among the stages.

  Returns:
    One local training a stage.

  Raises:
    ValueError: If there are fewer epochs, or steps, than stages to split.
  """
  if epochs_mode == 'per_stage':
    return (local,) * num_stages
  name = 'epochs' if local.steps is None else 'steps'
  whole, rest = divmod(getattr(local, name), num_stages)
  if not whole:
    raise ValueError(
        f"epochs_mode='split' needs at least one of the {name} for each of "
        f'{num_stages} stages, got {getattr(local, name)}.'
    )
  return tuple(
      dataclasses.replace(local, **{name: whole + (j < rest)})
      for j in range(num_stages)
  )


def _follows(a: Stage, b: Stage) -> bool:
  """Whether b follows a and has equal modules and shapes."""

  def units(stage):
    inputs = (stage.model.input_shape, *stage.model.shapes)
    return [(stage.model.blocks[i].module, inputs[i]) for i in stage.trained]

  return (
      (a.model, a.head) == (b.model, b.head)
      and b.frozen == (*a.frozen, *a.trained)
      and 0 not in a.trained
      and units(a) == units(b)
  )


def runs(
    stages: Sequence[Stage], shares: Sequence[LocalTraining]
) -> tuple[tuple[int, int], ...]:
  """Longest half-open ranges of equal stages.

  Args:
    stages: The stages of a schedule.
    shares: The local training of each.

  Returns:
    The ranges, which cover all stages; a stage that differs from its neighbours
    is a range of one.
  """
  starts = [
      j
      for j in range(len(stages))
      if not j
      or shares[j - 1] != shares[j]
      or not _follows(stages[j - 1], stages[j])
  ]
  return tuple(itertools.pairwise((*starts, len(stages))))


def train_stages(
    stages: Sequence[Stage],
    shares: Sequence[LocalTraining],
    start: Variables,
    data: Examples,
    visit: Visit,
    *,
    scan: bool = False,
    cache_prefix: bool = False,
) -> tuple[Variables, dict[str, jax.Array], jax.Array]:
  """Trains the stages of a schedule in order, each with a fresh optimiser.

  Args:
    stages: The stages.
    shares: The local training of each.
    start: Variables of all their blocks.
    data: The client's examples.
    visit: The client's turn.
    scan: Whether runs of equal stages are scanned, see the module. The result
      is the same up to rounding, except that dropout masks differ.
    cache_prefix: Whether a stage computes its inputs once, see
      `stage_inputs`; stages are then not scanned.

  Returns:
    All variables at the end, the metrics of the last stage, and the number of
    steps of all stages ([] int32).
  """
  # Training splits a key in two, which equals folding in 0 and 1, so later
  # stages fold in 2, 3, ...
  keys = [
      jax.random.fold_in(visit.key, j + 1) if j else visit.key
      for j in range(len(stages))
  ]
  parts = [(j, j + 1) for j in range(len(stages))]
  if scan and not cache_prefix:
    parts = runs(stages, shares)
  end, inputs, num_steps = start, None, 0
  for j, stop in parts:
    stage, now = stages[j], visit._replace(key=keys[j])
    if stop - j > 1:
      end, metrics, steps = _scan_run(
          stages[j:stop], shares[j], end, data, visit, jnp.stack(keys[j:stop])
      )
      num_steps += steps
      continue
    if cache_prefix and stage.frozen:
      before = None if inputs is None else (stages[j - 1].frozen, inputs)
      inputs = stage_inputs(
          stage, end, data, jax.random.fold_in(visit.key, 2**31 - 1 - j),
          shares[j].batch_size, before,
      )  # fmt: skip
    cached = None if inputs is None else inputs.of_batch
    share = shares[j]
    loss_fn = stage_loss(share.task, stage, end, cached)
    part, _, metrics, steps = fit(loss_fn, share, stage.pick(end), data, now)
    end, num_steps = merge(end, part), num_steps + steps
  return end, metrics, num_steps


def _scan_run(stages, local, start, data, visit, keys):
  """`train_stages` of a run; `keys` is [n]."""
  first, names = stages[0], stages[0].model.block_names
  # Row i of a unit of the first stage is that unit of stage i.
  rows_of = {
      names[at]: [names[stage.trained[u]] for stage in stages]
      for u, at in enumerate(first.trained)
  }
  units = Variables(*(
      {
          name: jax.tree.map(lambda *rows: jnp.stack(rows), *(t[r] for r in of))
          for name, of in rows_of.items()
          if name in t
      }
      for t in start
  ))  # fmt: skip

  def body(carry, turn):
    units, head = carry
    i, key = turn

    def inputs(batch, key):
      """z_{j-1}: the output of the frozen rows 0 .. i - 1."""

      def unit(k, z):
        return apply_blocks(
            first.model, take_row(units, k), z, first.trained, batch.mask, key
        )[0]

      z = apply_blocks(
          first.model, start, batch.x, first.frozen, batch.mask, key
      )[0]
      return jax.lax.fori_loop(0, i, unit, z)

    part, _, metrics, steps = fit(
        stage_loss(local.task, first, start, inputs),
        local,
        merge(take_row(units, i), head),
        data,
        visit._replace(key=key),
    )
    units = put_row(units, i, take(part, rows_of))
    return (units, take(part, names[first.head :])), (metrics, steps)

  (units, head), (metrics, steps) = jax.lax.scan(
      body,
      (units, take(start, names[first.head :])),
      (jnp.arange(len(stages)), keys),
  )
  trained = Variables(*(
      {
          name: jax.tree.map(lambda leaf, i=i: leaf[i], t[unit])
          for unit, of in rows_of.items()
          if unit in t
          for i, name in enumerate(of)
      }
      for t in units
  ))  # fmt: skip
  end = merge(merge(start, trained), head)
  return end, jax.tree.map(lambda m: m[-1], metrics), jnp.sum(steps)
