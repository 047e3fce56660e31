"""Eager local training in PyTorch, one client after another.

It imports only PyTorch, so that programs in other environments can use it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

Optimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class CrossEntropy(nn.Module):
  """Cross-entropy of a whole model."""

  def __init__(self, net: nn.Module):
    super().__init__()
    self.net = net

  def forward(self, x, y):
    return functional.cross_entropy(self.net(x), y)


class Data(NamedTuple):
  """Clients' examples: images [K, N, C, H, W] and labels [K, N].

  Lists of K tensors hold clients with different numbers of examples.
  """

  images: torch.Tensor | Sequence[torch.Tensor]
  labels: torch.Tensor | Sequence[torch.Tensor]


def train(
    loss: nn.Module,
    params: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    batch_size: int,
    epochs: int = 1,
) -> None:
  """Local training of one client, eagerly.

  Args:
    loss: Maps a batch to a scalar.
    params: Parameters to train.
    optimizer: Optimizer of these parameters.
    images: [N, C, H, W].
    labels: [N].
    batch_size: Examples per step.
    epochs: Passes over the examples.
  """
  for p in loss.parameters():
    p.requires_grad_(False)
  for p in params:
    p.requires_grad_(True)
  for _ in range(epochs):
    for place in torch.randperm(len(images)).split(batch_size):
      optimizer.zero_grad()
      loss(images[place], labels[place]).backward()
      optimizer.step()


def average_round(
    net: nn.Module,
    data: Data,
    batch_size: int,
    optimizer: Optimizer,
    epochs: int = 1,
) -> None:
  """A round of FedAvg with equal weights, one client after another.

  Args:
    net: The global model, changed in place.
    data: The clients' examples.
    batch_size: Examples per step.
    optimizer: Makes an optimizer for parameters.
    epochs: Local epochs.
  """
  params = list(net.parameters())
  start = [p.detach().clone() for p in params]
  total = [torch.zeros_like(p) for p in start]
  for images, labels in zip(*data, strict=True):
    with torch.no_grad():
      for p, s in zip(params, start, strict=True):
        p.copy_(s)
    train(
        CrossEntropy(net),
        params,
        optimizer(params),
        images,
        labels,
        batch_size,
        epochs,
    )
    with torch.no_grad():
      for t, p in zip(total, params, strict=True):
        t.add_(p)
  with torch.no_grad():
    for p, t in zip(params, total, strict=True):
      p.copy_(t / len(data.images))
