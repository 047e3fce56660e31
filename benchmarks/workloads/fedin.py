"""FedIN v2: two clients with one ResNet with the ImageNet stem, batch 16."""

from benchmarks import common, fedin_epoch, flops
from benchmarks.programs import Program
from benchmarks.workloads.base import (
    BACKENDS,
    ONE_CLIENT_AT_A_TIME,
    Case,
    references,
)
from fedjax_het.models.resnet import resnet

NUM_CLIENTS = 2
CASES = tuple(f'resnet{depth}' for depth in fedin_epoch.DEPTHS)


def stacked_epoch(
    depth: int, num_clients: int, num_steps: int, width: float = 1.0
) -> Program:
  """`fedin_epoch.torch_epoch` with all clients stacked."""
  from benchmarks import torch_training

  nets, pairs = fedin_epoch.torch_inputs(depth, num_clients, width)
  num_images = num_steps * common.BATCH_SIZE
  data = torch_training.noise(num_clients, num_images, fedin_epoch.INPUT_SHAPE)
  pairs = tuple(p.expand(num_clients, *p.shape) for p in pairs)

  def call():
    torch_training.fedin_epoch(
        nets, data, pairs, common.BATCH_SIZE, **fedin_epoch.RATES
    )

  return Program(call, num_clients * num_images)


def case(name: str, scale: str) -> Case:
  """One of `CASES`; `vmap` is timed only for the smallest.

  Quick runs omit the naive form, which compiles slowly.
  """
  depth = int(name.removeprefix('resnet'))
  steps = dict(full=24, quick=4, tiny=2)[scale]
  width = dict(full=1.0, quick=1 / 4, tiny=1 / 32)[scale]
  model = resnet(fedin_epoch.INPUT_SHAPE, 10, depth=depth, width=width)

  def form(make):
    return lambda steps: make(depth, NUM_CLIENTS, steps, width)

  backends = BACKENDS if name == 'resnet10' else ONE_CLIENT_AT_A_TIME
  # As many pairs as images pass through the intermediate layers.
  middle = 3 * flops.forward_flops(model, range(*model.cut))
  return Case(
      lambda: fedin_epoch.fedin_round(depth, NUM_CLIENTS, steps, width),
      NUM_CLIENTS * steps * common.BATCH_SIZE,
      flops.training_flops(model) + middle,
      references(
          naive=None if scale == 'quick' else form(fedin_epoch.naive_epoch),
          eager=form(fedin_epoch.torch_epoch),
          stacked=form(stacked_epoch),
          steps=steps,
      ),
      backends=backends if scale == 'full' else (),
      onednn=scale != 'quick',
  )
