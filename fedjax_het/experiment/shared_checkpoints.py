"""Checkpoints that several processes write and read together.

Each process writes and reads the rows of its own devices. The files and
checksums are those that one process would write, so any number of processes can
resume the run.
"""

import pathlib
from typing import Any
import zlib

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_het.experiment import processes
from fedjax_het.experiment.checkpoints import (
  Checkpoints,
  check_names,
  check_notes,
  leaves,
)
from fedjax_het.renamed import current_paths


def combine(first: int, second: int, length: int) -> int:
  """CRC-32 of the concatenation of two byte strings.

  Args:
    first: CRC-32 of the first.
    second: CRC-32 of the second.
    length: Bytes of the second.

  Returns:
    The CRC-32 of both.
  """
  # Appending zero bytes changes a CRC linearly over GF(2). `images` are the
  # columns of that matrix; its square is for twice as many bytes.
  zero = zlib.crc32(b'\0')
  images = [zlib.crc32(b'\0', 1 << bit) ^ zero for bit in range(32)]

  def apply(crc):
    image = 0
    for bit in range(32):
      if crc >> bit & 1:
        image ^= images[bit]
    return image

  while length:
    if length & 1:
      first = apply(first)
    images = [apply(image) for image in images]
    length >>= 1
  return first ^ second


def _blocks(array: jax.Array) -> dict[int, tuple[int, int]]:
  """{first row: (CRC-32, bytes)} of the blocks of rows in this process."""
  blocks = {}
  for shard in array.addressable_shards:
    start = (shard.index[0].start or 0) if shard.index else 0
    if start not in blocks:
      data = np.ascontiguousarray(shard.data).reshape(-1).view(np.uint8)
      blocks[start] = zlib.crc32(data), data.size
  return blocks


def checksums(arrays: dict[str, jax.Array]) -> dict[str, int | None]:
  """CRC-32 of each array's bytes, wherever its rows are stored.

  Args:
    arrays: {name: array}, sharded by rows or replicated.

  Returns:
    {name: checksum}, None where two processes hold different values of the
    same rows.
  """
  gathered = processes.gather(
      [list(_blocks(array).items()) for array in arrays.values()]
  )
  sums = {}
  for i, name in enumerate(arrays):
    blocks, total = {}, 0
    for of_process in gathered:
      for start, block in of_process[i]:
        if blocks.setdefault(start, block) != block:
          total = None
    if total is not None:
      for start in sorted(blocks):
        total = combine(total, *blocks[start])
    sums[name] = total
  return sums


class SharedCheckpoints(Checkpoints):
  """`Checkpoints` of several processes, all of which make the same calls.

  `save` returns when the checkpoint is written, because a thread could not
  communicate with the other processes while the rounds run.
  """

  def save(self, step, state, notes, before=lambda: None) -> None:
    """See `Checkpoints.save`; an error is raised at once."""
    self._write(step, leaves(state), notes, before)

  def _checksums(self, arrays):
    return checksums(arrays)

  def _steps(self) -> list[int]:
    return processes.on_first(super()._steps)

  def _set_aside(self, step: int) -> None:
    mine = super()._set_aside
    processes.on_first(lambda: mine(step))

  def _read(self, step: int, like: Any, on_host: str | None):
    """Reads this process's part of the arrays and notes, without the others."""
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(),
        active_processes={jax.process_index()},
        barrier_sync_key_prefix=f'read{jax.process_index()}',
    )
    options = ocp.CheckpointManagerOptions(
        create=False,
        enable_async_checkpointing=False,
        multiprocessing_options=alone,
    )
    with ocp.CheckpointManager(self.folder, options=options) as reader:
      only = ocp.args.Composite(notes=ocp.args.JsonRestore())
      notes = reader.restore(step, args=only).notes
      check_notes(notes, step)
      wanted, sums = leaves(like), notes['checksums']
      paths = current_paths(sums, wanted)
      check_names(paths, wanted)
      target = {paths[name]: leaf for name, leaf in wanted.items()}
      only = ocp.args.Composite(state=ocp.args.StandardRestore(target))
      stored = reader.restore(step, args=only).state
    notes['checksums'] = {name: sums[path] for name, path in paths.items()}
    return {name: stored[path] for name, path in paths.items()}, notes

  def _attempt(self, step: int, like: Any, on_host: str | None):
    found = super()._attempt(step, like, on_host)
    reasons = processes.gather(found if isinstance(found, str) else None)
    for process, reason in enumerate(reasons):
      if reason:
        return f'process {process}: {reason}'
    arrays, notes = found
    stored = notes.pop('checksums')
    for name, value in checksums(arrays).items():
      if value is None or value != stored.get(name):
        return f'the checksum of {name} does not match'
    return _fill(like, arrays), notes


def _fill(like: Any, arrays: dict[str, jax.Array]) -> Any:
  """`like` with its leaves replaced; empty leaves are created."""

  def one(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if name in arrays:
      return arrays[name]
    nothing = np.zeros(leaf.shape, leaf.dtype)
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: nothing[index]
    )

  return jax.tree_util.tree_map_with_path(one, like)


def open_checkpoints(folder: pathlib.Path, keep: int) -> Checkpoints:
  """Opens the checkpoints of a run of one or several processes."""
  kind = Checkpoints if jax.process_count() == 1 else SharedCheckpoints
  return kind(folder, keep)
