"""Images per second of a FedIN (journal version) local epoch in three forms.

  python -m benchmarks.fedin_epoch [--quick] [--clients=N] [--output=FILE]

The forms take turns in one process; the minimum time of each counts:

  library: a whole round of this library's FedIN (its public algorithm and
    engine, backend 'auto'), with downlink, uplink and averaging.
  naive: the same local steps as `vmap` over clients of `scan` over steps, with
    the native convolutions and gradients of Flax and JAX.
  torch: the same local steps in eager PyTorch, one client after another, with
    fused Adam. Omitted if PyTorch is not installed.

The models are ResNets with the ImageNet stem on random 32x32x3 images, with
batch 16, Adam 1e-3, proximal term, IN loss on 16 pairs in every step, and
Z = G_in + G_loc / 2. All clients together take 64 steps; two clients take 32
each, as on 500 images. A cohort of ten with five architectures has two clients
per architecture; with one architecture it has ten (`--clients=10`). The naive
form runs only two steps per client, each of which takes seconds; grouped
convolutions make it slower with more clients. Let the machine be idle: other
load slows eager PyTorch far more than the other forms.
"""

import argparse

import jax
import numpy as np

from benchmarks import common, naive_fedin, programs
from fedjax_het.algorithms.fedin import fedin
from fedjax_het.models.resnet import NUM_BLOCKS, resnet

try:
  import torch

  from benchmarks import torch_fedin
except ImportError:
  torch = None

INPUT_SHAPE = (32, 32, 3)
DEPTHS = (10, 14, 18, 22, 26)
NUM_STEPS = 64
MU, LAM = 0.1, 1.0
RATES = dict(lr=common.LEARNING_RATE, mu=MU, lam=LAM)


def fedin_round(
    depth: int, num_clients: int, num_steps: int, width: float = 1.0
) -> programs.Round:
  """All clients have one ResNet; round 1 makes the pairs for round 2."""
  federation, data = common.make_federation(
      resnet(INPUT_SHAPE, 10, depth=depth, width=width),
      num_clients,
      num_steps * common.BATCH_SIZE,
  )
  algorithm = fedin(federation, mu=MU, rule='fixed', lam=LAM)
  return programs.Round(algorithm, federation, data, num_clients)


def library_epoch(depth: int, num_clients: int, num_steps: int):
  """One round of all clients."""
  task = fedin_round(depth, num_clients, num_steps)
  num_images = num_clients * num_steps * common.BATCH_SIZE
  return programs.library(task, 'auto', num_images)


def pair_shapes(depth: int, width: float = 1.0):
  """Shapes of s_in (height, width, channels) and s_out of one example."""
  model = resnet(INPUT_SHAPE, 10, depth=depth, width=width)
  return tuple(model.shapes[cut - 1] for cut in model.cut)


def naive_epoch(
    depth: int, num_clients: int, num_steps: int, width: float = 1.0
):
  """A few steps of all clients."""
  init, epoch = naive_fedin.make_epoch(
      NUM_BLOCKS[depth], INPUT_SHAPE, width=width, **RATES
  )
  rng = np.random.default_rng(0)  # Faster than proper initialisation.
  variables = jax.tree.map(
      lambda leaf: rng.normal(0, 0.05, (num_clients, *leaf.shape)).astype('f'),
      jax.eval_shape(init, jax.random.key(0)),
  )
  leading = (num_clients, num_steps, common.BATCH_SIZE)
  images = rng.normal(size=(*leading, *INPUT_SHAPE)).astype('f')
  labels = np.zeros(leading, np.int32)
  pairs = tuple(
      np.ones((num_clients, common.BATCH_SIZE, *shape), np.float32)
      for shape in pair_shapes(depth, width)
  )
  return programs.naive(
      epoch,
      jax.device_put((variables, images, labels, pairs)),
      num_clients * num_steps * common.BATCH_SIZE,
  )


def torch_inputs(depth: int, num_clients: int, width: float = 1.0):
  """One model per client, and a batch of pairs (s_in, s_out)."""
  (height, wide, channels), (features,) = pair_shapes(depth, width)
  pairs = (
      torch.rand(common.BATCH_SIZE, channels, height, wide),
      torch.rand(common.BATCH_SIZE, features),
  )
  nets = [
      torch_fedin.ResNet(NUM_BLOCKS[depth], INPUT_SHAPE[2], 10, width)
      for _ in range(num_clients)
  ]
  return nets, pairs


def torch_epoch(
    depth: int, num_clients: int, num_steps: int, width: float = 1.0
):
  """The clients one after another."""
  num_images = num_steps * common.BATCH_SIZE
  images = torch.randn(num_images, INPUT_SHAPE[2], *INPUT_SHAPE[:2])
  labels = torch.randint(0, 10, (num_images,))
  nets, pairs = torch_inputs(depth, num_clients, width)

  def call():
    for net in nets:
      torch_fedin.local_epoch(
          net, images, labels, pairs, common.BATCH_SIZE, **RATES
      )

  return programs.Program(call, num_clients * num_images)


def compare(depth: int, num_clients: int, num_steps: int, repetitions: int):
  """Seconds per image of every form, for one architecture.

  Args:
    depth: Depth of the ResNet.
    num_clients: Clients that hold it.
    num_steps: Local steps of each client; the naive form takes two.
    repetitions: Timed repetitions of every form, after an untimed one; the
      naive form has at most three.

  Returns:
    {form: seconds per image}.
  """
  forms = {
      'library': (library_epoch(depth, num_clients, num_steps), repetitions),
      'naive': (
          naive_epoch(depth, num_clients, 2), min(repetitions, 3)
      ),
  }  # fmt: skip
  if torch is not None:
    forms['torch'] = (
        torch_epoch(depth, num_clients, num_steps), repetitions
    )  # fmt: skip
  for program, _ in forms.values():
    program.call()
  seconds = common.interleave(
      {name: (program.call, times) for name, (program, times) in forms.items()}
  )
  return {
      name: seconds[name] / program.num_images
      for name, (program, _) in forms.items()
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true', help='ResNet10 only')
  parser.add_argument(
      '--clients', type=int, default=2, help='clients an architecture'
  )
  parser.add_argument('--output', help='JSON file to write')
  args = parser.parse_args()
  if not 1 <= args.clients <= NUM_STEPS // 2:
    parser.error(f'--clients must be from 1 to {NUM_STEPS // 2}.')
  depths = DEPTHS[:1] if args.quick else DEPTHS
  num_steps, repetitions = NUM_STEPS // args.clients, 2 if args.quick else 4
  if torch is None:
    print('PyTorch is not installed: its column is left out '
          '(`pip install torch==2.13.0`).')

  per_image = {}
  for depth in depths:
    per_image[f'resnet{depth}'] = compare(
        depth, args.clients, num_steps, repetitions
    )
    print(f'resnet{depth}: done', flush=True)
  if len(depths) > 1:
    per_image['all'] = {
        name: sum(row[name] for row in per_image.values()) / len(depths)
        for name in per_image['resnet10']
    }
  names = list(next(iter(per_image.values())))
  others = [name for name in names if name != 'library']
  rows = [
      [model]
      + [1 / row[name] for name in names]
      + [row[name] / row['library'] for name in others]
      for model, row in per_image.items()
  ]
  header = ['model'] + [f'{name}, images/s' for name in names]
  print(common.markdown(header + [f'library : {n}' for n in others], rows))
  suffix = '' if args.clients == 2 else f'_{args.clients}'
  suffix += '_quick' if args.quick else ''
  common.write(
      args.output or common.RESULTS / f'fedin_epoch{suffix}.json',
      {
          'images_per_second': {
              model: {name: 1 / row[name] for name in names}
              for model, row in per_image.items()
          },
          'batch_size': common.BATCH_SIZE,
          'clients': args.clients,
          'steps': num_steps,
          'repetitions': repetitions,
      },
  )


if __name__ == '__main__':
  main()
