"""A model's embedding, of which FedProto and Felo exchange means by class.

It is the input of the model's last block, the vector that the output layer
multiplies.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.engine.types import Federation
from fedjax_het.models.blocks import BlockModel, Variables


def embedding_width(federation: Federation, method: str) -> int:
  """d, the numbers in the input of the last block.

  Args:
    federation: The federation.
    method: The method's name, for the message.

  Returns:
    The width that all groups have.

  Raises:
    ValueError: If two groups differ.
  """
  widths = {g.name: math.prod(g.model.shapes[-2]) for g in federation.groups}
  (first, width), *others = widths.items()
  for name, other in others:
    if other != width:
      raise ValueError(
          f'{method} needs embeddings (inputs of the last block) of one width, '
          f'but {first} has {width} and {name} has {other}; choose models that '
          'agree.'
      )
  return width


def embed(
    model: BlockModel, variables: Variables, x, **options
) -> tuple[jax.Array, jax.Array, Any]:
  """Embeddings and logits.

  Args:
    model: The architecture.
    variables: Its variables.
    x: [B, ...], the inputs.
    **options: `train`, `mask` and `key` of `BlockModel.apply`.

  Returns:
    f(x) [B, d] and F(x) [B, C], both float32, and the running statistics.
  """
  last = len(model.blocks) - 1
  h, stats = model.apply(variables, x, stop=last, **options)
  logits, stats = model.apply(
      Variables(variables.params, stats), h, start=last, **options
  )
  z = h.reshape(len(h), -1).astype(jnp.float32)
  return z, logits.astype(jnp.float32), stats
