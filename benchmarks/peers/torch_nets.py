"""The networks, augmentation and data of all programs in PyTorch.

It imports only PyTorch and NumPy, not this library.
"""

import functools

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks import torch_fedin
from benchmarks.peers import meter


class Inputs(nn.Module):
  """Counts training images and augments them.

  Attributes:
    images: Number of images on which this process has trained.
  """

  images = 0

  def __init__(self, augment: str):
    super().__init__()
    self.augment = augment

  def forward(self, x):
    if not self.training:
      return x
    Inputs.images += len(x)
    if self.augment != 'none':
      x = crop_flip(x)
    if self.augment == 'crop_flip_cutout':
      x = cut_out(x)
    return x


def crop_flip(x: torch.Tensor, pad: int = 4) -> torch.Tensor:
  """Random crop after zero padding, and horizontal flip, [B, C, H, W]."""
  num, _, height, width = x.shape
  x = functional.pad(x, (pad,) * 4)
  rows = torch.randint(0, 2 * pad + 1, (num, 1)) + torch.arange(height)
  cols = torch.randint(0, 2 * pad + 1, (num, 1)) + torch.arange(width)
  cols = torch.where(torch.rand(num, 1) < 0.5, cols.flip(1), cols)
  image = torch.arange(num)[:, None, None]
  x = x[image, :, rows[:, :, None], cols[:, None, :]]
  return x.permute(0, 3, 1, 2).contiguous()


def cut_out(x: torch.Tensor, side: int = 16) -> torch.Tensor:
  """Sets a square of every image [B, C, H, W] to zero."""

  def inside(size):
    low = torch.randint(0, size, (len(x), 1)) - side // 2
    place = torch.arange(size)
    return (place >= low) & (place < low + side)

  hole = inside(x.shape[2])[:, :, None] & inside(x.shape[3])[:, None, :]
  return x.masked_fill(hole[:, None], 0.0)


def _modules(kind: str, *numbers):
  if kind == 'conv':
    return nn.LazyConv2d(*numbers), nn.ReLU()
  if kind == 'pool':
    return (nn.MaxPool2d(2),)
  if kind == 'dropout':
    return (nn.Dropout(*numbers),)
  if kind == 'dense':
    return nn.Flatten(), nn.LazyLinear(*numbers), nn.ReLU()
  if kind == 'head':
    return nn.Flatten(), nn.LazyLinear(*numbers)
  blocks, num_classes, width = numbers
  net = torch_fedin.ResNet(blocks, 3, num_classes, width)
  return net.extractor, net.middle, net.classifier


def make(layers, input_shape, augment: str = 'none') -> nn.Sequential:
  """Builds a network.

  Args:
    layers: See `nets.layers_of`.
    input_shape: (height, width, channels).
    augment: 'none', 'crop_flip' or 'crop_flip_cutout', of training images.

  Returns:
    The network in training mode; the first module is `Inputs`.
  """
  modules = [m for layer in layers for m in _modules(*layer)]
  net = nn.Sequential(Inputs(augment), *modules).eval()
  height, width, channels = input_shape
  with torch.no_grad():
    net(torch.zeros(1, channels, height, width))  # Shapes of lazy layers.
  return net.train()


def nets(task) -> list[nn.Sequential]:
  """A network of each architecture of a task."""
  return [
      make(layers, task.input_shape, task.local['augment'])
      for layers in task.layers
  ]


def count(net: nn.Module) -> int:
  """The number of its parameters."""
  return sum(p.numel() for p in net.parameters())


def optimizer(task, params) -> torch.optim.Optimizer:
  """The clients' optimizer."""
  local = task.local
  if local['optimizer'] == 'adam':
    return torch.optim.Adam(
        params,
        lr=local['learning_rate'],
        weight_decay=local['weight_decay'],
        fused=True,
    )
  return torch.optim.SGD(
      params,
      lr=local['learning_rate'],
      momentum=local['momentum'],
      weight_decay=local['weight_decay'],
  )


@functools.cache
def clients(path: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
  """Images [N, C, H, W] float32 and labels [N] int64 of each client.

  Args:
    path: The task's file; a process reads it once.

  Returns:
    One pair per client.
  """
  task = meter.read(path)

  def tensors(images, labels):
    x = meter.normalised(task, images).transpose(0, 3, 1, 2)
    x = torch.from_numpy(np.ascontiguousarray(x))
    return x, torch.from_numpy(labels.astype(np.int64))

  return [tensors(*part) for part in meter.examples(task.data, task.parts)]
