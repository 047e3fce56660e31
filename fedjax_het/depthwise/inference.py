"""Block-by-block inference for devices with less memory than the model.

It applies each block to all examples, in batches, and stores the outputs on
disk for the next block.

References:
  Zhang et al., `Memory-adaptive Depth-wise Heterogeneous Federated Learning
  <https://arxiv.org/abs/2303.04887>`_, depth-wise inference.
"""

from collections.abc import Callable
import functools
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.models.blocks import BlockModel, Variables


@functools.partial(jax.jit, static_argnames=('model', 'position'))
def _apply_block(model, position, variables, x):
  return model.apply(variables, x, start=position, stop=position + 1)[0]


def blockwise_logits(
    model: BlockModel,
    variables: Variables,
    images: np.ndarray,
    preprocess: Callable[..., jax.Array] = jnp.asarray,
    *,
    batch_size: int = 500,
    folder: str | os.PathLike | None = None,
) -> np.ndarray:
  """The logits of a whole data set with one block in memory at a time.

  At any time the device holds one block's parameters and one batch of its
  inputs and outputs; the disk holds two blocks' outputs for all examples.

  Args:
    model: The model.
    variables: Its variables, preferably on the host: each block's are put on
      the device when they are needed.
    images: [N, ...] inputs of `preprocess`, N at least 1.
    preprocess: Maps a batch of images to model inputs.
    batch_size: Examples at once. Norms without running statistics use those of
      the batch, so that the result depends on it; the last batch is padded with
      the first examples, as in `engine.evaluate`.
    folder: Parent of a temporary folder for the activations, removed at the
      end; None means the system's.

  Returns:
    [N, C] float32.

  Raises:
    ValueError: If there is no image, or the batch size is below 1.
  """
  num = len(images)
  if num < 1 or batch_size < 1:
    raise ValueError(
        'Inference needs at least one image and a batch_size of at least 1, '
        f'got {num} and {batch_size}.'
    )
  batch_size = min(batch_size, num)
  starts = range(0, num, batch_size)

  def read_images(start):
    return preprocess(images[np.arange(start, start + batch_size) % num])

  read, old = read_images, None
  with tempfile.TemporaryDirectory(dir=folder) as temporary:
    for position, name in enumerate(model.block_names):
      part = Variables(*({name: t[name]} if name in t else {}
                         for t in variables))  # fmt: skip
      path = pathlib.Path(temporary) / f'{position}.npy'
      rows = len(starts) * batch_size
      out = np.lib.format.open_memmap(
          path, 'w+', np.float32, (rows, *model.shapes[position])
      )
      for i in starts:
        y = _apply_block(model, position, part, read(i))
        out[i : i + batch_size] = np.asarray(y)
      if old is not None:
        old.unlink()
      old = path
      read = functools.partial(_rows, out, batch_size)
    return np.array(out[:num])


def _rows(array, batch_size, start):
  return jnp.asarray(array[start : start + batch_size])
