"""Stages of depth-wise training: z_{j-1} | g_j | adapt | head.

Stage j of a schedule minimises the loss over the units g_j and a head,

  logits = head(adapt(z_j)),  z_j = f_{g_j}(stop_gradient(z_{j-1})),

where z_{j-1} is the output of the frozen blocks in front of g_j. Only g_j and
the head are differentiated, so no activation of the frozen blocks is stored for
a backward pass.

References:
  Zhang et al., `Memory-adaptive Depth-wise Heterogeneous Federated Learning
  <https://arxiv.org/abs/2303.04887>`_, Eq. 1.
"""

from collections.abc import Callable, Sequence
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.data.federated import Batch, Examples
from fedjax_het.engine.local import shuffled_positions
from fedjax_het.engine.task import Task
from fedjax_het.models.blocks import Block, BlockModel, Head, Variables
from fedjax_het.options import one_of

PARTIAL = ('frozen', 'bypass')
HEADS = ('shared', 'own')


def head_start(model: BlockModel) -> int:
  """Position of the first block of the head.

  Args:
    model: A model.

  Returns:
    Position of the first block whose output is a vector, which ends the
    convolutions or the encoder; that of the last block if there is none, or if
    this would leave no unit between stem and head, as in dense nets.
  """
  vectors = (i for i, shape in enumerate(model.shapes) if len(shape) == 1)
  first = next(vectors, 0)
  return first if first > 1 else len(model.blocks) - 1


def adapt(x: jax.Array, shape: Sequence[int]) -> jax.Array:
  """The parameter-free skip from a unit to the head.

  Args:
    x: [B, ..., C].
    shape: (..., C') of one example as the head takes it, C' >= C. To reduce n
      rows (and columns) to m, the rows floor(i n / m), i = 0 .. m - 1, are
      kept. Zero channels are added, half of them in front and half behind.

  Returns:
    [B, *shape]; `x` itself if it has that shape.

  Raises:
    ValueError: If the shapes have different ranks, or `shape` has more rows or
      fewer channels than `x`.
  """
  have, want = x.shape[1:], tuple(shape)
  if have == want:
    return x
  if (
      len(have) != len(want)
      or have[-1] > want[-1]
      or any(n < m for n, m in zip(have[:-1], want[:-1]))
  ):
    raise ValueError(
        f'An output of shape {have} cannot skip to a head that takes {want}: '
        'a skip drops rows and columns and adds channels, nothing else.'
    )
  for axis, (n, m) in enumerate(zip(have[:-1], want[:-1]), 1):
    if n % m == 0:
      x = jax.lax.slice_in_dim(x, 0, n, n // m, axis)
    else:
      x = jnp.take(x, jnp.arange(m) * n // m, axis)
  extra = want[-1] - have[-1]
  sides = (extra // 2, extra - extra // 2)
  return jnp.pad(x, (*((0, 0),) * len(want), sides))


class Stage(NamedTuple):
  """One stage of a schedule.

  Attributes:
    model: The client's model, or the part of it that ends in the stage's own
      head.
    frozen: Positions of the frozen blocks in front, ascending.
    trained: Positions of the blocks that are trained, ascending.
    head: Position of the first block of the head, which is trained too.
  """

  model: BlockModel
  frozen: tuple[int, ...]
  trained: tuple[int, ...]
  head: int

  @property
  def names(self) -> tuple[str, ...]:
    """Names of all blocks that are trained."""
    names = self.model.block_names
    return (*(names[i] for i in self.trained), *names[self.head :])

  @property
  def head_shape(self) -> tuple[int, ...]:
    """Shape of one example as the head takes it."""
    return self.model.shapes[self.head - 1]

  def pick(self, variables: Variables) -> Variables:
    """The part of `variables` that is trained."""
    return Variables(*({n: t[n] for n in self.names if n in t}
                       for t in variables))  # fmt: skip


def own_heads(model: BlockModel) -> dict[int, Head]:
  """m-FeDepth's heads: copies of the model's head behind its other units.

  A stage that does not end at the last unit trains one of them (section 4.1),
  and only the last stage trains the model's head. A copy has the modules of the
  model's head, for the unit's width; a norm before the mean is not followed by
  a ReLU, as in the authors' code.

  Args:
    model: The whole model.

  Returns:
    {position behind the unit: head}. The head's blocks are called
    '<unit>/<block>'.
  """
  return {end: _own_head(model, end) for end in range(2, head_start(model))}


def _own_head(model, end):
  unit, blocks = model.block_names[end - 1], []
  for name, module in model.blocks[head_start(model) :]:
    if getattr(module, 'use_relu', False):  # See `NormPool` of PreResNets.
      module = module.clone(use_relu=False)
    blocks.append(Block(f'{unit}/{name}', module))
  return Head(unit, tuple(blocks))


def make_stages(
    model: BlockModel,
    spans: Sequence[tuple[int, int]],
    *,
    heads: str = 'shared',
    partial: str = 'frozen',
) -> tuple[Stage, ...]:
  """Turns a packing of a model's units into stages.

  Args:
    model: The model.
    spans: Half-open ranges of units, ascending; unit 0 is block 1. Units in
      none of them are not trained.
    heads: 'shared', the model's head behind the skip, or 'own', see
      `own_heads`.
    partial: Treatment of units that are not trained. With 'frozen' they are
      applied as they are, and the stem is frozen if they follow it directly.
      With 'bypass' they are skipped, and the first stage trains the stem.

  Returns:
    One stage for each span. The stem is trained only in the first stage, and
    only if no frozen unit follows it there.

  Raises:
    ValueError: If an option is unknown, or shapes do not fit the skip to the
      head or the bypass.
  """
  one_of('heads', heads, HEADS)
  one_of('partial', partial, PARTIAL)
  head = head_start(model)
  covered = {u + 1 for span in spans for u in range(*span)}
  path = [
      i for i in range(head) if not i or partial == 'frozen' or i in covered
  ]
  for a, b in itertools.pairwise(path):
    if model.shapes[a] != model.shapes[b - 1]:
      raise ValueError(
          f"partial='bypass' cannot go from {model.block_names[a]}, whose "
          f'output is {model.shapes[a]}, to {model.block_names[b]}, which '
          f"takes {model.shapes[b - 1]}; use partial='frozen'."
      )
  own = own_heads(model) if heads == 'own' else {}
  headed = model.with_heads(*own.values())
  stages = []
  for start, stop in ((a + 1, b + 1) for a, b in spans):
    trained = tuple(range(start, stop))
    frozen = tuple(i for i in path if i < start)
    if not stages and frozen == (0,):
      trained, frozen = (0, *trained), ()
    if stop in own:
      ends_here = headed.chain(own[stop].name)
      stages.append(Stage(ends_here, frozen, trained, stop))
    else:
      stages.append(Stage(model, frozen, trained, head))
    jax.eval_shape(
        functools.partial(adapt, shape=stages[-1].head_shape),
        jax.ShapeDtypeStruct((1, *model.shapes[stop - 1]), jnp.float32),
    )
  return tuple(stages)


def apply_blocks(model, variables, x, positions, mask, key):
  """Applies blocks at ascending positions in training mode.

  Args:
    model: The model.
    variables: Variables with at least these blocks.
    x: [B, ...], the input of the first.
    positions: Of the blocks, ascending.
    mask: [B] bool, examples that count; None for all.
    key: A random key.

  Returns:
    The output, [B, ...], and the statistics, with those of the blocks updated.
  """
  stats = variables.stats
  for i in positions:
    x, stats = model.apply(
        Variables(variables.params, stats),
        x,
        start=i,
        stop=i + 1,
        train=True,
        mask=mask,
        key=key,
    )
  return x, stats


class Cached(NamedTuple):
  """Outputs of the frozen blocks for all of a client's examples.

  Attributes:
    rows: [R, ...], in the order in which they were computed. R is a multiple of
      the batch size; rows beyond the client's examples are padding.
    place: [M] int32, the row of each position in the client's table.
  """

  rows: jax.Array
  place: jax.Array

  def at(self, position: jax.Array) -> jax.Array:
    """The rows, [B, ...], of the examples at [B] positions."""
    row = self.place[position]
    return self.rows.at[row].get(mode='promise_in_bounds')

  def of_batch(self, batch: Batch, key: jax.Array) -> jax.Array:
    """The rows, [B, ...], of a batch; the `inputs` of `stage_loss`."""
    del key
    return self.at(batch.position)


def stage_loss(
    task: Task,
    stage: Stage,
    frozen: Variables,
    inputs: Callable[[Batch, jax.Array], jax.Array] | None = None,
) -> Callable[..., Any]:
  """The loss of a stage, as `fit` takes it.

  Norms of the frozen blocks use batch statistics, as those of the trained ones
  do; their running statistics, if any, are not updated.

  Args:
    task: The task.
    stage: The stage.
    frozen: Variables with at least the frozen blocks.
    inputs: `(batch, key) -> z_{j-1}` of the batch; None applies the frozen
      blocks to it.

  Returns:
    `(variables of the trained blocks, batch, key) -> (loss, (stats, {}))`.
  """

  def loss_fn(variables, batch, key):
    if inputs is None:
      z, _ = apply_blocks(
          stage.model, frozen, batch.x, stage.frozen, batch.mask, key
      )
    else:
      z = inputs(batch, key)
    z, stats = apply_blocks(
        stage.model,
        variables,
        jax.lax.stop_gradient(z),
        stage.trained,
        batch.mask,
        key,
    )
    logits, stats = apply_blocks(
        stage.model,
        Variables(variables.params, stats),
        adapt(z, stage.head_shape),
        range(stage.head, len(stage.model.blocks)),
        batch.mask,
        key,
    )
    return task.loss(logits, batch.y, batch.mask), (stats, {})

  return loss_fn


def stage_inputs(
    stage: Stage,
    variables: Variables,
    data: Examples,
    key: jax.Array,
    batch_size: int,
    before: tuple[tuple[int, ...], Cached] | None = None,
) -> Cached:
  """z_{j-1} of all of a client's examples, each computed once.

  They are computed in random batches and in training mode, as `stage_loss`
  does. With batch statistics, augmentation or dropout an example has one random
  draw of them for the whole stage, and for the stages that reuse its rows,
  instead of a new one every epoch. Otherwise the inputs are those of
  `stage_loss`.

  Args:
    stage: The stage.
    variables: Variables with at least the frozen blocks.
    data: The client's examples.
    key: A random key.
    batch_size: Examples at once.
    before: The frozen blocks of an earlier stage and its inputs, which are
      reused.

  Returns:
    The rows, [R, ...], and the row of each position.
  """
  done, start = ((), None) if before is None else before
  positions = [i for i in stage.frozen if i not in done]
  length = data.length
  order_key, key = jax.random.split(key)
  if start is None:
    order = shuffled_positions(order_key, data)
    place = jnp.argsort(order).astype(jnp.int32)
  else:
    order, place = None, start.place

  def inputs(i):
    begin = i * batch_size
    row = begin + jnp.arange(batch_size)
    mask = row < data.size
    augment_key, block_key = jax.random.split(jax.random.fold_in(key, i))
    if start is None:
      at = order[jnp.minimum(row, length - 1)]
      z = data.batch(at, mask, augment_key).x
    else:
      z = jax.lax.dynamic_slice_in_dim(start.rows, begin, batch_size)
    return apply_blocks(
        stage.model, variables, z, positions, mask, block_key
    )[0]

  def body(i, rows):
    return jax.lax.dynamic_update_slice_in_dim(
        rows, inputs(i), i * batch_size, 0
    )

  num_rows = -(-length // batch_size) * batch_size
  z = jax.eval_shape(inputs, 0)
  rows = jax.lax.fori_loop(
      0,
      -(-data.size // batch_size),
      body,
      jnp.zeros((num_rows, *z.shape[1:]), z.dtype),
  )
  return Cached(rows, place)
