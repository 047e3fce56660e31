"""Times the three matrix products of dense layers in XLA and eager PyTorch.

  python -m benchmarks.dense_products [--quick] [--output=FILE]

The layers are those of the vision transformers `vit_t16` and `vit_s8` on
batches of 16 images with 65 tokens. The products are the forward pass and the
gradients of the input and of the kernel, each alone, on all threads. XLA and
PyTorch (the extra `bench`) take turns; the minimum time counts. Let the machine
be idle.
"""

import argparse
from collections.abc import Callable
import os

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks import common

# (rows, inputs, outputs) of the layers: batch times tokens, and features.
LAYERS = (
    (1040, 192, 576),
    (1040, 192, 192),
    (1040, 192, 768),
    (1040, 768, 192),
    (1040, 384, 1536),
    (1040, 1536, 384),
)
PRODUCTS = {
    'forward': lambda x, w, dy: x @ w,
    'd_input': lambda x, w, dy: dy @ w.T,
    'd_weight': lambda x, w, dy: x.T @ dy,
}
# Products per timed call.
_TIMES = 20


def calls(
    layer: tuple[int, int, int], kind: str
) -> dict[str, Callable[[], None]]:
  """`_TIMES` products of a layer in each library.

  Args:
    layer: Of `LAYERS`.
    kind: A key of `PRODUCTS`.

  Returns:
    {library: a function without arguments}.
  """
  rows, inputs, outputs = layer
  rng = np.random.default_rng(0)
  arrays = [
      rng.normal(size=shape).astype(np.float32)
      for shape in ((rows, inputs), (inputs, outputs), (rows, outputs))
  ]
  ours = [jnp.asarray(array) for array in arrays]
  theirs = [torch.from_numpy(array) for array in arrays]
  product = PRODUCTS[kind]
  compiled = jax.jit(product)

  def xla():
    for _ in range(_TIMES):
      out = compiled(*ours)
    jax.block_until_ready(out)

  def eager():
    for _ in range(_TIMES):
      product(*theirs)

  return {'XLA': xla, 'PyTorch': eager}


def main() -> None:
  flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  flags.add_argument('--quick', action='store_true', help='one small layer')
  flags.add_argument('--output', help='JSON file to write')
  args = flags.parse_args()
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  layers = [(8, 4, 4)] if args.quick else LAYERS
  rates, rows = {}, []
  for layer in layers:
    for kind in PRODUCTS:
      both = calls(layer, kind)
      for call in both.values():
        call()
      seconds = common.interleave({name: (f, 8) for name, f in both.items()})
      operations = 2 * np.prod(layer) * _TIMES
      found = {name: operations / s / 1e9 for name, s in seconds.items()}
      rates[f'{layer} {kind}'] = found
      rows.append([layer, kind, *found.values()])
  header = ['layer', 'product', 'XLA, GFLOP/s', 'PyTorch, GFLOP/s']
  print(common.markdown(header, rows))
  suffix = '_quick' if args.quick else ''
  common.write(
      args.output or common.RESULTS / f'dense_products{suffix}.json',
      {'gflops': rates},
  )


if __name__ == '__main__':
  main()
