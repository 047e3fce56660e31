"""XLA's planned memory of the training step of a stage.

It covers the arguments, outputs and temporary buffers of the compiled step on
the present backend, with stem, head, frozen blocks and optimiser. It exceeds
the paper's estimate if convolutions and their gradients need buffers for
slices, or if a stage contains the stem. Steps are compiled with XLA's own
convolutions, whichever library a run has: else a run would train other stages
where that library is not used.

Figures are cached in the folder of the compilation cache, if there is one
(`jax_compilation_cache_dir`), under a hash of the program, the backend, the
versions and XLA's options.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import tempfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import optax

from fedjax_het.data.federated import Batch
from fedjax_het.depthwise.memory import MB, Costs
from fedjax_het.depthwise.stages import (
  Stage,
  head_start,
  make_stages,
  stage_loss,
)
from fedjax_het.engine.types import CLASS, LocalTraining
from fedjax_het.models.blocks import BlockModel, Variables


class StepMemory(NamedTuple):
  """Memory that XLA plans for one training step, in bytes.

  Attributes:
    arguments: Variables, optimiser state and one batch.
    outputs: What the step returns.
    reused: Outputs that reuse the buffers of arguments.
    temporary: Temporary buffers of the step.
  """

  arguments: int
  outputs: int
  reused: int
  temporary: int

  @property
  def mb(self) -> float:
    """The total in MB."""
    total = self.arguments + self.outputs - self.reused + self.temporary
    return total / MB


def step_memory(
    stage: Stage, local: LocalTraining, label: jax.ShapeDtypeStruct = CLASS
) -> StepMemory:
  """Compiles the training step of a stage and returns its planned memory.

  The figures of a step that was compiled before are read from the cache.

  Args:
    stage: The stage.
    local: The optimiser and the batch size.
    label: See `Federation.label`.

  Returns:
    XLA's plan on the present backend, with its own convolutions.
  """
  model = dataclasses.replace(stage.model, conv_backend='xla')
  stage = stage._replace(model=model)
  whole = stage.model.abstract_variables
  part = stage.pick(whole)
  names = [stage.model.block_names[i] for i in stage.frozen]
  frozen = Variables(*({n: t[n] for n in names if n in t} for t in whole))

  def tx():
    return local.optimizer(local.learning_rate(jnp.int32(0)))

  def step(part, opt_state, frozen, batch, key):
    loss_fn = stage_loss(local.task, stage, frozen)
    (loss, (stats, _)), grads = jax.value_and_grad(
        lambda p: loss_fn(Variables(p, part.stats), batch, key), has_aux=True
    )(part.params)
    updates, opt_state = tx().update(grads, opt_state, part.params)
    params = optax.apply_updates(part.params, updates)
    return Variables(params, stats), opt_state, loss

  def batch(key):
    size = local.batch_size
    place = jnp.zeros(size, jnp.int32)
    mask = None if local.drop_last else jnp.ones(size, bool)
    x = jnp.zeros((size, *stage.model.input_shape))
    y = jnp.zeros((size, *label.shape), label.dtype)
    return Batch(x, y, mask, place), key

  lowered = jax.jit(step, donate_argnums=(0, 1)).lower(
      part,
      jax.eval_shape(lambda p: tx().init(p), part.params),
      frozen,
      *jax.eval_shape(batch, jax.random.key(0)),
  )
  path = _path(lowered.as_text())
  if (found := _read(path)) is not None:
    return found
  stats = lowered.compile().memory_analysis()
  found = StepMemory(
      int(stats.argument_size_in_bytes),
      int(stats.output_size_in_bytes),
      int(stats.alias_size_in_bytes),
      int(stats.temp_size_in_bytes),
  )
  _write(path, found)
  return found


def _path(program: str) -> pathlib.Path | None:
  """The file that caches a program's figures; None without a cache folder."""
  folder = jax.config.jax_compilation_cache_dir
  if not folder:
    return None
  device = jax.devices()[0]
  what = (
      program,
      jax.__version__,
      jaxlib.__version__,
      device.platform,
      device.device_kind,
      str(jax.config.read('jax_disable_most_optimizations')),
      os.environ.get('XLA_FLAGS', ''),
  )
  name = hashlib.sha256('\n'.join(what).encode()).hexdigest()
  return pathlib.Path(folder, 'step_memory', f'{name}.json')


def _read(path: pathlib.Path | None) -> StepMemory | None:
  if path is None:
    return None
  try:
    return StepMemory(*map(int, json.loads(path.read_text(encoding='utf-8'))))
  except (OSError, ValueError, TypeError):  # No file, or a damaged one.
    return None


def _write(path: pathlib.Path | None, found: StepMemory) -> None:
  if path is None:
    return
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        'w', dir=path.parent, delete=False, encoding='utf-8'
    ) as file:
      json.dump(found, file)
    os.replace(file.name, path)
  except OSError:  # It is computed again next time.
    pass


def measured_costs(
    model: BlockModel,
    local: LocalTraining,
    heads: str = 'shared',
    label: jax.ShapeDtypeStruct = CLASS,
) -> Costs:
  """XLA's planned memory of candidate stages; each is compiled on demand.

  Args:
    model: The whole model.
    local: The optimiser and the batch size.
    heads: See `make_stages`.
    label: See `Federation.label`.

  Returns:
    The costs, in MB.
  """
  num_units = head_start(model) - 1

  @functools.cache
  def span(first, stop):
    (stage,) = make_stages(model, [(first, stop)], heads=heads)
    return step_memory(stage, local, label).mb

  return Costs(span(0, num_units), span, num_units)
